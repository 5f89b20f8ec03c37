"""What the worker's socket does with grammars that are compiled, cannot be, or are not wanted any more."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from raw_worker import Client

from penstock.clock import SystemClock
from penstock.engine.mailbox import Aborted, Mailbox, Submitted, failed_by
from penstock.engine.serve_socket import ServerLimits, WorkerServer
from penstock.errors import InvalidRequest, WorkerUnavailable
from penstock.protocol.address import UnixAddress
from penstock.protocol.worker import (
    AbortRequest,
    Loading,
    ModelInfo,
    Output,
    Ping,
    Pong,
    Ready,
    RequestFinished,
    Stats,
    StepOutput,
    Submit,
)
from penstock.protocol.worker_parts import Grammar
from penstock.types import FinishReason, RequestId, SamplingParams

INFO = ModelInfo(
    model="m", architecture="a", dtype="float32", num_parameters=1, vocab_size=9, max_model_len=9,
    num_blocks=9, block_tokens=16, max_running=4,
)  # fmt: skip
STATS = Stats(step=1, running=0, waiting=0, blocks_total=9, blocks_used=0, blocks_cached=0)


class Made(str):
    """What a grammar was compiled to, and the bound that a request put on its reasoning."""

    def bounded(self, grammar: Grammar) -> tuple[str, int | None]:
        return str(self), grammar.begins_within


class Compiler:
    """Every grammar is on its way until the test says what comes of it."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []
        self.num_cancelled = 0
        self.known: object = None

    def cached(self, _tenant: bytes, _grammar: Grammar) -> object:
        return self.known

    def compile(self, _tenant: bytes, _grammar: Grammar) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    def cancel(self, _tenant: bytes, _grammar: Grammar) -> None:
        self.num_cancelled += 1


class Worker:
    """The server alone: its mailbox is read here."""

    def __init__(self, place: Path) -> None:
        self.compiler, self.mailbox = Compiler(), Mailbox()
        address = UnixAddress(str(place / "w.sock"))
        self.server = WorkerServer(address, self.mailbox, ServerLimits(1 << 20, 8), SystemClock())
        self.server.grammars = self.compiler  # pyright: ignore[reportAttributeAccessIssue]
        self.server.start()
        self.server.announce(Ready(INFO))
        self.client = Client(address)
        while not isinstance(self.client.receive(), Ready):
            pass

    def ask(self, name: str) -> None:
        grammar = Grammar(form=b'{"regex": "a"}', begins_within=7)
        self.client.send(
            Submit(request_id=RequestId(name), prompt=b"", sampling=SamplingParams(), grammar=grammar)
        )
        self.settle()

    def settle(self) -> None:
        """All that was sent before has been read."""
        self.client.send(Ping())
        assert isinstance(self.client.receive(), Pong)

    def end(self) -> RequestFinished:
        message = self.client.receive()
        assert isinstance(message, StepOutput)
        ((finish,),) = [[each.finish] for each in message.outputs]
        assert finish is not None
        return finish

    def stays_awake(self) -> int:
        """Whether it would not fall asleep now: for how many requests."""
        return self.server.stop_taking(Loading("falling asleep"))

    def mail(self) -> list[object]:
        return list(self.mailbox.take(wait=False))


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.client.close()
    worker.server.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("no", param="grammar.json"), "InvalidRequest"),
        (WorkerUnavailable("no process"), "WorkerUnavailable"),
        (OSError("no memory"), "EngineFault"),
        (ValueError("a bug"), "EngineFault"),
    ],
)
def test_what_cannot_be_compiled_ends_one_request(worker: Worker, error: Exception, kind: str) -> None:
    worker.ask("a")
    worker.compiler.futures[0].set_exception(error)
    finish = worker.end()
    assert (finish.reason, finish.error_kind) == (FinishReason.ERROR, kind)
    assert finish.param == ("grammar.json" if kind == "InvalidRequest" else None)
    worker.ask("b")
    worker.compiler.futures[1].set_result(Made("made"))
    (mail,) = worker.mailbox.take(wait=True)
    assert isinstance(mail, Submitted)
    assert mail.grammar == ("made", 7)


def test_no_worker_falls_asleep_under_a_request_that_has_not_reached_its_engine(worker: Worker) -> None:
    worker.ask("compiled")
    assert worker.stays_awake() == 1
    worker.compiler.futures[0].set_result(Made("made"))
    worker.settle()
    assert worker.stays_awake() == 1, "it is in the mailbox"
    ended = Output(RequestId("compiled"), (), None, failed_by(InvalidRequest("no")))
    worker.server.publish(1, {1: [ended]}, STATS)
    worker.client.until_kind(StepOutput)
    assert worker.stays_awake() == 0
    worker.client.until_kind(Loading)
    worker.client.send(Submit(request_id=RequestId("late"), prompt=b"", sampling=SamplingParams()))
    refused = worker.client.last("late").finish
    assert refused is not None
    assert refused.error_kind == "WorkerUnavailable", "from then on none is taken"


def test_a_refusal_that_is_known_is_told_at_once(worker: Worker) -> None:
    worker.compiler.known = InvalidRequest("known", param="grammar")
    grammar = Grammar(form=b'{"regex": "("}')
    worker.client.send(
        Submit(request_id=RequestId("a"), prompt=b"", sampling=SamplingParams(), grammar=grammar)
    )
    assert worker.end().error == "known"
    assert not worker.compiler.futures


def test_an_aborted_request_is_cancelled_and_its_name_may_be_used_again(worker: Worker) -> None:
    worker.ask("a")
    worker.client.send(AbortRequest((RequestId("a"),)))
    assert worker.end().reason is FinishReason.ABORT
    assert worker.compiler.num_cancelled == 1
    worker.ask("a")
    worker.compiler.futures[0].set_result(Made("late"))
    worker.compiler.futures[1].set_result(Made("made"))
    (mail,) = worker.mailbox.take(wait=True)
    assert isinstance(mail, Submitted)
    assert mail.grammar == ("made", 7)
    worker.settle()
    assert not worker.mail()


def test_a_connection_that_is_lost_cancels_what_it_waits_for(worker: Worker) -> None:
    worker.ask("a")
    worker.client.close()
    (mail,) = worker.mailbox.take(wait=True)
    assert isinstance(mail, Aborted)
    worker.client = Client(worker.server.address)
    while not isinstance(worker.client.receive(), Ready):
        pass
    assert worker.server.num_requests == 0
    assert worker.compiler.num_cancelled == 1

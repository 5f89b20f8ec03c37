"""Rows that speculate, and whose worker is lost or drains in their middle: other workers, which speculate
too, go on from the tokens sent, and the client sees the answer of one worker without drafts, to the last
token.
"""

from array import array
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from engine_driver import Driver
from knowing_proposer import KnowingProposer
from msgspec.structs import replace

from penstock.backends.base import Delta, Finish, GenerateRequest, TextLogprob
from penstock.backends.engine.stream import EngineStream
from penstock.clock import SystemClock
from penstock.errors import StreamBroken
from penstock.policy.request import continued
from penstock.protocol.worker import Submit
from penstock.types import FinishReason, RequestId, SamplingParams, Usage

MAX_TOKENS = 90
COPIED = (7, 3, 9, 4, 12, 5) * 6


def requests_of(**how: Any) -> list[GenerateRequest]:
    """A greedy one, and one that is drawn as `how` says. A third would get no drafts: a step has 32, and two
    rows take 16 each where all are worth it.
    """
    sampling = (
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        SamplingParams(temperature=0.9, seed=5, logprobs=2, max_tokens=MAX_TOKENS, **how),
    )
    return [
        GenerateRequest(
            request_id=RequestId(f"r{i}"), prompt_token_ids=(*COPIED, 20 + i, *COPIED), sampling=each
        )
        for i, each in enumerate(sampling)
    ]


FREE, FEW = requests_of(), requests_of(allowed_token_ids=(3, 4), frequency_penalty=0.1)
"""Of so few tokens n-grams guess some right at any temperature; a model guesses from all of them."""


class Client:
    """Hears one stream, whichever workers give it."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TextLogprob] = []
        self.ends: list[Finish] = []

    def on_delta(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def on_finish(self, finish: Finish) -> None:
        self.ends.append(finish)

    @property
    def usage(self) -> Usage:
        return reduce(continued, [end.usage for end in self.ends])


class Worker:
    """An engine, with the gateway's ends of its streams."""

    def __init__(self, path: Path, **config: object) -> None:
        self.driver = Driver(path, **config)
        self.streams: dict[RequestId, EngineStream] = {}
        self.accepted: dict[RequestId, int] = {}
        """Drafts of each row here."""

    def start(self, requests: Sequence[GenerateRequest], clients: Sequence[Client]) -> None:
        self.accepted = dict.fromkeys((each.request_id for each in requests), 0)
        for request, client in zip(requests, clients, strict=True):
            message = Submit(
                request_id=request.request_id,
                prompt=array("i", request.prompt_token_ids).tobytes(),
                resumed=array("i", request.resumed).tobytes(),
                sampling=request.sampling,
            )
            self.driver.core.submit(0, message, 0)
            self.streams[request.request_id] = EngineStream(
                request, client, byte_tokenizer(), SystemClock(), self._leave
            )

    def step(self) -> None:
        for output in self.driver.core.step().get(0, []):
            if (stream := self.streams.get(output.request_id)) is not None:
                self.accepted[output.request_id] = output.drafts[0]
                stream.push(output)

    def finish(self) -> None:
        while self.driver.core.has_work:
            self.step()

    def give_up(self, how: str) -> None:
        """Its streams end here: it is gone, or it drains and is told that they left."""
        for stream in list(self.streams.values()):
            if how == "lost":
                stream.break_off("it is gone")
            else:
                stream.abort()

    def _leave(self, request_id: RequestId, tell_worker: bool) -> None:
        del self.streams[request_id]
        if tell_worker:
            self.driver.core.abort(0, (request_id,))


@pytest.fixture(scope="module", params=["ngram", "model", "sometimes wrong"])
def kind(request: pytest.FixtureRequest) -> str:
    """What guesses."""
    return request.param


@pytest.fixture(scope="module")
def unmoved(pair: tuple[Path, Path], kind: str) -> list[Client]:
    """The answers of one worker that does not speculate."""
    asked = FREE if kind == "model" else FEW
    worker, clients = Worker(pair[0]), [Client() for _ in asked]
    worker.start(asked, clients)
    worker.finish()
    return clients


def speculating(pair: tuple[Path, Path], kind: str, unmoved: list[Client], overlap: str) -> Worker:
    given = str(pair[1]) if kind == "model" else "ngram"
    worker = Worker(pair[0], speculation=given, draft_worth=0.0, overlap=overlap)
    if kind == "sometimes wrong":
        texts = [
            [*request.prompt_token_ids, *client.token_ids]
            for request, client in zip(FEW, unmoved, strict=True)
        ]
        worker.driver.runner.proposer = KnowingProposer(texts)
    return worker


@pytest.mark.parametrize(("how", "overlap"), [("lost", "off"), ("lost", "on"), ("drained", "on")])
def test_the_answer_is_that_of_one_worker_without_drafts(
    pair: tuple[Path, Path], unmoved: list[Client], kind: str, how: str, overlap: str
) -> None:
    """They move twice, each time behind drafts that were accepted; the drained come back to the first worker,
    which has blocks of theirs that drafts were written into.
    """
    workers = [speculating(pair, kind, unmoved, overlap) for _ in range(2)]
    requests = FREE if kind == "model" else FEW
    clients = [Client() for _ in requests]
    for worker in workers:
        worker.start(requests, clients)
        while not all(worker.accepted.values()):
            assert len(worker.streams) == len(requests), worker.accepted
            worker.step()
        assert len(worker.streams) == len(requests), "all are in their middle"
        worker.give_up(how)
        assert [client.ends[-1].resume for client in clients] == [
            tuple(client.token_ids) for client in clients
        ]
        requests = [
            replace(request, request_id=RequestId(f"{request.request_id}+"), resumed=tuple(client.token_ids))
            for request, client in zip(requests, clients, strict=True)
        ]
    last = workers[0] if how == "drained" else speculating(pair, kind, unmoved, overlap)
    last.start(requests, clients)
    last.finish()
    assert all(last.accepted.values())
    for client, other in zip(clients, unmoved, strict=True):
        assert (client.text, client.token_ids) == (other.text, other.token_ids)
        assert client.logprobs == other.logprobs
        assert client.ends[-1].reason is FinishReason.LENGTH
        assert all(isinstance(end.error, StreamBroken) == (how == "lost") for end in client.ends[:-1])
        check_usage(client, kind)
    if overlap == "off":  # No step was under way when a worker was lost: all that was guessed was told.
        stats = [worker.driver.core.stats() for worker in (*workers, last)]
        usages = [client.usage for client in clients]
        assert sum(each.accepted_drafts for each in usages) == sum(each.accepted_tokens for each in stats)
        drafts = sum(each.accepted_drafts + each.rejected_drafts for each in usages)
        assert drafts == sum(each.drafted_tokens for each in stats)


def check_usage(client: Client, kind: str) -> None:
    """It counts all three parts once."""
    parts, usage = [end.usage for end in client.ends], client.usage
    assert usage.completion_tokens == len(client.token_ids) == MAX_TOKENS
    assert all(part.accepted_drafts > 0 for part in parts)
    assert usage.accepted_drafts == sum(part.accepted_drafts for part in parts) < MAX_TOKENS
    assert usage.rejected_drafts == sum(part.rejected_drafts for part in parts)
    if kind == "model":
        assert usage.rejected_drafts == 0, "its KV of what others said was wrong"
    elif kind == "sometimes wrong":
        assert usage.rejected_drafts > 0

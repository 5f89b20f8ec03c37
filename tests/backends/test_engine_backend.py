"""The gateway's side of the wire, against a peer that says exactly what the test tells it to."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from byte_tokenizer import byte_tokenizer
from conformance import TIMEOUT_S, Recorder, Requests
from fleets import fleet_of
from msgspec.structs import replace

from penstock.backends.base import Phase
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.engine.link import WorkerLink
from penstock.backends.engine.stream import EngineStream
from penstock.backends.silence import HeartbeatTerms
from penstock.clock import ManualClock
from penstock.errors import (
    ContextTooLong,
    Draining,
    EngineFault,
    Overloaded,
    PenstockError,
    StreamBroken,
    WorkerUnavailable,
)
from penstock.policy.resilience.worker_state import WorkerState
from penstock.protocol.address import UnixAddress
from penstock.protocol.worker import (
    AbortRequest,
    Drain,
    FrameDecoder,
    FromWorker,
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
    ToWorker,
    WorkerFailed,
    decode_to_worker,
    encode,
)
from penstock.types import FinishReason, Usage, WorkerId

INFO = ModelInfo(
    model="m",
    architecture="A",
    dtype="float32",
    num_parameters=1,
    vocab_size=257,
    max_model_len=4096,
    num_blocks=4,
    block_tokens=16,
    max_running=5,
)
EOS = 256


class Peer:
    """A worker's socket with the test as its engine."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[ToWorker] = asyncio.Queue()
        self.num_connections = 0
        self.num_reads = 0
        self.answers = True
        """Whether it shows that it lives when it is asked."""
        self.greeting: tuple[FromWorker, ...] = (Ready(INFO),)
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, decoder = writer, FrameDecoder()
        self.num_connections += 1
        self._connected.set()
        self.say(*self.greeting)
        while data := await reader.read(1 << 16):
            self.num_reads += 1
            for body in decoder.feed(data):
                message = decode_to_worker(body)
                if not isinstance(message, Ping):
                    self.messages.put_nowait(message)
                elif self.answers:
                    self.say(Pong())
        writer.close()

    def say(self, *messages: FromWorker) -> None:
        self.say_bytes(b"".join(map(encode, messages)))

    def say_bytes(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def step(
        self,
        request: Submit,
        *tokens: int,
        finish: RequestFinished | None = None,
        usage: Usage | None = None,
        device_ns: int = 0,
    ) -> None:
        output = Output(request.request_id, tokens, None, finish, usage, (), device_ns)
        self.say(StepOutput(1, (output,)))

    def hang_up(self) -> None:
        assert self._writer is not None
        self._writer.transport.abort()

    async def hear(self) -> ToWorker:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.messages.get()

    async def hear_submit(self) -> Submit:
        message = await self.hear()
        assert isinstance(message, Submit)
        return message


async def until(backend: EngineBackend, wanted: Callable[[], bool]) -> None:
    """Return when the backend's status is as wanted."""
    changed = asyncio.Event()
    backend.on_change = changed.set
    async with asyncio.timeout(TIMEOUT_S):
        while not wanted():
            changed.clear()
            await changed.wait()


@asynccontextmanager
async def pair(
    *greeting: FromWorker, clock: ManualClock | None = None, heartbeat: HeartbeatTerms | None = None
) -> AsyncIterator[tuple[Peer, EngineBackend]]:
    peer = Peer()
    backend = EngineBackend(byte_tokenizer(), clock or ManualClock(), heartbeat or HeartbeatTerms())
    peer.greeting = greeting or peer.greeting
    with tempfile.TemporaryDirectory() as directory:
        server = await asyncio.start_unix_server(peer.serve, f"{directory}/w.sock")
        try:
            backend.connect_to(UnixAddress(f"{directory}/w.sock"))
            if not greeting:
                await until(backend, lambda: backend.status.ready)
            yield peer, backend
        finally:
            await backend.close()
            server.close()
            await server.wait_closed()


def run(check: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(check())


def test_tokens_become_whole_characters() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            recorder = Recorder()
            backend.generate(Requests().make(), recorder)
            submit = await peer.hear_submit()
            assert submit.prompt == b"\x0a\0\0\0\x0b\0\0\0\x0c\0\0\0"
            euro = tuple("€".encode())
            peer.step(submit, *euro[:2])
            peer.step(submit, euro[2], *b"uro")
            peer.step(
                submit,
                0xC3,
                finish=RequestFinished(reason=FinishReason.LENGTH, usage=Usage(completion_tokens=7)),
            )
            finish = await recorder.end()
            assert recorder.text == "€uro\ufffd"
            assert (finish.reason, finish.usage.completion_tokens) == (FinishReason.LENGTH, 7)

    run(check)


def test_a_sink_that_raises_ends_its_own_stream_alone() -> None:
    def fail() -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "no such character")

    async def check() -> None:
        async with pair() as (peer, backend):
            broken, gathered, fine, requests = Recorder(), Recorder(), Recorder(), Requests()
            broken.then = gathered.then = fail
            submits = []
            for sink in (broken, gathered, fine):
                backend.generate(requests.make(), sink)
                submits.append(await peer.hear_submit())
            peer.step(submits[0], *b"a")
            assert isinstance((await broken.end()).error, EngineFault)
            assert isinstance(await peer.hear(), AbortRequest)
            peer.say(*(StepOutput(1, (Output(each.request_id, tuple(b"bc")),)) for each in submits[1:]))
            assert isinstance((await gathered.end()).error, EngineFault)
            peer.step(submits[2], *b"d", finish=RequestFinished(reason=FinishReason.STOP, usage=Usage()))
            assert (await fine.end()).reason is FinishReason.STOP
            assert fine.text == "bcd"
            assert peer.num_connections == 1

    run(check)


@pytest.mark.parametrize("ending", ["finish", "abort", "break_off"])
@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_a_whole_answer_comes_in_pieces_and_is_the_same(ending: str, cut: int) -> None:
    tokens = tuple("Zwölf Flüsse, 12 €.".encode())
    requests, tokenizer = Requests(), byte_tokenizer()
    reported: dict[int, tuple[Recorder, list[int]]] = {}
    for piece in (1, 8):
        recorder = Recorder()
        request = replace(requests.make(), piece_tokens=piece)
        stream = EngineStream(request, recorder, tokenizer, ManualClock(), lambda _id, _tell: None)
        last = len(tokens) - cut if ending == "finish" else len(tokens)
        for start in range(0, last, cut):
            stream.push(Output(request.request_id, tokens[start : min(start + cut, last)]))
        if ending == "finish":
            finish = RequestFinished(reason=FinishReason.LENGTH, usage=Usage())
            stream.push(Output(request.request_id, tokens[last:], finish=finish))
        elif ending == "abort":
            stream.abort()
        else:
            stream.break_off("it died", died=True)
        counts = [0]
        for delta in recorder.deltas:
            counts.append(counts[-1] + len(delta.token_ids))
        reported[piece] = recorder, counts
    (plain, _), (pieces, counts) = reported[1], reported[8]
    assert pieces.text == plain.text
    assert pieces.finish is not None
    assert plain.finish is not None
    assert pieces.finish.resume == plain.finish.resume == (None if ending == "finish" else tokens)
    assert pieces.finish.usage == plain.finish.usage
    assert counts[1] == cut, "the first output is told at once"
    assert len(pieces.deltas) <= 2 + len(tokens) // 8 + 1
    for multiple in range(8, len(tokens), 8):  # Where a slice may end.
        assert any(multiple <= count < multiple + cut for count in counts)


def test_steps_that_come_together_go_on_together() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            requests, both = Requests(), [Recorder(), Recorder()]
            for recorder in both:
                backend.generate(requests.make(), recorder)
            first, second = await peer.hear_submit(), await peer.hear_submit()
            steps = [
                StepOutput(i, tuple(Output(each.request_id, (65 + i,)) for each in (first, second)))
                for i in range(3)
            ]
            peer.say(*steps[:1])
            while not both[1].deltas:
                await asyncio.sleep(0.001)
            peer.say(*steps[1:])  # One write, so one read.
            end = RequestFinished(reason=FinishReason.LENGTH, usage=Usage())
            peer.step(first, 90, finish=end)
            await both[0].end()
            assert [delta.text for delta in both[0].deltas] == ["A", "BC", "Z"]
            assert [delta.token_ids for delta in both[1].deltas] == [(65,), (66, 67)]

    run(check)


def test_eos_is_no_stop_token_but_another_is() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            requests = Requests()
            for token, reported in ((EOS, None), (65, 65)):
                recorder = Recorder()
                backend.generate(requests.make(), recorder)
                finish = RequestFinished(reason=FinishReason.STOP, usage=Usage(), stop_token_id=token)
                peer.step(await peer.hear_submit(), finish=finish)
                assert (await recorder.end()).stop == reported
                assert not recorder.deltas

    run(check)


def test_what_is_sent_in_one_tick_leaves_in_one_write() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            requests = Requests()
            generations = [backend.generate(requests.make(), Recorder()) for _ in range(20)]
            for _ in generations:
                await peer.hear_submit()
            assert peer.num_reads == 1
            for generation in generations:
                generation.abort()
            aborted = [await peer.hear() for _ in generations]
            assert all(isinstance(message, AbortRequest) for message in aborted)
            assert peer.num_reads == 2

    run(check)


def test_late_outputs_of_an_ended_stream_are_ignored() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            requests, aborted, other = Requests(), Recorder(), Recorder()
            generation = backend.generate(requests.make(), aborted)
            backend.generate(requests.make(), other)
            first, second = await peer.hear_submit(), await peer.hear_submit()
            generation.abort()
            assert await peer.hear() == AbortRequest((first.request_id,))
            peer.step(first, 65, finish=RequestFinished(reason=FinishReason.ABORT, usage=Usage()))
            peer.step(second, 66, finish=RequestFinished(reason=FinishReason.LENGTH, usage=Usage()))
            await other.end()
            assert (other.text, aborted.deltas) == ("B", [])

    run(check)


def test_a_stop_string_aborts_on_the_worker_and_ends_here() -> None:
    async def check() -> None:
        clock = ManualClock(now_ns=100)
        async with pair(clock=clock) as (peer, backend):
            recorder = Recorder()
            backend.generate(Requests().make(stop=("END",)), recorder)
            submit = await peer.hear_submit()
            usage = Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=2, queue_ns=5, prefill_ns=6)
            peer.step(submit, *b"wordE", usage=usage)
            await recorder.started.wait()
            clock.advance(40)
            peer.step(submit, *b"ND and more", device_ns=700)
            finish = await recorder.end()
            assert recorder.text == "word"
            assert (finish.reason, finish.stop) == (FinishReason.STOP, "END")
            assert finish.usage == Usage(
                prompt_tokens=3,
                completion_tokens=len(b"wordEND"),
                cached_tokens=2,
                queue_ns=5,
                prefill_ns=6,
                decode_ns=40,
                device_ns=700,
            )
            assert await peer.hear() == AbortRequest((submit.request_id,))

    run(check)


def test_a_stop_string_in_the_last_output_wins_and_needs_no_abort() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            recorder, requests = Recorder(), Requests()
            backend.generate(requests.make(stop=("END",)), recorder)
            submit = await peer.hear_submit()
            peer.step(submit, *b"wordEND!", finish=RequestFinished(reason=FinishReason.LENGTH, usage=Usage()))
            finish = await recorder.end()
            assert (recorder.text, finish.reason, finish.stop) == ("word", FinishReason.STOP, "END")
            assert finish.usage.completion_tokens == len(b"wordEND"), "as if the tokens had come one by one"
            backend.generate(requests.make(), Recorder())
            await peer.hear_submit()  # And no abort before it.

    run(check)


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        ("Overloaded", Overloaded),
        ("Draining", Draining),
        ("ContextTooLong", ContextTooLong),
        ("EngineFault", EngineFault),
        ("WorkerUnavailable", WorkerUnavailable),
        ("SomethingNew", EngineFault),
    ],
)
def test_a_refusal_keeps_its_kind(reported: str, kind: type[PenstockError]) -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            recorder = Recorder()
            backend.generate(Requests().make(), recorder)
            finish = RequestFinished(
                reason=FinishReason.ERROR, usage=Usage(), error="because", error_kind=reported
            )
            peer.step(await peer.hear_submit(), finish=finish)
            error = (await recorder.end()).error
            assert type(error) is kind
            assert str(error) == "because"

    run(check)


def test_a_lost_connection_breaks_off_and_is_made_again() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            requests, begun, fresh = Requests(), Recorder(), Recorder()
            backend.generate(requests.make(), begun)
            backend.generate(requests.make(), fresh)
            peer.step(await peer.hear_submit(), 65)
            await begun.started.wait()
            peer.hang_up()
            assert isinstance((await begun.end()).error, StreamBroken)
            assert isinstance((await fresh.end()).error, WorkerUnavailable)
            await until(backend, lambda: backend.status.ready)
            assert peer.num_connections == 2
            assert backend.num_streams == 0

    run(check)


def test_the_workers_last_words_are_the_reason() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            recorder = Recorder()
            backend.generate(Requests().make(), recorder)
            await peer.hear_submit()
            peer.say(WorkerFailed("out of luck", "RuntimeError"))
            await until(backend, lambda: backend.failure is not None)
            peer.hang_up()
            assert "RuntimeError: out of luck" in str((await recorder.end()).error)

    run(check)


@pytest.mark.parametrize("noise", [b"\xff\xff\xff\xff", b"\3\0\0\0abc"])
def test_a_worker_that_breaks_the_protocol_is_disconnected(noise: bytes) -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            recorder = Recorder()
            backend.generate(Requests().make(), recorder)
            await peer.hear_submit()
            peer.say_bytes(noise)
            assert "broke the protocol" in str((await recorder.end()).error)

    run(check)


def test_loading_is_shown_and_nothing_is_sent_meanwhile() -> None:
    async def check() -> None:
        async with pair(Loading("loading weights", 3, 9)) as (peer, backend):
            await until(backend, lambda: backend.status.done == 3)
            assert (backend.status.stage, backend.status.total) == ("loading weights", 9)
            with pytest.raises(WorkerUnavailable, match="loading weights"):
                backend.generate(Requests().make(), Recorder())
            peer.say(Ready(INFO), _stats())
            await until(backend, lambda: backend.status.ready)
            assert backend.status.info == INFO

    run(check)


def test_another_version_of_the_protocol_is_not_ready() -> None:
    async def check() -> None:
        async with pair(Ready(INFO, version=99)) as (_, backend):
            await until(backend, lambda: "protocol 99" in backend.status.stage)
            assert not backend.status.ready

    run(check)


def test_a_drain_leaves_the_worker_and_its_launcher_ends_it() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            recorder = Recorder()
            backend.generate(Requests().make(), recorder)
            submit = await peer.hear_submit()
            backend.end_worker()
            assert isinstance(await peer.hear(), Drain)
            draining = asyncio.create_task(backend.drain(TIMEOUT_S))
            peer.step(submit, 65, finish=RequestFinished(reason=FinishReason.LENGTH, usage=Usage()))
            await draining
            assert peer.messages.empty()
            assert (await recorder.end()).reason is FinishReason.LENGTH

    run(check)


def test_work_is_seen_from_both_sides() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            assert not backend.has_work
            generation = backend.generate(Requests().make(), Recorder())
            assert backend.has_work
            submit = await peer.hear_submit()
            generation.abort()
            assert not backend.has_work
            peer.say(_stats(running=1, step=17))
            other = Recorder()
            backend.generate(Requests().make(), other)
            await peer.hear()
            peer.step(await peer.hear_submit(), 65)
            await other.started.wait()
            assert backend.status.stats is not None
            assert backend.status.stats.step == 17
            assert backend.has_work
            assert submit.request_id == "r-1"

    run(check)


def _stats(*, running: int = 0, step: int = 0) -> Stats:
    return Stats(step=step, running=running, waiting=0, blocks_total=4, blocks_used=0, blocks_cached=0)


def test_a_worker_that_does_not_answer_is_suspect_until_it_does_again() -> None:
    async def check() -> None:
        async with pair(heartbeat=HeartbeatTerms(interval_s=0.02, lost_after=1000)) as (peer, backend):
            recorder = Recorder()
            backend.generate(Requests().make(), recorder)
            submit = await peer.hear_submit()
            peer.answers = False
            await until(backend, lambda: not backend.status.ready)
            assert backend.status.phase is Phase.SUSPECT
            with pytest.raises(WorkerUnavailable, match="does not answer"):
                backend.generate(Requests().make(), Recorder())
            peer.answers = True
            await until(backend, lambda: backend.status.ready)
            peer.step(submit, 65, finish=RequestFinished(reason=FinishReason.LENGTH, usage=Usage()))
            assert (await recorder.end()).reason is FinishReason.LENGTH
            assert recorder.text == "A", "its streams stayed"

    run(check)


def test_a_worker_that_loads_need_not_answer() -> None:
    async def check() -> None:
        async with pair(Loading("weights"), heartbeat=HeartbeatTerms(interval_s=0.01)) as (peer, backend):
            peer.answers = False
            await until(backend, lambda: backend.status.stage == "weights")
            await asyncio.sleep(0.5)  # Twelve times as long as it takes to give up one that serves.
            assert peer.num_connections == 1
            peer.say(Ready(INFO))
            await until(backend, lambda: backend.status.ready)

    run(check)


def test_another_attempt_of_one_that_was_aborted_is_not_taken_for_it() -> None:
    async def check() -> None:
        async with pair() as (peer, backend):
            request, old, new = Requests().make(), Recorder(), Recorder()
            backend.generate(request, old).abort()
            backend.generate(request, new)
            first = await peer.hear_submit()
            assert await peer.hear() == AbortRequest((first.request_id,))
            second = await peer.hear_submit()
            assert second.request_id != first.request_id
            peer.step(first, 65, finish=RequestFinished(reason=FinishReason.ABORT, usage=Usage()))
            peer.step(second, 66, finish=RequestFinished(reason=FinishReason.LENGTH, usage=Usage()))
            await new.end()
            assert (new.text, old.deltas) == ("B", [])
            backend.generate(request, Recorder())
            assert (await peer.hear_submit()).request_id == first.request_id, "its last word was heard"

    run(check)


class FakeTransport(asyncio.Transport):
    """A connection to a worker that is paused: closing it takes until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: object) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True


def test_nothing_of_an_older_epoch_touches_a_stream() -> None:
    """A worker comes back from a pause and goes on with what it was asked before its connection was given
    up.
    """

    async def check() -> None:
        backend, requests = EngineBackend(byte_tokenizer(), ManualClock()), Requests()
        registry = fleet_of(ManualClock(), {"m": backend})
        worker = registry.get(WorkerId("m-0"))
        assert worker is not None
        before, paused = FakeTransport(), WorkerLink(backend, HeartbeatTerms())
        paused.connection_made(before)
        paused.data_received(encode(Ready(INFO)))
        request, lost, migrated = requests.make(), Recorder(), Recorder()
        backend.generate(request, lost)
        output = StepOutput(1, (Output(request.request_id, (65,), None, None),))
        paused.data_received(encode(output))
        assert worker.epoch == 1
        paused.abort()
        paused.connection_lost(None)
        assert isinstance(lost.finish and lost.finish.error, StreamBroken)
        assert (worker.epoch, worker.state) == (2, WorkerState.STARTING)
        fresh = WorkerLink(backend, HeartbeatTerms())
        fresh.connection_made(FakeTransport())
        fresh.data_received(encode(Ready(INFO)))
        backend.generate(request, migrated)  # The same request, on the same worker, in another epoch.
        paused.data_received(encode(output))
        paused.data_received(encode(Loading("loading weights")))
        assert (migrated.deltas, worker.epoch, worker.is_ready) == ([], 2, True)
        fresh.data_received(encode(StepOutput(1, (Output(request.request_id, (66,), None, None),))))
        assert (migrated.text, lost.text) == ("B", "A")

    run(check)


def test_a_worker_that_does_not_read_gets_no_new_request_until_it_does_again() -> None:
    """The transport says when more than one frame waits for it, and when that has left."""

    async def check() -> None:
        backend, requests = EngineBackend(byte_tokenizer(), ManualClock()), Requests()
        link = WorkerLink(backend, HeartbeatTerms())
        link.connection_made(FakeTransport())
        link.data_received(encode(Ready(INFO)))
        link.pause_writing()
        with pytest.raises(WorkerUnavailable, match="does not read"):
            backend.generate(requests.make(), Recorder())
        link.resume_writing()
        request, recorder = requests.make(), Recorder()
        backend.generate(request, recorder)
        link.data_received(encode(StepOutput(1, (Output(request.request_id, (65,), None, None),))))
        assert recorder.text == "A"
        link.abort()
        link.connection_lost(None)

    run(check)

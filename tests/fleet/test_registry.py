"""The registry: told by push, and never wrong about who is capacity."""

import asyncio
import io
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from conformance import Recorder, Requests
from fake_backend import FakeBackend
from fleets import fleet_of, worker_of

from penstock.backends.base import Note, Phase
from penstock.clock import NS_PER_S, ManualClock, SystemClock
from penstock.config.tree import LogConfig
from penstock.errors import ConfigError
from penstock.fleet.registry import Registry
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.types import FinishReason, WorkerId

CLOCK = SystemClock()


def run(check: Callable[[], Awaitable[None]]) -> None:
    async def with_timeout() -> None:
        async with asyncio.timeout(20):
            await check()

    asyncio.run(with_timeout())


def with_info(backend: FakeBackend, **fields: object) -> None:
    """Let it tell other facts of itself, as after a restart."""
    assert backend.status.info is not None
    backend.status.info = msgspec.structs.replace(backend.status.info, **fields)
    backend.show(Phase.LOST, "disconnected")
    backend.show(Phase.READY, "ready")


def test_changes_are_pushed_and_only_of_who_changed() -> None:
    async def check() -> None:
        one, two = FakeBackend(CLOCK), FakeBackend(CLOCK)
        registry = fleet_of(CLOCK, {"m": [one, two]})
        reported: list[tuple[str, str, int]] = []
        registry.listen(lambda worker: reported.append((worker.id, worker.state.value, worker.epoch)))
        one.lose_worker()
        one.show(Phase.LOADING, "loading weights", done=1, total=2)
        one.recover()
        assert reported == [("m-0", "starting", 2), ("m-0", "loading", 2), ("m-0", "ready", 2)]
        registry.doubt(WorkerId("m-1"), trusted=False)
        registry.doubt(WorkerId("m-1"), trusted=False)
        assert reported[3:] == [("m-1", "suspect", 1)]
        assert [worker.id for worker in registry.of("m") if worker.is_ready] == ["m-0"]
        registry.remove(WorkerId("m-1"))
        assert reported[4:] == [("m-1", "gone", 1)]
        two.recover()
        assert len(reported) == 5, "who was removed is not heard any more"

    run(check)


def test_names_are_unique_and_their_number_is_bounded() -> None:
    registry = Registry(CLOCK, Log(LogConfig(), CLOCK, stream=io.StringIO()), workers_max=1)
    registry.add(worker_of(registry, "m", FakeBackend(CLOCK)))
    with pytest.raises(ConfigError, match="there is a worker m-0 already"):
        registry.add(worker_of(registry, "m", FakeBackend(CLOCK)))
    with pytest.raises(ConfigError, match="there are 1 workers already"):
        registry.add(worker_of(registry, "m", FakeBackend(CLOCK), 1))


def test_of_several_contexts_the_smallest_counts() -> None:
    one, two = FakeBackend(CLOCK), FakeBackend(CLOCK)
    registry = fleet_of(CLOCK, {"m": [one]})
    with_info(two, max_model_len=1000)
    registry.add(worker_of(registry, "m", two, 1))
    route = registry.of("m")
    assert route.info is not None
    assert route.info.max_model_len == 1000
    two.lose_worker()
    assert route.info.max_model_len == 1000, "it may be back before the request starts"
    registry.remove(WorkerId("m-1"))
    assert route.info.max_model_len == 32_768
    registry.remove(WorkerId("m-0"))
    assert route.info is not None, "requests can wait for the next worker"


def test_a_worker_with_another_model_is_refused_and_reported_until_it_is_the_right_one() -> None:
    said = io.StringIO()
    one, two = FakeBackend(CLOCK), FakeBackend(CLOCK)
    registry = fleet_of(CLOCK, {"m": [one]}, log=Log(LogConfig(), CLOCK, stream=said))
    second = worker_of(registry, "m", two, 1)
    second.served_model = "right"
    registry.add(second)
    assert (second.state, second.stage) == (WorkerState.STARTING, "refused: it serves 'fake', not 'right'")
    assert said.getvalue().count("a worker was refused") == 1
    with_info(two, model="right", vocab_size=7)
    assert not second.is_ready
    assert "its vocabulary has 7 tokens, that of m-0 has 32768" in said.getvalue()
    assert registry.of("m").num_ready == 1
    with_info(two, vocab_size=32_768)
    assert second.is_ready
    assert (second.problem, registry.of("m").num_ready) == ("", 2)


def test_who_speaks_for_a_model_is_whoever_is_furthest() -> None:
    one, two = FakeBackend(CLOCK), FakeBackend(CLOCK)
    registry = fleet_of(CLOCK, {"m": [one, two]})
    one.lose_worker("pulled the plug")
    assert registry.of("m").summary().ready
    two.show(Phase.LOADING, "loading weights", done=1, total=4)
    found = registry.of("m").summary()
    assert (found.phase, found.stage, found.done) == (Phase.LOADING, "loading weights", 1)
    assert registry.of("nobody").summary().stage == "there is no worker"


def test_drain_sends_nothing_new_lets_streams_end_and_then_forgets() -> None:
    async def check() -> None:
        backend, requests = FakeBackend(CLOCK, step_s=0.001), Requests()
        registry = fleet_of(CLOCK, {"m": backend})
        worker, recorder = registry.get(WorkerId("m-0")), Recorder()
        assert worker is not None
        backend.generate(requests.make(max_tokens=30), recorder)
        drained = registry.drain(worker.id, 10)
        assert drained is not None
        assert registry.drain(worker.id, 0) is drained, "a second call cuts nothing short"
        assert worker.state is WorkerState.DRAINING
        await asyncio.sleep(0)
        backend.recover()  # Whatever it says.
        assert not worker.is_ready
        await drained
        assert (recorder.finish and recorder.finish.reason) is FinishReason.LENGTH
        assert worker.state is WorkerState.GONE
        assert list(registry) == []
        assert registry.drain(worker.id, 0) is None

    run(check)


def test_streams_are_aborted_at_the_deadline_and_not_before() -> None:
    async def check() -> None:
        backend, requests = FakeBackend(CLOCK, step_s=0.001), Requests()
        registry = fleet_of(CLOCK, {"m": backend})
        recorder = Recorder()
        backend.generate(requests.make(max_tokens=100_000), recorder)
        started_ns = CLOCK.now_ns()
        drained = registry.drain(WorkerId("m-0"), 0.1)
        assert drained is not None
        await drained
        assert (recorder.finish and recorder.finish.reason) is FinishReason.ABORT
        assert CLOCK.now_ns() - started_ns >= 99_000_000

    run(check)


def test_what_happened_to_a_worker_has_its_time_and_is_forgotten_once_it_is_long_well() -> None:
    clock = ManualClock()
    backend = FakeBackend(clock)
    registry = fleet_of(clock, {"m": backend})
    (worker,) = registry.of("m")
    backend.status.notes += [
        Note("it was killed", clock.wall_ns()),
        Note("it has no metrics", clock.wall_ns(), lasts=True),
    ]
    killed, lasting = worker.notes(clock.wall_ns())
    assert killed == "2023-11-14 22:13:20 UTC: it was killed"
    clock.advance(601 * NS_PER_S)
    assert worker.notes(clock.wall_ns()) == [lasting]
    backend.lose_worker("gone again")
    assert worker.notes(clock.wall_ns()) == [killed, lasting]  # It may be why.

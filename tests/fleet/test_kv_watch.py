"""The locality follows the registry: workers come with their events, and go with all that was believed of
them.
"""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

from conformance import Recorder
from fake_backend import FakeBackend
from fleets import worker_of
from kv_talker import KVTalker
from scripted_worker import Bench, bench

from penstock.backends.base import GenerateRequest
from penstock.clock import SystemClock
from penstock.config.tree import KVEventsConfig, LogConfig
from penstock.engine.kv_event_publisher import ZmqPublisher
from penstock.fleet.kv_watch import KVWatch
from penstock.fleet.registry import Registry
from penstock.kv.events import Numbered
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.worker_cache_view import UNREPORTED_MAX, KVIndexLimits
from penstock.telemetry.log import Log
from penstock.types import RequestId, SamplingParams, WorkerId

CLOCK = SystemClock()
KEY = b"secret" * 4
"""The scripted worker's launcher has the same."""
WORKER = WorkerId("m-0")
TIMEOUT_S = 30.0


class Made:
    """A registry, and what watches it."""

    def __init__(self) -> None:
        self.lines = io.StringIO()
        log = Log(LogConfig(), CLOCK, stream=self.lines)
        self.registry = Registry(CLOCK, log, workers_max=8)
        config = KVIndexLimits(entries_max=10_000, check_s=0.2)
        self.locality = KVLocality(config, KEY)
        self.watch = KVWatch(self.registry, self.locality, config, log)
        self.watch.start()

    def blocks(self, tokens: tuple[int, ...]) -> dict[str, int]:
        """By worker."""
        keys = self.locality.maker("m").keys(tokens)
        return {worker: held.blocks for worker, held in self.locality.match(CLOCK.now_ns(), keys).holders(9)}

    async def until(self, condition: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                turn = loop.create_future()
                loop.call_later(0.01, turn.set_result, None)
                await turn


def test_a_worker_without_events_is_predicted_until_it_is_another_one() -> None:
    async def check() -> None:
        made, backend, tokens = Made(), FakeBackend(CLOCK), tuple(range(64))
        made.registry.add(worker_of(made.registry, "m", backend))
        made.locality.sent(CLOCK.now_ns(), WORKER, made.locality.maker("m").keys(tokens))
        assert made.blocks(tokens) == {"m-0": 4}
        backend.lose_worker()
        backend.recover()
        assert made.blocks(tokens) == {}
        made.locality.sent(CLOCK.now_ns(), WORKER, made.locality.maker("m").keys(tokens))
        made.registry.remove(WORKER)
        assert (made.blocks(tokens), made.locality.get(WORKER)) == ({}, None)
        await made.watch.close()

    asyncio.run(check())


def test_a_worker_with_an_address_of_events_is_fed_by_them(tmp_path: Path) -> None:
    async def check() -> None:
        made, talker, tokens = Made(), KVTalker(), tuple(range(64))
        events, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
        publisher = ZmqPublisher(KVEventsConfig(endpoint=events, replay_endpoint=replay))
        talker.cache(tokens)
        publisher.publish(Numbered(0, talker.publish()))
        worker = worker_of(made.registry, "m", FakeBackend(CLOCK))
        worker.engine, worker.kv_events, worker.kv_replay = "vllm", events, replay
        made.registry.add(worker)
        await made.until(lambda: made.blocks(tokens) == {"m-0": 4})
        assert made.watch.statistics(CLOCK.now_ns()).replays >= 1
        made.registry.remove(WORKER)
        await made.watch.close()
        assert made.watch.statistics(CLOCK.now_ns()).entries == 4, "swept out later"
        assert made.blocks(tokens) == {}
        publisher.close()

    asyncio.run(check())


def test_an_address_that_is_none_is_said_in_the_log_and_the_worker_is_predicted() -> None:
    async def check() -> None:
        made, tokens = Made(), tuple(range(64))
        worker = worker_of(made.registry, "m", FakeBackend(CLOCK))
        worker.kv_events = "nowhere"
        made.registry.add(worker)
        assert "kv_events: nowhere" in made.lines.getvalue()
        made.locality.sent(CLOCK.now_ns(), WORKER, made.locality.maker("m").keys(tokens))
        assert made.blocks(tokens) == {"m-0": 4}
        await made.watch.close()

    asyncio.run(check())


def test_our_workers_tell_over_their_own_connection_and_name_blocks_as_the_router_does() -> None:
    tokens = tuple(range(20, 85))

    async def check(launched: Bench) -> None:
        made = Made()
        supervised = await launched.start()
        worker = worker_of(made.registry, "m", supervised.backend)
        worker.shares_key = True
        made.registry.add(worker)
        await supervised.wait_ready()
        recorder = Recorder()
        request = GenerateRequest(
            request_id=RequestId("a"), prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=2)
        )
        supervised.backend.generate(request, recorder)
        await recorder.end()
        await made.until(lambda: made.blocks(tokens) == {"m-0": 4})
        await made.watch.close()

    async def run() -> None:
        async with bench() as launched, asyncio.timeout(60):
            await check(launched)

    asyncio.run(run())


def test_a_worker_whose_events_name_other_blocks_than_prompts_are_looked_up_by_is_warned_of_once() -> None:
    """It answers from its cache again and again, and nothing that it tells of is ever found."""

    async def check() -> None:
        made, backend, talker = Made(), FakeBackend(CLOCK), KVTalker()
        made.registry.add(worker_of(made.registry, "m", backend))
        cache_view = made.locality.get(WORKER)
        assert cache_view is not None

        def ask(number: int, *, reported_as: int) -> None:
            """A prompt of four blocks, all of them cached; its events report other tokens if `reported_as` is
            not 0.
            """
            tokens = tuple(range(number, number + 64))
            talker.cache(tuple(token + reported_as for token in tokens))
            cache_view.live(len(talker.batches), talker.publish())
            keys = made.locality.maker("m").keys(tokens)
            made.locality.sent(CLOCK.now_ns(), WORKER, keys)
            made.locality.answered(CLOCK.now_ns(), WORKER, keys, 48)
            backend.on_change()

        for number in range(UNREPORTED_MAX - 1):
            ask(number, reported_as=1000)
        ask(100, reported_as=0)
        for number in range(200, 200 + UNREPORTED_MAX - 1):
            ask(number, reported_as=1000)
        assert "warning" not in made.lines.getvalue(), "one of them was found"
        assert made.watch.statistics(CLOCK.now_ns()).unmatched_workers == 0
        for number in range(300, 303):
            ask(number, reported_as=1000)
        (line,) = made.lines.getvalue().splitlines()
        assert "name none of their blocks: routing by cache is off for it" in line
        assert "worker=m-0" in line
        assert made.watch.statistics(CLOCK.now_ns()).unmatched_workers == 1
        ask(400, reported_as=0)
        assert "of use again" in made.lines.getvalue()
        assert made.watch.statistics(CLOCK.now_ns()).unmatched_workers == 0
        await made.watch.close()

    asyncio.run(check())


def test_a_prompt_that_is_cached_before_its_events_come_is_no_reason_to_warn() -> None:
    """Many at once with one beginning: where they were sent it was only expected, when they end it was
    told.
    """

    async def check() -> None:
        made, backend, talker = Made(), FakeBackend(CLOCK), KVTalker()
        made.registry.add(worker_of(made.registry, "m", backend))
        cache_view = made.locality.get(WORKER)
        assert cache_view is not None
        tokens, now_ns = tuple(range(64)), CLOCK.now_ns()
        prompts = [made.locality.maker("m").keys(tokens) for _ in range(2 * UNREPORTED_MAX)]
        for keys in prompts:
            made.locality.sent(now_ns, WORKER, keys)
        talker.cache(tokens)
        cache_view.live(0, talker.publish())
        for keys in prompts:
            made.locality.answered(now_ns, WORKER, keys, 48)
            backend.on_change()
        assert made.watch.statistics(CLOCK.now_ns()).unmatched_workers == 0
        assert made.lines.getvalue() == ""
        await made.watch.close()

    asyncio.run(check())

"""The ZeroMQ feed against real sockets: our engine's publisher, and one that loses messages, restarts and
answers nonsense.
"""

import asyncio
import io
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import zmq
from kv_talker import KVTalker

from penstock.clock import SystemClock
from penstock.config.tree import KVEventsConfig, LogConfig
from penstock.engine.kv_event_publisher import KVEventPublisher, ZmqPublisher
from penstock.errors import ConfigError
from penstock.fleet.kv_watch import END_OF_REPLAY, KVEventSubscriber
from penstock.kv.cache.manager import KVManager
from penstock.kv.events import Numbered
from penstock.kv.hashing import BlockHasher
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.worker_cache_view import KVIndexLimits, StreamState, WorkerCacheView
from penstock.telemetry.log import Log
from penstock.types import WorkerId

TIMEOUT_S = 60.0
WORKER = WorkerId("vllm-0")
KEY = b"0123456789abcdef"


def prompt(first: int, blocks: int) -> tuple[int, ...]:
    return tuple(range(first, first + 16 * blocks))


class Heard:
    """A locality with one worker, and its feed."""

    def __init__(self, directory: Path, *, replay: bool = True, **settings: object) -> None:
        self.events, self.again = f"ipc://{directory}/pub", f"ipc://{directory}/replay"
        defaults: dict[str, object] = {"entries_max": 10_000, "check_s": 0.2, "replay_timeout_s": 0.5}
        config = KVIndexLimits(**(defaults | settings))  # type: ignore[arg-type]
        self.locality = KVLocality(config, KEY)
        self.cache_view = self.locality.add(WORKER, model="m", is_own=False)
        self.lines = io.StringIO()
        log = Log(LogConfig(), SystemClock(), stream=self.lines)
        self.feed = KVEventSubscriber(
            self.cache_view,
            events=self.events,
            replay=self.again if replay else "",
            config=config,
            log=log,
            worker=WORKER,
        )

    def blocks(self, tokens: tuple[int, ...]) -> int:
        keys = self.locality.maker("m").keys(tokens)
        return self.locality.index.match(0, keys.canonical).of(self.cache_view.worker).blocks

    @contextmanager
    def publishing(self, **settings: object) -> Iterator[ZmqPublisher]:
        """Our engine's publisher, at the addresses that the feed knows."""
        publisher = ZmqPublisher(
            KVEventsConfig(endpoint=self.events, replay_endpoint=self.again, **settings)  # type: ignore[arg-type]
        )
        try:
            yield publisher
        finally:
            publisher.close()


@asynccontextmanager
async def hearing(directory: Path, **settings: object) -> AsyncIterator[Heard]:
    received = Heard(directory, **settings)  # type: ignore[arg-type]
    received.feed.start()
    try:
        yield received
    finally:
        await received.feed.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.get_running_loop().run_in_executor(None, _rest)


def _rest() -> None:
    zmq.Poller().poll(10)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def publish(publisher: ZmqPublisher, talker: KVTalker) -> None:
    """The next batch."""
    payload = talker.publish()
    publisher.publish(Numbered(len(talker.batches) - 1, payload))


class Lossy:
    """A residency that does not hear all of what is published; replays are lossless."""

    def __init__(self, cache_view: WorkerCacheView, is_lost: Callable[[int], bool]) -> None:
        self._cache_view, self._is_lost = cache_view, is_lost

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache_view, name)

    def live(self, sequence: int, payload: bytes) -> None:
        if not self._is_lost(sequence):
            self._cache_view.live(sequence, payload)


def test_what_was_published_before_is_asked_for_and_what_comes_is_heard(tmp_path: Path) -> None:
    async def test() -> None:
        async with hearing(tmp_path) as received:
            talker = KVTalker()
            with received.publishing() as publisher:
                for blocks in (1, 2, 3):
                    talker.cache(prompt(0, blocks))
                    publish(publisher, talker)
                await until(lambda: received.blocks(prompt(0, 3)) == 3)
                talker.cache(prompt(900, 2))
                publish(publisher, talker)
                await until(lambda: received.blocks(prompt(900, 2)) == 2)
                talker.clear()
                publish(publisher, talker)
                await until(lambda: received.cache_view.state is StreamState.CLEARED)
                assert received.blocks(prompt(0, 3)) == 0

    run(test)


def test_lost_messages_are_replayed_until_the_index_is_as_without_loss(tmp_path: Path) -> None:
    """The last ones among them, which nothing comes after: a check finds them."""

    async def test() -> None:
        async with hearing(tmp_path, replay_timeout_s=20) as received:
            received.feed.cache_view = Lossy(
                received.cache_view, lambda number: number % 3 == 0 or number > 57
            )  # type: ignore[assignment]
            talker = KVTalker()
            with received.publishing() as publisher:
                for i in range(60):
                    talker.cache(prompt(1000 * (i % 4), 1 + i % 7))
                    if i % 5 == 0:
                        talker.forget(prompt(1000 * (i % 3), 7), keep=i % 3)
                    publish(publisher, talker)
                tokens = [prompt(1000 * i, 7) for i in range(4)]
                await until(
                    lambda: (
                        [received.blocks(each) for each in tokens]
                        == [talker.blocks_of(each) for each in tokens]
                    )
                )
                await until(lambda: received.cache_view.wanted is None)
                assert received.cache_view.generation == 0

    run(test)


def test_a_restarted_worker_is_another_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with hearing(tmp_path) as received:
            old, new = KVTalker(), KVTalker(seed=b"new")
            with received.publishing() as publisher:
                for i in range(5):
                    old.cache(prompt(0, i + 1))
                    publish(publisher, old)
                await until(lambda: received.blocks(prompt(0, 5)) == 5)
            with received.publishing() as publisher:
                for i in range(6):  # It counts further than the old one had.
                    new.cache(prompt(500, i + 1))
                    publish(publisher, new)
                await until(lambda: received.blocks(prompt(500, 6)) == 6)
                assert received.blocks(prompt(0, 5)) == 0
                await until(lambda: received.cache_view.state is StreamState.SYNCED)

    run(test)


def test_without_a_replay_address_what_is_missing_costs_what_was_believed(tmp_path: Path) -> None:
    async def test() -> None:
        async with hearing(tmp_path, replay=False) as received:
            talker = KVTalker()
            with received.publishing() as publisher:
                while not received.blocks(prompt(0, 2)):  # Until the subscription has arrived.
                    talker.clear()
                    talker.cache(prompt(0, 2))
                    publish(publisher, talker)
                    await asyncio.get_running_loop().run_in_executor(None, _rest)
                lost = len(talker.batches)
                received.feed.cache_view = Lossy(received.cache_view, lambda number: number == lost)  # type: ignore[assignment]
                publish(publisher, talker)
                talker.cache(prompt(700, 2))
                publish(publisher, talker)
                await until(lambda: received.blocks(prompt(700, 2)) == 2)
                assert received.blocks(prompt(0, 2)) == 0

    run(test)


def test_our_engines_own_events_are_understood_by_their_tokens(tmp_path: Path) -> None:
    """As llm-d or Dynamo would hear us: a pool's blocks, published in vLLM's layout with their token ids."""

    async def test() -> None:
        async with hearing(tmp_path) as received:
            manager = KVManager.with_prefix_cache(32, BlockHasher(key=KEY, identity="m float32"))
            settings = {"token_ids": "all"}
            with received.publishing(**settings) as publisher:
                feed = KVEventPublisher(KVEventsConfig(**settings), SystemClock(), publisher)  # type: ignore[arg-type]
                feed.follow(manager)
                cache(manager, prompt(0, 5))
                feed.flush()
                await until(lambda: received.blocks(prompt(0, 5)) == 5)
                cache(manager, prompt(5000, 30))  # Evicts most of the others.
                feed.flush()
                await until(lambda: received.blocks(prompt(5000, 30)) == 30)
                assert received.blocks(prompt(0, 5)) == 2

    run(test)


def cache(manager: KVManager, tokens: tuple[int, ...]) -> None:
    """Compute a prompt and let it go."""
    table, ids = manager.open(b""), array("i", tokens)
    assert manager.extend(table, len(ids)) is not None
    manager.publish_computed(table, ids, len(ids))
    manager.release(table)


def test_a_worker_that_sends_nonsense_is_refused_loudly_and_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with hearing(tmp_path) as received:
            with (
                zmq.Context() as context,
                context.socket(zmq.PUB) as pub,
                context.socket(zmq.ROUTER) as router,
            ):
                for each in (pub, router):
                    each.linger = 0
                pub.bind(received.events)
                router.bind(received.again)
                while not received.cache_view.names.refused:
                    for frames in ([b"x"], [b"", b"12", b""], [b"", bytes(8), b"?"]):
                        pub.send_multipart(frames)
                    while router.poll(10):
                        peer, *_ = router.recv_multipart()
                        router.send_multipart([peer, b"", b"?", b"?"])
                    await asyncio.get_running_loop().run_in_executor(None, _rest)
                await until(lambda: "of no use" in received.lines.getvalue())
                assert received.cache_view.state is StreamState.UNKNOWN
                assert received.lines.getvalue().count("of no use") == 1

    run(test)


def test_replies_of_older_publishers_have_no_topic(tmp_path: Path) -> None:
    async def test() -> None:
        talker = KVTalker()
        talker.cache(prompt(0, 3))
        payload = talker.publish()
        async with hearing(tmp_path) as received:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.linger = 0
                router.bind(received.again)
                while not received.blocks(prompt(0, 3)):
                    while router.poll(10):
                        peer, empty, first = router.recv_multipart()
                        assert (empty, first) == (b"", bytes(8))
                        router.send_multipart([peer, b"", bytes(8), payload])
                        router.send_multipart([peer, b"", END_OF_REPLAY, b""])
                    await asyncio.get_running_loop().run_in_executor(None, _rest)

    run(test)


def test_an_address_that_is_none_is_refused_by_its_key(tmp_path: Path) -> None:
    async def test() -> None:
        locality = KVLocality(KVIndexLimits(), KEY)
        cache_view = locality.add(WORKER, model="m", is_own=False)
        log = Log(LogConfig(), SystemClock(), stream=io.StringIO())
        for events, replay, key in (
            ("nowhere", "", "kv_events"),
            (f"ipc://{tmp_path}/a", "nowhere", "kv_replay"),
        ):
            with pytest.raises(ConfigError, match=f"vllm-0: {key}: nowhere: Invalid argument"):
                KVEventSubscriber(
                    cache_view, events=events, replay=replay, config=KVIndexLimits(), log=log, worker=WORKER
                )

    run(test)


def test_without_pyzmq_the_operator_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"kv_events: needs pyzmq; install penstock\[events\]"):
        Heard(tmp_path)

"""Several servers, one real Redis: one leads, the others are heard, and clocks may be as they like."""

import asyncio
import io
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from redis_process import RedisProcess

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.flow import SharedConfig
from penstock.config.tree import LogConfig
from penstock.errors import InvalidRequest, Overloaded
from penstock.fleet.leadership import LEASE_S, MARGIN_S, Leadership
from penstock.gateway.shared.redis_store import RedisLeaderStore
from penstock.telemetry.log import Log

pytestmark = pytest.mark.skipif(not RedisProcess.is_installed(), reason="redis-server is not installed")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path_factory.mktemp("redis"))
    process.start()
    yield process
    process.kill()


class Part:
    """A controller that counts."""

    def __init__(self) -> None:
        self.count, self.unseen = b"", b""
        self.led: list[bool] = []
        self.received: list[tuple[str, bytes]] = []

    def state(self) -> bytes:
        return self.count

    def adopt(self, state: bytes, *, leads: bool) -> None:
        self.count = state or self.count
        self.led.append(leads)

    def seen(self) -> bytes:
        unseen, self.unseen = self.unseen, b""
        return unseen

    def hear(self, who: str, body: bytes) -> None:
        self.received.append((who, body))

    async def answer(self, body: bytes) -> bytes:
        if body == b"nonsense":
            raise InvalidRequest("That is no order.", param="body")
        self.count += body
        return self.count


class One:
    """One server; its clock is off by so many seconds."""

    made: ClassVar[list["One"]] = []

    def __init__(self, redis: RedisProcess, prefix: str, name: str, off_s: float = 0.0) -> None:
        self.clock = ManualClock(now_ns=int((1000 + off_s) * NS_PER_S), wall_ns=int((5e8 + off_s) * NS_PER_S))
        self.store = RedisLeaderStore(SharedConfig(url=redis.url, prefix=prefix))
        self.words = io.StringIO()
        log = Log(LogConfig(), self.clock, stream=self.words)
        self.leads = Leadership(self.store, name, self.clock, log)
        self.part = self.leads.parts["part"] = Part()
        self.made.append(self)

    async def beats(self) -> int:
        await self.leads.beat()
        return self.leads.token

    def said(self) -> str:
        return self.words.getvalue()

    async def lease_ends(self) -> None:
        """As if `LEASE_S` had gone by without a beat of the holder."""
        await self.store._client.delete(self.store._keys[0])


def play(scene: Callable[[], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        try:
            await scene()
        finally:
            while One.made:
                await One.made.pop().store.close()

    asyncio.run(run())


def test_one_leads_and_hears_the_others_and_is_followed(redis: RedisProcess) -> None:
    async def run() -> None:
        a, b = One(redis, "one", "a"), One(redis, "one", "b")
        assert [await a.beats(), await b.beats(), await a.beats(), await b.beats()] == [1, 0, 1, 0]
        assert (a.leads.holder, b.leads.holder) == ("a", "a")
        assert a.part.led == [True]
        a.part.count, b.part.unseen = b"begun", b"saw this"
        await b.beats()
        await a.beats()
        assert a.part.received == [("b", b"saw this")]
        await b.beats()
        assert b.part.count == b"begun"
        asked = asyncio.create_task(b.leads.ask("part", b"+1"))
        refused = asyncio.create_task(b.leads.ask("part", b"nonsense"))
        while not (asked.done() and refused.done()):
            await a.beats()
            await b.beats()
        assert await asked == b"begun+1"
        assert b.part.count == b"begun+1"
        with pytest.raises(InvalidRequest, match="no order"):
            await refused

    play(run)


def test_another_one_goes_on_when_the_first_is_dead_with_a_larger_token(redis: RedisProcess) -> None:
    async def run() -> None:
        a, b = One(redis, "dead", "a"), One(redis, "dead", "b", off_s=-86_400)
        a.part.count = b"a's"
        await a.beats()
        await a.beats()
        await b.beats()
        b.part.count = b""  # A controller that follows need not keep what it is told.
        await a.lease_ends()
        assert await b.beats() == 2
        assert b.part.count == b"a's"
        assert b.part.led[-1] is True

    play(run)


def test_one_that_slept_believes_in_its_lease_for_less_than_it_lasts_and_leaves_nothing(
    redis: RedisProcess,
) -> None:
    async def run() -> None:
        a, b = One(redis, "slept", "a"), One(redis, "slept", "b")
        await a.beats()
        a.clock.advance(int((LEASE_S - MARGIN_S - 0.1) * NS_PER_S))
        assert a.leads.token == 1
        # It stands still here, with a state that it is about to leave, and its clock with it.
        await a.lease_ends()
        await b.beats()
        b.part.count = b"b's"
        await b.beats()
        a.part.count = b"stale"
        assert a.leads.token == 1, "its clock has stood still: it cannot know"
        assert await a.beats() == 0
        assert a.part.count == b"b's", "the store took nothing from it"
        assert a.leads.holder == "b"
        a.clock.advance(NS_PER_S)
        assert a.leads.token == 0

    play(run)


def test_it_leads_no_longer_when_its_own_time_is_over_though_the_store_has_its_lease(
    redis: RedisProcess,
) -> None:
    async def run() -> None:
        a = One(redis, "own", "a")
        assert await a.beats() == 1
        a.clock.advance(int((LEASE_S - MARGIN_S) * NS_PER_S))
        assert a.leads.token == 0
        assert await a.beats() == 1, "the same lease, renewed"

    play(run)


def test_all_agree_on_the_date_whatever_their_clocks_say(redis: RedisProcess) -> None:
    async def run() -> None:
        servers = [One(redis, "date", str(off_s), off_s) for off_s in (-1e8, 0, 3600, 1e8)]
        for each in servers:
            await each.beats()
        dates = [each.leads.wall_ns() for each in servers]
        assert max(dates) - min(dates) < 5 * NS_PER_S
        assert [each.leads.token > 0 for each in servers] == [True, False, False, False]

    play(run)


def test_a_store_that_lost_its_memory_goes_on_above_and_learns_the_state_again(redis: RedisProcess) -> None:
    async def run() -> None:
        a, b = One(redis, "lost", "a"), One(redis, "lost", "b")
        for _ in range(3):
            await a.beats()
            await a.lease_ends()
        assert await a.beats() == 4
        a.part.count = b"state"
        await a.beats()
        await a.store._client.flushall()
        assert await a.beats() == 5
        await a.beats()
        await b.beats()
        assert b.part.count == b"state"

    play(run)


def test_something_that_bears_a_larger_token_is_outrun(redis: RedisProcess) -> None:
    async def run() -> None:
        a = One(redis, "outrun", "a")
        await a.beats()
        a.leads.outrun(41)
        assert a.leads.token == 0
        assert await a.beats() == 42

    play(run)


def test_without_its_store_nobody_leads_and_orders_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        redis = RedisProcess(tmp_path)
        a = One(redis, "away", "a")
        assert await a.beats() == 0
        with pytest.raises(Overloaded):
            await a.leads.ask("part", b"+1")
        redis.start()
        try:
            assert await a.beats() == 1
            assert a.part.count == b"", "what was refused is not carried out later"
        finally:
            redis.kill()

    play(run)


def test_a_state_that_another_release_has_left_is_no_end_of_the_beats(redis: RedisProcess) -> None:
    async def run() -> None:
        a, b = One(redis, "release", "a"), One(redis, "release", "b")
        await a.beats()
        kept = a.store._keys[2]
        await a.store._client.hset(kept, mapping={"state": b"\xc1 nonsense", "version": 10**17})
        assert await b.beats() == 0
        assert "is of another release" in b.said()
        await a.store._client.delete(kept)
        assert await b.beats() == 0
        assert b.leads.holder == "a", "it goes on"

    play(run)


def test_one_that_stops_gives_the_lease_back(redis: RedisProcess) -> None:
    async def run() -> None:
        a, b = One(redis, "stops", "a"), One(redis, "stops", "b")
        await a.leads.start()
        a.part.count = b"last words"
        await a.leads.stop()
        await a.leads.stop()
        assert await b.beats() == 2
        assert b.part.count == b"last words"

    play(run)

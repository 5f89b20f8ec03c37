"""Limits that several gateways share: real processes, a real Redis, and a store that is taken away."""

import asyncio
import bisect
import contextlib
import io
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import limit_gateways
import msgspec
import pytest
import redis as client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_process import RedisProcess

from penstock.clock import NS_PER_S, ManualClock, SystemClock
from penstock.config.flow import LimitsConfig, SharedConfig
from penstock.config.tree import LogConfig
from penstock.errors import ConfigError
from penstock.gateway.shared.keeper import LeaseKeeper, LeaseServer, LocalStore, StoreError
from penstock.gateway.shared.limits import open_store
from penstock.gateway.shared.redis_store import RedisStore
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_table import Ask, BudgetAsk, LeaseAsk, LeaseReply, LeaseTable
from penstock.policy.limits.rate_limit import Limiter, LimitRefusal
from penstock.policy.tenant import Tenant
from penstock.policy.terms import SharedTerms
from penstock.telemetry.log import Log
from penstock.types import TenantId

COUNT, RATE, BURST_S, TOKENS = 8, 60_000, 3.0, 20
SECOND, BURST = RATE // 60, 3000
LEASE_S = 0.125
LEASE = 125  # Of a gateway: an eighth of a second's worth, which is more than 1/8 of a quarter of the burst.


@dataclass
class Use:
    """What the processes of one run used, by limiter."""

    timelines: dict[str, list[list[list[int]]]]
    started_ns: int
    ended_ns: int

    def between(self, name: str, start_ns: int, end_ns: int) -> int:
        """Tokens that all processes used in (start, end]."""
        return sum(_at(timeline, end_ns) - _at(timeline, start_ns) for timeline in self.timelines[name])

    def total(self, name: str) -> int:
        return sum(timeline[-1][1] for timeline in self.timelines[name])

    @property
    def allowed(self) -> int:
        """Burst and rate over the whole time, and one lease for each process."""
        return BURST + SECOND * (self.ended_ns - self.started_ns) // NS_PER_S + COUNT * LEASE


def _at(timeline: list[list[int]], at_ns: int) -> int:
    index = bisect.bisect_right(timeline, at_ns, key=lambda point: point[0])
    return timeline[index - 1][1] if index else 0


class Processes:
    """The processes of doubles/limit_gateways.py."""

    def __init__(self, directory: Path, shared: dict[str, dict[str, object]], *, parent: str = "") -> None:
        self._directory = directory
        facts = {
            "count": COUNT,
            "directory": str(directory),
            "rate": RATE,
            "burst_s": BURST_S,
            "tokens": TOKENS,
            "parent": parent,
        }
        command = [sys.executable, limit_gateways.__file__, json.dumps(facts | {"shared": shared})]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.started_ns = 0

    def go(self) -> None:
        """Let them begin, once all have said hello to the store."""
        self._wait_for("*.ready")
        self.started_ns = time.monotonic_ns()
        (self._directory / "go").touch()

    def end(self) -> Use:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        ended_ns = time.monotonic_ns()
        self._wait_for("*.json")
        timelines: dict[str, list[list[list[int]]]] = {}
        for path in self._directory.glob("*.json"):
            for name, (_, timeline) in json.loads(path.read_text()).items():
                timelines.setdefault(name, []).append(timeline)
        return Use(timelines, self.started_ns, ended_ns)

    def _wait_for(self, pattern: str) -> None:
        for _ in range(3000):
            if len(list(self._directory.glob(pattern))) == COUNT:
                return
            time.sleep(0.01)
        raise AssertionError(f"no {pattern} from some of the processes")


@pytest.mark.alone
def test_eight_gateways_and_a_redis_that_freezes_and_dies(redis: RedisProcess, tmp_path: Path) -> None:
    common = {"url": redis.url, "lease_s": LEASE_S, "timeout_s": 0.2, "retry_s": 0.2}
    common["gateways"] = COUNT  # On a busy machine the first hello may come too late.
    policies = ("closed", "local-share", "open")
    shared = {policy: {**common, "prefix": policy, "on_store_down": policy} for policy in policies}
    processes = Processes(tmp_path, shared)
    processes.go()
    time.sleep(0.5)
    redis.freeze()
    frozen_ns = time.monotonic_ns()
    # Longer than a share of the rate takes to repay what was spent on credit: LEASE / (SECOND / COUNT).
    time.sleep(2 * COUNT * LEASE / SECOND)
    thawed_ns = time.monotonic_ns()
    redis.thaw()
    time.sleep(0.5)
    redis.kill()
    time.sleep(0.5)
    redis.start()
    time.sleep(1.5)
    use = processes.end()
    for policy in ("closed", "local-share"):
        assert use.total(policy) >= BURST
        assert use.total(policy) <= use.allowed
    # Closed: what was on lease (twice what a gateway keeps at most) and on credit when the store froze.
    assert use.between("closed", frozen_ns, thawed_ns) <= COUNT * 3 * LEASE
    late_ns = frozen_ns + (thawed_ns - frozen_ns) // 2
    assert use.between("closed", late_ns, thawed_ns) == 0
    assert use.between("local-share", late_ns, thawed_ns) > 0
    assert use.between("open", late_ns, thawed_ns) > use.allowed
    # And all of them are limited again once it is back.
    for policy in policies:
        end_ns = use.ended_ns
        after = use.between(policy, end_ns - NS_PER_S // 2, end_ns)
        assert after <= BURST + SECOND + COUNT * LEASE


@pytest.mark.alone
def test_eight_processes_of_one_parent(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    with serving(SharedTerms(lease_s=LEASE_S), path):
        processes = Processes(tmp_path, {"parent": {"lease_s": LEASE_S}}, parent=str(path))
        processes.go()
        time.sleep(0.5)
        use = processes.end()
    assert BURST <= use.total("parent") <= use.allowed


@contextlib.contextmanager
def serving(config: SharedTerms, path: Path) -> Iterator[LeaseServer]:
    """A lease server on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = LeaseServer(config, path, SystemClock())
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# --- the script and the table are one policy ------------------------------------------------------

_runs = itertools.count()
asks = st.builds(
    LeaseAsk,
    key=st.sampled_from(["a", "b"]),
    rate=st.just(1),  # Next to nothing refills while the test runs, whatever the clock does.
    burst=st.sampled_from([1000, 1000, 400, 3000]),
    seq=st.integers(1, 6),
    owed=st.sampled_from([0, 0, 30, 700]),
    returned=st.sampled_from([0, 0, 11, 200]),
    want=st.integers(0, 500),
    epoch=st.sampled_from([0, 0, 0, 7]),
    known_level=st.integers(-100, 1000),
    known_us=st.just(0),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(st.tuples(st.sampled_from("xyz"), st.lists(asks, min_size=1, max_size=3)), max_size=10),
)
def test_the_script_answers_as_the_table_does(redis: RedisProcess, batches) -> None:
    async def check() -> None:
        config = SharedTerms(url=redis.url, prefix=f"run {next(_runs)}", timeout_s=10)
        stores, table = {name: RedisStore(config, name) for name in "xyz"}, LeaseTable(config, epoch=1)
        now_ns = time.time_ns()
        try:
            for name, batch in batches:
                real = [msgspec.structs.replace(ask, known_us=now_ns // 1000) for ask in batch]
                theirs, ours = await stores[name].lease(real), table.lease(now_ns, name, real)
                assert theirs.num_gateways == ours.num_gateways
                assert [(g.granted, g.level) for g in theirs.grants] == [
                    (g.granted, g.level) for g in ours.grants
                ]
        finally:
            for store in stores.values():
                await store.close()

    asyncio.run(check())


budget_asks = st.builds(
    BudgetAsk,
    key=st.sampled_from(["day:1:a", "day:1:b"]),
    limit=st.sampled_from([1000, 1000, 400]),
    seq=st.integers(1, 6),
    process=st.sampled_from(["p", "q"]),
    spent=st.integers(0, 300),
    held=st.integers(0, 300),
    want=st.integers(0, 500),
    least=st.sampled_from([0, 100, 400]),
    kept_s=st.just(100),
    past=st.lists(st.tuples(st.sampled_from(["q", "r"]), st.integers(0, 200)), max_size=2).map(tuple),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(
        st.tuples(st.sampled_from("xyz"), st.lists(budget_asks | asks, min_size=1, max_size=3)), max_size=10
    ),
)
def test_the_budget_script_answers_as_the_table_does(redis: RedisProcess, batches) -> None:
    async def check() -> None:
        config = SharedTerms(url=redis.url, prefix=f"run {next(_runs)}", timeout_s=10)
        stores, table = {name: RedisStore(config, name) for name in "xyz"}, LeaseTable(config, epoch=1)
        try:
            for name, batch in batches:
                theirs, ours = await stores[name].lease(batch), table.lease(0, name, batch)
                assert theirs.num_gateways == ours.num_gateways
                for ask, there, here in zip(batch, theirs.grants, ours.grants, strict=True):
                    if isinstance(ask, BudgetAsk):
                        assert (there.granted, there.level) == (here.granted, here.level)
                        assert there.spent == here.spent
        finally:
            for store in stores.values():
                await store.close()

    asyncio.run(check())


def test_a_budget_in_redis_is_exact_and_not_kept_for_ever(redis: RedisProcess) -> None:
    limit = 2**53 - 1

    async def check() -> None:
        store = RedisStore(SharedTerms(url=redis.url, prefix="exact", timeout_s=10), "g")
        ask = BudgetAsk(key="k", limit=limit, seq=1, process="p", spent=limit - 3, held=1, want=9, kept_s=100)
        grant = (await store.lease([ask])).grants[0]
        assert (grant.granted, grant.level, grant.spent) == (2, 0, limit - 3)
        await store.close()

    asyncio.run(check())
    with client.Redis.from_url(redis.url) as asked:
        assert 0 < asked.pttl("exact:spent:k") <= 100_000
        assert 0 < asked.pttl("exact:held:k") <= 100_000


def test_redis_refills_by_its_own_clock(redis: RedisProcess) -> None:
    async def check() -> None:
        store = RedisStore(SharedTerms(url=redis.url, prefix="refill", timeout_s=10), "g")
        ask = {"key": "k", "rate": 600_000, "burst": 10_000}
        first = (await store.lease([LeaseAsk(**ask, seq=1, want=10_000)])).grants[0]
        assert (first.granted, first.level) == (10_000, 0)
        await asyncio.sleep(0.05)
        later = (await store.lease([LeaseAsk(**ask, seq=2)])).grants[0]
        elapsed_us = later.at_us - first.at_us
        assert later.level == pytest.approx(elapsed_us / 100, abs=2)
        assert later.epoch == first.epoch
        await store.close()

    asyncio.run(check())


# --- trouble --------------------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_said_once_and_delays_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        config, path = SharedTerms(retry_s=0.01, timeout_s=10), tmp_path / "none"
        stream, clock = io.StringIO(), SystemClock()
        leases = Leases(config)
        store = open_store(config, "g", str(path))
        assert store is not None
        keeper = LeaseKeeper(config, leases, store, clock, Log(LogConfig(), clock, stream=stream))
        await keeper.start()
        assert leases.down_ns is not None
        failures = leases.num_failures
        while leases.num_failures < failures + 5:
            await asyncio.sleep(0.01)
        limiter, who = (
            Limiter(LimitsConfig(), leases.make_bucket),
            Tenant(id=TenantId("t"), tokens_per_minute=600),
        )
        assert isinstance(limiter.reserve(clock.now_ns(), who, 300, 300), LimitRefusal)
        server = LeaseServer(config, path, clock)
        await server.start()
        while leases.down_ns is not None:
            await asyncio.sleep(0.01)
        await keeper.close()
        await server.close()
        assert stream.getvalue().count("is away") == 1
        assert stream.getvalue().count("is back") == 1

    asyncio.run(check())


class SlowAtFirst(LocalStore):
    """The first answer takes longer than the timeout of those that follow."""

    delay_s = 0.4

    async def lease(self, asks: Sequence[Ask]) -> LeaseReply:
        delay_s, self.delay_s = self.delay_s, 0.0
        await asyncio.sleep(delay_s)
        return await super().lease(asks)


def test_a_store_that_is_busy_with_its_own_start_is_not_away(tmp_path: Path) -> None:
    async def check() -> None:
        config, path, clock = SharedTerms(timeout_s=0.3), tmp_path / "s", SystemClock()
        server = LeaseServer(config, path, clock)
        await server.start()
        leases = Leases(config)
        keeper = LeaseKeeper(config, leases, SlowAtFirst(str(path), "g"), clock, Log(LogConfig(), clock))
        await keeper.start()
        assert leases.down_ns is None
        await keeper.close()
        await server.close()

    asyncio.run(check())


def test_nonsense_on_the_parents_socket_ends_that_connection_alone(tmp_path: Path) -> None:
    async def check() -> None:
        path = tmp_path / "s"
        server = LeaseServer(SharedConfig(), path, ManualClock())
        await server.start()
        good = LocalStore(str(path), "good")
        assert (await good.lease([])).num_gateways == 1
        for frame in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\2\xa1x\0\0\0\1\x01"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(frame)
            assert await reader.read() == b""
            writer.close()
        ask = LeaseAsk(key="k", rate=60, burst=60, seq=1, want=5)
        assert (await good.lease([ask])).grants[0].granted == 5
        await server.close()
        with pytest.raises(StoreError):
            await good.lease([ask])
        await good.close()

    asyncio.run(check())


def test_a_store_that_cannot_be_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"shared\.url"):
        open_store(SharedConfig(url="http://x"), "g")


def test_nothing_is_shared_unless_it_is_asked_for() -> None:
    assert open_store(SharedConfig(), "g") is None

"""What the parent of several gateway processes keeps for them, without starting any."""

import asyncio
import io
import json
import os

import msgspec
import pytest

from penstock.cli.wiring.gateway_process import read_launch
from penstock.cli.wiring.processes import GatewayProcesses, ProcessStats
from penstock.clock import SystemClock
from penstock.config.flow import SharedConfig
from penstock.config.ledger import LedgerConfig
from penstock.config.tree import AuthConfig, Config, LogConfig, ServerConfig, TenantConfig
from penstock.errors import OperatorError
from penstock.fleet.launchers.process import WorkerLogs, WorkerTails
from penstock.fleet.registry import Registry
from penstock.fleet.scaling import ScaleLeader
from penstock.fleet.sleep import SleepKeeper
from penstock.gateway.api.services import AllRequests, EndedRequest, RecentRequests
from penstock.gateway.shared import peers as peers_module
from penstock.gateway.shared.peers import GatewayPeers
from penstock.policy.admission.admit import Promises
from penstock.policy.lifecycle.machine_costs import Costs
from penstock.policy.limits.price import MICROS
from penstock.policy.queueing.fair_counters import FairCounters
from penstock.protocol.peers import ChildLaunch, ChildReport, LookAt, Snapshot
from penstock.telemetry.audit import Notes
from penstock.telemetry.costs import COSTS_DIRECTORY, CostDays, read_days
from penstock.telemetry.counts import Series
from penstock.telemetry.history import Recorder
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.watch import Tail, no_tail

TEXT = b"# HELP a_total A.\n# TYPE a_total counter\na_total %d.0\n# HELP g G.\n# TYPE g gauge\ng %d.0\n"


def processes(ledger: str = "", tail: Tail = no_tail, **shared: object) -> GatewayProcesses:
    config = Config(
        server=ServerConfig(port=0, processes=3),
        auth=AuthConfig(disabled=True),
        shared=SharedConfig(**shared),
        ledger=LedgerConfig(directory=ledger),
    )
    clock = SystemClock()
    log = Log(LogConfig(), clock, stream=io.StringIO())
    registry = Registry(clock, log)
    sleeper = SleepKeeper(registry, clock, log, idle_s={}, bound_bytes=0)
    scaler = ScaleLeader([], config, registry, clock, log)
    return GatewayProcesses(
        config, clock, log, sleeper, scaler=scaler, hash_key=b"0123456789abcdef", tail=tail
    )


def test_the_processes_share_their_limits_through_the_parent() -> None:
    async def check() -> None:
        made = processes()
        await made.start([])
        assert made._leases is not None
        assert made._leases.path.is_socket()
        await made.kill()
        await made.kill()
        assert not made._leases.path.exists()

    asyncio.run(check())


def test_reports_may_follow_the_launch_at_once() -> None:
    launch = ChildLaunch(
        config=msgspec.json.encode(Config()), index=1, listeners=(), workers=(), parent="", hash_key=b"k"
    )
    report = msgspec.json.encode(ChildReport(held={})) + b"\n"
    read, write = os.pipe()
    os.write(write, msgspec.json.encode(launch) + b"\n" + report)
    try:
        assert read_launch(read) == (launch, report)
    finally:
        os.close(read)
        os.close(write)


def test_where_no_process_can_serve_the_start_ends_at_once_and_says_why(tmp_path, monkeypatch, capfd) -> None:
    """Here because a package is missing, which only the processes need."""
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "__init__.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def check() -> None:
        made = processes(url="redis://127.0.0.1:1/0")
        await made.start([])
        try:
            with pytest.raises(OperatorError, match="cannot serve with this configuration"):
                await made.open([])
        finally:
            await made.kill()

    asyncio.run(check())
    said = capfd.readouterr().err
    assert "penstock: shared.url: Redis needs the extra: pip install 'penstock[redis]'" in said
    assert "Traceback" not in said


def test_redis_stays_redis() -> None:
    async def check() -> None:
        made = processes(url="redis://127.0.0.1:1/0")
        await made.start([])
        assert made._leases is None
        await made.kill()

    asyncio.run(check())


def test_a_configuration_that_no_process_would_take_replaces_nothing() -> None:
    async def check() -> None:
        made, reported = processes(), list[ChildReport]()
        made._tell = reported.append  # type: ignore[method-assign]
        running = made._config
        replace = msgspec.structs.replace
        # Good for itself, and not beside the tiers that stay.
        keyless = replace(running, auth=AuthConfig())
        assert not await made.reload(keyless)
        wrong = replace(running, tenants=(TenantConfig(id="acme", tier="none"),))
        assert not await made.reload(wrong)
        assert (made._config, reported) == (running, [])
        good = replace(running, tenants=(TenantConfig(id="acme", weight=2),), server=ServerConfig(port=1))
        assert await made.reload(good)
        assert made._config.tenants == good.tenants
        assert made._config.server == running.server  # That waits for a restart.
        (update,) = reported
        assert msgspec.json.decode(update.config, type=Config) == made._config
        await made.kill()

    asyncio.run(check())


def test_what_happens_in_a_process_is_in_the_parents_audit_trail(tmp_path) -> None:
    async def check() -> None:
        made = processes(ledger=str(tmp_path))
        await made.start([])
        peers = GatewayPeers(made._path)
        recorder = Recorder(Promises(made._config.admission), Metrics(["m"], version="1"))
        await peers.start(lambda: snapshot(1, 1), FairCounters([], lambda _: None), recorder, bytes)
        Notes(SystemClock(), peers.keep).note("admin", "drained", "m-0", by="sk-abc")
        assert not await made.reload(msgspec.structs.replace(made._config, auth=AuthConfig()))
        reported = json.loads(await peers.look(LookAt("audit", limit=10)))["events"]
        assert [(each["kind"], each["what"]) for each in reported] == [
            ("admin", "drained"), ("config", "refused"), ("server", "started"),
        ]  # fmt: skip
        assert reported[1]["why"].startswith("auth: it names no caller")
        peers.close()
        await made.kill()

    asyncio.run(check())


def test_the_last_requests_of_all_processes_are_seen_from_each_and_workers_last_lines(monkeypatch) -> None:
    def ended(name: str) -> EndedRequest:
        return EndedRequest(
            number=1, id=name, came_ms=0, came_ns=0, endpoint="chat", model="m", status=200, outcome="stop",
            total_ms=1.0,
        )  # fmt: skip

    async def check() -> None:
        tails = WorkerTails()
        say = WorkerLogs(lambda _: None, tails=tails).of("m-0", SystemClock())
        say("[m-0] loading weights")
        made = processes(tail=tails.of)
        await made.start([])
        owns, links = [], []
        for _ in "ab":
            peers, own = GatewayPeers(made._path), RecentRequests(SystemClock())
            recorder = Recorder(Promises(made._config.admission), Metrics(["m"], version="1"))
            await peers.start(
                lambda: snapshot(1, 1), FairCounters([], lambda _: None), recorder, own.take_unreported
            )
            owns.append((peers, own, recorder))
            links.append(AllRequests(own, SystemClock(), peers))

        async def end(which: int, *names: str) -> None:
            _, own, recorder = owns[which]
            for name in names:
                own._kept.append(ended(name))
                own.num_ended += 1
                own._kept[-1].number = own.num_ended
                recorder._book.of(Series("m", "default")).prompt_tokens += 1
            await links[which].look()  # It tells the parent before it asks.

        await end(0, "a1", "a2")
        await end(1, "b1")
        await end(0, "a3")
        for all_requests in links:
            assert [each.id for each in (await all_requests.look()).latest()] == ["a3", "b1", "a2", "a1"]
            assert [each.number for each in (await all_requests.look()).since(2, 10)] == [4, 3]
            assert (await all_requests.find("b1")).id == "b1"
        assert [each.number for each in owns[1][1].latest()] == [1], "its own numbers are left alone"
        reported = json.loads(await owns[1][0].look(LookAt("log", about="m-0")))
        assert [line["text"] for line in reported["lines"]] == ["loading weights"]
        assert json.loads(await owns[1][0].look(LookAt("log", about="m-1")))["lines"] is None
        for peers, _, _ in owns:
            peers.close()
        await made.kill()
        monkeypatch.setattr(peers_module, "ANSWER_TIMEOUT_S", 0.001)
        assert (await links[0].look()).num_ended == 4, "without the parent what is known is shown"

    asyncio.run(check())


def snapshot(counter: int, gauge: int) -> Snapshot:
    return Snapshot(metrics=TEXT % (counter, gauge), connections=gauge, streams=gauge)


def test_counters_outlive_their_process_and_gauges_do_not() -> None:
    numbers = ProcessStats()
    numbers.record("a", snapshot(5, 2))
    numbers.record("b", snapshot(7, 3))
    numbers.record("a", snapshot(6, 4))
    assert (numbers.sum().streams, numbers.sum().processes) == (7, 2)
    numbers.ended("a")
    numbers.ended("a")
    numbers.record("c", snapshot(1, 1))
    found = numbers.sum()
    assert b"a_total 14.0" in found.metrics
    assert b"\ng 4.0" in found.metrics
    assert (found.connections, found.processes) == (4, 2)


def costs_snapshot(idle: int, charged: int) -> Snapshot:
    metrics = Metrics(["m"], version="1")
    metrics.accelerator_costs({"m": Costs(idle=idle * MICROS, charged=charged * MICROS)})
    return Snapshot(metrics=metrics.render(), connections=0, streams=0)


def test_the_end_of_a_process_books_no_cost_again(tmp_path) -> None:
    numbers, days = ProcessStats(), CostDays(tmp_path, SystemClock(), keep_days=0)
    numbers.record("a", costs_snapshot(102, 4))
    numbers.record("b", costs_snapshot(100, 5))
    days.take(numbers.sum().metrics)
    numbers.ended("a")
    days.take(numbers.sum().metrics)
    numbers.record("b", costs_snapshot(103, 6))
    days.take(numbers.sum().metrics)
    numbers.ended("b")
    days.take(numbers.sum().metrics)
    days.write()
    (found,) = read_days(tmp_path).values()
    assert (found.idle, found.charged) == (105, 10)


def test_what_was_counted_last_before_the_end_is_kept(tmp_path, monkeypatch) -> None:
    async def check() -> None:
        made = processes(ledger=str(tmp_path))
        await made.start([])
        for who, snapshot in (("a", costs_snapshot(7, 3)), ("b", costs_snapshot(6, 2))):
            made._stats.record(who, snapshot)
        monkeypatch.setattr(made, "_tell", lambda _: [made._stats.ended(who) for who in ("a", "b")])
        await made.stop()

    asyncio.run(check())
    (found,) = read_days(tmp_path / COSTS_DIRECTORY).values()
    assert (found.idle, found.charged) == (7, 5)

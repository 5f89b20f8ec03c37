"""The console's feed: what changed in the last second, as server-sent events.

    event: hello       who watches: an admin, a viewer of all numbers, or a tenant
    event: fleet       the server's numbers, every model, and of each worker the fields that changed; the
                       first event has all of them (`whole`)
    event: requests    requests that ended meanwhile, newest first
    event: own         for a tenant: its own numbers, and nothing of others

One task makes the events, once for all watchers and only while there are any. A watcher that reads too slowly
misses events and then gets a whole one. Its stream ends after `WATCH_S_MAX`, so that a key that was revoked
meanwhile stops working.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S, Clock, sleep
from penstock.config.routing import AdmissionConfig
from penstock.errors import Overloaded
from penstock.gateway.api.services import AllRequests, EndedRequest, RecentRequests
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.identity.tenants import Caller
from penstock.protocol.fleet import FleetReport, WorkerReport
from penstock.telemetry.log import Log

EVERY_S = 1.0
WATCHERS_MAX = 32
"""Streams of one gateway process."""
WATCH_S_MAX = 600.0
REQUESTS_MAX = 100
"""Requests in one event; of more, the newest."""
FIRST_REQUESTS_MAX = 300
RECEIVED_S = 5.0
"""A worker that reported within this time has no age: it would change with every event."""

_encode = msgspec.json.Encoder().encode


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The observer, and the promise to requests whose tier and band have none of their own."""

    role: str
    tenant: str
    ttft_target_ms: float
    tpot_target_ms: float


class ServerLine(msgspec.Struct, frozen=True, kw_only=True):
    """The server's own numbers."""

    version: str
    uptime_s: int
    connections: int
    streams: int
    processes: int
    draining: bool
    auth: bool


Look = Callable[[], Awaitable[tuple[ServerLine, FleetReport]]]
LookOwn = Callable[[Caller], Any]


@dataclass(slots=True, eq=False)
class _Watcher:
    """One stream."""

    exchange: Exchange
    caller: Caller
    sees_requests: bool
    ends_ns: int
    needs_whole: bool = True
    seen: int = field(default=0)
    """The number of the last request that it was sent."""


class Feed:
    """All streams of one gateway process."""

    def __init__(
        self,
        look: Look,
        look_own: LookOwn,
        recent: AllRequests,
        promises: AdmissionConfig,
        *,
        clock: Clock,
        log: Log,
    ) -> None:
        self._look, self._look_own, self._recent = look, look_own, recent
        self._promises, self._clock, self._log = promises, clock, log
        self._watchers: set[_Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._workers: dict[str, dict[str, Any]] = {}
        """As they were in the last event."""

    def __len__(self) -> int:
        """Streams that are open."""
        return len(self._watchers)

    def watch(self, exchange: Exchange, caller: Caller, *, sees_requests: bool) -> None:
        """Begin a stream; `sees_requests` of all tenants.

        Raises:
            Overloaded: there are too many.
        """
        if len(self._watchers) >= WATCHERS_MAX:
            raise Overloaded("Too many consoles watch this server.", retry_after_s=EVERY_S)
        ends_ns = self._clock.now_ns() + round(WATCH_S_MAX * NS_PER_S)
        watcher = _Watcher(exchange, caller, sees_requests, ends_ns)
        self._watchers.add(watcher)
        exchange.begin_stream()
        role = "admin" if sees_requests else "viewer" if caller.sees_all else "tenant"
        hello = Hello(
            role=role,
            tenant=caller.tenant.id,
            ttft_target_ms=self._promises.ttft_target_ms,
            tpot_target_ms=self._promises.tpot_target_ms,
        )
        exchange.write(_event("hello", hello))
        exchange.on_disconnect = lambda: self._watchers.discard(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="console feed")

    def close(self) -> None:
        """End every stream: the server is leaving."""
        watchers, self._watchers = self._watchers, set()
        if self._task is not None:
            self._task.cancel()
        for watcher in watchers:
            watcher.exchange.end()

    async def _run(self) -> None:
        while self._watchers:
            try:
                await self._tick()
            except Exception as error:  # noqa: BLE001 - a page that looks must not end for a bug in one look.
                self._log.bug("the console's feed failed", error)
            await sleep(EVERY_S)

    async def _tick(self) -> None:
        now_ns = self._clock.now_ns()
        for watcher in [each for each in self._watchers if each.ends_ns <= now_ns]:
            self._watchers.discard(watcher)
            watcher.exchange.end()
        if any(watcher.caller.sees_all for watcher in self._watchers):
            await self._tell_fleet()
        recent = await self._recent.look()
        for watcher in list(self._watchers):
            if not watcher.exchange.is_behind:
                self._tell_requests(watcher, recent)

    async def _tell_fleet(self) -> None:
        server, report = await self._look()
        workers = {worker.id: _plain(worker) for worker in report.workers}
        before, self._workers = self._workers, workers
        head = {"at_ms": self._clock.wall_ns() // NS_PER_MS, "server": server, "models": report.models}
        changed = {name: _changes(before.get(name, {}), worker) for name, worker in workers.items()}
        gone = [name for name in before if name not in workers]
        changes = {name: fields for name, fields in changed.items() if fields}
        delta = _event("fleet", head | {"whole": False, "workers": changes, "gone": gone})
        whole: bytes | None = None
        for watcher in list(self._watchers):
            if not watcher.caller.sees_all:
                continue
            if watcher.exchange.is_behind:
                watcher.needs_whole = True
            elif watcher.needs_whole:
                whole = whole or _event("fleet", head | {"whole": True, "workers": workers, "gone": []})
                watcher.needs_whole = False
                watcher.exchange.write(whole)
            else:
                watcher.exchange.write(delta)

    def _tell_requests(self, watcher: _Watcher, recent: RecentRequests) -> None:
        tenant = None if watcher.sees_requests else watcher.caller.tenant.id
        if not watcher.caller.sees_all:
            watcher.exchange.write(_event("own", self._look_own(watcher.caller)))
        elif not watcher.sees_requests:
            return
        limit = REQUESTS_MAX if watcher.seen else FIRST_REQUESTS_MAX
        ended: list[EndedRequest] = recent.since(watcher.seen, limit, tenant)
        watcher.seen = recent.num_ended
        if ended:
            watcher.exchange.write(_event("requests", ended))


def _plain(worker: WorkerReport) -> dict[str, Any]:
    age_s = worker.age_s
    shown = None if age_s is None or age_s < RECEIVED_S else float(round(age_s))
    return msgspec.to_builtins(msgspec.structs.replace(worker, age_s=shown))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(data))

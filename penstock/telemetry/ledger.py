"""The usage ledger of one gateway process: a journal that is written before anything is done, and a database
behind it.

ledger = Ledger(config.ledger, clock, log)
await ledger.start()        # recovers what dead processes left
ledger.open(make)           # accepted: raises Overloaded if it cannot be written down
ledger.flush()              # before anything is started or the last byte is sent
ledger.slice(id, make)      # at every slice boundary; `make` is called when it is written
ledger.close(make)          # over: exactly once for each that was opened, by this or by
ledger.close_soon(make)     # which writes with the next flush
await ledger.stop()         # writes and delivers all

Records are made where they are written: a ledger that is switched off makes none. `RequestRecords` makes
these calls of what the driver says of a request.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from penstock.clock import Clock
from penstock.config.branch import extended
from penstock.config.ledger import LedgerConfig
from penstock.errors import LedgerError
from penstock.policy.flow import Outcome, RequestFacts, UsageRecord
from penstock.policy.limits.budget import Spent
from penstock.policy.limits.price import PriceList
from penstock.policy.request import Request
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger_journal import Journal
from penstock.telemetry.ledger_recovery import Damage, LedgerReader, recover_abandoned, report_damage
from penstock.telemetry.ledger_segment import LEDGER_LIMITS, Claim, LedgerLimits, Progress
from penstock.telemetry.ledger_sink import Delivery, Follower, LedgerSink, SinkError, SqliteSink
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import LedgerStatistics, Metrics
from penstock.types import Usage

USER_CHARS_MAX = 256
"""Of the `user` field, which a client can make as long as a body."""
STOP_S = 10.0
"""How long stopping waits for a sink that lags; the journal keeps what it did not take."""


class LedgerTerms(LedgerConfig, frozen=True, kw_only=True):
    """The section, and how often the journal is synced."""

    fsync_ms: int = 100
    """The largest loss by a power failure; a process that is killed loses nothing."""


class Ledger:
    """Everything around the journal. With `ledger.enabled: false` every call does nothing."""

    def __init__(
        self,
        config: LedgerConfig,
        clock: Clock,
        log: Log,
        *,
        sink: LedgerSink | None = None,
        limits: LedgerLimits = LEDGER_LIMITS,
    ) -> None:
        """`sink` is the SQLite database unless another one is given."""
        self._config, self._clock, self._log, self._sink = extended(config, LedgerTerms), clock, log, sink
        self._limits = limits
        self.directory = ledger_segment.ledger_directory(config)
        self._journal: Journal | None = None
        self._is_flush_due = False
        self._ends: list[Callable[[], UsageRecord]] = []
        self._syncing = threading.Event()

    async def start(self) -> None:
        """Recover what dead processes left, then begin. Call it in the event loop whose thread will use it.

        Raises:
            LedgerError: the directory or the database cannot be used.
        """
        if not self._config.enabled:
            return
        await asyncio.to_thread(self._prepare)
        self._loop = asyncio.get_running_loop()

    def _prepare(self) -> None:
        config = self._config
        claim = ledger_segment.claim_new(self.directory, self._clock)
        try:
            if self._sink is None:
                path = ledger_segment.database_path(self.directory)
                self._sink = SqliteSink(path, self._clock, keep_days=config.keep_days)
            self._recover(self._sink)
            journal = Journal(claim, config, self._clock, self._trouble, self._limits)
        except OSError as error:
            claim.release(remove=True)
            raise LedgerError(f"ledger.directory: {self.directory}: {error.strerror}") from error
        except LedgerError:
            claim.release(remove=True)
            raise
        self._claim: Claim = claim
        self._follower = Follower(claim, journal, self._sink, self._limits.deliver_records_max, self._damaged)
        self._delivery = Delivery(self._follower, self._limits, self._clock, self._log)
        self._sync = threading.Thread(
            target=self._keep_synced, args=(journal,), name="ledger-sync", daemon=True
        )
        self._delivery.start()
        self._sync.start()
        self._journal = journal

    def _recover(self, sink: LedgerSink) -> None:
        try:
            recover_abandoned(self.directory, sink, self._log)
        except SinkError as error:
            # It stays where it is, and the next process tries again.
            self._log.error("what a crash left of the ledger cannot be recovered now", error=error)

    async def stop(self) -> None:
        """Write, sync and deliver; what the sink does not take stays in the journal for the next start."""
        self.flush()
        journal, self._journal = self._journal, None
        if journal is not None:
            await asyncio.to_thread(self._finish, journal)

    def _finish(self, journal: Journal) -> None:
        self._syncing.set()
        self._sync.join()
        clean = False
        with contextlib.suppress(OSError):
            clean = journal.stop()
        delivered = self._delivery.stop(STOP_S)
        if delivered:
            self._follower.stop()
            assert self._sink is not None
            self._sink.close()
        if not (clean and delivered):
            self._log.warning(
                "the ledger's journal is kept for the next start", directory=str(self.directory)
            )
        self._claim.release(remove=clean and delivered)

    # --- one request -----------------------------------------------------------------------------

    def open(self, make: Callable[[], UsageRecord]) -> None:
        """A request is accepted; `make` says the facts known now, which stand if no more follows.

        Raises:
            Overloaded: it cannot be written down, and `ledger.when_full` says to refuse.
        """
        if self._journal is not None:
            self._journal.open(_bounded(make()))
            self._flush_soon()

    def slice(self, request_id: str, make: Callable[[], Progress]) -> None:
        """It has used more; `make` says how much until now, and is called when that is written."""
        if self._journal is not None:
            self._journal.slice(request_id, make)
            self._flush_soon()

    def close(self, make: Callable[[], UsageRecord]) -> None:
        """It is over; exactly once. The journal has it and it is written when this returns, unless the disk
        takes nothing: then with the next flush.
        """
        if self._journal is not None:
            self._ends.append(make)
            self.flush()

    def close_soon(self, make: Callable[[], UsageRecord]) -> None:
        """It is over; exactly once. `flush` makes its record and writes it: call that before its client hears
        of the end. By itself that happens in the next iteration of the event loop.
        """
        if self._journal is not None:
            self._ends.append(make)
            self._flush_soon()

    def flush(self) -> None:
        """Write what this iteration of the event loop has said. By itself that happens at the next one."""
        if self._journal is not None:
            ends, self._ends = self._ends, []
            for make in ends:
                try:
                    self._journal.close(_bounded(make()))
                except Exception as error:  # noqa: BLE001 - one record's bug must not lose the others.
                    self.bug("the end of a request could not be recorded", error)
            self._journal.flush()

    def bug(self, what: str, error: Exception) -> None:
        """Log that something of a record could not be made."""
        self._log.bug(what, error)

    async def spent(self) -> list[Spent]:
        """The spending of every tenant of this day and month, by each process that wrote to this directory:
        for `TenantBudgets.restore`.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        return await asyncio.to_thread(self._spent) if self._config.enabled else []

    def _spent(self) -> list[Spent]:
        with LedgerReader(self.directory) as reader:
            return reader.spent(self._clock.wall_ns())

    def statistics(self) -> LedgerStatistics:
        """For /metrics."""
        journal = self._journal
        if journal is None:
            return LedgerStatistics(closed=0, pending=0, lost=0, sink_errors=0, journal_bytes=0, open=0)
        return LedgerStatistics(
            closed=journal.closed,
            pending=journal.closed - self._follower.delivered,
            lost=journal.lost,
            sink_errors=self._delivery.errors,
            journal_bytes=journal.disk_bytes,
            open=journal.live,
        )

    # --- inside ----------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self.flush()

    def _keep_synced(self, journal: Journal) -> None:
        while not self._syncing.wait(self._config.fsync_ms / 1000):
            try:
                journal.sync()
            except OSError as error:
                self._trouble("the journal cannot be synced", error)

    def _damaged(self, path: Path, offset: int, length: int) -> None:
        report_damage(self.directory, self._claim.instance, Damage(path, offset, length), self._log)

    def _trouble(self, what: str, error: Exception) -> None:
        if isinstance(error, OSError):
            self._log.error(what, error=error, directory=str(self.directory))
        else:
            self.bug(what, error)


def _bounded(record: UsageRecord) -> UsageRecord:
    if len(record.user) <= USER_CHARS_MAX:
        return record
    return replace(record, user=record.user[:USER_CHARS_MAX])


class RequestRecords:
    """Records and counts of requests: the driver's `Records`, over the ledger and the metrics.

    All that one turn of the event loop accepted is written to the journal together.
    """

    def __init__(self, ledger: Ledger, prices: PriceList, metrics: Metrics, clock: Clock) -> None:
        self._ledger, self._prices, self._metrics, self._clock = ledger, prices, metrics, clock
        self.flush = ledger.flush
        """Write what was opened before it is started, and what ended before its client hears of it."""

    def opened(self, request: Request) -> None:
        """See `driver.Records`."""
        self._ledger.open(partial(_opening_record, request.facts, self._clock.wall_ns()))

    def progressed(self, request: Request) -> None:
        """See `driver.Records`. As a rule a short answer ends before this would be written.

        Of a whole answer its client has nothing before the end.
        """
        if not request.facts.is_whole:
            self._ledger.slice(request.facts.id, partial(self._progress, request))

    def closed(self, request: Request, machine_micros: int) -> None:
        """See `driver.Records`. `flush` writes that of a good whole answer, with the others of its turn of
        the event loop: its client has nothing before that.
        """
        together = request.facts.is_whole and request.outcome is Outcome.FINISHED
        close = self._ledger.close_soon if together else self._ledger.close
        close(partial(self._record, request, machine_micros, self._clock.wall_ns()))

    def _record(self, request: Request, machine_micros: int, wall_ns: int) -> UsageRecord:
        try:
            record = request.record(wall_ns)
            if version := self._prices.version:
                record = replace(record, price_version=version, accelerator_cost_micros=machine_micros)
            return record
        except Exception as error:  # noqa: BLE001 - no client hears of an end that has no record.
            self._ledger.bug(f"the usage of {request.id} could not be recorded", error)
            return replace(_opening_record(request.facts, wall_ns), error=type(error).__name__)

    def _progress(self, request: Request) -> Progress:
        facts = request.facts
        usage = Usage(
            prompt_tokens=facts.prompt_tokens,
            cached_tokens=request.counted_cached_tokens,
            completion_tokens=request.completion_tokens,
        )
        return Progress(
            request_id=facts.id,
            at_ns=self._clock.wall_ns(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            cost_micros=self._prices.cost_micros(facts.route, usage) if self._prices.are_any else 0,
            worker=request.worker,
        )

    def predicted(self, request: Request, error: float) -> None:
        """See `driver.Records`."""
        self._metrics.predicted(request.facts.route, error)

    def refused(self, route: str, reason: str) -> None:
        """See `driver.Records`."""
        self._metrics.refused(route, reason)

    def diverted(self, route: str, why: str) -> None:
        """See `driver.Records`."""
        self._metrics.diverted(route, why)

    def evicted(self, route: str, reason: str) -> None:
        """See `driver.Records`."""
        self._metrics.evicted(route, reason)

    def timed_out(self, request: Request) -> None:
        """See `driver.Records`."""
        self._metrics.timed_out(request.facts.route)

    def tried_again(self, request: Request) -> None:
        """See `driver.Records`."""
        count = self._metrics.migrated if request.has_begun else self._metrics.retried
        count(request.facts.route)


def _opening_record(facts: RequestFacts, wall_ns: int) -> UsageRecord:
    """The facts of a request when it is accepted. It stands if this process ends without another word."""
    tenant, requested = facts.tenant, facts.requested_model or facts.route
    return UsageRecord(
        request_id=facts.id,
        ended_ns=wall_ns,
        tenant=tenant.id,
        tier=tenant.tier,
        key_prefix=facts.key_prefix,
        user=facts.user,
        endpoint=facts.endpoint,
        requested_model=requested,
        served_model=facts.route,
        route_reason=facts.diverted if requested != facts.route else "",
        adapter=facts.adapter,
        band=tenant.band,
        outcome=Outcome.FAILED,
        error="GatewayLost",
        choices=facts.choices,
        origin=facts.origin,
        origin_id=facts.origin_id,
    )

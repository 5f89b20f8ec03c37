"""The usage ledger of one gateway process: a journal that is written before anything is done, and a database
behind it.

ledger = Ledger(config.ledger, clock, log)
await ledger.start()        # recovers what dead processes left
ledger.open(record)         # accepted: raises Overloaded if it cannot be written down
ledger.flush()              # before anything is started or the last byte is sent
ledger.slice(id, make)      # at every slice boundary; `make` is called when it is written
ledger.close(record)        # over: exactly once for each that was opened
await ledger.stop()         # writes and delivers all
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.clock import Clock
from penstock.config.branch import extended
from penstock.config.ledger import LedgerConfig
from penstock.errors import LedgerError
from penstock.policy.flow import UsageRecord
from penstock.policy.limits.budget import Spent
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger_journal import Journal
from penstock.telemetry.ledger_recovery import Damage, LedgerReader, recover_abandoned, report_damage
from penstock.telemetry.ledger_segment import LEDGER_LIMITS, Claim, LedgerLimits, Progress
from penstock.telemetry.ledger_sink import Delivery, Follower, LedgerSink, SinkError, SqliteSink
from penstock.telemetry.log import Log

USER_CHARS_MAX = 256
"""Of the `user` field, which a client can make as long as a body."""
STOP_S = 10.0
"""How long stopping waits for a sink that lags; the journal keeps what it did not take."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LedgerStatistics:
    """How the ledger is doing."""

    closed: int
    """Records that were closed."""
    pending: int
    """Closed records that the database does not have yet."""
    lost: int
    sink_errors: int
    journal_bytes: int
    open: int
    """Requests that were accepted and are not over."""


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
            journal = Journal(claim, config, self._clock, self._disk_trouble, self._limits)
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

    def open(self, record: UsageRecord) -> None:
        """A request is accepted; `record` has the facts known now, and stands if no more follows.

        Raises:
            Overloaded: it cannot be written down, and `ledger.when_full` says to refuse.
        """
        if self._journal is not None:
            self._journal.open(_bounded(record))
            self._flush_soon()

    def slice(self, request_id: str, make: Callable[[], Progress]) -> None:
        """It has used more; `make` says how much until now, and is called when that is written."""
        if self._journal is not None:
            self._journal.slice(request_id, make)
            self._flush_soon()

    def close(self, record: UsageRecord) -> None:
        """It is over; exactly once."""
        if self._journal is not None:
            self._journal.close(_bounded(record))
            self._flush_soon()

    def flush(self) -> None:
        """Write what this iteration of the event loop has said. By itself that happens at the next one."""
        if self._journal is not None:
            self._journal.flush()

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
                self._disk_trouble("the journal cannot be synced", error)

    def _damaged(self, path: Path, offset: int, length: int) -> None:
        report_damage(self.directory, self._claim.instance, Damage(path, offset, length), self._log)

    def _disk_trouble(self, what: str, error: OSError) -> None:
        self._log.error(what, error=error, directory=str(self.directory))


def _bounded(record: UsageRecord) -> UsageRecord:
    if len(record.user) <= USER_CHARS_MAX:
        return record
    return msgspec.structs.replace(record, user=record.user[:USER_CHARS_MAX])

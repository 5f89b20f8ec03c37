"""Where records end up: the contract of every sink, and the thread that brings them there.

Delivery is at least once: a batch counts as delivered only when `write` has returned, and is written again
after any trouble. A sink keeps one record for an id, so every record is in it exactly once.
"""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from penstock.clock import NS_PER_S, Clock
from penstock.errors import LedgerError
from penstock.policy.record import UsageRecord
from penstock.telemetry.ledger_files import Claim, segment_path
from penstock.telemetry.ledger_journal import Journal
from penstock.telemetry.ledger_limits import LedgerLimits
from penstock.telemetry.ledger_segment import (
    FRAME_BYTES_MAX,
    MAGIC,
    Kind,
    decode_record,
    next_frame,
    read_frames,
)
from penstock.telemetry.log import Log

READ_BYTES = 1024 * 1024
BACK_OFF_MAX_S = 30.0


class SinkError(LedgerError):
    """The sink takes nothing for now; what was to be written must be written again."""


class LedgerSink(Protocol):
    """A place for records. Used by one thread at a time."""

    def write(self, records: Sequence[UsageRecord]) -> None:
        """Keep them for good before returning; an id that is known already keeps its first record.

        Raises:
            SinkError: none or only some of them are kept; writing all of them again is right.
        """
        ...

    def close(self) -> None:
        """Nothing more will be written."""
        ...


OnDamage = Callable[[Path, int, int], None]
"""A segment, and where in it how many bytes cannot be read."""


class Follower:
    """Reads a journal behind its writer and brings every closed record to a sink."""

    def __init__(
        self, claim: Claim, journal: Journal, sink: LedgerSink, records_max: int, on_damage: OnDamage
    ) -> None:
        self._claim, self._journal, self._sink, self._records_max = claim, journal, sink, records_max
        self._on_damage = on_damage
        self._sequence, self._offset = 1, 0
        self._fd: int | None = None
        self.delivered = 0
        """Records that the sink has."""

    def deliver(self) -> bool:
        """Deliver one batch; False if there was nothing.

        Raises:
            SinkError: the sink failed; the same batch comes again.
            LedgerError, OSError: the journal cannot be read.
        """
        self._journal.remove(self._sequence - 1)
        records: list[UsageRecord] = []
        offset = self._offset
        length, is_final = self._journal.length(self._sequence)
        if offset < length:
            data = self._read(offset, min(length - offset, READ_BYTES))
            begin = len(MAGIC) if offset == 0 else 0
            end = begin
            for frame in read_frames(data, begin):
                end = frame.end
                if frame.kind == Kind.CLOSE:
                    records.append(decode_record(frame.body))
                    if len(records) >= self._records_max:
                        break
            if end == begin:
                end = self._pass_damage(data, offset, begin, num_left=length - offset)
            offset += end
        if records:
            self._sink.write(records)
            self.delivered += len(records)
        moved = offset > self._offset
        self._offset = offset
        if is_final and offset >= length:
            self._next_segment()
            moved = True
        return moved

    def stop(self) -> None:
        """Close what is open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _pass_damage(self, data: bytes, offset: int, begin: int, *, num_left: int) -> int:
        """Nothing begins at `begin` of `data`, though all of it was written: where to continue."""
        end = next_frame(data, begin)
        if end is None and len(data) == num_left:
            end = len(data)
        if end is None:
            # The frame that begins behind the damage may be cut off by the end of what was read.
            end = len(data) - FRAME_BYTES_MAX
        path = segment_path(self._claim.directory, self._sequence)
        self._on_damage(path, offset + begin, end - begin)
        return end

    def _read(self, offset: int, num_bytes: int) -> bytes:
        if self._fd is None:
            path = segment_path(self._claim.directory, self._sequence)
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._fd, num_bytes, offset)

    def _next_segment(self) -> None:
        self.stop()
        self._sequence, self._offset = self._sequence + 1, 0


class Delivery:
    """The thread around a `Follower`: a sink that lags or fails makes nobody wait."""

    def __init__(self, follower: Follower, limits: LedgerLimits, clock: Clock, log: Log) -> None:
        self._follower, self._limits, self._clock, self._log = follower, limits, clock, log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-delivery", daemon=True)
        self.errors = 0
        """Times that the sink failed."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Deliver what is left and end; blocks. False if that did not work in time or the sink fails."""
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        deadline_ns = self._clock.now_ns() + int(timeout_s * NS_PER_S)
        while self._clock.now_ns() < deadline_ns:
            if not self._try():
                return False
            if not self._moved:
                return True
        return False

    def _run(self) -> None:
        pause_s = self._limits.deliver_ms / 1000
        back_off_s = pause_s
        while not self._stop.wait(back_off_s):
            self._moved = True
            healthy = True
            while healthy and self._moved and not self._stop.is_set():
                healthy = self._try()
            back_off_s = pause_s if healthy else min(BACK_OFF_MAX_S, max(1.0, back_off_s * 2))

    _moved = True

    def _try(self) -> bool:
        try:
            self._moved = self._follower.deliver()
        except (LedgerError, OSError) as error:
            self.errors += 1
            self._log.warning("the ledger's records wait in the journal", error=error)
            return False
        except Exception as error:  # noqa: BLE001 - a bug here must not end the delivery unseen.
            self.errors += 1
            self._log.bug("the ledger's delivery failed", error)
            return False
        return True

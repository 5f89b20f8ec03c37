"""From segments back to records: of living journals, of dead ones, and of those that were cut in the middle
of a write.

A request with an end has that record. A request without one, in the journal of a dead process, gets the
record that was written when it was accepted, with what its newest slice says: failed, and `recovered`.
Nothing here depends on when or how often it is done, so a recovery that is itself interrupted is simply done
again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.errors import LedgerError
from penstock.policy.record import Outcome, UsageRecord
from penstock.telemetry import ledger_files
from penstock.telemetry.ledger_segment import (
    Frame,
    Gap,
    Kind,
    Progress,
    decode_progress,
    decode_record,
    read_head,
    read_past_damage,
)
from penstock.telemetry.ledger_sink import LedgerSink, SinkError
from penstock.telemetry.log import Log

CRASHED = "GatewayCrashed"
"""`UsageRecord.error` of a recovered record."""
BATCH = 2_000


@dataclass(slots=True)
class Begun:
    """The requests of one journal that have no end yet."""

    opened: dict[str, UsageRecord] = field(default_factory=dict[str, UsageRecord])
    progress: dict[str, Progress] = field(default_factory=dict[str, Progress])

    def take(self, frame: Frame) -> UsageRecord | None:
        """Follow one frame; the record if it is one that was closed."""
        if frame.kind == Kind.CLOSE:
            record = decode_record(frame.body)
            self.opened.pop(record.request_id, None)
            self.progress.pop(record.request_id, None)
            return record
        if frame.kind == Kind.OPEN:
            record = decode_record(frame.body)
            self.opened.setdefault(record.request_id, record)
        elif frame.kind == Kind.SLICE:
            progress = decode_progress(frame.body)
            known = self.progress.get(progress.request_id)
            if known is None or _amount(progress) >= _amount(known):
                self.progress[progress.request_id] = progress
        return None

    def ended(self) -> list[UsageRecord]:
        """All that were begun, as they stand if their process is dead."""
        return [
            recovered(record, self.progress.get(request_id)) for request_id, record in self.opened.items()
        ]


def _amount(progress: Progress) -> tuple[int, int, int]:
    return progress.completion_tokens, progress.prompt_tokens, progress.at_ns


def recovered(opened: UsageRecord, progress: Progress | None) -> UsageRecord:
    """What stays of a request whose process died."""
    record = msgspec.structs.replace(opened, outcome=Outcome.FAILED, error=CRASHED, recovered=True)
    if progress is None:
        return record
    return msgspec.structs.replace(
        record,
        ended_ns=progress.at_ns,
        total_us=max(0, progress.at_ns - opened.ended_ns) // 1000,
        prompt_tokens=progress.prompt_tokens,
        cached_tokens=progress.cached_tokens,
        completion_tokens=progress.completion_tokens,
        cost_micros=progress.cost_micros,
        worker=progress.worker or opened.worker,
        attempts=max(opened.attempts, 1),
    )


@dataclass(slots=True, frozen=True)
class Damage:
    """Something unreadable that no crash explains."""

    path: Path
    offset: int
    length: int
    """Bytes."""


def read_journal(directory: Path, damage: list[Damage] | None = None) -> Iterator[Frame]:
    """Every whole frame of one journal in the order of writing.

    Files that vanish meanwhile were delivered. A cut at the end of what was written last is what a crash
    leaves; something unreadable with a whole frame behind it is damage, which goes to the list.

    Raises:
        LedgerError: a newer version wrote it, or a file cannot be read.
    """
    suspect: Damage | None = None
    for _, path in ledger_files.segments(directory):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LedgerError(f"{path}: cannot be read: {error.strerror}") from error
        head = read_head(data, str(path))
        end = 0 if head is None else head[1]
        for found in read_past_damage(data, end):
            if damage is not None:
                if suspect is not None:
                    damage.append(suspect)  # Something was written after it, so it was whole once.
                if isinstance(found, Gap):
                    damage.append(Damage(path, found.start, found.end - found.start))
            suspect = None
            end = found.end
            if isinstance(found, Frame):
                yield found
        written = len(data.rstrip(b"\0"))
        if written > end:
            suspect = Damage(path, end, written - end)


def recover_abandoned(directory: Path, sink: LedgerSink, log: Log) -> int:
    """Bring the journals of dead processes to the sink and remove them; how many requests were cut off.

    Raises:
        SinkError: the sink takes nothing; all that was not removed will be recovered again.
    """
    num_cut = 0
    claims = ledger_files.claim_abandoned(directory)
    try:
        while claims:
            try:
                num_cut += _recover(directory, claims[0], sink, log)
            except SinkError:
                raise
            except LedgerError as error:
                # A newer version's, after a rollback: that one will read it. Serving goes on.
                log.error("a dead gateway's journal stays: this version cannot read it", error=error)
                claims.pop(0).release(remove=False)
            else:
                claims.pop(0).release(remove=True)
    finally:
        for claim in claims:
            claim.release(remove=False)
    return num_cut


def report_damage(directory: Path, instance: str, place: Damage, log: Log) -> None:
    """Keep a copy of the segment for a person, and say where it is."""
    aside = ledger_files.keep_damaged(directory, instance, place.path)
    log.error(
        "part of the ledger's journal is unreadable",
        kept=str(aside),
        offset=place.offset,
        bytes=place.length,
    )


def _recover(directory: Path, claim: ledger_files.Claim, sink: LedgerSink, log: Log) -> int:
    begun, batch, damage = Begun(), list[UsageRecord](), list[Damage]()
    for frame in read_journal(claim.directory, damage):
        if (record := begun.take(frame)) is not None:
            batch.append(record)
            if len(batch) >= BATCH:
                sink.write(batch)
                batch.clear()
    # Last, so that an end that was found twice is the one that counts: the sink takes the first of an id.
    cut = begun.ended()
    sink.write([*batch, *cut])
    for place in damage:
        report_damage(directory, claim.instance, place, log)
    if cut:
        log.warning("requests were cut off by a crash; their records end with their last slice", num=len(cut))
    return len(cut)

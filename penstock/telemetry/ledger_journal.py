"""The journal: what one gateway process knows of its requests, on disk before anything is done about it.

`open`, `slice` and `close` only append to a list; `flush` writes the list in one system call, once per
iteration of the event loop before that iteration starts any work, and at once for each end. Written bytes
survive the process (`kill -9`); the `sync` of another thread makes it survive the machine.

A segment is set aside on disk in full when it is made, and the next one as soon as a quarter of the room is
left: a full disk is noticed while there is still room for the ends of all that was begun. A segment is
removed when its records were delivered, every older one is gone and no request that was opened in it still
runs; requests that outlive several segments are written down again in the newest.
"""

import os
from collections import deque
from collections.abc import Callable

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.config.ledger import LedgerConfig
from penstock.errors import Overloaded
from penstock.policy.flow import UsageRecord
from penstock.telemetry.ledger_segment import (
    LEDGER_LIMITS,
    Claim,
    Kind,
    LedgerLimits,
    Progress,
    SegmentHeader,
    encode,
    segment_path,
    to_frame,
    to_head,
)

_OPEN, _SLICE, _CLOSE = Kind.OPEN.value, Kind.SLICE.value, Kind.CLOSE.value
"""As plain numbers: an enum's members are slow to compute with."""
PINNED_SEGMENTS_MAX = 4
"""A request that began this many segments ago is written down again, so that it keeps no old ones."""
RETRY_NS = NS_PER_S
"""A disk that was full is tried again after this long."""


class _Segment:
    """A file that is written at `offset`, and nowhere else."""

    __slots__ = ("born_ns", "fd", "offset", "sequence", "size")

    def __init__(self, claim: Claim, sequence: int, size: int, clock: Clock) -> None:
        """Set the room aside. `OSError`: there is none."""
        path = segment_path(claim.directory, sequence)
        self.sequence, self.size, self.born_ns = sequence, size, clock.now_ns()
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self.fd, 0, size)
            header = SegmentHeader(instance=claim.instance, sequence=sequence, created_ns=clock.wall_ns())
            self.offset = 0
            self.write(to_head(header))
        except OSError:
            os.close(self.fd)
            path.unlink(missing_ok=True)
            raise

    def write(self, data: bytes) -> None:
        """All of it, or `OSError` and nothing counts: the next write begins at the same place."""
        done = os.pwrite(self.fd, data, self.offset)
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], self.offset + done)
        self.offset += done


class _Live(msgspec.Struct, gc=False):
    """A request without its end."""

    sequence: int
    """A segment that is not newer than the one with its `opened`."""
    opened: bytes
    progress: bytes = b""


class Journal:
    """Written by the event loop's thread alone; `sync` and what says so may be called from others."""

    def __init__(
        self,
        claim: Claim,
        config: LedgerConfig,
        clock: Clock,
        on_error: Callable[[str, Exception], None],
        limits: LedgerLimits = LEDGER_LIMITS,
    ) -> None:
        """Make the first segment. `OSError`: there is no room for it.

        `on_error` hears of the disk's troubles, and of slices that cannot be made.
        """
        self._claim, self._config, self._clock, self._on_error = claim, config, clock, on_error
        self._limits = limits
        self._frames: list[bytes] = []
        self._buffered = 0
        self._num_appended = self._num_written = 0
        self._unpins: deque[tuple[int, int]] = deque()
        self._live: dict[str, _Live] = {}
        self._slices: dict[str, Callable[[], Progress]] = {}
        """Not written yet: what makes the last of each request."""
        self._unkept: set[str] = set()
        self._pins: dict[int, int] = {}
        self._sealed: list[_Segment] = []
        self._lengths: dict[int, int] = {}
        self._segment = _Segment(claim, 1, limits.segment_bytes, clock)
        self._spare: _Segment | None = None
        self._retry_ns = 0
        self._failing = False
        self._dirty = False
        self._has_new_names = True
        self._delivered = 0
        self.oldest = 1
        """The oldest segment that was not removed."""
        self.closed = 0
        """Records that were closed since the start."""
        self.lost = 0
        """Records that could not be kept: the disk took nothing, and the buffer was full."""

    # --- the event loop --------------------------------------------------------------------------

    def open(self, record: UsageRecord) -> None:
        """A request is accepted. `record` is written for it if no more follows.

        Raises:
            Overloaded: there is no room, and `ledger.when_full` says to refuse.
        """
        assert record.request_id not in self._live, record.request_id
        if self._is_full():
            if self._config.when_full == "refuse":
                raise Overloaded("The usage ledger has no room, so nothing new is taken. Try again later.")
            self._unkept.add(record.request_id)
            return
        frame = to_frame(_OPEN, encode(record))
        sequence = self._segment.sequence
        self._live[record.request_id] = _Live(sequence, frame)
        self._pins[sequence] = self._pins.get(sequence, 0) + 1
        self._append(frame)

    def slice(self, request_id: str, make: Callable[[], Progress]) -> None:
        """A running request has used more. It is written with what else this turn of the event loop says, and
        made then; never, if that is the request's end.
        """
        if request_id not in self._unkept:
            self._slices[request_id] = make

    def close(self, record: UsageRecord) -> None:
        """A request is over. `record` is what stays of it."""
        if record.request_id in self._unkept:
            self._unkept.remove(record.request_id)
            self.lost += 1
            return
        assert record.request_id in self._live, record.request_id
        live = self._live.pop(record.request_id)
        self._slices.pop(record.request_id, None)
        if self._append(to_frame(_CLOSE, encode(record))):
            self._unpin_when_written(live.sequence)
            self.closed += 1
        else:
            self._unpin(live.sequence)
            self.lost += 1

    def flush(self) -> None:
        """Hand everything to the operating system: from here a dead process loses none of it."""
        if self._slices:
            slices, self._slices = self._slices, {}
            for request_id, make in slices.items():
                try:
                    frame = to_frame(_SLICE, encode(make()))
                    self._live[request_id].progress = frame
                    self._append(frame)
                except Exception as error:  # noqa: BLE001 - one slice's bug must not hold back the rest.
                    self._on_error("the usage of a running request could not be recorded", error)
        if not self._frames:
            return
        if self._is_old() and self._prepare():
            self._switch()
        self._write()
        while self._frames and not self._failing and self._switch():
            self._write()

    @property
    def live(self) -> int:
        """Requests without their end."""
        return len(self._live) + len(self._unkept)

    # --- any thread ------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make durable what was written; blocks. From one thread at a time.

        Raises:
            OSError: the disk failed.
        """
        while self._sealed:
            segment = self._sealed[0]
            os.ftruncate(segment.fd, segment.offset)
            os.fsync(segment.fd)
            os.close(segment.fd)
            del self._sealed[0]
        if self._has_new_names:
            self._has_new_names = False
            directory = os.open(self._claim.directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        if self._dirty:
            self._dirty = False
            os.fdatasync(self._segment.fd)

    def length(self, sequence: int) -> tuple[int, bool]:
        """How much of a segment was written, and whether that is all there will ever be."""
        current = self._segment
        if sequence == current.sequence:
            return current.offset, False
        return self._lengths.get(sequence, 0), sequence < current.sequence

    def remove(self, through: int) -> None:
        """Segments up to and with this one were delivered: remove those that nothing needs any more."""
        self._delivered = through
        while self.oldest <= through and self.oldest in self._lengths and not self._pins.get(self.oldest):
            segment_path(self._claim.directory, self.oldest).unlink(missing_ok=True)
            del self._lengths[self.oldest]
            self.oldest += 1

    @property
    def disk_bytes(self) -> int:
        """Disk that is taken."""
        newest = self._segment if (spare := self._spare) is None else spare
        return (newest.sequence - self.oldest + 1) * self._limits.segment_bytes

    def stop(self) -> bool:
        """Write and sync all; blocks. True if the journal holds no request without its end."""
        self.flush()
        self._lengths[self._segment.sequence] = self._segment.offset
        self.sync()
        os.close(self._segment.fd)
        if self._spare is not None:
            os.close(self._spare.fd)
        return not self._live and not self._frames

    # --- inside ----------------------------------------------------------------------------------

    def _append(self, frame: bytes) -> bool:
        buffered = self._buffered + len(frame)
        if buffered > self._limits.buffer_bytes_max:
            return False
        self._frames.append(frame)
        self._buffered = buffered
        self._num_appended += 1
        return True

    def _write(self) -> None:
        """Write as many frames as there is room for."""
        frames, size, segment, rest = self._frames, self._buffered, self._segment, list[bytes]()
        if size > (room := segment.size - segment.offset):
            num = size = 0
            while size + len(frames[num]) <= room:
                size += len(frames[num])
                num += 1
            frames, rest = frames[:num], frames[num:]
        try:
            segment.write(b"".join(frames))
        except OSError as error:
            self._trouble("the journal cannot be written", error)
            return
        self._failing = False
        self._dirty = True
        self._num_written += len(frames)
        self._buffered -= size
        self._frames = rest
        while self._unpins and self._unpins[0][0] <= self._num_written:
            self._unpin(self._unpins.popleft()[1])

    def _is_old(self) -> bool:
        age_s = self._limits.segment_age_s
        return age_s > 0 and self._clock.now_ns() - self._segment.born_ns > age_s * NS_PER_S

    def _is_full(self) -> bool:
        """Whether the ends of what runs may need the room that is left."""
        if self._failing:
            # No other call may come to flush while everything is refused.
            if self._clock.now_ns() >= self._retry_ns:
                self.flush()
            return self._failing
        segment = self._segment
        return segment.offset > segment.size * 3 // 4 and not self._prepare()

    def _prepare(self, *, for_ends: bool = False) -> bool:
        """Have the next segment ready, if bound and disk allow it.

        The ends of what was accepted have no bound but the disk.
        """
        if self._spare is not None:
            return True
        over = self.disk_bytes + self._limits.segment_bytes > self._limits.journal_bytes_max
        if over and not for_ends:
            return False
        now_ns = self._clock.now_ns()
        if now_ns < self._retry_ns:
            return False
        try:
            self._spare = _Segment(
                self._claim, self._segment.sequence + 1, self._limits.segment_bytes, self._clock
            )
        except OSError as error:
            self._retry_ns = now_ns + RETRY_NS
            self._on_error("no room for the next part of the journal", error)
            return False
        self._has_new_names = True
        return True

    def _switch(self) -> bool:
        """Continue in the next segment."""
        if not self._prepare(for_ends=True):
            return False
        assert self._spare is not None
        full = self._segment
        self._lengths[full.sequence] = (
            full.offset
        )  # Before anybody can see that it is not the newest any more.
        self._segment, self._spare = self._spare, None
        self._segment.born_ns = self._clock.now_ns()
        self._sealed.append(full)
        self._carry()
        return True

    def _carry(self) -> None:
        """Write down again what is still open of old segments, if that is all that keeps them."""
        newest = self._segment.sequence
        through = min(self._delivered, newest - PINNED_SEGMENTS_MAX)
        if min(self._pins, default=newest) > through:
            return
        room = self._segment.size // 4  # The rest follows at the next switch.
        for live in self._live.values():
            if live.sequence <= through:
                frames = live.opened + live.progress
                room -= len(frames)
                if room < 0 or not self._append(frames):
                    return
                self._unpin_when_written(live.sequence)
                live.sequence = newest
                self._pins[newest] = self._pins.get(newest, 0) + 1

    def _unpin_when_written(self, sequence: int) -> None:
        """The last record makes an older segment unnecessary, but not before it is on disk."""
        self._unpins.append((self._num_appended, sequence))

    def _unpin(self, sequence: int) -> None:
        left = self._pins[sequence] - 1
        if left:
            self._pins[sequence] = left
        else:
            del self._pins[sequence]

    def _trouble(self, what: str, error: OSError) -> None:
        if not self._failing:
            self._on_error(what, error)
        self._failing = True
        self._retry_ns = self._clock.now_ns() + RETRY_NS

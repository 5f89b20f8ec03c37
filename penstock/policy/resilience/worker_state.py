"""The states of one worker, without I/O: how far it is, and whether it is left alone after failures.

`WorkerLife`, how far it is; only READY is capacity.

    STARTING ──> LOADING ──> WARMING ──> READY <──trusted── SUSPECT
       ^  (any of them may be skipped)     └────doubted───────^
       └────────── lost, refused, started again ── from all of these

    SLEPT from all of them ──> ASLEEP ──> WAKING ──> READY

    DRAIN from anywhere ──> DRAINING ──> GONE      END from anywhere ──> GONE

Events come from three sides: its launcher (STARTED, END), the worker itself by way of its backend (LOADING to
LOST), and its observers (DOUBTED, TRUSTED, REFUSED, DRAIN). They race by nature, so every
state takes every event; what makes no difference leaves it where it is. A worker that is GONE never comes
back: another one may take its name.

`Breaker`, a circuit breaker for one worker of one model: after too many failures it is left alone for a
while, then probed.

    CLOSED ──TRIP──> OPEN ──COOL──> PROBING ──PASS──> TRUSTING ──PASS──> CLOSED
                       ^───────────── TRIP ──────────────┴────┘

It trips when of the attempts of the last ten seconds at least half failed, or at least half had a first token
that took much longer than is usual for this worker while its peers are fine and take much less: then it is
the worker and not the load. A few failures in a row are enough where requests are rare, and one is where the
worker does not accept this server's key.

One probe is let through first, and a few more behind it. A worker that trips again stays out for twice as
long, up to a bound, and with jitter, so that workers which failed together are not probed together. The
caller decides what a failure is: never what the client did.

Pure: time is handed in, and so is the draw for the jitter.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from penstock.clock import NS_PER_MS, NS_PER_S


class WorkerState(enum.StrEnum):
    """Where a worker is. The values are what people and metrics see."""

    STARTING = "starting"
    """Wanted; it has not answered in this life."""
    LOADING = "loading"
    WARMING = "warming"
    """The weights are there; the first steps are being run."""
    READY = "ready"
    ASLEEP = "asleep"
    """Its weights are not in memory: the first request for its model wakes it."""
    WAKING = "waking"
    SUSPECT = "suspect"
    """It was ready and is connected, but does not answer as it should: nothing new is sent there, streams may
    continue."""
    DRAINING = "draining"
    """Its streams may end; nothing new is sent there."""
    GONE = "gone"


class WorkerEvent(enum.StrEnum):
    """The events of a worker."""

    STARTED = "started"
    """A new life of it begins: a process, a container."""
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    """It says that it takes requests."""
    SLEPT = "slept"
    """It has released its weights."""
    WAKING = "waking"
    LOST = "lost"
    """The connection is gone, and with it every stream."""
    DOUBTED = "doubted"
    TRUSTED = "trusted"
    REFUSED = "refused"
    """It is not what it should be (another model, another vocabulary)."""
    DRAIN = "drain"
    END = "end"
    """It was stopped, or its launcher has given it up."""


_S, _E = WorkerState, WorkerEvent
_UP = {
    _E.STARTED: _S.STARTING,
    _E.LOADING: _S.LOADING,
    _E.WARMING: _S.WARMING,
    _E.SERVING: _S.READY,
    _E.SLEPT: _S.ASLEEP,
    _E.WAKING: _S.WAKING,
    _E.LOST: _S.STARTING,
    _E.REFUSED: _S.STARTING,
    _E.DRAIN: _S.DRAINING,
    _E.END: _S.GONE,
}
TABLE: dict[WorkerState, dict[WorkerEvent, WorkerState]] = {
    _S.STARTING: {**_UP, _E.DOUBTED: _S.STARTING, _E.TRUSTED: _S.STARTING},
    _S.LOADING: {**_UP, _E.DOUBTED: _S.LOADING, _E.TRUSTED: _S.LOADING},
    _S.WARMING: {**_UP, _E.DOUBTED: _S.WARMING, _E.TRUSTED: _S.WARMING},
    _S.ASLEEP: {**_UP, _E.DOUBTED: _S.ASLEEP, _E.TRUSTED: _S.ASLEEP},
    _S.WAKING: {**_UP, _E.DOUBTED: _S.WAKING, _E.TRUSTED: _S.WAKING},
    _S.READY: {**_UP, _E.DOUBTED: _S.SUSPECT, _E.TRUSTED: _S.READY},
    # That it says again what it said before is no reason to trust it: only an answer to its observer is.
    _S.SUSPECT: {**_UP, _E.SERVING: _S.SUSPECT, _E.DOUBTED: _S.SUSPECT, _E.TRUSTED: _S.READY},
    _S.DRAINING: {**dict.fromkeys(_E, _S.DRAINING), _E.END: _S.GONE},
    _S.GONE: dict.fromkeys(_E, _S.GONE),
}


class WorkerLife:
    """One worker's state, since when, and in which life it is."""

    __slots__ = ("epoch", "since_ns", "state")

    def __init__(self, now_ns: int) -> None:
        self.state = WorkerState.STARTING
        self.since_ns = now_ns
        self.epoch = 1
        """Counts its lives, as far as is known here: one more whenever it has to start again or falls asleep.
        A worker's messages belong to the life in which they were asked for, and to no other."""

    @property
    def is_ready(self) -> bool:
        """Whether it counts as capacity."""
        return self.state is WorkerState.READY

    def on(self, event: WorkerEvent, now_ns: int) -> bool:
        """Take one event; whether the state is another one now."""
        before, self.state = self.state, TABLE[self.state][event]
        if self.state is before:
            return False
        assert now_ns >= self.since_ns, "time goes forward"
        self.since_ns = now_ns
        self.epoch += self.state in (WorkerState.STARTING, WorkerState.ASLEEP)
        return True


Draw = Callable[[], float]
"""Gives the next random number from 0 to 1."""
_MEMORY = 16
"""The usual time to first token is a mean over about so many."""
_RECENT = 4
"""And that of now over so many."""


@dataclass(slots=True, frozen=True, kw_only=True)
class BreakerTerms:
    """When one worker of one model is left alone for a while. A failure that a client caused never counts."""

    window_s: float = 10.0
    """Attempts of so long ago count."""
    buckets: int = 10
    """Parts of the window; the oldest is forgotten as a whole."""
    attempts_min: int = 10
    """With fewer attempts in the window nothing is judged."""
    in_a_row: int = 5
    """But so many that failed one after the other, with none between them that did not, are enough."""
    rate: float = 0.5
    """This share of them failed, or was slow: it is left alone."""
    slow_factor: float = 3.0
    """A first token is slow that takes so many times what is usual for this worker, while its peers are
    fine."""
    slow_min_ms: int = 200
    """Nothing quicker than this is slow."""
    open_s: float = 5.0
    """How long it is left alone the first time; twice as long each time that it fails again soon."""
    open_max_s: float = 60.0
    jitter: float = 0.2
    """Up to this share is added to that time, drawn each time."""
    probes: int = 5
    """Attempts that must go well before it is used like the others; a single one goes first."""
    probe_s: float = 10.0
    """A probe that takes longer does not keep others waiting for its verdict."""


class BreakerState(enum.IntEnum):
    """The attempts that it lets through. The values are what metrics see."""

    CLOSED = 0
    """Everything."""
    OPEN = 1
    """Nothing."""
    PROBING = 2
    """One attempt."""
    TRUSTING = 3
    """A few more."""


class BreakerEvent(enum.Enum):
    """The events that move it."""

    TRIP = "trip"
    COOL = "cool"
    PASS = "pass"


_B, _T = BreakerState, BreakerEvent
BREAKER_TABLE: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (_B.CLOSED, _T.TRIP): _B.OPEN,
    (_B.OPEN, _T.COOL): _B.PROBING,
    (_B.PROBING, _T.PASS): _B.TRUSTING,
    (_B.PROBING, _T.TRIP): _B.OPEN,
    (_B.TRUSTING, _T.PASS): _B.CLOSED,
    (_B.TRUSTING, _T.TRIP): _B.OPEN,
}
"""(state, event) -> next state. A pair that is not here does not happen."""


class AttemptWindow:
    """Attempts of the last while, in buckets of time that are reused in turn."""

    __slots__ = ("_bucket_ns", "_counts", "_epochs", "_num")

    def __init__(self, *, window_ns: int, buckets: int) -> None:
        assert buckets > 0 < window_ns, (buckets, window_ns)
        self._num, self._bucket_ns = buckets, max(1, window_ns // buckets)
        self._epochs = [-1] * buckets
        self._counts = [(0, 0, 0)] * buckets

    def add(self, now_ns: int, *, failed: bool, slow: bool) -> None:
        """One attempt more."""
        epoch = now_ns // self._bucket_ns
        index = epoch % self._num
        attempts, failures, slows = self._counts[index] if self._epochs[index] == epoch else (0, 0, 0)
        self._epochs[index] = epoch
        assert failures + slows <= attempts, "an attempt counts as one thing"
        self._counts[index] = (attempts + 1, failures + failed, slows + slow)

    def sums(self, now_ns: int) -> tuple[int, int, int]:
        """Attempts, failed ones, slow ones."""
        oldest = now_ns // self._bucket_ns - self._num
        found = [count for epoch, count in zip(self._epochs, self._counts, strict=True) if epoch > oldest]
        return sum(each[0] for each in found), sum(each[1] for each in found), sum(each[2] for each in found)

    def clear(self) -> None:
        """Forget everything."""
        self._epochs = [-1] * self._num


class Breaker:
    """One worker's. `blocks` says whether it may be given something; tell of every attempt there."""

    __slots__ = (
        "_config",
        "_draw",
        "_in_a_row",
        "_open_ns",
        "_passed",
        "_probes",
        "_usual_ns",
        "_window",
        "recent_ns",
        "since_ns",
        "state",
        "why",
    )

    def __init__(self, config: BreakerTerms, draw: Draw) -> None:
        self._config, self._draw = config, draw
        self._window = AttemptWindow(window_ns=round(config.window_s * NS_PER_S), buckets=config.buckets)
        self.state = BreakerState.CLOSED
        self.since_ns = 0
        """Since when it is in its state."""
        self.why = ""
        """Why it tripped last, in words."""
        self._in_a_row = 0
        """Attempts that failed since one did not."""
        self._open_ns = 0
        """How long it stays open this time, or stayed the last time."""
        self._usual_ns = 0
        self.recent_ns = 0
        """How long first outputs take now: a mean over the last few; 0 before there was one."""
        self._probes: list[int] = []
        """When the attempts that are under way as probes were started."""
        self._passed = 0

    @property
    def due_ns(self) -> int | None:
        """When `blocks` may change by time alone; None if it does not."""
        if self.state is BreakerState.OPEN:
            return self.since_ns + self._open_ns
        if self._probes:
            return self._probes[0] + self._probe_ns
        return None

    def blocks(self, now_ns: int) -> bool:
        """Whether nothing more may be sent there now."""
        if self.state is BreakerState.CLOSED:
            return False
        if self.state is BreakerState.OPEN:
            if now_ns < self.since_ns + self._open_ns:
                return True
            self._move(now_ns, BreakerEvent.COOL)
        while self._probes and now_ns >= self._probes[0] + self._probe_ns:
            del self._probes[0]  # For any reason that it waits: it is no reason to wait for ever.
        return self._passed + len(self._probes) >= self._allowed

    def started(self, now_ns: int) -> None:
        """An attempt begins there."""
        if self.state in (BreakerState.PROBING, BreakerState.TRUSTING):
            self._probes.append(now_ns)

    def began(self, now_ns: int, ttft_ns: int, *, peers_fine: Callable[[], bool]) -> None:
        """An attempt has had its first output after so long: it counts as good, or as slow, which trips only
        if its peers are fine.
        """
        usual_ns = self._usual_ns
        assert ttft_ns >= 0, ttft_ns
        self.recent_ns += (ttft_ns - self.recent_ns) // _RECENT if self.recent_ns else ttft_ns
        bound_ns = self.slow_ns
        slow = usual_ns > 0 and ttft_ns > bound_ns  # `is_slow`, without reckoning that again.
        # A slow one counts as just slow, so that a worker for which it becomes usual is taken for it, in
        # time.
        seen_ns = min(ttft_ns, bound_ns) if slow else ttft_ns
        self._usual_ns = usual_ns + (seen_ns - usual_ns) // _MEMORY if usual_ns else ttft_ns
        self._count(now_ns, failed=False, slow=slow, peers_fine=peers_fine, started_ns=now_ns - ttft_ns)

    def failed(self, now_ns: int, *, started_ns: int | None = None) -> None:
        """An attempt failed, before or after its first output, for the worker's reasons."""
        self._count(now_ns, failed=True, slow=False, peers_fine=_never, started_ns=started_ns)

    def gave_up(self, now_ns: int, waited_ns: int, unseen_ns: int = 0) -> None:
        """An attempt was ended because its first output did not come: it failed if that is much longer than
        is usual here, else nothing is known. `unseen_ns`: how long that is where there never was an output;
        0: not known.
        """
        assert waited_ns >= 0, waited_ns
        is_seen = self._usual_ns > 0
        if not (self.is_slow(waited_ns) if is_seen else 0 < unseen_ns <= waited_ns):
            self.forget()
            return
        was = self.state
        self.failed(now_ns, started_ns=now_ns - waited_ns)
        # In time it is what is usual. Not before it trips: others run by that bound.
        if is_seen and self.state is not was:
            self._usual_ns += (self.slow_ns - self._usual_ns) // _MEMORY

    def is_slow(self, ttft_ns: int) -> bool:
        """Whether a first token that takes so long is much slower than is usual for this worker."""
        return self._usual_ns > 0 and ttft_ns > self.slow_ns

    @property
    def is_doubted(self) -> bool:
        """Whether its last attempt failed, or it is not closed, and it is known what is usual for it."""
        return self._usual_ns > 0 and (self._in_a_row > 0 or self.state is not BreakerState.CLOSED)

    def reject(self, now_ns: int, why: str) -> None:
        """All attempts will fail: no need to count."""
        assert why, "people want to know"
        self.why = why
        if self.state is not BreakerState.OPEN:
            self._move(now_ns, BreakerEvent.TRIP)

    def forget(self) -> None:
        """An attempt ended that says nothing of the worker: its client left."""
        if self._probes:
            del self._probes[0]

    def is_fine(self, now_ns: int) -> bool:
        """Whether few of its last attempts failed or were slow: fewer than half of what would trip it."""
        attempts, failures, slows = self._window.sums(now_ns)
        return 2 * (failures + slows) < attempts * self._config.rate if attempts else True

    @property
    def slow_ns(self) -> int:
        """A first token that takes longer is slow, once it is known what is usual."""
        config = self._config
        slow_ns, least_ns = round(self._usual_ns * config.slow_factor), config.slow_min_ms * NS_PER_MS
        return max(least_ns, slow_ns)

    @property
    def _probe_ns(self) -> int:
        return round(self._config.probe_s * NS_PER_S)

    @property
    def _allowed(self) -> int:
        return 1 if self.state is BreakerState.PROBING else self._config.probes

    def _count(
        self,
        now_ns: int,
        *,
        failed: bool,
        slow: bool,
        peers_fine: Callable[[], bool],
        started_ns: int | None = None,
    ) -> None:
        self._window.add(now_ns, failed=failed, slow=slow)
        self._in_a_row = self._in_a_row + 1 if failed else 0
        if self.state is BreakerState.CLOSED:
            if failed or slow:
                attempts, failures, slows = self._window.sums(now_ns)
                enough, is_enough = (
                    max(1.0, attempts * self._config.rate),
                    attempts >= self._config.attempts_min,
                )
                if self._in_a_row >= self._config.in_a_row or (is_enough and failures >= enough):
                    self.why = "its attempts fail"
                    self._move(now_ns, BreakerEvent.TRIP)
                elif is_enough and slows >= enough and peers_fine():
                    self.why = "its first tokens take much longer than usual"
                    self._move(now_ns, BreakerEvent.TRIP)
        elif self.state is not BreakerState.OPEN:
            if started_ns is not None and started_ns < self.since_ns:
                return  # It is no probe: it began when the worker was known to be unwell.
            self.forget()
            if failed or (slow and peers_fine()):
                self._move(now_ns, BreakerEvent.TRIP)
                return
            self._passed += 1
            if self._passed >= self._allowed:
                self._move(now_ns, BreakerEvent.PASS)

    def _move(self, now_ns: int, event: BreakerEvent) -> None:
        assert (self.state, event) in BREAKER_TABLE, (
            f"a breaker that is {self.state.name} has no {event.name}"
        )
        was, self.state = self.state, BREAKER_TABLE[self.state, event]
        if self.state is BreakerState.OPEN:
            self._open_ns = self._next_open_ns(now_ns, was)
        elif self.state is BreakerState.CLOSED:
            self._window.clear()
        self.since_ns, self._passed = now_ns, 0
        self._probes.clear()

    def _next_open_ns(self, now_ns: int, was: BreakerState) -> int:
        """Twice as long as the last time, unless it was well for twice that."""
        config = self._config
        first_ns, last_ns = round(config.open_s * NS_PER_S), self._open_ns
        was_well = was is BreakerState.CLOSED and now_ns - self.since_ns > 2 * last_ns
        base_ns = first_ns if not last_ns or was_well else 2 * last_ns
        assert base_ns > 0, "an open breaker is open for a while"
        jittered_ns = base_ns + int(base_ns * config.jitter * self._draw())
        return min(jittered_ns, round(config.open_max_s * NS_PER_S))

    def check_invariants(self) -> None:
        """Assert what must always hold."""
        assert self._probes == sorted(self._probes)
        assert self.state in (BreakerState.PROBING, BreakerState.TRUSTING) or not self._probes
        assert self._passed + len(self._probes) <= max(self._allowed, 1) or self.state is BreakerState.CLOSED


def _never() -> bool:
    """No peers matter."""
    return False

"""The life of one worker as a state machine without I/O. Only READY is capacity.

    STARTING ──> LOADING ──> WARMING ──> READY <──trusted── SUSPECT
       ^  (any of them may be skipped)     └────doubted───────^
       └────────── lost, refused, started anew ── from all of these

    DRAIN from anywhere ──> DRAINING ──> GONE      END from anywhere ──> GONE

Events come from three sides: whoever launched it (STARTED, END), the worker itself by way of its backend
(LOADING to LOST), and whoever watches it (DOUBTED, TRUSTED, REFUSED, DRAIN). They race by nature, so every
state takes every event; what makes no difference leaves it where it is. A worker that is GONE never comes
back: another one may take its name.
"""

import enum


class WorkerState(enum.StrEnum):
    """Where a worker is. The values are what people and metrics see."""

    STARTING = "starting"
    """Wanted; nobody has answered in this life of it."""
    LOADING = "loading"
    WARMING = "warming"
    """The weights are there; the first steps are being run."""
    READY = "ready"
    SUSPECT = "suspect"
    """It was ready and is connected, but does not answer as it should: nothing new is sent there, streams may
    go on."""
    DRAINING = "draining"
    """Its streams may end; nothing new is sent there."""
    GONE = "gone"


class WorkerEvent(enum.StrEnum):
    """What happens to a worker."""

    STARTED = "started"
    """A new life of it begins: a process, a container."""
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    """It says that it takes requests."""
    LOST = "lost"
    """The connection is gone, and with it every stream."""
    DOUBTED = "doubted"
    TRUSTED = "trusted"
    REFUSED = "refused"
    """It is not what it should be (another model, another vocabulary)."""
    DRAIN = "drain"
    END = "end"
    """It was stopped, or whoever keeps it running has given it up."""


_S, _E = WorkerState, WorkerEvent
_UP = {
    _E.STARTED: _S.STARTING,
    _E.LOADING: _S.LOADING,
    _E.WARMING: _S.WARMING,
    _E.SERVING: _S.READY,
    _E.LOST: _S.STARTING,
    _E.REFUSED: _S.STARTING,
    _E.DRAIN: _S.DRAINING,
    _E.END: _S.GONE,
}
TABLE: dict[WorkerState, dict[WorkerEvent, WorkerState]] = {
    _S.STARTING: {**_UP, _E.DOUBTED: _S.STARTING, _E.TRUSTED: _S.STARTING},
    _S.LOADING: {**_UP, _E.DOUBTED: _S.LOADING, _E.TRUSTED: _S.LOADING},
    _S.WARMING: {**_UP, _E.DOUBTED: _S.WARMING, _E.TRUSTED: _S.WARMING},
    _S.READY: {**_UP, _E.DOUBTED: _S.SUSPECT, _E.TRUSTED: _S.READY},
    # That it says again what it said before is no reason to trust it: only an answer to whoever doubts it is.
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
        """Counts its lives, as far as is known here: one more whenever it has to start again. What a worker
        says belongs to the life in which it was asked, and to no other."""

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
        self.epoch += self.state is WorkerState.STARTING
        return True

"""How long may a worker be silent? Heartbeats of our own workers (`Heartbeat`), and what is known of the
silences of other workers' streams (`Gaps`).

Pure: counts beats and takes times, knows no sockets.
"""

import enum
from dataclasses import dataclass

from penstock.clock import NS_PER_S

# Whether a connected worker still lives, judged by its messages.
#
# A killed worker closes its socket, and that is seen at once. One that is stopped (SIGSTOP, a frozen
# container) or behind a network that swallows packets leaves the connection open and says nothing: only
# silence tells. Silence is counted in beats of our own timer and not in time: if it was this process that
# stood still, one beat passes, and then what was sent meanwhile is read.


class Beat(enum.Enum):
    """The next action after a beat."""

    NOTHING = "nothing"
    ASK = "ask"
    """Nothing was heard since the last beat: send a `Ping`."""
    DOUBT = "doubt"
    """A `Ping` was not answered: send nothing new there. Ask again."""
    TRUST = "trust"
    """It was doubted, and has been heard again."""
    GIVE_UP = "give up"
    """Cut the connection."""


@dataclass(slots=True, frozen=True, kw_only=True)
class HeartbeatTerms:
    """How a worker of our own that is connected and silent is found out.

    With the defaults a worker that stands still is given nothing new after 1 to 1.5 s, and is lost after 2 to
    2.5 s.
    """

    interval_s: float = 0.5
    """Time between two beats. A worker that sent nothing since the last one is asked for a sign of life."""
    suspect_after: int = 2
    """Silent beats in a row after which it is given nothing new."""
    lost_after: int = 4
    """Silent beats in a row after which its connection is cut, and its streams continue elsewhere; more than
    `suspect_after`."""


class Heartbeat:
    """Call `beat` at every beat."""

    __slots__ = ("_doubt_after", "_give_up_after", "silent")

    def __init__(self, *, doubt_after: int, give_up_after: int) -> None:
        """After so many silent beats in a row; a worker is asked after the first."""
        assert 1 < doubt_after < give_up_after, (doubt_after, give_up_after)
        self._doubt_after, self._give_up_after = doubt_after, give_up_after
        self.silent = 0
        """Beats in a row without a sign of life."""

    def beat(self, *, received: bool) -> Beat:
        """One more beat; `received`: whether anything came since the last one."""
        if received:
            was_doubted = self.silent >= self._doubt_after
            self.silent = 0
            return Beat.TRUST if was_doubted else Beat.NOTHING
        self.silent += 1
        if self.silent >= self._give_up_after:
            return Beat.GIVE_UP
        return Beat.DOUBT if self.silent >= self._doubt_after else Beat.ASK


# How long a worker's streams may be silent: several times the longest silence of late.
#
# An engine that reads a long prompt lets its other streams wait for seconds, so the bound is generous; it
# is there so that a stream which has died is not waited for as long as one of which nothing is known.
#
#     longest silence   halves every minute, however many events come meanwhile
#     a time-out        doubles the bound: a silence that is cut short would else never be seen, and a worker
#                       that has become slow would lose every stream

FACTOR, MIN_NS = 5, 10 * NS_PER_S
"""A stream is given up after so many times the longest gap of late, and never sooner than this."""
HALVES_NS = 60 * NS_PER_S
"""The time in which the longest gap counts half."""
_EVENTS_MIN = 100
"""With fewer events nothing is known."""


class Gaps:
    """Of one worker."""

    __slots__ = ("_faded_ns", "_longest_ns", "num_events")

    def __init__(self) -> None:
        self.num_events = 0
        """So many are known of. Such as come too soon to be a gap are counted here and nowhere else."""
        self._longest_ns = 0
        self._faded_ns = 0
        """Up to when the longest gap has faded."""

    def after(self, now_ns: int, gap_ns: int, num_events: int, limit_ns: int) -> int:
        """Of a stream, `num_events` came so long after the one before them: how long it may be silent now; at
        most as the configuration says.
        """
        self.num_events += num_events
        if now_ns - self._faded_ns >= NS_PER_S:
            self._fade(now_ns)
        self._longest_ns = max(self._longest_ns, gap_ns)
        if self.num_events < _EVENTS_MIN:
            return limit_ns
        bound_ns = FACTOR * self._longest_ns
        return limit_ns if bound_ns > limit_ns else bound_ns if bound_ns > MIN_NS else min(MIN_NS, limit_ns)

    def timed_out(self, now_ns: int, silent_ns: int) -> None:
        """A stream was given up after so much silence. Several that end together count as one."""
        self._fade(now_ns)
        self._longest_ns = max(self._longest_ns, 2 * silent_ns // FACTOR)

    def _fade(self, now_ns: int) -> None:
        if (elapsed_ns := now_ns - self._faded_ns) >= NS_PER_S:
            self._longest_ns = int(self._longest_ns * 0.5 ** (elapsed_ns / HALVES_NS))
            self._faded_ns = now_ns

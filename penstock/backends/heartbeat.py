"""Whether a connected worker still lives, judged by its messages.

Pure: counts beats, knows no sockets.

A killed worker closes its socket, and that is seen at once. One that is stopped (SIGSTOP, a frozen container)
or behind a network that swallows packets leaves the connection open and says nothing: only silence tells.
Silence is counted in beats of our own timer and not in time: if it was this process that stood still, one
beat passes, and then what was sent meanwhile is read.
"""

import enum
from dataclasses import dataclass


class Beat(enum.Enum):
    """What to do after a beat."""

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

    def beat(self, *, heard: bool) -> Beat:
        """One more beat; `heard`: whether anything came since the last one."""
        if heard:
            was_doubted = self.silent >= self._doubt_after
            self.silent = 0
            return Beat.TRUST if was_doubted else Beat.NOTHING
        self.silent += 1
        if self.silent >= self._give_up_after:
            return Beat.GIVE_UP
        return Beat.DOUBT if self.silent >= self._doubt_after else Beat.ASK

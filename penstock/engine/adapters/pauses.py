"""Pauses of a thread that works beside the step loop.

A step waits for the slower half of its work, so a thread that takes one of two cores for long makes it half
as long again. Work in small pieces, with pauses between them while steps run, takes a share of each of
several steps in place of a whole one. It takes longer, though: work that requests wait for pauses less.
"""

from threading import Event

from penstock.clock import NS_PER_S, Clock

SHARE, AWAITED_SHARE = 3.0, 1.0
"""A pause is so many times as long as the piece of work before it; where requests wait for its end."""
PAUSE_S_MAX = 0.05
"""A piece that took long waited for a core: it is not paid for without bound."""


def pause_s(worked_ns: int, *, is_awaited: bool) -> float:
    """The seconds to pause after so much work."""
    return min(worked_ns / NS_PER_S * (AWAITED_SHARE if is_awaited else SHARE), PAUSE_S_MAX)


class GivenUp(Exception):
    """The work is not wanted any more."""


class Pauses:
    """`steps_run` and `give_up` are called on the step thread, the others on the one that pauses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ns = clock.now_ns()
        self._is_awaited = False
        self._work, self._given_up = 0, -1
        self._is_idle = Event()
        self._is_idle.set()

    def steps_run(self, run: bool, *, is_awaited: bool = False) -> None:
        """Whether steps follow one another now: where none do, nothing pauses. `is_awaited`: requests wait
        for the end of the work.
        """
        self._is_awaited = is_awaited
        if run == self._is_idle.is_set():
            if run:
                self._is_idle.clear()
            else:
                self._is_idle.set()

    def give_up(self, work: int) -> None:
        """Let the work of this number end at its next pause."""
        self._given_up = work

    def begin(self, work: int) -> None:
        """Work begins, under a number of its own."""
        self._work, self._since_ns = work, self._clock.now_ns()

    def pause(self) -> None:
        """A piece of the work is done: wait for a while, or until the steps end.

        Raises:
            GivenUp: nobody wants the rest.
        """
        if self._given_up != self._work:
            self._is_idle.wait(pause_s(self._clock.now_ns() - self._since_ns, is_awaited=self._is_awaited))
        if self._given_up == self._work:
            raise GivenUp
        self._since_ns = self._clock.now_ns()

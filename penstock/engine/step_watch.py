"""Notices, from inside the process, that steps do not advance while there is work.

    watchdog thread         looks now and then: work without a new step for longer than the timeout is
                            reported, with every thread's stack, and ends the process
    faulthandler's thread   needs no interpreter lock: should even the watchdog not get to run (native code
                            that keeps the lock), it writes the stacks and ends the process

A process that hangs with its sockets open looks alive to everybody. So it must not hang.
"""

import faulthandler
import threading
from collections.abc import Callable

from penstock.clock import NS_PER_S, Clock

_LOOKS = 8
"""How often the watchdog looks within one timeout."""
_LOCKED_OUT = 2.0
"""Timeouts without a look after which the interpreter lock counts as lost."""


class StepWatch:
    """Watches the step loop: whatever a turn of it does, and turns that come to nothing.

        begins ──> (mail, step, telling) ──advanced──> ... ──rests──> asleep, not watched

    It does not matter where a turn hangs (a step, handing its outputs over, taking mail), nor whether it
    does: a scheduler that has requests and plans nothing, turn after turn, is as dead as a kernel that never
    returns. Costs an attribute write and a look at the clock per turn.
    """

    def __init__(self, timeout_s: float, clock: Clock, on_stall: Callable[[str], None]) -> None:
        """`on_stall` is called once, on the watchdog's thread, with what happened in words.

        A timeout of 0 watches nothing.
        """
        self._timeout_s, self._clock, self._on_stall = timeout_s, clock, on_stall
        self._since_ns: int | None = None  # Since when there is work without a new step; None: asleep.
        self._closed = threading.Event()
        if timeout_s > 0:
            # Here too: the first step may take the lock for good before the watchdog has looked once.
            faulthandler.dump_traceback_later(_LOCKED_OUT * timeout_s, exit=True)
            threading.Thread(target=self._look, name="worker-watchdog", daemon=True).start()

    def begins(self) -> None:
        """A turn of the loop begins. Changes nothing if the turn before came to nothing."""
        if self._since_ns is None:
            self._since_ns = self._clock.now_ns()

    def advanced(self) -> None:
        """A step was done, or there is no work for one."""
        self._since_ns = self._clock.now_ns()

    def rests(self) -> None:
        """The loop is about to sleep until something comes in."""
        self._since_ns = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(self._timeout_s / _LOOKS):
            faulthandler.dump_traceback_later(_LOCKED_OUT * self._timeout_s, exit=True)
            since_ns = self._since_ns
            if since_ns is None:
                continue
            age_s = (self._clock.now_ns() - since_ns) / NS_PER_S
            if age_s >= self._timeout_s:
                faulthandler.dump_traceback(all_threads=True)
                self._on_stall(f"steps have not advanced for {age_s:.3g} s (engine.stall_timeout_s)")
                break
        faulthandler.cancel_dump_traceback_later()

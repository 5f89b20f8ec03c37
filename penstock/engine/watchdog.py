"""Notices, from inside the process, that a step does not end.

    watchdog thread         looks now and then: a step that is older than the timeout is reported, with every
                            thread's stack, and ends the process
    faulthandler's thread   needs no interpreter lock: should even the watchdog not get to run (native code that
                            keeps the lock), it writes the stacks and ends the process

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
    """Wrap every step in `with watch:`. Costs two attribute writes and one look at the clock."""

    def __init__(self, timeout_s: float, clock: Clock, on_stall: Callable[[str], None]) -> None:
        """`on_stall` is called once, on the watchdog's thread, with what happened in words. A timeout of 0 watches nothing."""
        self._timeout_s, self._clock, self._on_stall = timeout_s, clock, on_stall
        self._started_ns: int | None = None
        self._closed = threading.Event()
        if timeout_s > 0:
            # Here too: the first step may take the lock for good before the watchdog has looked once.
            faulthandler.dump_traceback_later(_LOCKED_OUT * timeout_s, exit=True)
            threading.Thread(target=self._look, name="worker-watchdog", daemon=True).start()

    def __enter__(self) -> None:
        self._started_ns = self._clock.now_ns()

    def __exit__(self, *_: object) -> None:
        self._started_ns = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(self._timeout_s / _LOOKS):
            faulthandler.dump_traceback_later(_LOCKED_OUT * self._timeout_s, exit=True)
            started_ns = self._started_ns
            if started_ns is None:
                continue
            age_s = (self._clock.now_ns() - started_ns) / NS_PER_S
            if age_s >= self._timeout_s:
                faulthandler.dump_traceback(all_threads=True)
                self._on_stall(f"a step has not ended for {age_s:.3g} s (engine.stall_timeout_s)")
                break
        faulthandler.cancel_dump_traceback_later()

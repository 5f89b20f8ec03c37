"""Ctrl-C and SIGTERM before a server has an event loop: it imports for half a second."""

import contextlib
import signal
from collections.abc import Generator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTED = list[signal.Signals]()
"""Those that came so early."""


@contextlib.contextmanager
def noted_early() -> Generator[None]:
    """From now on a signal is noted, until `StopSignals` takes it. To raise here would leave it to chance
    where; a second signal does.
    """
    NOTED.clear()
    before = {number: signal.signal(number, _note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(number: int, _: object) -> None:
    NOTED.append(signal.Signals(number))
    if len(NOTED) > 1:
        raise KeyboardInterrupt

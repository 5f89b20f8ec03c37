"""Ctrl-C and SIGTERM: the first asks to drain, the second to stop at once.

And other signals, to do something.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Generator
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def on_signal(number: signal.Signals, callback: Callable[[], None]) -> Generator[None]:
    """While this is open, a signal calls `callback` on the event loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


class StopSignals:
    """Two events for one event loop. `drain` is set first, `abort` by a second signal."""

    def __init__(self, on_drain: Callable[[signal.Signals], None]) -> None:
        self.drain = asyncio.Event()
        self.abort = asyncio.Event()
        self.first: signal.Signals | None = None
        """Which signal asked first; None: none, or another server takes over."""
        self._on_drain = on_drain

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.drain.is_set():
            self.abort.set()
            return
        self.first = number
        self.drain.set()
        self._on_drain(number)

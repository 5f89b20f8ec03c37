"""Ctrl-C and SIGTERM: the first asks to drain, the second to stop at once.

And other signals, to do something.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Generator
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_early = list[signal.Signals]()
"""Those that came before the event loop."""


@contextlib.contextmanager
def noted_early() -> Generator[None]:
    """From now on a signal is noted, until `StopSignals` takes it: a server imports for half a second before
    it has an event loop. To raise here would leave it to chance where; a second signal does.
    """
    _early.clear()
    before = {number: signal.signal(number, _note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(number: int, _: object) -> None:
    _early.append(signal.Signals(number))
    if len(_early) > 1:
        raise KeyboardInterrupt


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

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.abort = asyncio.Event()
        self.first: signal.Signals | None = None
        """Which signal asked first; None: none, or another server takes over."""
        self.on_drain: Callable[[signal.Signals], None] = lambda _: None
        """Called with the first signal."""

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        for number in _early[:1]:
            self._on_signal(number)
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
        self.on_drain(number)


async def done_before(stop: asyncio.Event, task: asyncio.Task[Any]) -> bool:
    """Whether a task is done before the event is set, which cancels it.

    Raises:
        Exception: of the task, if it failed before.
    """
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return False
        task.result()
        return True
    finally:
        stopping.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

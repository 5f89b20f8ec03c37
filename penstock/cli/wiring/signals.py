"""Ctrl-C and SIGTERM: the first asks to drain, the second to stop at once.

And other signals, to do something.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Generator
from typing import Any, Self

from penstock.cli import early


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
        for number in early.SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        for number in early.NOTED[:1]:
            self._on_signal(number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in early.SIGNALS:
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

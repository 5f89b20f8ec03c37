"""Coroutines that begin where they are made, and become tasks only if they have to wait."""

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any


class Begun:
    """The tasks of what had to wait, until it is over."""

    def __init__(self) -> None:
        self.tasks = set[asyncio.Task[None]]()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it up to where it waits for the first time, and the rest in a task.

        Most requests are submitted without waiting: for them there is no task, no entry among the loop's, and
        no turn of it in between. Up to there it has no `asyncio.current_task()`, so before it uses what needs
        one, `asyncio.timeout` for one, it has to await `in_task`.

        A task that is cancelled before its first turn is never entered. The coroutine is closed where it
        waits then, and sees `GeneratorExit` instead of `CancelledError`: clean-up belongs in a `finally`
        that does not wait.
        """
        try:
            waits_for = work.send(None)
        except StopIteration:
            return

        def over(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            work.close()  # Nothing is left to close of one that came to its end.

        self._follow(_rest(work, waits_for)).add_done_callback(over)

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in a task."""
        self._follow(work).add_done_callback(self.tasks.discard)

    def _follow(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task


async def in_task() -> None:
    """Return in a task."""
    if asyncio.current_task() is None:
        await _turn()


@coroutine
def _turn() -> Generator[None]:
    yield


async def _rest(work: Coroutine[Any, Any, None], waits_for: object) -> None:
    await _driven(work, waits_for)


@coroutine
def _driven(work: Coroutine[Any, Any, None], waits_for: object) -> Generator[object, object, None]:
    """Go on with what waits already."""
    try:
        while True:
            try:
                came = yield waits_for
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's.
                waits_for = work.throw(error)
            else:
                waits_for = work.send(came)
    except StopIteration:
        return

"""The thread on which an `LLM` has its event loop, and a call's requests there."""

import asyncio
import threading
from collections.abc import Coroutine
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import uvloop

from penstock.backends.base import GenerateRequest
from penstock.errors import PenstockError, WorkerUnavailable
from penstock.offline.engine import OfflineEngine
from penstock.offline.outputs import GeneratedAnswer

T = TypeVar("T")
ALIVE_S = 1.0
"""While a call waits it looks so often whether the event loop's thread is still there."""
CLOSE_TIMEOUT_S = 15.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, or what it raises. If waiting is interrupted it is cancelled, and has ended, first."""
        tasks, ended = list[asyncio.Task[T]](), threading.Event()

        def begin() -> None:
            tasks.append(self.loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: ended.set())

        self.loop.call_soon_threadsafe(begin)
        try:
            self._wait(ended)
        except BaseException:
            self.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait(CLOSE_TIMEOUT_S)
            raise
        return tasks[0].result()

    def _wait(self, ended: threading.Event) -> None:
        while not ended.wait(ALIVE_S):
            if not self.is_alive:
                raise WorkerUnavailable("the engine was closed while it was asked")

    def close(self) -> None:
        """End it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()


class Call:
    """The requests of one call that are on their way."""

    def __init__(self, engine: OfflineEngine, thread: LoopThread) -> None:
        self._engine, self._thread = engine, thread
        self._done: SimpleQueue[tuple[int, GeneratedAnswer, BaseException | None]] = SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        """The event loop's thread alone knows them."""
        self.num_running = 0
        """Requests whose end was not taken yet."""

    def begin(self, index: int, answer: GeneratedAnswer, requests: list[GenerateRequest]) -> None:
        """Hand one over."""
        self.num_running += 1
        self._thread.loop.call_soon_threadsafe(self._begin, index, answer, requests)

    def take(self, *, wait: bool) -> tuple[int, GeneratedAnswer, PenstockError | None] | None:
        """One that has ended; None: none has. A bug in there is raised here."""
        while True:
            try:
                index, answer, error = self._done.get(block=wait, timeout=ALIVE_S if wait else None)
            except Empty:
                if not wait:
                    return None
                if not self._thread.is_alive:
                    raise WorkerUnavailable("the engine was closed while it was asked") from None
                continue
            self.num_running -= 1
            if error is not None and not isinstance(error, PenstockError):
                raise error
            return index, answer, error

    def abort(self) -> None:
        """End all that run, and wait for that."""
        if self.num_running and self._thread.is_alive:
            self._thread.run(self._abort())

    def _begin(self, index: int, answer: GeneratedAnswer, requests: list[GenerateRequest]) -> None:
        task = self._thread.loop.create_task(self._engine.run(answer, requests))
        self._tasks.add(task)

        def end(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._done.put((index, answer, None if task.cancelled() else task.exception()))

        task.add_done_callback(end)

    async def _abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

"""A worker that is a thread of this process, supervised as those that are processes are."""

import asyncio
from collections import deque

from penstock.clock import Clock
from penstock.engine.in_thread import EngineThread
from penstock.errors import OperatorError
from penstock.fleet.launchers.process import EXIT_CANNOT_SERVE
from penstock.protocol.address import Address, WorkerLaunch, parse_address


class ThreadWorker:
    """See `fleet.launchers.supervised.Supervisable`."""

    pid = None
    was_killed_for_memory = False

    def __init__(self, launch: WorkerLaunch, clock: Clock) -> None:
        self.exit_code: int | None = None
        self.starts_asleep = False  # It never sleeps.
        self.tail: deque[str] = deque(maxlen=1)
        self.address: Address = parse_address(launch.address)
        self._launch, self._clock = launch, clock
        self._thread: EngineThread | None = None
        self._ended = asyncio.Event()

    async def spawn(self) -> None:
        """Start it."""
        loop = asyncio.get_running_loop()
        self._ended.clear()

        def on_end() -> None:
            if not loop.is_closed():  # The program may be ending.
                loop.call_soon_threadsafe(self._ended.set)

        self.exit_code = None
        self._thread = EngineThread(self._launch, self._clock, on_end)
        self._thread.start()

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._ended.wait()
        assert self._thread is not None, "it was started"
        failure = self._thread.failure
        if failure is not None:
            self.tail.append(f"{type(failure).__name__}: {failure}")
        self.exit_code = EXIT_CANNOT_SERVE if isinstance(failure, OperatorError) else int(failure is not None)

    def doubt(self) -> None:
        """Nothing can be found out that its end does not tell."""

    def kill(self) -> None:
        """Ask it to end: a thread cannot be forced."""
        if self._thread is not None:
            self._thread.stop()

    async def end(self, timeout_s: float) -> None:
        """Ask it to end, and wait. One that is loading ends behind that, by itself."""
        self.kill()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            self.tail.append("the engine's thread has not ended yet")

    async def close(self) -> None:
        """Nothing is kept for it."""

    def describe_end(self) -> str:
        """How it ended, in words."""
        return "the engine's thread has failed" if self.exit_code else "the engine's thread has ended"

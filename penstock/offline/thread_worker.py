"""The engine in a thread of a program that asked for it, and that thread as a worker that is supervised as
those that are processes are.

The same steps, socket and messages as in engine/worker.py, without what only a process can do: it is not
watched for steps that hang, ends nothing when its device fails, and reads no signals. A failure in here is
reported as a worker's failure; the program continues.
"""

import asyncio
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable

import msgspec

from penstock.clock import Clock
from penstock.engine.adapters.fetch import AdapterFetcher
from penstock.engine.kv_event_publisher import KVEventPublisher, open_publisher
from penstock.engine.mailbox import DrainAsked, Mailbox, StepWatch
from penstock.engine.serve_socket import ServerLimits, WorkerServer
from penstock.engine.worker import load, run_steps, take_adapters
from penstock.errors import OperatorError
from penstock.fleet.launchers.process import EXIT_CANNOT_SERVE
from penstock.protocol.address import Address, WorkerLaunch, parse_address
from penstock.protocol.worker import Ready, WorkerFailed
from penstock.protocol.worker_parts import StaysAwake

_log = logging.getLogger(__name__)


class EngineThread:
    """One engine: `start` it once, `stop` it once."""

    def __init__(self, launch: WorkerLaunch, clock: Clock, on_end: Callable[[], None]) -> None:
        """`on_end` is called on the engine's thread, last of all."""
        self._on_end = on_end
        self._launch, self._clock, self._mailbox = launch, clock, Mailbox()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: Exception | None = None
        """Why it ended, if it was not asked to."""

    def start(self) -> None:
        """Begin to listen and to load."""
        self._thread.start()

    def stop(self) -> None:
        """Take nothing new, and end when nothing is left. While it loads it ends behind that."""
        self._mailbox.post(DrainAsked())

    def _run(self) -> None:
        config = self._launch.engine
        limits = ServerLimits(
            config.connection_buffer_bytes_max, config.max_running + config.max_waiting, self._launch.key
        )
        server = WorkerServer(parse_address(self._launch.address), self._mailbox, limits, self._clock)
        try:
            server.start()
        except OSError as error:
            self.failure = error
            self._on_end()
            return
        try:
            self._serve(server)
        except Exception as error:  # noqa: BLE001 The thread's end: any error is reported.
            if not isinstance(error, OperatorError):
                traceback.print_exc()
            self.failure = error
            server.announce(WorkerFailed(str(error), type(error).__name__))
        finally:
            server.close()
            if server.grammars is not None:
                server.grammars.close()
            self._on_end()

    def _serve(self, server: WorkerServer) -> None:
        launch, clock = self._launch, self._clock
        publisher = open_publisher(launch.engine.kv_events)
        core, info = load(launch, server, clock)
        feed = KVEventPublisher(launch.engine.kv_events, clock, publisher)
        feed.follow(core.kv)
        fetcher = AdapterFetcher()
        try:
            take_adapters(core, self._mailbox, clock, fetcher)
            server.publish(0, {}, core.stats())
            server.announce(Ready(msgspec.structs.replace(info, model=launch.model_name)))
            while run_steps(core, self._mailbox, server, feed, StepWatch(0, clock, _log.error)):
                server.report(
                    StaysAwake(0)
                )  # Its program would not be rid of the memory: it ends the engine.
        finally:
            feed.close()
            fetcher.close()


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

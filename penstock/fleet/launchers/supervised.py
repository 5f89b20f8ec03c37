"""Workers that are kept running: each with a supervisor, wherever its process is, and the launcher that
starts them as child processes here. `SupervisingLauncher` is what it has in common with Ray's (ray.py).

    spawn ─> loading ─> ready ─> exit ─┬─ asked to stop, or draining ──> gone
      ^                                ├─ cannot serve ──> down
      └──── back-off ──── restart <────┴─ crashed, killed, hung, lost ──> down once the restarts are used up

While it never was ready, `wait_ready` raises at the first failure: its caller knows whether the model has
other workers, and stops this one if not. `RestartBudget` says when to restart. How a process is started and
ended is process.py's.
"""

import asyncio
import tempfile
from collections import deque
from collections.abc import Callable
from typing import Protocol

from penstock.backends.base import Phase
from penstock.backends.engine.backend import EngineBackend
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.errors import CheckpointError, ConfigError, OperatorError, PenstockError, WorkerUnavailable
from penstock.fleet.launchers.base import ProgressCallback, WorkerSpec, WorkerStopped
from penstock.fleet.launchers.process import (
    EXIT_CANNOT_SERVE,
    ReservedPort,
    TakeSpare,
    WorkerLogs,
    WorkerProcess,
    no_spare,
)
from penstock.protocol.address import Address, UnixAddress, WorkerLaunch, link_key_of
from penstock.types import WorkerId

RESTART_WINDOW_NS = 600 * NS_PER_S
"""`EngineConfig.restarts_max` counts over this long."""
BACKOFF_MIN_S = 0.25
BACKOFF_MAX_S = 30.0


class RestartBudget:
    """At most `restarts_max` restarts in any ten minutes, each after twice the wait of the one before."""

    def __init__(self, restarts_max: int, clock: Clock) -> None:
        self._max, self._clock = restarts_max, clock
        self._recent: deque[int] = deque()

    def take(self) -> float | None:
        """Seconds to wait before the next restart, or None if the worker must stay down."""
        now_ns = self._clock.now_ns()
        while self._recent and now_ns - self._recent[0] >= RESTART_WINDOW_NS:
            self._recent.popleft()
        if len(self._recent) >= self._max:
            return None
        delay_s = min(BACKOFF_MIN_S * 2 ** len(self._recent), BACKOFF_MAX_S)
        self._recent.append(now_ns)
        return delay_s


class StallDetector:
    """Health is progress: a worker that has work and whose steps do not advance for a while is hung.

    A timeout of 0 never finds one.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_ns, self._clock = int(timeout_s * NS_PER_S), clock
        self._step = -1
        self._since_ns = clock.now_ns()

    def observe(self, step: int, *, has_work: bool) -> bool:
        """Take in the latest facts; True if the worker is hung."""
        now_ns = self._clock.now_ns()
        if not has_work or step != self._step:
            self._step, self._since_ns = step, now_ns
        return 0 < self._timeout_ns <= now_ns - self._since_ns


WATCH_INTERVAL_S = 1.0
STALL_GRACE = 2.0
"""A worker that does not end itself within so many of its own stall timeouts is killed."""
TERMINATE_TIMEOUT_S = 5.0
"""From SIGTERM to SIGKILL, when nothing is left to drain."""


class Supervisable(Protocol):
    """One worker's process, one at a time: the same object is used again for a restart."""

    exit_code: int | None
    """Of the last process; negative for a signal, None while it runs or if it is unknown."""
    tail: deque[str]
    """The last lines of its standard error."""
    starts_asleep: bool
    """The worker that the next `spawn` starts does not load its model before it is woken."""

    @property
    def address(self) -> Address:
        """Where it listens. `spawn` may change it, if it has to start somewhere else."""
        ...

    @property
    def pid(self) -> int | None:
        """Its process id while it runs, on whichever machine."""
        ...

    async def spawn(self) -> None:
        """Start it and tell it what to do.

        Raises:
            OSError: no process can be started.
        """
        ...

    async def wait(self) -> None:
        """Return when it is gone, as far as can be found out."""
        ...

    def doubt(self) -> None:
        """Its connection was lost: find out whether it is still there."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    async def end(self, timeout_s: float) -> None:
        """Make sure that it is gone and nothing of it is left: ask, then force. Fine also if it never ran."""
        ...

    async def close(self) -> None:
        """It will not be started again: release its place. After `end`."""
        ...

    @property
    def was_killed_for_memory(self) -> bool:
        """Whether the kernel ended the last process for lack of memory, as far as can be told from here."""
        ...

    def describe_end(self) -> str:
        """How the last process ended, in words."""
        ...


class SupervisedWorker:
    """One worker that is kept running. `start` it once, `stop` it once."""

    def __init__(self, spec: WorkerSpec, backend: EngineBackend, process: Supervisable, clock: Clock) -> None:
        self.spec, self.backend = spec, backend
        self.on_move: Callable[[Address], None] = _ignored
        self._process, self._clock = process, clock
        self._budget = RestartBudget(spec.engine.restarts_max, clock)
        self._down: PenstockError | None = None
        self._failed: PenstockError | None = None
        """Why it did not get ready, while it never was."""
        self._was_ready = self._is_ready = self._sleeps = False
        self._restarts = 0
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def address(self) -> Address:
        """See `LaunchedWorker.address`."""
        return self._process.address

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._process.pid

    def start(self) -> None:
        """Begin to supervise, and to connect."""
        self.backend.connect_to(self.address)
        self.backend.on_phase = self._on_change
        self._supervisor = asyncio.create_task(self._supervise(), name=f"supervise {self.spec.worker_id}")
        self._supervisor.add_done_callback(self._on_supervisor_end)

    async def wait_ready(self, on_progress: ProgressCallback | None = None) -> None:
        """See `LaunchedWorker.wait_ready`."""
        while not (self.backend.status.ready or self._sleeps):
            if (error := self._down or self._failed) is not None:
                raise error
            if on_progress is not None:
                on_progress(self.backend.status)
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, timeout_s: float) -> None:
        """Let streams end, up to the timeout; then end the process, by force if it must be."""
        assert self._supervisor is not None
        until_ns = self._clock.now_ns() + int(timeout_s * NS_PER_S)
        was_ready = self.backend.status.ready
        was_asked = self.backend.end_worker()
        await self.backend.drain(timeout_s)
        left_s = (until_ns - self._clock.now_ns()) / NS_PER_S
        # Other gateways may have streams at one that was ready: it exits by itself after the last one.
        if was_asked and was_ready and left_s > 0:
            await asyncio.wait([self._supervisor], timeout=left_s)
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])
        if self._process.pid is not None:  # It was cancelled while it cleared up behind an exit.
            await self._process.end(TERMINATE_TIMEOUT_S)
        await self._process.close()
        self._down = WorkerStopped("the worker was stopped")
        self.backend.report(stage="stopped")

    def _on_change(self) -> None:
        is_ready, self._sleeps = self.backend.status.ready, self.backend.status.phase is Phase.ASLEEP
        if self._sleeps or self.backend.status.phase is Phase.WAKING:
            self._process.starts_asleep = True  # The caller that wanted it awake wakes it again.
        elif is_ready:
            self._process.starts_asleep = False
        elif self._is_ready and not self.backend.draining:
            self._process.doubt()
        self._is_ready = is_ready
        self._was_ready |= is_ready or self._sleeps
        if is_ready or self._sleeps:
            self._failed = None
        self._changed.set()

    def _on_supervisor_end(self, supervisor: "asyncio.Task[None]") -> None:
        """After a bug in here nothing may wait for a worker that is not watched."""
        if not supervisor.cancelled() and (bug := supervisor.exception()) is not None:
            self._down = WorkerUnavailable(f"the supervisor of the worker failed: {bug!r}")
            self.backend.report(stage=f"down: {self._down}", is_down=True)
            asyncio.get_running_loop().call_exception_handler({"message": str(self._down), "exception": bug})

    async def _supervise(self) -> None:
        """Run the process again and again, until it must not be."""
        while True:
            what = await self._run_once()
            if self._process.was_killed_for_memory:
                self.backend.report(stage=what, fault="oom_kill")
            if self.backend.draining:
                return
            error = self._why_not(what)
            if self._process.exit_code == EXIT_CANNOT_SERVE or isinstance(error, OperatorError):
                await self._go_down(error)
                return
            if not self._was_ready:
                self._failed = error
                self._changed.set()
            delay_s = self._budget.take()
            if delay_s is None:
                stage = f"{what}, and {self._restarts} restarts were in vain"
                await self._go_down(WorkerUnavailable(stage))
                return
            self._restarts += 1
            stage = f"{what}; restart {self._restarts} in {delay_s:g} s"
            self.backend.report(stage=stage, note=what, restarts=self._restarts)
            await sleep(delay_s)

    async def _run_once(self) -> str:
        """One life of the process, and how it ended, in words."""
        before = self.address
        try:
            await self._process.spawn()
        except OSError as error:
            return f"no process can be started: {error}"
        if self.address != before:
            self.on_move(self.address)
            await self.backend.move_to(self.address)
        watch = asyncio.create_task(self._watch(), name=f"watch {self.spec.worker_id}")
        try:
            await self._process.wait()
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            await self._process.end(TERMINATE_TIMEOUT_S)
        if not watch.cancelled():
            return watch.result()
        failure, what = self.backend.failure, self._process.describe_end()
        return what if failure is None else f"{what}: {failure.error}"

    async def _watch(self) -> str:
        """Kill the process when it does not get ready in time, or hangs; returns what for."""
        engine, backend = self.spec.engine, self.backend
        interval_s = min(WATCH_INTERVAL_S, (engine.stall_timeout_s or WATCH_INTERVAL_S) / 4)
        startup = StallDetector(engine.startup_timeout_s, self._clock)
        # The worker notices a step that does not end by itself, and then says more than we could.
        stall = StallDetector(STALL_GRACE * engine.stall_timeout_s, self._clock)
        # One that stands still is cut off long before that, and looks as one that has not begun.
        silent, was_ready = StallDetector(STALL_GRACE * engine.stall_timeout_s, self._clock), False
        while True:
            await sleep(interval_s)
            ready = backend.status.ready
            was_ready = (was_ready or ready) and backend.status.phase not in (Phase.ASLEEP, Phase.WAKING)
            if startup.observe(0, has_work=not (ready or self._sleeps or backend.draining)):
                what = f"the worker was not ready within {engine.startup_timeout_s:g} s"
            elif stall.observe(backend.progress, has_work=ready and backend.has_work):
                what = f"the worker hung: no step in {STALL_GRACE * engine.stall_timeout_s:g} s"
            elif silent.observe(0, has_work=was_ready and not ready and not backend.draining):
                what = f"the worker hung: no answer in {STALL_GRACE * engine.stall_timeout_s:g} s"
            else:
                continue
            self._process.kill()
            return what

    async def _go_down(self, error: PenstockError) -> None:
        """The end of the supervision: nothing will listen there again, and waiting callers get the reason."""
        self._down = error
        await self.backend.close()
        await self._process.close()
        self.backend.report(stage=f"down: {error}", note=str(error))

    def _why_not(self, what: str) -> PenstockError:
        """Why it never served: in its own words if it had any."""
        failure, tail = self.backend.failure, self._process.tail
        if failure is not None:
            kind, words = failure.kind, failure.error
        else:  # It may have failed before we were connected; then its last line says the same.
            kind, _, words = (tail[-1] if tail else "").partition(": ")
        for operator_error in (CheckpointError, ConfigError, OperatorError):
            if kind == operator_error.__name__:
                return operator_error(words)
        return WorkerUnavailable(f"{what}; its last words: {tail[-1]}" if tail else what)


def _ignored(_: Address) -> None:
    """No other part needs to know."""


class SupervisingLauncher:
    """All of a `Launcher` but how a worker gets a process."""

    def __init__(
        self, clock: Clock, hash_key: bytes, environment: dict[str, str] | None, logs: WorkerLogs
    ) -> None:
        """`environment` of workers, beside this process's own."""
        self._clock, self._hash_key = clock, hash_key
        self._environment, self._logs = environment or {}, logs
        self._workers: dict[WorkerId, SupervisedWorker] = {}

    async def stop(self, worker_id: WorkerId, *, timeout_s: float) -> None:
        """Drain the worker, up to the timeout, and end its process. Unknown ids are stopped already."""
        if (worker := self._workers.pop(worker_id, None)) is not None:
            await worker.stop(timeout_s)

    def list(self) -> tuple[SupervisedWorker, ...]:
        """Every worker that was started and not stopped."""
        return tuple(self._workers.values())

    async def close(self, *, timeout_s: float) -> None:
        """Stop every worker, all at the same time."""
        await asyncio.gather(
            *(self.stop(worker_id, timeout_s=timeout_s) for worker_id in list(self._workers))
        )

    def _supervise(self, spec: WorkerSpec, backend: EngineBackend, process: Supervisable) -> SupervisedWorker:
        """Start a worker that has its place."""
        worker = self._workers[spec.worker_id] = SupervisedWorker(spec, backend, process, self._clock)
        worker.start()
        return worker

    def _hearer_of(self, worker_id: WorkerId) -> Callable[[str], None]:
        """Takes the lines that a worker prints."""
        return self._logs.of(worker_id, self._clock)


class LocalLauncher(SupervisingLauncher):
    """Starts workers as child processes of this one. `close` it, and nothing of them is left but their logs.

    Each listens on a socket in a directory that only this user may enter; or, where other machines shall
    reach it, on a port of `host` that is kept for it. A worker cannot outlive this process: the kernel kills
    it with the thread that started it, and the end of its standard input tells it too.
    """

    def __init__(
        self,
        clock: Clock,
        hash_key: bytes,
        *,
        environment: dict[str, str] | None = None,
        logs: WorkerLogs = WorkerLogs(),  # noqa: B008 - it is frozen.
        host: str = "",
        spare: TakeSpare = no_spare,
    ) -> None:
        """With a `host` workers listen on TCP ports of that address instead of on Unix sockets.

        `spare` may have processes that were begun before.
        """
        super().__init__(clock, hash_key, environment, logs)
        self._host, self._spare = host, spare
        self.link_key = link_key_of(hash_key) if host else b""
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-")  # Mode 0700.
        self._num_started = 0

    async def open(self) -> None:
        """See `Launcher`: this machine is there."""

    async def start(self, spec: WorkerSpec, backend: EngineBackend) -> SupervisedWorker:
        """Start a worker process and return at once; see `SupervisedWorker.wait_ready`.

        Raises:
            WorkerUnavailable: there is no port for it.
        """
        assert spec.worker_id not in self._workers, f"{spec.worker_id} runs already"
        port = self._port()
        address = port.address if port is not None else self._socket()
        launch = WorkerLaunch(
            model_path=spec.model_path,
            model_name=spec.model_name,
            address=str(address),
            shares_port=bool(self._host),
            hash_key=self._hash_key,
            key=self.link_key,
            engine=spec.engine,
            runner=spec.runner,
            asleep=spec.asleep,
        )
        hear = self._hearer_of(spec.worker_id)
        process = WorkerProcess(spec.worker_id, launch, address, self._environment, hear, port, self._spare)
        return self._supervise(spec, backend, process)

    async def close(self, *, timeout_s: float) -> None:
        """Stop every worker, all at the same time, and remove their sockets."""
        try:
            await super().close(timeout_s=timeout_s)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the sockets: all that is left to do where the event loop ends before `close` could."""
        self._directory.cleanup()

    def _socket(self) -> UnixAddress:
        self._num_started += 1
        return UnixAddress(f"{self._directory.name}/{self._num_started}.sock")

    def _port(self) -> ReservedPort | None:
        try:
            return ReservedPort(self._host) if self._host else None
        except OSError as error:
            raise WorkerUnavailable(f"there is no port for it on {self._host!r}: {error}") from error

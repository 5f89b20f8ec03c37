"""One worker process at a time: started, listened to, ended, and nothing of it left. No policy.

The same object is used again for a restart: same launch line, same socket path.

The output of one worker, kept in a file that cannot fill the disk.

Two files, each up to half the bound: NAME.log, and NAME.log.1 with what came before it.

A TCP port that is ours from before a worker listens on it until long after: it keeps its address when it
restarts.

A free port that is looked up and released may be taken by another process a moment later. So a socket is
bound to it with SO_REUSEPORT and never listens: the kernel gives the port only to processes of the same user
that ask for it in the same way, and sends connections only to sockets that listen.

Worker processes that are begun before it is known what they are to do.

Half of a worker's start-up is Python and torch. `penstock serve` begins its workers before it imports its own
gateway and reads tokenizers, so both happen at once, on two cores. A spare imports and then waits for its
launch line, like any other worker; one that is not taken is ended.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S, Clock, sleep
from penstock.config.machine import CgroupMemory
from penstock.protocol.address import REAL_RUNNER, Address, TcpAddress, UnixAddress, WorkerLaunch


class ReservedPort:
    """One port of this machine. `close` it when no worker needs it any more."""

    def __init__(self, host: str) -> None:
        """`host` is an address (or name) of this machine.

        Raises:
            OSError: it is none, or no port is free.
        """
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(where)
        except OSError:
            self._socket.close()
            raise
        self.address = TcpAddress(host, int(self._socket.getsockname()[1]))

    def close(self) -> None:
        """Release it."""
        self._socket.close()


EXIT_CANNOT_SERVE = 78
"""The worker says that starting it again would fail the same way (engine/worker.py)."""
TAIL_LINES = 20
LINE_BYTES_MAX = 8192
TakeSpare = Callable[[dict[str, str]], Process | None]
"""Gives away a process that was begun in this environment: `Spares.take`."""
_RACE_S = 0.005
"""Before a process is begun again that another thread's was in the way of."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def no_spare(environment: dict[str, str]) -> Process | None:
    """There is none."""
    del environment


class WorkerProcess:
    """`python -m penstock.engine.worker`, with its standard error passed on line by line."""

    def __init__(
        self,
        name: str,
        launch: WorkerLaunch,
        address: Address,
        environment: dict[str, str],
        log: Callable[[str], None],
        port: ReservedPort | None = None,
        spare: TakeSpare = no_spare,
    ) -> None:
        """`port` is where it listens, if that is kept for it; ours from now on.

        `spare` may have a process that was begun before.
        """
        self.exit_code: int | None = None
        """Of the last process; negative for a signal, None while it runs."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines of its standard error."""
        self.address, self._port = address, port
        self.starts_asleep = launch.asleep
        """The next `spawn`: it does not load its model before it is woken."""
        self._name, self._launch, self._log = name, launch, log
        self._environment, self._spare = environment_of(launch.engine.threads) | environment, spare
        self._process: Process | None = None
        self._memory, self._num_kills = CgroupMemory.of_self(), 0
        self._is_killed = False
        """By us."""
        self._pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._process is None else self._process.pid

    async def spawn(self) -> None:
        """Start it and tell it what to do.

        Raises:
            OSError: no process can be started.
        """
        assert self._process is None, "one at a time"
        self.exit_code, self._is_killed = None, False
        self._num_kills = self._memory.num_kills() if self._memory is not None else 0
        self.tail.clear()
        self._process = self._spare(self._environment) or await create_process(self._environment)
        assert self._process.stdin is not None
        # It stays open: its end would tell the worker that we are gone.
        launch = msgspec.structs.replace(self._launch, asleep=self.starts_asleep)
        self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self._pump = asyncio.create_task(self._pass_on_stderr(self._process), name=f"stderr of {self._name}")

    async def wait(self) -> None:
        """Return when the process has exited."""
        assert self._process is not None
        await self._process.wait()

    async def close(self) -> None:
        """It will not be started again. After `end`."""
        if self._port is not None:
            self._port.close()

    def doubt(self) -> None:
        """The kernel says when a child ends: there is nothing to find out."""

    def kill(self) -> None:
        """End it at once."""
        self._is_killed = True
        self._signal(signal.SIGKILL)

    def describe_end(self) -> str:
        """How the last process ended, in words."""
        if self.was_killed_for_memory:
            return f"{describe_exit(self.exit_code)}: the kernel ended it for lack of memory"
        return describe_exit(self.exit_code)

    @property
    def was_killed_for_memory(self) -> bool:
        """Whether the kernel ended the last process, as far as its cgroup, which is ours, tells."""
        memory = self._memory
        if self.exit_code != -signal.SIGKILL or self._is_killed or memory is None:
            return False
        return memory.num_kills() > self._num_kills

    async def end(self, timeout_s: float) -> None:
        """Make sure that it is gone: ask, then force; reap it and remove its socket. The next call does the
        rest of one that was cancelled.
        """
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                self._is_killed = True
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        self.exit_code = await process.wait()
        assert self._pump is not None
        await asyncio.wait([self._pump])
        self._pump.result()
        assert process.stdin is not None
        process.stdin.close()
        if isinstance(self.address, UnixAddress):
            Path(self.address.path).unlink(missing_ok=True)
        self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _pass_on_stderr(self, process: Process) -> None:
        """Read by chunks, not lines: a progress bar or a broken library may never end its line."""
        assert process.stderr is not None
        rest = b""
        while chunk := await process.stderr.read(LINE_BYTES_MAX):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._say(line)
        if rest:
            self._say(rest)

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.tail.append(text)
            self._log(f"[{self._name}] {text}")


async def create_process(environment: dict[str, str], *imports: str) -> Process:
    """A worker that waits to be told what to do; before that it imports the modules `imports`.

    Raises:
        OSError: no process can be started.
    """
    creating = asyncio.ensure_future(_created(environment, *imports))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        process = await creating  # A process that is half made cannot be ended; now it can.
        process.kill()
        await process.wait()
        raise


async def _created(environment: dict[str, str], *imports: str) -> Process:
    while True:
        try:
            # A session of its own, so that Ctrl-C in the terminal reaches only the parent, which drains.
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.engine.worker", *imports),
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=PIPE,
                env=environment,
                start_new_session=True,
            )
        except RuntimeError as error:
            # uvloop makes one process at a time in a program; another thread's loop (an `LLM`'s) is at it.
            if "Racing" not in str(error):
                raise
        await sleep(_RACE_S)


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "the worker could not be started"
    if code >= 0:
        return f"the worker exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"the worker was killed by {signal.Signals(-code).name}"
    return f"the worker was killed by signal {-code}"


def environment_of(threads: int) -> dict[str, str]:
    """Ours, for a worker of so many threads (0: one for each core), with what numerical libraries read while
    they are imported.

    OpenMP's threads wait for each other by spinning, for milliseconds by default: on a machine with other
    work a step then takes 10 times longer, since the thread that is waited for has no core. A short spin
    costs nothing.
    """
    count = str(threads or len(os.sched_getaffinity(0)))
    fixed = {**dict.fromkeys(_THREADS, count), "TOKENIZERS_PARALLELISM": "false"}
    return {"GOMP_SPINCOUNT": "1000", **os.environ, **fixed}


LOG_BYTES_MAX = 8 * 1024 * 1024
"""Of one worker, by default."""
SHOWN_LINES, SHOWN_CHARS_MAX, SHOWN_WORKERS_MAX = 200, 500, 512
"""Of a worker's lines in memory: how many, how long, of how many workers."""


class LogFile:
    """Lines with the time in front of them.

    A disk that is full or not ours costs the lines, never the worker.
    """

    def __init__(self, directory: Path, name: str, clock: Clock, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.path = directory / f"{quote(name, safe='@')}.log"
        self._clock, self._half = clock, bytes_max // 2
        self._size = 0
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._size = self.path.stat().st_size

    def write(self, line: str) -> None:
        """Add a line; it is in the file when this returns."""
        time = datetime.fromtimestamp(self._clock.wall_ns() / NS_PER_S, UTC)
        data = f"{time.isoformat(timespec='milliseconds')} {line}\n".encode(errors="replace")[: self._half]
        with contextlib.suppress(OSError):
            if self._size + len(data) > self._half:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                self._size = 0
            with self.path.open(
                "ab"
            ) as file:  # Opened each time: a worker prints little, and may live for months.
                file.write(data)
            self._size += len(data)


def stderr_line(line: str) -> None:
    """Where a worker's lines go unless the caller knows better."""
    print(line, file=sys.stderr, flush=True)


@dataclass(slots=True, frozen=True)
class LogLine:
    """One line of a worker."""

    at_ms: int
    """Since the Unix epoch."""
    text: str


class WorkerTails:
    """The last lines of every worker that is launched here, for people who look from elsewhere."""

    def __init__(self) -> None:
        self._tails: dict[str, deque[LogLine]] = {}

    def of(self, name: str) -> tuple[LogLine, ...] | None:
        """One worker's, oldest first; None: it was not launched here."""
        tail = self._tails.get(name)
        return None if tail is None else tuple(tail)

    def begin(self, name: str) -> deque[LogLine]:
        """Where a worker's lines go; those of a worker of this name before are kept."""
        tail = self._tails.setdefault(name, deque(maxlen=SHOWN_LINES))
        if len(self._tails) > SHOWN_WORKERS_MAX:
            del self._tails[next(iter(self._tails))]
        return tail


@dataclass(slots=True, frozen=True)
class WorkerLogs:
    """The listener of the lines that workers print, and the files that keep them."""

    say: Callable[[str], None] = stderr_line
    directory: Path | None = None
    """With a file for each worker; None: nowhere."""
    tails: WorkerTails = field(default_factory=WorkerTails)

    def of(self, name: str, clock: Clock) -> Callable[[str], None]:
        """Takes one worker's lines."""
        file = None if self.directory is None else LogFile(self.directory, name, clock)
        tail = self.tails.begin(name)

        def log(line: str) -> None:
            if file is not None:
                file.write(line)
            shown = line.removeprefix(f"[{name}] ")[:SHOWN_CHARS_MAX]
            tail.append(LogLine(clock.wall_ns() // NS_PER_MS, shown))
            self.say(line)

        return log


class Spares:
    """Spare processes that are not taken yet. `close` it when all workers have been started."""

    def __init__(self, module: str = REAL_RUNNER.partition(":")[0]) -> None:
        """`module` is what they import."""
        self._module = module
        self._waiting: list[tuple[dict[str, str], Process]] = []

    async def begin(self, threads: Iterable[int]) -> None:
        """One for each worker of so many threads.

        Without a process to be had there is no spare: a worker's own start says why.
        """
        for count in threads:
            environment = environment_of(count)
            with contextlib.suppress(OSError):
                self._waiting.append((environment, await create_process(environment, self._module)))

    def take(self, environment: Mapping[str, str]) -> Process | None:
        """One that was begun in this environment, if there is one."""
        for i, (begun_in, process) in enumerate(self._waiting):
            if begun_in == environment and process.returncode is None:
                del self._waiting[i]
                return process
        return None

    async def close(self) -> None:
        """End those that are left."""
        left, self._waiting = self._waiting, []
        for _, process in left:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for _, process in left:
            await process.wait()
            assert process.stdin is not None
            process.stdin.close()

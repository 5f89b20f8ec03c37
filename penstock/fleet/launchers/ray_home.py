"""The code that runs inside a Ray actor: the home of one worker process, on whichever machine Ray has put it.

The actor computes nothing and relays nothing: gateways connect to the worker's own port. If the actor dies,
so does the worker (see engine/worker.py). Ray's client is not imported here, so that the file can be tested
without it.
"""

import asyncio
from collections import deque

import msgspec

from penstock.fleet.launchers.process import ReservedPort, WorkerProcess
from penstock.protocol.address import WorkerLaunch

LINES_MAX = 1000
"""Lines that were not fetched; older ones go first."""


class WorkerHome:
    """One worker at a time, started as often as asked, always on the same port."""

    def __init__(self, name: str, host: str) -> None:
        """`host` is this machine's address, as other machines reach it.

        Raises:
            OSError: no port is free.
        """
        self._name = name
        self._port = ReservedPort(host)
        self._process: WorkerProcess | None = None
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._wake = asyncio.Event()

    async def address(self) -> str:
        """Where the worker listens, or will."""
        return str(self._port.address)

    async def spawn(self, launch: bytes, environment: dict[str, str]) -> int | None:
        """Start the worker; returns its process id.

        `launch` is a `WorkerLaunch` as JSON, but for the address.

        Raises:
            OSError: no process can be started.
        """
        wanted = msgspec.json.decode(launch, type=WorkerLaunch)
        here = msgspec.structs.replace(wanted, address=str(self._port.address), shares_port=True)
        self._process = WorkerProcess(self._name, here, self._port.address, environment, self._say)
        await self._process.spawn()
        return self._process.pid

    async def wait(self) -> None:
        """Return when the worker has exited."""
        if self._process is not None:
            await self._process.wait()

    async def is_running(self) -> bool:
        """Whether the worker's process is there. That this answers says as much about the machine."""
        return self._process is not None and self._process.pid is not None

    async def kill(self) -> None:
        """End the worker at once."""
        if self._process is not None:
            self._process.kill()

    async def end(self, timeout_s: float) -> tuple[int | None, list[str]]:
        """Make sure that the worker is gone; returns its exit code and its last lines."""
        if self._process is None:
            return None, []
        await self._process.end(timeout_s)
        return self._process.exit_code, list(self._process.tail)

    async def lines(self) -> list[str]:
        """The lines that the worker has printed since the last call; waits until there is something."""
        await self._wake.wait()
        self._wake.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._wake.set()

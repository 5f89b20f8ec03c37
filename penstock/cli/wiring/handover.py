"""Hands the listening sockets of a running `serve` to the next one, so that an upgrade refuses no connection.

    next ── connects ────> running     host, port, and the sockets themselves (SCM_RIGHTS)
    next    loads its models; the running one serves
    next ── READY ───────> running     the next one accepts; the running one stops accepting, and drains
         <──────── TAKEN ─

The kernel keeps one queue of connections for a socket, whichever process accepts from it: a connection that
waits there while one process leaves is taken by the other. With a socket of its own for each (SO_REUSEPORT)
those in the queue of the one that leaves would be reset.

Only processes of the same user are served: the Unix socket is in a directory that is the user's alone, and
the kernel is asked who connects.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.wiring.state import runtime_directory
from penstock.config.tree import ServerConfig
from penstock.errors import ConfigError, OperatorError
from penstock.telemetry.log import Log

READY, TAKEN = b"ready\n", b"taken\n"
SOCKETS_MAX = 16
ANSWER_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as `SO_PEERCRED` tells them: unix(7)."""


class Handover:
    """The running server's side: open for the next one until one has taken over."""

    def __init__(self, listeners: Sequence[socket.socket], on_taken: Callable[[], None], log: Log) -> None:
        self._listeners, self._on_taken, self._log = listeners, on_taken, log
        self._path: Path | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, port: int) -> None:
        """Wait for the next server on this port. A machine without a place for that can still serve."""
        directory = runtime_directory()
        if directory is None:
            return
        self._path = _path(directory, port)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._path.unlink(missing_ok=True)
            door.bind(str(self._path))
            self._path.chmod(0o600)
            door.listen(1)
        except OSError as error:
            self._log.info("no other server can take over from this one", error=error)
            door.close()
            return
        self._task = asyncio.create_task(self._serve(door), name="handover")

    def close(self) -> None:
        """Nobody can take over any more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._forget_path()

    async def _serve(self, door: socket.socket) -> None:
        """One that wants to take over at a time; the next waits until that one has given up."""
        loop = asyncio.get_running_loop()
        with door:
            while True:
                next_server, _ = await loop.sock_accept(door)
                with next_server, contextlib.suppress(OSError):
                    if await self._offered(next_server):
                        door.close()
                        self._forget_path()
                        await loop.sock_sendall(next_server, TAKEN)
                        self._on_taken()
                        return

    async def _offered(self, next_server: socket.socket) -> bool:
        """Whether it has taken the sockets and serves."""
        credentials = next_server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.getuid():
            return False
        socket.send_fds(next_server, [READY], [each.fileno() for each in self._listeners])
        self._log.info("another server begins to take over")
        if await asyncio.get_running_loop().sock_recv(next_server, len(READY)) == READY:
            return True
        self._log.warning("the server that was to take over is gone; this one stays")
        return False

    def _forget_path(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


@dataclass(slots=True, frozen=True)
class Takeover:
    """The next server's side."""

    listeners: Sequence[socket.socket]
    _running: socket.socket

    async def finish(self) -> None:
        """Everything is ready here and connections are accepted: the running server may go.

        Raises:
            OperatorError: it does not answer, so it may still serve.
        """
        loop = asyncio.get_running_loop()
        try:
            with self._running:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await loop.sock_sendall(self._running, READY)
                    if await loop.sock_recv(self._running, len(TAKEN)) == TAKEN:
                        return
        except (OSError, TimeoutError):
            pass
        raise OperatorError("the running server does not answer, so it may still serve: this one stops")


async def begin_takeover(server: ServerConfig) -> Takeover | None:
    """Get the sockets of the server that runs on this port; None if none does.

    Raises:
        ConfigError: it listens at another address.
    """
    directory = runtime_directory()
    if directory is None:
        return None
    loop = asyncio.get_running_loop()
    running = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await loop.sock_connect(running, str(_path(directory, server.port)))
            await _readable(running)
        word, numbers, _, _ = socket.recv_fds(running, len(READY), SOCKETS_MAX)
    except (OSError, TimeoutError):
        running.close()
        return None
    listeners = [socket.socket(fileno=number) for number in numbers]
    if word != READY or not listeners:
        running.close()
        return None
    bound = {str(each.getsockname()[0]) for each in listeners}
    wanted = {
        str(address[0])
        for *_, address in await loop.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    }
    if bound != wanted:
        where = ", ".join(sorted(bound))
        raise ConfigError(f"server.host: the running server listens on {where}: take that over, or stop it")
    return Takeover(listeners, running)


async def _readable(connection: socket.socket) -> None:
    """Wait until something has come."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(connection.fileno())


def _path(directory: Path, port: int) -> Path:
    return directory / f"serve-{port}.sock"

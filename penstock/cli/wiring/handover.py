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

from penstock.cli.wiring.state import address_name, runtime_directory
from penstock.clock import sleep
from penstock.config.tree import ServerConfig
from penstock.errors import ConfigError, OperatorError
from penstock.telemetry.log import Log

READY, TAKEN = b"ready\n", b"taken\n"
SOCKETS_MAX = 16
ANSWER_TIMEOUT_S = 5.0
LOADING_TIMEOUT_S = 3600.0
"""How long the next server may take to load its models; after that, another one may take over."""
ERROR_PAUSE_S = 0.5
"""Between a failed handover and the next: there may be no file descriptor left just now."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as `SO_PEERCRED` tells them: unix(7)."""


class Handover:
    """The running server's side: open for the next one until one has taken over."""

    def __init__(self, listeners: Sequence[socket.socket], on_taken: Callable[[], None], log: Log) -> None:
        self._listeners, self._on_taken, self._log = listeners, on_taken, log
        self._path: Path | None = None
        self._inode = 0
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Wait for the next server. A machine without a place for that can still serve."""
        directory = runtime_directory()
        if directory is None:
            return
        host, port = self._listeners[0].getsockname()[:2]
        self._path = _path(directory, host, port)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._path.unlink(missing_ok=True)
            door.bind(str(self._path))
            self._path.chmod(0o600)
            self._inode = self._path.stat().st_ino
            door.listen(1)
        except OSError as error:
            self._log.info("no other server can take over from this one", error=error)
            door.close()
            return
        self._task = asyncio.create_task(self._serve(door), name="handover")
        self._task.add_done_callback(lambda _: door.close())

    def close(self) -> None:
        """No other server can take over any more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._forget_path()

    async def _serve(self, door: socket.socket) -> None:
        """Offer the sockets to one server at a time, until one has taken over."""
        is_taken = False
        while not is_taken:
            try:
                next_server, _ = await asyncio.get_running_loop().sock_accept(door)
                with next_server:
                    is_taken = await self._offered(next_server)
            except OSError as error:
                self._log.warning("another server could not take over; this one stays", error=error)
                await sleep(ERROR_PAUSE_S)
        self._forget_path()
        self._on_taken()

    async def _offered(self, next_server: socket.socket) -> bool:
        """Whether it has taken the sockets, serves, and got the answer: until then this server stays.

        Raises:
            OSError: the connection is lost, or the next server takes too long.
        """
        credentials = next_server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.getuid():
            return False
        socket.send_fds(next_server, [READY], [each.fileno() for each in self._listeners])
        self._log.info("another server begins to take over")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LOADING_TIMEOUT_S):
            word = await loop.sock_recv(next_server, len(READY))
        if word == READY:
            await loop.sock_sendall(next_server, TAKEN)
            return True
        self._log.warning("the server that was to take over is gone; this one stays")
        return False

    def _forget_path(self) -> None:
        """Unlink the door, unless the next server's is there already."""
        path, self._path = self._path, None
        with contextlib.suppress(OSError):
            if path is not None and path.stat().st_ino == self._inode:
                path.unlink()


@dataclass(slots=True, frozen=True)
class Takeover:
    """The next server's side."""

    listeners: Sequence[socket.socket]
    _running: socket.socket

    def close(self) -> None:
        """Take nothing over: the running server stays."""
        self._running.close()
        for listener in self.listeners:
            listener.close()

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
    """Get the sockets of the server that runs on this address; None if none does.

    Raises:
        ConfigError: it listens at other addresses too, or there is no such address.
        OperatorError: it does not hand them over.
    """
    wanted = await _addresses(server)
    directory = runtime_directory()
    if directory is None:
        return None
    loop = asyncio.get_running_loop()
    running = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await loop.sock_connect(running, str(_path(directory, wanted[0], server.port)))
            await _readable(running)
        word, numbers, _, _ = socket.recv_fds(running, len(READY), SOCKETS_MAX)
    except (FileNotFoundError, ConnectionRefusedError):
        running.close()
        return None
    except OSError as error:
        running.close()
        raise _not_handed_over(server) from error
    takeover = Takeover([socket.socket(fileno=number) for number in numbers], running)
    if word != READY or not numbers:
        takeover.close()
        raise _not_handed_over(server)
    bound = {str(each.getsockname()[0]) for each in takeover.listeners}
    if bound != set(wanted):
        takeover.close()
        where = ", ".join(sorted(bound))
        raise ConfigError(f"server.host: the running server listens on {where}: take that over, or stop it")
    return takeover


async def _addresses(server: ServerConfig) -> list[str]:
    """The numeric addresses that the host's name stands for, in the order in which they are listened on."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"server.host: {server.host}: {error.strerror or error}") from error
    return [str(address[0]) for *_, address in found]


def _not_handed_over(server: ServerConfig) -> OperatorError:
    return OperatorError(
        f"the server that runs on {server.host} port {server.port} does not hand over its sockets: another "
        "server may be taking over from it just now"
    )


async def _readable(connection: socket.socket) -> None:
    """Wait until something has come."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(connection.fileno())


def _path(directory: Path, host: str, port: int) -> Path:
    return directory / f"serve-{address_name(host, port)}.sock"

"""The listening socket and its connections: accept, watch their deadlines, drain.

Knows connections, not requests; what answers them is the application it is given.
"""

import asyncio
import socket
from collections.abc import Sequence

from penstock.clock import Clock
from penstock.config.tree import ServerConfig
from penstock.errors import ConfigError
from penstock.gateway.http.connection import Application, Connection, ServerContext
from penstock.gateway.http.cors import Cors
from penstock.gateway.http.terms import WIRE_LIMITS, RelayTerms, WireLimits

BACKLOG = 2048
TICK_S_MAX = 1.0


class HttpServer:
    """One listening address. Made, started and stopped by the gateway."""

    def __init__(
        self,
        app: Application,
        config: ServerConfig,
        *,
        clock: Clock,
        limits: WireLimits = WIRE_LIMITS,
    ) -> None:
        self._config = config
        self._clock = clock
        self._connections: set[Connection] = set()
        self._context = ServerContext(
            app=app,
            config=config,
            limits=limits,
            terms=RelayTerms.of(config, limits),
            cors=Cors(config.cors_origins) if config.cors_origins else None,
            clock=clock,
            connections=self._connections,
        )
        self._listeners: list[asyncio.Server] = []
        self._tick: asyncio.TimerHandle | None = None
        self._tick_s = tick_s(
            limits.header_timeout_s, limits.body_timeout_s, limits.keepalive_timeout_s, limits.write_timeout_s
        )

    @property
    def num_connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._connections)

    async def start(self, listeners: Sequence[socket.socket] = ()) -> tuple[str, int]:
        """Accept connections. Returns the address, with the port that was taken if 0 was asked for.

        `listeners` are sockets that listen already, shared with other processes; without any it makes its
        own.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        for each in listeners or await bound_sockets(self._config):
            self._listeners.append(await loop.create_server(self._connection, sock=each, backlog=BACKLOG))
        self._tick = loop.call_later(self._tick_s, self._on_tick)
        bound = self._listeners[0].sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    def close_after_answers(self) -> None:
        """From now on every connection closes after the next answer whose head can say so."""
        self._context.draining = True
        for connection in list(self._connections):
            connection.close_after_answer()

    def close_listeners(self) -> None:
        """Accept nothing new: another process listens on the same socket."""
        for listener in self._listeners:
            listener.close()

    def close_idle(self) -> None:
        """Close connections that wait for no answer."""
        for connection in list(self._connections):
            connection.close_if_idle()

    async def stop(self) -> None:
        """Cut every connection that is left and release the socket."""
        self.close_after_answers()
        self.close_listeners()
        if self._tick is not None:
            self._tick.cancel()
        for connection in list(self._connections):
            connection.cut()
        for listener in self._listeners:
            await listener.wait_closed()

    def _connection(self) -> Connection:
        return Connection(self._context)

    def _on_tick(self) -> None:
        now_ns = self._clock.now_ns()
        for connection in list(self._connections):
            connection.check_deadline(now_ns)
        self._tick = asyncio.get_running_loop().call_later(self._tick_s, self._on_tick)


def tick_s(*timeouts_s: float) -> float:
    """How often to look at deadlines: often enough that the shortest is kept within a quarter."""
    shortest = min((timeout for timeout in timeouts_s if timeout > 0), default=TICK_S_MAX)
    return min(TICK_S_MAX, shortest / 4)


async def bound_sockets(config: ServerConfig) -> list[socket.socket]:
    """Sockets that listen on the configured address: one for each address that the host's name stands for.

    Raises:
        ConfigError: it cannot be listened on.
    """
    host, port, made = config.host, config.port, list[socket.socket]()
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(found):
            number = made[0].getsockname()[1] if made else int(address[1])
            made.append(socket.create_server((str(address[0]), number), family=family, backlog=BACKLOG))
    except OSError as error:
        for each in made:
            each.close()
        message = f"server: cannot listen on {host} port {port}: {error.strerror or error}"
        raise ConfigError(message) from error
    return made

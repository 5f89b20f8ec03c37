"""The listening socket and its connections: accept, watch their deadlines, drain.

Knows connections, not requests; what answers them is the application it is given.
"""

import asyncio
import socket
from collections.abc import Sequence
from functools import partial

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.tree import ServerConfig
from penstock.errors import ConfigError, Draining
from penstock.gateway.http import sockets
from penstock.gateway.http.connection import Application, Connection, ServerContext
from penstock.gateway.http.cors import Cors
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.exchange import Exchange, RequestHead, Response
from penstock.gateway.http.terms import WIRE_LIMITS, RelayTerms, WireLimits

BACKLOG = 2048
TICK_S_MAX = 1.0
LAST_ANSWERS_S, LAST_BYTES_S = 2.0, 0.5
"""When a server stops: for clients that are here to get their answers, and for connections to end."""
HANDSHAKE_S = 0.1
"""For clients that were connecting when the door was shut."""
POLL_S = 0.01


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

        `listeners` are sockets that listen already, and stay open for their owner; without any it makes its
        own.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        loop, given = asyncio.get_running_loop(), [each.dup() for each in listeners]
        for each in given or await bound_sockets(self._config):
            connect = partial(Connection, self._context)
            self._listeners.append(await loop.create_server(connect, sock=each, backlog=BACKLOG))
        self._tick = loop.call_later(self._tick_s, self._on_tick)
        bound = self._listeners[0].sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    def close_after_answers(self) -> None:
        """From now on every connection closes after the next answer whose head can say so."""
        self._context.draining = True
        for connection in list(self._connections):
            connection.close_after_answer()

    def close_listeners(self) -> None:
        """Accept nothing new. New connections wait for another process that has the socket."""
        for listener in self._listeners:
            listener.close()

    def close_idle(self) -> None:
        """Close connections that wait for no answer."""
        for connection in list(self._connections):
            connection.close_if_idle()

    async def finish(self, answers_s: float = LAST_ANSWERS_S) -> None:
        """Accept nothing new, and let clients that are here get their answers, and the last bytes leave."""
        self.close_listeners()
        self.close_idle()
        began_ns = self._clock.now_ns()
        while self._connections:
            waited_s = (self._clock.now_ns() - began_ns) / NS_PER_S
            is_owed = any(connection.is_owed() for connection in self._connections)
            if waited_s >= (answers_s if is_owed else LAST_BYTES_S):
                return
            await sleep(POLL_S)

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

    def _on_tick(self) -> None:
        now_ns = self._clock.now_ns()
        for connection in list(self._connections):
            connection.check_deadline(now_ns)
        self._tick = asyncio.get_running_loop().call_later(self._tick_s, self._on_tick)


class _Refusing:
    """The application of a server that has nothing behind it any more."""

    def __init__(self) -> None:
        self._response = error_response(Draining("The server is shutting down."))

    def refuse(self, head: RequestHead, client: str) -> Response | None:
        del head, client
        return self._response

    def knows(self, head: RequestHead) -> bool:
        del head
        return False

    def handle(self, exchange: Exchange) -> None:
        exchange.respond(self._response)

    def finished(self, exchange: Exchange) -> None:
        """Nothing counts any more."""


async def refuse_the_rest(listeners: Sequence[socket.socket], config: ServerConfig, clock: Clock) -> None:
    """The end of sockets that no process accepts from any more: what waits there, or is about to, is answered
    with 503 `draining`, and then they close.

    Closed at once they would reset those connections, which the kernel has accepted for us.
    """
    for each in listeners:
        sockets.shut(each)
    server = HttpServer(_Refusing(), config, clock=clock)
    server.close_after_answers()
    await server.start(listeners)
    await sleep(HANDSHAKE_S)
    until_ns = clock.now_ns() + int(LAST_ANSWERS_S * NS_PER_S)
    while any(sockets.has_waiting(each) for each in listeners) and clock.now_ns() < until_ns:
        await sleep(POLL_S)
    await server.finish()
    await server.stop()
    for each in listeners:
        each.close()


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

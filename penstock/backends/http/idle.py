"""Connections to one address that wait for work: a bounded number, and none that is about to be closed."""

from typing import Generic, Protocol, TypeVar

from penstock.clock import NS_PER_S, Clock


class Reusable(Protocol):
    """A connection between two exchanges."""

    idle_since_ns: int

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        ...

    def close(self) -> None:
        """Drop it at once."""
        ...


C = TypeVar("C", bound=Reusable)


class IdleConnections(Generic[C]):
    """Those of one address."""

    def __init__(self, limit: int, keepalive_s: float, clock: Clock) -> None:
        self._limit, self._keepalive_ns, self._clock = limit, int(keepalive_s * NS_PER_S), clock
        self._all: list[C] = []

    def __len__(self) -> int:
        return len(self._all)

    def put(self, connection: C) -> None:
        """It may be used again, or is closed if too many wait."""
        if len(self._all) >= self._limit or connection.closed:
            connection.close()
            return
        connection.idle_since_ns = self._clock.now_ns()
        self._all.append(connection)

    def take(self, now_ns: int) -> C | None:
        """The one that was used last, unless it has been idle for so long that the peer is about to close
        it.
        """
        if not self._all:
            return None
        oldest_ns = now_ns - self._keepalive_ns
        while self._all:
            connection = self._all.pop()
            if not connection.closed and connection.idle_since_ns >= oldest_ns:
                return connection
            connection.close()
        return None

    def forget(self, connection: C) -> None:
        """One that may have been here has ended."""
        if connection in self._all:
            self._all.remove(connection)

    def close(self) -> None:
        """Close all of them."""
        while self._all:
            self._all.pop().close()

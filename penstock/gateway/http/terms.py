"""Terms of every connection of the HTTP server: its bounds, which only tests change, and when text that is
ready goes to its client: at once, with more of its kind a moment later, or when it reads again.

`server.flush_ms` 0 writes every delta at once. Otherwise all of one stream's text of that time leaves as one
event: one timer for all streams, none per stream. A client that does not keep up (its transport buffers more
than a mark) is treated by `server.slow_client`:

    pause   its text is held back as text, and leaves as one event when it has caught up. The text of a token
            is a fiftieth of its event, so a bound of 1 MiB holds nearly any answer. Over the bound a worker
            that is reached over HTTP is not read until the client has caught up, so it waits
            (`Generation.pause_reading`); an engine of ours, which sends all streams over one connection,
            has the answer aborted.
    abort   it is written all the same, and aborted once the buffer is full.

Our own engine is not slowed in either case: a stream that waits holds its KV blocks, which are dearer than a
megabyte here.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from penstock.config.tree import ServerConfig


@dataclass(slots=True, frozen=True, kw_only=True)
class WireLimits:
    """The same for all connections of a server. Settings that an operator may change are in the section
    `server`.
    """

    connections_max: int = 20_000
    """Open connections of one process; one more is closed."""
    header_bytes_max: int = 32 * 1024
    headers_max: int = 100
    """Header fields of one request; clients send about ten."""
    header_timeout_s: float = 15.0
    """From the first byte of a request to the end of its headers."""
    body_timeout_s: float = 60.0
    keepalive_timeout_s: float = 75.0
    """An idle connection is closed after this long: later than the 60 s of common load balancers, so that
    they close first."""
    buffer_bytes_max: int = 1024 * 1024
    """Unsent bytes held for a slow client. Over it a worker that is reached over HTTP has to wait ("pause"),
    and a request at one of ours is aborted."""
    write_timeout_s: float = 30.0
    """A client that takes none of the bytes that wait for it for this long is cut off; 0 never."""
    heartbeat_s: float = 15.0
    """A stream that has sent nothing for this long sends an SSE comment; 0 never."""
    spare_files: int = 512
    """File descriptors that are needed beside one per connection."""

    @property
    def open_files(self) -> int:
        """As many must be allowed."""
        return self.connections_max + self.spare_files


WIRE_LIMITS = WireLimits()


MS_PER_S = 1000


class Holder(Protocol):
    """The part that holds text back."""

    def release(self) -> None:
        """Write it, unless the client must be waited for."""
        ...


class Flusher:
    """Releases text that was held back for `period_s`."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._waiting: list[Holder] = []

    def soon(self, holder: Holder) -> None:
        """Call `holder.release` within the period.

        Called once per holder and flush; bounded by the streams.
        """
        if not self._waiting:
            asyncio.get_running_loop().call_later(self._period_s, self._flush)
        self._waiting.append(holder)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for holder in waiting:
            holder.release()


@dataclass(slots=True, frozen=True, kw_only=True)
class RelayTerms:
    """How text travels to one client; the same for all."""

    buffer_bytes_max: int
    pauses: bool
    """Hold text back for a slow client."""
    flusher: Flusher | None
    """None: text is not held back for its own kind."""
    write_timeout_s: float

    @classmethod
    def of(cls, config: ServerConfig, limits: WireLimits) -> "RelayTerms":
        """As configured, within the limits."""
        return cls(
            buffer_bytes_max=limits.buffer_bytes_max,
            pauses=config.slow_client == "pause",
            flusher=Flusher(config.flush_ms / MS_PER_S) if config.flush_ms else None,
            write_timeout_s=limits.write_timeout_s,
        )

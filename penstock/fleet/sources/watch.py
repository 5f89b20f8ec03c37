"""An HTTP answer that does not end: lines of JSON, each told as soon as it is whole."""

import asyncio
from collections.abc import Callable, Mapping

from penstock.backends.http.client import HttpExchange
from penstock.backends.http.handler import HttpFailure

LINE_BYTES_MAX = 8 * 1024 * 1024


class WatchBroken(Exception):
    """It ended before its time, or was no such answer."""


class Watch:
    """Takes one such answer (an `HttpHandler`)."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        """What `on_line` raises ends it."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has ended: with what went wrong, if anything did."""
        self.status = 200
        self.body = b""
        """What came after the last whole line; all of it unless the status is 200."""
        self.num_lines = 0
        self.exchange: HttpExchange | None = None
        self._on_line = on_line

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `HttpHandler`."""
        self.status = status

    def on_body(self, data: bytes) -> None:
        """See `HttpHandler`."""
        if self.over.done():
            return
        if self.exchange is not None:
            self.exchange.touch()
        self.body += data
        if self.status == 200:
            *lines, self.body = self.body.split(b"\n")
            try:
                for line in lines:
                    self._take(line)
            except Exception as error:  # noqa: BLE001 - whoever awaits the end is told.
                self._fail(error)
        if len(self.body) > LINE_BYTES_MAX:
            self._fail(WatchBroken(f"a line of more than {LINE_BYTES_MAX} bytes"))

    def on_end(self) -> None:
        """See `HttpHandler`."""
        if not self.over.done():
            self.over.set_result(None)

    def on_failure(self, failure: HttpFailure) -> None:
        """See `HttpHandler`."""
        self._fail(WatchBroken(failure.message))

    def _take(self, line: bytes) -> None:
        if line.strip():
            self._on_line(line)
            self.num_lines += 1

    def _fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)

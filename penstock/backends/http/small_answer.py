"""One small answer of a server: of probes, and of other servers that are asked little."""

import asyncio
from collections.abc import Mapping

from penstock.backends.http.client import HttpClient, HttpExchange
from penstock.backends.http.terms import HttpFailure, NoConnection


class ProbeFailed(Exception):
    """The worker does not answer a probe as it should."""


class _Whole:
    """Collects one small answer."""

    def __init__(self, bytes_max: int) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.exchange: HttpExchange | None = None
        self._status, self._body, self._bytes_max = 0, bytearray(), bytes_max

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        self._body += data
        if self.exchange is not None:
            self.exchange.touch()
        if len(self._body) > self._bytes_max and not self.done.done():
            self.done.set_exception(ProbeFailed(f"an answer of more than {self._bytes_max} bytes"))

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, bytes(self._body)))

    def on_failure(self, failure: HttpFailure) -> None:
        if not self.done.done():
            self.done.set_exception(ProbeFailed(failure.message))


MERGE_PATCH = "application/merge-patch+json"


async def fetch(
    client: HttpClient, path: str, bytes_max: int, *, body: bytes = b"", patches: bool = False
) -> tuple[int, bytes]:
    """GET a small answer, or POST a body for one (with `patches` PATCH, with a merge patch of RFC 7396): its
    status and body.

    Raises:
        ProbeFailed: there is none, or it is over `bytes_max`.
    """
    handler = _Whole(bytes_max)
    try:
        method, headers = "POST" if body else "GET", list[tuple[str, str]]()
        if patches:
            method, headers = "PATCH", [("content-type", MERGE_PATCH)]
        handler.exchange = client.start(method, path, handler, body=body, headers=headers)
    except NoConnection as error:
        raise ProbeFailed(str(error)) from None
    try:
        return await handler.done
    finally:
        handler.exchange.abort()

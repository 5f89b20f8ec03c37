"""Whole answers that one turn of the event loop completes are sent together, behind one write of their
records.

One after the other they find code and objects in the processor's caches, and the journal is written once.
"""

import asyncio
from collections.abc import Callable, Sequence

from penstock.backends.base import nothing
from penstock.gateway.relay.reply import Reply


class WholeAnswers:
    """Complete answers that are still to be sent to their clients."""

    def __init__(self, flush: Callable[[], None], on_bug: Callable[[Reply, Exception], None]) -> None:
        """`flush` writes the records that were closed."""
        self._flush, self._on_bug = flush, on_bug
        self.is_sending = False
        """Whether answers are being written, one after the other; then `on_sent` is called."""
        self.on_sent: Callable[[], None] = nothing
        self._replies: list[Reply] = []
        self._behind: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, reply: Reply) -> None:
        """Send it in the next turn of the event loop, before all calls that are given to `soon` later."""
        if not self._replies:
            asyncio.get_running_loop().call_soon(self._send)
        self._replies.append(reply)

    def soon(self, call: Callable[[], None]) -> None:
        """Call it in the next turn of the event loop, or behind the answers that wait: what the loop sends of
        them leaves when all calls of its turn have returned.
        """
        if self._replies:
            self._behind.append(call)
        else:
            asyncio.get_running_loop().call_soon(call)

    def _send(self) -> None:
        replies, self._replies = self._replies, []
        behind, self._behind = self._behind, []
        for call in behind:
            asyncio.get_running_loop().call_soon(call)
        recorded = replies if self.record(replies) else []
        self.is_sending = True
        for reply in recorded:
            try:
                reply.complete()
            except Exception as error:  # noqa: BLE001 - one request's bug must not end the others.
                self._cut(reply, error)
        self.is_sending = False
        self.on_sent()

    def record(self, replies: Sequence[Reply]) -> bool:
        """Write the records of these answers. False: a bug prevents it, and the clients' connections are cut,
        since no answer may leave before its record.
        """
        try:
            self._flush()
        except Exception as error:  # noqa: BLE001 - the clients must not wait for ever.
            for reply in replies:
                self._cut(reply, error)
            return False
        return True

    def _cut(self, reply: Reply, error: Exception) -> None:
        self._on_bug(reply, error)
        reply.exchange.cut()

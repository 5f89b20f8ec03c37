"""One listener's place in the order of a worker's KV events."""

from collections.abc import Callable

import msgspec

from penstock.kv.events import KVEventBatch, decode_batch
from penstock.protocol.worker import KVEvents, ProtocolError, SubscribeKVEvents

KVEventListener = Callable[[KVEventBatch], None]
"""Applies one batch to an index of one worker. What it knows is replaced by a batch that opens with
`AllBlocksCleared`: so it needs neither numbers nor word of a lost connection."""


_NO_EPOCH = -1
"""Of no worker: asks for a snapshot."""


class KVSubscription:
    """One listener's place in the order of one worker's events, over any number of connections and
    restarts.
    """

    __slots__ = ("_epoch", "_listener", "_next")

    def __init__(self, listener: KVEventListener) -> None:
        self._listener = listener
        self._epoch, self._next = 0, 0

    def request(self) -> SubscribeKVEvents:
        """What to send on a new connection."""
        return SubscribeKVEvents(self._epoch, self._next)

    def push(self, news: KVEvents) -> None:
        """Pass the next message on.

        Raises:
            ProtocolError: there is a gap, or it holds no batch.
        """
        if not news.snapshot and (news.epoch, news.sequence) != (self._epoch or news.epoch, self._next):
            raise ProtocolError(f"KV events {self._next} were expected, got {news.sequence}")
        try:
            batch = decode_batch(news.payload)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"no batch of KV events: {error}") from error
        # Half a snapshot is no state to continue from.
        self._epoch = _NO_EPOCH if news.more else news.epoch
        self._next = news.sequence + 1
        self._listener(batch)

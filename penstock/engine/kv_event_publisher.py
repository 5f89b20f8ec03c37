"""KV events on their way out: collected from the pool after a step, numbered, and given to listeners.

    BlockPool --> KVEventLog --flush--> KVEventHistory --+--> ZmqPublisher (ZeroMQ), if configured
                                                         +--> KVEvents for the gateways that subscribed

All of it runs on the step thread. Nothing is collected before a listener subscribes: what was cached by then
is the first batch, so every subscriber can know all that can be hit.
"""

from penstock.clock import Clock
from penstock.config.tree import KVEventsConfig
from penstock.engine.zmq_publisher import BUFFER_STEPS, ZmqPublisher
from penstock.kv.cache.manager import KVManager
from penstock.kv.events import (
    DEVICE,
    HOST,
    AllBlocksCleared,
    KVEvent,
    KVEventHistory,
    KVEventLog,
    Numbered,
    encode_batch,
    stored_event,
)
from penstock.protocol.worker import KVEvents
from penstock.rng import fresh_seed

SNAPSHOT_HASHES_MAX = 65_536
"""Hashes in one message of a snapshot: 2 MiB."""


class KVEventPublisher:
    """The events of one manager's blocks. Call `flush` after everything that may have changed it."""

    def __init__(
        self,
        kv: KVManager,
        config: KVEventsConfig,
        clock: Clock,
        publisher: ZmqPublisher | None = None,
        *,
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        self.epoch = fresh_seed() | 1
        """Names this numbering; never 0."""
        self._kv, self._clock = kv, clock
        self._history = KVEventHistory(buffer_steps)
        self._log = KVEventLog(config.token_ids)
        self._listening = False
        self._publisher = publisher
        if publisher is not None:
            self._listen()

    def flush(self) -> KVEvents | None:
        """What happened since the last time, numbered and published; None if nothing did."""
        if not self._listening or not (events := self._log.take()):
            return None
        return self._message(self._number(events))

    def subscribe(self, epoch: int, from_sequence: int) -> list[KVEvents]:
        """What a gateway must hear first: the batches that it missed, or else all that can be hit now.

        Call it right after `flush`.
        """
        self._listen()
        if epoch in (0, self.epoch):
            missed = self._history.since(from_sequence if epoch else 0)
            if missed is not None:
                return [self._message(batch) for batch in missed]
        return self._snapshot()

    def close(self) -> None:
        """Let the last batches leave, and close the sockets."""
        if self._publisher is not None:
            self._publisher.close()

    def _listen(self) -> None:
        if not self._listening:
            self._listening = True
            self._kv.pool.events = self._log
            if self._kv.pool.names() or self._kv.host.names():
                for events in self._all_blocks():
                    self._number(events)

    def _number(self, events: tuple[KVEvent, ...]) -> Numbered:
        batch = self._history.append(encode_batch(events, wall_ns=self._clock.wall_ns()))
        if self._publisher is not None:
            self._publisher.publish(batch)
        return batch

    def _all_blocks(self) -> list[tuple[KVEvent, ...]]:
        """Everything that can be hit, as events: parents and tokens are not known any more."""
        tiers = ((DEVICE, self._kv.pool.names()), (HOST, self._kv.host.names()))
        parts: list[tuple[KVEvent, ...]] = [
            (stored_event(names[i : i + SNAPSHOT_HASHES_MAX], medium=medium),)
            for medium, names in tiers
            for i in range(0, len(names), SNAPSHOT_HASHES_MAX)
        ]
        return [(AllBlocksCleared(), *parts[0]), *parts[1:]] if parts else [(AllBlocksCleared(),)]

    def _snapshot(self) -> list[KVEvents]:
        now_ns, sequence = self._clock.wall_ns(), self._history.next_sequence - 1
        parts = self._all_blocks()
        return [
            KVEvents(
                epoch=self.epoch,
                sequence=sequence,
                payload=encode_batch(events, wall_ns=now_ns),
                snapshot=True,
                more=part < len(parts),
            )
            for part, events in enumerate(parts, 1)
        ]

    def _message(self, batch: Numbered) -> KVEvents:
        return KVEvents(epoch=self.epoch, sequence=batch.sequence, payload=batch.payload)

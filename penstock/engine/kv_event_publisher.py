"""KV events on their way out: collected from the pool after a step, numbered, and given to listeners.

    BlockPool --> KVEventLog --flush--> KVEventHistory --+--> ZmqPublisher (ZeroMQ), if configured
                                                         +--> KVEvents for the gateways that subscribed

All of it runs on the step thread. Nothing is collected before a listener subscribes: what was cached by then
is the first batch, so every subscriber can know all that can be hit.

KV events over ZeroMQ, for routers that are not ours: vLLM's protocol to the frame.

    step thread --publish--> inproc queue --> worker-kv-events: PUB    [topic, sequence, payload]
                                                            ^   ROUTER <- [id, "", sequence]
                                       the last BUFFER_STEPS   |          -> [id, "", topic, sequence,
                                                                          payload]* in order,
                                                               |             [id, "", "", -1, ""] at the end
A sequence is 8 bytes, big-endian. PUB is lossy by design: a subscriber sees a gap in the numbers and asks the
ROUTER for what it missed. The thread sleeps in the poll; the step thread never waits for it.
"""

import logging
import threading
from collections import deque
from typing import Any

from penstock.clock import Clock
from penstock.config.tree import KVEventsConfig
from penstock.errors import ConfigError
from penstock.kv.cache.manager import KVManager
from penstock.kv.events import (
    DEVICE,
    HOST,
    NO_KV_EVENTS,
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

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
BUFFER_STEPS = 10_000
"""Batches (one per step that changed something) kept for subscribers that missed some."""
QUEUED_MAX = 100_000
"""Batches queued for one slow subscriber, and for the publishing thread; over it they are dropped."""
LINGER_MS = 1000
"""How long the last batches may take to leave when the worker exits."""
_QUEUE = "inproc://kv-events"
_STOP = b""

_log = logging.getLogger(__name__)


class ZmqPublisher:
    """Publishes numbered batches from a thread of its own. `publish` and `close` are for one other thread.

    Raises:
        ConfigError: pyzmq is not installed, or an address cannot be used; it names the key.
    """

    def __init__(self, config: KVEventsConfig, *, buffer_steps: int = BUFFER_STEPS) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigError("engine.kv_events.endpoint: needs pyzmq; install penstock[events]") from error
        self.num_dropped = 0
        """Batches that the thread could not take in time: subscribers see a gap."""
        self._zmq: Any = zmq
        self._context: Any = zmq.Context()
        self._topic = config.topic.encode()
        self._kept: deque[Numbered] = deque(maxlen=buffer_steps)
        self._replay: Any = None
        try:
            self._open(config)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="worker-kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: Numbered) -> None:
        """Send one batch; never blocks. When `QUEUED_MAX` of them wait for the thread, it is dropped."""
        try:
            frames = (batch.sequence.to_bytes(SEQUENCE_BYTES, "big"), batch.payload)
            self._queue_in.send_multipart(frames, self._zmq.DONTWAIT)
        except self._zmq.Again:
            if not self.num_dropped:
                _log.warning("KV events come faster than they can be published; from now on some are dropped")
            self.num_dropped += 1

    def close(self) -> None:
        """Send what is queued, then close the sockets and end the thread."""
        self._queue_in.send_multipart((_STOP,))
        self._thread.join()
        self._queue_in.close()
        self._context.term()

    def _open(self, config: KVEventsConfig) -> None:
        zmq = self._zmq
        self._queue_in = self._socket(zmq.PUSH, QUEUED_MAX)
        self._queue_out = self._socket(zmq.PULL, QUEUED_MAX)
        self._queue_out.bind(_QUEUE)
        self._queue_in.connect(_QUEUE)
        self._publish = self._socket(zmq.PUB, QUEUED_MAX)
        attach = self._publish.connect if config.connect else self._publish.bind
        self._attach(attach, config.endpoint, "endpoint")
        if config.replay_endpoint:
            # Enough for one whole replay: a peer that asks again and again without reading gets gaps.
            self._replay = self._socket(zmq.ROUTER, (self._kept.maxlen or 0) + 1)
            self._attach(self._replay.bind, config.replay_endpoint, "replay_endpoint")

    def _socket(self, kind: int, hwm: int) -> Any:  # noqa: ANN401
        made = self._context.socket(kind)
        made.set_hwm(hwm)
        made.linger = LINGER_MS
        return made

    def _attach(self, attach: Any, address: str, key: str) -> None:  # noqa: ANN401
        try:
            attach(address)
        except self._zmq.ZMQError as error:
            raise ConfigError(f"engine.kv_events.{key}: {address}: {error.strerror}") from error

    # --- on the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._queue_out, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        running = True
        while running:
            ready = dict(poller.poll())
            if self._queue_out in ready:
                running = self._send_one(self._queue_out.recv_multipart())
            if self._replay is not None and self._replay in ready:
                self._send_again(self._replay.recv_multipart())
        for each in (self._publish, self._queue_out, self._replay):
            if each is not None:
                each.close()

    def _send_one(self, frames: list[bytes]) -> bool:
        """Publish one queued batch; False if it was the end."""
        if frames == [_STOP]:
            return False
        sequence, payload = frames
        self._kept.append(Numbered(int.from_bytes(sequence, "big"), payload))
        self._publish.send_multipart((self._topic, sequence, payload))
        return True

    def _send_again(self, request: list[bytes]) -> None:
        """Answer one request for everything from a sequence number on, as far as it is kept."""
        if len(request) != 3 or len(request[2]) != SEQUENCE_BYTES:
            _log.warning("a request for KV events was no request for a replay: ignored")
            return
        peer, _, wanted = request
        first = int.from_bytes(wanted, "big")
        for sequence, payload in self._kept:
            if sequence >= first:
                frames = (peer, b"", self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload)
                self._replay.send_multipart(frames)
        self._replay.send_multipart((peer, b"", b"", END_OF_REPLAY, b""))


def open_publisher(config: KVEventsConfig) -> ZmqPublisher | None:
    """The publisher that is configured, if one is.

    Raises:
        ConfigError: see `ZmqPublisher`.
    """
    return ZmqPublisher(config) if config.endpoint else None


SNAPSHOT_HASHES_MAX = 65_536
"""Hashes in one message of a snapshot: 2 MiB."""


class KVEventPublisher:
    """The events of one engine's blocks. Call `flush` after everything that may have changed them.

    An engine that falls asleep loses all of them (`forget`); awake it has a new manager (`follow`), and the
    numbers continue.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        clock: Clock,
        publisher: ZmqPublisher | None = None,
        *,
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        self.epoch = fresh_seed() | 1
        """Names this numbering; never 0."""
        self._kv: KVManager | None = None
        self._clock = clock
        self._history = KVEventHistory(buffer_steps)
        self._log = KVEventLog(config.token_ids)
        self._listening = False
        self._publisher = publisher
        self._listening = publisher is not None

    def follow(self, kv: KVManager) -> None:
        """The blocks are those of `kv` from now on."""
        assert self._kv is None, "one manager at a time"
        self._kv = kv
        if self._listening:
            self._collect(kv)

    def forget(self) -> KVEvents | None:
        """Publish that there are no blocks any more; None without subscribers."""
        if self._kv is not None:
            self._kv.pool.events = NO_KV_EVENTS
        self._kv = None
        self._log.take()
        return self._message(self._number((AllBlocksCleared(),))) if self._listening else None

    def flush(self) -> KVEvents | None:
        """The events since the last call, numbered and published; None if nothing did."""
        if not self._listening or not (events := self._log.take()):
            return None
        return self._message(self._number(events))

    def subscribe(self, epoch: int, from_sequence: int) -> list[KVEvents]:
        """The events that a gateway must get first: the batches that it missed, or else all that can be hit
        now.

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
            if self._kv is not None:
                self._collect(self._kv)

    def _collect(self, kv: KVManager) -> None:
        kv.pool.events = self._log
        if kv.pool.names() or kv.host.names():
            for events in self._all_blocks():
                self._number(events)

    def _number(self, events: tuple[KVEvent, ...]) -> Numbered:
        batch = self._history.append(encode_batch(events, wall_ns=self._clock.wall_ns()))
        if self._publisher is not None:
            self._publisher.publish(batch)
        return batch

    def _all_blocks(self) -> list[tuple[KVEvent, ...]]:
        """Everything that can be hit, as events: parents and tokens are not known any more."""
        if self._kv is None:
            return [(AllBlocksCleared(),)]
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

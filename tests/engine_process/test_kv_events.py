"""KV events from the pool to real sockets: our own protocol, and vLLM's over ZeroMQ."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from free_port import free_port
from raw_worker import Client, raw_worker, submit

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.tree import KVEventsConfig
from penstock.engine.kv_event_publisher import BUFFER_STEPS, KVEventPublisher, ZmqPublisher, open_publisher
from penstock.errors import ConfigError
from penstock.kv.cache.block_pool import BlockPool
from penstock.kv.cache.manager import KVManager
from penstock.kv.events import (
    HOST,
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    Numbered,
    decode_batch,
    stored_event,
)
from penstock.kv.hashing import BlockHash, token_array
from penstock.protocol.worker import KVEvents, Ready, StepOutput, SubscribeKVEvents

TIMEOUT_MS = 20_000
PROMPT = tuple(range(20, 84))
TOPIC = b"kv@here"


# --- numbering and snapshots, without sockets --------------------------------------------------------


def feed(**settings: int) -> tuple[BlockPool, KVEventPublisher]:
    kv = KVManager.without_prefix_cache(8)
    made = KVEventPublisher(KVEventsConfig(), ManualClock(wall_ns=5 * NS_PER_S), **settings)
    made.follow(kv)
    return kv.pool, made


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def store(pool: BlockPool, number: int) -> None:
    """What a prefix cache does for one block: `number`, the first of its prompt."""
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], name(number))
    pool.events.stored([name(number)], 0, 1, token_array(range(16)), owner=b"")


def hashes(update: list[KVEvents]) -> list[set[bytes]]:
    """What each message stores."""
    found = []
    for each in update:
        stored = [event for event in decode_batch(each.payload).events if isinstance(event, BlockStored)]
        found.append({one for event in stored for one in event.block_hashes})
    return found


def test_nothing_is_collected_before_somebody_asks() -> None:
    pool, kv = feed()
    store(pool, 1)
    assert kv.flush() is None
    (first,) = kv.subscribe(0, 0)
    assert (first.sequence, first.snapshot) == (0, False)
    assert decode_batch(first.payload).events[0] == AllBlocksCleared()
    assert hashes([first]) == [{name(1)}]
    store(pool, 2)
    second = kv.flush()
    assert second is not None
    assert (second.sequence, decode_batch(second.payload).ts) == (1, 5.0)
    assert hashes([second]) == [{name(2)}]
    assert kv.flush() is None


def test_a_gateway_that_comes_back_hears_what_it_missed() -> None:
    pool, kv = feed()
    assert kv.subscribe(0, 0) == []
    update = [kv.flush() for number in (1, 2, 3) if store(pool, number) is None]
    assert kv.subscribe(kv.epoch, 1) == update[1:]
    assert kv.subscribe(0, 0) == update, "a new one hears all"
    assert kv.subscribe(kv.epoch, 3) == []


@pytest.mark.parametrize("case", ["forgotten", "another life", "the future", "nonsense"])
def test_what_is_not_known_any_more_becomes_a_snapshot(case: str) -> None:
    pool, kv = feed(buffer_steps=2)
    kv.subscribe(0, 0)
    for number in (1, 2, 3):
        store(pool, number)
        kv.flush()
    epoch = kv.epoch + 2 if case == "another life" else kv.epoch
    wanted = {"forgotten": 0, "another life": 2, "the future": 4, "nonsense": -5}[case]
    (update,) = kv.subscribe(epoch, wanted)
    assert (update.sequence, update.snapshot, update.more) == (2, True, False)
    assert decode_batch(update.payload).events[0] == AllBlocksCleared()
    assert hashes([update]) == [{name(1), name(2), name(3)}]


def test_a_large_snapshot_goes_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.kv_event_publisher.SNAPSHOT_HASHES_MAX", 2)
    pool, kv = feed()
    for number in range(5):
        store(pool, number)
    update = kv.subscribe(9, 9)
    assert [(each.sequence, each.snapshot, each.more) for each in update] == [
        (2, True, True),
        (2, True, True),
        (2, True, False),
    ]
    assert hashes(update) == [{name(0), name(1)}, {name(2), name(3)}, {name(4)}]


def test_a_snapshot_tells_of_the_host_tier_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVManager.without_prefix_cache(8)
    monkeypatch.setattr(type(kv.host), "names", lambda _tier: (name(7),))
    store(kv.pool, 1)
    made = KVEventPublisher(KVEventsConfig(), ManualClock())
    made.follow(kv)
    update = made.subscribe(9, 9)
    events = [event for each in update for event in decode_batch(each.payload).events]
    assert events == [AllBlocksCleared(), stored_event((name(1),)), stored_event((name(7),), medium=HOST)]


# --- ZeroMQ ------------------------------------------------------------------------------------------


class Subscriber:
    """What vLLM's consumers do: a SUB for the stream, a DEALER for replays."""

    def __init__(self, context: zmq.Context) -> None:
        self._context = context
        self._open: list[zmq.Socket] = []
        self.sub = self.socket(zmq.SUB)

    def socket(self, kind: int) -> zmq.Socket:
        made = self._context.socket(kind)
        made.rcvtimeo, made.linger = TIMEOUT_MS, 0
        self._open.append(made)
        return made

    def close(self) -> None:
        for each in self._open:
            each.close()

    def connect(self, endpoint: str, topic: bytes = b"") -> None:
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)

    def receive(self) -> tuple[int, KVEventBatch]:
        topic, sequence, payload = self.sub.recv_multipart()
        assert topic == TOPIC
        return int.from_bytes(sequence, "big"), decode_batch(payload)

    def replay(self, endpoint: str, first: int) -> list[tuple[int, bytes]]:
        dealer = self.socket(zmq.DEALER)
        dealer.connect(endpoint)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            empty, topic, sequence, payload = dealer.recv_multipart()
            assert empty == b""
            if sequence == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == TOPIC
            found.append((int.from_bytes(sequence, "big"), payload))


@contextmanager
def subscriber() -> Iterator[Subscriber]:
    with zmq.Context() as context:
        made = Subscriber(context)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def endpoints() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        yield f"ipc://{directory}/pub", f"ipc://{directory}/replay"


@contextmanager
def publishing(*, buffer_steps: int = BUFFER_STEPS, **settings: object) -> Iterator[ZmqPublisher]:
    publisher = ZmqPublisher(KVEventsConfig(topic=TOPIC.decode(), **settings), buffer_steps=buffer_steps)
    try:
        yield publisher
    finally:
        publisher.close()


def until_received(publisher: ZmqPublisher, received: Subscriber) -> tuple[int, int]:
    """Publish until the subscription has arrived; returns the first number heard and the next to publish."""
    received.sub.rcvtimeo = 50
    for number in range(1, 400):
        publisher.publish(Numbered(number, b"%d" % number))
        try:
            _, sequence, _ = received.sub.recv_multipart()
        except zmq.Again:
            continue
        received.sub.rcvtimeo = TIMEOUT_MS
        return int.from_bytes(sequence, "big"), number + 1
    pytest.fail("never heard")


def test_a_late_subscriber_sees_the_gap_and_gets_it_replayed() -> None:
    with (
        endpoints() as (endpoint, replay),
        subscriber() as received,
        publishing(endpoint=endpoint, replay_endpoint=replay) as publisher,
    ):
        publisher.publish(Numbered(0, b"before"))
        while not received.replay(replay, 0):
            pass  # The publisher's thread has yet to take it.
        received.connect(endpoint, TOPIC)
        first, after = until_received(publisher, received)
        assert first > 0, "a gap"
        missed = received.replay(replay, 0)
        assert [sequence for sequence, _ in missed] == list(range(after))
        assert missed[0] == (0, b"before")
        assert received.replay(replay, after) == []


def test_only_the_last_batches_are_kept_and_nonsense_is_ignored() -> None:
    with (
        endpoints() as (endpoint, replay),
        subscriber() as received,
        publishing(endpoint=endpoint, replay_endpoint=replay, buffer_steps=3) as publisher,
    ):
        received.connect(endpoint)
        _, after = until_received(publisher, received)
        for number in range(after, after + 3):
            publisher.publish(Numbered(number, b"x"))
            received.sub.recv_multipart()
        dealer = received.socket(zmq.DEALER)
        dealer.connect(replay)
        for nonsense in ([b"?"], [b"", b"12"], [b"", b"", b"", b""]):
            dealer.send_multipart(nonsense)
        assert [sequence for sequence, _ in received.replay(replay, 0)] == list(range(after, after + 3))


def test_it_can_connect_to_a_subscriber_that_listens() -> None:
    with endpoints() as (endpoint, _), subscriber() as received:
        received.sub.subscribe(TOPIC)
        received.sub.bind(endpoint)
        with publishing(endpoint=endpoint, connect=True) as publisher:
            until_received(publisher, received)


def test_a_bad_address_names_its_key() -> None:
    with endpoints() as (endpoint, _), subscriber() as other:
        port = free_port()
        other.sub.bind(f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=rf"engine\.kv_events\.endpoint: tcp://127.0.0.1:{port}: Addr"):
            ZmqPublisher(KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match=r"engine\.kv_events\.replay_endpoint: .*nowhere"):
            ZmqPublisher(KVEventsConfig(endpoint=endpoint, replay_endpoint="ipc:///nowhere/at/all"))
    assert open_publisher(KVEventsConfig()) is None


def test_without_pyzmq_the_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"needs pyzmq; install penstock\[events\]"):
        ZmqPublisher(KVEventsConfig(endpoint="ipc:///tmp/x"))


# --- a real worker process ---------------------------------------------------------------------------


def run(client: Client, request_id: str, *, hashes_wanted: int = 0) -> set[bytes]:
    """Run a request to its end, and on until so many hashes were told of; returns them."""
    client.send(submit(request_id, PROMPT, max_tokens=3))
    found, ended = set[bytes](), False
    while not ended or len(found) < hashes_wanted:
        message = client.receive()
        if isinstance(message, KVEvents):
            found.update(*hashes([message]))
        elif isinstance(message, StepOutput):
            ended |= any(output.finish is not None for output in message.outputs)
    return found


def test_a_worker_tells_only_who_asked() -> None:
    with raw_worker() as worker:
        deaf, client = worker.connect(), worker.connect()
        for each in (deaf, client):
            each.until_kind(Ready)
        client.send(SubscribeKVEvents())
        found = run(client, "a", hashes_wanted=4)
        assert len(found) == 4
        late = worker.connect()
        late.send(SubscribeKVEvents())
        update = late.until_kind(KVEvents)
        assert isinstance(update, KVEvents)
        assert hashes([update]) == [found]
        assert run(deaf, "b") == run(deaf, "c") == set(), "it did not ask"
        client.send(SubscribeKVEvents())
        client.wait_closed()


def test_a_worker_publishes_in_vllms_protocol() -> None:
    with endpoints() as (endpoint, replay), subscriber() as received:
        settings = KVEventsConfig(endpoint=endpoint, replay_endpoint=replay, topic=TOPIC.decode())
        with raw_worker(kv_events=settings) as worker:
            client = worker.connect()
            client.until_kind(Ready)
            client.send(submit("a", PROMPT, max_tokens=3))
            client.last("a")
            received.connect(endpoint)
            while not (replayed := received.replay(replay, 0)):
                time.sleep(0.01)  # It publishes behind its answers.
            batch = decode_batch(replayed[0][1])
            (event,) = batch.events
            assert isinstance(event, BlockStored)
            assert (replayed[0][0], batch.data_parallel_rank) == (0, 0)
            assert (event.medium, event.block_size, event.parent_block_hash) == ("GPU", 16, None)
            assert (len(event.block_hashes), event.token_ids) == (4, ())


@pytest.mark.parametrize("endpoint", ["ipc:///nowhere/at/all", "tcp://no.such.address:5557"])
def test_a_worker_that_cannot_publish_says_why_and_is_not_restarted(endpoint: str) -> None:
    with raw_worker(kv_events=KVEventsConfig(endpoint=endpoint)) as worker:
        assert worker.exit_code() == 78
        assert f"ConfigError: engine.kv_events.endpoint: {endpoint}" in worker.errors()

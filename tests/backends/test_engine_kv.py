import asyncio

import msgspec
import pytest
from conformance import TIMEOUT_S, Recorder
from scripted_runner import DIE
from scripted_worker import Bench, bench

from penstock.backends.base import GenerateRequest
from penstock.backends.engine.link import KVSubscription
from penstock.fleet.launchers.supervised import SupervisedWorker
from penstock.kv.events import AllBlocksCleared, BlockStored, KVEventBatch, encode_batch, stored_event
from penstock.protocol.worker import KVEvents, ProtocolError, SubscribeKVEvents
from penstock.types import RequestId, SamplingParams

PAYLOAD = encode_batch((stored_event((b"h",)),), wall_ns=0)
NUMBERED = PAYLOAD.replace(msgspec.msgpack.encode([b"h"]), msgspec.msgpack.encode([7]))
"""As vLLM may name blocks, and our engine never does."""
EPOCH = 77


def update(sequence: int, *, epoch: int = EPOCH, **snapshot: bool) -> KVEvents:
    return KVEvents(epoch=epoch, sequence=sequence, payload=PAYLOAD, **snapshot)


def test_it_goes_on_where_it_was() -> None:
    received: list[KVEventBatch] = []
    subscription = KVSubscription(received.append)
    assert subscription.request() == SubscribeKVEvents(0, 0)
    subscription.push(update(0))
    subscription.push(update(1))
    assert subscription.request() == SubscribeKVEvents(EPOCH, 2)
    subscription.push(update(41, snapshot=True, more=True))
    assert subscription.request().epoch not in (0, EPOCH), "half a snapshot: it wants a whole one"
    subscription.push(update(41, snapshot=True))
    assert subscription.request() == SubscribeKVEvents(EPOCH, 42)
    assert len(received) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        update(0),
        update(2),
        update(1, epoch=EPOCH + 2),
        KVEvents(epoch=EPOCH, sequence=1, payload=b"?"),
        KVEvents(epoch=EPOCH, sequence=1, payload=NUMBERED),
    ],
)
def test_a_gap_or_nonsense_breaks_the_protocol(wrong: KVEvents) -> None:
    received: list[KVEventBatch] = []
    subscription = KVSubscription(received.append)
    subscription.push(update(0))
    with pytest.raises(ProtocolError):
        subscription.push(wrong)
    assert len(received) == 1
    assert subscription.request() == SubscribeKVEvents(EPOCH, 1)


class Index:
    """What a router keeps of one worker."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self._changed = asyncio.Event()

    def take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
            elif isinstance(event, BlockStored):
                self.known.update(event.block_hashes)
            else:
                self.known.difference_update(event.block_hashes)
        self._changed.set()

    async def until(self, num_blocks: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.known) != num_blocks:
                self._changed.clear()
                await self._changed.wait()


async def ask(worker: SupervisedWorker, name: str, prompt: tuple[int, ...]) -> None:
    recorder = Recorder()
    request = GenerateRequest(
        request_id=RequestId(name), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2)
    )
    worker.backend.generate(request, recorder)
    await recorder.end()


def test_an_index_follows_a_worker_over_its_restart() -> None:
    async def check(made: Bench) -> None:
        index = Index()
        worker = await made.start()
        worker.backend.hear_kv_events(index.take)
        await worker.wait_ready()
        await ask(worker, "a", tuple(range(20, 85)))
        await index.until(4)
        before = set(index.known)
        await ask(worker, "bad", (DIE,))
        await worker.wait_ready()
        await index.until(0)
        await ask(worker, "b", tuple(range(20, 53)))
        await index.until(2)
        assert index.known < before, "one key, one name for the same block"

    async def run() -> None:
        async with bench() as made, asyncio.timeout(60):
            await check(made)

    asyncio.run(run())

"""A worker that sleeps: its memory, what it says, and what wakes it."""

from pathlib import Path

import msgspec
from raw_worker import REAL, Client, RawWorker, raw_worker, submit, wait_gone

from penstock.kv.events import AllBlocksCleared, decode_batch
from penstock.protocol.worker import (
    AbortRequest,
    Asleep,
    Drain,
    KVEvents,
    Loading,
    ModelInfo,
    Ready,
    Stats,
    SubscribeKVEvents,
)
from penstock.protocol.worker_parts import Sleep, StaysAwake, UnloadAdapter, Wake
from penstock.types import PLATFORM, FinishReason

MODEL = str(Path(__file__).parents[2] / "models" / "penstock-demo")
PROMPT = tuple(range(20, 120))


def asleep(client: Client) -> Asleep:
    found = client.until_kind(Asleep)
    assert isinstance(found, Asleep)
    return found


def ready(client: Client) -> ModelInfo:
    found = client.until_kind(Ready)
    assert isinstance(found, Ready)
    return found.info


def answer(client: Client, name: str) -> tuple[int, ...]:
    client.send(submit(name, PROMPT, max_tokens=12))
    return tuple(token for output in client.outputs(name) for token in output.token_ids)


def fall_asleep(worker: RawWorker, client: Client) -> Asleep:
    client.send(Sleep())
    return asleep(client)


def test_a_real_model_gives_its_memory_back_and_comes_back_the_same() -> None:
    # Warming up touches all of so small a cache: nothing is left to be committed later.
    with raw_worker(
        model_path=MODEL, runner=REAL, threads=1, dtype="float32", kv_memory_bytes=4 << 20
    ) as worker:
        client = worker.connect()
        info = ready(client)
        assert info.weight_bytes > 40 << 20
        client.send(SubscribeKVEvents())
        before = answer(client, "before")
        awake = worker.resident_bytes()
        reported = fall_asleep(worker, client)
        asleep_bytes = worker.resident_bytes()
        assert awake - asleep_bytes > 0.9 * info.weight_bytes
        assert 0 < reported.memory_bytes < worker.resident_bytes()
        assert (reported.info, reported.why) == (info, "")
        assert reported.wake_ns > 0
        late = worker.connect()
        assert isinstance(late.receive(), Asleep), "who connects later is told too"
        client.send(Sleep())  # Nothing to do.
        client.send(Wake())
        assert ready(client) == info, "with the same KV cache and identity"
        assert answer(client, "after") == before
        again = worker.resident_bytes()
        # Scratch of the largest steps is committed when such a step comes.
        assert asleep_bytes + 0.5 * info.weight_bytes < again < awake + 0.1 * info.weight_bytes
        assert fall_asleep(worker, client).memory_bytes < reported.memory_bytes + (16 << 20), (
            "nothing piles up"
        )


def test_the_prefix_cache_is_forgotten_and_numbers_go_on() -> None:
    with raw_worker() as worker:
        client = worker.connect()
        ready(client)
        client.send(SubscribeKVEvents())
        client.send(submit("a", PROMPT, max_tokens=1))
        stored = client.until_kind(KVEvents)
        fall_asleep(worker, client)  # It says that all is gone, on the way.
        late = worker.connect()
        asleep(late)
        late.send(SubscribeKVEvents(epoch=1, from_sequence=7))
        snapshot = late.until_kind(KVEvents)
        assert isinstance(stored, KVEvents)
        assert isinstance(snapshot, KVEvents)
        assert (snapshot.snapshot, snapshot.epoch, snapshot.sequence) == (True, stored.epoch, 1)
        assert [type(each) for each in decode_batch(snapshot.payload).events] == [AllBlocksCleared]
        late.send(Wake())
        ready(client)
        client.send(submit("b", PROMPT, max_tokens=1))
        for each in (client, late):
            update = each.until_kind(KVEvents)
            assert isinstance(update, KVEvents)
            assert (update.epoch, update.sequence) == (stored.epoch, 2)
            assert not any(
                isinstance(event, AllBlocksCleared) for event in decode_batch(update.payload).events
            )


def test_work_keeps_it_awake_and_no_answer_is_cut() -> None:
    with raw_worker(step_s=0.02) as worker:
        client = worker.connect()
        ready(client)
        client.send(submit("long", max_tokens=20), Sleep())
        stays = client.until_kind(StaysAwake)
        assert stays == StaysAwake(1)
        assert client.last("long").finish is not None
        # A request behind the order, before it was heard: the order is void.
        client.send(Sleep(), submit("behind", max_tokens=2))
        finish = client.last("behind").finish
        assert finish is not None
        assert finish.reason is FinishReason.LENGTH


def test_probes_are_no_use_of_a_model() -> None:
    with raw_worker() as worker:
        client = worker.connect()
        ready(client)
        probe = msgspec.structs.replace(submit("probe", max_tokens=2), fairness_key=PLATFORM)
        ended = list[int]()
        for name, message in (("a", submit("a", max_tokens=2)), ("probe", probe), ("b", submit("b"))):
            client.send(message)
            client.last(name)
            stats = client.until_kind(Stats)
            assert isinstance(stats, Stats)
            ended.append(stats.ended)
        assert ended == [1, 1, 2]


def test_orders_and_ends_reach_a_sleeper() -> None:
    with raw_worker() as worker:
        client = worker.connect()
        ready(client)
        fall_asleep(worker, client)
        client.send(UnloadAdapter("fr"), AbortRequest(()), Wake())
        loading = client.until_kind(Loading)
        assert isinstance(loading, Loading)
        assert loading.wakes
        ready(client)
        fall_asleep(worker, client)
        client.send(submit("refused"))
        refused = client.last("refused").finish
        assert refused is not None
        assert refused.error_kind == "WorkerUnavailable", "the gateway wakes it, and tries again"
        client.send(Drain())
        wait_gone(worker.process.pid)
        assert worker.exit_code() == 0
        assert worker.errors().count("ready after") == 1, "a wake-up is no start"


def test_launched_asleep_it_says_what_it_would_take() -> None:
    with raw_worker(
        model_path=MODEL, runner=REAL, asleep=True, threads=1, kv_memory_bytes=32 << 20, memory_bytes=4 << 30
    ) as worker:
        client = worker.connect()
        reported = asleep(client)
        info = reported.info
        assert info.vocab_size > 0
        assert (32 << 20) - info.kv_bytes < 1 << 20
        assert info.memory_bytes == info.weight_bytes + info.kv_bytes + info.host_kv_bytes
        client.send(Wake())
        assert ready(client).num_blocks == info.num_blocks
        assert len(answer(client, "a")) == 12


def test_a_model_that_is_too_large_for_the_bound_says_so() -> None:
    with raw_worker(model_path=MODEL, runner=REAL, asleep=True, threads=1, memory_bytes=1 << 20) as worker:
        worker.connect().wait_closed()
        assert worker.exit_code() == 78
        assert "fleet.memory_bytes is 1048576, but the weights and the process take" in worker.errors()

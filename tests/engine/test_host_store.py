import gc
import threading

import pytest
import torch

from penstock.engine.kv_cache import NoHostStore, ThreadHostStore, copy_runs
from penstock.kv.cache.host_tier import BlockCopy, Copied
from penstock.schedule.plan import StepPlan

OUT = (BlockCopy(3, 0), BlockCopy(4, 1), BlockCopy(0, 5), BlockCopy(7, 2))


def plan(*, out: tuple[BlockCopy, ...] = (), into: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(1, (), (), copies_out=out, copies_in=into)


def memories() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(8 * 6.0).view(8, 2, 3), torch.zeros(6, 2, 3)


def wait_for(store: ThreadHostStore, count: int) -> list[Copied]:
    ended: list[Copied] = []
    while len(ended) < count:
        ended += store.collect(wait=True)
    return ended


def test_neighbours_are_copied_at_once_and_all_arrive() -> None:
    blocks, slots = memories()
    copy_runs(blocks, slots, OUT, out=True)
    for block, slot in OUT:
        assert torch.equal(slots[slot], blocks[block])
    assert not slots[3:5].any(), "nothing else was touched"
    before = blocks.clone()
    blocks.zero_()
    copy_runs(blocks, slots, OUT, out=False)
    for block, _ in OUT:
        assert torch.equal(blocks[block], before[block])


def test_every_copy_is_reported_once() -> None:
    blocks, slots = memories()
    store = ThreadHostStore(blocks, slots)
    assert store.collect(wait=False) == ()
    assert store.collect(wait=True) == (), "nothing is under way: there is nothing to wait for"
    store.start(plan(out=OUT))
    assert sorted(wait_for(store, 4)) == sorted(Copied(slot) for _, slot in OUT)
    assert torch.equal(slots[5], blocks[0])
    store.start(plan(into=(BlockCopy(6, 5),), out=(BlockCopy(1, 4),)))
    assert sorted(wait_for(store, 2)) == [Copied(4), Copied(5)]
    assert torch.equal(blocks[6], blocks[0])
    assert store.collect(wait=True) == ()


def test_a_copy_that_fails_is_reported_and_the_next_one_works(caplog: pytest.LogCaptureFixture) -> None:
    blocks, _ = memories()
    store = ThreadHostStore(blocks, torch.zeros(6, 2, 4))  # Not the shape of a block.
    store.start(plan(out=OUT[:1]))
    assert wait_for(store, 1) == [Copied(0, ok=False)]
    assert "failed" in caplog.text
    store.start(plan(out=OUT[1:2]))
    assert wait_for(store, 1) == [Copied(1, ok=False)]


def test_without_a_host_tier_copies_are_a_bug() -> None:
    NoHostStore().start(plan())
    with pytest.raises(AssertionError, match="without a host tier"):
        NoHostStore().start(plan(out=OUT))


def test_a_store_that_nobody_holds_ends_its_thread() -> None:
    before = set(threading.enumerate())  # Those of other tests may still be ending.
    store = ThreadHostStore(torch.zeros(2, 4), torch.zeros(2, 4))
    (thread,) = [new for new in set(threading.enumerate()) - before if new.name == "host-kv-copies"]
    del store
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()

import subprocess
import sys

import pytest

from penstock.errors import NamespaceBreach
from penstock.kv.cache.host_tier import TRANSITIONS, BlockCopy, Copied, Copies, HostLimits, Slot
from penstock.kv.cache.manager import ABSENT, BlockTable, KVManager
from penstock.kv.events import AllBlocksCleared, BlockRemoved, KVEventLog, stored_event
from penstock.kv.hashing import BlockHasher, token_array

HASHER = BlockHasher(key=bytes(32), identity="m float32")
IDLE_NS = 1000


def manager(num_blocks: int = 8, num_slots: int = 8, **limits: int) -> KVManager:
    host = HostLimits(**{"num_slots": num_slots, "idle_ns": IDLE_NS} | limits)
    return KVManager.with_prefix_cache(num_blocks, HASHER, host)


def compute(kv: KVManager, tokens, salt: bytes = b"") -> BlockTable:
    """A table into which all `tokens` were computed; cached parts are taken over."""
    table = kv.open(salt)
    match = kv.match_prefix(table, tokens)
    kv.adopt(table, match)
    assert not table.awaits
    assert kv.extend(table, len(tokens)) is not None
    kv.publish_computed(table, tokens, len(tokens))
    return table


def copy_all(kv: KVManager, *, ok: bool = True) -> Copies:
    """Start what there is to copy and end it."""
    copies = kv.take_copies()
    kv.finish_copies(Copied(copy.slot, ok) for copy in (*copies.out, *copies.into))
    return copies


def evict_all(kv: KVManager) -> None:
    """Somebody needs the whole device for a moment."""
    blocks = kv.pool.allocate(kv.pool.num_available)
    assert blocks is not None
    kv.pool.free(blocks)


def stored(kv: KVManager, tokens, salt: bytes = b"") -> None:
    """Leave the full blocks of `tokens` in host memory and nowhere else."""
    kv.release(compute(kv, tokens, salt), preempted=True)
    copy_all(kv)
    evict_all(kv)


def test_every_state_is_left_again() -> None:
    assert set(TRANSITIONS) == set(Slot)
    assert all(TRANSITIONS.values())


def test_idle_blocks_are_stored_tail_first_and_then_evicted_first() -> None:
    kv = manager()
    kv.release(compute(kv, token_array(range(50))))
    kv.release(compute(kv, token_array(range(100, 116))))
    assert kv.host.due_ns == IDLE_NS
    kv.host.tick(IDLE_NS - 1)
    assert copy_all(kv) == Copies()
    kv.host.tick(IDLE_NS)
    copies = copy_all(kv)
    assert [copy.block for copy in copies.out] == [2, 1, 0, 3]
    assert copies.into == ()
    assert kv.host.statistics().stores == 4
    assert kv.host.due_ns is None
    kv.check_invariants([])


def test_a_block_that_is_used_again_is_idle_later() -> None:
    kv = manager()
    tokens = token_array(range(20))
    kv.release(compute(kv, tokens))
    kv.host.tick(IDLE_NS - 1)
    table = compute(kv, tokens)
    kv.host.tick(IDLE_NS)
    assert copy_all(kv) == Copies(), "it is in use"
    kv.release(table)
    kv.host.tick(2 * IDLE_NS - 1)
    assert copy_all(kv) == Copies()
    kv.host.tick(2 * IDLE_NS)
    assert len(copy_all(kv).out) == 1


def test_preempted_blocks_are_stored_at_once_and_stored_once() -> None:
    kv = manager()
    tokens = token_array(range(40))
    for copies in (2, 0):
        kv.release(compute(kv, tokens), preempted=True)
        assert len(copy_all(kv).out) == copies
    kv.host.tick(IDLE_NS)
    assert copy_all(kv) == Copies()


def test_shared_blocks_of_a_preempted_request_stay_where_they_are() -> None:
    kv = manager()
    tokens = token_array(range(40))
    other, victim = compute(kv, tokens), compute(kv, tokens)
    kv.release(victim, preempted=True)
    assert copy_all(kv) == Copies()
    kv.release(other)


def test_a_prefix_comes_back_by_copy() -> None:
    kv = manager()
    tokens = token_array(range(50))
    stored(kv, tokens)
    table = kv.open(b"")
    match = kv.match_prefix(table, tokens)
    assert match.blocks == (ABSENT,) * 3
    assert (match.num_present, match.num_tokens, match.num_host_tokens) == (0, 48, 48)
    kv.adopt(table, match)
    assert len(table.awaits) == 3
    kv.check_invariants([table])
    copies = copy_all(kv)
    assert [copy.block for copy in copies.into] == table.blocks, "head first"
    assert not table.awaits
    assert not table.broken
    kv.release(table)
    assert kv.match_prefix(kv.open(b""), tokens).num_host_tokens == 0, "it is on the device again"
    assert kv.match_prefix(kv.open(b""), tokens).num_tokens == 48
    evict_all(kv)
    assert kv.match_prefix(kv.open(b""), tokens).num_host_tokens == 48, "and still in host memory"
    assert kv.host.statistics().loads == 3


def test_a_match_goes_through_both_tiers_block_by_block() -> None:
    kv = manager()
    tokens = token_array(range(80))
    stored(kv, tokens)
    first = kv.open(b"")
    kv.adopt(first, kv.match_prefix(first, tokens))
    copy_all(kv)
    one, two, three, four = first.blocks
    kv.release(first)
    kv.pool.forget([two, three])
    match = kv.match_prefix(kv.open(b""), tokens)
    assert match.blocks == (one, ABSENT, ABSENT, four)
    assert (match.num_present, match.num_tokens, match.num_host_tokens) == (2, 64, 32)
    table = kv.open(b"")
    kv.adopt(table, match)
    assert [table.blocks[0], table.blocks[3]] == [one, four]
    assert [copy.block for copy in copy_all(kv).into] == table.blocks[1:3]
    kv.check_invariants([table])
    kv.release(table)


def test_who_wants_what_is_being_loaded_waits_for_the_same_copy() -> None:
    kv = manager()
    tokens = token_array(range(40))
    stored(kv, tokens)
    first, second = kv.open(b""), kv.open(b"")
    kv.adopt(first, kv.match_prefix(first, tokens))
    match = kv.match_prefix(second, tokens)
    assert match.blocks == tuple(first.blocks)
    assert (match.loads, match.num_host_tokens) == ((), 32)
    kv.adopt(second, match)
    copies = kv.take_copies()
    assert len(copies.into) == 2
    kv.release(first)
    kv.check_invariants([second])
    kv.finish_copies([Copied(copies.into[0].slot)])
    assert len(second.awaits) == 1
    kv.finish_copies([Copied(copies.into[1].slot)])
    assert not second.awaits
    kv.release(second)
    kv.check_invariants([])


def test_a_load_that_nobody_waits_for_never_begins() -> None:
    kv = manager(loads_max=1)
    tokens = token_array(range(50))
    stored(kv, tokens)
    table = kv.open(b"")
    kv.adopt(table, kv.match_prefix(table, tokens))
    begun = kv.take_copies()
    assert len(begun.into) == 1
    kv.release(table)
    assert kv.pool.num_available == 7, "only the copy that began holds its block"
    assert kv.take_copies() == Copies()
    kv.finish_copies([Copied(begun.into[0].slot)])
    assert kv.pool.num_available == 8
    assert kv.match_prefix(kv.open(b""), tokens).num_tokens == 48
    kv.check_invariants([])


def test_a_failed_load_breaks_the_table_and_is_forgotten() -> None:
    kv = manager()
    tokens = token_array(range(50))
    stored(kv, tokens)
    table = kv.open(b"")
    kv.adopt(table, kv.match_prefix(table, tokens))
    first, second, third = (copy.slot for copy in kv.take_copies().into)
    kv.finish_copies([Copied(first), Copied(second, ok=False), Copied(third)])
    assert table.broken
    assert not table.awaits
    kv.release(table)
    assert not table.broken
    assert kv.match_prefix(table, tokens).num_tokens == 16, "what came before the failure did arrive"
    assert kv.host.statistics().failures == 1
    kv.check_invariants([])


@pytest.mark.parametrize("again", [False, True])
def test_a_block_that_changes_while_it_is_stored_is_dropped(again: bool) -> None:
    """Even if it gets the same name again meanwhile: half of the copy may be older than that."""
    kv = manager(num_blocks=1)
    tokens = token_array(range(16))
    kv.release(compute(kv, tokens), preempted=True)
    copies = kv.take_copies()
    assert len(copies.out) == 1
    evict_all(kv)
    if again:
        kv.release(compute(kv, tokens))
        assert kv.pool.name(copies.out[0].block) is not None
    kv.finish_copies([Copied(copies.out[0].slot)])
    assert kv.host.statistics().used == 0
    assert kv.host.statistics().discarded == 1
    kv.check_invariants([])


def test_the_least_recently_used_slot_is_evicted() -> None:
    kv = manager(num_slots=2)
    old, kept, new = (token_array(range(start, start + 17)) for start in (0, 100, 200))
    stored(kv, kept)
    stored(kv, old)
    table = kv.open(b"")
    kv.adopt(table, kv.match_prefix(table, kept))
    copy_all(kv)
    kv.release(table)
    stored(kv, new)
    found = [kv.match_prefix(kv.open(b""), tokens).num_tokens for tokens in (old, kept, new)]
    assert found == [0, 16, 16]
    assert kv.host.statistics().evictions == 1


def test_slots_that_are_being_copied_are_not_evicted() -> None:
    kv = manager(num_slots=1)
    tokens, new = token_array(range(17)), token_array(range(100, 117))
    stored(kv, tokens)
    table = kv.open(b"")
    kv.adopt(table, kv.match_prefix(table, tokens))
    loading = kv.take_copies()
    kv.release(compute(kv, new), preempted=True)
    assert kv.take_copies() == Copies()
    kv.finish_copies([Copied(loading.into[0].slot)])
    assert len(kv.take_copies().out) == 1
    kv.release(table)


def test_bounds_of_copies() -> None:
    kv = manager(loads_max=2, stores_max=3)
    tokens = token_array(range(100))
    kv.release(compute(kv, tokens), preempted=True)
    assert [len(copy_all(kv).out) for _ in range(3)] == [3, 3, 0]
    evict_all(kv)
    table = kv.open(b"")
    kv.adopt(table, kv.match_prefix(table, tokens))
    started = [kv.take_copies() for _ in range(2)]
    assert [len(each.into) for each in started] == [2, 0]
    kv.finish_copies([Copied(started[0].into[0].slot)])
    assert len(kv.take_copies().into) == 1
    kv.release(table)


def test_tenants_are_walled_off_in_host_memory_too() -> None:
    kv = manager()
    tokens = token_array(range(40))
    stored(kv, tokens, b"alice")
    assert (
        kv.match_prefix(kv.open(b"alice"), tokens).num_host_tokens == 32
    )  # So the zeros below mean something.
    assert kv.match_prefix(kv.open(b"bob"), tokens).num_tokens == 0
    assert kv.match_prefix(kv.open(b""), tokens).num_tokens == 0
    name = HASHER.extend(HASHER.root(salt=b"alice"), tokens[:16].tobytes())[0]
    with pytest.raises(NamespaceBreach, match="another namespace"):
        kv.host.find(name, owner=b"bob")


def test_a_load_into_a_foreign_block_is_a_bug() -> None:
    kv = manager()
    tokens = token_array(range(17))
    stored(kv, tokens, b"alice")
    match = kv.match_prefix(kv.open(b"alice"), tokens)
    (block,) = kv.pool.allocate(1, owner=b"bob") or ()
    with pytest.raises(NamespaceBreach, match="another namespace"):
        kv.host.load(match.loads[0], block)


WALLS = """
from penstock.errors import NamespaceBreach
from penstock.kv.hashing import PUBLIC, BlockHasher, token_array
from penstock.kv.cache.host_tier import Copied, HostLimits
from penstock.kv.cache.manager import KVManager

assert False, "never reached: this runs without asserts"
hasher, tokens = BlockHasher(key=bytes(32), identity="m float32"), token_array(range(17))
kv = KVManager.with_prefix_cache(4, hasher, HostLimits(num_slots=2, idle_ns=1))
table = kv.open(b"alice")
kv.extend(table, 17)
kv.publish_computed(table, tokens, 17)
kv.release(table, preempted=True)
kv.finish_copies(Copied(copy.slot) for copy in kv.take_copies().out)
(name,) = hasher.extend(hasher.root(salt=b"alice"), tokens[:16].tobytes())
found = kv.host.find(name, owner=b"alice")
(block,) = kv.pool.allocate(1, owner=b"bob")
for breach in (
    lambda: kv.pool.lookup([name], owner=b"bob"),
    lambda: kv.host.find(name, owner=b"bob"),
    lambda: kv.host.load(found.slot, block),
    lambda: kv.open(PUBLIC),
):
    try:
        breach()
    except NamespaceBreach:
        print("refused")
"""


def test_owner_tags_are_looked_at_without_asserts_too() -> None:
    reported = subprocess.run(
        [sys.executable, "-O", "-c", WALLS], capture_output=True, text=True, check=False
    )
    assert reported.stdout == "refused\n" * 4, reported.stderr


def test_bad_blocks_are_forgotten_everywhere() -> None:
    kv = manager()
    tokens = token_array(range(40))
    stored(kv, tokens)
    table = kv.open(b"")
    kv.adopt(table, kv.match_prefix(table, tokens))
    copy_all(kv)
    kv.release(table, bad=True)
    assert kv.match_prefix(kv.open(b""), tokens).num_tokens == 0
    kv.check_invariants([])


@pytest.mark.parametrize("during", [False, True])
def test_clear_cache_reaches_the_host(during: bool) -> None:
    kv = manager()
    tokens = token_array(range(40))
    stored(kv, tokens)
    table = kv.open(b"")
    kv.adopt(table, kv.match_prefix(table, tokens))
    if during:
        loads = kv.take_copies().into
        kv.clear_cache()
        kv.finish_copies(Copied(copy.slot) for copy in loads)
        assert not table.broken, "who was promised the content gets it"
    kv.release(table)
    kv.clear_cache()
    assert kv.match_prefix(kv.open(b""), tokens).num_tokens == 0
    assert kv.host.statistics().used == 0
    kv.check_invariants([])


def test_changes_are_told() -> None:
    kv = manager(num_slots=1)
    first, second = token_array(range(16)), token_array(range(100, 116))
    name = HASHER.extend(HASHER.root(), first.tobytes())[0]
    other = HASHER.extend(HASHER.root(), second.tobytes())[0]
    stored(kv, first)
    kv.pool.events = log = KVEventLog("none")
    table = kv.open(b"")
    kv.adopt(table, kv.match_prefix(table, token_array([*first, 1])))
    copy_all(kv)
    kv.release(table)
    assert log.take() == (stored_event((name,), medium="GPU"),)
    stored(kv, second)
    assert log.take() == (
        stored_event((other,), medium="GPU"),
        BlockRemoved(block_hashes=(name,), medium="CPU"),
        stored_event((other,), medium="CPU"),
        BlockRemoved(block_hashes=(other, name), medium="GPU"),
    )
    kv.clear_cache()
    assert log.take() == (AllBlocksCleared(),)


def test_without_slots_nothing_is_watched_or_stored() -> None:
    kv = manager(num_slots=0)
    kv.release(compute(kv, token_array(range(40))), preempted=True)
    kv.host.tick(10 * IDLE_NS)
    assert kv.host.due_ns is None
    assert kv.take_copies() == Copies()


def test_an_unasked_answer_is_a_bug() -> None:
    kv = manager()
    stored(kv, token_array(range(17)))
    with pytest.raises(AssertionError, match="was not being copied"):
        kv.finish_copies([Copied(0)])
    assert BlockCopy(1, 2).slot == 2

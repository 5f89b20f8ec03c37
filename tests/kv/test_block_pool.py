from copy import deepcopy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import NamespaceBreach
from penstock.kv.cache.block_pool import BlockPool, Epoch
from penstock.kv.hashing import PUBLIC, BlockHash


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "big"))


def fill(pool: BlockPool, *numbers: int, owner: bytes = b"") -> tuple[int, ...]:
    """Allocate and publish a block for each of `numbers`."""
    blocks = pool.allocate(len(numbers), owner=owner)
    assert blocks is not None
    for block, number in zip(blocks, numbers, strict=True):
        pool.publish(block, name(number))
    return blocks


def lookup(pool: BlockPool, *numbers: int, owner: bytes = b"") -> tuple[int, ...]:
    return pool.lookup([name(number) for number in numbers], owner=owner)


def states(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_invariants()
    now = pool.statistics()
    assert now.free + now.used + now.cached + now.draining == now.total
    assert now.free + now.cached == pool.num_available
    assert now.draining == pool.num_draining
    return now.free, now.used, now.cached


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.allocate(0) == ()
    blocks = pool.allocate(3)
    assert blocks == (0, 1, 2)
    assert pool.allocate(2) is None
    assert states(pool) == (1, 3, 0)
    pool.free(blocks)
    assert states(pool) == (4, 0, 0)


def test_unpublished_blocks_are_free_and_published_ones_cached() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    assert pool.publish(blocks[0], name(1))
    pool.free(blocks)
    assert states(pool) == (3, 0, 1)
    assert lookup(pool, 1) == blocks[:1]


def test_lookup_stops_at_the_first_unknown_block() -> None:
    pool = BlockPool(8)
    blocks = fill(pool, 1, 2, 4)
    assert lookup(pool, 1, 2, 3, 4) == blocks[:2]
    assert lookup(pool, 3, 1) == ()
    assert lookup(pool) == ()


def test_acquired_blocks_are_shared_and_survive_their_first_holder() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, 1, 2)
    pool.acquire(blocks)
    assert [pool.num_references(block) for block in blocks] == [2, 2]
    pool.free(blocks)
    assert states(pool) == (0, 2, 0)
    assert pool.allocate(1) is None
    pool.free(blocks)
    assert states(pool) == (0, 0, 2)
    assert pool.num_idle(blocks) == 2
    pool.acquire(blocks[:1])
    assert states(pool) == (0, 1, 1)
    assert pool.num_idle(blocks) == 1


def test_free_blocks_go_first_then_the_least_recently_used_tail_before_head() -> None:
    pool = BlockPool(6)
    first = fill(pool, 1, 2)
    second = fill(pool, 11, 12)
    pool.free(first)
    pool.free(second)
    hits = lookup(pool, 1)
    pool.acquire(hits)
    pool.free(hits)  # Block 1 is now the most recently used.
    taken = pool.allocate(2)
    assert taken is not None
    assert not set(taken) & {*first, *second}
    order = []
    for _ in range(4):
        before = {number for number in (1, 2, 11, 12) if lookup(pool, number)}
        assert pool.allocate(1) is not None
        order += before - {number for number in (1, 2, 11, 12) if lookup(pool, number)}
    assert order == [2, 12, 11, 1]
    assert pool.statistics().evictions == 4


def test_a_namespace_uses_each_block_once_however_many_hold_it() -> None:
    pool = BlockPool(8)
    own, _ = fill(pool, 1, 2, owner=b"a"), fill(pool, 3, owner=b"b")
    pool.acquire(lookup(pool, 1, owner=b"a"))
    assert [pool.num_used_by(owner) for owner in (b"a", b"b", b"c")] == [2, 1, 0]
    pool.free(own)
    assert [pool.num_used_by(owner) for owner in (b"a", b"b", b"c")] == [1, 1, 0]


def test_two_requests_that_compute_the_same_block_at_once_keep_their_own() -> None:
    pool = BlockPool(4)
    mine, yours = fill(pool, 1), pool.allocate(1)
    assert yours is not None
    assert not pool.publish(yours[0], name(1))
    assert pool.statistics().duplicates == 1
    assert pool.publish(mine[0], name(1))  # Saying it again changes nothing.
    assert lookup(pool, 1) == mine
    assert pool.statistics().duplicates == 1
    pool.free(yours)
    assert states(pool) == (3, 1, 0)  # The private copy has no name: nothing to keep.
    pool.free(mine)
    assert states(pool) == (3, 0, 1)


def test_bugs_are_caught() -> None:
    pool = BlockPool(4)
    blocks = fill(pool, 1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="no holder"):
        pool.publish(blocks[0], name(2))
    pool.acquire(blocks)
    with pytest.raises(AssertionError, match="another name"):
        pool.publish(blocks[0], name(2))


def test_a_hit_in_another_namespace_is_a_bug() -> None:
    """The salt is in the hash; should that ever fail, the owner tag stops the hit."""
    pool = BlockPool(4)
    blocks = fill(pool, 1, owner=b"alice")
    assert pool.owner(blocks[0]) == b"alice"
    assert lookup(pool, 1, owner=b"alice") == blocks
    with pytest.raises(NamespaceBreach, match="another namespace"):
        lookup(pool, 1, owner=b"bob")


def test_forgotten_blocks_are_not_hit_and_cached_ones_become_free() -> None:
    pool = BlockPool(4)
    held, put_away = fill(pool, 1), fill(pool, 2)
    pool.free(put_away)
    pool.forget((*held, *put_away))
    assert lookup(pool, 1) == lookup(pool, 2) == ()
    assert states(pool) == (3, 1, 0)
    pool.free(held)
    assert states(pool) == (4, 0, 0)


def test_clear_cache_forgets_everything() -> None:
    pool = BlockPool(4)
    held = fill(pool, 1)
    pool.free(fill(pool, 2, 3))
    assert pool.clear_cache() == 3
    assert states(pool) == (3, 1, 0)
    assert lookup(pool, 1) == ()
    assert pool.clear_cache() == 0
    pool.free(held)


def test_a_freed_block_is_reused_only_after_the_epoch_that_holds_it() -> None:
    pool = BlockPool(4)
    blocks = fill(pool, 1, 2) + (pool.allocate(1) or ())
    epoch = pool.begin_epoch()
    pool.hold(blocks, epoch)
    pool.free(blocks)
    assert states(pool) == (1, 0, 0)
    assert pool.num_draining == 3
    assert pool.allocate(2) is None
    assert pool.end_epoch(epoch) == 3
    assert states(pool) == (2, 0, 2)
    assert pool.allocate(4) == (2, 3, 1, 0), "free ones, then the tail before the head"


def test_a_hold_on_an_epoch_that_is_over_holds_nothing() -> None:
    pool = BlockPool(4)
    epoch = pool.begin_epoch()
    pool.end_epoch(epoch)
    blocks = fill(pool, 1)
    pool.hold(blocks, epoch)
    pool.free(blocks)
    assert states(pool) == (3, 0, 1)


def test_a_draining_block_may_be_hit_and_then_stays_with_who_hit_it() -> None:
    pool = BlockPool(4)
    epoch, blocks = pool.begin_epoch(), fill(pool, 1, 2)
    pool.hold(blocks, epoch)
    pool.free(blocks)
    hits = lookup(pool, 1)
    assert hits == blocks[:1]
    available = pool.num_available
    assert pool.num_idle(hits) == 0, "a hit on it takes nothing from what is available"
    pool.acquire(hits)
    assert pool.num_available == available
    assert pool.end_epoch(epoch) == 1
    assert states(pool) == (2, 1, 1)


def test_epochs_end_in_any_order_and_the_last_one_lets_go() -> None:
    pool = BlockPool(2)
    step, copy = pool.begin_epoch(), pool.begin_epoch()
    blocks = fill(pool, 1)
    pool.hold(blocks, step)
    pool.hold(blocks, copy)
    pool.free(blocks)
    assert pool.end_epoch(copy) == 0
    assert pool.num_draining == 1
    assert pool.end_epoch(step) == 1
    assert states(pool) == (1, 0, 1)


def test_what_is_forgotten_while_it_drains_becomes_free() -> None:
    pool = BlockPool(2)
    epoch, blocks = pool.begin_epoch(), fill(pool, 1)
    pool.hold(blocks, epoch)
    pool.free(blocks)
    pool.forget(blocks)
    assert lookup(pool, 1) == ()
    pool.end_epoch(epoch)
    assert states(pool) == (2, 0, 0)


def test_misused_epochs_are_bugs() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="has not begun"):
        pool.hold((), Epoch(1))
    epoch = pool.begin_epoch()
    with pytest.raises(AssertionError, match="no other holder"):
        pool.hold((0,), epoch)
    pool.end_epoch(epoch)
    with pytest.raises(KeyError):
        pool.end_epoch(epoch)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model of dicts and lists: who holds what, and which content a hit must find."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holders: list[list[int]] = []  # Blocks of each holder, head first.
        self.content: dict[int, int] = {}  # Block -> the number it was published under.
        self.epochs: dict[Epoch, set[int]] = {}  # Those that are open, and what they touch.

    def check_not_held(self, blocks: tuple[int, ...]) -> None:
        held = {block for holder in self.holders for block in holder}
        assert not held & set(blocks), "a held block was given to someone else"
        assert not set().union(*self.epochs.values()) & set(blocks), "a block was reused too early"

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks:
            self.check_not_held(blocks)
            for block in blocks:
                self.content.pop(block, None)
            self.holders.append(list(blocks))

    @rule(owners=st.lists(st.sampled_from([b"", PUBLIC]), max_size=6))
    def allocate_each(self, owners: list[bytes]) -> None:
        """As one block after the other."""
        del owners[self.pool.num_available :]
        one_by_one = deepcopy(self.pool)
        expected = [one_by_one.allocate(1, owner=owner) for owner in owners]
        blocks = self.pool.allocate_each(owners)
        assert [(block,) for block in blocks] == expected
        assert self.pool.statistics() == one_by_one.statistics()
        assert self.pool.names() == one_by_one.names()
        for owner in (b"", PUBLIC):
            assert self.pool.num_used_by(owner) == one_by_one.num_used_by(owner)
        assert [self.pool.owner(block) for block in blocks] == owners
        left, left_one_by_one = (
            pool.allocate(pool.num_available) for pool in (deepcopy(self.pool), one_by_one)
        )
        assert left == left_one_by_one, "what is given next"
        if blocks:
            self.check_not_held(tuple(blocks))
            for block in blocks:
                self.content.pop(block, None)
            self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), number=st.integers(0, 9))
    def publish(self, data, number: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        block = data.draw(st.sampled_from(holder))
        if block in self.content:
            return
        named = number in self.content.values()
        assert self.pool.publish(block, name(number)) == (not named)
        if not named:
            self.content[block] = number

    @rule(numbers=st.lists(st.integers(0, 9), max_size=5, unique=True))
    def hit(self, numbers: list[int]) -> None:
        blocks = self.pool.lookup([name(number) for number in numbers])
        where = {number: block for block, number in self.content.items()}
        expected = []
        for number in numbers:
            if number not in where:
                break
            expected.append(where[number])
        assert list(blocks) == expected
        self.pool.acquire(blocks)
        if blocks:
            self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data) -> None:
        """Give up a holder's blocks, which any number of epochs touch still."""
        index = data.draw(st.integers(0, len(self.holders) - 1))
        blocks = self.holders.pop(index)
        touching = st.lists(st.sampled_from(sorted(self.epochs)), unique=True) if self.epochs else st.just([])
        for epoch in data.draw(touching):
            self.pool.hold(blocks, epoch)
            self.epochs[epoch].update(blocks)
        self.pool.free(blocks)

    @rule()
    def begin_epoch(self) -> None:
        self.epochs[self.pool.begin_epoch()] = set()

    @precondition(lambda self: self.epochs)
    @rule(data=st.data())
    def end_epoch(self, data) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.epochs)))
        available = self.pool.num_available
        del self.epochs[epoch]
        assert self.pool.end_epoch(epoch) == self.pool.num_available - available

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.forget([block])
        del self.content[block]

    @rule()
    def clear(self) -> None:
        assert self.pool.clear_cache() == len(self.content)
        self.content.clear()

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        _, used, cached = states(self.pool)
        held = {block for holder in self.holders for block in holder}
        touched = set().union(*self.epochs.values())
        assert used == len(held)
        assert cached == len(set(self.content) - held - touched)
        assert self.pool.num_draining == len(touched - held)
        for block in held:
            count = sum(holder.count(block) for holder in self.holders)
            assert self.pool.num_references(block) == count

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for holder in self.holders:
                self.pool.free(holder)
            for epoch in self.epochs:
                self.pool.end_epoch(epoch)
            free, used, cached = states(self.pool)
            assert (free + cached, used) == (self.pool.num_blocks, 0)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # A busy machine is no reason to fail.
)

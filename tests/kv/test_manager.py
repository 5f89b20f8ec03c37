from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kv.cache.block_pool import Epoch
from penstock.kv.cache.manager import BlockTable, KVManager, blocks_for
from penstock.kv.hashing import BlockHasher, token_array

HASHER = BlockHasher(key=bytes(32), identity="m float32")


def manager(num_blocks: int = 16) -> KVManager:
    return KVManager.with_prefix_cache(num_blocks, HASHER)


def compute(kv: KVManager, table: BlockTable, tokens) -> None:
    """Pretend that all `tokens` were computed into the table."""
    assert kv.extend(table, len(tokens)) is not None
    kv.publish_computed(table, tokens, len(tokens))


def cached_tokens(kv: KVManager, tokens, salt: bytes = b"", adapter: str = "") -> int:
    return kv.match_prefix(kv.open(salt, adapter=adapter), tokens).num_tokens


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_extend_adds_only_what_is_missing() -> None:
    kv = manager(3)
    table = kv.open(b"")
    assert kv.extend(table, 1) == (0,)
    assert kv.extend(table, 16) == ()
    assert kv.extend(table, 33) == (1, 2)
    assert kv.extend(table, 49) is None
    assert table.blocks == [0, 1, 2]
    kv.check_invariants([table])
    kv.release(table)
    kv.check_invariants([])
    assert kv.statistics().free == 3


@pytest.mark.parametrize(("num_tokens", "hit"), [(16, 0), (17, 16), (32, 16), (33, 32), (40, 32)])
def test_a_hit_never_covers_the_whole_prompt(num_tokens: int, hit: int) -> None:
    kv = manager()
    tokens = token_array(range(num_tokens))
    compute(kv, kv.open(b""), tokens)
    assert cached_tokens(kv, tokens) == hit


def test_only_computed_blocks_are_hit() -> None:
    kv = manager()
    tokens = token_array(range(64))
    table = kv.open(b"")
    kv.extend(table, 64)
    for num_computed, hit in ((15, 0), (16, 16), (31, 16), (47, 32), (64, 48)):
        kv.publish_computed(table, tokens, num_computed)
        assert cached_tokens(kv, tokens) == hit


def test_generated_tokens_are_cached_like_the_prompt() -> None:
    kv = manager()
    tokens = token_array(range(20))
    table = kv.open(b"")
    compute(kv, table, tokens)
    tokens.extend(range(100, 130))
    compute(kv, table, tokens)
    kv.release(table)
    assert cached_tokens(kv, tokens) == 48


def test_tenants_and_adapters_are_walled_off() -> None:
    kv = manager()
    tokens = token_array(range(40))
    compute(kv, kv.open(b"alice"), tokens)
    assert cached_tokens(kv, tokens, b"alice") == 32  # So the zeros below mean something.
    assert cached_tokens(kv, tokens, b"bob") == 0
    assert cached_tokens(kv, tokens) == 0
    assert cached_tokens(kv, tokens, b"alice", adapter="fr") == 0


def test_equal_prompts_computed_side_by_side_do_not_mix() -> None:
    kv = manager()
    tokens = token_array(range(48))
    first, second = kv.open(b""), kv.open(b"")
    for num_computed in (16, 32, 48):
        for table in (first, second):
            assert kv.extend(table, num_computed) is not None
            kv.publish_computed(table, tokens, num_computed)
            kv.check_invariants([first, second])
    assert kv.match_prefix(kv.open(b""), tokens).blocks == tuple(first.blocks[:2])
    kv.release(first)
    kv.check_invariants([second])
    kv.release(second)
    kv.check_invariants([])
    assert (kv.statistics().free, kv.statistics().cached) == (13, 3)


def test_a_released_table_finds_itself_again() -> None:
    """Preemption: everything is given up, and resuming is a prefix hit without hashing twice."""
    kv = manager()
    tokens = token_array(range(50))
    table = kv.open(b"")
    compute(kv, table, tokens)
    blocks, hashes = list(table.blocks), list(table.hashes)
    kv.release(table)
    hits = kv.match_prefix(table, tokens)
    assert list(hits.blocks) == blocks[:3]
    assert table.hashes == hashes
    assert kv.num_available_after(hits) == 13
    kv.adopt(table, hits)
    kv.check_invariants([table])
    assert kv.extend(table, 50) is not None
    kv.release(table)


def test_hits_take_from_what_is_available_only_if_nobody_holds_them() -> None:
    kv = manager(8)
    tokens = token_array(range(40))
    table = kv.open(b"")
    compute(kv, table, tokens)
    assert kv.num_available_after(kv.match_prefix(kv.open(b""), tokens)) == 5
    kv.release(table)
    assert kv.num_available_after(kv.match_prefix(kv.open(b""), tokens)) == 6


def test_bad_blocks_are_not_kept() -> None:
    kv = manager()
    tokens = token_array(range(40))
    table = kv.open(b"")
    compute(kv, table, tokens)
    kv.release(table, bad=True)
    assert cached_tokens(kv, tokens) == 0
    assert kv.statistics().free == 16


def test_clear_cache() -> None:
    kv = manager()
    tokens = token_array(range(40))
    compute(kv, kv.open(b""), tokens)
    assert kv.clear_cache() == 2
    assert cached_tokens(kv, tokens) == 0


def test_without_a_prefix_cache_nothing_is_found_and_nothing_kept() -> None:
    kv = KVManager.without_prefix_cache(8)
    tokens = token_array(range(40))
    table = kv.open(b"")
    compute(kv, table, tokens)
    assert cached_tokens(kv, tokens) == 0
    assert table.hashes == []
    kv.release(table)
    kv.check_invariants([])
    assert kv.statistics().free == 8


class ManagerMachine(RuleBasedStateMachine):
    """Requests over few distinct prompts and two tenants; every slot remembers which prefix wrote it."""

    @initialize(num_blocks=st.integers(2, 14), cached=st.booleans())
    def start(self, num_blocks: int, cached: bool) -> None:
        self.kv = manager(num_blocks) if cached else KVManager.without_prefix_cache(num_blocks)
        self.cached = cached
        self.open: list[tuple[BlockTable, object, list[int]]] = []  # (table, tokens, [num_computed])
        self.slots: dict[tuple[int, int], object] = {}
        self.in_flight: dict[Epoch, tuple[BlockTable, object, list[int]]] = {}  # Released, still read.

    def check_reads(self, table: BlockTable, tokens, num_computed: int) -> None:
        for position in range(num_computed):
            slot = (table.blocks[position // 16], position % 16)
            assert self.slots[slot] == (table.owner, bytes(tokens[: position + 1])), "foreign KV"

    @rule(
        salt=st.sampled_from([b"alice", b"bob"]),
        family=st.integers(0, 1),
        shared=st.integers(0, 40),
        length=st.integers(1, 60),
    )
    def begin(self, salt: bytes, family: int, shared: int, length: int) -> None:
        tokens = token_array([family] * min(shared, length) + [7] * max(0, length - shared))
        table = self.kv.open(salt)
        hits = self.kv.match_prefix(table, tokens)
        available = self.kv.num_available_after(hits)
        self.kv.adopt(table, hits)
        assert self.kv.pool.num_available == available
        assert hits.num_tokens < length
        self.check_reads(table, tokens, hits.num_tokens)
        self.open.append((table, tokens, [hits.num_tokens]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 30))
    def advance(self, data, count: int) -> None:
        table, tokens, computed = data.draw(st.sampled_from(self.open))
        start, end = computed[0], min(computed[0] + count, len(tokens))
        available = self.kv.pool.num_available
        new = self.kv.extend(table, end)
        assert (new is None) == (blocks_for(end) - blocks_for(start) > available)
        if new is None:
            return
        for position in range(start, end):
            slot = (table.blocks[position // 16], position % 16)
            self.slots[slot] = (table.owner, bytes(tokens[: position + 1]))
        self.kv.publish_computed(table, tokens, end)
        computed[0] = end

    @precondition(lambda self: self.open)
    @rule(data=st.data(), bad=st.booleans(), in_flight=st.booleans())
    def release(self, data, bad: bool, in_flight: bool) -> None:
        """Sometimes while a step still reads the blocks: its reader must find them unchanged to its end."""
        table, tokens, computed = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if in_flight:
            epoch = self.kv.pool.begin_epoch()
            self.in_flight[epoch] = (replace(table, blocks=list(table.blocks)), tokens, computed)
            self.kv.release(table, last_used=epoch, bad=bad)
        else:
            self.kv.release(table, bad=bad)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def end_step(self, data) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.in_flight)))
        del self.in_flight[epoch]
        self.kv.pool.end_epoch(epoch)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_invariants([table for table, _, _ in self.open])
            for table, tokens, computed in [*self.open, *self.in_flight.values()]:
                self.check_reads(table, tokens, computed[0])

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for table, _, _ in self.open:
                self.kv.release(table)
            self.kv.check_invariants([])
            assert self.kv.statistics().used == 0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # A busy machine is no reason to fail.
)

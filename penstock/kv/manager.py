"""Which request holds which KV blocks: block tables on top of the pool.

The life of a request's blocks:

    open -> match_prefix -> adopt -> (extend -> [step computes] -> publish_computed)* -> release

`release` may come at any point. After a preemption the same table goes through `match_prefix` again and
finds its own full blocks, if nobody needed the room. Tables grow token by token; this module knows
nothing of steps, budgets or tensors.
"""

from array import array

from penstock.kv.block_pool import NEVER, BlockPool, Epoch, PoolStatistics
from penstock.kv.hashing import PUBLIC, BlockHasher
from penstock.kv.prefix_cache import BlockTable, HashedPrefixCache, NoPrefixCache, PrefixCache
from penstock.types import BLOCK_TOKENS


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class KVManager:
    """Hands out one pool's blocks to block tables. Give it a `PrefixCache`, or `NoPrefixCache`."""

    __slots__ = ("_cache", "pool")

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self.pool, self._cache = pool, cache

    @classmethod
    def with_prefix_cache(cls, num_blocks: int, hasher: BlockHasher) -> "KVManager":
        """A manager over a new pool that finds equal prefixes again."""
        pool = BlockPool(num_blocks)
        return cls(pool, HashedPrefixCache(pool, hasher))

    @classmethod
    def without_prefix_cache(cls, num_blocks: int) -> "KVManager":
        """A manager over a new pool that computes everything anew."""
        return cls(BlockPool(num_blocks), NoPrefixCache())

    def open(self, salt: bytes, *, adapter: str = "", public_tokens: int = 0) -> BlockTable:
        """An empty table in the namespace `salt`, which is where its hits may come from.

        Whole blocks of the first `public_tokens` tokens are in the public region instead, which all tenants share.
        """
        assert salt != PUBLIC, "no tenant's salt"
        num_public = public_tokens // BLOCK_TOKENS
        root = self._cache.root(salt, adapter, public=num_public > 0)
        return BlockTable(owner=salt, root=root, num_public=num_public)

    def match_prefix(self, table: BlockTable, tokens: "array[int]") -> tuple[int, ...]:
        """Cached blocks for the longest prefix of `tokens`: a look, nothing is held yet.

        Covers at most `len(tokens) - 1` tokens. Valid until the next call that changes the pool.
        """
        return self._cache.match(table, tokens)

    def num_available_after(self, hits: tuple[int, ...]) -> int:
        """Blocks that could still be allocated once `hits` are adopted."""
        return self.pool.num_available - self.pool.num_idle(hits)

    def adopt(self, table: BlockTable, hits: tuple[int, ...]) -> None:
        """Start an empty table with the blocks that `match_prefix` found."""
        assert not table.blocks, "hits come first in a table"
        self.pool.acquire(hits)
        table.blocks.extend(hits)
        table.num_published = len(hits)

    def extend(self, table: BlockTable, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` tokens in all; returns the blocks that were added (often none).

        None, and nothing changes, if the pool has not enough blocks.
        """
        missing = blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return ()
        num_public = table.num_public_from(len(table.blocks))
        new = self.pool.allocate(missing, owner=table.owner, num_public=num_public)
        if new is not None:
            table.blocks.extend(new)
        return new

    def publish_computed(self, table: BlockTable, tokens: "array[int]", num_computed: int) -> None:
        """Let others hit the blocks that are full now that `num_computed` of `tokens` are stored."""
        if num_computed // BLOCK_TOKENS > table.num_published:
            self._cache.publish(table, tokens, num_computed)

    def release(self, table: BlockTable, *, last_used: Epoch = NEVER, bad: bool = False) -> None:
        """Give every block of the table back; full ones stay cached unless their content is `bad`.

        None of them is reused before the epoch that used them last is over.
        """
        if bad:
            self.pool.forget(table.blocks)
        self.pool.hold(table.blocks, last_used)
        self.pool.free(table.blocks)
        table.blocks.clear()
        table.num_published = 0

    def clear_cache(self) -> int:
        """Forget every cached prefix; see `BlockPool.clear_cache`."""
        return self.pool.clear_cache()

    def statistics(self) -> PoolStatistics:
        """The pool's gauges and counters."""
        return self.pool.statistics()

    def check_invariants(self, tables: "list[BlockTable]") -> None:
        """Assert that `tables` (all that are open) hold exactly what the pool thinks is held."""
        self.pool.check_invariants()
        held = [0] * self.pool.num_blocks
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), "a block is twice in one table"
            assert table.num_published <= len(table.blocks), "published more than it holds"
            for index, block in enumerate(table.blocks):
                held[block] += 1
                assert self.pool.owner(block) == table.owner_of(index), (
                    f"block {block} is another namespace's"
                )
        for block, count in enumerate(held):
            assert self.pool.num_references(block) == count, f"block {block}: references do not add up"

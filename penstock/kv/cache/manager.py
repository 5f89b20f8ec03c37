"""Which request holds which KV blocks: block tables on top of the pool.

The life of a request's blocks:

    open -> match_prefix -> adopt -> (extend -> [step computes] -> publish_computed)* -> release
                              |          ^
                              +- awaits -+  parts of the prefix are in host memory: `finish_copies` says when
                                            they are here

`release` may come at any point. After a preemption the same table goes through `match_prefix` again and
finds its own full blocks, unless the memory was needed. Tables grow token by token; this module knows
nothing of steps, budgets or tensors.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.errors import NamespaceBreach
from penstock.kv.cache.block_pool import NEVER, BlockPool, Epoch, PoolStatistics
from penstock.kv.cache.host_tier import Copied, Copies, HostLimits, HostTier
from penstock.kv.hashing import PUBLIC, BlockHash, BlockHasher
from penstock.types import BLOCK_TOKENS

# Whether finished work is found again: the prefix cache, or none. Chosen once, where things are wired.
#
# Both sides know block tables, tokens and the pool; neither knows requests, steps or tensors.


@dataclass(slots=True, eq=False)
class BlockTable:
    """Which blocks hold one request's KV: token `i` is in `blocks[i // 16]`, at offset `i % 16`.

    blocks   | hit | hit | own, named | own | own (partial) |
             |<-- num_published ----->|
    hashes   | h0  | h1  | h2         | h3  |                 kept over a preemption
    owner    | PUBLIC    | owner                            |
             |num_public>|
    """

    owner: bytes
    """The namespace (tenant salt) that the request belongs to."""
    root: BlockHash
    """The parent of the first block's hash."""
    num_public: int = 0
    """Leading blocks in the public region: all prompts with the same beginning share them."""
    adapter: str = ""
    """The name of the request's adapter in events."""
    blocks: list[int] = field(default_factory=list[int])
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    num_published: int = 0
    """Leading blocks that are full and were offered to the cache."""
    clears: int = 0
    """How often the cache had been cleared when the table was empty."""
    awaits: set[int] = field(default_factory=set[int])
    """Host slots whose content is still on its way into `blocks`."""
    broken: bool = False
    """One of those copies failed: the table can only be released."""

    def owner_of(self, index: int) -> bytes:
        """The namespace of the block at `index`."""
        return PUBLIC if index < self.num_public else self.owner

    def num_public_from(self, index: int) -> int:
        """How many blocks from `index` on are public."""
        left = self.num_public - index
        return left if left > 0 else 0


ABSENT = -1
"""In a `PrefixMatch`: no device block holds this part of the prefix."""


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """The longest prefix whose KV exists somewhere, block by block; nothing is held yet.

    blocks   | 7 (cached) | 3 (cached) | ABSENT | ABSENT | 9 (being loaded) | 4 (cached) |
    loads                                 slot 5   slot 0
    awaits                                                   slot 2
    """

    blocks: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    """Host slots with the content of the `ABSENT` blocks, in order."""
    awaits: tuple[int, ...] = ()
    """Host slots that are being loaded into blocks of this match for another request."""

    @property
    def num_present(self) -> int:
        """Blocks of the match that are on the device; the others are allocated by `adopt`."""
        return len(self.blocks) - len(self.loads)

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def num_host_tokens(self) -> int:
        """Of those, what comes out of host memory."""
        return (len(self.loads) + len(self.awaits)) * BLOCK_TOKENS


class PrefixCache(Protocol):
    """Finds computed blocks again."""

    def root(self, salt: bytes, adapter: str, *, public: bool) -> BlockHash:
        """Where a request's hash chain starts: in the public region, or in its tenant's namespace."""
        ...

    def match(self, table: BlockTable, tokens: "array[int]", num_tokens_max: int) -> PrefixMatch:
        """The longest known prefix of `tokens`, of at most so many tokens."""
        ...

    def publish(self, table: BlockTable, tokens: "array[int]", num_computed: int) -> None:
        """Offer the table's full blocks, up to `num_computed` tokens, to later requests."""
        ...


class HashedPrefixCache:
    """Blocks are found by their chained hash, on the device or in host memory."""

    __slots__ = ("_hasher", "_host", "_pool")

    def __init__(self, pool: BlockPool, hasher: BlockHasher, host: HostTier) -> None:
        self._pool, self._hasher, self._host = pool, hasher, host

    def root(self, salt: bytes, adapter: str, *, public: bool) -> BlockHash:
        """See `BlockHasher.root_of`."""
        return self._hasher.root_of(salt=salt, adapter=adapter, num_public=int(public))

    def match(self, table: BlockTable, tokens: "array[int]", num_tokens_max: int) -> PrefixMatch:
        """Look block by block, on the device as far as that goes, then wherever the next one is."""
        num_blocks = num_tokens_max // BLOCK_TOKENS
        self._hash(table, tokens, num_blocks)
        hashes = table.hashes[:num_blocks]
        hits = self._pool.lookup(hashes, owner=table.owner)
        assert len(hits) <= num_blocks, "more was found than was asked for"
        if len(hits) == num_blocks or not self._host.limits.num_slots:
            return PrefixMatch(hits)
        return self._match_further(hits, hashes[len(hits) :], table.owner)

    def _match_further(self, hits: tuple[int, ...], hashes: list[BlockHash], owner: bytes) -> PrefixMatch:
        """Continue after device hits: from here on blocks may be on the device or the host."""
        blocks, loads, awaits = list(hits), list[int](), list[int]()
        for block_hash in hashes:
            if here := self._pool.lookup((block_hash,), owner=owner):
                blocks += here
            elif found := self._host.find(block_hash, owner=owner):
                blocks.append(ABSENT if found.block is None else found.block)
                (loads if found.block is None else awaits).append(found.slot)
            else:
                break
        assert blocks.count(ABSENT) == len(loads), "what is on no device is loaded"
        return PrefixMatch(tuple(blocks), tuple(loads), tuple(awaits))

    def publish(self, table: BlockTable, tokens: "array[int]", num_computed: int) -> None:
        """Name every block that became full since the last call."""
        num_full = num_computed // BLOCK_TOKENS
        assert table.num_published <= num_full <= len(table.blocks), (
            "full blocks of the table are published once"
        )
        self._hash(table, tokens, num_full)
        first = table.num_published
        if self._pool.publish_new(table.blocks[first:num_full], table.hashes[first:num_full]):
            self._announce(table, tokens, first, num_full)
            table.num_published = num_full
            return
        for index in range(first, num_full):
            if not self._pool.publish(table.blocks[index], table.hashes[index]):
                self._announce(table, tokens, first, index)
                first = index + 1
        self._announce(table, tokens, first, num_full)
        table.num_published = num_full

    def _announce(self, table: BlockTable, tokens: "array[int]", first: int, end: int) -> None:
        """Tell who listens that these blocks can be hit: those of the public region by themselves."""
        assert first <= end <= len(table.hashes), "only named blocks are announced"
        border = first if table.num_public <= first else min(table.num_public, end)
        name = table.adapter
        if first < border:
            self._pool.events.stored(table.hashes, first, border, tokens, owner=PUBLIC, adapter=name)
        if border < end:
            self._pool.events.stored(table.hashes, border, end, tokens, owner=table.owner, adapter=name)

    def _hash(self, table: BlockTable, tokens: "array[int]", num_blocks: int) -> None:
        """Extend the table's chain to `num_blocks`; what was hashed before is not hashed again."""
        if len(table.hashes) < num_blocks:
            owner, num_public = table.owner, table.num_public
            self._hasher.grow(
                table.hashes, tokens, num_blocks, root=table.root, owner=owner, num_public=num_public
            )
        assert len(table.hashes) >= num_blocks, "a hash for each of the blocks"


class NoPrefixCache:
    """Nothing is ever found again, and nothing is hashed."""

    __slots__ = ()

    def root(self, salt: bytes, adapter: str, *, public: bool) -> BlockHash:
        """No chain starts here."""
        return BlockHash(b"")

    def match(self, table: BlockTable, tokens: "array[int]", num_tokens_max: int) -> PrefixMatch:
        """Never a hit."""
        return PrefixMatch()

    def publish(self, table: BlockTable, tokens: "array[int]", num_computed: int) -> None:
        """Blocks stay private and are free again when released."""
        table.num_published = num_computed // BLOCK_TOKENS


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def _present(match: "PrefixMatch") -> Sequence[int]:
    """The blocks that it has on the device: nearly always all."""
    if ABSENT not in match.blocks:
        return match.blocks
    return [block for block in match.blocks if block != ABSENT]


class KVManager:
    """Hands out one pool's blocks to block tables. Give it a `PrefixCache`, or `NoPrefixCache`."""

    __slots__ = ("_cache", "_clears", "_waiting", "host", "pool")

    def __init__(self, pool: BlockPool, host: HostTier, cache: PrefixCache) -> None:
        self.pool, self.host, self._cache = pool, host, cache
        self._waiting: dict[int, list[BlockTable]] = {}  # By host slot: who awaits its content.
        self._clears = 0  # How often the cache was cleared.

    @classmethod
    def with_prefix_cache(
        cls, num_blocks: int, hasher: BlockHasher, host: HostLimits | None = None
    ) -> "KVManager":
        """A manager over a new pool that finds equal prefixes again, with a host tier if `host` gives it
        slots.
        """
        pool = BlockPool(num_blocks)
        tier = HostTier(pool, host or HostLimits())
        return cls(pool, tier, HashedPrefixCache(pool, hasher, tier))

    @classmethod
    def without_prefix_cache(cls, num_blocks: int) -> "KVManager":
        """A manager over a new, empty pool."""
        pool = BlockPool(num_blocks)
        return cls(pool, HostTier(pool, HostLimits()), NoPrefixCache())

    def open(
        self, salt: bytes, *, adapter: str = "", adapter_name: str = "", public_tokens: int = 0
    ) -> BlockTable:
        """An empty table in the namespace `salt`, which is where its hits may come from, and under the
        adapter of that digest, which events call by its name.

        Whole blocks of the first `public_tokens` tokens are in the public region instead, which all tenants
        share.

        Raises:
            NamespaceBreach: `salt` is the public region's own name.
        """
        if salt == PUBLIC:
            raise NamespaceBreach("the public region's name is no tenant's salt")
        num_public = public_tokens // BLOCK_TOKENS
        root = self._cache.root(salt, adapter, public=num_public > 0)
        return BlockTable(
            owner=salt, root=root, num_public=num_public, adapter=adapter_name, clears=self._clears
        )

    def match_prefix(
        self, table: BlockTable, tokens: "array[int]", num_tokens_max: int | None = None
    ) -> PrefixMatch:
        """The longest prefix of `tokens` that is known on the device or in host memory: a look, nothing is
        held yet.

        Covers at most `len(tokens) - 1` tokens, and `num_tokens_max` if that is less. Valid until the next
        call that changes anything here.
        """
        end = len(tokens) - 1
        return self._cache.match(table, tokens, end if num_tokens_max is None else min(end, num_tokens_max))

    def num_available_after(self, match: PrefixMatch) -> int:
        """Blocks that could still be allocated once the blocks that `match` has on the device are held.

        Those that `adopt` allocates for what must be loaded are not subtracted.
        """
        return self.pool.num_available - self.pool.num_idle(_present(match))

    def adopt(self, table: BlockTable, match: PrefixMatch) -> None:
        """Start an empty table with what `match_prefix` found, and ask for the part that must be loaded.

        There must be room for that part. `table.awaits` says what is still on its way: until it is empty, the
        table's blocks must not be read.
        """
        assert not table.blocks, "hits come first in a table"
        self.pool.acquire(_present(match))
        num_public = match.blocks[: table.num_public].count(ABSENT)
        new = self.pool.allocate(len(match.loads), owner=table.owner, num_public=num_public)
        assert new is not None, "there is no room for what must be loaded"
        fresh = iter(new)
        if new:
            table.blocks.extend([next(fresh) if block == ABSENT else block for block in match.blocks])
        else:
            table.blocks.extend(match.blocks)
        table.num_published = len(match.blocks)
        assert len(table.blocks) == len(match.blocks), "every block of the match has a place"
        assert next(fresh, None) is None, "every new block has a place"
        for slot, block in zip(match.loads, new, strict=True):
            self.host.load(slot, block)
        for slot in (*match.loads, *match.awaits):
            table.awaits.add(slot)
            self._waiting.setdefault(slot, []).append(table)

    def extend(self, table: BlockTable, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` tokens in all; returns the blocks that were added (often none).

        None, and nothing changes, if the pool has not enough blocks.
        """
        assert not table.awaits, "what is still loading is not extended"
        missing = blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return ()
        num_public = table.num_public_from(len(table.blocks))
        new = self.pool.allocate(missing, owner=table.owner, num_public=num_public)
        if new is not None:
            table.blocks.extend(new)
        return new

    def publish_computed(self, table: BlockTable, tokens: "array[int]", num_computed: int) -> None:
        """Let others hit the blocks that are full now that `num_computed` of `tokens` are stored.

        Nothing of a table that held blocks when the cache was cleared: what was computed before may be of no
        use since.
        """
        if num_computed // BLOCK_TOKENS > table.num_published and table.clears == self._clears:
            self._cache.publish(table, tokens, num_computed)

    def release(
        self, table: BlockTable, *, last_used: Epoch = NEVER, bad: bool = False, preempted: bool = False
    ) -> None:
        """Give every block of the table back; full ones stay cached unless their content is `bad`.

        None of them is reused before the epoch that used them last is over. A block that stays is stored in
        host memory when it has been idle for a while, or at once if the request was `preempted`: others are
        about to take its blocks.
        """
        self._stop_waiting(table)
        if bad:
            self.host.forget(table.hashes[: table.num_published])
            self.pool.forget(table.blocks)
        self.pool.hold(table.blocks, last_used)
        self.pool.free(table.blocks)
        self.host.offer(table.blocks, urgent=preempted)
        table.blocks.clear()
        assert not table.awaits, "nothing of it is on its way"
        table.num_published, table.clears = 0, self._clears

    def take_copies(self) -> Copies:
        """The copies between device and host to start now; each is answered by one entry of
        `finish_copies`.
        """
        return self.host.take_copies()

    def finish_copies(self, copied: Iterable[Copied]) -> None:
        """Take in copies that ended. Tables that waited for one that failed are `broken`."""
        for copy in copied:
            self.host.finish(copy)
            for table in self._waiting.pop(copy.slot, ()):
                assert copy.slot in table.awaits, f"slot {copy.slot} comes twice"
                table.awaits.remove(copy.slot)
                table.broken |= not copy.ok

    def clear_cache(self) -> int:
        """Forget every cached prefix, here and in host memory; see `BlockPool.clear_cache`."""
        self._clears += 1
        self.host.clear()
        return self.pool.clear_cache()

    def statistics(self) -> PoolStatistics:
        """The pool's gauges and counters."""
        return self.pool.statistics()

    def check_invariants(self, tables: "list[BlockTable]") -> None:
        """Assert that `tables` (all that are open) hold exactly what the pool thinks is held."""
        self.pool.check_invariants()
        self.host.check_invariants()
        held = [0] * self.pool.num_blocks
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), "a block is twice in one table"
            assert table.num_published <= len(table.blocks), "published more than it holds"
            for index, block in enumerate(table.blocks):
                held[block] += 1
                assert self.pool.owner(block) == table.owner_of(index), (
                    f"block {block} is another namespace's"
                )
        for block in self.host.loading_blocks():
            held[block] += 1
        waiting = {(slot, id(table)) for slot, tables in self._waiting.items() for table in tables}
        assert waiting == {(slot, id(table)) for table in tables for slot in table.awaits}, "a wait is lost"
        for block, count in enumerate(held):
            assert self.pool.num_references(block) == count, f"block {block}: references do not add up"

    def _stop_waiting(self, table: BlockTable) -> None:
        """Loads that only this table awaits need not begin any more."""
        for slot in sorted(table.awaits):
            waiting = self._waiting[slot]
            waiting.remove(table)
            if not waiting:
                del self._waiting[slot]
                self.host.cancel(slot)
        table.awaits.clear()
        table.broken = False

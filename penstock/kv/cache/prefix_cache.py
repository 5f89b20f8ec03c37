"""Whether finished work is found again: the prefix cache, or none. Chosen once, where things are wired.

Both sides know block tables, tokens and the pool; neither knows requests, steps or tensors.
"""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from penstock.kv.cache.block_pool import BlockPool
from penstock.kv.cache.host_tier import HostTier
from penstock.kv.hashing import PUBLIC, BlockHash, BlockHasher
from penstock.types import BLOCK_TOKENS


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
        return max(0, self.num_public - index)


ABSENT = -1
"""In a `PrefixMatch`: no device block holds this part of the prefix."""


@dataclass(slots=True, frozen=True)
class PrefixMatch:
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
        border = min(max(first, table.num_public), end)
        if first < border:
            self._pool.events.stored(table.hashes, first, border, tokens, owner=PUBLIC)
        if border < end:
            self._pool.events.stored(table.hashes, border, end, tokens, owner=table.owner)

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

"""Whether finished work is found again: the prefix cache, or none. Chosen once, where things are wired.

Both sides know block tables, tokens and the pool; neither knows requests, steps or tensors.
"""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from penstock.kv.block_pool import BlockPool
from penstock.kv.hashing import PUBLIC, BlockHash, BlockHasher, token_bytes
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
    """Leading blocks in the public region: whoever begins with the same tokens there shares them."""
    blocks: list[int] = field(default_factory=list[int])
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    num_published: int = 0
    """Leading blocks that are full and were offered to the cache."""

    def owner_of(self, index: int) -> bytes:
        """The namespace of the block at `index`."""
        return PUBLIC if index < self.num_public else self.owner

    def num_public_from(self, index: int) -> int:
        """How many blocks from `index` on are public."""
        return max(0, self.num_public - index)


class PrefixCache(Protocol):
    """Finds computed blocks again."""

    def root(self, salt: bytes, adapter: str, *, public: bool) -> BlockHash:
        """Where a request's hash chain starts: in the public region, or in its tenant's namespace."""
        ...

    def match(self, table: BlockTable, tokens: "array[int]") -> tuple[int, ...]:
        """The blocks of the longest cached prefix of `tokens`, always leaving at least one token to compute."""
        ...

    def publish(self, table: BlockTable, tokens: "array[int]", num_computed: int) -> None:
        """Offer the table's full blocks, up to `num_computed` tokens, to later requests."""
        ...


class HashedPrefixCache:
    """Blocks are found by their chained hash; the pool keeps them until it needs the room."""

    __slots__ = ("_hasher", "_pool")

    def __init__(self, pool: BlockPool, hasher: BlockHasher) -> None:
        self._pool, self._hasher = pool, hasher

    def root(self, salt: bytes, adapter: str, *, public: bool) -> BlockHash:
        """See `BlockHasher.root` and `BlockHasher.public_root`."""
        if public:
            return self._hasher.public_root(adapter=adapter)
        return self._hasher.root(salt=salt, adapter=adapter)

    def match(self, table: BlockTable, tokens: "array[int]") -> tuple[int, ...]:
        """A hit never covers the last known token: it is computed again, so that there are logits to sample."""
        num_blocks = (len(tokens) - 1) // BLOCK_TOKENS
        self._hash(table, tokens, num_blocks)
        return self._pool.lookup(table.hashes[:num_blocks], owner=table.owner)

    def publish(self, table: BlockTable, tokens: "array[int]", num_computed: int) -> None:
        """Name every block that became full since the last call."""
        num_full = num_computed // BLOCK_TOKENS
        self._hash(table, tokens, num_full)
        first = table.num_published
        for index in range(first, num_full):
            if not self._pool.publish(table.blocks[index], table.hashes[index]):
                self._announce(table, tokens, first, index)
                first = index + 1
        self._announce(table, tokens, first, num_full)
        table.num_published = num_full

    def _announce(self, table: BlockTable, tokens: "array[int]", first: int, end: int) -> None:
        """Tell who listens that these blocks can be hit: those of the public region by themselves."""
        border = min(max(first, table.num_public), end)
        if first < border:
            self._pool.events.stored(table.hashes, first, border, tokens, owner=PUBLIC)
        if border < end:
            self._pool.events.stored(table.hashes, border, end, tokens, owner=table.owner)

    def _hash(self, table: BlockTable, tokens: "array[int]", num_blocks: int) -> None:
        """Extend the table's chain to `num_blocks`; what was hashed before is not hashed again."""
        hashes, border = table.hashes, table.num_public
        for end in (min(border, num_blocks), num_blocks):
            if (done := len(hashes)) < end:
                parent = hashes[-1] if hashes else table.root
                if done and done == border:
                    parent = self._hasher.enter(parent, salt=table.owner)
                new = token_bytes(tokens[done * BLOCK_TOKENS : end * BLOCK_TOKENS])
                hashes += self._hasher.extend(parent, new)


class NoPrefixCache:
    """Nothing is ever found again, and nothing is hashed."""

    __slots__ = ()

    def root(self, salt: bytes, adapter: str, *, public: bool) -> BlockHash:
        """No chain starts here."""
        return BlockHash(b"")

    def match(self, table: BlockTable, tokens: "array[int]") -> tuple[int, ...]:
        """Never a hit."""
        return ()

    def publish(self, table: BlockTable, tokens: "array[int]", num_computed: int) -> None:
        """Blocks stay private and are free again when released."""
        table.num_published = num_computed // BLOCK_TOKENS

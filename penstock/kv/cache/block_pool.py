"""Counts the KV blocks: which are free, which are held, which are only kept because they may be hit again.

A block is in exactly one of four states:

    free      holds nothing worth keeping             --allocate-->   used
    used      some request reads it (references > 0)  --free-->       draining, cached or free
    draining  given up, but an epoch holds it still   --end_epoch-->  cached if it has a hash, else free
    cached    no reader, its hash may be hit          --acquire-->  used    or evicted by --allocate-->  used

An *epoch* is anything that touches blocks for a while after it was decided: a step in flight, a copy. A block
that an epoch holds is not allocated again before `end_epoch`, even if it is freed meanwhile; a hit on its
hash is fine, since its content stays. Epochs may end in any order, and several may hold one block. (The idea
is epoch-based reclamation; Fraser, "Practical lock-freedom", 2004.)

The pool knows blocks only by number: not what is in them, and not which request holds which.
Every operation is O(1) per block, and no order depends on a set or on hashing.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NewType

import msgspec

from penstock.errors import NamespaceBreach
from penstock.kv.cache.idle_blocks import IdleBlocks
from penstock.kv.events import NO_KV_EVENTS, KVEventSink
from penstock.kv.hashing import PUBLIC, BlockHash

Epoch = NewType("Epoch", int)
"""Counts up from 1; 0 is the epoch of what was never touched, and is always over."""

NEVER = Epoch(0)


class PoolStatistics(msgspec.Struct, frozen=True, gc=False):
    """Blocks by state (they add up to `total`), and counters since the start."""

    total: int
    free: int
    used: int
    cached: int
    draining: int
    evictions: int
    """Cached blocks that were taken for new content."""
    duplicates: int
    """Blocks that were computed while an equal one was already named: kept private."""


@lru_cache(maxsize=8)
def _numbers(num_blocks: int) -> tuple[int, ...]:
    """The numbers of blocks, the highest first, as objects that all pools of a process share: simulations
    have a thousand.
    """
    return tuple(range(num_blocks - 1, -1, -1))


class BlockPool:
    """The blocks `0 .. num_blocks - 1` of one KV cache."""

    __slots__ = (
        "_block_of",
        "_cached",
        "_duplicates",
        "_evictions",
        "_free",
        "_hash_of",
        "_held_by",
        "_last_epoch",
        "_num_draining",
        "_num_holds",
        "_owner",
        "_publication",
        "_publications",
        "_references",
        "_used_by",
        "events",
        "num_blocks",
    )

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.events: KVEventSink = NO_KV_EVENTS
        """Receives the names that appear and vanish. May be replaced at any time."""
        self._free = list(_numbers(num_blocks))  # A stack: the last freed is the first taken.
        self._cached = IdleBlocks(num_blocks)
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._references = [0] * num_blocks
        self._owner: list[bytes] = [b""] * num_blocks
        self._used_by: dict[bytes, int] = {}  # Used blocks by owner; no zeros.
        self._held_by: dict[Epoch, list[int]] = {}  # Open epochs, and the blocks that each holds.
        self._num_holds: dict[int, int] = {}  # How many of those hold a block; no zeros.
        self._num_draining = 0
        self._last_epoch = NEVER
        self._publication = array("Q", bytes(8 * num_blocks))
        self._publications = 0
        self._evictions = 0
        self._duplicates = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int, *, owner: bytes = b"", num_public: int = 0) -> tuple[int, ...] | None:
        """Take `count` blocks for new content, evicting cached ones when no free one is left.

        None, and nothing changes, if there are not that many. `owner` is the namespace (the tenant's
        salt) whose tokens the blocks will hold; the first `num_public` of them are everybody's.
        """
        if not count:
            return ()
        if (blocks := self._take(count)) is None:
            return None
        references, owners = self._references, self._owner
        for block in blocks:
            references[block] = 1
            owners[block] = owner
        if num_public:
            for block in blocks[:num_public]:
                owners[block] = PUBLIC
            num_public = num_public if num_public < count else count
            self._count_used(PUBLIC, num_public)
        self._count_used(owner, count - num_public)
        return tuple(blocks)

    def allocate_each(self, owners: Sequence[bytes]) -> Sequence[int]:
        """`allocate` one block for each of these namespaces, one after the other. There must be as many."""
        blocks = self._take(len(owners))
        assert blocks is not None, "there were blocks enough"
        references, owner_of, used_by = self._references, self._owner, self._used_by
        for block, owner in zip(blocks, owners, strict=True):
            references[block] = 1
            owner_of[block] = owner
            used_by[owner] = used_by.get(owner, 0) + 1
        return blocks

    def lookup(self, hashes: Iterable[BlockHash], *, owner: bytes = b"") -> tuple[int, ...]:
        """The blocks of the longest known prefix of a hash chain.

        Changes nothing: `acquire` them to hold them.

        Raises:
            NamespaceBreach: one of them is another owner's.
        """
        hits: list[int] = []
        block_of, owners = self._block_of.get, self._owner
        for block_hash in hashes:
            block = block_of(block_hash)
            if block is None:
                break
            # The salt is part of the hash, so this can only fail if a tenant's wall is broken.
            if owners[block] != owner and owners[block] != PUBLIC:
                raise NamespaceBreach(f"block {block} is in another namespace")
            hits.append(block)
        return tuple(hits)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have no holder, no epoch either: acquiring those takes from
        `num_available`.
        """
        references, holds = self._references, self._num_holds
        return len([block for block in blocks if not references[block] and block not in holds])

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `lookup` found: one reference more for each."""
        for block in blocks:
            self._references[block] += 1
            if self._references[block] > 1:
                continue
            self._count_used(self._owner[block], 1)
            if block in self._num_holds:
                self._num_draining -= 1
            else:
                self._cached.remove(block)

    def publish(self, block: int, block_hash: BlockHash) -> bool:
        """Name a used block whose content is now complete, so that others may hit it.

        False if an equal block is already named (two requests computed it at the same time): this one
        stays private to its holder, and is free again when released.
        """
        assert self._references[block], f"block {block} is published but has no holder"
        if block_hash in self._block_of:
            self._duplicates += self._block_of[block_hash] != block
            return self._block_of[block_hash] == block
        assert self._hash_of[block] is None, f"block {block} already has another name"
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._publications += 1
        self._publication[block] = self._publications
        return True

    def publish_new(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> bool:
        """`publish` for consecutive blocks of one chain; False, and nothing changes, if one of the names is
        taken.
        """
        block_of, names = self._block_of, self._hash_of
        if not block_of.keys().isdisjoint(hashes):
            return False
        assert all(map(self._references.__getitem__, blocks)), "a block is published but has no holder"
        assert not any(map(names.__getitem__, blocks)), "a block already has another name"
        self._publications = number = self._publications + 1
        publication = self._publication
        for block, block_hash in zip(blocks, hashes, strict=True):
            names[block], publication[block] = block_hash, number
        block_of.update(zip(hashes, blocks, strict=True))
        return True

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each of a request's blocks, given head first.

        They are put away tail first: the head of a prompt is likelier to be hit and useless parts go
        first, because a tail cannot be hit without its head.
        """
        references, owners, holds, names = self._references, self._owner, self._num_holds, self._hash_of
        cached, put_free = list[int](), self._free.append
        owner, num_used = b"", 0  # Neighbours mostly have one owner: they are counted together.
        for block in reversed(blocks):
            count = references[block]
            assert count, f"block {block} is freed twice"
            references[block] = count - 1
            if count > 1:
                continue
            if (its_owner := owners[block]) is not owner and its_owner != owner:
                self._count_used(owner, -num_used)
                owner, num_used = its_owner, 0
            num_used += 1
            if block in holds:
                self._num_draining += 1
            elif names[block] is None:
                put_free(block)
            else:
                cached.append(block)
        self._count_used(owner, -num_used)
        self._cached.append(cached)

    def begin_epoch(self) -> Epoch:
        """Something starts that will touch blocks; it must be ended once."""
        self._last_epoch = epoch = Epoch(self._last_epoch + 1)
        self._held_by[epoch] = []
        return epoch

    def hold(self, blocks: Sequence[int], epoch: Epoch) -> None:
        """Give none of `blocks` (head first, each with a holder) to another request before `epoch` is over.

        Nothing to do if it is over already. Call it before `free`; blocks that stay with their request need
        no hold, so a step costs nothing here for blocks that stay in use.
        """
        assert epoch <= self._last_epoch, f"epoch {epoch} has not begun"
        held = self._held_by.get(epoch)
        if held is None:
            return
        for block in reversed(blocks):  # They are put away in this order: see `free`.
            assert self._references[block], f"block {block} is held by an epoch but has no other holder"
            self._num_holds[block] = self._num_holds.get(block, 0) + 1
            held.append(block)

    def end_epoch(self, epoch: Epoch) -> int:
        """The holder of `epoch` touches nothing any more. Returns how many blocks may be reused now."""
        reusable = 0
        for block in self._held_by.pop(epoch):
            self._num_holds[block] -= 1
            if self._num_holds[block]:
                continue
            del self._num_holds[block]
            if not self._references[block]:
                self._num_draining -= 1
                self._put_away(block)
                reusable += 1
        return reusable

    @property
    def num_draining(self) -> int:
        """Blocks held by epochs alone: they will be available without a preemption."""
        return self._num_draining

    def demote(self, block: int) -> None:
        """Make a cached block the first to be evicted: it is cheaper to get back than the others."""
        if block in self._cached:
            self._cached.put_first(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Take the names off `blocks` (their content is bad): holders keep them, no new request hits them."""
        for block in blocks:
            if (name := self._unname(block)) is not None:
                self.events.removed((name,))

    def clear_cache(self) -> int:
        """Forget every name (the weights changed, or an operator asked). Returns how many there were."""
        named = list(self._block_of.values())
        for block in named:
            self._unname(block)
        self.events.cleared()
        return len(named)

    def names(self) -> tuple[BlockHash, ...]:
        """Every name that can be hit now, in the order in which they were given."""
        return tuple(self._block_of)

    @property
    def num_used(self) -> int:
        """Blocks that tables hold."""
        return self.num_blocks - len(self._free) - len(self._cached) - self._num_draining

    def statistics(self) -> PoolStatistics:
        """Gauges and counters, O(1)."""
        free, cached = len(self._free), len(self._cached)
        return PoolStatistics(
            total=self.num_blocks,
            free=free,
            used=self.num_used,
            cached=cached,
            draining=self._num_draining,
            evictions=self._evictions,
            duplicates=self._duplicates,
        )

    def check_invariants(self) -> None:
        """Assert what must always hold: every block in one state, names in step both ways. O(num_blocks)."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, "free and cached"
        assert not free & used, "free and used"
        assert not cached & used, "cached and used"
        draining = self._num_holds.keys() - used
        assert not draining & (free | cached), "a block may be reused while an epoch holds it"
        assert len(draining) == self._num_draining, "draining blocks are miscounted"
        assert len(free) + len(cached) + len(used) + len(draining) == self.num_blocks, "a block is lost"
        holds = Counter(block for held in self._held_by.values() for block in held)
        assert holds == self._num_holds, "holds do not add up"
        used_by = Counter(self._owner[block] for block in used)
        assert used_by == self._used_by, "blocks used by owner do not add up"
        assert all(count >= 0 for count in self._references), "negative references"
        named = {block: name for name, block in self._block_of.items()}
        assert len(named) == len(self._block_of), "a block has two names"
        for block, name in enumerate(self._hash_of):
            assert named.get(block) == name, f"block {block} and its name disagree"
            assert bool(self._publication[block]) == (name is not None), f"block {block}: name without number"
            assert name is None or block not in free, f"free block {block} has a name"
            assert name is not None or block not in cached, f"cached block {block} has no name"

    def num_references(self, block: int) -> int:
        """How many requests hold `block`."""
        return self._references[block]

    def name(self, block: int) -> BlockHash | None:
        """The hash under which `block` may be hit."""
        return self._hash_of[block]

    def publication(self, block: int) -> int:
        """A number that is new with every `publish`; 0 without a name.

        While it lasts, so does the content.
        """
        return self._publication[block]

    def num_used_by(self, owner: bytes) -> int:
        """How many blocks of the namespace are used, each counted once."""
        return self._used_by.get(owner, 0)

    def owner(self, block: int) -> bytes:
        """The namespace whose tokens `block` holds (of its last holder, if it is free)."""
        return self._owner[block]

    def _take(self, count: int) -> list[int] | None:
        """So many blocks that nobody holds, the free ones first; None, and nothing changes, if there are
        fewer.
        """
        free = self._free
        left = len(free) - count
        if left >= 0:
            blocks = free[left:]
            del free[left:]
            blocks.reverse()
            return blocks
        if count > self.num_available:
            return None
        blocks = [*reversed(free), *self._evict(-left)]
        free.clear()
        return blocks

    def _count_used(self, owner: bytes, change: int) -> None:
        if not change:
            return
        count = self._used_by.get(owner, 0) + change
        if count:
            self._used_by[owner] = count
        else:
            del self._used_by[owner]

    def _put_away(self, block: int) -> None:
        """Make a block without holders available."""
        if self._hash_of[block] is None:
            self._free.append(block)
        else:
            self._cached.append((block,))

    def _evict(self, count: int) -> list[int]:
        """Take the names off the `count` least recently used cached blocks, which are then in no state."""
        evicted, gone = self._cached.take(count), list[BlockHash]()
        block_of, names, publication = self._block_of, self._hash_of, self._publication
        for block in evicted:
            name = names[block]
            assert name is not None, f"cached block {block} has no name"
            del block_of[name]
            names[block], publication[block] = None, 0
            gone.append(name)
        self.events.removed(gone)
        self._evictions += count
        return evicted

    def _unname(self, block: int) -> BlockHash | None:
        """Take the name off a block, and return it; without one, a block without holders is free."""
        name = self._hash_of[block]
        if name is not None:
            del self._block_of[name]
            self._hash_of[block] = None
            self._publication[block] = 0
            if block in self._cached:
                self._cached.remove(block)
                self._free.append(block)
        return name

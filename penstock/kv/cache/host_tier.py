"""The host tier: where the KV of idle sessions and of preempted requests waits in host memory.

It has `num_slots` slots, each as large as one device block with all its layers. A slot is in one of four
states:

    FREE --store--> STORING --done--> STORED --load--> LOADING --done--> STORED
      ^                |                 |                |
      +--- failed, or the block changed  +--- evicted ----+--- failed, or forgotten meanwhile

A hash may be resident on the device, here, or in both. The stored blocks: blocks that were not used for
`idle_ns`, and the full blocks of a preempted request at once, tails first, because tails are evicted first.

- A store holds nothing. The block may be evicted and written again while it is copied: then its publication
  (`BlockPool.publication`) is another one at the end, and the torn copy is dropped. So stores never take
  memory away from running requests.
- A load holds its device block until the copy is done, whatever becomes of the request that asked. When it is
  done the block is published, so it is an ordinary cached block from then on.

The tier decides which blocks are copied where. It copies nothing itself, and knows no tables, requests or
clocks: `tick` tells it the time. With no slots it is switched off.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import NamespaceBreach
from penstock.kv.cache.block_pool import BlockPool
from penstock.kv.events import DEVICE, HOST
from penstock.kv.hashing import PUBLIC, BlockHash


class Slot(enum.Enum):
    """Where a host slot stands. See `TRANSITIONS`."""

    FREE = "free"  # Holds nothing.
    STORING = "storing"  # A device block is being copied into it.
    STORED = "stored"  # Holds the content of its hash; may be evicted.
    LOADING = "loading"  # Its content is wanted on the device: the copy is queued or under way.


TRANSITIONS: dict[Slot, tuple[Slot, ...]] = {
    Slot.FREE: (Slot.STORING,),
    Slot.STORING: (Slot.STORED, Slot.FREE),
    Slot.STORED: (Slot.LOADING, Slot.FREE),
    Slot.LOADING: (Slot.STORED, Slot.FREE),
}


class BlockCopy(NamedTuple):
    """One block to copy between the device and the host; the direction is where it stands in the plan."""

    block: int
    slot: int


class Copied(NamedTuple):
    """A copy that ended. A slot has one copy at a time, so the slot alone names it."""

    slot: int
    ok: bool = True


class Copies(NamedTuple):
    """The copies to make from now on."""

    out: tuple[BlockCopy, ...] = ()
    """Device to host."""
    into: tuple[BlockCopy, ...] = ()
    """Host to device."""


NO_COPIES = Copies()


class Found(NamedTuple):
    """A hash that the tier can bring back."""

    slot: int
    block: int | None
    """The device block into which it is being loaded already."""


@dataclass(slots=True, frozen=True)
class HostLimits:
    """The bounds of the tier."""

    num_slots: int = 0
    idle_ns: int = 30_000_000_000
    """A block that was not used for this long is stored."""
    loads_max: int = 256
    """Copies to the device under way at once."""
    stores_max: int = 32
    """Copies to the host under way at once."""


@dataclass(slots=True)
class HostStatistics:
    """Gauges (the first two), and counters since the start."""

    total: int = 0
    used: int = 0
    """Slots that are not free."""
    stores: int = 0
    """Blocks that arrived in host memory."""
    loads: int = 0
    """Blocks that came back."""
    evictions: int = 0
    """Stored blocks that were dropped for newer ones."""
    discarded: int = 0
    """Copies to the host that were worth nothing at their end: the block had changed, or the copy failed."""
    failures: int = 0
    """Copies to the device that failed: those tokens are computed again."""


class HostTier:
    """The slots of one engine's host memory, and which blocks go there and come back.

    It tells the pool's event sink what can be had from here.
    """

    def __init__(self, pool: BlockPool, limits: HostLimits) -> None:
        self.limits = limits
        self._pool = pool
        count = limits.num_slots
        self._state = [Slot.FREE] * count
        self._hash_of: list[BlockHash | None] = [None] * count
        """None in a slot that is free, or whose content was forgotten during a copy."""
        self._owner = [b""] * count
        self._block = [0] * count
        """Where a copy comes from or goes to, while there is one."""
        self._publication = [0] * count
        """Of the block that is being stored."""
        self._slot_of: dict[BlockHash, int] = {}
        self._free = list(range(count - 1, -1, -1))
        self._stored: OrderedDict[int, None] = OrderedDict()  # Least recently used first.
        self._urgent: dict[int, int] = {}  # block -> publication: to store at once, in order.
        self._idle: OrderedDict[int, tuple[int, int]] = (
            OrderedDict()
        )  # block -> (due, publication), by due time.
        self._queued: dict[int, None] = {}  # Slots whose load was asked for but not handed out, in order.
        self._num_storing = self._num_loading = 0  # Copies that were handed out.
        self._now_ns = 0
        self._counts = HostStatistics(total=count)

    # --- what moves to the host -------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Tell the time."""
        self._now_ns = now_ns

    def offer(self, blocks: Sequence[int], *, urgent: bool) -> None:
        """A table released `blocks` (head first): store those that stay cached, at once or when they are
        idle.
        """
        if not self.limits.num_slots:
            return
        due_ns = self._now_ns + self.limits.idle_ns
        for block in reversed(blocks):
            publication = self._pool.publication(block)
            if not publication:
                continue
            self._idle[block] = (due_ns, publication)
            self._idle.move_to_end(block)
            if urgent:
                self._urgent[block] = publication

    @property
    def due_ns(self) -> int | None:
        """When the tier next has something to do by itself; None if it has not."""
        if self.busy or self._urgent:
            return self._now_ns
        for due_ns, _ in self._idle.values():
            return due_ns
        return None

    @property
    def busy(self) -> bool:
        """Whether copies are queued or under way."""
        return bool(self._num_storing or self._num_loading or self._queued)

    def take_copies(self) -> Copies:
        """The copies to start now. Each must be answered by one `finish`."""
        if not self.limits.num_slots:
            return NO_COPIES
        return Copies(tuple(self._take_stores()), tuple(self._take_loads()))

    def _take_stores(self) -> list[BlockCopy]:
        out: list[BlockCopy] = []
        for block, block_hash in self._due():
            if (slot := self._slot_of.get(block_hash)) is not None:
                self._touch(slot)
                continue
            slot = self._empty_slot()
            self._begin_store(slot, block, block_hash)
            out.append(BlockCopy(block, slot))
        return out

    def _due(self) -> Iterator[tuple[int, BlockHash]]:
        """Blocks to store now, as long as one more copy is allowed and finds a slot."""
        while self._num_storing < self.limits.stores_max and (self._free or self._stored):
            candidate = self._next_due()
            if candidate is None:
                return
            block, publication = candidate
            block_hash = self._pool.name(block)
            # Skip what was evicted since, and what is in use again: its release offers it again.
            if block_hash is None or self._pool.publication(block) != publication:
                continue
            if not self._pool.num_references(block):
                yield block, block_hash

    def _next_due(self) -> tuple[int, int] | None:
        """Take the next (block, publication) out of those that wait to be stored."""
        for block, publication in self._urgent.items():
            del self._urgent[block]
            return block, publication
        for block, (due_ns, publication) in self._idle.items():
            if due_ns > self._now_ns:
                return None
            del self._idle[block]
            return block, publication
        return None

    def _empty_slot(self) -> int:
        """A free slot, evicting the least recently used one if there is none. One of the two must exist."""
        if not self._free:
            self._counts.evictions += 1
            self._drop(next(iter(self._stored)))
        return self._free.pop()

    def _begin_store(self, slot: int, block: int, block_hash: BlockHash) -> None:
        self._move(slot, Slot.STORING)
        self._hash_of[slot], self._slot_of[block_hash] = block_hash, slot
        self._owner[slot] = self._pool.owner(block)
        self._block[slot], self._publication[slot] = block, self._pool.publication(block)
        self._num_storing += 1

    # --- what comes back --------------------------------------------------------------------------

    def find(self, block_hash: BlockHash, *, owner: bytes) -> Found | None:
        """Where a hash can be brought back from. Changes nothing.

        Raises:
            NamespaceBreach: it is another owner's.
        """
        slot = self._slot_of.get(block_hash)
        if slot is None or self._state[slot] is Slot.STORING:
            return None
        # The salt is part of the hash, so this can only fail if a tenant's wall is broken.
        if self._owner[slot] not in (owner, PUBLIC):
            raise NamespaceBreach(f"host slot {slot} belongs to another namespace")
        return Found(slot, self._block[slot] if self._state[slot] is Slot.LOADING else None)

    def load(self, slot: int, block: int) -> None:
        """Bring a slot that `find` found back into `block`, which the caller has allocated.

        Raises:
            NamespaceBreach: the two have different owners.
        """
        if self._pool.owner(block) != self._owner[slot]:
            raise NamespaceBreach(f"host slot {slot} belongs to another namespace")
        del self._stored[slot]
        self._move(slot, Slot.LOADING)
        self._block[slot] = block
        self._pool.acquire((block,))
        self._queued[slot] = None

    def cancel(self, slot: int) -> None:
        """No request waits for this load any more: cancel it unless it has begun."""
        if slot in self._queued:
            del self._queued[slot]
            self._pool.free((self._block[slot],))
            self._settle(slot)

    def _take_loads(self) -> list[BlockCopy]:
        room = self.limits.loads_max - self._num_loading
        slots = [slot for slot, _ in zip(self._queued, range(room), strict=False)]
        for slot in slots:
            del self._queued[slot]
        self._num_loading += len(slots)
        return [BlockCopy(self._block[slot], slot) for slot in slots]

    # --- how copies end ---------------------------------------------------------------------------

    def finish(self, copied: Copied) -> None:
        """Take in the end of one copy that `take_copies` gave out."""
        if self._state[copied.slot] is Slot.STORING:
            self._finish_store(copied)
        else:
            self._finish_load(copied)

    def _finish_store(self, copied: Copied) -> None:
        slot = copied.slot
        self._num_storing -= 1
        block, block_hash = self._block[slot], self._hash_of[slot]
        unchanged = self._pool.publication(block) == self._publication[slot]
        if not (copied.ok and unchanged and block_hash is not None):
            self._counts.discarded += 1
            self._drop(slot)
            return
        self._counts.stores += 1
        self._settle(slot)
        self._pool.demote(block)  # It can be brought back, so it is the cheapest one to lose.
        self._pool.events.copied(block_hash, medium=HOST)

    def _finish_load(self, copied: Copied) -> None:
        slot = copied.slot
        assert self._state[slot] is Slot.LOADING, f"slot {slot} was not being copied"
        assert slot not in self._queued, f"the copy of slot {slot} had not begun"
        self._num_loading -= 1
        block, block_hash = self._block[slot], self._hash_of[slot]
        if copied.ok:
            self._counts.loads += 1
            if block_hash is not None and self._pool.publish(block, block_hash):
                self._pool.events.copied(block_hash, medium=DEVICE)
        else:
            self._counts.failures += 1
        self._pool.free((block,))
        if copied.ok and block_hash is not None:
            self._settle(slot)
        else:
            self._drop(slot)

    # --- forgetting -------------------------------------------------------------------------------

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Drop these hashes (their content is bad).

        A slot that is being copied is free at the end of the copy.
        """
        for block_hash in hashes:
            slot = self._slot_of.get(block_hash)
            if slot is None:
                continue
            if self._state[slot] is Slot.STORED:
                self._drop(slot)
            else:
                self._unname(slot)

    def clear(self) -> None:
        """Forget everything, without an event: the caller, which clears all tiers, reports it once."""
        for slot in self._slot_of.values():
            self._hash_of[slot] = None
        self._slot_of.clear()
        for slot in list(self._stored):
            self._drop(slot)

    # --- slots ------------------------------------------------------------------------------------

    def _move(self, slot: int, state: Slot) -> None:
        """Change a slot's state along `TRANSITIONS`; anything else is a bug."""
        assert state in TRANSITIONS[self._state[slot]], f"slot {slot}: {self._state[slot]} -> {state}"
        self._state[slot] = state

    def _settle(self, slot: int) -> None:
        """The slot's content is good and at rest; a hash that was forgotten meanwhile leaves it free."""
        if self._hash_of[slot] is None:
            self._drop(slot)
            return
        self._move(slot, Slot.STORED)
        self._stored[slot] = None

    def _drop(self, slot: int) -> None:
        """Free a slot whatever it holds."""
        self._unname(slot)
        self._stored.pop(slot, None)
        self._move(slot, Slot.FREE)
        self._free.append(slot)

    def _unname(self, slot: int) -> None:
        block_hash = self._hash_of[slot]
        if block_hash is None:
            return
        del self._slot_of[block_hash]
        self._hash_of[slot] = None
        if self._state[slot] is not Slot.STORING:
            self._pool.events.removed((block_hash,), medium=HOST)

    def _touch(self, slot: int) -> None:
        """The slot's content was wanted just now: it is the last to be evicted."""
        if slot in self._stored:
            self._stored.move_to_end(slot)

    # --- looking in -------------------------------------------------------------------------------

    def statistics(self) -> HostStatistics:
        """Gauges and counters, O(1). Valid until the next call that changes something."""
        self._counts.used = self.limits.num_slots - len(self._free)
        return self._counts

    def names(self) -> tuple[BlockHash, ...]:
        """Every hash that can be brought back from here."""
        storing = Slot.STORING
        return tuple(name for name, slot in self._slot_of.items() if self._state[slot] is not storing)

    def loading_blocks(self) -> list[int]:
        """The device blocks that loads hold, one reference each."""
        return [self._block[slot] for slot, state in enumerate(self._state) if state is Slot.LOADING]

    def check_invariants(self) -> None:
        """Assert what must always hold: every slot in one state, names in step both ways. O(slots)."""
        by_state = {state: {s for s, is_in in enumerate(self._state) if is_in is state} for state in Slot}
        assert len(set(self._free)) == len(self._free), "a slot is twice in the free list"
        assert by_state[Slot.FREE] == set(self._free), "the free list is out of step"
        assert by_state[Slot.STORED] == set(self._stored), "the LRU is out of step"
        assert len(by_state[Slot.STORING]) == self._num_storing, "a store is lost"
        assert len(by_state[Slot.LOADING]) == self._num_loading + len(self._queued), "a load is lost"
        assert set(self._queued) <= by_state[Slot.LOADING], "a load is queued for a slot that does not load"
        assert self._num_storing <= self.limits.stores_max, "over the bound of stores"
        assert self._num_loading <= self.limits.loads_max, "over the bound of loads"
        named = {slot: name for name, slot in self._slot_of.items()}
        assert len(named) == len(self._slot_of), "a slot has two names"
        for slot, name in enumerate(self._hash_of):
            assert named.get(slot) == name, f"slot {slot} and its name disagree"
            assert name is None or self._state[slot] is not Slot.FREE, f"free slot {slot} has a name"
            assert name is not None or self._state[slot] is not Slot.STORED, f"stored slot {slot} has no name"
        targets = self.loading_blocks()
        assert len(set(targets)) == len(targets), "two loads go to one block"
        assert all(self._pool.num_references(block) for block in targets), "a load does not hold its block"
        assert max(len(self._idle), len(self._urgent)) <= self._pool.num_blocks, (
            "more is watched than there is"
        )

"""The life of named KV blocks, as ordered events that a router can keep an index from.

    HashedPrefixCache --stored--\
    BlockPool ---removed, cleared-> KVEventSink: a KVEventLog with listeners, else NO_KV_EVENTS
    host tier --stored, removed-/        |
                                     take() once per step -> encode_batch -> KVEventHistory (numbers them)

The wire is vLLM's current one (vllm/distributed/kv_events.py since June 2026): msgpack, the batch an array
`[ts, events, data_parallel_rank]`, each event a map whose "type" is its name; fields at their default
are left out. So what indexes vLLM's events (llm-d, Dynamo) indexes ours.

Hashes are keyed (see hashing.py): a reader without the key learns from them which blocks are equal for one
tenant, and nothing else. Token ids would tell everything, so by default only those of the public region go
out.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from penstock.kv.hashing import PUBLIC, BlockHash
from penstock.types import BLOCK_TOKENS

DEVICE = "GPU"
"""vLLM's name of the tier that attention reads, on whatever device the engine computes."""
HOST = "CPU"
"""vLLM's name of the host tier, from which blocks come back by copy."""

TokenIds = Literal["none", "public", "all"]
"""The tenants whose token ids are put into events; see `KVEventsConfig.token_ids`."""


# --- the wire --------------------------------------------------------------------------------------


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Consecutive blocks of one chain can be hit from now on."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    """The block before the first one; None at the start of a prompt, or where it is not known."""
    token_ids: tuple[int, ...]
    """Of all these blocks, in order; empty where they are not to be told."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """These blocks are gone from one tier."""

    block_hashes: tuple[bytes, ...]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events of one step."""

    ts: float
    """Seconds since the epoch."""
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KVEventBatch)


def encode_batch(events: tuple[KVEvent, ...], *, wall_ns: int) -> bytes:
    """One batch as it goes over the wire."""
    return _encoder.encode(KVEventBatch(wall_ns / 1e9, events, 0))


def decode_batch(payload: bytes) -> KVEventBatch:
    """Read what `encode_batch` made; unknown fields of newer layouts are skipped.

    Raises:
        msgspec.DecodeError: it is no batch of this layout.
    """
    return _decoder.decode(payload)


# --- collecting ------------------------------------------------------------------------------------


class KVEventSink(Protocol):
    """Receives every change to what can be hit, in order."""

    def stored(
        self,
        hashes: Sequence[BlockHash],
        first: int,
        end: int,
        tokens: "array[int]",
        *,
        owner: bytes,
        adapter: str = "",
    ) -> None:
        """The blocks `first .. end - 1` of a chain were named; `tokens` are the chain's, from its start.

        `adapter` is the name under which the requests asked for theirs; empty: they have none.
        """
        ...

    def copied(self, block_hash: BlockHash, *, medium: str) -> None:
        """A block that was announced before can now be had from this tier as well."""
        ...

    def removed(self, hashes: Sequence[BlockHash], *, medium: str = DEVICE) -> None:
        """These blocks cannot be had from this tier any more."""
        ...

    def cleared(self) -> None:
        """All of them, in every tier."""
        ...


class NoKVEvents:
    """Without listeners: no event is made or kept."""

    __slots__ = ()

    def stored(
        self,
        hashes: Sequence[BlockHash],
        first: int,
        end: int,
        tokens: "array[int]",
        *,
        owner: bytes,
        adapter: str = "",
    ) -> None:
        """See `KVEventSink`."""

    def copied(self, block_hash: BlockHash, *, medium: str) -> None:
        """See `KVEventSink`."""

    def removed(self, hashes: Sequence[BlockHash], *, medium: str = DEVICE) -> None:
        """See `KVEventSink`."""

    def cleared(self) -> None:
        """See `KVEventSink`."""


NO_KV_EVENTS = NoKVEvents()


class KVEventLog:
    """Collects events until `take`, which is called once per step.

    It needs no bound of its own: a step names and evicts no more blocks than there are.
    """

    __slots__ = ("_events", "_removed", "_removed_from", "_token_ids")

    def __init__(self, token_ids: TokenIds) -> None:
        self._token_ids: TokenIds = token_ids
        self._events: list[KVEvent] = []
        self._removed: list[bytes] = []  # Removals in a row become one event.
        self._removed_from = DEVICE

    def stored(
        self,
        hashes: Sequence[BlockHash],
        first: int,
        end: int,
        tokens: "array[int]",
        *,
        owner: bytes,
        adapter: str = "",
    ) -> None:
        """See `KVEventSink`."""
        assert 0 <= first < end <= len(hashes), f"blocks {first} to {end} of {len(hashes)}"
        with_ids = self._token_ids == "all" or (self._token_ids == "public" and owner == PUBLIC)
        ids = tuple(tokens[first * BLOCK_TOKENS : end * BLOCK_TOKENS]) if with_ids else ()
        self._close_removed()
        parent = hashes[first - 1] if first else None
        self._events.append(
            BlockStored(
                block_hashes=tuple(hashes[first:end]),
                parent_block_hash=parent,
                token_ids=ids,
                block_size=BLOCK_TOKENS,
                lora_id=None,
                medium=DEVICE,
                lora_name=adapter or None,
            )
        )

    def copied(self, block_hash: BlockHash, *, medium: str) -> None:
        """See `KVEventSink`. Without parent and tokens, as vLLM's offloading tells it: both are known."""
        self._close_removed()
        self._events.append(stored_event((block_hash,), medium=medium))

    def removed(self, hashes: Sequence[BlockHash], *, medium: str = DEVICE) -> None:
        """See `KVEventSink`."""
        if medium != self._removed_from:
            self._close_removed()
            self._removed_from = medium
        self._removed += hashes

    def cleared(self) -> None:
        """See `KVEventSink`."""
        self._close_removed()
        assert not self._removed, "removals must be reported first"
        self._events.append(AllBlocksCleared())

    def take(self) -> tuple[KVEvent, ...]:
        """Everything since the last time."""
        self._close_removed()
        events = tuple(self._events)
        self._events.clear()
        return events

    def _close_removed(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(block_hashes=tuple(self._removed), medium=self._removed_from))
            self._removed.clear()


def stored_event(
    hashes: tuple[bytes, ...],
    *,
    parent: bytes | None = None,
    token_ids: tuple[int, ...] = (),
    medium: str = DEVICE,
) -> BlockStored:
    """A `BlockStored` of our block size and without an adapter."""
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


# --- numbering -------------------------------------------------------------------------------------


class Numbered(NamedTuple):
    """One encoded batch and its place in the order: 0, 1, 2, ... without gaps."""

    sequence: int
    payload: bytes


class KVEventHistory:
    """Numbers batches, and keeps the last `batches_max` of them for listeners that missed some."""

    __slots__ = ("_batches", "next_sequence")

    def __init__(self, batches_max: int) -> None:
        assert batches_max >= 0, batches_max
        self._batches: deque[Numbered] = deque(maxlen=batches_max)
        self.next_sequence = 0
        """The number of the next batch."""

    def append(self, payload: bytes) -> Numbered:
        """Give the next number to a batch; the oldest one is forgotten when there are too many."""
        batch = Numbered(self.next_sequence, payload)
        self.next_sequence += 1
        self._batches.append(batch)
        return batch

    def since(self, sequence: int) -> tuple[Numbered, ...] | None:
        """Every batch from this number on (none if it is the next); None if one of them is not known here."""
        assert not self._batches or self._batches[-1].sequence == self.next_sequence - 1, (
            "numbers have no gaps"
        )
        missing = self.next_sequence - sequence
        if not 0 <= missing <= len(self._batches):
            return None
        return tuple(self._batches)[len(self._batches) - missing :]

"""From a worker's own block ids to the keys of the prefix index.

EngineBlockNames      our engine's hashes are keys already
ExternalBlockNames  everybody else's ids mean nothing here: the key is made from the parent's key and the
                    block's tokens, and
              the id is kept to understand "removed" and "parent"

KV events as other engines send them, read into one form: vLLM's wire, in the three layouts that are in the
field.

    (a)  [ts, [["BlockStored", hashes, parent, ...], ...], rank]           an array of arrays, the tag first
    (b)  [ts, [{"type": "BlockStored", "block_hashes": ...}, ...], rank]   maps (vLLM since June 2026; ours)
    (c)  {"ts": ts, "events": [{"type": ...}, ...], ...}                   maps throughout

Block hashes are bytes or 64-bit integers and mean nothing outside of their worker: here they become *ids* of
64 bits. Map keys that are not known are skipped; an event of an unknown type is reported as `Unknown`, for it
might have taken blocks away. For any bytes, the outcome is a batch or a `KVEventError`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from penstock.errors import WorkerError
from penstock.kv.events import DEVICE, HOST, AllBlocksCleared, BlockStored, KVEventBatch
from penstock.kv.hashing import (
    KEY_BYTES,
    TOKEN_BYTES,
    BlockHasher,
    CanonicalHasher,
    PromptKeys,
    own_keys,
    token_bytes,
)
from penstock.kv.index.prefix_index import Tier
from penstock.types import BLOCK_TOKENS

_ID_MASK = (1 << 8 * KEY_BYTES) - 1
_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_WHOLE_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of layers whose blocks say how long a prefix is cached. Windows and recurrent states keep the last
blocks only."""


class KVEventError(WorkerError):
    """A worker sent bytes that are no batch of KV events."""


class Stored(NamedTuple):
    """Consecutive blocks of one chain can be hit from now on."""

    ids: Sequence[int]
    parent: int | None
    """The block before the first one; None at the start of a prompt."""
    tokens: bytes
    """Of all these blocks, int32 little-endian; empty where they are not told."""
    block_tokens: int
    tier: Tier | None
    """None: somewhere that is not indexed."""
    adapter: str = ""
    extra: Sequence[Sequence[object] | None] | None = None
    """By block, what else its content depends on; None: not told, or nothing for any of them."""
    group: int | None = None


class Removed(NamedTuple):
    """These blocks are gone from one tier."""

    ids: Sequence[int]
    tier: Tier | None
    group: int | None = None


class Cleared(NamedTuple):
    """Nothing is cached any more."""


class Unknown(NamedTuple):
    """An event of a type that is not known here: what is known may be wrong from now on."""

    tag: str


Event = Stored | Removed | Cleared | Unknown


def decode_events(payload: bytes) -> list[Event]:
    """The events of one batch, in order.

    Raises:
        KVEventError: it is no batch; the message says what is wrong, and holds nothing of its tokens.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise KVEventError(f"no msgpack: {type(error).__name__}") from None
    events = _events_of(batch)
    try:
        return [event for each in events if (event := _event(each)) is not None]
    except (ValueError, TypeError, OverflowError) as error:
        raise KVEventError(
            f"a field of a KV event has a wrong type or range: {type(error).__name__}"
        ) from None


def events_of_engine(batch: KVEventBatch) -> list[Event]:
    """Our engine's events, which came decoded (backends/engine/backend.py)."""
    found: list[Event] = []
    for event in batch.events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            found.append(
                Stored(
                    own_keys(event.block_hashes),
                    None if parent is None else _id(parent),
                    token_bytes(event.token_ids) if event.token_ids else b"",
                    event.block_size,
                    _tier(event.medium),
                )
            )
        elif isinstance(event, AllBlocksCleared):
            found.append(Cleared())
        else:
            found.append(Removed(own_keys(event.block_hashes), _tier(event.medium)))
    return found


_decoder = msgspec.msgpack.Decoder()


def _events_of(batch: object) -> Sequence[object]:
    events: object = None
    if isinstance(batch, Mapping):
        events = cast(Mapping[object, object], batch).get("events")
    elif isinstance(batch, Sequence) and len(cast(Sequence[object], batch)) >= 2:
        events = cast(Sequence[object], batch)[1]
    if not isinstance(events, list):
        raise KVEventError("no batch of KV events: it has no list of events")
    return cast(list[object], events)


def _event(raw: object) -> Event | None:
    """One event; None if its blocks say nothing about prefixes."""
    if isinstance(raw, Mapping):
        fields = cast(dict[str, object], raw)
        tag, get = fields.get("type"), _getter(fields)
    elif isinstance(raw, Sequence) and raw and not isinstance(raw, str | bytes):
        tag, *values = cast(Sequence[object], raw)
        names = _STORED_FIELDS if tag == "BlockStored" else _REMOVED_FIELDS
        get = _getter(dict(zip(names, values, strict=False)))
    else:
        raise TypeError
    if tag == "BlockStored":
        return _stored(get)
    if tag == "BlockRemoved":
        return Removed(_ids(get("block_hashes")), _tier(get("medium")), _count(get("group_idx")))
    return Cleared() if tag == "AllBlocksCleared" else Unknown(tag if isinstance(tag, str) else "")


def _getter(fields: Mapping[str, object]) -> Callable[[str], object]:
    return fields.get


def _stored(get: Callable[[str], object]) -> Stored | None:
    if get("kv_cache_spec_kind") not in _WHOLE_PREFIX_KINDS:
        return None
    parent, tokens = get("parent_block_hash"), get("token_ids")
    return Stored(
        ids=_ids(get("block_hashes")),
        parent=None if parent is None else _id(parent),
        tokens=token_bytes(array("i", cast(list[int], tokens))) if isinstance(tokens, list) else b"",
        block_tokens=_count(get("block_size")) or 0,
        tier=_tier(get("medium")),
        adapter=_adapter(get("lora_name"), get("lora_id")),
        extra=_extra(get("extra_keys")),
        group=_count(get("group_idx")),
    )


def _ids(hashes: object) -> list[int]:
    if not isinstance(hashes, list):
        raise TypeError
    return [_id(each) for each in cast(list[object], hashes)]


def _id(block_hash: object) -> int:
    """The first 8 bytes of a hash, as in `hashing.own_keys`; integers as they are."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[:KEY_BYTES], "little")
    if isinstance(block_hash, int):
        return block_hash & _ID_MASK
    raise TypeError


def _tier(medium: object) -> Tier | None:
    if medium is None or medium == DEVICE:
        return Tier.DEVICE
    return Tier.HOST if medium == HOST else None


def _adapter(name: object, number: object) -> str:
    """Old versions send a number only, without meaning elsewhere: it makes a name that matches no
    request's.
    """
    if isinstance(name, str):
        return name
    return "" if number is None else f"\0adapter {number}"


def _count(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or value < 0:
        raise TypeError
    return value


def _extra(extra: object) -> Sequence[Sequence[object] | None] | None:
    if not isinstance(extra, list) or not any(cast(list[object], extra)):
        return None
    found: list[Sequence[object] | None] = []
    for each in cast(list[object], extra):
        if not isinstance(each, list | None):
            raise TypeError
        found.append(cast(Sequence[object] | None, each))
    return found


Named = list[tuple[Tier, Sequence[int]]]
"""Keys, by where their blocks are."""


class BlockNames(Protocol):
    """One worker's ids."""

    num_orphans: int
    """Events whose parent was not known when they came."""
    refused: str
    """Why none of this worker's blocks can be named; empty: they can."""
    unit: int
    """Of our blocks in one of this worker's: it reuses so many together or none of them."""

    def keys_of(self, prompt: PromptKeys) -> Sequence[int]:
        """The names of this worker's blocks of a prompt in the index."""
        ...

    def stored(self, event: Stored) -> Named:
        """The keys of these blocks, and of those that had waited for them.

        Raises:
            KVEventError: the worker tells of more blocks than it may.
        """
        ...

    def removed(self, event: Removed) -> Named:
        """The keys of these blocks, as far as they are known."""
        ...

    def clear(self) -> None:
        """Forget every id."""
        ...


class EngineBlockNames:
    """Of a worker that runs our engine and names its blocks with a key that we have too."""

    __slots__ = ("hasher", "key", "num_orphans", "refused", "unit")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.hasher: BlockHasher | None = None
        """Of what it computes (engine/fingerprint.py); None until it has announced that."""
        self.num_orphans = 0
        self.refused = ""
        self.unit = 1

    def keys_of(self, prompt: PromptKeys) -> Sequence[int]:
        """See `BlockNames`."""
        return () if self.hasher is None else prompt.own(self.hasher)

    def stored(self, event: Stored) -> Named:
        """See `BlockNames`."""
        return [(event.tier, event.ids)] if event.tier is not None else []

    def removed(self, event: Removed) -> Named:
        """See `BlockNames`."""
        return [(event.tier, event.ids)] if event.tier is not None else []

    def clear(self) -> None:
        """Nothing is kept."""


_Keys = int | tuple[int, ...]
"""Of one of the worker's blocks, which may be several of ours."""
_NO_GROUP = -1


class ExternalBlockNames:
    """Of any other worker. Its blocks must be a whole number of ours."""

    __slots__ = (
        "_blocks_max", "_group", "_hasher", "_known", "_num_parked", "_parked", "_parked_max", "num_orphans",
        "refused", "unit",
    )  # fmt: skip

    def __init__(self, hasher: CanonicalHasher, *, blocks_max: int, parked_max: int) -> None:
        self._hasher, self._blocks_max, self._parked_max = hasher, blocks_max, parked_max
        self._known: tuple[dict[int, _Keys], dict[int, _Keys]] = ({}, {})  # By tier, then by id.
        self._group: int | None = _NO_GROUP
        self._parked: OrderedDict[int, list[Stored]] = OrderedDict()  # By the parent that they wait for.
        self._num_parked = 0
        self.num_orphans = 0
        self.refused = ""
        self.unit = 1  # Until it has told of a block.

    @property
    def num_parked(self) -> int:
        """Events that wait for their parent."""
        return self._num_parked

    def keys_of(self, prompt: PromptKeys) -> Sequence[int]:
        """See `BlockNames`."""
        return prompt.canonical

    def stored(self, event: Stored) -> Named:
        """See `BlockNames`."""
        found: Named = []
        ready = [event]
        while ready:
            each = ready.pop()
            keys = self._take(each)
            if keys and each.tier is not None:
                found.append((each.tier, keys))
                for block_id in each.ids if self._parked else ():
                    ready += self._unpark(block_id)
        return found

    def removed(self, event: Removed) -> Named:
        """See `BlockNames`."""
        if event.tier is None or event.group not in (None, self._group):
            return []
        known, keys = self._known[event.tier], list[int]()
        for block_id in event.ids:
            if (gone := known.pop(block_id, None)) is not None:
                keys += (gone,) if isinstance(gone, int) else gone
        return [(event.tier, keys)]

    def clear(self) -> None:
        """See `BlockNames`. The group of layers that counts stays."""
        for known in self._known:
            known.clear()
        self._parked.clear()
        self._num_parked = 0
        assert not any(self._known), "no id of the process before is known"

    def _take(self, event: Stored) -> Sequence[int]:
        """Name one event's blocks; empty if that cannot be done (now)."""
        if event.tier is None or not self._is_indexed(event.group):
            return ()
        if not event.tokens:
            return self._copied(event, event.tier)
        assert self._group != _NO_GROUP, "the first event settles the group that counts"
        if not self._is_whole(event):
            return ()
        if event.parent is None:
            parent = self._hasher.root(namespace=_namespace(event), adapter=event.adapter)
        elif (keys := self._find(event.parent)) is not None:
            parent = keys if isinstance(keys, int) else keys[-1]
        else:
            self._park(event, event.parent)
            return ()
        made = self._name(event, parent)
        self._keep(event, event.tier, made)
        return made

    def _is_indexed(self, group: int | None) -> bool:
        """Where layers have caches of their own, one group stands for all: the first whose blocks make whole
        prefixes.
        """
        if self._group == _NO_GROUP:
            self._group = group
        return group is None or group == self._group

    def _is_whole(self, event: Stored) -> bool:
        tokens = event.block_tokens
        if not tokens or tokens % BLOCK_TOKENS:
            if not any(self._known):
                self.refused = f"its KV blocks have {tokens} tokens, which is no multiple of {BLOCK_TOKENS}"
            return False
        lengths = {len(event.ids)} if event.extra is None else {len(event.ids), len(event.extra)}
        # Otherwise the event leaves some of the blocks out, and does not say which.
        return lengths == {len(event.tokens) // (tokens * TOKEN_BYTES)}

    def _copied(self, event: Stored, tier: Tier) -> Sequence[int]:
        """Known blocks are in another tier too: the message has their ids alone."""
        found = {block_id: keys for block_id in event.ids if (keys := self._find(block_id)) is not None}
        self._known[tier].update(found)
        return [key for keys in found.values() for key in ((keys,) if isinstance(keys, int) else keys)]

    def _name(self, event: Stored, parent: int) -> list[int]:
        marks = _marks(event)
        if not marks:
            return self._hasher.extend(parent, event.tokens)
        keys, size = list[int](), event.block_tokens * TOKEN_BYTES
        for i in range(len(event.ids)):
            if i in marks:
                parent = self._hasher.mark(parent, marks[i])
            keys += self._hasher.extend(parent, event.tokens[i * size : (i + 1) * size])
            parent = keys[-1]
        assert len(keys) * BLOCK_TOKENS == len(event.ids) * event.block_tokens, "a key for each of our blocks"
        return keys

    def _keep(self, event: Stored, tier: Tier, keys: list[int]) -> None:
        known = self._known[tier]
        self.unit = each = event.block_tokens // BLOCK_TOKENS
        assert each > 0, "blocks that are no whole number of ours are skipped before"
        assert len(keys) == each * len(event.ids), "every block of the worker has all its keys"
        if each == 1:
            known.update(zip(event.ids, keys, strict=True))
        else:
            for i, block_id in enumerate(event.ids):
                known[block_id] = tuple(keys[i * each : (i + 1) * each])
        if len(known) > self._blocks_max:
            raise KVEventError(f"the worker tells of more than {self._blocks_max} blocks")

    def _find(self, block_id: int) -> _Keys | None:
        device, host = self._known
        keys = device.get(block_id)
        return host.get(block_id) if keys is None else keys

    # --- parking ---------------------------------------------------------------------------------------

    def _park(self, event: Stored, parent: int) -> None:
        """Where a block belongs is not guessed: it waits until the one before it is known."""
        self.num_orphans += 1
        self._parked.setdefault(parent, []).append(event)
        self._num_parked += 1
        while self._num_parked > self._parked_max:
            self._num_parked -= len(self._parked.popitem(last=False)[1])
        assert 0 <= self._num_parked <= self._parked_max, self._num_parked

    def _unpark(self, block_id: int) -> list[Stored]:
        events = self._parked.pop(block_id, [])
        self._num_parked -= len(events)
        assert self._num_parked >= 0, "more resumed than waited"
        return events


def _namespace(event: Stored) -> str:
    """The salt that the first block of a prompt says it depends on."""
    first = _rest(event, 0)
    return next((each for each in first if isinstance(each, str)), "")


def _marks(event: Stored) -> dict[int, bytes]:
    """By block, what else its content depends on (images, embeddings): a worker that cannot tell the same
    gets other keys.
    """
    if event.extra is None:
        return {}
    marks: dict[int, bytes] = {}
    for i, extra in enumerate(event.extra):
        if extra:
            rest = _rest(event, i)
            if i == 0 and event.parent is None and (salt := _namespace(event)):
                rest.remove(salt)
            if rest:
                marks[i] = repr(rest).encode()
    return marks


def _rest(event: Stored, block: int) -> list[object]:
    """Without the adapter, which comes first and is in another field too."""
    rest = list((event.extra[block] if event.extra is not None else None) or ())
    return rest[1:] if event.adapter and rest and rest[0] == event.adapter else rest

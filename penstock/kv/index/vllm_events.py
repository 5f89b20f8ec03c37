"""KV events as other engines send them, read into one form: vLLM's wire, in the three layouts that are in the
field.

    (a)  [ts, [["BlockStored", hashes, parent, ...], ...], rank]           an array of arrays, the tag first
    (b)  [ts, [{"type": "BlockStored", "block_hashes": ...}, ...], rank]   maps (vLLM since June 2026; ours)
    (c)  {"ts": ts, "events": [{"type": ...}, ...], ...}                   maps throughout

Block hashes are bytes or 64-bit integers and mean nothing outside of their worker: here they become *ids* of
64 bits. Map keys that are not known are skipped; an event of an unknown type is reported as `Unknown`, for it
might have taken blocks away. Whatever the bytes are, the outcome is a batch or a `KVEventError`.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from penstock.errors import WorkerError
from penstock.kv.events import DEVICE, HOST, AllBlocksCleared, BlockStored, KVEventBatch
from penstock.kv.hashing import token_bytes
from penstock.kv.index.prefix_index import Tier
from penstock.kv.index.prompt_keys import KEY_BYTES, own_keys

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
    """What a worker sent is no batch of KV events."""


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
    """Our engine's events, which came decoded (backends/engine/kv.py)."""
    found: list[Event] = []
    for event in batch.events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            found.append(
                Stored(
                    own_keys(event.block_hashes),
                    None if parent is None else int.from_bytes(parent[:KEY_BYTES], "little"),
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
    """The first 8 bytes of a hash, as in `prompt_keys.own_keys`; integers as they are."""
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

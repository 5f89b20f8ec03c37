"""vLLM's KV events in the three layouts of the field: bytes that were encoded by its own classes (0.32) and
by older ones.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import WorkerError
from penstock.kv.events import AllBlocksCleared, BlockRemoved, KVEventBatch, encode_batch, stored_event
from penstock.kv.hashing import token_bytes
from penstock.kv.index.block_names import (
    Cleared,
    KVEventError,
    Removed,
    Stored,
    Unknown,
    decode_events,
    events_of_engine,
)
from penstock.kv.index.prefix_index import Tier

ARRAY_OF_MAPS = (
    "93cb41d954fc40100000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c420000102"
    "030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc420202122232425262728292a2b2c2d2e2f30"
    "3132333435363738393a3b3c3d3e3fb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc002064"
    "65666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7fcc80cc81cc82cc83aa626c6f636b5f73697a6510a7"
    "6c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a863324673"
    "64413d3dc0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e7469"
    "6f6e00"
)
ARRAY_OF_MAPS_WITH_INTS = (
    "93cb41d954fc40100000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf80000000"
    "00000005b1706172656e745f626c6f636b5f68617368cfab54a98ceb1f0ad2a9746f6b656e5f696473dc001000010203"
    "0405060708090a0b0c0d0e0faa626c6f636b5f73697a6510a76c6f72615f696403a66d656469756da3435055a96c6f72"
    "615f6e616d65a373716caa65787472615f6b6579739191a373716ca967726f75705f6964780084a474797065ac426c6f"
    "636b52656d6f766564ac626c6f636b5f686173686573920708a66d656469756da3475055a967726f75705f6964780081"
    "a474797065b0416c6c426c6f636b73436c656172656400"
)
ARRAY_OF_ARRAYS = (
    "93cb41d954fc401000009397ab426c6f636b53746f726564920b0c0adc0020000102030405060708090a0b0c0d0e0f10"
    "1112131415161718191a1b1c1d1e1f10c0c093ac426c6f636b52656d6f766564910bc091b0416c6c426c6f636b73436c"
    "6561726564c0"
)
ARRAY_OF_ARRAYS_WITH_MEDIUM = (
    "93cb41d954fc401000009297ab426c6f636b53746f72656491c420000102030405060708090a0b0c0d0e0f1011121314"
    "15161718191a1b1c1d1e1fc0dc0010000102030405060708090a0b0c0d0e0f10c0a753544f5241474593ac426c6f636b"
    "52656d6f76656491c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa343505501"
)
MAP_OF_MAPS = (
    "83a27473cb41d954fc40100000a66576656e74739389a474797065ab426c6f636b53746f726564ac626c6f636b5f6861"
    "73686573910bb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc001000010203040506070809"
    "0a0b0c0d0e0faa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65"
    "c0a6636f6c6f7572a4626c756583a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573910ba6"
    "6d656469756dc081a474797065b0416c6c426c6f636b73436c6561726564b2646174615f706172616c6c656c5f72616e"
    "6b00"
)
FIRST_ID = int.from_bytes(bytes(range(8)), "little")


def stored(ids: list[int], tokens: range, **fields: object) -> Stored:
    return Stored(**{  # type: ignore[arg-type]
        "ids": ids, "parent": None, "tokens": token_bytes(list(tokens)), "block_tokens": 16,
        "tier": Tier.DEVICE,
    } | fields)  # fmt: skip


@pytest.mark.parametrize(
    ("wire", "events"),
    [
        (
            ARRAY_OF_MAPS,
            [
                stored(
                    [FIRST_ID, int.from_bytes(bytes(range(32, 40)), "little")],
                    range(100, 132),
                    extra=[["c2FsdA=="], None],
                    group=0,
                )
            ],
        ),
        (
            ARRAY_OF_MAPS_WITH_INTS,
            [
                stored(
                    [9223372036854775813], range(16), parent=12345678901234567890, tier=Tier.HOST,
                    adapter="sql", extra=[["sql"]], group=0,
                ),
                Removed([7, 8], Tier.DEVICE, 0),
                Cleared(),
            ],
        ),
        (ARRAY_OF_ARRAYS, [stored([11, 12], range(32), parent=10), Removed([11], Tier.DEVICE), Cleared()]),
        (ARRAY_OF_ARRAYS_WITH_MEDIUM, [stored([FIRST_ID], range(16), tier=None), Removed([FIRST_ID],
        Tier.HOST)]),
        (MAP_OF_MAPS, [stored([11], range(16)), Removed([11], Tier.DEVICE), Cleared()]),
    ],
)  # fmt: skip
def test_every_layout_is_read(wire: str, events: list[object]) -> None:
    assert decode_events(bytes.fromhex(wire)) == events


def encode(*events: object) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events)])


def test_our_engines_batches_are_read_the_same_way_whether_they_come_encoded_or_not() -> None:
    events = (
        stored_event((b"h" * 32,), parent=b"p" * 32, token_ids=tuple(range(16))),
        stored_event((b"h" * 32,), medium="CPU"),
        BlockRemoved(block_hashes=(b"h" * 32,), medium="CPU"),
        AllBlocksCleared(),
    )
    read = decode_events(encode_batch(events, wall_ns=0))
    assert read == events_of_engine(KVEventBatch(0.0, events, 0))
    assert len(read) == 4


def test_a_type_that_is_not_known_is_told_and_not_skipped() -> None:
    assert decode_events(encode({"type": "BlockMoved", "block_hashes": [1]}, ["Melted", 1])) == [
        Unknown("BlockMoved"), Unknown("Melted"),
    ]  # fmt: skip


def test_blocks_of_windows_and_recurrent_states_say_nothing_about_prefixes() -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1] * 16, "block_size": 16}
    assert decode_events(encode(event | {"kv_cache_spec_kind": "sliding_window"})) == []
    assert len(decode_events(encode(event | {"kv_cache_spec_kind": "mla_attention"}))) == 1


def test_an_adapter_that_has_only_a_number_is_nobody_elses() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [1],
        "token_ids": [1] * 16,
        "block_size": 16,
        "lora_id": 1,
    }
    (read,) = decode_events(encode(event))
    assert isinstance(read, Stored)
    assert read.adapter not in ("", "1")


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\x93", msgspec.msgpack.encode(1), msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({}), msgspec.msgpack.encode([1.0, {}]), b"\x91" * 100_000, encode([]),
        encode(7), encode("BlockStored"), encode(["BlockStored"]),
        encode({"type": "BlockStored", "block_hashes": [1.5]}),
        encode({"type": "BlockStored", "block_hashes": [1], "token_ids": [1 << 40]}),
        encode({"type": "BlockStored", "block_hashes": [1], "token_ids": ["a"]}),
        encode({"type": "BlockStored", "block_hashes": [1], "block_size": -16}),
        encode({"type": "BlockStored", "block_hashes": [1], "extra_keys": [7]}),
        encode({"type": "BlockStored", "block_hashes": [1], "kv_cache_spec_kind": []}),
        encode({"type": ["BlockStored"], "block_hashes": "x"}, {"type": "BlockRemoved"}),
    ],
)  # fmt: skip
def test_nonsense_is_a_typed_error(payload: bytes) -> None:
    with pytest.raises(KVEventError):
        decode_events(payload)
    assert issubclass(KVEventError, WorkerError)


GOLDEN = [
    bytes.fromhex(wire)
    for wire in (
        ARRAY_OF_MAPS, ARRAY_OF_MAPS_WITH_INTS, ARRAY_OF_ARRAYS, ARRAY_OF_ARRAYS_WITH_MEDIUM, MAP_OF_MAPS,
    )
]  # fmt: skip


def read_or_refuse(payload: bytes) -> None:
    try:
        events = decode_events(payload)
    except KVEventError:
        return
    assert all(isinstance(event, Stored | Removed | Cleared | Unknown) for event in events)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_typed_error(payload: bytes) -> None:
    read_or_refuse(payload)


@given(st.sampled_from(GOLDEN), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1,
    max_size=8),
       st.integers(0, 400))  # fmt: skip
def test_broken_batches_are_batches_or_typed_errors(payload: bytes, changes, cut: int) -> None:
    broken = bytearray(payload)
    for at, byte in changes:
        broken[at % len(broken)] = byte
    read_or_refuse(bytes(broken))
    read_or_refuse(bytes(broken[:cut]))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_name", "lora_id",
    "medium",
         "extra_keys", "group_idx", "kv_cache_spec_kind")  # fmt: skip
tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])


@given(tags, st.dictionaries(st.sampled_from(names[1:]), values), st.lists(values, max_size=10))
def test_fields_of_any_type_are_events_or_typed_errors(tag: str, fields: dict, more: list) -> None:
    read_or_refuse(encode({"type": tag, **fields}))
    read_or_refuse(encode([tag, *more]))

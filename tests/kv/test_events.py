import struct
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.cache.manager import KVManager
from penstock.kv.events import (
    HOST,
    NO_KV_EVENTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventHistory,
    KVEventLog,
    decode_batch,
    encode_batch,
    stored_event,
)
from penstock.kv.hashing import PUBLIC, BlockHash, BlockHasher, token_array

HASHER = BlockHasher(key=bytes(32), identity="m float32")
A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)


def listening(num_blocks: int = 8, token_ids: str = "all") -> tuple[KVManager, KVEventLog]:
    kv, log = KVManager.with_prefix_cache(num_blocks, HASHER), KVEventLog(token_ids)
    kv.pool.events = log
    return kv, log


def compute(kv: KVManager, tokens: "array[int]", *, salt: bytes = b"", **adapter: str):
    table = kv.open(salt, **adapter)
    kv.adopt(table, kv.match_prefix(table, tokens))
    assert kv.extend(table, len(tokens)) is not None
    kv.publish_computed(table, tokens, len(tokens))
    return table


# --- the wire: bytes written by hand from vLLM's structs and the msgpack specification -------------


def packed(text: str) -> bytes:
    """A msgpack string of less than 32 bytes."""
    return bytes([0xA0 | len(text)]) + text.encode()


BIN_A, BIN_B = b"\xc4\x20" + A, b"\xc4\x20" + B
FLOAT = b"\xcb" + struct.pack(">d", 1.5)
STORED = b"".join(
    [
        b"\x88" + packed("type") + packed("BlockStored"),
        packed("block_hashes") + b"\x92" + BIN_A + BIN_B,
        packed("parent_block_hash") + b"\xc0",
        packed("token_ids") + b"\x92\x07\xcd\x01\x00",
        packed("block_size") + b"\x10",
        packed("lora_id") + b"\xc0",
        packed("medium") + packed("GPU"),
        packed("lora_name") + b"\xc0",
    ]
)
REMOVED = b"\x83" + packed("type") + packed("BlockRemoved") + packed("block_hashes") + b"\x91" + BIN_A
REMOVED += packed("medium") + packed("CPU")
CLEARED = b"\x81" + packed("type") + packed("AllBlocksCleared")


def test_the_bytes_are_those_of_vllms_layout() -> None:
    events = (
        stored_event((A, B), token_ids=(7, 256)),
        BlockRemoved(block_hashes=(A,), medium=HOST),
        AllBlocksCleared(),
    )
    payload = encode_batch(events, wall_ns=1_500_000_000)
    assert payload == b"\x93" + FLOAT + b"\x93" + STORED + REMOVED + CLEARED + b"\x00"
    assert decode_batch(payload).events == events


def test_fields_that_newer_layouts_add_are_skipped() -> None:
    event = {
        "type": "BlockRemoved",
        "block_hashes": [A],
        "medium": "GPU",
        "group_idx": 0,
        "locality": "LOCAL",
    }
    payload = msgspec.msgpack.encode([1.0, [event], 0, "more"])
    assert decode_batch(payload).events == (BlockRemoved(block_hashes=(A,), medium="GPU"),)


@pytest.mark.parametrize("payload", [b"", b"\x93", msgspec.msgpack.encode([1.0, [["BlockRemoved"]], 0])])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_batch(payload)


# --- what is told, and when --------------------------------------------------------------------------


def test_blocks_are_told_in_runs_with_their_parent() -> None:
    kv, log = listening()
    tokens = token_array(range(48))
    table = kv.open(b"")
    kv.extend(table, 48)
    kv.publish_computed(table, tokens, 15)
    assert log.take() == ()
    kv.publish_computed(table, tokens, 32)
    h0, h1 = table.hashes
    assert log.take() == (stored_event((h0, h1), token_ids=tuple(range(32))),)
    kv.publish_computed(table, tokens, 48)
    assert log.take() == (stored_event((table.hashes[2],), parent=h1, token_ids=tuple(range(32, 48))),)


def test_a_block_that_was_computed_twice_is_told_once() -> None:
    kv, log = listening()
    tokens = token_array(range(48))
    first, second = kv.open(b""), kv.open(b"")
    kv.extend(first, 16), kv.extend(second, 48)
    kv.publish_computed(first, tokens, 16)
    log.take()
    kv.publish_computed(second, tokens, 48)
    assert log.take() == (
        stored_event(tuple(second.hashes[1:]), parent=first.hashes[0], token_ids=tuple(range(16, 48))),
    )


def test_evictions_come_before_what_took_their_place() -> None:
    kv, log = listening(num_blocks=2)
    old = compute(kv, token_array(range(32)))
    h0, h1 = old.hashes
    kv.release(old)
    log.take()
    new = compute(kv, token_array(range(100, 132)))
    removed, stored = log.take()
    assert removed == BlockRemoved(block_hashes=(h1, h0), medium="GPU"), "the tail goes first"
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == tuple(new.hashes)


def test_bad_blocks_and_a_cleared_cache_are_told() -> None:
    kv, log = listening()
    bad, good = compute(kv, token_array(range(16))), compute(kv, token_array(range(50, 66)))
    log.take()
    kv.release(bad, bad=True)
    assert log.take() == (BlockRemoved(block_hashes=tuple(bad.hashes), medium="GPU"),)
    kv.release(good)
    assert kv.clear_cache() == 1
    assert log.take() == (AllBlocksCleared(),)
    kv.check_invariants([])


def test_tiers_are_apart_and_keep_their_order() -> None:
    log = KVEventLog("none")
    log.copied(A, medium=HOST)
    log.removed((A,))
    log.removed((B,))
    log.removed((A,), medium=HOST)
    assert log.take() == (
        stored_event((A,), medium=HOST),
        BlockRemoved(block_hashes=(A, B), medium="GPU"),
        BlockRemoved(block_hashes=(A,), medium=HOST),
    )


@pytest.mark.parametrize(
    ("policy", "owner", "reported"),
    [
        ("none", PUBLIC, False),
        ("public", PUBLIC, True),
        ("public", b"tenant", False),
        ("public", b"", False),
        ("all", b"tenant", True),
    ],
)
def test_tokens_of_private_blocks_are_told_only_when_asked_for(policy, owner: bytes, reported: bool) -> None:
    log = KVEventLog(policy)
    log.stored([A], 0, 1, token_array(range(16)), owner=owner)
    (event,) = log.take()
    assert isinstance(event, BlockStored)
    assert event.token_ids == (tuple(range(16)) if reported else ())


def test_equal_prompts_of_two_tenants_share_nothing_in_the_events() -> None:
    """Paired: for the same tenant the second run tells nothing, for another one it tells new names only."""
    kv, log = listening(num_blocks=16, token_ids="public")
    tokens = token_array(range(48))
    compute(kv, tokens, salt=b"alice")
    (alice,) = log.take()
    compute(kv, tokens, salt=b"alice")
    again = log.take()
    compute(kv, tokens, salt=b"bob")
    (bob,) = log.take()
    assert isinstance(alice, BlockStored)
    assert isinstance(bob, BlockStored)
    assert again == (), "the third block was computed again, and is known already"
    assert not {*alice.block_hashes} & {*bob.block_hashes}
    wire = encode_batch((alice, bob), wall_ns=0)
    assert b"alice" not in wire
    assert b"bob" not in wire
    assert alice.token_ids == bob.token_ids == ()


def apply(index: dict[str, set[bytes]], events: tuple[KVEvent, ...]) -> None:
    """What a router does with the events."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            index.clear()
        elif isinstance(event, BlockStored):
            assert event.medium is not None
            index.setdefault(event.medium, set()).update(event.block_hashes)
        else:
            assert event.medium is not None
            assert index[event.medium] >= {*event.block_hashes}, "removed but never stored"
            index[event.medium].difference_update(event.block_hashes)


STEP = st.tuples(
    st.sampled_from(["begin", "begin", "end", "bad", "clear"]),
    st.sampled_from([b"", b"x"]),
    st.integers(0, 2),
    st.integers(1, 90),
)


@given(st.integers(6, 12), st.lists(STEP, max_size=40))
def test_an_index_kept_from_the_events_is_what_the_pool_knows(num_blocks: int, steps) -> None:
    kv, log = listening(num_blocks, "none")
    index: dict[str, set[bytes]] = {}
    tables = []
    for kind, salt, family, length in steps:
        if kind == "begin":
            tokens = token_array((family * 1000 + i) % 32_000 for i in range(length))
            table = kv.open(salt)
            hits = kv.match_prefix(table, tokens)
            kv.adopt(table, hits)
            if kv.extend(table, length) is not None:
                kv.publish_computed(table, tokens, length)
            tables.append(table)
        elif kind == "clear":
            kv.clear_cache()
        elif tables:
            kv.release(tables.pop(family % len(tables)), bad=kind == "bad")
        apply(index, log.take())
        assert index.get("GPU", set()) == set(kv.pool.names())
        kv.check_invariants(tables)


# --- numbers ---------------------------------------------------------------------------------------


def test_history_numbers_without_gaps_and_knows_what_it_forgot() -> None:
    history = KVEventHistory(3)
    assert history.since(0) == ()
    assert history.since(1) is None
    for i in range(5):
        assert history.append(bytes([i])) == (i, bytes([i]))
    assert history.next_sequence == 5
    assert history.since(2) == ((2, b"\2"), (3, b"\3"), (4, b"\4"))
    assert history.since(4) == ((4, b"\4"),)
    assert history.since(5) == ()
    assert history.since(1) is None, "forgotten"
    assert history.since(6) is None, "of another life of this worker"
    assert history.since(-1) is None


def test_nobody_listens_by_default() -> None:
    kv = KVManager.with_prefix_cache(2, HASHER)
    assert kv.pool.events is NO_KV_EVENTS
    for start in (0, 100):
        kv.release(compute(kv, token_array(range(start, start + 32))))
    kv.clear_cache()
    assert kv.statistics().evictions == 2


def test_an_adapters_blocks_carry_its_name_and_other_hashes() -> None:
    kv, log = listening()
    tokens = token_array(range(16))
    for adapter in ({}, {"adapter": "d1", "adapter_name": "fr"}, {"adapter": "d2", "adapter_name": "fr"}):
        kv.release(compute(kv, tokens, **adapter))
    found = [event for event in log.take() if isinstance(event, BlockStored)]
    assert [event.lora_name for event in found] == [None, "fr", "fr"]
    assert len({event.block_hashes for event in found}) == 3

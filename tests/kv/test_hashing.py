import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv import hashing
from penstock.kv.hashing import DIGEST_BYTES, BlockHash, BlockHasher, token_array, token_bytes
from penstock.types import BLOCK_TOKENS

KEY = bytes(range(32))
HASHER = BlockHasher(key=KEY, identity="m bfloat16")
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=5 * BLOCK_TOKENS)


def chain(tokens, *, hasher=HASHER, **root):
    return hasher.extend(hasher.root(**root), token_bytes(tokens))


def test_golden_chain() -> None:
    """The hash is a contract between processes and releases: changing it must be on purpose."""
    hashes = chain(range(40), salt=b"tenant", adapter="a")
    assert [value.hex()[:16] for value in hashes] == ["35a6b0f087ce371c", "ec17c9a0541500e1"]
    assert all(len(value) == DIGEST_BYTES for value in hashes)


def test_roots_are_remembered_and_all_forgotten_at_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "ROOTS_MAX", 2)
    made = list[bytes]()

    class Counting(BlockHasher):
        def root(self, *, salt: bytes = b"", adapter: str = "") -> BlockHash:
            made.append(salt)
            return super().root(salt=salt, adapter=adapter)

    hasher = Counting(key=KEY, identity="m bfloat16")
    for salt in (b"a", b"b", b"a", b"c", b"c", b"b", b"b", b"a"):
        expected = HASHER.root(salt=salt, adapter="x")
        assert hasher.root_of(salt=salt, adapter="x", num_public=0) == expected
    assert made == [b"a", b"b", b"c", b"b", b"a"]


def test_only_whole_blocks_have_a_hash() -> None:
    assert chain([]) == []
    assert chain(range(15)) == []
    assert len(chain(range(16))) == 1
    assert len(chain(range(47))) == 2
    assert chain(range(47)) == chain(range(32))


@given(token_lists, token_lists)
def test_equal_prefix_and_equal_chain_are_the_same_thing(a, b) -> None:
    left, right = chain(a), chain(b)
    for index in range(min(len(left), len(right))):
        end = (index + 1) * BLOCK_TOKENS
        assert (left[index] == right[index]) == (a[:end] == b[:end])


@given(st.lists(st.integers(0, 3), min_size=16, max_size=64), st.integers(0, 63))
def test_one_changed_token_changes_every_hash_from_there_on(tokens, where) -> None:
    where %= len(tokens)
    changed = [*tokens[:where], tokens[where] + 1, *tokens[where + 1 :]]
    before, after = chain(tokens), chain(changed)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert (old == new) == (index < where // BLOCK_TOKENS)


@given(token_lists, st.integers(0, 5))
def test_a_chain_may_be_extended_piece_by_piece(tokens, split) -> None:
    data = token_bytes(tokens)
    cut = min(split, len(tokens) // BLOCK_TOKENS) * BLOCK_TOKENS * 4
    head = HASHER.extend(HASHER.root(), data[:cut])
    parent = head[-1] if head else HASHER.root()
    assert head + HASHER.extend(parent, data[cut:]) == chain(tokens)


@given(st.lists(st.integers(0, 100), min_size=16, max_size=48))
def test_namespaces_share_no_hash(tokens) -> None:
    chains = [
        chain(tokens),
        chain(tokens, salt=b"x"),
        chain(tokens, salt=b"xx"),
        chain(tokens, adapter="x"),
        chain(tokens, adapter="x", salt=b"x"),
        chain(tokens, hasher=BlockHasher(key=KEY[::-1], identity="m bfloat16")),
        chain(tokens, hasher=BlockHasher(key=KEY, identity="m2 bfloat16")),
        chain(tokens, hasher=BlockHasher(key=KEY, identity="m float32")),
        # Parts that spell the same bytes when joined must not meet.
        chain(tokens, hasher=BlockHasher(key=KEY, identity="mm float32")),
    ]
    everything = [value for hashes in chains for value in hashes]
    assert len(set(everything)) == len(everything)


def test_the_key_must_not_be_guessable() -> None:
    with pytest.raises(AssertionError, match="guessed"):
        BlockHasher(key=b"short", identity="m float32")


@given(token_lists)
def test_tokens_and_bytes_round_trip(tokens) -> None:
    data = struct.pack(f"<{len(tokens)}i", *tokens)
    assert token_bytes(tokens) == token_bytes(token_array(tokens)) == data
    assert list(token_array(data)) == tokens


def test_bad_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of item size"):
        token_array(b"12345")
    with pytest.raises(OverflowError):
        token_array([2**31])

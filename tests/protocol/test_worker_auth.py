"""Proofs of a shared key: each side's differs, and nothing that was overheard proves anything again."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.address import (
    PROOF_BYTES_MAX,
    Doorkeeper,
    gateway_mac,
    hash_key_of,
    is_same,
    link_key_of,
    worker_mac,
)
from penstock.protocol.worker import Drain, Ping, Proof, ProtocolError, Welcome, encode

KEYS = st.binary(min_size=16, max_size=40)
NONCES = st.binary(min_size=32, max_size=32)


def test_the_mac_is_hmac_sha256_over_the_side_and_both_nonces() -> None:
    key, ours, theirs = b"k" * 16, b"w" * 32, b"g" * 32
    assert gateway_mac(key, ours, theirs) == hmac.digest(
        key, b"penstock gateway" + ours + theirs, hashlib.sha256
    )
    assert worker_mac(key, ours, theirs) == hmac.digest(
        key, b"penstock worker" + ours + theirs, hashlib.sha256
    )


@given(KEYS, KEYS, NONCES, NONCES)
def test_a_proof_holds_for_its_side_its_key_and_its_nonces_only(key, other, worker, gateway) -> None:
    proof = gateway_mac(key, worker, gateway)
    assert is_same(proof, gateway_mac(key, worker, gateway))
    assert not is_same(proof, worker_mac(key, worker, gateway))  # What a gateway sent is no worker's welcome.
    # HMAC pads a key with zeros: two keys that differ in those alone are one.
    assert is_same(proof, gateway_mac(other, worker, gateway)) == (key.rstrip(b"\0") == other.rstrip(b"\0"))
    assert is_same(proof, gateway_mac(key, gateway, worker)) == (worker == gateway)


@given(KEYS)
def test_keys_that_are_derived_are_others_than_the_key_and_stay_the_same(key) -> None:
    hash_key = hash_key_of(key)
    assert hash_key == hash_key_of(key) != key
    link_key = link_key_of(hash_key)
    assert link_key.decode().isalnum()
    assert len(link_key) == 64
    assert link_key != hash_key.hex().encode()


@given(KEYS, st.integers(0, 31))
def test_one_bit_is_enough_to_fail(key, at) -> None:
    proof = bytearray(worker_mac(key, b"a" * 32, b"b" * 32))
    true = bytes(proof)
    proof[at] ^= 1
    assert not is_same(bytes(proof), true)
    assert not is_same(b"", true)
    assert not is_same(true[:-1], true)


KEY, OURS, THEIRS = b"k" * 16, b"w" * 32, b"g" * 32
PROOF = encode(Proof(THEIRS, gateway_mac(KEY, OURS, THEIRS)))


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_doorkeeper_lets_in_who_has_the_key_however_the_bytes_come(size: int) -> None:
    door = Doorkeeper(KEY, OURS)
    assert not door.is_proven
    found = [each for data in cut(PROOF + encode(Ping()), size) for each in door.messages(data)]
    assert found == [Welcome(worker_mac(KEY, OURS, THEIRS)), Ping()]
    assert door.is_proven


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (encode(Ping()), "did not prove"),
        (encode(Proof(THEIRS, gateway_mac(b"another key of it", OURS, THEIRS))), "another one"),
        (encode(Proof(THEIRS, worker_mac(KEY, OURS, THEIRS))), "another one"),
        (PROOF + PROOF, "unsolicited"),
        (b"x" * (PROOF_BYTES_MAX + 1), "much was said"),
        (b"\2\0\0\0{}", "not a message"),
    ],
)
def test_a_doorkeeper_lets_nobody_else_in(said: bytes, why: str) -> None:
    door = Doorkeeper(KEY, OURS)
    with pytest.raises(ProtocolError, match=why):
        list(door.messages(said))


def test_without_a_key_everybody_is_let_in_and_proofs_are_unsolicited() -> None:
    door = Doorkeeper(b"", OURS)
    assert door.is_proven
    assert list(door.messages(encode(Drain()) * 400)) == [Drain()] * 400, "no bound on what is said"
    with pytest.raises(ProtocolError, match="unsolicited"):
        list(door.messages(PROOF))

"""The name of a KV block: a keyed hash chained over the tokens before it.

    root   = H(key, identity, adapter, tenant salt)
    hash_0 = H(key, root   || tokens 0..15)
    hash_1 = H(key, hash_0 || tokens 16..31)   ...

A prompt may begin in the public region, with blocks that an operator declared to be anybody's. There the root
is without a salt, and the salt is mixed in where the first private block begins:

    public root = H(key, identity, adapter)
    hash_0      = H(key, public root || tokens 0..15)       equal for every tenant
    hash_1      = H(key, H(key, hash_0, tenant salt) || tokens 16..31)      this tenant's own

The identity is that of the model's computation (identity.py), whatever the model is called where.
Two blocks have the same hash exactly when everything that decides their KV is the same, and, outside of the
public region, only for one tenant: so the engine's prefix cache, the router's locality index and the
simulator can share this one name. H is BLAKE2b (RFC 7693) with a secret key: without the key no one can look
for collisions or recompute the hash of a guessed prompt. This module knows neither where blocks live nor who
asks.

The identity of a model's computation: equal for two workers exactly when they compute the same bits from
the same tokens.

A model's *name* is a label: clients ask for it, and an operator may give the same one to workers that differ
(int8 here, bfloat16 there; the old checkpoint here, the new one there). The identity is made from what is
computed and with what, and from no name or path. A worker announces it (`ModelInfo.identity`), and it decides
two things:

    the names of KV blocks    (hashing.py) start from it, in the engine, in the router and in the simulator
    where a stream may move   (policy/queueing/capacity.py): to a worker of the same identity, for its tokens
                              must be those that were promised

The adapter is chosen by each request, so it enters where a prompt's chain of block names begins, beside the
tenant's salt. Pure; engine/fingerprint.py reads the files.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType, Protocol

import msgspec

from penstock.types import BLOCK_TOKENS

BlockHash = NewType("BlockHash", bytes)
"""32 bytes. Also the root of a chain, which names no block."""

PUBLIC = b"\x00penstock public region"
"""The namespace of blocks whose tokens an operator declared public: every tenant may hit them. No tenant's
salt."""
DIGEST_BYTES = 32
TOKEN_BYTES = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES

assert array("i").itemsize == TOKEN_BYTES  # True wherever CPython runs today.


def token_array(tokens: bytes | Iterable[int]) -> "array[int]":
    """Token ids as a growable int32 array; bytes are int32 little-endian, as on the wire.

    Raises:
        ValueError: the bytes are not whole tokens.
        OverflowError: an id does not fit 32 bits.
    """
    if not isinstance(tokens, bytes):
        return array("i", tokens)
    ids = array("i")
    ids.frombytes(tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def token_bytes(tokens: "array[int] | Sequence[int]") -> bytes:
    """Token ids as int32 little-endian, the form that is hashed and sent."""
    ids = tokens if isinstance(tokens, array) else array("i", tokens)
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


class BlockHasher:
    """Makes the hash chains of one model's computation. Immutable, and cheap: about 0.4 us per block.

    Every process that must agree on hashes (a router and its workers) is given the same `key`, and goes by
    the identity that the worker announces.
    """

    __slots__ = ("_block", "_identity", "_key")

    def __init__(self, *, key: bytes, identity: str) -> None:
        assert 16 <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE, "a short key can be guessed"
        self._key = key
        self._identity = identity.encode()
        # Keying costs a compression: it is done once here and copied per block.
        self._block = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"penstock block")

    def root(self, *, salt: bytes = b"", adapter: str = "") -> BlockHash:
        """The parent of every first block under this tenant `salt` and `adapter`."""
        hasher = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"penstock root")
        for part in (self._identity, adapter.encode(), salt):
            # The length goes first, so that no two lists of parts spell the same bytes.
            hasher.update(struct.pack("<Q", len(part)) + part)
        return BlockHash(hasher.digest())

    def public_root(self, *, adapter: str = "") -> BlockHash:
        """The parent of every first block in the public region, which is no tenant's."""
        hasher = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"penstock public")
        for part in (self._identity, adapter.encode()):
            hasher.update(struct.pack("<Q", len(part)) + part)
        return BlockHash(hasher.digest())

    def enter(self, parent: BlockHash, *, salt: bytes) -> BlockHash:
        """The parent of the first private block after `parent`, the last public one. It names no block."""
        hasher = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"penstock enter")
        assert len(parent) == DIGEST_BYTES, "only a block's hash can be entered from"
        hasher.update(parent + salt)
        return BlockHash(hasher.digest())

    def extend(self, parent: BlockHash, tokens: bytes) -> list[BlockHash]:
        """The hashes of the whole blocks in `tokens` (int32 little-endian) that follow `parent`.

        A last, partial block has no hash: its tokens are ignored.
        """
        assert len(parent) == DIGEST_BYTES, "a chain continues from a hash of this kind"
        fresh, digest = self._block.copy, parent
        hashes: list[BlockHash] = []
        for start in range(0, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
            hasher = fresh()
            hasher.update(digest + tokens[start : start + BLOCK_BYTES])
            digest = BlockHash(hasher.digest())
            hashes.append(digest)
        return hashes

    def grow(
        self, hashes: list[BlockHash], tokens: "array[int]", num_blocks: int, *, lineage: "Lineage"
    ) -> None:
        """Extend a prompt's chain `hashes` to its first `num_blocks` blocks; what is there is not hashed
        again.
        """
        for end in (min(lineage.num_public, num_blocks), num_blocks):
            if (done := len(hashes)) < end:
                parent = hashes[-1] if hashes else lineage.root
                if done and done == lineage.num_public:
                    parent = self.enter(parent, salt=lineage.owner)
                hashes += self.extend(parent, token_bytes(tokens[done * BLOCK_TOKENS : end * BLOCK_TOKENS]))
                assert len(hashes) == end, f"{len(tokens)} tokens are not {end} blocks"

    def root_of(self, *, salt: bytes, adapter: str, num_public: int) -> BlockHash:
        """Where the chain of a prompt with so many leading public blocks starts."""
        return self.public_root(adapter=adapter) if num_public else self.root(salt=salt, adapter=adapter)


class Lineage(Protocol):
    """What a chain depends on besides its tokens."""

    @property
    def root(self) -> BlockHash:
        """See `BlockHasher.root_of`."""
        ...

    @property
    def owner(self) -> bytes:
        """The tenant's salt."""
        ...

    @property
    def num_public(self) -> int:
        """Leading blocks in the public region."""
        ...


IDENTITY_BYTES = 16
"""Two computations share an identity by accident once in 2^64 pairs of them."""


class Computation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the bits of a KV block and of the next token, beside the tokens, the adapter
    and the sampling.
    """

    checkpoint: str
    """Digest of the weights and of the configuration that says how they are used."""
    tokenizer: str
    """Digest of the vocabulary: what the ids stand for."""
    dtype: str
    """Of activations, and of weights that are not quantized."""
    kv_dtype: str
    """Of the KV cache."""
    quantization: str = "none"
    """How the weights were rounded when they were loaded."""
    kernels: str = ""
    """What computes. Kernels of different instruction sets or libraries add up in different orders, so their
    bits differ."""

    @property
    def identity(self) -> str:
        """32 hexadecimal digits."""
        hasher = hashlib.blake2b(digest_size=IDENTITY_BYTES, person=b"penstock ident")
        for value in msgspec.structs.astuple(self):
            part = str(value).encode()
            # The length goes first, so that no two lists of parts spell the same bytes.
            hasher.update(struct.pack("<Q", len(part)) + part)
        return hasher.hexdigest()

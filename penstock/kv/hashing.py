"""The name of a KV block: a keyed hash chained over the tokens before it.

    root   = H(key, identity, adapter, tenant salt)
    hash_0 = H(key, root   || tokens 0..15)
    hash_1 = H(key, hash_0 || tokens 16..31)   ...

A prompt may begin in the public region, with blocks that an operator declared to be anybody's. There the root
is without a salt, and the salt is mixed in where the first private block begins:

    public root = H(key, identity, adapter)
    hash_0      = H(key, public root || tokens 0..15)       equal for every tenant
    hash_1      = H(key, H(key, hash_0, tenant salt) || tokens 16..31)      this tenant's own

The identity is that of the model's computation (engine/fingerprint.py), whatever the model is called where.
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

The question of a router to its index: the 64-bit keys of a prompt's KV blocks, under two names.

    own        the first 8 bytes of our engine's block hash (hashing.py), which its KV events carry:
               one look in the index answers for our workers of one identity that share a key, and nothing is
               hashed twice
    canonical  a chain of our own over blocks of 16 tokens, for everybody else's blocks

               root  = H(key, model, adapter, namespace)
               key_0 = H(root  || tokens 0..15)
               key_1 = H(key_0 || tokens 16..31) ...

Other engines hash in their own ways, with seeds of their own. They name a block by its tokens and its parent,
so the router makes its own name of it and keeps theirs only to understand their later messages.

H is BLAKE2b (RFC 7693) with a secret key and a digest of 64 bits. Two different prefixes share a key by
accident only: with a million keys known, one in 10^13. A false match costs one wrong placement, never an
answer: what an engine reuses is decided by its own full hashes. Prompts of different tenants or adapters have
different roots, so their keys never match.
"""

import base64
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

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


ROOTS_MAX = 4096
"""Roots of chains that are remembered, one for each tenant and adapter: the next prompt of the same two
costs a lookup in place of a hash. All are forgotten when there are so many."""


class BlockHasher:
    """Makes the hash chains of one model's computation. Cheap: about 0.4 us per block.

    Every process that must agree on hashes (a router and its workers) is given the same `key`, and goes by
    the identity that the worker announces.
    """

    __slots__ = ("_block", "_identity", "_key", "_roots")

    def __init__(self, *, key: bytes, identity: str) -> None:
        assert 16 <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE, "a short key can be guessed"
        self._key = key
        self._identity = identity.encode()
        # Keying costs a compression: it is done once here and copied per block.
        self._block = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"penstock block")
        self._roots: dict[tuple[bytes, str, bool], BlockHash] = {}
        """By salt, adapter, and whether the prompt begins in the public region."""

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
        self,
        hashes: list[BlockHash],
        tokens: "array[int]",
        num_blocks: int,
        *,
        root: BlockHash,
        owner: bytes,
        num_public: int,
    ) -> None:
        """Extend a prompt's chain `hashes`, which starts from `root`, to its first `num_blocks` blocks; what
        is there is not hashed again. Behind its leading public blocks it is the chain of `owner`, a tenant's
        salt.
        """
        for end in (min(num_public, num_blocks), num_blocks):
            if (done := len(hashes)) < end:
                parent = hashes[-1] if hashes else root
                if done and done == num_public:
                    parent = self.enter(parent, salt=owner)
                hashes += self.extend(parent, token_bytes(tokens[done * BLOCK_TOKENS : end * BLOCK_TOKENS]))
                assert len(hashes) == end, f"{len(tokens)} tokens are not {end} blocks"

    def root_of(self, *, salt: bytes, adapter: str, num_public: int) -> BlockHash:
        """Where the chain of a prompt with so many leading public blocks starts."""
        name = (salt, adapter, num_public > 0)
        if (found := self._roots.get(name)) is None:
            found = self.public_root(adapter=adapter) if num_public else self.root(salt=salt, adapter=adapter)
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            self._roots[name] = found
        return found


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
    """The name of the kernels. Kernels of different instruction sets or libraries add up in different orders,
    so their bits differ."""

    @property
    def identity(self) -> str:
        """32 hexadecimal digits."""
        hasher = hashlib.blake2b(digest_size=IDENTITY_BYTES, person=b"penstock ident")
        for value in msgspec.structs.astuple(self):
            part = str(value).encode()
            # The length goes first, so that no two lists of parts spell the same bytes.
            hasher.update(struct.pack("<Q", len(part)) + part)
        return hasher.hexdigest()


KEY_BYTES = 8
_FEW = 4
"""Fewer hashes than so many are read one by one: joining them would take longer."""


def own_keys(hashes: Sequence[bytes]) -> list[int]:
    """Our engine's block hashes, all of one length, as keys."""
    if len(hashes) < _FEW:
        return [int.from_bytes(block_hash[:KEY_BYTES], "little") for block_hash in hashes]
    size, rest = divmod(len(hashes[0]), KEY_BYTES)
    assert not rest, "a hash is a whole number of keys long"
    words = array("Q", b"".join(hashes))
    if sys.byteorder == "big":
        words.byteswap()
    return words[::size].tolist()


def namespace_of(salt: bytes) -> str:
    """A tenant's salt as a foreign engine is given it (`cache_salt`), and as it comes back in that engine's
    events. Without '/', which vLLM takes no salt with.
    """
    return base64.urlsafe_b64encode(salt).decode()


class CanonicalHasher:
    """Makes canonical keys for one model. Immutable; about half a microsecond per block."""

    __slots__ = ("_block", "_key", "_model")

    def __init__(self, *, key: bytes, model: str) -> None:
        assert 16 <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE, "a short key can be guessed"
        self._key, self._model = key, model.encode()
        self._block = hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=b"penstock canon")

    def root(self, *, namespace: str = "", adapter: str = "") -> int:
        """The parent of every first block in this namespace, under this adapter."""
        hasher = hashlib.blake2b(key=self._key, digest_size=KEY_BYTES, person=b"penstock roots")
        for part in (self._model, adapter.encode(), namespace.encode()):
            hasher.update(struct.pack("<Q", len(part)) + part)
        return int.from_bytes(hasher.digest(), "little")

    def mark(self, parent: int, what: bytes) -> int:
        """In place of `parent`, for a block whose content depends on more than its tokens (an image)."""
        hasher = hashlib.blake2b(key=self._key, digest_size=KEY_BYTES, person=b"penstock marks")
        hasher.update(parent.to_bytes(KEY_BYTES, "little") + what)
        return int.from_bytes(hasher.digest(), "little")

    def extend(self, parent: int, tokens: bytes) -> list[int]:
        """The keys of the whole blocks in `tokens` (int32 little-endian) that follow `parent`."""
        fresh, digest = self._block.copy, parent.to_bytes(KEY_BYTES, "little")
        keys: list[int] = []
        for start in range(0, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
            hasher = fresh()
            hasher.update(digest + tokens[start : start + BLOCK_BYTES])
            digest = hasher.digest()
            keys.append(int.from_bytes(digest, "little"))
        return keys


class PromptKeys:
    """The keys of one prompt's whole blocks, made when they are first asked for.

    Made by `PromptKeyMaker.keys`.
    """

    __slots__ = (
        "_canonical", "_maker", "_own", "_tokens", "adapter", "expected_blocks", "num_public", "num_tokens",
        "owner",
    )  # fmt: skip

    def __init__(
        self,
        maker: "PromptKeyMaker",
        token_ids: Sequence[int],
        *,
        salt: bytes = b"",
        public_tokens: int = 0,
        adapter: str = "",
    ) -> None:
        self.num_tokens = len(token_ids)
        self.owner, self.adapter = salt, adapter
        assert public_tokens >= 0, public_tokens
        self.num_public = public_tokens // BLOCK_TOKENS
        self.expected_blocks = 0
        """The blocks that the worker which got it was expected to have of it (see worker_cache_view.py)."""
        self._maker = maker
        self._tokens = token_ids
        self._own: dict[BlockHasher, Sequence[int]] = {}
        self._canonical: list[int] | None = None

    @property
    def model(self) -> str:
        """The model whose prompt it is."""
        return self._maker.model

    @property
    def num_blocks(self) -> int:
        """Whole blocks of the prompt: as many as there are keys of either kind."""
        return self.num_tokens // BLOCK_TOKENS

    def own(self, hasher: BlockHasher) -> Sequence[int]:
        """Keys of the blocks of our workers that name them with `hasher`: of one identity, with one secret.

        Leading public blocks are everybody's.
        """
        if (found := self._own.get(hasher)) is None:
            hashes: list[BlockHash] = []
            owner, num_public = self.owner, self.num_public
            adapter = self._maker.digests.get(self.adapter, self.adapter)
            root = hasher.root_of(salt=owner, adapter=adapter, num_public=num_public)
            tokens = self._array()
            hasher.grow(hashes, tokens, self.num_blocks, root=root, owner=owner, num_public=num_public)
            self._own[hasher] = found = own_keys(hashes)
            assert len(found) == self.num_blocks, "a key for each whole block"
        return found

    @property
    def canonical(self) -> Sequence[int]:
        """Keys of everybody else's blocks.

        They know no public region: the tenant's salt covers all of the prompt.
        """
        if self._canonical is None:
            hasher = self._maker.canonical
            root = hasher.root(namespace=namespace_of(self.owner), adapter=self.adapter)
            self._canonical = hasher.extend(root, token_bytes(self._array()))
            assert len(self._canonical) == self.num_blocks, "a key for each whole block"
        return self._canonical

    def _array(self) -> "array[int]":
        return token_array(self._tokens[: self.num_blocks * BLOCK_TOKENS])


class PromptKeyMaker:
    """Makes the keys of the prompts of one model."""

    __slots__ = ("canonical", "digests", "model")

    def __init__(self, *, key: bytes, model: str) -> None:
        self.model = model
        self.digests: dict[str, str] = {}
        """Of adapters, by name: our workers' blocks are named by those."""
        self.canonical = CanonicalHasher(key=key, model=model)

    def keys(
        self, token_ids: Sequence[int], *, salt: bytes = b"", public_tokens: int = 0, adapter: str = ""
    ) -> PromptKeys:
        """The keys of this prompt: nothing is computed yet, and the tokens are not copied."""
        return PromptKeys(self, token_ids, salt=salt, public_tokens=public_tokens, adapter=adapter)

"""What a router asks its index for: the 64-bit keys of a prompt's KV blocks, under two names.

    own        the first 8 bytes of our engine's block hash (hashing.py), which its KV events carry:
               one look in the index answers for our workers of one identity that share a key, and nothing is
               hashed twice
    canonical  a chain of our own over blocks of 16 tokens, for everybody else's blocks

               root  = H(key, model, adapter, namespace)
               key_0 = H(root  || tokens 0..15)
               key_1 = H(key_0 || tokens 16..31) ...

Other engines hash in their own ways, with seeds of their own. What they say of a block are its
tokens and its parent, so the router makes its own name of it and keeps theirs only to understand their later
words.

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
from collections.abc import Sequence
from typing import NamedTuple

from penstock.kv.hashing import BLOCK_BYTES, BlockHash, BlockHasher, token_array, token_bytes
from penstock.types import BLOCK_TOKENS

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
    events.
    """
    return base64.b64encode(salt).decode()


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


class _Lineage(NamedTuple):
    """Of a prompt (`hashing.Lineage`)."""

    root: BlockHash
    owner: bytes
    num_public: int


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
        """What the worker that it was sent to was expected to have of it (see worker_cache_view.py)."""
        self._maker = maker
        self._tokens = token_ids
        self._own: dict[BlockHasher, list[int]] = {}
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
            lineage = _Lineage(
                hasher.root_of(salt=self.owner, adapter=self.adapter, num_public=self.num_public),
                self.owner,
                self.num_public,
            )
            hasher.grow(hashes, self._array(), self.num_blocks, lineage=lineage)
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

    __slots__ = ("canonical", "model")

    def __init__(self, *, key: bytes, model: str) -> None:
        self.model = model
        self.canonical = CanonicalHasher(key=key, model=model)

    def keys(
        self, token_ids: Sequence[int], *, salt: bytes = b"", public_tokens: int = 0, adapter: str = ""
    ) -> PromptKeys:
        """The keys of this prompt: nothing is computed yet, and the tokens are not copied."""
        return PromptKeys(self, token_ids, salt=salt, public_tokens=public_tokens, adapter=adapter)

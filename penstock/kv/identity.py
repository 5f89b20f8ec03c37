"""The identity of a model's computation: equal for two workers exactly when they compute the same bits from
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

import msgspec

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

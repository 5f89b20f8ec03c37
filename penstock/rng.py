"""Randomness, as named streams.

Every part that needs chance takes a stream from here, so one seed fixes a whole run; this module is
the only one that asks the machine for entropy. Streams with different names are independent.
"""

import hashlib
import os
import random
import secrets
import struct

Stream = random.Random
"""The type of a stream, for signatures."""
SEED_BITS = 63


def stream(seed: int, name: str) -> Stream:
    """A deterministic stream for `name`: the same seed and name give the same numbers everywhere."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


_seeds: list[int] = []
_SEEDS = struct.Struct("256Q")
os.register_at_fork(after_in_child=_seeds.clear)  # Two processes share none.


def fresh_seed() -> int:
    """A 63-bit seed from the machine's entropy, for requests and runs that were given none; the machine is
    asked for many at once.
    """
    try:
        return _seeds.pop() >> 64 - SEED_BITS
    except IndexError:
        _seeds.extend(_SEEDS.unpack(secrets.token_bytes(_SEEDS.size)))
        return secrets.randbits(SEED_BITS)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's choices: its own for the first, derived from it for the others."""
    if choice == 0:
        return seed & (2**SEED_BITS - 1)
    return stream(seed, f"choice/{choice}").getrandbits(SEED_BITS)


def fresh_token(num_bytes: int = 24) -> str:
    """An unguessable URL-safe token (API keys, cache salts)."""
    return secrets.token_urlsafe(num_bytes)


def fresh_key(num_bytes: int = 32) -> bytes:
    """Unguessable bytes (the key of the block-hash chain)."""
    return secrets.token_bytes(num_bytes)


class IdSource:
    """Makes ids such as `chatcmpl-7f3a...`: unique across processes, cheap, and seedable for tests.

    An id is a random 64-bit process part and a counter: no system call per request.
    """

    __slots__ = ("_next", "_process")

    def __init__(self, *, seed: int | None = None) -> None:
        bits = stream(seed, "ids").getrandbits(64) if seed is not None else secrets.randbits(64)
        self._process = f"{bits:016x}"
        self._next = 0

    def take(self, prefix: str) -> str:
        """The next id: `{prefix}-{process}{counter}`."""
        self._next += 1
        return f"{prefix}-{self._process}{self._next:08x}"

    @staticmethod
    def renamed(taken: str, prefix: str) -> str:
        """The same id of another kind: a request and its answer differ in their prefix only."""
        return prefix + taken.partition("-")[2]

    @staticmethod
    def process_of(taken: str) -> str:
        """The process part of an id."""
        return taken.partition("-")[2][:16]

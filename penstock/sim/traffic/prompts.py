"""Token ids and block names of prompts that are made of segments, at a cost that hardly depends on their
length.

Hashing a prompt's blocks one by one would cost more than everything else that the simulator does for a
request. The tokens of a segment are a function of its content, so the chain over tokens can be followed
segment by segment: a block is named by the content it ends in, the position there, and everything before that
content. A chain begins where `BlockHasher` lets it begin, with the secret, the identity of what computes, the
adapter and the tenant's salt; and two blocks have equal names exactly when it would give them equal hashes
(tests/sim/test_prompts.py holds the two side by side). A worker names its blocks by itself, with its own
hasher, in place of those hashes, and the prefix cache works on them as ever; a gateway makes the names that
it looks for from what the workers have announced.

Randomness of a simulation: named streams of one seed, each independent of how much the others are used.
"""

from array import array
from collections.abc import Iterator, Sequence
from struct import iter_unpack
from typing import overload

from penstock import rng
from penstock.kv.hashing import KEY_BYTES, PUBLIC, BlockHash, BlockHasher
from penstock.sim.traffic.request import Segment
from penstock.types import BLOCK_TOKENS

_MASK = (1 << 64) - 1


class Streams:
    """Makes and keeps the streams of one run: the same name is the same stream."""

    __slots__ = ("_streams", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, rng.Stream] = {}

    def of(self, name: str) -> rng.Stream:
        """The stream of this name; one per part that draws, so that parts do not disturb each other."""
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = rng.stream(self.seed, f"sim/{name}")
        return found


def mix(one: int, other: int) -> int:
    """A 63-bit number from two, without state: the same two give the same number everywhere.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014).
    """
    value = (one * 0x9E3779B97F4A7C15 + other + 0x632BE59BD9B4E019) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1


_NAME = "8s"
"""A name is 8 bytes long."""
EOS = 2**31 - 1
"""The stop token. No content has it."""
_TAPE_TOKENS = 1 << 16
_TAPE_STEP = 7919
_CONTENT_BITS = 30
_CONTENT_MASK = (1 << _CONTENT_BITS) - 1


def _make_tape() -> "array[int]":
    """Made-up token ids, twice, so that a piece from anywhere is one slice."""
    once = array("i", (mix(1, i) & 0x7FFF for i in range(_TAPE_TOKENS)))
    return once + once


_tape = _make_tape()


def content_tokens(content: int, start: int, end: int) -> "array[int]":
    """Tokens `start .. end - 1` of a content. Its first two tell it from every other."""
    first, count = (content * _TAPE_STEP + start) % _TAPE_TOKENS, end - start
    tape = _tape if count <= _TAPE_TOKENS else _tape * (count // _TAPE_TOKENS + 1)
    tokens = tape[first : first + count]
    if start == 0 < end:
        tokens[0] = content & _CONTENT_MASK
    if start <= 1 < end:
        tokens[1 - start] = content >> _CONTENT_BITS
    return tokens


def prompt_tokens(segments: Sequence[Segment]) -> "array[int]":
    """The token ids of a prompt."""
    tokens = array("i")
    for segment in segments:
        tokens += content_tokens(segment.content, 0, segment.tokens)
    return tokens


class LazyTokens(Sequence[int]):
    """The token ids of a prompt, made when somebody looks at them."""

    __slots__ = ("_num_tokens", "_segments")

    def __init__(self, segments: Sequence[Segment], num_tokens: int) -> None:
        self._segments, self._num_tokens = segments, num_tokens

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return prompt_tokens(self._segments)[index]

    def __iter__(self) -> Iterator[int]:
        return iter(prompt_tokens(self._segments))


class BlockNames:
    """Names the blocks of prompts as the workers of one hasher do, in the namespaces of tenants."""

    __slots__ = ("_hasher", "_roots")

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._roots: dict[tuple[bytes, str], int] = {}

    def chain(
        self, segments: Sequence[Segment], *, salt: bytes, adapter: str = "", public_tokens: int = 0
    ) -> list[BlockHash]:
        """The names of all whole blocks, in order: those within the first `public_tokens` tokens are all
        tenants'.
        """
        num_public, root = public_tokens // BLOCK_TOKENS, self._root(salt, adapter)
        if not num_public:
            return self._names(segments, root)
        names = self._names(segments, mix(root, num_public))
        names[:num_public] = self._names(segments, self._root(PUBLIC, adapter))[:num_public]
        return names

    def _root(self, salt: bytes, adapter: str) -> int:
        root = self._roots.get((salt, adapter))
        if root is None:
            digest = self._hasher.root_of(salt=salt, adapter=adapter, num_public=int(salt == PUBLIC))
            root = self._roots[salt, adapter] = int.from_bytes(digest[:KEY_BYTES], "big") >> 1
        return root

    def _names(self, segments: Sequence[Segment], state: int) -> list[BlockHash]:
        packed, place = b"", 0
        for content, tokens in ((segment.content, segment.tokens) for segment in segments):
            base = mix(state, content)
            # Blocks that end in this content, by the position there of the first token behind them.
            ends = range(base + BLOCK_TOKENS - place, base + tokens + 1, BLOCK_TOKENS)
            packed += array("Q", ends).tobytes()
            place = (place + tokens) % BLOCK_TOKENS
            state = mix(base, tokens)
        return [BlockHash(name) for (name,) in iter_unpack(_NAME, packed)]

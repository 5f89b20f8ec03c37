"""One request of a simulated workload and what became of it; and the token ids and block names of its prompt,
which is made of segments, at a cost that hardly depends on its length.

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
from functools import lru_cache
from typing import NamedTuple, overload

import msgspec

from penstock import rng
from penstock.kv.hashing import KEY_BYTES, PUBLIC, BlockHasher
from penstock.policy.flow import Outcome
from penstock.types import BLOCK_TOKENS

RETRY_MARK = "^"
"""Ends the id of a request that comes again, once for each time."""


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of a prompt: the first `tokens` tokens of the content with this number.

    Two prompts that begin with the same segments have the same tokens there, and contents with different
    numbers have different ones: a system prompt, a document, a turn of a conversation. The answer of a
    request is a content too (`SimRequest.answer`), so that a next turn can have it in its prompt.
    """

    content: int
    """0 to 2^60."""
    tokens: int


class SimRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One request, as a workload makes it.

    Open loop: it comes at its time, whatever became of those before.
    """

    id: str
    at_ns: int
    tenant: str = ""
    """Of those that the world knows; any other is made up with the defaults."""
    model: str = "model"
    prompt: tuple[Segment, ...]
    answer: int = 0
    """The content of its answer, for the prompts of later requests; 0 is one that no other has."""
    output_tokens: int
    """Tokens that the model generates before it stops by itself, the stop token included."""
    max_tokens: int = 0
    """The client's bound; 0 is `output_tokens` (and then the answer ends by length)."""
    public_tokens: int = 0
    """Leading prompt tokens that are no tenant's secret: all tenants share their cached blocks."""
    session: str = ""
    adapter: str = ""
    band: str = ""
    """Priority band; empty is the tenant's."""
    region: str = ""
    """Where the client is; empty is the first."""
    places: tuple[str, ...] = ()
    """Labels of cells that it is bound to."""
    cancel_at_ns: int = 0
    """When the client leaves, whatever it has got by then; 0: it stays."""
    patience_ns: int = 0
    """How long it waits for a first token before it leaves; 0: for ever."""
    first_token_ns: int = 0
    """The bound for its first token that it tells the gateway; 0 says nothing."""
    retries: int = 0
    """How often its client comes again after it was refused."""
    retry_ns: int = 0
    """After how long, whatever it was told; 0: when it was told to."""
    poison: bool = False
    """It brings down every worker that computes its prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(segment.tokens for segment in self.prompt)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of one request, as its client saw it. Times are since the start of the simulation."""

    id: str
    tenant: str
    model: str
    """That answered, or was asked."""
    band: str
    outcome: Outcome
    reason: str = ""
    """Which part refused it, why it was evicted, or the error's name."""
    at_ns: int
    first_ns: int = -1
    """First token at the client; -1: none came."""
    end_ns: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 0
    migrations: int = 0
    """Of the attempts, those that went on behind what a lost worker had given."""
    worker: str = ""
    queue_ns: int = 0
    """In the gateway's queue."""
    retry_after_ns: int = 0
    """When it was told to come again, from its refusal on; 0: it was not."""

    @property
    def is_retry(self) -> bool:
        """Whether its client was refused before."""
        return self.id.endswith(RETRY_MARK)

    @property
    def ttft_ns(self) -> int:
        """Time to first token; -1: none came."""
        return self.first_ns - self.at_ns if self.first_ns >= 0 else -1

    @property
    def tpot_ns(self) -> int:
        """Mean time per further token; 0 with less than two."""
        further = self.completion_tokens - 1
        return (self.end_ns - self.first_ns) // further if further > 0 and self.first_ns >= 0 else 0


def unreachable(request: SimRequest, now_ns: int) -> RequestRecord:
    """The record of a request whose client found no gateway."""
    return RequestRecord(
        id=request.id,
        tenant=request.tenant,
        model=request.model,
        band=request.band,
        outcome=Outcome.REJECTED,
        reason="no_gateway",
        at_ns=request.at_ns,
        end_ns=now_ns,
    )


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
    """The token ids of a prompt, made when they are read."""

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


_CHAINS_MAX = 256
"""Prompts whose names are remembered: from the look-up of their gateway until their worker names them."""
_NEXT = 1 + (1 << 36)
"""From a block's name to the next one's. Neighbours are neighbours in dictionaries too, sixteen of them in
one shard of a gateway's index.
"""


class PromptBlockNames:
    """Names the blocks of prompts as the workers of one hasher do, in the namespaces of tenants."""

    __slots__ = ("_hasher", "_roots")

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._roots: dict[tuple[bytes, str], int] = {}

    def keys(
        self, prompt: tuple[Segment, ...], *, salt: bytes, adapter: str = "", public_tokens: int = 0
    ) -> tuple[int, ...]:
        """The names of all whole blocks of a prompt, in order: those within the first `public_tokens` tokens
        are all tenants'.
        """
        return self._chain(prompt, salt, adapter, public_tokens).keys

    def chain(
        self,
        prompt: tuple[Segment, ...],
        answer: Segment,
        *,
        salt: bytes,
        adapter: str = "",
        public_tokens: int = 0,
    ) -> tuple[int, ...]:
        """The same of a prompt with its answer behind it. Those of the prompt are the very objects that its
        gateway's index has.
        """
        found = self._chain(prompt, salt, adapter, public_tokens)
        return found.keys + _continued(answer, found.state, found.place).keys

    def _chain(self, prompt: tuple[Segment, ...], salt: bytes, adapter: str, public_tokens: int) -> "_Chain":
        num_public, root = public_tokens // BLOCK_TOKENS, self._root(salt, adapter)
        if not num_public:
            return _chain(prompt, root)
        public = _chain(prompt, self._root(PUBLIC, adapter)).keys[:num_public]
        private = _chain(prompt, mix(root, num_public))
        return private._replace(keys=public + private.keys[num_public:])

    def _root(self, salt: bytes, adapter: str) -> int:
        root = self._roots.get((salt, adapter))
        if root is None:
            digest = self._hasher.root_of(salt=salt, adapter=adapter, num_public=int(salt == PUBLIC))
            root = self._roots[salt, adapter] = int.from_bytes(digest[:KEY_BYTES], "big") >> 1
        return root


class _Chain(NamedTuple):
    """The names of a prompt's whole blocks, and the state from which the next ones are named."""

    keys: tuple[int, ...]
    state: int
    """A function of all that is there."""
    place: int
    """Tokens behind the last whole block."""


def _continued(segment: Segment, state: int, place: int) -> _Chain:
    """The names of the whole blocks that end in this content, behind others."""
    base, (count, place) = mix(state, segment.content), divmod(place + segment.tokens, BLOCK_TOKENS)
    return _Chain(tuple(range(base, base + count * _NEXT, _NEXT)), mix(base, segment.tokens), place)


@lru_cache(maxsize=_CHAINS_MAX)
def _chain(prompt: tuple[Segment, ...], root: int) -> _Chain:
    """Of a prompt, from the parent of its first block on."""
    if len(prompt) == 1:
        return _continued(prompt[0], root, 0)
    keys, state, place = list[int](), root, 0
    for segment in prompt:
        more, state, place = _continued(segment, state, place)
        keys += more
    return _Chain(tuple(keys), state, place)

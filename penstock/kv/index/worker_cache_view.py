"""The cache of one worker, as far as it reports it: its stream of KV events, and what its answers say.

    UNKNOWN   no reports: only predictions count
    SYNCED    every batch was heard, in order
    GAP       a batch is missing: those after it wait, and `wanted` says from where it must be sent again
    CLEARED   the worker begins with nothing, or what was believed cannot be: all that follows will be heard

A batch that is missing for good, cannot be read or has an event of an unknown type may have taken blocks
away: all that was believed is dropped, and what comes after it is believed again. Block ids are turned into
keys by block_names.py.

Where the request was sent, its blocks are *predicted*. Every answer says how much of its prompt was cached
(`audit`): that confirms predictions or ends them, tells how large a silent worker's cache is, and how far
this worker's index can be trusted.

Pure: told by backends/engine/backend.py, whose order is certain (`hear`), or by fleet/kv_watch.py
(`live`, `again`, `end_of_replay`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType

from penstock.kv.hashing import PromptKeys
from penstock.kv.index.block_names import (
    BlockNames,
    Cleared,
    Event,
    KVEventError,
    Named,
    Removed,
    Stored,
    decode_events,
)
from penstock.kv.index.prefix_index import PrefixIndex
from penstock.types import BLOCK_TOKENS

# Bounds of the KV index, and how long it believes what: constants, which only tests change. docs/kv-index.md
# has the story.


@dataclass(slots=True, frozen=True, kw_only=True)
class KVIndexLimits:
    """The same for all workers of a gateway."""

    entries_max: int = 4_000_000
    """KV blocks per tier (device, host) over all workers; about 105 bytes each. The oldest are forgotten
    first."""
    blocks_per_worker_max: int = 1_000_000
    """Blocks that one worker may report. One that reports more starts again with nothing."""
    predicted_max: int = 65_536
    """Blocks that are counted on at one worker only because requests were sent there: how large a cache is
    taken to be at first. Cached counts in answers make it smaller, or larger again."""
    predicted_ttl_s: float = 120.0
    """How long they are counted on at workers that send no KV events."""
    announced_ttl_s: float = 10.0
    """And at workers that do, until the event comes."""
    stale_s: float = 30.0
    """A worker whose events should have come and have not is believed less and less, and after this long not
    at all."""
    parked_max: int = 256
    """Events per worker that wait for the block before theirs to become known; above it the oldest are
    dropped."""
    held_batches_max: int = 1024
    """Batches of events per worker that wait for missed ones to be sent again."""
    message_bytes_max: int = 64 * 1024 * 1024
    """One message of KV events; a worker that sends a larger one is disconnected."""
    replay_timeout_s: float = 5.0
    """How long missed batches may take to come again, counted from the last one that came."""
    check_s: float = 10.0
    """How often a worker is asked for batches that were missed unnoticed, where it can be asked."""
    reconnect_max_s: float = 30.0
    """Longest pause between two attempts to connect."""


KV_INDEX_LIMITS = KVIndexLimits()


AUDIT_WEIGHT = 0.05
"""Of one answer in a worker's trust: after 50 answers the first one counts for a thirteenth of its share."""
SHRINK, GROW = 0.9, 1.1
"""The effect of one answer on the assumed size of a silent worker's cache."""
UNREADABLE_MAX = 16
"""Batches of one worker that may be nonsense before it is not listened to any more."""
UNREPORTED_MAX = 16
"""Answers in a row that found blocks of which the worker's events had not told. A few come with every gap; so
many say that the events name blocks in another way than prompts are looked up by, so that none of them is
ever found."""
PREDICTED_MIN = 64
"""It is not taken for smaller than a prompt of 1,024 tokens."""


class StreamState(StrEnum):
    """See the module."""

    UNKNOWN = "unknown"
    SYNCED = "synced"
    GAP = "gap"
    CLEARED = "cleared"


class StreamInput(Enum):
    """The inputs of a stream."""

    APPLIED = "a batch came in its turn"
    CLEARED = "a batch came in its turn, and after it nothing is believed"
    MISSED = "a batch is missing"
    FILLED = "no batch is missing any more"
    LOST = "batches are missing for good: nothing is believed"
    SILENT = "no report of this worker, or of a new process in its place"


_U, _S, _G, _C = StreamState.UNKNOWN, StreamState.SYNCED, StreamState.GAP, StreamState.CLEARED
TABLE: Mapping[tuple[StreamState, StreamInput], StreamState] = MappingProxyType({
    (_U, StreamInput.APPLIED): _S, (_S, StreamInput.APPLIED): _S, (_C, StreamInput.APPLIED): _S,
    (_G, StreamInput.APPLIED): _G,
    (_U, StreamInput.CLEARED): _C, (_S, StreamInput.CLEARED): _C, (_C, StreamInput.CLEARED): _C,
    (_G, StreamInput.CLEARED): _G,
    (_U, StreamInput.MISSED): _G, (_S, StreamInput.MISSED): _G, (_C, StreamInput.MISSED): _G,
    (_G, StreamInput.MISSED): _G, (_G, StreamInput.FILLED): _S, (_G, StreamInput.LOST): _C,
    (_U, StreamInput.SILENT): _U, (_S, StreamInput.SILENT): _U, (_C, StreamInput.SILENT): _U,
    (_G, StreamInput.SILENT): _U,
})  # fmt: skip
"""A pair that is not here cannot happen."""


class CacheAudit:
    """Predicted against actual, in blocks, over all answers of one worker."""

    __slots__ = ("num_expected", "num_hit", "num_unexpected")

    def __init__(self) -> None:
        self.num_expected = 0
        """The index said that the worker has them."""
        self.num_hit = 0
        """Of those, it had."""
        self.num_unexpected = 0
        """It had them, and the index did not know."""


class WorkerCacheView:
    """One worker's part of the index."""

    def __init__(self, index: PrefixIndex, worker: int, names: BlockNames, config: KVIndexLimits) -> None:
        """`worker` is its number in the index."""
        self.worker, self.names = worker, names
        self.state = StreamState.UNKNOWN
        self.generation = 0
        """Restarts of this worker that were seen."""
        self.wanted: int | None = None
        """From which batch on everything must be sent again; None: nothing is missing."""
        self.audited = CacheAudit()
        self.trust = 1.0
        """How much of what was expected of this worker lately came true, 0 to 1."""
        self.num_unreported = 0
        """Answers in a row that found blocks in the cache, of which its events, though they are heard, had
        not told."""
        self.num_gaps = self.num_unreadable = self.num_unknown = 0
        self._index, self._config = index, config
        self._next = 0
        self._last_live = -1
        self._last_payload = b""
        self._held: dict[int, bytes] = {}
        self._check: tuple[int, bytes] | None = (
            None  # The first number that a replay of the same process must have.
        )
        self._is_asked = self._is_void = False  # A replay is under way; it is of no use any more.
        self._has_begun = False  # Something of it has come.
        self._awaited_ns: int | None = None
        self._start_asked = False
        self._predicted_max = config.predicted_max
        self._stale_ns = config.stale_s * 1e9

    # --- the stream, in an order that is certain -------------------------------------------------------

    def hear(self, events: list[Event]) -> None:
        """The next events of a worker whose connection keeps them in order and fills its own gaps."""
        if not self.names.refused:
            self._awaited_ns = None
            self._apply(events)

    # --- the stream, as lossy messages -----------------------------------------------------------------

    def live(self, sequence: int, payload: bytes) -> None:
        """One message of the worker's publisher, which sends them in order but may leave some out."""
        if self.names.refused:
            return
        self._awaited_ns = None
        if sequence <= self._last_live:
            self.restarted()
        self._last_live = sequence
        if sequence == self._next and self.wanted is None:
            self._take(sequence, payload)
        elif sequence >= self._next:
            self._hold(sequence, payload)

    def ask(self) -> int:
        """From which batch on to ask for a replay.

        It begins with the last one that was heard, if any: were it another one now, another process would
        have begun to count again.
        """
        self._is_asked, self._is_void, self._has_begun = True, False, False
        self._check = (self._next - 1, self._last_payload) if self._next else None
        return self._check[0] if self._check else 0

    def again(self, sequence: int, payload: bytes) -> None:
        """One batch of a replay, which comes in order from the oldest that is kept on.

        Missing events within it are asked for again.
        """
        if self.names.refused or self._is_void:
            return
        has_begun, self._has_begun = self._has_begun, True
        if self._check is not None and sequence == self._check[0]:
            if payload != self._check[1]:
                self.restarted()
                self._miss()
                return
            self._check = None
        if sequence > self._next and has_begun:
            self._is_void = True
            if self.wanted is None:
                self._miss()
        elif sequence >= self._next:
            if sequence > self._next or self._check is not None:
                self._skip_to(sequence)
            self._check = None
            self._take(sequence, payload)

    def end_of_replay(self, *, is_answered: bool = True) -> None:
        """It has sent everything that it can, or does not answer. Waiting batches continue from there."""
        self._is_asked = False
        if self.names.refused or self._is_void:
            return
        if self._check is not None and is_answered and (self._has_begun or not self._held):
            self.restarted()  # The known events are not known there, nor any later ones.
            self._miss()
            return
        if self.wanted is None:
            return
        # An event that was sent again stands, even where something else of its number had waited: that was
        # another process's.
        self._drop_held(self._next)
        if self._held:
            if (first := min(self._held)) > self._next:
                self._skip_to(first)
        elif self._next == self.wanted and not (is_answered and self._has_begun):
            self.wanted = None
            self._believe_nothing()
            self._move(StreamInput.LOST)
        self._drain()

    def reconnected(self) -> None:
        """The connection was lost for a while: what came after what was heard, and from whom, must be seen
        first.
        """
        if self._next and self.wanted is None and not self.names.refused:
            self._miss()

    def nonsense(self) -> None:
        """A message came that is no batch at all."""
        if not self.names.refused:
            self._unreadable()
            if self.names.refused:
                self._move(StreamInput.SILENT)

    def restarted(self) -> None:
        """Another process is there instead: it has nothing, and counts from 0."""
        self.generation += 1
        self._believe_nothing()
        self._next, self._last_live, self._last_payload = 0, -1, b""
        self._held.clear()
        self.wanted, self._awaited_ns, self._start_asked = None, None, False
        self.num_unreported = 0
        self._is_void = self._is_asked
        self._move(StreamInput.SILENT)

    def _miss(self) -> None:
        assert self.wanted is None, "it is missed already"
        self.num_gaps += 1
        self.wanted = self._next
        self._move(StreamInput.MISSED)

    def _hold(self, sequence: int, payload: bytes) -> None:
        """It waits for those before it. An event without room is missed later, and asked for again."""
        assert sequence >= self._next, "what was taken does not wait"
        if len(self._held) < self._config.held_batches_max:
            self._held[sequence] = payload
        if self.wanted is None:
            self._miss()

    def _skip_to(self, sequence: int) -> None:
        """The batches before this one are lost."""
        if self._next:
            self._believe_nothing()
        self._move(StreamInput.CLEARED if self.wanted is None else StreamInput.LOST)
        assert sequence >= self._next, "what was taken is not skipped"
        self.wanted = None
        self._next = sequence
        self._drop_held(sequence)

    def _drop_held(self, before: int) -> None:
        for early in [each for each in self._held if each < before]:
            del self._held[early]

    def _drain(self) -> None:
        """Take those that have waited, as far as they follow; with none left nothing is missing."""
        while (payload := self._held.pop(self._next, None)) is not None:
            self._take(self._next, payload)
        if self._held and self.wanted is None:
            self._miss()
        elif not self._held and self.wanted is not None:
            self.wanted = None
            self._move(StreamInput.FILLED)

    def _take(self, sequence: int, payload: bytes) -> None:
        assert sequence == self._next, "batches are taken in order"
        self._start_asked |= sequence == 0
        self._next, self._last_payload = sequence + 1, payload
        orphans = self.names.num_orphans
        try:
            self._apply(decode_events(payload))
        except KVEventError:
            self._unreadable()
            self._move(StreamInput.CLEARED if not self.names.refused else StreamInput.SILENT)
        if self.names.num_orphans > orphans and not self._start_asked and self.wanted is None:
            self._ask_from_start()

    def _ask_from_start(self) -> None:
        """A block's parent was told before this stream was heard, perhaps within what can be sent again.

        Tried once.
        """
        assert not self._start_asked, "it is tried once"
        self._start_asked = True
        self._believe_nothing()
        self._next = 0
        self._miss()

    # --- what events do --------------------------------------------------------------------------------

    def _apply(self, events: list[Event]) -> None:
        index, worker, wiped = self._index, self.worker, False
        for event in events:
            if isinstance(event, Stored):
                wiped = False
                for tier, keys in self._named(event):
                    index.stored(worker, keys, tier)
            elif isinstance(event, Removed):
                for tier, keys in self.names.removed(event):
                    index.removed(worker, keys, tier)
            else:
                self.num_unknown += not isinstance(event, Cleared)
                self._believe_nothing()
                wiped = True
        if self.names.refused:
            self._believe_nothing()
            self._move(StreamInput.SILENT)
        else:
            self._move(StreamInput.CLEARED if wiped else StreamInput.APPLIED)

    def _named(self, event: Stored) -> Named:
        try:
            return self.names.stored(event)
        except KVEventError:
            self._unreadable()
            return []

    def _unreadable(self) -> None:
        self.num_unreadable += 1
        self._believe_nothing()
        if self.num_unreadable > UNREADABLE_MAX:
            self.names.refused = f"{self.num_unreadable} batches of its KV events could not be read"

    def _believe_nothing(self) -> None:
        self._index.cleared(self.worker)
        self.names.clear()

    def _move(self, what: StreamInput) -> None:
        self.state = TABLE[self.state, what]

    # --- requests --------------------------------------------------------------------------------------

    def sent(self, now_ns: int, prompt: PromptKeys) -> None:
        """The prompt was sent there: its blocks will soon be cached. Notes on it what is cached of it now."""
        keys, unit = self.names.keys_of(prompt), self.names.unit
        if unit > 1:
            keys = keys[: len(keys) - len(keys) % unit]  # It caches no part of its blocks, and tells of none.
        held = self._index.prefix_of(now_ns, self.worker, keys)
        expected = min(held.blocks, _usable_blocks(prompt))
        assert 0 <= expected <= len(keys), f"{expected} of {len(keys)} blocks are expected"
        prompt.expected_blocks = expected - expected % unit
        is_new = self._index.predict(self.worker, keys, now_ns + self._ttl_ns(), known=held.device)
        if is_new and self._awaited_ns is None and self.state is not StreamState.UNKNOWN:
            self._awaited_ns = now_ns

    def audit(self, now_ns: int, prompt: PromptKeys, cached_tokens: int) -> None:
        """The prompt was computed there, and so many of its tokens were found in the cache."""
        keys, expected = self.names.keys_of(prompt), prompt.expected_blocks
        actual = min(cached_tokens // BLOCK_TOKENS, len(keys))
        audited = self.audited
        audited.num_expected += expected
        audited.num_hit += min(actual, expected)
        audited.num_unexpected += max(0, actual - expected)
        assert audited.num_hit <= audited.num_expected, "more came true than was expected"
        if expected:
            self.trust += AUDIT_WEIGHT * (min(actual, expected) / expected - self.trust)
        assert 0.0 <= self.trust <= 1.0, self.trust
        if actual and self.state is not StreamState.UNKNOWN:
            self.num_unreported = (
                0 if self._index.was_reported(self.worker, keys[0]) else self.num_unreported + 1
            )
        if self.state is StreamState.UNKNOWN:
            self._resize(actual, expected)
            self._predict(now_ns, keys)
        else:
            # Computed blocks were reported; blocks that were hit are there, reported or not.
            self._index.retract(self.worker, keys[actual:])
            self._predict(now_ns, keys[:actual])

    @property
    def is_unmatched(self) -> bool:
        """Its events are heard, and name blocks by which no prompt is ever found."""
        return self.num_unreported >= UNREPORTED_MAX

    def credit(self, now_ns: int) -> float:
        """By how much to believe what the index says of this worker, 0 to 1."""
        if self._awaited_ns is None:
            return self.trust
        return self.trust * max(0.0, 1.0 - (now_ns - self._awaited_ns) / self._stale_ns)

    def staleness_ns(self, now_ns: int) -> int:
        """How long word of a prompt that was sent there has been awaited.

        An idle worker has nothing to tell.
        """
        return 0 if self._awaited_ns is None else now_ns - self._awaited_ns

    def _predict(self, now_ns: int, keys: Sequence[int]) -> None:
        known = self._index.prefix_of(now_ns, self.worker, keys).device
        self._index.predict(self.worker, keys, now_ns + self._ttl_ns(), known=known)

    def _ttl_ns(self) -> int:
        config = self._config
        return int(
            1e9 * (config.predicted_ttl_s if self.state is StreamState.UNKNOWN else config.announced_ttl_s)
        )

    def _resize(self, actual: int, expected: int) -> None:
        """A worker that tells nothing shows by its answers how much it keeps: less than was believed, or
        more.
        """
        believed = self._predicted_max
        if actual < expected:
            believed = min(believed, max(PREDICTED_MIN, self._index.num_predicted_of(self.worker)))
            believed = max(PREDICTED_MIN, int(believed * SHRINK))
        elif actual > expected:
            believed = min(self._config.predicted_max, int(believed * GROW))
        assert believed > 0, believed
        if believed != self._predicted_max:
            self._predicted_max = believed
            self._index.limit_predictions(self.worker, believed)


def _usable_blocks(prompt: PromptKeys) -> int:
    """An engine computes at least the last token again, whatever is cached."""
    return max(0, prompt.num_tokens - 1) // BLOCK_TOKENS

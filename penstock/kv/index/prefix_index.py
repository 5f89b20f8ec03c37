"""The holders of each prefix: from 64-bit block keys to the workers that have the block, on the device or in
host memory.

    key -> mask      bit i of the mask: the worker that has slot i holds this block
    worker -> bit    of its present generation. `cleared` gives it a new one, and the old bit is swept out bit
                     by bit

A prompt's keys are a chain: a worker that holds block n was given blocks 0..n-1 as well, and caches forget
the end of a chain first. So the longest prefix of every worker at once is found by bisection: where some
workers drop out between two looks, those alone are followed further down. Where a cache broke a chain in the
middle, what is found still ends at a border: the worker holds the last block of its run, and not the one
after it. Most workers drop out where a common system prompt ends, so that place is remembered by the chain's
first key and looked at first. Looks cost misses of the processor's caches: their number is what counts.

Entries are *stored* (a worker said so) or *predicted* (a request was sent there, so it soon will be):
predicted ones end by themselves. Fed by worker_cache_view.py; asked by placement and the simulator. Knows no
tokens, no sockets and no clock.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from heapq import heappop, heappush
from itertools import islice

import msgspec

SHARD_ENTRIES = 1024
"""Entries of one shard when the index is full. An operation on a whole shard at once (sweep, thin out) takes
60 us."""
_SHARD_SHIFT = 40
"""A key's shard is in its bits from here on: a dict begins at the lowest, in which keys had better differ."""
RETIRED_MAX = 64
"""Old bits that wait to be swept out; with more, all are swept at once."""
EXPIRED_MAX = 1024
"""Predictions that one call may end, in less than a millisecond. The next calls end the others."""
FORKS_MAX = 4096
"""First keys of which it is remembered where most workers dropped out."""


class Tier(IntEnum):
    """Where a block is."""

    DEVICE = 0
    HOST = 1


class Held(msgspec.Struct, frozen=True, gc=False):
    """The part of a prompt that one worker has, in whole blocks from its start."""

    device: int
    """Can be attended to as they are."""
    host: int
    """The next ones, which must be copied back from host memory first."""

    @property
    def blocks(self) -> int:
        """Need not be computed."""
        return self.device + self.host


NOTHING_HELD = Held(0, 0)


class Match:
    """The part of one prompt that each worker has, as of the question."""

    __slots__ = ("_bits", "_device", "_either", "_workers")

    def __init__(
        self,
        device: Sequence[tuple[int, int]] = (),
        either: Sequence[tuple[int, int]] = (),
        bits: dict[int, int] | None = None,
        workers: Sequence[int] = (),
    ) -> None:
        """Runs are (blocks, mask), longest first; `bits` by worker number, `workers` by bit.

        None of them changes any more.
        """
        self._device, self._either = device, either
        self._bits, self._workers = bits or {}, workers

    @property
    def longest(self) -> int:
        """Blocks of the longest prefix that any one worker has."""
        return self._either[0][0] if self._either else 0

    def of(self, worker: int) -> Held:
        """The part that this worker has."""
        bit = self._bits.get(worker, 0)
        for blocks, mask in self._either:
            if mask & bit:
                device = blocks if self._device is self._either else _run_of(self._device, bit)
                return Held(device, blocks - device)
        return NOTHING_HELD

    def holders(self) -> Iterator[tuple[int, Held]]:
        """Every worker that has something, longest prefix first, then by bit. Take as many as are wanted."""
        workers, is_same = self._workers, self._device is self._either
        for blocks, mask in self._either:
            held = Held(blocks, 0)
            while mask:
                bit = mask & -mask
                mask ^= bit
                if not is_same:
                    device = _run_of(self._device, bit)
                    held = Held(device, blocks - device)
                yield workers[bit.bit_length() - 1], held


class _Holder:
    """One worker in its present generation."""

    __slots__ = ("bit", "is_due", "is_used", "last_until_ns", "predicted", "predicted_max", "thinned")

    def __init__(self, bit: int, predicted_max: int) -> None:
        self.bit = bit
        self.predicted: OrderedDict[int, int] = OrderedDict()
        """Key -> when it ends; the first one to end, and to be forgotten, comes first. A plain dict would
        step over all that left at its front."""
        self.predicted_max = predicted_max
        self.last_until_ns = 0
        self.is_due = False
        """Whether it stands among those whose predictions will end."""
        self.is_used = False
        """Whether the bit may stand in any mask."""
        self.thinned = 0  # How often shards had been when the oldest of `predicted` was entered.


_Shards = list[dict[int, int]]
_Runs = list[tuple[int, int]]


class PrefixIndex:
    """Which workers hold which blocks.

    Worker numbers are small integers; nothing needs to be said before the first use.
    """

    def __init__(self, *, entries_max: int, predicted_max: int) -> None:
        """Keep at most about `entries_max` blocks per tier, and `predicted_max` predictions per worker."""
        assert entries_max > 0 <= predicted_max, (entries_max, predicted_max)
        num_shards = 1 << max(0, (entries_max // SHARD_ENTRIES).bit_length() - 1)
        self._shard_max = max(2, entries_max // num_shards)
        self._shard_bits = num_shards - 1
        every = range(num_shards)
        self._tiers: tuple[_Shards, _Shards] = [{} for _ in every], [{} for _ in every]
        self._host_used = False
        self._predicted_max = predicted_max
        self._holders: dict[int, _Holder] = {}
        self._bits: dict[int, int] = {}  # Replaced, never changed: a Match keeps them. So is `_workers`.
        self._workers: tuple[int, ...] = ()
        self._live = 0
        self._retired = 0
        self._swept = 0  # Shards since the last bit was retired.
        # When something of each worker that has predictions ends, or a little earlier: who has none costs no
        # look.
        self._due: list[tuple[int, int, _Holder]] = []
        self._num_due = self._num_thinned = 0
        self._forks: dict[int, int] = {}
        self.num_dropped = 0
        """Entries that were forgotten because the index was full: the oldest ones of their shard."""

    @property
    def num_entries(self) -> int:
        """Blocks that are held by anybody, counted once per tier. Takes a while: for metrics."""
        device, host = self._tiers
        return sum(map(len, device)) + sum(map(len, host))

    @property
    def num_predicted(self) -> int:
        """Entries that are only predicted so far."""
        return sum(len(holder.predicted) for holder in self._holders.values())

    def num_predicted_of(self, worker: int) -> int:
        """Blocks that are only predicted of one worker."""
        holder = self._holders.get(worker)
        return 0 if holder is None else len(holder.predicted)

    # --- reports ----------------------------------------------------------------------------------

    def stored(self, worker: int, keys: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """The worker says that it has these blocks: predictions of them have come true."""
        holder = self._holders.get(worker) or self._enter(worker)
        if tier is Tier.HOST:
            self._host_used = True
        elif holder.predicted:
            keys = self._confirm(holder, keys)
        shards, shard_bits, shard_max, bit = self._tiers[tier], self._shard_bits, self._shard_max, holder.bit
        for key in keys:
            shard = shards[key >> _SHARD_SHIFT & shard_bits]
            # The one object for all blocks that only this worker has: a new key costs one look.
            if (mask := shard.setdefault(key, bit)) is bit:
                if len(shard) > shard_max:
                    self._thin(shard)
            elif not mask & bit:
                shard[key] = mask | bit
        holder.is_used = True
        if self._retired:
            self._sweep()

    def _confirm(self, holder: _Holder, keys: Sequence[int]) -> Sequence[int]:
        """End the predictions of these blocks. Others are to be entered, or all if a shard was thinned."""
        confirm = holder.predicted.pop
        others = [key for key in keys if confirm(key, None) is None]
        return others if holder.thinned == self._num_thinned else keys

    def removed(self, worker: int, keys: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """The worker says that it has these blocks no more."""
        holder = self._holders.get(worker)
        if holder is None:
            return
        self._drop(self._tiers[tier], keys, holder.bit)
        if tier is Tier.DEVICE and holder.predicted:
            for key in keys:
                holder.predicted.pop(key, None)

    def cleared(self, worker: int) -> None:
        """The worker has nothing any more, or is another one from now on: it begins a new generation."""
        holder = self._holders.get(worker)
        if holder is not None and holder.is_used:
            self._retire(holder)
            self._enter(worker).predicted_max = holder.predicted_max

    def forget(self, worker: int) -> None:
        """The worker is gone. Its number may be given to another one."""
        if (holder := self._holders.pop(worker, None)) is not None:
            self._retire(holder)
            self._relist()
            assert not self._live & self._retired, "a retired bit has no holder"

    def predict(self, worker: int, keys: Sequence[int], until_ns: int, *, known: int = 0) -> bool:
        """A request with these blocks was sent there: count on them until then, or until the worker says
        otherwise.

        Returns whether any of them is new there. Blocks that it has reported stay as they are. Above the
        worker's bound the longest unused predictions are forgotten. `known`: the worker has so many of them,
        as `prefix_of` found; a known count spares looking at each one.
        """
        holder = self._holders.get(worker) or self._enter(worker)
        # In order, so the first one ends first.
        until_ns = holder.last_until_ns = max(until_ns, holder.last_until_ns)
        assert 0 <= known <= len(keys), f"{known} of {len(keys)} keys are known"
        predicted = holder.predicted
        old, new = keys[:known], keys[known:] if known else keys
        is_new = bool(new) and self._predict_new(holder, new, until_ns)
        if old and predicted and not predicted.keys().isdisjoint(old):
            for key in reversed(old):
                if key in predicted:
                    predicted[key] = until_ns
                    predicted.move_to_end(key)
        if predicted:
            self._forget_over(holder)
            self._put_due(holder)
        assert len(predicted) <= holder.predicted_max, "the bound of predictions holds"
        return is_new

    def _predict_new(self, holder: _Holder, keys: Sequence[int], until_ns: int) -> bool:
        shards, shard_bits, shard_max = self._tiers[Tier.DEVICE], self._shard_bits, self._shard_max
        predicted, bit, is_new = holder.predicted, holder.bit, False
        if not predicted:
            holder.thinned = self._num_thinned
        for key in reversed(keys):  # The end of a prompt is the first that a cache forgets.
            shard = shards[key >> _SHARD_SHIFT & shard_bits]
            mask = shard.get(key)
            if mask is None:
                shard[key], is_new = bit, True
                if len(shard) > shard_max:
                    self._thin(shard)
            elif not mask & bit:
                shard[key], is_new = mask | bit, True
            elif key not in predicted:
                continue  # It was reported.
            if key in predicted:
                predicted.move_to_end(key)
            predicted[key] = until_ns
        holder.is_used = True
        return is_new

    def retract(self, worker: int, keys: Sequence[int]) -> None:
        """These blocks were predicted and did not come; what the worker said it has stays."""
        holder = self._holders.get(worker)
        if holder is None or not holder.predicted or holder.predicted.keys().isdisjoint(keys):
            return  # As a rule: its events have confirmed them by now.
        gone = [key for key in keys if holder.predicted.pop(key, None) is not None]
        self._drop(self._tiers[Tier.DEVICE], gone, holder.bit)

    def limit_predictions(self, worker: int, predicted_max: int) -> None:
        """Believe that the worker's cache has room for so many predicted blocks."""
        holder = self._holders.get(worker) or self._enter(worker)
        assert predicted_max >= 0, predicted_max
        holder.predicted_max = predicted_max
        self._forget_over(holder)

    # --- what is asked ---------------------------------------------------------------------------------

    def match(self, now_ns: int, *names: Sequence[int]) -> Match:
        """The part of one prompt that every worker has; its blocks go by one or more lists of keys (see
        `PromptKeys`).
        """
        if self._due and now_ns >= self._due[0][0]:
            self._expire(now_ns)
        on_device, on_host = self._tiers
        device: _Runs = []
        either: _Runs = []
        for keys in names:
            if keys:
                device += self._runs(keys, on_device, None)
                if self._host_used:
                    either += self._runs(keys, on_device, on_host)
        device.sort(reverse=True)
        either.sort(reverse=True)
        return Match(device, either if self._host_used else device, self._bits, self._workers)

    def prefix_of(self, now_ns: int, worker: int, keys: Sequence[int]) -> Held:
        """The part of one prompt that one worker has."""
        if self._due and now_ns >= self._due[0][0]:
            self._expire(now_ns)
        holder = self._holders.get(worker)
        if holder is None or not keys:
            return NOTHING_HELD
        on_device, on_host = self._tiers
        device = self._runs(keys, on_device, None, holder.bit)
        if not self._host_used:
            return Held(device[0][0], 0) if device else NOTHING_HELD
        either = self._runs(keys, on_device, on_host, holder.bit)
        if not either:
            return NOTHING_HELD
        blocks = device[0][0] if device else 0
        assert blocks <= either[0][0] <= len(keys), "who is found on the device is found in either tier"
        return Held(blocks, either[0][0] - blocks)

    def holds(self, worker: int, key: int) -> bool:
        """Whether the worker has this one block on its device; an ended prediction may still count."""
        holder = self._holders.get(worker)
        return holder is not None and bool(
            self._tiers[Tier.DEVICE][key >> _SHARD_SHIFT & self._shard_bits].get(key, 0) & holder.bit
        )

    def was_reported(self, worker: int, key: int) -> bool:
        """Whether the worker itself said that it has this block, in any tier; not only a prediction says
        so.
        """
        holder = self._holders.get(worker)
        if holder is None or key in holder.predicted:
            return False
        shard = key >> _SHARD_SHIFT & self._shard_bits
        return any(shards[shard].get(key, 0) & holder.bit for shards in self._tiers)

    def _runs(self, keys: Sequence[int], shards: _Shards, others: _Shards | None, among: int = -1) -> _Runs:
        """(length, workers whose prefix is that long) for every length that there is, in `shards` or
        `others`.
        """
        shard_bits, num = self._shard_bits, len(keys)
        first = keys[0]
        mask = shards[first >> _SHARD_SHIFT & shard_bits].get(first, 0)
        if others is not None:
            mask |= others[first >> _SHARD_SHIFT & shard_bits].get(first, 0)
        runs: _Runs = []
        parts = [(0, num, mask)] if (mask := mask & self._live & among) else []
        fork = self._forks.get(first, 0)
        while parts:
            low, high, mask = parts.pop()
            while high - low > 1:  # All of `mask` have block `low`, and none of them has `high`.
                if low < fork < high:
                    middle = fork
                elif high in (num, fork):
                    middle = high - 1
                else:
                    middle = (low + high) >> 1
                key = keys[middle]
                there = shards[key >> _SHARD_SHIFT & shard_bits].get(key, 0)
                if others is not None:
                    there |= others[key >> _SHARD_SHIFT & shard_bits].get(key, 0)
                if not (there := there & mask):
                    high = middle
                else:
                    if there != mask:
                        parts.append((low, middle, mask ^ there))
                    low, mask = middle, there
            runs.append((high, mask))
        if len(runs) > 1 and fork not in [blocks for blocks, _ in runs]:
            self._note_fork(first, num, runs)
        return runs

    def _note_fork(self, first: int, num: int, runs: _Runs) -> None:
        """Remember where most workers dropped out."""
        if len(self._forks) >= FORKS_MAX:
            del self._forks[next(iter(self._forks))]
        assert len(self._forks) < FORKS_MAX, "there is room for one more"
        self._forks[first] = max([(mask.bit_count(), blocks) for blocks, mask in runs if blocks < num])[1]

    # --- bits ------------------------------------------------------------------------------------------

    def _enter(self, worker: int) -> _Holder:
        """Give a worker the lowest bit that neither is in use nor waits to be swept out."""
        used = self._live | self._retired
        holder = self._holders[worker] = _Holder(~used & (used + 1), self._predicted_max)
        self._relist()
        assert not holder.bit & used, "the bit belongs to another worker"
        return holder

    def _retire(self, holder: _Holder) -> None:
        holder.predicted.clear()
        assert self._live & holder.bit, "a bit is retired once"
        self._retired |= holder.bit
        self._live &= ~holder.bit
        self._swept = 0
        if self._retired.bit_count() > RETIRED_MAX:
            while self._retired:
                self._sweep()

    def _relist(self) -> None:
        self._bits = {worker: holder.bit for worker, holder in self._holders.items()}
        workers = [-1] * max((bit.bit_length() for bit in self._bits.values()), default=0)
        for worker, bit in self._bits.items():
            workers[bit.bit_length() - 1] = worker
        self._workers = tuple(workers)
        self._live = sum(self._bits.values())
        assert self._live.bit_count() == len(self._bits), "two workers share a bit"

    def _sweep(self) -> None:
        """Take the retired bits out of one more shard; after the last shard they may be given out again."""
        for shards in self._tiers:
            self._clean(shards[self._swept])
        self._swept += 1
        assert self._swept <= self._shard_bits + 1, "there is no such shard"
        if self._swept > self._shard_bits:
            self._retired = self._swept = 0

    def _clean(self, shard: dict[int, int]) -> None:
        retired = self._retired
        for key, mask in [(key, mask) for key, mask in shard.items() if mask & retired]:
            if left := mask & ~retired:
                shard[key] = left
            else:
                del shard[key]

    # --- bounds ----------------------------------------------------------------------------------------

    def _thin(self, shard: dict[int, int]) -> None:
        """Make room in a full shard: evict keys without holders, else the oldest quarter."""
        self._num_thinned += 1
        self._clean(shard)
        if (excess := len(shard) - self._shard_max * 3 // 4) > 0:
            for key in list(islice(shard, excess)):
                del shard[key]
            self.num_dropped += excess
        assert len(shard) <= self._shard_max, "a shard keeps its bound"

    def _forget_over(self, holder: _Holder) -> None:
        excess = len(holder.predicted) - holder.predicted_max
        if excess > 0:
            gone = [holder.predicted.popitem(last=False)[0] for _ in range(excess)]
            self._drop(self._tiers[Tier.DEVICE], gone, holder.bit)

    def _expire(self, now_ns: int) -> None:
        """End the predictions whose time is over."""
        left, due = EXPIRED_MAX, self._due
        while left > 0 and due and due[0][0] <= now_ns:
            holder = heappop(due)[2]
            predicted, gone = holder.predicted, list[int]()
            for key, until_ns in islice(predicted.items(), left):
                if until_ns > now_ns:
                    break
                gone.append(key)
            for key in gone:
                del predicted[key]
            left -= len(gone)
            assert holder.is_due, "it stood among those that are due"
            assert left >= 0, "one call ends no more than its bound"
            self._drop(self._tiers[Tier.DEVICE], gone, holder.bit)
            holder.is_due = False
            self._put_due(holder)

    def _put_due(self, holder: _Holder) -> None:
        if holder.predicted and not holder.is_due:
            holder.is_due = True
            self._num_due += 1  # Breaks ties.
            heappush(self._due, (next(iter(holder.predicted.values())), self._num_due, holder))

    def _drop(self, shards: _Shards, keys: Sequence[int], bit: int) -> None:
        shard_bits = self._shard_bits
        for key in keys:
            shard = shards[key >> _SHARD_SHIFT & shard_bits]
            mask = shard.get(key, 0)
            if mask is bit or mask == bit:  # As a rule: no other worker has it.
                del shard[key]
            elif mask & bit:
                shard[key] = mask ^ bit


def _run_of(runs: Sequence[tuple[int, int]], bit: int) -> int:
    for blocks, mask in runs:
        if mask & bit:
            return blocks
    return 0

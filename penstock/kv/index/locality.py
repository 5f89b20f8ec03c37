"""Where prompts are cached in the fleet: the index, each worker's part of it, and each model's keys, in one
object.

    gateway    maker(model).keys(prompt) -> PromptKeys, which travel with the request
    placement  match(now, keys) -> Located: who has how much;   sent(now, worker, keys), answered(now, worker,
                                                                keys, cached)
    fleet      add(worker, ...) -> Residency, which receives the worker's KV events;   remove(worker)

Pure: gateway and simulator use this same object. It fulfils what a placement asks for
(`policy/placement/route.py`), where workers go by their ids; inside they are numbers.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import islice

from penstock.kv.hashing import BlockHasher, PromptKeyMaker, PromptKeys
from penstock.kv.index.block_names import BlockNames, EngineBlockNames, ExternalBlockNames
from penstock.kv.index.prefix_index import NOTHING_HELD, Held, Match, PrefixIndex
from penstock.kv.index.worker_cache_view import KVIndexLimits, WorkerCacheView
from penstock.types import WorkerId

_LOOKS = 4
"""Holders that are looked at for each one that is wanted."""


class PromptLocality:
    """Which workers have how much of one prompt, as far as they are believed at this moment."""

    __slots__ = ("_match", "_model", "_now_ns", "_numbers", "_workers")

    def __init__(
        self, now_ns: int, match: Match, model: "_Model | None", workers: "_Workers", numbers: "_Numbers"
    ) -> None:
        """`workers` and `numbers` say who has which number in `match`; they do not change any more.

        Workers of other models than `model` may compute the same, and have the prompt too: they are left out.
        """
        self._now_ns, self._match, self._model = now_ns, match, model
        self._workers, self._numbers = workers, numbers

    def of(self, worker: WorkerId) -> Held:
        """The cached blocks of this worker."""
        if (cache_view := self._workers.get(worker)) is None:
            return NOTHING_HELD
        held = self._match.of(cache_view.worker)
        return held if held is NOTHING_HELD else _believed(held, cache_view, self._now_ns)

    def holders(self, limit: int) -> list[tuple[WorkerId, Held]]:
        """Up to `most` workers that have something, longest prefix first (before doubts are taken off).

        Where doubts leave nothing of the first ones, no more than a few others are looked at.
        """
        found: list[tuple[WorkerId, Held]] = []
        if limit:
            model, numbers = self._model, self._numbers
            known = (
                (numbers[number], held)
                for number, held in self._match.holders()
                if numbers[number][2] is model
            )
            for (worker, cache_view, _), held in islice(known, _LOOKS * limit):
                believed = _believed(held, cache_view, self._now_ns)
                if believed.device or believed.host:
                    found.append((worker, believed))
                    if len(found) == limit:
                        break
        return found


@dataclass(slots=True, frozen=True, kw_only=True)
class LocalityStatistics:
    """Of now, and counters since the start."""

    entries: int
    predicted: int
    staleness_ns: int
    """Of the worker whose events have been awaited longest."""
    gaps: int
    replays: int
    unreadable: int
    """Batches and events that were not understood."""
    blocks_hit: int
    blocks_missed: int
    blocks_unexpected: int
    unmatched_workers: int
    """Workers whose events name blocks by which no prompt is ever found."""


class _Model:
    """One model's keys, and which of them its workers go by."""

    __slots__ = ("maker", "num_external", "num_own")

    def __init__(self, maker: PromptKeyMaker) -> None:
        self.maker = maker
        self.num_own = Counter[BlockHasher]()
        """Workers of ours, by what names their blocks: a prompt is looked up once for each identity and
        secret."""
        self.num_external = 0


_Workers = Mapping[WorkerId, WorkerCacheView]
_Numbers = Mapping[int, tuple[WorkerId, WorkerCacheView, _Model]]


class _Counters:
    """Sums over workers, so that those who have gone still count."""

    __slots__ = ("expected", "gaps", "hit", "unexpected", "unreadable")

    def __init__(self) -> None:
        self.gaps = self.unreadable = self.expected = self.hit = self.unexpected = 0

    def add(self, cache_view: WorkerCacheView) -> None:
        audited = cache_view.audited
        self.gaps += cache_view.num_gaps
        self.unreadable += cache_view.num_unreadable + cache_view.num_unknown
        self.expected += audited.num_expected
        self.hit += audited.num_hit
        self.unexpected += audited.num_unexpected


class KVLocality:
    """See the module."""

    def __init__(self, config: KVIndexLimits, key: bytes) -> None:
        """`key` is the secret that our workers hash with unless they have one of their own, 16 bytes or more;
        canonical keys are made with one derived from it.
        """
        self._config, self._key = config, key
        self._canonical_key = hashlib.blake2b(key=key, digest_size=32, person=b"penstock index").digest()
        self.index = PrefixIndex(entries_max=config.entries_max, predicted_max=config.predicted_max)
        self._models: dict[str, _Model] = {}
        self._models_of: dict[WorkerId, _Model] = {}
        self._hashers: dict[tuple[bytes, str], BlockHasher] = {}
        """By secret and identity, of workers that are there."""
        self._workers: _Workers = {}  # Replaced, never changed: a `PromptLocality` keeps both.
        self._numbers: _Numbers = {}
        self._gone = _Counters()

    def __iter__(self) -> Iterator[tuple[WorkerId, WorkerCacheView]]:
        """Every worker, in the order in which they came."""
        return iter(self._workers.items())

    def maker(self, model: str) -> PromptKeyMaker:
        """The maker of the keys of this model's prompts; the same object for good."""
        return self._model(model).maker

    def identify(self, worker: WorkerId, identity: str) -> None:
        """A worker of ours announced what it computes (engine/fingerprint.py): its blocks are looked up by
        names that start from that. Its name for the model is a label. If it was another identity before, what
        was believed of it is forgotten.
        """
        cache_view = self._workers[worker]
        names, entry = cache_view.names, self._models_of[worker]
        assert isinstance(names, EngineBlockNames), f"{worker} names its blocks in its own way"
        hasher = self._hashers.get((names.key, identity))
        if hasher is None:
            hasher = self._hashers[names.key, identity] = BlockHasher(key=names.key, identity=identity)
        if names.hasher is hasher:
            return
        if names.hasher is not None:
            self.index.cleared(cache_view.worker)
            self._leave(entry, names)
        assert names.hasher is None, f"{worker} still goes by other names"
        names.hasher = hasher
        entry.num_own[hasher] += 1

    # --- who is there ----------------------------------------------------------------------------------

    def add(self, worker: WorkerId, *, model: str, is_own: bool, key: bytes = b"") -> WorkerCacheView:
        """A worker came: tell what is returned its KV events, if it has any.

        `is_own`: it runs our engine, and names its blocks with `key`; empty: with the launcher's.
        """
        assert worker not in self._workers, f"{worker} is known already"
        entry, config = self._model(model), self._config
        names: BlockNames
        if is_own:
            names = EngineBlockNames(key or self._key)
        else:
            entry.num_external += 1
            names = ExternalBlockNames(
                entry.maker.canonical, blocks_max=config.blocks_per_worker_max, parked_max=config.parked_max
            )
        number = next(i for i in range(len(self._numbers) + 1) if i not in self._numbers)
        cache_view = WorkerCacheView(self.index, number, names, config)
        self._models_of[worker] = entry
        self._workers = {**self._workers, worker: cache_view}
        self._numbers = {**self._numbers, number: (worker, cache_view, entry)}
        assert len(self._workers) == len(self._numbers) == len(self._models_of), "every worker has one number"
        return cache_view

    def remove(self, worker: WorkerId) -> None:
        """The worker is gone; unknown ones are ignored."""
        if (cache_view := self._workers.get(worker)) is None:
            return
        self._gone.add(cache_view)
        entry = self._models_of.pop(worker)
        if isinstance(cache_view.names, EngineBlockNames):
            self._leave(entry, cache_view.names)
        else:
            entry.num_external -= 1
            assert entry.num_external >= 0, f"more workers left {worker}'s model than came"
        self._workers = {each: kept for each, kept in self._workers.items() if each != worker}
        self._numbers = {number: kept for number, kept in self._numbers.items() if kept[0] != worker}
        self.index.forget(cache_view.worker)
        assert len(self._workers) == len(self._numbers) == len(self._models_of), "every worker has one number"

    def get(self, worker: WorkerId) -> WorkerCacheView | None:
        """One worker's part; None if it is not known."""
        return self._workers.get(worker)

    def statistics(self, now_ns: int, *, num_replays: int = 0) -> LocalityStatistics:
        """For metrics; takes a while."""
        total = copy(self._gone)
        for cache_view in self._workers.values():
            total.add(cache_view)
        return LocalityStatistics(
            entries=self.index.num_entries,
            predicted=self.index.num_predicted,
            staleness_ns=max((each.staleness_ns(now_ns) for each in self._workers.values()), default=0),
            gaps=total.gaps,
            replays=num_replays,
            unreadable=total.unreadable,
            blocks_hit=total.hit,
            blocks_missed=total.expected - total.hit,
            blocks_unexpected=total.unexpected,
            unmatched_workers=sum(each.is_unmatched for each in self._workers.values()),
        )

    # --- requests --------------------------------------------------------------------------------------

    def match(self, now_ns: int, keys: object) -> PromptLocality:
        """Look a prompt up.

        `keys` is what `Arrival.keys` holds: `PromptKeys`, or None where there are none.
        """
        if not isinstance(keys, PromptKeys):
            return PromptLocality(now_ns, Match(), None, self._workers, self._numbers)
        entry = self._model(keys.model)
        names = [keys.own(hasher) for hasher in entry.num_own]
        if entry.num_external:
            names.append(keys.canonical)
        return PromptLocality(now_ns, self.index.match(now_ns, *names), entry, self._workers, self._numbers)

    def sent(self, now_ns: int, worker: WorkerId, keys: object) -> None:
        """The prompt was sent there, so the worker will soon have it."""
        cache_view = self.get(worker)
        if cache_view is not None and isinstance(keys, PromptKeys):
            cache_view.sent(now_ns, keys)

    def answered(self, now_ns: int, worker: WorkerId, keys: object, cached_tokens: int) -> None:
        """The prompt was computed there, and so many of its tokens were cached: checks what was believed."""
        cache_view = self.get(worker)
        if cache_view is not None and isinstance(keys, PromptKeys):
            cache_view.audit(now_ns, keys, cached_tokens)

    def _leave(self, entry: _Model, names: EngineBlockNames) -> None:
        """One worker fewer uses these names; names without a worker are not made any more."""
        if (hasher := names.hasher) is None:
            return
        names.hasher = None
        entry.num_own[hasher] -= 1
        assert entry.num_own[hasher] >= 0, "more workers gave the names up than went by them"
        if not entry.num_own[hasher]:
            del entry.num_own[hasher]
            if not any(hasher in each.num_own for each in self._models.values()):
                self._hashers = {name: kept for name, kept in self._hashers.items() if kept is not hasher}

    def _model(self, model: str) -> _Model:
        if (found := self._models.get(model)) is None:
            maker = PromptKeyMaker(key=self._canonical_key, model=model)
            found = self._models[model] = _Model(maker)
        return found


def _believed(held: Held, cache_view: WorkerCacheView, now_ns: int) -> Held:
    """Doubts take blocks off the end, and so does what is no whole block of the worker's own."""
    credit, unit = cache_view.credit(now_ns), cache_view.names.unit
    if credit == 1.0 and unit == 1:
        return held
    device = held.device
    blocks = int((device + held.host) * credit)
    blocks -= blocks % unit
    assert 0 <= blocks <= held.blocks, "doubt adds nothing"
    return Held(device, blocks - device) if blocks > device else Held(blocks, 0)

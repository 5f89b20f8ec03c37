"""Workers of one model that are not alike: which go first, in which shares, and how much each may be given.

    order    smaller goes first; those of a larger order get what these cannot take now
    weight   starts within one order go by weights, where they differ (stride scheduling: Waldspurger and
             Weihl, 1995)
    limits   requests and tokens per minute: what a worker must not be given any more it is not offered

Nothing of this exists for a model whose workers have no terms. Pure: time is handed in.
"""

import math
from collections.abc import Collection, Sequence

import msgspec

from penstock.clock import NS_PER_S
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import CapacityTable, WorkerCapacity, WorkerView
from penstock.policy.terms import DeploymentTerms
from penstock.types import RequestId, Usage, WorkerId


class _Rate:
    """So many a minute, a minute's worth at once (GCRA, ITU-T I.371): when all would be there again."""

    __slots__ = ("_each_ns", "_full_ns", "burst")

    def __init__(self, per_minute: int) -> None:
        assert per_minute > 0, per_minute
        self.burst, self._each_ns, self._full_ns = per_minute, _MINUTE_NS / per_minute, 0.0

    def wait_ns(self, now_ns: int, amount: int) -> int:
        """How long until so many may be taken."""
        full_ns = max(self._full_ns, now_ns) + min(amount, self.burst) * self._each_ns
        return max(0, math.ceil(full_ns - now_ns - _MINUTE_NS))

    def take(self, now_ns: int, amount: int) -> None:
        """So many more; fewer if it is negative."""
        self._full_ns = max(self._full_ns, now_ns) + amount * self._each_ns


class _Deployment(msgspec.Struct):
    terms: DeploymentTerms
    passed: float = 0.0
    """Its place in the order of starts: grows by 1 / weight with each."""
    requests: _Rate | None = None
    tokens: _Rate | None = None


class Deployments:
    """Those of one model."""

    __slots__ = ("_known", "_passed", "_taken", "due_ns")

    def __init__(self) -> None:
        self._known: dict[WorkerId, _Deployment] = {}
        self._passed = 0.0
        self._taken: dict[tuple[RequestId, WorkerId], int] = {}
        """Tokens that were taken for what runs."""
        self.due_ns: int | None = None
        """When a worker that is spent may be given one of the requests asked about since this was None; None:
        none is. Its owner clears it before each pass over the queue.
        """

    def set(self, worker_id: WorkerId, view: WorkerView | None) -> None:
        """Take the terms in a worker's report, if it has any; None: it is gone."""
        if view is None:
            self._known.pop(worker_id, None)
            return
        known, terms = self._known.get(worker_id), view.terms
        if terms is None or (known is not None and known.terms == terms):
            return
        made = _Deployment(terms, known.passed if known is not None else self._passed)
        made.requests = _Rate(terms.rpm) if terms.rpm else None
        made.tokens = _Rate(terms.tpm) if terms.tpm else None
        self._known[worker_id] = made

    def __bool__(self) -> bool:
        return bool(self._known)

    def spent(self, now_ns: int, work: Work) -> frozenset[WorkerId]:
        """Workers that must not be given this request now."""
        found, waits_ns = list[WorkerId](), list[int]()
        for worker_id, each in self._known.items():
            wait_ns = each.requests.wait_ns(now_ns, 1) if each.requests is not None else 0
            if each.tokens is not None:
                wait_ns = max(wait_ns, each.tokens.wait_ns(now_ns, _tokens(work)))
            if wait_ns:
                found.append(worker_id)
                waits_ns.append(wait_ns)
        if waits_ns:
            due_ns = now_ns + min(waits_ns)
            self.due_ns = due_ns if self.due_ns is None else min(self.due_ns, due_ns)
            assert due_ns > now_ns, "a worker that is spent is waited for"
        return frozenset(found)

    def groups(
        self, work: Work, workers: CapacityTable, without: Collection[WorkerId]
    ) -> list[frozenset[WorkerId]]:
        """Workers that could start it now, order by order; where weights differ only the one whose turn it
        is.
        """
        by_order: dict[int, list[WorkerCapacity]] = {}
        for worker in workers:
            if worker.id not in without and worker.fits(work):
                by_order.setdefault(self._terms(worker.id).order, []).append(worker)
        return [frozenset(self._in_turn(by_order[order])) for order in sorted(by_order)]

    def started(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """It was started there."""
        each = self._known.get(worker.id)
        if each is None:
            return
        # A tenant that was away does not catch up on more than one start.
        before = max(each.passed, self._passed - 1)
        self._passed, each.passed = max(self._passed, before), before + 1 / each.terms.weight
        if each.requests is not None:
            each.requests.take(now_ns, 1)
        if each.tokens is not None:
            amount = self._taken[work.id, worker.id] = _tokens(work)
            each.tokens.take(now_ns, amount)

    def ended(self, now_ns: int, work: Work, worker: WorkerCapacity, usage: Usage | None) -> None:
        """It runs there no more, and used so much. Where that is not known nothing is given back: a provider
        counts attempts that failed or were aborted too.
        """
        taken, each = self._taken.pop((work.id, worker.id), 0), self._known.get(worker.id)
        if each is None or each.tokens is None or usage is None or not usage.prompt_tokens:
            return
        used = usage.prompt_tokens + usage.completion_tokens
        assert taken >= 0 <= used, (taken, used)
        each.tokens.take(now_ns, used - taken)

    def _terms(self, worker_id: WorkerId) -> DeploymentTerms:
        known = self._known.get(worker_id)
        return known.terms if known is not None else _PLAIN

    def _in_turn(self, workers: Sequence[WorkerCapacity]) -> list[WorkerId]:
        if len({self._terms(worker.id).weight for worker in workers}) == 1:
            return [worker.id for worker in workers]
        first = min(workers, key=lambda worker: (self._place(worker.id), worker.number))
        return [first.id]

    def _place(self, worker_id: WorkerId) -> float:
        known = self._known.setdefault(worker_id, _Deployment(_PLAIN, self._passed))
        return known.passed + 1 / known.terms.weight


_PLAIN = DeploymentTerms()
_MINUTE_NS = 60 * NS_PER_S


def _tokens(work: Work) -> int:
    """Its expected use."""
    return work.prompt_tokens + work.cached_tokens + work.output_tokens

"""How many requests may run at once, so that each of them gets its next token in time.

A step costs every row the time of the whole step, so a target for the time per output token bounds the rows,
not only the prompts beside them: a request starts only if the step in which all that run decode, with the
least that prompts take of it, is predicted to keep the target. The others wait, where a queue can still
reorder or refuse them.

    target     the strictest of the classes that run; a class that only waits slows nobody down
               (not below what this machine can keep: `PrefillBudget.kept_ns`)
    predicted  each row's context as it will be half-way through the rest of its answer: the mean over the
               time that counts

One request always runs. Requests that run are never taken out again for a target: that would only move the
wait.
"""

from collections.abc import Sequence
from math import inf

from penstock.schedule.prefill_budget import PrefillBudget
from penstock.schedule.request import Request
from penstock.schedule.reserve import OutputEstimate
from penstock.schedule.step_time import StepLoad

UNTRUSTED_ROWS, UNTRUSTED_STEPS = 4, 4
"""While the law does not know what so many rows cost: requests that may start in one step, and the steps from
one refused until it asks again. One of those only decodes and is learnt from: what prompts cost and what rows
cost cannot be told apart otherwise."""
REFUSED_STEPS = 16
"""Whom the law refuses asks again after so many steps, or as soon as a request that runs has ended: asking
takes time."""


class RowBound:
    """One engine's.

    `open` it for a step that may start requests, then ask `admits` and tell what `started`.
    """

    __slots__ = (
        "_estimate", "_growth", "_kv_read", "_limit_ns", "_max_running", "_prefill", "_rows", "_started",
        "refused_steps", "rows_max",
    )  # fmt: skip

    def __init__(self, prefill: PrefillBudget, estimate: OutputEstimate, max_running: int) -> None:
        self._prefill, self._estimate = prefill, estimate
        self._max_running = self.rows_max = max_running
        """Of requests like those that run, how many keep the target: as of when the last one asked to
        start."""
        self.refused_steps = REFUSED_STEPS
        """After how many steps the one that `admits` has just refused asks again."""
        self._limit_ns = inf
        self._rows = self._kv_read = self._growth = self._started = 0

    def open(self, running: Sequence[Request]) -> None:
        """Requests may start beside these. O(rows) with a target, else O(1)."""
        self._rows, self._started = len(running), 0
        if not self._prefill.targets.has_any:
            return
        self._limit_ns = self._limit(running)
        if self._limit_ns != inf:
            self._kv_read = sum([len(request.tokens) for request in running])
            self._growth = sum(map(self._growth_of, running))

    def admits(self, request: Request) -> bool:
        """Whether the request may start beside those that run."""
        if not self._rows or self._limit_ns == inf:
            self.rows_max = self._max_running
            return True
        rows, model = self._rows + 1, self._prefill.model
        kv_read = self._kv_read + len(request.tokens)
        is_known = model.trusts(StepLoad(rows, rows, kv_read))
        self.refused_steps = REFUSED_STEPS if is_known else UNTRUSTED_STEPS
        kv_read += self._growth + self._growth_of(request)
        cost = model.cost
        left_ns = self._limit_ns - cost.predict_ns(StepLoad(rows, rows, kv_read))
        left_ns -= cost.token_ns * self._prefill.targets.tokens_min
        each_ns = cost.token_ns + cost.sequence_ns + cost.kv_read_ns * kv_read / rows
        further = left_ns // each_ns if each_ns > 0 else self._max_running
        self.rows_max = int(min(max(rows + further, 1), self._max_running)) if is_known else self._max_running
        assert 1 <= self.rows_max <= self._max_running, self.rows_max
        return left_ns >= 0 and (is_known or self._started < UNTRUSTED_ROWS)

    def started(self, request: Request) -> None:
        """It runs."""
        targets = self._prefill.targets
        if targets.by_priority and (target_ns := targets.of_rows(request.priority)):
            self._limit_ns = min(self._limit_ns, self._prefill.kept_ns(target_ns))
        self._kv_read += len(request.tokens)
        self._growth += self._growth_of(request)
        self._rows += 1
        self._started += 1
        assert self._started <= self._rows <= self._max_running, "more requests run than there are rows"

    def _limit(self, running: Sequence[Request]) -> float:
        """What a step may take."""
        targets = self._prefill.targets
        classes = {request.priority for request in running} if targets.by_priority else {0}
        kept = {target for priority in classes if (target := targets.of_rows(priority))}
        return self._prefill.kept_ns(min(kept)) if kept else inf

    def _growth_of(self, request: Request) -> int:
        """By how much its context will be longer than now, half-way through the rest of its answer."""
        return self._estimate.remaining(request) // 2

"""How many prompt tokens a step takes, so that running streams keep their pace and no prompt starves.

A step costs every decoding row the time of the whole step. So prompts get what is left of a time limit:

    limit = inter-token target of the strictest class that decodes             (a target is configured)
    limit = (step without prompts) x (1 + stretch of the first prompt + STRETCH x further ones that wait)
            and at most KEPT_SHARE of the target per output token              (automatic, the default)
    limit = KEPT_SHARE of the target per output token       (automatic, and several wait, the oldest for over
                                                            CROWDED_NS)

The automatic limit is a bargain between those who read and those who wait. One prompt, however long, never
doubles the inter-token time, not even that of the slowest steps but one in fifty: where steps run over their
predictions (`step_time.Overrun`), the first prompt's stretch is shorter. When many wait, a strict limit would
be the end of throughput: prompts would arrive faster than they are let in and rows would run half empty, so
each that waits may add its own stretch; and once some have waited for long, all get what the streams were
promised to be able to spare: smooth reading beyond the promise is worth less than an answer that would come
too late. With no row decoding there is no limit but the step's token budget. How many rows may decode at once
follows from the same targets: `RowBound`.

Prompts are finished one after another: a budget split among many gives all of them a late first token. For
the same reason a prompt joins others that end in the same step only if that pays: the `j` that would be done
sooner without it lose its time, and those behind save one step's fixed cost.

The law of step times is fitted while running (`step_time.py`). Where it does not know yet, chunks are small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import TPOT_TARGET_MS
from penstock.schedule.draft_times import DraftTimes
from penstock.schedule.plan import Drafting, StepPlan
from penstock.schedule.request import Request
from penstock.schedule.shares import OutputEstimate
from penstock.schedule.step_time import Overrun, StepLoad, StepSums, StepTimeModel

STRETCH = 0.4
"""The time that every waiting prompt but the first may add to a step, in steps without prompts."""
TIMES_MAX = 1.6
"""The most that one waiting prompt may make of a step, overruns included: below 2, for meanwhile the streams
grow by themselves."""
STRETCH_MIN, STRETCH_MAX = 0.2, 0.4
"""The time that it may add to the predicted one at least, however noisy the machine is, and at most, however
quiet."""
UNTRUSTED_TOKENS = 64
"""Prompt tokens of a step with decoding rows for each waiting prompt, while the law is not trusted."""
_DECODE_EVERY = 4
"""Of steps that only decode, which are much alike, one in so many is learnt from: host time is dear."""
_KNOWN_STEPS = 64
"""Before the law has seen so many steps, errors are its own and not the machine's."""
KEPT_SHARE = 0.9
"""Predicted steps keep this share of the target per output token: the law predicts means, and nearly all are
to be in time."""
CROWDED_NS = 50_000_000
"""Several prompts of which the oldest has waited for so long are a crowd. A tenth of what is promised to a
first token: a lone prompt, or some that came just now, never take all that the promise leaves."""
IDLE_FACTOR = 2.5
"""That target is never taken for less than so many times the step of a lone row (as `admission.idle_factor`):
no batch keeps what an idle machine hardly does."""
_LONE_ROW = StepLoad(1, 1, 512)
"""The lone row, with a context of 512 tokens."""
_NO_LIMIT = 1 << 60
_NS_PER_MS = 1_000_000


def decoding_learned(first: int, last: int) -> range:
    """Of the steps with these numbers, all of which only decode, those that are learned from all the same."""
    assert 0 < first <= last, f"no steps from {first} to {last}"
    return range(first + -first % _DECODE_EVERY, last + 1, _DECODE_EVERY)


@dataclass(slots=True, frozen=True)
class LatencyTargets:
    """The promises to streams about the time between their tokens."""

    default_ns: int = 0
    """The longest step with prompts in it; 0 is automatic."""
    by_priority: tuple[tuple[int, int], ...] = ()
    """(priority class, its target) where it is not the default."""
    tokens_min: int = 16
    """Prompt tokens that every step with prompts takes, whatever the limit says: nothing starves."""
    tpot_ns: int = 0
    """The mean time per output token of classes without a target of their own; 0 promises nothing."""

    @classmethod
    def of(cls, config: EngineSettings) -> "LatencyTargets":
        """The targets of a config."""
        asked, default_ns, by_priority = config.itl_target_ms, 0, ()
        if isinstance(asked, dict):
            by_priority = tuple((priority, round(ms * _NS_PER_MS)) for priority, ms in asked.items())
        else:
            default_ns = round(asked * _NS_PER_MS)
        return cls(
            default_ns,
            by_priority,
            config.prefill_tokens_min,
            round((TPOT_TARGET_MS if config.tpot_target_ms is None else config.tpot_target_ms) * _NS_PER_MS),
        )

    def of_class(self, priority: int) -> int:
        """The target of a priority class, in nanoseconds; 0 is automatic."""
        if not self.by_priority:
            return self.default_ns
        return next((target for known, target in self.by_priority if known == priority), self.default_ns)

    def of_rows(self, priority: int) -> int:
        """The promise to the rows of a priority class per output token, in nanoseconds; 0 promises
        nothing.
        """
        return self.of_class(priority) or self.tpot_ns

    @property
    def has_any(self) -> bool:
        """Whether any class is promised anything."""
        return bool(self.tpot_ns or self.default_ns or self.by_priority)


class PrefillBudget:
    """Learns what steps cost, and opens a `PromptShare` for every step that has prompts."""

    __slots__ = (
        "_last_ns", "draft_times", "drafter_reads", "drafting", "model", "overrun", "sums", "targets",
    )  # fmt: skip

    def __init__(self, targets: LatencyTargets) -> None:
        self.targets, self.model, self.overrun = targets, StepTimeModel(), Overrun()
        self.drafting = StepTimeModel()
        """Of the passes of a model that guesses; nothing is observed where there is none."""
        self.drafter_reads = True
        self.draft_times: DraftTimes | None = None
        """Of steps with drafts that no model guessed; None: there are none."""
        self.sums = StepSums()
        """Of all steps, for who compares engines."""
        self._last_ns = 0

    def observe(
        self,
        plan: StepPlan,
        load: StepLoad,
        now_ns: int,
        drafting: Drafting | None = None,
        num_beside: int = 0,
    ) -> None:
        """Learn from a step with this load that is over now; `num_beside` rows decoded that the plan does not
        list.

        It took the time since it was planned; or since the step before it was over, if that ran meanwhile.
        The part of it that a model took for guesses has a law of its own.
        """
        began_ns, self._last_ns = max(plan.planned_ns, self._last_ns), now_ns
        has_chunk, step_ns = plan.work[-1].num_tokens > 1, now_ns - began_ns
        self.sums.add(load, step_ns)
        if drafting is not None:
            step_ns -= drafting.took_ns
            self.drafter_reads = drafting.reads
            self.drafting.observe(StepLoad.of_drafting(drafting), drafting.took_ns)
        has_drafts = load.num_sequences > len(plan.work) + num_beside
        if self.draft_times is not None and not self.drafting.num_observed and not has_chunk:
            self._observe_drafts(self.draft_times, plan, load, step_ns)
        if has_chunk or has_drafts or not plan.step % _DECODE_EVERY:
            decodes = num_beside or plan.work[0].num_tokens == 1
            if has_chunk and decodes and self.model.num_observed >= _KNOWN_STEPS:
                self.overrun.observe(step_ns / self.model.predict_ns(load))
            self.model.observe(load, step_ns)

    def _observe_drafts(self, times: DraftTimes, plan: StepPlan, load: StepLoad, step_ns: int) -> None:
        """Of a step in which all rows decode."""
        num_rows = len(plan.work)
        num_drafts = load.num_sequences - num_rows
        plain_ns = self.model.predict_ns(StepLoad.of(plan.work) if num_drafts else load)
        if step_ns <= 0 or not plain_ns:
            return  # No step's time, or no step was seen before.
        if num_drafts:
            cost = self.model.cost
            each = (cost.token_ns + cost.sequence_ns + cost.kv_read_ns) / plain_ns
            times.observe(num_rows, num_drafts, step_ns / plain_ns, each)
        else:
            times.observe_plain(num_rows, step_ns / plain_ns)

    def observe_decoding(self, load: StepLoad, began_ns: int, now_ns: int) -> None:
        """`observe` for a step that only decoded, right after the one before."""
        self.model.observe(load, now_ns - began_ns)

    def steps_over(self, load: StepLoad, began_ns: int, now_ns: int) -> None:
        """Steps that only decoded are over, whether or not some of them were learned from."""
        assert now_ns >= self._last_ns, "steps end in order"
        self._last_ns = now_ns
        self.sums.add(load, now_ns - began_ns)

    @property
    def stretch(self) -> float:
        """The time that one waiting prompt may add to a step's predicted one, in steps without prompts."""
        return min(max(TIMES_MAX / self.overrun.factor - 1, STRETCH_MIN), STRETCH_MAX)

    def kept_ns(self, target_ns: int) -> float:
        """The predicted time that a step may take, so that the rows in it are given their tokens within a
        target of so many nanoseconds, or within the time that this machine can keep.
        """
        least_ns = IDLE_FACTOR * self.model.predict_ns(_LONE_ROW)
        return KEPT_SHARE * (target_ns if target_ns >= least_ns else least_ns)

    def open(
        self, decoding: StepLoad, priorities: set[int], num_prompts: int, waited_ns: int = 0
    ) -> "PromptShare":
        """The share of prompts in a step whose decode rows are `decoding`, of classes `priorities`.

        `num_prompts` is how many prompts are not finished or not started, at least 1; the oldest has waited
        for `waited_ns`.
        """
        assert num_prompts > 0, "a step without prompts has nothing to share"
        base_ns = self.model.predict_ns(decoding)
        automatic_ns = base_ns * (1 + self.stretch + STRETCH * (num_prompts - 1))
        if self.targets.tpot_ns:
            kept_ns, is_crowd = self.kept_ns(self.targets.tpot_ns), num_prompts > 1 and waited_ns > CROWDED_NS
            automatic_ns = kept_ns if is_crowd else min(automatic_ns, kept_ns)
        targets = {self.targets.of_class(priority) for priority in priorities}
        limit_ns = min((target or automatic_ns for target in targets), default=inf)
        return PromptShare(self.model, decoding, limit_ns, num_prompts, self.targets.tokens_min)


class PromptShare:
    """One step's share of prompts: ask `grant` prompt by prompt, in order, until it is `closed`."""

    __slots__ = (
        "_base_ns",
        "_cautious",
        "_ending",
        "_limit_ns",
        "_load",
        "_model",
        "_num_prompts",
        "_tokens_min",
        "closed",
    )

    def __init__(
        self, model: StepTimeModel, decoding: StepLoad, limit_ns: float, num_prompts: int, tokens_min: int
    ) -> None:
        self._model, self._load, self._limit_ns = model, decoding, limit_ns
        self._num_prompts, self._tokens_min = num_prompts, tokens_min
        self._base_ns = model.predict_ns(decoding)
        self._cautious = UNTRUSTED_TOKENS * num_prompts  # Tokens that the step may take without trust.
        self._ending = 0  # Prompts that end in this step: any other one closes the share.
        self.closed = False
        """Whether no further prompt gets anything."""

    def grant(self, num_computed: int, num_pending: int, tokens_left: int) -> int:
        """How many of a prompt's `num_pending` tokens this step takes, after `num_computed` stored ones.

        At most `tokens_left`, which must not be 0. The first prompt of a step gets at least one; 0 closes.
        """
        assert not self.closed, "no prompt gets anything after the last"
        wanted = num_pending if num_pending < tokens_left else tokens_left
        assert wanted > 0, "there is nothing to grant"
        num_tokens = wanted if self._limit_ns == inf else self._within_limit(num_computed, wanted)
        if not self._ending:
            num_tokens = max(num_tokens, min(self._tokens_min, wanted))
        elif num_tokens and not self._pays(num_computed, num_tokens):
            num_tokens = 0
        assert 0 <= num_tokens <= wanted, (num_tokens, wanted)
        if num_tokens:
            self._load = self._load.plus(num_computed, num_tokens)
            self._cautious -= num_tokens
        self._ending += num_tokens == num_pending
        self.closed = num_tokens < num_pending
        return num_tokens

    def _within_limit(self, num_computed: int, wanted: int) -> int:
        """The part of `wanted` that fits the time; less if the law knows too little of such a step.

        Then half of it is asked about, and so on down to a cautious size. Since the law may be extrapolated
        somewhat, chunks grow from step to step, and it learns what it did not know. A part below that size is
        taken as it is if the law knows either: a small chunk that fits is not made larger because a large one
        is unknown.
        """
        num_tokens, cautious = self._in_time(num_computed), self._cautious if self._cautious > 0 else 0
        num_tokens = wanted if wanted < num_tokens else num_tokens
        cautious = wanted if wanted < cautious else cautious
        while not self._trusts(num_computed, num_tokens):
            if num_tokens <= cautious:
                return num_tokens if self._trusts(num_computed, cautious) else cautious
            num_tokens = max(num_tokens // 2, cautious)
        return num_tokens

    def _trusts(self, num_computed: int, num_tokens: int) -> bool:
        return self._model.trusts(self._load.plus(num_computed, num_tokens))

    def _in_time(self, num_computed: int) -> int:
        """The longest chunk that keeps the predicted time of the step within its limit."""
        cost = self._model.cost
        left_ns = self._limit_ns - cost.predict_ns(self._load.plus(num_computed, 0))
        if left_ns <= 0:
            return 0
        # A token at position p attends to p tokens: linear x n + pair / 2 x n^2 <= left.
        linear_ns = cost.token_ns + cost.kv_read_ns + cost.pair_ns * (num_computed + 0.5)
        root = sqrt(linear_ns * linear_ns + 2 * cost.pair_ns * left_ns)
        return _NO_LIMIT if linear_ns + root <= 0 else int(min(2 * left_ns / (linear_ns + root), _NO_LIMIT))

    def _pays(self, num_computed: int, num_tokens: int) -> bool:
        """Whether one more prompt in this step makes the mean first token come sooner.

        The prompts that end in it already wait for this one's time; itself and all behind save a step's base.
        """
        after = self._load.plus(num_computed, num_tokens)
        if not self._model.trusts(after):
            return True
        cost_ns = self._model.predict_ns(after) - self._model.predict_ns(self._load)
        return cost_ns * self._ending <= self._base_ns * (self._num_prompts - self._ending)


# How many requests may run at once, so that each of them gets its next token in time.
#
# A step costs every row the time of the whole step, so a target for the time per output token bounds the
# rows, not only the prompts beside them: a request starts only if the step in which all that run decode,
# with the least that prompts take of it, is predicted to keep the target. The others wait, where a queue
# can still reorder or refuse them.
#
#     target     the strictest of the classes that run; a class that only waits slows no one down
#                (not below what this machine can keep: `PrefillBudget.kept_ns`)
#     predicted  each row's context as it will be half-way through the rest of its answer: the mean over the
#                time that counts
#
# One request always runs. Requests that run are never taken out again for a target: that would only move
# the wait.

UNTRUSTED_ROWS, UNTRUSTED_STEPS = 4, 4
"""While the law does not know what so many rows cost: requests that may start in one step, and the steps from
one refused until it asks again. One of those only decodes and is learnt from: what prompts cost and what rows
cost cannot be told apart otherwise."""
REFUSED_STEPS = 16
"""A request that the law refuses asks again after so many steps, or as soon as a request that runs has ended:
asking takes time."""


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
            self._growth = sum([left // 2 for left in self._estimate.remaining_of(running)])

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
        """The time that a step may take."""
        targets = self._prefill.targets
        classes = {request.priority for request in running} if targets.by_priority else {0}
        kept = {target for priority in classes if (target := targets.of_rows(priority))}
        return self._prefill.kept_ns(min(kept)) if kept else inf

    def _growth_of(self, request: Request) -> int:
        """By how much its context will be longer than now, half-way through the rest of its answer."""
        return self._estimate.remaining(request) // 2

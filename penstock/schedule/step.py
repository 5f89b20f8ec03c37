"""A plan in the making: what the step has taken of its budget so far."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from penstock.kv.cache.block_pool import Epoch
from penstock.kv.cache.host_tier import NO_COPIES, Copies
from penstock.schedule.plan import NewRow, RowWork, Sampled, StepPlan
from penstock.schedule.prefill_budget import PromptShare
from penstock.schedule.request import Request
from penstock.schedule.step_time import StepLoad, chunk_pairs
from penstock.types import TOKEN_WEIGHT


class StepShape(NamedTuple):
    """The work of one step."""

    decode_rows: int
    """Rows that compute one token each."""
    prefill_rows: int
    prefill_tokens: int
    """Tokens of all chunks of prompts together."""
    kv_tokens: int
    """Tokens whose keys and values are read, once per row: the row's context with this step's tokens."""
    chunk_pairs: int = 0
    """(token, token before it) pairs in the attention of chunks; 0 for rows that decode."""

    @classmethod
    def of(cls, rows: tuple[RowWork, ...]) -> "StepShape":
        """The shape of a plan's work. O(rows)."""
        count, prefill_rows, prefill_tokens, pairs = len(rows), 0, 0, 0
        kv_tokens = count
        for work in rows:
            kv_tokens += work.num_computed
            tokens = work.num_tokens
            if tokens > 1:
                prefill_rows += 1
                prefill_tokens += tokens
                pairs += tokens * work.num_computed + tokens * (tokens + 1) // 2
        kv_tokens += prefill_tokens - prefill_rows
        return cls(count - prefill_rows, prefill_rows, prefill_tokens, kv_tokens, pairs)


# A plan on its way: made, handed to the runner, and not applied yet.

FLIGHTS_MAX = 2
"""One step computes while the next is planned. More would only make stops and new requests wait longer."""


@dataclass(slots=True, eq=False)
class Flight:
    """One step between `schedule` and `apply`."""

    plan: StepPlan
    requests: tuple[Request, ...]
    """The requests of `plan.work`: a row may belong to another request when the result comes."""
    num_decoding: int
    """So many of the first decode: one token each, which samples and scores nothing."""
    epoch: Epoch
    """Holds the blocks of requests that end meanwhile."""
    load: StepLoad
    """The cost of the step."""
    is_void: bool = False
    """A step before it failed, so that it computed on nothing: its result is dropped."""
    num_drafts: int = 0
    """Drafts that it may compute."""
    drafted: tuple[int, ...] = ()
    """How many it did, for each row that decodes; empty before that is known, and where it may have none."""
    beside: tuple[Request, ...] = ()
    """Requests that decode and that the plan does not list (`Scheduler.decode_together`)."""

    def count_in(self) -> None:
        """Let every request know what this step will do for it."""
        epoch, num_decoding = self.epoch, self.num_decoding
        assert num_decoding <= len(self.requests) == len(self.plan.work), "every row's work is a request's"
        for request in self.requests[:num_decoding]:
            request.num_planned += 1
            request.num_drawing += 1
            request.last_used = epoch
        if self.num_drafts:
            for request, work in zip(self.requests[:num_decoding], self.plan.work, strict=False):
                request.num_speculated = work.drafts
        others = zip(self.requests[num_decoding:], self.plan.work[num_decoding:], strict=True)
        for request, work in others:
            request.num_planned = work.num_computed + work.num_tokens
            request.num_drawing += work.samples
            request.last_used = epoch

    def list_beside(self, *, is_counted_in: bool = False) -> None:
        """Let the plan list the rows that decode after all: before `count_in`, or after it."""
        rows = self.beside
        listed = [RowWork(request.row, request.num_planned, 1, True) for request in rows]
        self.plan = replace(self.plan, work=(*listed, *self.plan.work))
        self.requests, self.beside, self.num_decoding = (*rows, *self.requests), (), len(rows)
        for request in rows if is_counted_in else ():
            request.num_planned += 1
            request.num_drawing += 1

    def count_drafts(self, sampled: Sequence[Sampled]) -> None:
        """It is over, and so it is known for which of its drafts there was a guess."""
        if not self.num_drafts or self.drafted:
            return
        self.drafted = tuple([draw.drafted for draw in sampled[: self.num_decoding]])
        for work, num_drafts in zip(self.plan.work, self.drafted, strict=False):
            assert num_drafts <= work.drafts, "more was computed than there was room for"
            if num_drafts:
                self.load = self.load.with_drafts(work.num_computed, num_drafts)

    @property
    def shape(self) -> StepShape:
        """The work in it, without a look at each row that decodes."""
        load = self.load
        chunks = [work.num_tokens for work in self.plan.work[self.num_decoding :] if work.num_tokens > 1]
        num_decoding = load.num_sequences - len(chunks)
        assert num_decoding >= 0, "each chunk is a sequence's"
        return StepShape(num_decoding, len(chunks), sum(chunks), load.kv_read, load.chunk_pairs)

    @property
    def only_decodes(self) -> bool:
        """Whether each of its rows computes one token and nothing else."""
        return not self.num_drafts and self.num_decoding == len(self.requests)

    def share(self, time_ns: int) -> None:
        """Divide the time that this step took among its requests: see `share_times`."""
        num_decoding, load = self.num_decoding, self.load
        rows, works = self.requests, self.plan.work
        total = TOKEN_WEIGHT * load.num_tokens + load.kv_read  # As if all decoded: each token reads its row.
        others = [
            (rows[i], works[i].num_computed, works[i].num_tokens) for i in range(num_decoding, len(rows))
        ]
        drafted = self.drafted or (0,) * num_decoding
        others += [
            (request, work.num_computed, 1 + num_drafts)
            for request, work, num_drafts in zip(rows, works, drafted, strict=False)
            if num_drafts
        ]
        for _, num_computed, num_tokens in others:
            total += chunk_pairs(num_computed, num_tokens) - num_computed - num_tokens
        assert total > 0 <= time_ns, "a step has work, and takes time"
        for request, num_computed, num_tokens in others:
            weight = TOKEN_WEIGHT * num_tokens + chunk_pairs(num_computed, num_tokens)
            request.device_ns += time_ns * weight // total
        for request, work, num_drafts in zip(rows[:num_decoding], works, drafted, strict=False):
            if not num_drafts:
                request.device_ns += time_ns * (TOKEN_WEIGHT + 1 + work.num_computed) // total


_SHARE_BITS, _ROUNDING_BITS = 64, 40
"""Behind the point, of the time of one token in a step; the second is what the rest may be short of, so that
rounding loses no whole nanosecond."""


def share_times(steps: Iterable[tuple[Flight, int]]) -> None:
    """Divide the time that each of these steps took among its requests, by the work in it: tokens run through
    the model, and for each of them the tokens that its attention read. The remainder of the division, fewer
    nanoseconds than requests, is dropped.

    The steps are in their order and have work; those that decode the same rows one after the other are
    divided at once.
    """
    run: list[tuple[Flight, int]] = []
    for flight, time_ns in steps:
        if run and not _follows(flight, run[-1][0]):
            _share_run(run)
            run = []
        if flight.only_decodes:
            run.append((flight, time_ns))
        else:
            flight.share(time_ns)
    if run:
        _share_run(run)


def _follows(flight: Flight, before: Flight) -> bool:
    """Whether it decodes the same rows as `before` does, each one token further."""
    rows = flight.requests
    if not flight.only_decodes or flight.load.kv_read != before.load.kv_read + len(rows):
        return False  # The second: one of them was void, and its rows are where they were.
    return rows == before.requests


def _share_run(run: Sequence[tuple[Flight, int]]) -> None:
    """`share_times` of steps of which each follows the one before: a row that weighs `w` in the first weighs
    `w + i` in the one after `i` others, so that its part is a sum of times and one of times by their number.
    """
    times = growing = 0
    for i, (flight, time_ns) in enumerate(run):
        total = TOKEN_WEIGHT * flight.load.num_tokens + flight.load.kv_read
        assert total > 0 <= time_ns, "a step has work, and takes time"
        of_token = (time_ns << _SHARE_BITS) // total
        times += of_token
        growing += i * of_token
    first, first_ns = run[0][0], (TOKEN_WEIGHT + 1) * times + growing + (1 << _ROUNDING_BITS)
    for request, work in zip(first.requests, first.plan.work, strict=True):
        request.device_ns += (first_ns + work.num_computed * times) >> _SHARE_BITS


class StepBuilder:
    """Collects one step's work. Never holds more tokens than its budget, nor a row twice."""

    __slots__ = (
        "_kv_read", "_new_rows", "_num_decoding", "_num_drafts", "_num_tokens", "_pairs", "_requests",
        "_work", "budget", "planned_ns", "prompts", "reads_states", "scored_budget",
    )  # fmt: skip

    def __init__(self, step_tokens: int, scored_tokens: int) -> None:
        self.budget = step_tokens
        """Tokens that may still be added."""
        self.scored_budget = scored_tokens
        """Tokens with a log-probability each that may still be added."""
        self.planned_ns = 0
        """When planning began."""
        self.prompts: PromptShare | None = None
        """The part of the step that prompts may take; None if there are none."""
        self.reads_states = True
        """See `StepPlan`."""
        self._new_rows: list[NewRow] = []
        self._work: list[RowWork] = []
        self._requests: list[Request] = []  # The requests of the work.
        self._num_decoding = 0  # How many of the first are rows that decode.
        self._num_drafts = 0  # Behind their tokens.
        self._num_tokens: int = 0  # Of all work, as the next two: see `StepLoad`.
        self._kv_read: int = 0
        self._pairs: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute, and no row for the runner to hear of."""
        return not self._work and not self._new_rows

    @property
    def takes_prompts(self) -> bool:
        """Whether a prompt may still get a part of the step."""
        return self.budget > 0 and self.prompts is not None and not self.prompts.closed

    def rows(self) -> Iterator[int]:
        """The rows that have work so far."""
        return (work.row for work in self._work)

    def load(self) -> StepLoad:
        """The cost of the step so far. O(1)."""
        return StepLoad(self._num_tokens, len(self._work), self._kv_read, self._pairs)

    def room(self, request: Request, num_computed: int) -> int:
        """How many of a prompt's tokens after `num_computed` the step may take now; 0 if it must wait.

        Bounded by the step's tokens, by its time, and by its rows of logits if whole chunks need them.
        """
        room = min(self.budget, self.scored_budget) if request.scores_after(num_computed) else self.budget
        if not room or self.prompts is None:
            return 0
        return self.prompts.grant(num_computed, len(request.tokens) - num_computed, room)

    def add(self, request: Request, num_tokens: int, blocks: tuple[int, ...]) -> None:
        """Compute the request's next `num_tokens` tokens, after adding `blocks` to its table."""
        start, scores = request.num_planned, request.scores_after(request.num_planned)
        pending = request.num_pending
        assert 0 < num_tokens <= pending, f"{num_tokens} of {pending} pending tokens"
        samples = num_tokens == pending
        self.budget -= num_tokens
        self.scored_budget -= num_tokens * scores
        assert self.budget >= 0, "over the token budget"
        assert self.scored_budget >= 0, "more log-probabilities than there are rows of logits"
        self._work.append(RowWork(request.row, start, num_tokens, samples, blocks, scores))
        self._requests.append(request)
        self._count(start, num_tokens, 1)

    def add_decoding(self, request: Request, blocks: tuple[int, ...]) -> None:
        """`add` for a row with one pending token, which samples and scores nothing."""
        self._open_decoding(1)
        start = request.num_planned
        self._work.append(RowWork(request.row, start, 1, True, blocks))
        self._requests.append(request)
        self._kv_read += start + 1

    def add_all_decoding(self, requests: list[Request]) -> None:
        """The same for rows that need no block: nearly all of a step, so what can be done for all at once
        is.
        """
        self._open_decoding(len(requests))
        self._work += [RowWork(request.row, request.num_planned, 1, True) for request in requests]
        self._requests += requests
        self._kv_read += sum([request.num_planned for request in requests]) + len(requests)

    def _open_decoding(self, num_rows: int) -> None:
        """Count rows that decode: they come before all others."""
        assert self._num_decoding == len(self._work), "rows that decode come first"
        self.budget -= num_rows
        assert self.budget >= 0, "over the token budget"
        self._num_decoding += num_rows
        self._num_tokens += num_rows

    @property
    def num_decoding(self) -> int:
        """How many rows decode."""
        return self._num_decoding

    @property
    def decoding(self) -> Sequence[Request]:
        """The rows that decode."""
        return self._requests[: self._num_decoding]

    def add_drafts(self, index: int, num_drafts: int, match_min: int, blocks: tuple[int, ...]) -> None:
        """Let the row at this place of `decoding` have drafts, after adding `blocks` to its table. No row is
        dropped any more.
        """
        work = self._work[index]
        assert index < self._num_decoding, "only rows that decode have drafts"
        assert not work.drafts, "a row is given drafts once"
        self.budget -= num_drafts
        self.scored_budget -= num_drafts  # Each is a row of logits.
        assert self.budget >= 0 <= self.scored_budget, "more drafts than the step has room for"
        self._work[index] = replace(
            work, drafts=num_drafts, match_min=match_min, new_blocks=work.new_blocks + blocks
        )
        self._num_drafts += num_drafts

    def add_new(self, request: Request, num_tokens: int, blocks: tuple[int, ...]) -> None:
        """The same for a request that (re)enters the batch: the runner gets all of its facts."""
        self._enter(request, ())
        self.add(request, num_tokens, blocks)

    def enter(self, request: Request) -> None:
        """Tell the runner about a request that has a row and blocks, but no work yet: it is loading."""
        self._enter(request, tuple(request.table.blocks))

    def _enter(self, request: Request, blocks: tuple[int, ...]) -> None:
        assert request.row >= 0, f"{request.request_id} has no row"
        tokens = request.tokens[:]
        self._new_rows.append(
            NewRow(
                request.request_id,
                request.row,
                tokens,
                request.num_prompt,
                request.sampling,
                blocks,
                request.grammar,
                request.adapter,
                request.num_first,
            )
        )

    def drop(self, request: Request) -> None:
        """Take a running request's work out again, if it has any: it is being preempted."""
        for index, work in enumerate(self._work):
            if work.row == request.row:
                self.budget += work.num_tokens
                self.scored_budget += work.num_tokens * work.scores
                self._count(work.num_computed, work.num_tokens, -1)
                self._num_decoding -= index < self._num_decoding
                assert self._requests[index].row == work.row, "work and requests are in one order"
                del self._work[index], self._requests[index]
                return

    def build(
        self, step: int, freed_rows: tuple[int, ...], epoch: Epoch, copies: Copies = NO_COPIES
    ) -> Flight:
        """The finished plan, ready to be handed to the runner."""
        new_rows, work = tuple(self._new_rows), tuple(self._work)
        assert len(self._requests) == len(work), "every row's work is a request's"
        plan = StepPlan(
            step, new_rows, work, freed_rows, self.planned_ns, copies.out, copies.into, self.reads_states
        )
        flight = Flight(plan, tuple(self._requests), self._num_decoding, epoch, self.load())
        flight.num_drafts = self._num_drafts
        return flight

    def _count(self, num_computed: int, num_tokens: int, sign: int) -> None:
        """Put a row's work to the load, or take it out."""
        self._num_tokens += sign * num_tokens
        self._kv_read += sign * (num_computed + num_tokens)
        assert self._num_tokens >= 0 <= self._kv_read, "more is taken out than was put in"
        if num_tokens > 1:
            self._pairs += sign * chunk_pairs(num_computed, num_tokens)


def check_in_flight(request: Request, flights: Iterable[Flight]) -> None:
    """Assert that a request's expectation is the work that the plans in flight do for it."""
    pairs = [zip(each.requests, each.plan.work, strict=True) for each in flights if not each.is_void]
    work = [work for flight in pairs for owner, work in flight if owner is request]
    name = request.request_id
    assert request.num_planned - request.num_computed == sum(each.num_tokens for each in work), name
    assert request.num_drawing + request.num_void == sum(each.samples for each in work), name
    assert len(request.tokens) + request.num_drawing <= request.num_tokens_max, f"{name}: planned too far"
    assert request.num_pending > 0, f"{name}: more is planned than will be known"

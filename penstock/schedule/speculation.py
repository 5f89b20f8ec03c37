"""How many tokens of each row that decodes are guessed and computed in one step with the one that it owes.

    tokens of a step   1 of every row, and of a draft at place i of a row whose guesses are right with
                       probability p: p^i
    its time           by the law that is fitted to the steps that ran (step_time.py)

A draft is worth its time if it gives more tokens for it than the step does without: one after the other is
added while that holds. Alone a request pays its weights' bandwidth for one token, and further ones are nearly
free; in a full batch every draft takes the time of a row's token, so that none is left but for rows whose
guesses are nearly always right. This is the rule of SmartSpec (Liu et al. 2024, arXiv 2406.14066) for each
row.

Where the text itself is what is guessed from, the first draft of a step costs more than any further one
(`draft_times.py`): all drafts of a row together must pay for that too. Guesses are right more often the more
of the row's last tokens stood before (`MATCHES`): where they do not pay behind few tokens, only those behind
more are taken. Where there was none, the next is looked for some steps later: a copy lasts.

Where a model guesses, its passes take time too: by a law of its own, fitted to what its passes took. It has
read nothing of a request before that has its first drafts, and lacks what was said since the last: that work
is spread over the drafts that are likely to be right until the answer ends, which is expected by how long
others were of late. How often it is right is much the same for all requests: a new one is taken for what
others were of late. Where no request has drafts, that is forgotten step by step, and they are tried again
where they may pay.

Answers end sooner than expected, too, so reading is paid on account: it costs what the law says, right drafts
bring what they saved, and while more was spent than gained nothing further is read, but for a hundredth of
the time. So the loss is bounded where reading does not pay, whatever the lengths of answers.

A look at a batch costs time too. Where no draft paid, the next look comes `REST_STEPS` later, or when an
eighth of the rows has gone.

A head guesses from the states that steps leave, and these cost time as well: where no draft paid in
`VAIN_LOOKS` looks they are read no more, until one pays. Its row has drafts one step later, when a state is
there; what was said meanwhile the head never sees.

The guesses, and the proposer, are not known here. Nothing here decides what is generated: a draft is kept
only if it is the token that is drawn (`engine/speculation.py`).
"""

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Protocol

from penstock.schedule.draft_times import DraftTimes
from penstock.schedule.request import Request
from penstock.schedule.shares import OutputEstimate
from penstock.schedule.step_time import StepLoad, StepTimeModel, chunk_pairs
from penstock.types import BLOCK_TOKENS

ROW_DRAFTS_MAX = 16
"""Drafts of one row in one step."""
STEP_DRAFTS_MAX = 32
"""Of all rows. Each is a row of logits, of which a step has `SCORED_TOKENS_MAX` beside those of its rows: so
prompts whose log-probabilities are wanted get as many at least."""
EXPECTED, EXPECTED_WEIGHT = 0.5, 2.0
"""The share of guesses that are right, and as so many drafts it counts, before a request has had any."""
_MEMORY = 0.9
"""The part of a request's record that remains per step with drafts: text changes."""
PROFITING_TOKENS = 128
"""Tokens of an answer over which the work is spread of reading what was said before, at most: a batch that
fills leaves a request without drafts long before a long answer ends."""
READING_SHARE = 0.01
"""The share of all time that is lent for reading."""
ACCOUNT_STEPS_MAX = 16
"""Gains count for no more than so many steps' time: another load may come."""
REST_STEPS = 8
"""After a look at a batch in which no draft paid, the next one comes so many steps later."""
VAIN_LOOKS = 2
"""Looks in a row that found no draft, after which states are read no more."""
_MATCH_WEIGHT, _FORGET_MATCHES = 4.0, 0.99
"""Of the record of a level with all requests: as many drafts it counts in a new one's, and the part that
remains per step of a row with drafts."""
_PRIOR_WEIGHT, _FORGET = 4.0, 0.998
"""Of a model's record with all requests: as many drafts it counts in a new one's, and the part that remains
of it per step. As much remains of every level's: one that was wrong is tried again."""
KNOWN_STEPS = 8
"""Before the laws have seen so many steps, up to `CAUTIOUS` rows have up to as many drafts: a model's first
passes take longer than any later. Of a larger batch the first rows do, once a pass has run: no law is learned
without passes."""
CAUTIOUS = 3
MATCHES, MATCHES_EXPECTED = (2, 4, 8), (0.5, 0.6, 0.8)
"""Of a row's last tokens, so many must have stood before: of these the fewest after which guesses pay; and
`EXPECTED` behind each."""
MISSED_STEPS = (2, 4, 8)
"""After a look that found nothing, the next comes so many steps later: by `MATCHES`, and all such steps that
are left may be lost of a copy."""
PROBE_STEPS = 64
"""A row without drafts for so many steps, times the rows of the batch, has one, to see how its text
continues: so trials are as rare in a full batch as alone."""


_Asked = Sequence[tuple[float, int, Request]]
"""(share of its guesses that are right, its place, a request), the surest first."""


class Laws(Protocol):
    """The measured times of steps: `PrefillBudget` learns it."""

    model: StepTimeModel
    drafting: StepTimeModel
    """Of the passes of a model that guesses."""
    draft_times: DraftTimes | None
    """Of steps with drafts; None: not known."""
    drafter_reads: bool
    """Whether it reads what was said before only when a request is to have drafts; a head on the target's
    states does not. Taken for granted until one has guessed."""


class Speculation:
    """One engine's."""

    __slots__ = (
        "_account_ns", "_draft_ns", "_drafting", "_ends_at", "_estimate", "_hits", "_laws", "_matches",
        "_model", "_rest_steps", "_saved_ns", "_since", "_tries", "_vain_looks", "_worth", "reads_states",
    )  # fmt: skip

    def __init__(self, laws: Laws, worth: float, estimate: OutputEstimate) -> None:
        """`worth`: a draft must give so many times the tokens that its time is worth; 0: all are taken.
        `estimate`: how long answers get.
        """
        self._laws, self._model, self._drafting, self._worth = laws, laws.model, laws.drafting, worth
        self._estimate = estimate
        self._hits = self._tries = 0.0  # As of one request, but of all.
        self._account_ns = 0.0  # Gained by drafts, less what was spent for them and for reading.
        self._draft_ns = self._saved_ns = 0.0  # Of a draft, and by a right one, in the last step with any.
        self._matches = [(0.0, 0.0)] * len(MATCHES)  # Of all requests: hits and tries behind each.
        self._since, self._rest_steps = 0, REST_STEPS  # Steps since the last look, and to the next.
        self._ends_at = math.inf  # No look is needed while more rows decode; infinite: one is.
        self._vain_looks = 0  # In a row, of those that found no draft.
        self.reads_states = True
        """See `StepPlan`, as of the next step."""

    def learn(self, request: Request, num_drafted: int, num_right: int) -> None:
        """Of so many drafts of the request, the first so many were right."""
        learn(request, num_drafted, num_right)
        hits, tries = self._matches[request.draft_level]
        self._matches[request.draft_level] = (
            _FORGET_MATCHES * hits + num_right,
            _FORGET_MATCHES * tries + min(num_right + 1, num_drafted),
        )
        self._ends_at = math.inf
        self._account_ns += num_right * self._saved_ns - num_drafted * self._draft_ns
        self._hits += num_right
        self._tries += min(num_right + 1, num_drafted)

    def missed(self, request: Request) -> None:
        """There was no guess for it, though some were wanted. Only lookups rest, and only where drafts must
        pay: a model has one in the next step.
        """
        if self._drafting.num_observed or not self._worth:
            return
        assert request.draft_level < len(MATCHES), request.draft_level
        request.draft_rest = MISSED_STEPS[request.draft_level]
        request.draft_idle += request.draft_rest

    def rests(self, num_rows: int) -> bool:
        """Whether nothing need be chosen for the next step, in which so many rows decode: O(1), since it is
        asked in every step.
        """
        self._since += 1
        return self._since < self._rest_steps and num_rows > self._ends_at

    def choose(self, rows: Sequence[Request], load: StepLoad, room: int) -> list[tuple[int, int]]:
        """(place in `rows`, how many drafts) of those that get any; `load` is the step's without them, and
        `room` how many tokens it may still take. O(rows log rows).
        """
        num_passes = self._drafting.num_observed
        is_known = self._model.num_observed >= KNOWN_STEPS and not 0 < num_passes < KNOWN_STEPS
        num_steps = max(self._since, 1)
        found = self._looked(rows, load, min(room, STEP_DRAFTS_MAX), num_steps, is_known=is_known)
        rests = is_known and self._worth and rows and not found
        if is_known and self._worth and not self._has_states(found, rows, load):
            found = []
        self._since, self._ends_at = 0, len(rows) * 7 / 8 if rests else math.inf
        self._rest_steps = min([request.draft_rest for request in rows if request.draft_rest] or [REST_STEPS])
        return found

    def _has_states(self, found: Sequence[object], rows: Sequence[Request], load: StepLoad) -> bool:
        """Whether there is anything to guess from; settles whether states are read from this step on."""
        had = self.reads_states
        if rows:
            self._vain_looks = 0 if found else self._vain_looks + 1
            self.reads_states = bool(found) or (had and self._vain_looks < VAIN_LOOKS)
        elif not had:  # Prompts alone, the states of which help their answers.
            count, (prior, weight) = max(load.num_sequences, 1), self._prior(0)
            self.reads_states = self._may_pay(rows, StepLoad(count, count, load.kv_read), prior, weight)
        return had or self._laws.drafter_reads

    def _looked(
        self, rows: Sequence[Request], load: StepLoad, room: int, num_steps: int, *, is_known: bool
    ) -> list[tuple[int, int]]:
        """`choose`, so many steps after the last look."""
        num_passes, prior, weight = self._drafting.num_observed, 0.0, 0.0
        if num_passes:
            prior, weight = self._prior(num_steps)
            if is_known and self._worth and not self._may_pay(rows, load, prior, weight):
                return []
        asked = [(index, request) for index, request in enumerate(rows) if _may(request)]
        if self._worth and not is_known:
            few = asked[:CAUTIOUS] if num_passes or len(rows) <= CAUTIOUS else []
            return _within(room, [(index, min(CAUTIOUS, _limit(request))) for index, request in few])
        if num_passes:
            rated = [(_hit_rate(request, prior, weight), index, request) for index, request in asked]
            rated.sort(key=itemgetter(0), reverse=True)
            return self._choose_passes(rated, load, room, num_steps) if rated else []
        left = _FORGET**num_steps
        self._matches = [(hits * left, tries * left) for hits, tries in self._matches]
        rated = [(self._match_rate(request, request.draft_level), index, request) for index, request in asked]
        rated.sort(key=itemgetter(0), reverse=True)
        return self._choose_lookups(rated, load, room, num_steps)

    def _choose_lookups(
        self, asked: _Asked, load: StepLoad, room: int, num_steps: int
    ) -> list[tuple[int, int]]:
        """`choose` where guesses cost nothing: row by row, each of which pays for its part of what the first
        draft of a step costs.
        """
        first, each = self._prices(load)
        part, tokens = max(first - each, 0.0) / max(load.num_sequences, 1), load.num_sequences + 0.0
        time = 1.0
        chosen: list[tuple[int, int]] = []
        for _, index, request in asked:
            if (limit := min(_limit(request), room)) <= 0:
                continue
            if request.draft_rest > num_steps:
                request.draft_rest -= num_steps
                continue
            request.draft_rest = 0
            value = self._worth * tokens / time
            level, count, gained = self._best(request, limit, value * part, value * each)
            if not count:
                request.draft_idle += num_steps
            if request.draft_idle >= PROBE_STEPS * load.num_sequences:
                level, count, gained = 0, 1, 0.0
            time, tokens = time + each * count, tokens + gained
            if count:
                if level != request.draft_level:
                    _begin_again(request, level)
                chosen.append((index, count))
                room -= count
        return chosen

    def _prices(self, load: StepLoad) -> tuple[float, float]:
        """The shares of a step's time that the first draft adds to it, and each further one."""
        cost, step_ns, times = self._model.cost, self._model.predict_ns(load), self._laws.draft_times
        if not step_ns:
            return 0.0, 0.0
        each = (cost.token_ns + cost.sequence_ns + cost.kv_read_ns) / step_ns
        return (each, each) if times is None else times.of(load.num_sequences, each)

    def _best(self, request: Request, limit: int, first: float, each: float) -> tuple[int, int, float]:
        """(the lowest level at which guesses pay, how many, the tokens that they are expected to give), if
        the first costs `first` tokens more than a further one, which costs `each`; (0, 0, 0) if none does.
        """
        for level in range(request.draft_level, len(MATCHES)):
            rate, count, gained = self._match_rate(request, level), 0, 0.0
            gain = rate
            while count < limit and gain >= each:
                count, gained, gain = count + 1, gained + gain, gain * rate
            if count and gained >= first + each * count:
                return level, count, gained
        return 0, 0, 0.0

    def _match_rate(self, request: Request, level: int) -> float:
        """The share of guesses at a level that are right: as of all requests, until the request has a record
        of its own.
        """
        hits, tries = self._matches[level]
        expected = MATCHES_EXPECTED[level]
        # After copies that never ended the next text is still anybody's guess.
        prior = min((hits + expected * EXPECTED_WEIGHT) / (tries + EXPECTED_WEIGHT), expected)
        return _hit_rate(request, prior, _MATCH_WEIGHT) if level == request.draft_level else prior

    def _may_pay(self, rows: Sequence[Request], load: StepLoad, prior: float, weight: float) -> bool:
        """Whether a first draft pays for the row that is right most often, if that has nothing to be read
        and all others share its pass. Asked in every step: a full batch pays for no more than this.
        """
        cost, guesser = self._model.cost, self._drafting.cost
        least_ns = guesser.fixed_ns / max(len(rows) or load.num_sequences, 1)
        least_ns += cost.token_ns + cost.sequence_ns + guesser.token_ns + guesser.sequence_ns
        best = max([_hit_rate(request, prior, weight) for request in rows], default=prior)
        return best * self._model.predict_ns(load) >= self._worth * least_ns * load.num_sequences

    def _choose_passes(
        self, asked: _Asked, load: StepLoad, room: int, num_steps: int
    ) -> list[tuple[int, int]]:
        """`choose` where a model guesses: pass by pass, whose fixed time is shared by rows with one more."""
        cost, guesser = self._model.cost, self._drafting.cost
        step_ns, tokens = self._model.predict_ns(load), load.num_sequences + 0.0
        row_ns = cost.token_ns + cost.sequence_ns
        token_ns = row_ns + guesser.token_ns + guesser.sequence_ns
        context_ns = cost.pair_ns + guesser.kv_read_ns  # Of each token before a draft.
        lent_ns = self._account_ns + READING_SHARE * step_ns * num_steps
        self._account_ns = account_ns = min(lent_ns, ACCOUNT_STEPS_MAX * step_ns)
        reading, begun_ns = self._reading_ns(asked), step_ns
        counts, gains = [0] * len(asked), [rate for rate, _, _ in asked]
        for num_before in range(ROW_DRAFTS_MAX):
            added_ns, gained, picked = guesser.fixed_ns, 0.0, list[int]()
            for place, (_, _, request) in enumerate(asked):
                if counts[place] < num_before or _limit(request) <= num_before or len(picked) == room:
                    continue
                whole_ns, each_read_ns = reading[place]
                if not num_before and whole_ns and account_ns < 0 < self._worth:
                    continue
                each_ns = token_ns + cost.kv_read_ns + context_ns * request.num_planned
                each_ns += each_read_ns * gains[place]
                if gains[place] * step_ns >= self._worth * each_ns * tokens:
                    picked.append(place)
                    added_ns, gained = added_ns + each_ns, gained + gains[place]
                    account_ns -= 0.0 if num_before else whole_ns
            value_ns = _value_ns(step_ns / tokens, row_ns, len(picked) / load.num_sequences)
            if not picked or gained * value_ns < self._worth * added_ns:
                break
            self._saved_ns = self._saved_ns if num_before else value_ns
            for place in picked:
                counts[place] += 1
                begun_ns += reading[place][1] * gains[place]  # Counted as a whole.
                gains[place] *= asked[place][0]
            step_ns, tokens, room = step_ns + added_ns, tokens + gained, room - len(picked)
        found = [(asked[place][1], count) for place, count in enumerate(counts) if count]
        if found:
            self._account_ns = account_ns
            self._draft_ns = (step_ns - begun_ns) / sum(counts)
        return found

    def _reading_ns(self, asked: _Asked) -> list[tuple[float, float]]:
        """A model's time for what it has not read of each request: the whole, and for each token that was a
        draft, which is the share of right guesses of the tokens that are left.
        """
        if not self._laws.drafter_reads:
            return [(0.0, 0.0)] * len(asked)
        guesser, found = self._drafting.cost, list[tuple[float, float]]()
        left = self._estimate.remaining_of([request for _, _, request in asked])
        for (rate, _, request), num_left in zip(asked, left, strict=True):
            count = max(request.num_planned - request.draft_known, 0)
            whole_ns = guesser.token_ns * count + guesser.pair_ns * chunk_pairs(0, count)
            each_ns = whole_ns / max(min(num_left, PROFITING_TOKENS) * rate, 1.0)
            found.append((whole_ns if count > BLOCK_TOKENS else 0.0, each_ns))
        return found

    def _prior(self, num_steps: int) -> tuple[float, float]:
        """The expected share of a new request's guesses that is right, and as how many drafts that counts; so
        many steps are forgotten.
        """
        left = _FORGET**num_steps
        self._hits, self._tries = self._hits * left, self._tries * left
        hits = self._hits + EXPECTED * EXPECTED_WEIGHT
        return hits / (self._tries + EXPECTED_WEIGHT), _PRIOR_WEIGHT


def _value_ns(mean_ns: float, row_ns: float, share: float) -> float:
    """The time that a right draft saves where the share `share` of the rows that run has any, of `mean_ns`,
    the step's for each of its tokens. It saves its row a token of a later step. The step as a whole is saved
    only if the others have no need of it either: of a batch in which few rows run ahead nothing ends sooner.
    """
    return min(row_ns, mean_ns) + max(mean_ns - row_ns, 0.0) * share


def learn(request: Request, num_drafted: int, num_right: int) -> None:
    """Of so many drafts of the request, the first so many were right."""
    assert 0 <= num_right <= num_drafted > 0, (num_right, num_drafted)
    request.draft_hits = _MEMORY * request.draft_hits + num_right
    request.draft_tries = _MEMORY * request.draft_tries + min(num_right + 1, num_drafted)
    request.draft_idle, request.draft_known = 0, request.num_planned


def _hit_rate(request: Request, prior: float, weight: float) -> float:
    """The share of the request's guesses that are right, where those before them are."""
    return (request.draft_hits + prior * weight) / (request.draft_tries + weight)


def _may(request: Request) -> bool:
    """Whether it has begun to answer; and if it follows a grammar, what is drawn in flight may force tokens
    where drafts would be.
    """
    if request.num_drawing and request.grammar is not None:
        return False
    return request.first_token_ns is not None or request.num_resumed > 0


def _begin_again(request: Request, level: int) -> None:
    """With a record of its own at another level."""
    request.draft_level, request.draft_hits, request.draft_tries = level, 0.0, 0.0


def _limit(request: Request) -> int:
    """Drafts that the rest of its answer has room for, behind the token that is drawn anyway."""
    known = len(request.tokens) + request.num_drawing
    return min(request.num_tokens_max - known - 1, ROW_DRAFTS_MAX)


def _within(room: int, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """As many of the drafts as there is room for, first come, first served."""
    found: list[tuple[int, int]] = []
    for index, count in wanted:
        if (count := min(count, room)) > 0:
            found.append((index, count))
            room -= count
    return found

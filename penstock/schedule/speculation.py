"""How many tokens of each row that decodes are guessed and computed in one step with the one that it owes.

    tokens of a step   1 of every row, and of a draft at place i of a row whose guesses are right with
                       probability p: p^i
    its time           by the law that is fitted to the steps that ran (step_time.py)

A draft is worth its time if it gives more tokens for it than the step does without: one after the other is
added while that holds. Alone a request pays its weights' bandwidth for one token, and further ones are nearly
free; in a full batch every draft takes the time of a row's token, so that none is left but for rows whose
guesses are nearly always right. This is the rule of SmartSpec (Liu et al. 2024, arXiv 2406.14066) for each
row.

What is guessed, and by whom, is not known here. Nothing here decides what is generated: a draft is kept only
if it is the token that is drawn (`engine/speculation.py`).
"""

from collections.abc import Sequence
from operator import itemgetter

from penstock.schedule.request import Request
from penstock.schedule.step_time import StepLoad, StepTimeModel

ROW_DRAFTS_MAX = 16
"""Drafts of one row in one step."""
STEP_DRAFTS_MAX = 32
"""Of all rows. Each is a row of logits, of which a step has `SCORED_TOKENS_MAX` beside those of its rows: so
prompts whose log-probabilities are wanted get as many at least."""
EXPECTED, EXPECTED_WEIGHT = 0.5, 2.0
"""The share of guesses that are right, and as so many drafts it counts, before a request has had any."""
_MEMORY = 0.9
"""What remains of a request's record per step with drafts: text changes."""
KNOWN_STEPS = 8
"""Before the law has seen so many steps, rows have up to `CAUTIOUS` drafts if they are no more than that."""
CAUTIOUS = 3
PROBE_STEPS = 64
"""A row without drafts for so many steps, times the rows of the batch, has one, to see how its text goes on:
so trials are as rare in a full batch as alone."""


class Speculation:
    """One engine's."""

    __slots__ = ("_model", "_worth")

    def __init__(self, model: StepTimeModel, worth: float) -> None:
        """`worth`: a draft must give so many times the tokens that its time is worth; 0: all are taken."""
        self._model, self._worth = model, worth

    def choose(self, rows: Sequence[Request], load: StepLoad, room: int) -> list[tuple[int, int]]:
        """(place in `rows`, how many drafts) of those that get any; `load` is the step's without them, and
        `room` how many tokens it may still take. O(rows log rows).
        """
        room = min(room, STEP_DRAFTS_MAX)
        asked = [(_hit_rate(request), index, request) for index, request in enumerate(rows) if _may(request)]
        if self._model.num_observed < KNOWN_STEPS and self._worth:
            few = asked if len(rows) <= CAUTIOUS else []
            return _within(room, [(index, min(CAUTIOUS, _most(request))) for _, index, request in few])
        asked.sort(key=itemgetter(0), reverse=True)
        cost = self._model.cost
        draft_ns = cost.token_ns + cost.sequence_ns + cost.kv_read_ns
        step_ns, tokens = self._model.predict_ns(load), float(len(rows))
        chosen: list[tuple[int, int]] = []
        for rate, index, request in asked:
            count, gain, most = 0, rate, min(_most(request), room)
            each_ns = draft_ns + cost.pair_ns * request.num_planned
            while count < most and gain * step_ns >= self._worth * each_ns * tokens:
                step_ns, tokens, count = step_ns + each_ns, tokens + gain, count + 1
                gain *= rate
            if not count and most:
                request.draft_idle += 1
                count = int(request.draft_idle >= PROBE_STEPS * len(rows))
            if count:
                chosen.append((index, count))
                room -= count
        return chosen


def learn(request: Request, num_drafted: int, num_right: int) -> None:
    """Of so many drafts of the request, the first so many were right."""
    assert 0 <= num_right <= num_drafted > 0, (num_right, num_drafted)
    request.draft_hits = _MEMORY * request.draft_hits + num_right
    request.draft_tries = _MEMORY * request.draft_tries + min(num_right + 1, num_drafted)
    request.draft_idle = 0


def _hit_rate(request: Request) -> float:
    """The share of the request's guesses that are right, where those before them are."""
    hits = request.draft_hits + EXPECTED * EXPECTED_WEIGHT
    return hits / (request.draft_tries + EXPECTED_WEIGHT)


def _may(request: Request) -> bool:
    """Whether it has begun to answer; and if it follows a grammar, what is drawn in flight may force tokens
    where drafts would be.
    """
    if request.num_drawing and request.grammar is not None:
        return False
    return request.first_token_ns is not None or request.num_resumed > 0


def _most(request: Request) -> int:
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

"""From scores to one worker, and why: ties, chance, exploration and holds.

Pure: the same facts and draws give the same choice.

1. the least total of the workers that could start the request now, never one that was filtered; one where it
   failed before only if there is no other
2. if a worker that has no room yet would give the first token sooner all the same: hold the request for it,
   no longer than that saves (delay scheduling: Zaharia et al., "Delay Scheduling: A Simple Technique for
   Achieving Locality and Fairness in Cluster Scheduling", EuroSys 2010)
3. of those that are within a few per cent of the best: the session's last worker, else the less loaded of two
   drawn by chance (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001)
4. one decision in a hundred takes any that is not much worse, so that what is known of all workers stays
   fresh

`DecisionLog` has the last decisions, by request: `GET /admin/explain/{request_id}` answers from it where no
files keep them (telemetry/decision_files.py). It is bounded, and knows no transport.

`LeastLoaded` does without scores.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from penstock.policy.placement.score import Score, ScoredRequest, ScorePolicy, WorkerFacts, score_policy
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import CapacityTable, Placement, WorkerCapacity
from penstock.policy.terms import PlacementTerms
from penstock.types import RequestId, Usage, WorkerId

Draw = Callable[[int], int]
"""`draw(n)` is a number from 0 to n - 1, by chance."""

DRAW_UNIT = 1 << 20
_EXPLORE_WITHIN = 0.5
"""Exploration takes workers up to so much worse than the best, as a share of it."""

REASONS = (
    "only",  # No other worker could start it.
    "best",
    "session",  # As good as the best, and its session was there.
    "tie",  # As good as the best, and less loaded than another one that is.
    "explore",
    "hold",  # It waits for a worker that has no room yet.
    "released",  # It has waited for one long enough.
    "avoid",  # It failed on every worker that could start it.
    "none",  # No worker can start it now.
)
"""Why a choice was made."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The decision."""

    index: int
    """Of the candidate that gets it, or that it is held for; -1: none."""
    reason: str
    """One of `REASONS`."""
    hold_s: float = 0.0
    """Above 0: how long it is held."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One choice with everything that it was made of: kept, explained and replayed.

    Scores are made again from the facts.
    """

    request_id: RequestId
    route: str
    at_ns: int
    config: PlacementTerms
    request: ScoredRequest
    candidates: tuple[WorkerFacts, ...]
    draws: tuple[int, ...]
    choice: Choice
    looked_up: bool = True
    """Whether anybody asked where the prompt is cached; a worker that is alone gets it wherever that is."""

    @property
    def picked(self) -> WorkerFacts | None:
        """The worker that gets it, or that it is held for."""
        return self.candidates[self.choice.index] if self.choice.index >= 0 else None


def score_all(
    policy: ScorePolicy, request: ScoredRequest, candidates: Sequence[WorkerFacts]
) -> list[Score | None]:
    """Every candidate's score; None for those that were filtered."""
    return [None if worker.filtered else policy.score(request, worker) for worker in candidates]


def choose_only(request: ScoredRequest, worker: WorkerFacts) -> Choice:
    """The answer of `choose` where there is one candidate, whatever it would score."""
    if worker.filtered or not worker.has_room:
        return _NONE if worker.filtered else _NOT_YET
    if worker.is_avoided:
        return _AVOID
    return _RELEASED if request.was_held else _ONLY


_NONE, _NOT_YET = Choice(-1, "none"), Choice(0, "none")
_AVOID, _RELEASED, _ONLY = Choice(0, "avoid"), Choice(0, "released"), Choice(0, "only")


def choose(
    policy: ScorePolicy,
    config: PlacementTerms,
    request: ScoredRequest,
    candidates: Sequence[WorkerFacts],
    scores: Sequence[Score | None],
    draw: Draw,
) -> Choice:
    """Which of the candidates gets the request."""
    wanted = index = -1
    least = best = inf
    open_now: list[int] = []
    for i, (worker, score) in enumerate(zip(candidates, scores, strict=True)):
        if score is None:
            continue
        total = score.total
        if total < least or (total == least and _is_next(worker, candidates[wanted])):
            wanted, least = i, total
        if worker.has_room and not worker.is_avoided:
            open_now.append(i)
            if total < best or (total == best and _is_next(worker, candidates[index])):
                index, best = i, total
    assert (index < 0) == (not open_now), "the best of those that have room"
    if index < 0:
        return _again(candidates, scores, wanted)
    if wanted != index and not request.was_held:
        hold_s = _worth_holding_s(config, candidates, scores, wanted, index)
        if hold_s > 0:
            return Choice(wanted, "hold", hold_s)
    if len(open_now) == 1:
        return Choice(index, "released" if request.was_held else "only")
    if config.explore and draw(DRAW_UNIT) < config.explore * DRAW_UNIT:
        within = best + policy.margin(best, _EXPLORE_WITHIN)
        pool = _up_to(within, open_now, scores)
        return Choice(pool[draw(len(pool))], "explore")
    within = best + policy.margin(best, config.tie)
    near = _up_to(within, open_now, scores)
    if len(near) == 1:
        return Choice(index, "released" if request.was_held else "best")
    for i in near:
        if candidates[i].is_session:
            return Choice(i, "session")
    return Choice(_less_loaded(candidates, near, draw), "tie")


def _is_next(worker: WorkerFacts, other: WorkerFacts) -> bool:
    """Of two that score the same: who waited longer for something to do."""
    return (worker.turn, worker.number) < (other.turn, other.number)


def _up_to(within: float, open_now: list[int], scores: Sequence[Score | None]) -> list[int]:
    """Those that cost no more."""
    return [i for i in open_now if (score := scores[i]) is not None and score.total <= within]


def _again(candidates: Sequence[WorkerFacts], scores: Sequence[Score | None], wanted: int) -> Choice:
    """Where it failed on all that have room: the best of those.

    Else no candidate gets it now; it would want `wanted`.
    """
    again = [
        (score.total, candidates[i].turn, candidates[i].number, i)
        for i, score in enumerate(scores)
        if score is not None and candidates[i].has_room
    ]
    return Choice(min(again)[3], "avoid") if again else Choice(wanted, "none")


def replay(policy: ScorePolicy, decision: Decision) -> Choice:
    """Decide again from what was written down.

    Equal to `decision.choice`, unless the code has changed since: then it may want more draws than there
    were.
    """
    draws = iter(decision.draws)
    scores = score_all(policy, decision.request, decision.candidates)
    return choose(
        policy, decision.config, decision.request, decision.candidates, scores, lambda _: next(draws, 0)
    )


def _worth_holding_s(
    config: PlacementTerms,
    candidates: Sequence[WorkerFacts],
    scores: Sequence[Score | None],
    wanted: int,
    index: int,
) -> float:
    """How long to wait for `wanted`, which is better but has no room, before `index` gets it; 0: not at
    all.
    """
    there, here = scores[wanted], scores[index]
    assert there is not None, "filtered workers are not ranked"
    assert here is not None, "filtered workers are not ranked"
    if candidates[wanted].has_room or candidates[wanted].is_avoided:
        return 0.0
    saves_s = here.ttft_s - (there.ttft_s - there.room_wait_s)
    return min(saves_s, config.hold_ms_max / 1000) if saves_s > there.room_wait_s else 0.0


def _less_loaded(candidates: Sequence[WorkerFacts], near: Sequence[int], draw: Draw) -> int:
    """Of two that are drawn by chance."""
    assert len(near) > 1, "there is nothing to draw"
    first = draw(len(near))
    second = draw(len(near) - 1)
    second += second >= first
    one, other = candidates[near[first]], candidates[near[second]]
    # running / slots, without dividing.
    load, other_load = one.running * other.slots, other.running * one.slots
    if (other_load, other.backlog_tokens, other.turn, other.number) < (
        load,
        one.backlog_tokens,
        one.turn,
        one.number,
    ):
        return near[second]
    return near[first]


PER_REQUEST_MAX = 8
"""Decisions that are kept of one request (attempts, holds): the last so many."""


@dataclass(slots=True, frozen=True)
class ComplexityChoice:
    """The model that was chosen for a request that named none, and why (extras/complexity.py)."""

    model: str
    complexity: float
    parts: tuple[tuple[str, float], ...]
    """The amount that each mark added (or took off), without zeros; largest first."""
    passed_over: tuple[str, ...] = ()
    """Models that would have come before, and may not answer: not allowed, without tools, not ready, or too
    small."""

    def explain(self) -> str:
        """For a log line or a header: `complexity=0.31 (code .20, tokens .05, simple -.05)`."""
        parts = ", ".join(f"{name} {_short(value)}" for name, value in self.parts)
        return f"complexity={self.complexity:.2f}" + (f" ({parts})" if parts else "")


def still_waits(before: Decision, after: Decision) -> bool:
    """Whether a request that no worker could start is where it was."""
    return before.choice.reason == after.choice.reason == "none"


def without_waits(decisions: Sequence[Decision]) -> Sequence[Decision]:
    """The decisions about one request, where a long wait is one entry: its last."""
    found = list[Decision]()
    for decision in decisions:
        if found and still_waits(found[-1], decision):
            found.pop()
        found.append(decision)
    return found


class DecisionLog:
    """One for all models of a gateway."""

    __slots__ = (
        "_chosen", "_decided", "_kept", "_kept_max", "_log_every", "_on_choice", "_on_decision", "_until_log",
        "_write",
    )  # fmt: skip

    def __init__(
        self,
        *,
        kept_max: int,
        log_every: int = 1,
        decided: Callable[[Decision], None] | None = None,
        write: Callable[[Decision], None] | None = None,
    ) -> None:
        """Keep the decisions of `kept_max` requests.

        `decided` hears of each one, `write` of one in `log_every`.
        """
        assert log_every > 0, log_every
        self._kept: OrderedDict[RequestId, list[Decision]] = OrderedDict()
        self._chosen: OrderedDict[RequestId, ComplexityChoice] = OrderedDict()
        self._kept_max, self._decided = kept_max, decided
        self._log_every = self._until_log = log_every
        self._write = write
        self._on_decision: Callable[[Decision], None] | None = None
        self._on_choice: Callable[[RequestId, ComplexityChoice], None] | None = None

    def hand_on(
        self,
        decided: Callable[[Decision], None],
        chose: Callable[[RequestId, ComplexityChoice], None],
    ) -> None:
        """From here on `decided` takes each decision, `chose` each choice of a model: none is kept here."""
        self._on_decision, self._on_choice, self._kept_max = decided, chose, 0

    def add(self, decision: Decision) -> None:
        """A decision was made."""
        if self._decided is not None:
            self._decided(decision)
        if self._on_decision is not None:
            self._on_decision(decision)
        if self._write is not None:
            self._until_log -= 1
            if not self._until_log:
                self._until_log = self._log_every
                self._write(decision)
        if not self._kept_max:
            return
        mine = self._kept.get(decision.request_id)
        if mine is None:
            if len(self._kept) >= self._kept_max:
                self._kept.popitem(last=False)
            self._kept[decision.request_id] = [decision]
        elif still_waits(mine[-1], decision):
            mine[-1] = decision  # A long wait is one entry, and does not push out the attempts before it.
        else:
            if len(mine) >= PER_REQUEST_MAX:
                del mine[0]
            mine.append(decision)

    def chose(self, request_id: RequestId, choice: ComplexityChoice) -> None:
        """The model was chosen for a request that named none."""
        if self._on_choice is not None:
            self._on_choice(request_id, choice)
        if self._kept_max:
            if len(self._chosen) >= self._kept_max:
                self._chosen.popitem(last=False)
            self._chosen[request_id] = choice

    def choice_of(self, request_id: RequestId) -> ComplexityChoice | None:
        """How its model was chosen; None if it named one, is not known, or was too long ago."""
        return self._chosen.get(request_id)

    def of(self, request_id: RequestId) -> Sequence[Decision]:
        """The decisions about a request, oldest first; nothing if it is not known, or was too long ago."""
        return tuple(self._kept.get(request_id, ()))

    def __len__(self) -> int:
        """Requests that something is kept of."""
        return len(self._kept)


def explain(decision: Decision) -> dict[str, Any]:
    """A decision as plain data: its candidates with the parts of their scores, best first, why one of them
    was picked, and what is decided now from the same facts and draws (`replay`).
    """
    policy, choice = score_policy(decision.config), decision.choice
    scores = score_all(policy, decision.request, decision.candidates)
    rows: list[tuple[float, int, dict[str, Any]]] = []
    for worker, score in zip(decision.candidates, scores, strict=True):
        row: dict[str, Any] = {"worker": worker.worker}
        if score is None:
            row["filtered"] = worker.filtered
        else:
            row |= {
                "score": round(policy.sign * score.total, 6),
                "parts": {name: round(term, 6) for name, term in zip(policy.terms, score.terms, strict=True)},
                "ttft_s": round(score.ttft_s, 6),
            }
        row["facts"] = {
            name: value
            for name, value in msgspec.to_builtins(worker).items()
            if name not in ("worker", "number", "filtered")
        }
        rows.append((score.total if score is not None else float("inf"), worker.number, row))
    again = replay(policy, decision)
    return {
        "request_id": decision.request_id,
        "model": decision.route,
        "at_ns": decision.at_ns,
        "policy": policy.name,
        "replay": {
            "is_equal": msgspec.msgpack.encode(again) == msgspec.msgpack.encode(choice),
            "worker": _name_of(decision, again),
            "reason": again.reason,
            "hold_s": again.hold_s,
        },
        "worker": _name_of(decision, choice),
        "reason": choice.reason,
        "hold_s": choice.hold_s,
        "request": msgspec.to_builtins(decision.request),
        "draws": list(decision.draws),
        "candidates": [row for _, _, row in sorted(rows, key=lambda entry: entry[:2])],
    }


def _name_of(decision: Decision, choice: Choice) -> str:
    """The worker that gets the request; empty: none does."""
    taken = choice.index >= 0 and choice.reason != "none"
    return decision.candidates[choice.index].worker if taken else ""


def explain_choice(choice: ComplexityChoice) -> dict[str, Any]:
    """How a model was chosen, as plain data: the complexity, what each mark added to it, and which models
    came before and could not answer.
    """
    return {
        "model": choice.model,
        "complexity": round(choice.complexity, 6),
        "parts": {name: round(value, 6) for name, value in choice.parts},
        "passed_over": list(choice.passed_over),
    }


def _short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1)


class LeastLoaded:
    """Sends every request to the worker with the most free streams, whatever its cache holds."""

    __slots__ = ()

    def asked(self, now_ns: int, work: Work, workers: CapacityTable) -> None:
        """Nothing is prepared."""

    def place(
        self,
        now_ns: int,
        work: Work,
        workers: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | None:
        """The least loaded that it fits on."""
        return workers.place(work, avoid, blocked)

    def started(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """Nothing is learned."""

    def began(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """Nothing is learned."""

    def ended(self, now_ns: int, work: Work, worker: WorkerCapacity, usage: Usage | None) -> None:
        """Nothing is learned."""


_LEAST_LOADED = LeastLoaded()


def least_loaded(_: str) -> Placement:
    """The same for every model: it remembers nothing."""
    return _LEAST_LOADED

"""The last decisions, by request: what `GET /admin/explain/{request_id}` answers from.

Bounded; knows no transport.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.policy.placement.pick import Choice, Decision, replay, score_all
from penstock.policy.placement.score import score_policy
from penstock.types import RequestId

PER_REQUEST_MAX = 8
"""Decisions that are kept of one request (attempts, holds): the last so many."""


@dataclass(slots=True, frozen=True)
class ComplexityChoice:
    """The model that was chosen for a request that named none, and why (extras/complexity.py)."""

    model: str
    complexity: float
    parts: tuple[tuple[str, float], ...]
    """What each mark added (or took off), those that did; largest first."""
    passed_over: tuple[str, ...] = ()
    """Models that would have come before, and may not answer: not allowed, without tools, not ready, or too
    small."""

    def explain(self) -> str:
        """For a log line or a header: `complexity=0.31 (code .20, tokens .05, simple -.05)`."""
        parts = ", ".join(f"{name} {_short(value)}" for name, value in self.parts)
        return f"complexity={self.complexity:.2f}" + (f" ({parts})" if parts else "")


class DecisionLog:
    """One for all models of a gateway."""

    __slots__ = (
        "_chosen", "_decided", "_kept", "_kept_max", "_log_every", "_until_log", "_write", "on_choice",
        "on_decision",
    )  # fmt: skip

    def __init__(
        self,
        *,
        kept_max: int,
        log_every: int = 0,
        decided: Callable[[Decision], None] | None = None,
        write: Callable[[Decision], None] | None = None,
    ) -> None:
        """Keep the decisions of `kept_max` requests.

        `decided` hears of each one, `write` of one in `log_every`.
        """
        self._kept: OrderedDict[RequestId, list[Decision]] = OrderedDict()
        self._chosen: OrderedDict[RequestId, ComplexityChoice] = OrderedDict()
        self._kept_max, self._decided = kept_max, decided
        self._log_every = self._until_log = log_every if write is not None else 0
        self._write = write
        self.on_decision: Callable[[Decision], None] | None = None
        """Hears of each decision, to keep it longer."""
        self.on_choice: Callable[[RequestId, ComplexityChoice], None] | None = None
        """The same for choices of a model."""

    def add(self, decision: Decision) -> None:
        """A decision was made."""
        if self._decided is not None:
            self._decided(decision)
        if self.on_decision is not None:
            self.on_decision(decision)
        if self._log_every:
            self._until_log -= 1
            if self._until_log <= 0 and self._write is not None:
                self._until_log = self._log_every
                self._write(decision)
        if not self._kept_max:
            return
        mine = self._kept.get(decision.request_id)
        if mine is None:
            if len(self._kept) >= self._kept_max:
                self._kept.popitem(last=False)
            self._kept[decision.request_id] = [decision]
        else:
            if len(mine) >= PER_REQUEST_MAX:
                del mine[0]
            mine.append(decision)

    def chose(self, request_id: RequestId, choice: ComplexityChoice) -> None:
        """The model was chosen for a request that named none."""
        if self.on_choice is not None:
            self.on_choice(request_id, choice)
        if self._kept_max:
            if len(self._chosen) >= self._kept_max:
                self._chosen.popitem(last=False)
            self._chosen[request_id] = choice

    def choice_of(self, request_id: RequestId) -> ComplexityChoice | None:
        """How its model was chosen; None if it named one, is not known, or was too long ago."""
        return self._chosen.get(request_id)

    def of(self, request_id: RequestId) -> Sequence[Decision]:
        """What was decided about a request, oldest first; nothing if it is not known, or was too long ago."""
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
                "score": round(-score.total if policy.name == "weighted" else score.total, 6),
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

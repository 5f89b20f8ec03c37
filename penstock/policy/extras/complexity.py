"""`model: "auto"`: which model a request needs, by how complex it looks.

    complexity = sum of weight * mark, less the weight of simple tasks, cut to 0..1
    model      = the smallest whose bound is not below it, and not below the tier's least

The marks (complexity_marks.py) are cheap to find and can be read: the decision carries every part, for the
log, for a response header and for tuning the weights. bench/policy/complexity.py measures it on labelled
requests. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.config.routing import AutoModel
from penstock.policy.extras.complexity_marks import (
    code_mark,
    instruction_of,
    question_mark,
    reasoning_mark,
    simple_mark,
    tools_mark,
    words_of,
)
from penstock.policy.placement.pick import ComplexityChoice

_CHARS_PER_TOKEN = 4
"""Good enough for one mark: the model, and so its tokenizer, is not chosen yet."""


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """The features of a request on which the choice depends."""

    texts: Sequence[str]
    """Of the user's messages, in order; a plain prompt is one."""
    num_chars: int
    """Of the whole conversation, system prompt and answers included."""
    num_tools: int = 0
    """Tools that it defines."""
    num_tool_results: int = 0
    tier: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class ComplexityWeights:
    """How much each mark of a request counts towards its complexity, which is their sum, cut at 1."""

    tokens: float = 0.15
    """Length of the conversation."""
    code: float = 0.3
    """Code in it, or asked for."""
    reasoning: float = 0.5
    """Proof, analysis, comparison, planning, calculation, constraints."""
    tools: float = 0.25
    """Tools defined, called and answered."""
    turns: float = 0.1
    """Turns of the conversation."""
    question: float = 0.5
    """The shape of the last message: its length, requirements, several questions, numbers and lists."""
    simple: float = 0.3
    """Taken off for greetings, thanks, look-ups, translations, summaries and extractions."""


@dataclass(slots=True, frozen=True, kw_only=True)
class AutoTerms:
    """The constants behind the section `routing.auto`."""

    weights: ComplexityWeights = ComplexityWeights()
    tokens_full: int = 2048
    """Prompt tokens that count as long: the whole of `weights.tokens`."""
    turns_full: int = 8
    """Turns that count as many."""
    text_chars_max: int = 8192
    """Characters of a request's text that are looked at: of the last user message first, then of those before
    it."""


class ComplexityRouter:
    """Chooses among the models of `routing.auto`."""

    __slots__ = ("_bounds", "_least", "_models", "_terms")

    def __init__(self, auto: Sequence[AutoModel], terms: AutoTerms = AutoTerms()) -> None:
        assert auto, "without models there is no auto"
        self._terms = terms
        self._models = [model.model for model in auto]
        self._bounds = [*(model.up_to for model in auto[:-1]), 1.0]
        self._least = {tier: i for i, model in enumerate(auto) for tier in model.tiers}

    def choose(self, features: Features, may: Callable[[str], bool]) -> ComplexityChoice | None:
        """The model for a request, among those that `may` answer it; None if none may.

        `may` knows what the caller is allowed, and whether the model has the tools and the context. If the
        one that fits best may not, the next larger one is taken, else the next smaller.
        """
        parts = self.parts(features)
        complexity = min(1.0, max(0.0, sum(value for _, value in parts)))
        best = next(i for i, bound in enumerate(self._bounds) if complexity <= bound)
        best = max(best, self._least.get(features.tier, 0))
        order = [*range(best, len(self._models)), *range(best - 1, -1, -1)]
        for place, i in enumerate(order):
            if may(self._models[i]):
                passed_over = tuple(self._models[other] for other in order[:place])
                return ComplexityChoice(self._models[i], complexity, parts, passed_over)
        return None

    def parts(self, features: Features) -> tuple[tuple[str, float], ...]:
        """The amount that each mark adds, largest first. O(`text_chars_max`)."""
        terms, weights = self._terms, self._terms.weights
        last = features.texts[-1][: terms.text_chars_max] if features.texts else ""
        before = _before(features.texts, terms.text_chars_max - len(last))
        instruction = instruction_of(last)
        words = words_of(instruction)
        everything = f"{before}\n{last}"
        num_tokens = features.num_chars / _CHARS_PER_TOKEN
        reasoning = reasoning_mark(instruction, words)
        found = {
            "tokens": weights.tokens * min(1.0, num_tokens / terms.tokens_full),
            "code": weights.code * code_mark(everything, words_of(everything.lower())),
            "reasoning": weights.reasoning * reasoning,
            "tools": weights.tools * tools_mark(features.num_tools, features.num_tool_results),
            "turns": weights.turns * min(1.0, max(0, len(features.texts) - 1) / terms.turns_full),
            "question": weights.question * question_mark(instruction, words),
            # A simple task that is argued about is not simple any more.
            "simple": -weights.simple * simple_mark(instruction, words) * (1 - reasoning),
        }
        shown = [(name, value) for name, value in found.items() if abs(value) >= 0.005]
        return tuple(sorted(shown, key=lambda part: (-abs(part[1]), part[0])))


def _before(texts: Sequence[str], room: int) -> str:
    """The end of the earlier messages, as much as there is room for."""
    kept: list[str] = []
    for text in reversed(texts[:-1]):
        if room <= 0:
            break
        kept.append(text[-room:])
        room -= len(kept[-1])
    return "\n".join(reversed(kept))

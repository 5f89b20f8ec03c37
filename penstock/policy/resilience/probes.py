"""Does a worker compute what it should? Each computes a fixed prompt greedily on a beat, and its answer is
held against the golden one of its identity (kv/hashing.py).

    three workers or more   most of them decide what is right
    fewer                   the first answer of that identity is right

Other requests in a batch change the order of a request's sums, and so the last digits of every logit.
Log-probabilities are therefore compared with a tolerance. A token other than the golden one is right where
both are about as likely, which equal log-probabilities show; what follows it is another text, and is not
compared. Weights that are damaged change the log-probabilities of every token: exact texts would hide little
damage and report healthy batches. Pure.
"""

import math
from collections.abc import Mapping

import msgspec

from penstock.types import WorkerId

PROMPT = "The months of the year are January, February, March, April, May,"
"""Known to every model, and long enough for whole KV blocks."""
TOKENS = 16
TOP = 5
"""Log-probabilities of each token."""
TOLERANCE = 0.3
"""Nats. Batches of other requests were measured to move a log-probability by less than a tenth of this; the
top exponent bit of a few weights moves it by whole nats."""
MAJORITY_MIN = 3
"""Workers of one identity of which most can be right."""

Top = Mapping[bytes, float]
"""The likeliest tokens at one place, and their log-probabilities."""


class ProbeToken(msgspec.Struct, frozen=True):
    """One token of an answer."""

    token: bytes
    top: Top


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to the prompt."""

    tokens: tuple[ProbeToken, ...]
    ttft_ns: int = 0
    tpot_ns: int = 0


def distance(golden: ProbeAnswer, answer: ProbeAnswer) -> float:
    """The largest difference of a log-probability, up to the first token that differs."""
    if not answer.tokens:
        return math.inf
    worst = 0.0
    for expected, given in zip(golden.tokens, answer.tokens, strict=False):
        worst = max(worst, _apart(expected.top, given.top), _apart(given.top, expected.top))
        if expected.token != given.token:
            break
    return worst


def _apart(one: Top, other: Top) -> float:
    """Of the tokens in `one`. A token that `other` does not name is at most as likely there as the last one
    that it names.
    """
    if not one or not other:
        return math.inf
    last = min(other.values())
    worst = 0.0
    for token, logprob in one.items():
        known = other.get(token)
        apart = abs(logprob - known) if known is not None else max(0.0, logprob - last)
        if not math.isfinite(apart):  # Damaged weights give what is no number.
            return math.inf
        worst = max(worst, apart)
    return worst


class Goldens:
    """The right answers, by identity."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[WorkerId, ProbeAnswer]] = {}
        self._golden: dict[str, ProbeAnswer] = {}

    def judge(
        self, identity: str, worker: WorkerId, answer: ProbeAnswer, num_workers: int
    ) -> tuple[bool | None, float]:
        """Whether the answer is right (None: too few have answered to know), and how far it is from the
        golden one. `num_workers` of this identity are ready.
        """
        assert identity, "an answer is judged by that of the same computation"
        assert num_workers > 0, "it has answered, so it was ready"
        answers = self._answers.setdefault(identity, {})
        answers[worker] = answer
        golden = self._golden.setdefault(identity, answer)
        apart = distance(golden, answer)
        if num_workers < MAJORITY_MIN:
            return apart <= TOLERANCE, apart
        if 2 * self._agreeing(answers, answer) > num_workers:
            self._golden[identity] = golden if apart <= TOLERANCE else answer
            return True, apart if apart <= TOLERANCE else 0.0
        return (False if 2 * self._agreeing(answers, golden) > num_workers else None), apart

    def forget(self, identity: str, worker: WorkerId) -> None:
        """It is gone, or a new process. The golden answer stays while a worker is left that gave it: else a
        damaged one would condemn every healthy process that follows.
        """
        answers = self._answers.get(identity)
        if answers is None or answers.pop(worker, None) is None:
            return
        golden = self._golden.get(identity)
        if golden is not None and not self._agreeing(answers, golden):
            del self._golden[identity]

    @staticmethod
    def _agreeing(answers: Mapping[WorkerId, ProbeAnswer], with_it: ProbeAnswer) -> int:
        return sum(distance(with_it, each) <= TOLERANCE for each in answers.values())

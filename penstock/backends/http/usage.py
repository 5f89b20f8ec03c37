"""How many tokens an answer had: what a worker that is not ours reports, and what was counted here; and which
of the tokens that came belong to it at all. Pure.

The count that is believed, in this order: token ids that the worker sends; its log-probabilities, one for
each token; its `usage`, for workers that send text alone (what came is counted with our tokenizer until
then).

Everything here is for backends/http/stream.py, which says which count is believed, and ends the answer where
`within` finds its end.
"""

import msgspec

from penstock.backends.http.dialects.base import ReportedUsage
from penstock.backends.http.terms import Anomaly
from penstock.types import FinishReason, SamplingParams, Usage

NOT_REPORTED = ReportedUsage()
SLACK_TOKENS = 64
_PROMPT_FACTOR = 8


class Counted(msgspec.Struct, frozen=True, gc=False):
    """The counts of this side."""

    prompt: int
    given: int
    """Answer tokens that another worker gave: to this one those are prompt."""
    answer: int
    """With those; of text alone about as many as it is."""
    exact: int | None
    """The same, of tokens that came one by one."""
    has_ids: bool
    trusts_prompt: bool
    """Only the worker knows how many tokens the prompt has."""
    max_tokens: int


def within(
    ids: tuple[int, ...], count: int, stop_ids: frozenset[int], sampling: SamplingParams
) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """The tokens that belong to an answer that has `count` already, its end if these tokens are it, and the
    stop token that ends it.
    """
    if not stop_ids.isdisjoint(ids):
        for i, token_id in enumerate(ids):
            if token_id in stop_ids and count + i >= sampling.min_tokens:
                return ids[:i], FinishReason.STOP, token_id
    left = sampling.max_tokens - count
    return (ids[:left], FinishReason.LENGTH, None) if len(ids) > left else (ids, None, None)


def oddity(reported: ReportedUsage | None, ours: Counted, finish: FinishReason) -> tuple[Anomaly, str] | None:
    """Where a worker's counts are not ours; None: nowhere. A token that only ended the answer may be in its
    count.
    """
    if reported is None or reported.completion_tokens is None:
        return Anomaly.NO_USAGE, "an answer came without its usage"
    prompt = ours.prompt + ours.given
    exact = None if ours.exact is None else ours.exact - ours.given
    wrong = reported.prompt_tokens is not None and ours.has_ids and reported.prompt_tokens != prompt
    if exact is not None:
        wrong = wrong or not exact <= reported.completion_tokens <= exact + (
            finish is not FinishReason.LENGTH
        )
    if not wrong:
        return None
    theirs = f"{reported.prompt_tokens} + {reported.completion_tokens}"
    counted = f"{prompt} + {ours.answer if exact is None else exact}"
    return Anomaly.USAGE_MISMATCH, f"its usage is {theirs} tokens, counted here were {counted}"


def believed(reported: ReportedUsage, ours: Counted, *, prefill_ns: int, decode_ns: int) -> Usage:
    """The usage that counts."""
    prompt, completion = ours.prompt, ours.exact
    if ours.trusts_prompt and reported.prompt_tokens is not None:
        # Ours is an estimate; but no tokenizer is that much finer.
        prompt = min(max(0, reported.prompt_tokens), _PROMPT_FACTOR * (prompt + SLACK_TOKENS))
    if completion is None:
        completion = ours.answer
        if not ours.has_ids and reported.completion_tokens is not None:
            # It alone knows; but it may not invent more than it could have sent.
            completion = min(max(0, reported.completion_tokens), ours.max_tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=min(max(0, reported.cached_tokens or 0), prompt),
        prefill_ns=prefill_ns,
        decode_ns=decode_ns,
    )

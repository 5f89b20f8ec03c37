"""Log-probabilities: of tokens that were drawn, and of a prompt's own tokens.

They are the model's own: of the logits before temperature, penalties and filters. Rows are looked at one by
one, so what else is in the batch, or how a prompt was cut into chunks, changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.arrays import float_list, int_list
from penstock.schedule.plan import Scored
from penstock.types import TokenLogprob

NOT_NUMBERS = "the model's logits for this request are not finite numbers"

_AT_ONCE = 8
"""Rows that are turned into log-probabilities together: they take the memory of their logits once more."""


@dataclass(slots=True, frozen=True)
class ScoredChunk:
    """A chunk of a prompt whose successors are scored: each token's logits say how likely the next one
    was.
    """

    row: int
    targets: Tensor
    """`[num_scored]` int64: the prompt tokens that follow the chunk's."""
    count: int
    """How many alternatives to tell beside each."""


def logprobs_of(logits: Tensor, targets: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """Log-probability of one token `targets[i]` under each row of `logits` `[n, vocab_size]`, with `count`
    alternatives.

    Alternatives are the likeliest tokens, ties by lowest id.
    """
    logprobs = torch.log_softmax(logits, -1)
    at_target = logprobs.gather(1, targets[:, None])
    chosen, ranks = float_list(at_target[:, 0]), int_list((logprobs > at_target).sum(-1) + 1)
    tops = _top(logprobs, min(count, logprobs.shape[1])) if count > 0 else [()] * len(chosen)
    return tuple(
        TokenLogprob(token_id, logprob, top, rank)
        for token_id, logprob, top, rank in zip(int_list(targets), chosen, tops, ranks, strict=True)
    )


def score_chunks(logits: Tensor, chunks: list[ScoredChunk]) -> tuple[Scored, ...]:
    """Score every chunk; `logits` `[sum of num_scored, vocab_size]` has their rows one after another."""
    scored: list[Scored] = []
    first = 0
    for chunk in chunks:
        rows = logits[first : first + len(chunk.targets)]
        first += len(chunk.targets)
        if rows.amax().isfinite():  # A NaN anywhere is the maximum.
            cuts = range(0, len(rows), _AT_ONCE)
            found = (
                each
                for cut in cuts
                for each in logprobs_of(
                    rows[cut : cut + _AT_ONCE], chunk.targets[cut : cut + _AT_ONCE], chunk.count
                )
            )
            scored.append(Scored(chunk.row, tuple(found)))
        else:
            scored.append(Scored(chunk.row, (), error=NOT_NUMBERS))
    assert first == len(logits), (first, logits.shape)
    return tuple(scored)


def _top(logprobs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    values, ids = logprobs.topk(count, dim=-1)
    return [
        tuple(sorted(zip(int_list(some_ids), float_list(some), strict=True), key=_likeliest_first))
        for some, some_ids in zip(values, ids, strict=True)
    ]


def _likeliest_first(item: tuple[int, float]) -> tuple[float, int]:
    return -item[1], item[0]

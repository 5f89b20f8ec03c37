"""The worked example of docs/sampling.md, number by number: the code applies everything in the page's
order.
"""

import numpy as np
import pytest
import torch

from penstock.engine.adjustments import Adjustments
from penstock.engine.sampler import Sampler, SampleRows, exponential, results, row_keys
from penstock.schedule.plan import NewRow
from penstock.types import RequestId, SamplingParams

LOGITS = (2.0, 2.5, 3.0, 1.0, 0.5, -1.0)
PROMPT, ANSWER = (5, 2), (1, 2, 2)
POSITION = np.array([len(PROMPT + ANSWER)])
PARAMS = SamplingParams(
    repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, 1.0),),
    min_tokens=4, stop_token_ids=(0,), temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=7,
)  # fmt: skip
CHANCES = {3: 0.656, 2: 0.198, 1: 0.146}


def adjust(logits: torch.Tensor):
    adjustments = Adjustments(1)
    adjustments.enter(NewRow(RequestId("r"), 0, PROMPT + ANSWER, len(PROMPT), PARAMS))
    return adjustments.apply(logits, np.array([0]), POSITION, np.array([PROMPT + ANSWER], np.int32))


def rows(seeds: np.ndarray) -> SampleRows:
    n = len(seeds)
    return SampleRows(
        np.full(n, PARAMS.temperature, np.float32),
        np.full(n, PARAMS.top_k),
        np.full(n, PARAMS.top_p),
        np.full(n, PARAMS.min_p, np.float32),
        seeds,
        np.repeat(POSITION, n),
    )


def test_the_adjusted_logits() -> None:
    logits = torch.tensor([LOGITS])
    edits = adjust(logits)
    assert logits[0].tolist() == pytest.approx([-np.inf, 1.25, 1.4, 2, 0.5, -1.25])
    edits.undo()
    assert logits[0].tolist() == list(LOGITS)


def test_the_exponentials_and_the_draw() -> None:
    seeds = np.array([PARAMS.seed], np.uint64)
    variates = exponential(torch.tensor([[1, 2, 3]], dtype=torch.int32), row_keys(seeds, POSITION))
    assert variates[0].tolist() == pytest.approx([3.928, 0.121, 1.748], abs=1e-3)
    logits = torch.tensor([LOGITS])
    edits = adjust(logits)
    drawn = Sampler(6).draw(logits, rows(seeds))
    edits.undo()
    assert drawn.tolist() == [2]
    (sampled,) = results(logits, drawn, np.array([0]), [0])
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(float(torch.tensor(LOGITS).log_softmax(-1)[2]))


def test_the_chances() -> None:
    draws = 40_000
    logits = torch.tensor([LOGITS])
    adjust(logits)
    drawn = Sampler(6).draw(logits.expand(draws, -1), rows(np.arange(draws, dtype=np.uint64)))
    counts = np.bincount(drawn.numpy(), minlength=6)
    assert counts[[0, 4, 5]].tolist() == [0, 0, 0]
    for token, chance in CHANCES.items():
        assert counts[token] / draws == pytest.approx(chance, abs=0.0125)  # 5 sigma.

"""What penalties, bias and minimum lengths do to logits: against plain references, and put back
afterwards.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from engine_driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.engine.adjustments import Adjustments
from penstock.schedule.plan import NewRow
from penstock.types import FinishReason, RequestId, SamplingParams

VOCAB = 24


class Batch:
    """Rows as the runner's tables hold them, in reverse order, so that a row is not its own index."""

    def __init__(self, requests: list[tuple[list[int], list[int], SamplingParams]]) -> None:
        count = len(requests)
        self.adjustments = Adjustments(count + 1)
        self.tokens = np.full(
            (count + 1, 64), VOCAB - 1, np.int32
        )  # What lies beyond a row's end is left over.
        self.rows = np.arange(count, 0, -1)
        self.positions = np.array([len(prompt) + len(answer) for prompt, answer, _ in requests])
        for row, (prompt, answer, params) in zip(self.rows.tolist(), requests, strict=True):
            known = prompt + answer
            self.tokens[row, : len(known)] = known
            self.adjustments.enter(NewRow(RequestId(f"r{row}"), row, tuple(known), len(prompt), params))

    def adjusted(self, logits: Tensor) -> Tensor:
        """What the draw sees; checks that the logits themselves come back to the bit."""
        given = logits.clone()
        edits = self.adjustments.apply(given, self.rows, self.positions, self.tokens)
        seen = given.clone()
        edits.undo()
        assert torch.equal(given.view(torch.int32), logits.view(torch.int32))
        return seen


def reference(logits: Tensor, prompt: list[int], answer: list[int], params: SamplingParams) -> np.ndarray:
    """One row, one token at a time, in float64."""
    out = logits.double().numpy().copy()
    for token in set(prompt + answer):
        penalty = float(np.float32(params.repetition_penalty))
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, count in Counter(answer).items():
        out[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias:
        out[token] += bias
    for *before, last in params.bad_words:
        if answer[len(answer) - len(before) :] == before and len(before) <= len(answer):
            out[last] = -np.inf
    if params.allowed_token_ids:
        out[[token for token in range(VOCAB) if token not in params.allowed_token_ids]] = -np.inf
    nothing_else = params.allowed_token_ids and {*params.allowed_token_ids} <= {*params.stop_token_ids}
    if len(answer) < params.min_tokens and not nothing_else:
        out[[token for token in params.stop_token_ids if token < VOCAB]] = -np.inf
    return out


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


tokens = st.lists(st.integers(0, VOCAB - 1) | st.integers(0, 3), max_size=12)
penalty = st.sampled_from([0.0, 0.0, 0.5, -0.7, 2.0, -2.0])
anything = st.builds(
    SamplingParams,
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    allowed_token_ids=st.just(()) | st.lists(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(st.integers(0, VOCAB + 5), max_size=4, unique=True).map(tuple),
)
requests = st.lists(st.tuples(tokens.filter(bool), tokens, anything), min_size=1, max_size=6)


@given(requests, st.integers(0, 100))
@settings(max_examples=150, deadline=None)
def test_any_batch_is_as_the_reference_says(
    asked: list[tuple[list[int], list[int], SamplingParams]], seed: int
) -> None:
    logits = random_logits(len(asked), seed)
    seen = Batch(asked).adjusted(logits)
    for i, one in enumerate(asked):
        np.testing.assert_allclose(seen[i].numpy(), reference(logits[i], *one), rtol=1e-5, atol=1e-5)
        alone = Batch([one]).adjusted(logits[i : i + 1])
        assert torch.equal(seen[i], alone[0]), "the other rows change nothing, not even the last bit"


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_repetition_is_as_in_transformers(penalty: float) -> None:
    prompt, answer = [3, 3, 7, 0], [9, 3, 9]
    logits = random_logits(1)
    seen = Batch([(prompt, answer, SamplingParams(repetition_penalty=penalty))]).adjusted(logits)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.clone())
    assert torch.equal(seen, theirs)


def test_neutral_parameters_touch_nothing() -> None:
    batch = Batch([([1], [2, 2], SamplingParams(stop_token_ids=(1, 2))), ([4], [], SamplingParams())])
    assert torch.equal(batch.adjusted(random_logits(2)), random_logits(2))


def test_a_row_forgets_the_parameters_of_the_request_before() -> None:
    everything = SamplingParams(
        presence_penalty=1, repetition_penalty=2, logit_bias=((1, 5.0),), min_tokens=9, stop_token_ids=(4,)
    )
    batch = Batch([([1, 2], [3], everything)])
    assert not torch.equal(batch.adjusted(random_logits(1)), random_logits(1))
    batch.adjustments.enter(NewRow(RequestId("next"), 1, (1, 2, 3), 2, SamplingParams()))
    assert torch.equal(batch.adjusted(random_logits(1)), random_logits(1))


def test_numbers_that_are_not_numbers_stay_in_their_row() -> None:
    logits = random_logits(2)
    logits[0, 5] = torch.nan
    penalised = SamplingParams(repetition_penalty=1.5, presence_penalty=1)
    seen = Batch([([5], [6], penalised), ([5], [6], penalised)]).adjusted(logits)
    assert torch.equal(seen[1:], Batch([([5], [6], penalised)]).adjusted(logits[1:]))


PROMPT = [5, 80, 33, 5, 5, 19, 102, 7]


def test_bad_words_are_not_written_and_only_allowed_tokens_are(qwen3) -> None:
    driver = Driver(qwen3, prefix_cache=False)
    how = {"temperature": 0.0, "logprobs": 0, "max_tokens": 6}
    (free,) = driver.ask([PROMPT], [SamplingParams(**how)])
    first, second, third = free.token_ids[:3]
    (one,) = driver.ask([PROMPT], [SamplingParams(**how, bad_words=((first,),))])
    (run,) = driver.ask([PROMPT], [SamplingParams(**how, bad_words=((first, second, third), (7, 7, 7, 7)))])
    (prompt,) = driver.ask([PROMPT], [SamplingParams(**how, bad_words=((PROMPT[-1], first),))])
    (few,) = driver.ask([PROMPT], [SamplingParams(**how, allowed_token_ids=(3, 4))])
    assert first not in one.token_ids
    assert run.token_ids[:2] == [first, second]
    assert run.token_ids[2] != third
    assert prompt.token_ids == free.token_ids, "words are looked for in the answer alone"
    assert {*few.token_ids} <= {3, 4}
    assert all(-1e4 < each.logprob <= 0 for each in few.logprobs), "of the model's own distribution"


def test_an_answer_ends_where_only_stop_tokens_are_allowed(qwen3) -> None:
    how = SamplingParams(min_tokens=5, allowed_token_ids=(9,), stop_token_ids=(9,))
    (answer,) = Driver(qwen3, prefix_cache=False).ask([PROMPT], [how])
    assert answer.finish is FinishReason.STOP


def test_a_bias_of_100_forces_a_token_and_logprobs_do_not_know(qwen3) -> None:
    driver = Driver(qwen3, prefix_cache=False)
    free, forced, banned = (
        driver.ask([PROMPT], [SamplingParams(temperature=0.0, logprobs=0, max_tokens=4, logit_bias=bias)])[0]
        for bias in ((), ((42, 100.0),), ((42, -100.0),))
    )
    assert forced.token_ids == [42] * 4
    assert 42 not in banned.token_ids
    best = driver.ask([PROMPT], [SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE, max_tokens=1)])[0]
    raw = dict(best.logprobs[0].top)
    assert forced.logprobs[0].logprob == raw[42], "the model's own, not those of the biased logits"
    assert free.logprobs[0].logprob == max(raw.values())


def test_frequency_penalty_ends_a_loop(qwen3) -> None:
    how = {"temperature": 0.0, "max_tokens": 12, "logit_bias": ((42, 20.0),)}
    driver = Driver(qwen3)
    free, penalised = driver.ask(
        [PROMPT] * 2, [SamplingParams(**how), SamplingParams(frequency_penalty=2.0, **how)]
    )
    assert free.token_ids == [42] * 12
    assert 0 < penalised.token_ids.count(42) < 12


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_stop_tokens_wait_for_min_tokens(qwen3, min_tokens: int) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=9,
        min_tokens=min_tokens,
        stop_token_ids=(42,),
        logit_bias=((42, 100.0),),
    )
    (answer,) = Driver(qwen3).ask([PROMPT], [params])
    assert len(answer.token_ids) == min_tokens
    assert answer.finish is FinishReason.STOP


def test_a_bias_outside_the_vocabulary_is_refused_alone(qwen3) -> None:
    bad, good = Driver(qwen3).ask(
        [PROMPT] * 2,
        [SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)), SamplingParams(temperature=0.0, max_tokens=3)],
    )
    assert bad.finish is FinishReason.ERROR
    assert bad.error is not None
    assert "logit_bias" in bad.error
    assert len(good.token_ids) == 3

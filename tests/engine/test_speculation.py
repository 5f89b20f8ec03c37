"""Speculation: guesses are found where the text was said before, and what is kept is what would have been
drawn.
"""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import Driver
from knowing_proposer import KnowingProposer

from penstock.engine.inputs import RowTables
from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.sampler import NOT_NUMBERS, Sampler, SampleRows
from penstock.engine.speculation import MATCH_MAX, PromptLookup, verified
from penstock.rng import stream
from penstock.schedule.plan import NewRow, RowWork, Sampled, StepPlan
from penstock.types import RequestId, SamplingParams

VOCAB = 6


def native() -> NativeLibrary | None:
    try:
        return NativeLibrary()
    except KernelsUnavailable:
        return None


def guessed(tokens: list[int], limit: int, kernels: NativeLibrary | None, match_min: int = 2) -> list[int]:
    tables = RowTables(max_running=2, max_model_len=len(tokens) + limit)
    tables.token_ids[1, : len(tokens)] = tokens
    tables.match_min[1] = match_min
    tables.token_ids[1, len(tokens) :] = -1
    known, wanted = np.array([len(tokens)]), np.array([limit])
    (found,) = PromptLookup(kernels).propose(np.array([1]), known, wanted, tables)
    assert not (tables.token_ids[0] > 0).any(), "another row's tokens"
    assert (tables.token_ids[1, len(tokens) + found :] == -1).all(), "more was written than was found"
    return tables.token_ids[1, len(tokens) : len(tokens) + found].tolist()


@pytest.mark.parametrize("kernels", [None, native()])
@pytest.mark.parametrize(
    ("tokens", "limit", "guesses"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),  # What followed the last two tokens before.
        ([1, 2, 3, 7, 1, 2, 5, 7, 1, 2], 1, [5]),  # After a run that is longer, though one of two is nearer.
        ([8, 1, 2, 3, 5, 1, 2, 4, 8, 1, 2], 1, [3]),
        ([1, 2, 6, 1, 2, 7, 1, 2], 1, [7]),  # Of equal runs the last.
        ([4, 5, 4, 5], 5, [4, 5, 4, 5, 4]),  # A period goes on.
        ([3, 3, 3], 3, [3, 3, 3]),
        ([1, 2, 3], 3, []),  # Nothing was said twice,
        ([1, 2, 3, 2], 3, []),  # or too little.
        ([5], 3, []),
    ],
)
def test_a_row_is_guessed_to_go_on_as_it_did_before(
    kernels: NativeLibrary | None, tokens: list[int], limit: int, guesses: list[int]
) -> None:
    assert guessed(tokens, limit, kernels) == guesses


def test_the_native_lookup_finds_what_its_twin_finds() -> None:
    kernels = native()
    if kernels is None:
        pytest.skip("no native kernels")
    random = stream(1, "lookup")
    for length, words in product((2, 17, 60, 300), (2, 3, 20)):
        for _ in range(10):
            tokens = [random.randrange(words) for _ in range(length)]
            if random.randrange(2):
                tokens += tokens[: random.randrange(2 * MATCH_MAX)]
            assert guessed(tokens, 8, kernels) == guessed(tokens, 8, None), tokens
            assert guessed(tokens, 8, kernels, 4) == guessed(tokens, 8, None, 4), tokens


@pytest.mark.parametrize("kernels", [None, native()])
def test_no_guess_follows_a_shorter_match_than_is_asked_for(kernels: NativeLibrary | None) -> None:
    tokens = [1, 2, 3, 4, 5, 9, 2, 3, 4, 5]
    assert [guessed(tokens, 2, kernels, least) for least in (2, 4, 5, 8)] == [[9, 2], [9, 2], [], []]


class Verified:
    """Rows whose tokens are known to a table, drawn from the same logits at every position."""

    def __init__(self, logits: list[float], drafts: list[list[int]], how: SamplingParams) -> None:
        self.tables = RowTables(max_running=len(drafts), max_model_len=8)
        work: list[RowWork] = []
        new: list[NewRow] = []
        for row, guesses in enumerate(drafts):
            params = SamplingParams(
                temperature=how.temperature, seed=row, top_k=how.top_k, logprobs=how.logprobs
            )
            new.append(NewRow(RequestId(f"r{row}"), row, [1], 1, params))
            work.append(RowWork(row, 0, 1, True, (row,), drafts=len(guesses)))
        self.drafts = drafts
        inputs = self.tables.apply(StepPlan(1, tuple(new), tuple(work)), self)
        assert inputs.drafted is not None
        self.sampler = Sampler(len(logits))
        stacked = torch.tensor(logits).repeat(len(inputs.sample_rows), 1)
        self.reported = verified(stacked, inputs, inputs.drafted, self.tables, self.draw, lambda _row: False)

    def begin(self, plan, fresh_blocks):
        pass

    def propose(self, rows, known, limit, tables):
        for row in rows.tolist():
            tables.token_ids[row, 1 : 1 + len(self.drafts[row])] = self.drafts[row]
        return limit

    def draw(self, logits, rows, positions):
        drawn = self.sampler.draw(logits, SampleRows.of(self.tables, rows, positions))
        self.tables.append_tokens(rows, positions, drawn.numpy())
        return drawn, {}


def tokens_of(one: Sampled) -> list[int]:
    return [one.token_id, *(each.token_id for each in one.follows)]


def test_drafts_count_up_to_the_first_that_is_wrong() -> None:
    """Logits that leave one choice: token 3."""
    logits = [0.0, 0.0, 0.0, 9.0]
    found = Verified(logits, [[3, 3, 3], [3, 1, 3], [1], [], [3]], SamplingParams(temperature=0.0)).reported
    assert [tokens_of(one) for one in found] == [[3] * 4, [3] * 2, [3], [3], [3] * 2]
    assert [one.drafted for one in found] == [3, 3, 1, 0, 1]
    assert [one.row for one in found] == [0, 1, 2, 3, 4]
    assert all(each.row == one.row for one in found for each in one.follows)


def test_logits_that_are_not_numbers_fail_the_row_where_they_are() -> None:
    found = Verified([0.0, math.nan], [[0], []], SamplingParams(temperature=0.0)).reported
    assert [one.error for one in found] == [NOT_NUMBERS] * 2
    assert found[0].follows == ()


class Coupled(Verified):
    """Guesses are drawn from logits of their own, with the randomness of the tokens that they guess: so do
    models and heads.
    """

    OTHER = (0.9, -1.5, 0.6, 0.4, -0.5, 0.2)

    def propose(self, rows, known, limit, tables):
        logits = torch.tensor(self.OTHER).repeat(len(rows), 1)
        drawn = Sampler(len(self.OTHER)).draw(logits, SampleRows.of(tables, rows, known))
        tables.append_tokens(rows, known, drawn.numpy())
        return limit


@pytest.mark.parametrize(("top_k", "guess"), [(0, "any"), (3, "likeliest"), (0, "coupled"), (3, "coupled")])
def test_the_distribution_is_the_targets(top_k: int, guess: str) -> None:
    """A hundred thousand rows with a draft each: first tokens, and those behind accepted drafts, are
    distributed as the softmax says, whatever was guessed (chi-square, one in 10,000 by chance): by chance,
    the likeliest, or with the same randomness.
    """
    logits, count = [0.3, -0.5, 1.2, 0.0, -1.5, 0.7], 100_000
    random = stream(4, "guesses")
    drafts = [[random.randrange(VOCAB) if guess == "any" else 2] for _ in range(count)]
    made = Coupled if guess == "coupled" else Verified
    found = made(logits, drafts, SamplingParams(temperature=0.8, top_k=top_k)).reported
    weights = np.exp(np.array(logits) / 0.8)
    if top_k:
        weights[np.argsort(weights)[:-top_k]] = 0
    expected = weights / weights.sum()
    firsts = np.bincount([one.token_id for one in found], minlength=VOCAB)
    seconds = np.bincount([one.follows[0].token_id for one in found if one.follows], minlength=VOCAB)
    accepted = int(seconds.sum())
    right = 1 / VOCAB if guess == "any" else expected[2]
    if guess == "coupled":
        assert accepted / count > 0.4, "two models that are alike draw alike"
    else:
        assert abs(accepted / count - right) < 0.01, "a guess is right as often as the token comes"
    for counts in (firsts, seconds):
        possible = expected > 0
        assert counts[~possible].sum() == 0
        wanted = expected[possible] * counts.sum()
        distance = float(((counts[possible] - wanted) ** 2 / wanted).sum())
        assert distance < {6: 25.7, 3: 18.4}[int(possible.sum())]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_answers_are_those_without_drafts(qwen3: Path, logprobs: int | None) -> None:
    """Penalties, word lists, bias, minimum length and stop tokens; with and without log-probabilities."""
    prompts = [[5, 9, 14, 30 + i] * 6 for i in range(4)]
    shared = {"max_tokens": 48, "logprobs": logprobs}
    params = [
        SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.2, presence_penalty=0.3, **shared),
        SamplingParams(temperature=0.5, seed=2, bad_words=((7,), (9, 14)), logit_bias=((5, 3.0),), **shared),
        SamplingParams(temperature=0.9, seed=3, min_tokens=20, stop_token_ids=tuple(range(90)), **shared),
        SamplingParams(temperature=0.0, frequency_penalty=0.6, allowed_token_ids=tuple(range(50)), **shared),
    ]
    expected = Driver(qwen3, prefix_cache=False).ask(prompts, params)
    driver = Driver(qwen3, prefix_cache=False, speculation="ngram", draft_worth=0.0)
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, expected, strict=True)]
    driver.runner.proposer = KnowingProposer(texts)
    found = driver.ask(prompts, params)
    assert found == expected
    usages = [answer.usage for answer in found if answer.usage is not None]
    assert sum(usage.accepted_drafts for usage in usages) == driver.core.stats().accepted_tokens > 40
    for usage, other in zip(usages, expected, strict=True):
        assert other.usage is not None
        assert usage.completion_tokens == other.usage.completion_tokens
        assert usage.computed_tokens == other.usage.computed_tokens

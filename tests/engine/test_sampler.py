"""The sampler against a float64 reference: distributions, filters at their edges, and what a draw depends
on.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.sampler import NOT_NUMBERS, Sampler, SampleRows, exponential, results, row_keys
from penstock.types import SamplingParams

DRAWS = 100_000


def rows(count: int, *, seed: int = 1, first: int = 0, **params: object) -> SampleRows:
    """`count` rows with the same parameters at positions from `first` on."""
    given = SamplingParams(**params)
    return SampleRows(
        np.full(count, given.temperature, np.float32),
        np.full(count, given.top_k, np.int64),
        np.full(count, given.top_p, np.float64),
        np.full(count, given.min_p, np.float32),
        np.full(count, seed, np.uint64),
        np.arange(first, first + count),
    )


def reference(logits: Tensor, given: SamplingParams) -> np.ndarray:
    """The distribution of one row, in float64, one filter after the other."""
    scaled = logits.double().numpy() / given.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(weights)), -weights))
    kept = order[: given.top_k or None]
    if given.top_p < 1:
        running = np.cumsum(weights[kept])
        kept = kept[: int(np.searchsorted(running, given.top_p * running[-1])) + 1]
    kept = kept[weights[kept] >= given.min_p]
    probabilities = np.zeros_like(weights)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def chi_square_bound(freedom: int) -> float:
    """The value that chance exceeds once in about 3 million (Wilson and Hilferty 1931, 5 sigma)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 5 * spread**0.5) ** 3


@pytest.mark.parametrize("candidates", [8, 1024])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, float], candidates: int) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    drawn = Sampler(40, candidates=candidates).draw(logits.expand(DRAWS, -1), rows(DRAWS, **params))
    counts = np.bincount(drawn.numpy(), minlength=40)
    expected = reference(logits, SamplingParams(**params)) * DRAWS
    assert not counts[expected == 0].any()
    seen = expected > 0
    chi_square = float((((counts - expected) ** 2)[seen] / expected[seen]).sum())
    assert chi_square < chi_square_bound(int(seen.sum()) - 1)


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_the_hash_is_uniform_and_uncorrelated_along_every_axis(axis: str) -> None:
    n = DRAWS if axis == "token" else 1
    counts = np.arange(DRAWS)
    ids = torch.arange(n, dtype=torch.int32)[None]
    seeds = counts.astype(np.uint64) if axis == "seed" else np.full(1 if n > 1 else DRAWS, 7, np.uint64)
    positions = counts if axis == "position" else np.full(len(seeds), 3)
    values = torch.exp(-exponential(ids, row_keys(seeds, positions))).flatten().double().numpy()
    assert len(values) == DRAWS
    cells = np.bincount((values * 100).astype(int).clip(0, 99), minlength=100)
    assert ((cells - DRAWS / 100) ** 2 / (DRAWS / 100)).sum() < chi_square_bound(99)
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / DRAWS**0.5


def test_exponentials_are_finite_and_positive() -> None:
    values = exponential(
        torch.arange(1_000_000, dtype=torch.int32)[None],
        row_keys(np.zeros(1, np.uint64), np.zeros(1, np.int64)),
    )
    assert values.isfinite().all()
    assert (values > 0).all()
    assert values.min() < 1e-5  # Rare small values are what lets unlikely tokens win.


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    sampler = Sampler(4)
    for params in ({"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}, {"top_p": 1e-9}):
        assert sampler.draw(logits, rows(2, **params)).tolist() == [1, 0], params


def test_top_k_of_equals_keeps_exactly_k() -> None:
    for candidates in (4, 64):
        drawn = Sampler(64, candidates=candidates).draw(torch.zeros(2000, 64), rows(2000, top_k=3))
        assert set(drawn.tolist()) == {0, 1, 2}


def test_filters_that_keep_everything_change_nothing() -> None:
    logits = torch.randn(200, 50)
    plain = Sampler(50).draw(logits, rows(200))
    for params in ({"top_k": 50}, {"top_k": 1000}, {"top_k": 49, "top_p": 1.0}, {"min_p": 0.0}):
        same = Sampler(50).draw(logits, rows(200, **params))
        assert (same == plain).float().mean() > 0.97, params  # 49 of 50 may differ where the 50th would win.
    assert torch.equal(Sampler(50).draw(logits, rows(200, top_k=50)), plain)


def test_min_p_of_one_keeps_the_likeliest() -> None:
    logits = torch.randn(300, 50)
    assert torch.equal(Sampler(50).draw(logits, rows(300, min_p=1.0)), logits.argmax(-1))


def test_a_tiny_temperature_does_not_overflow() -> None:
    logits = torch.tensor([[3e4, -3e4, 2.9e4]]).expand(50, -1)
    assert set(Sampler(3).draw(logits, rows(50, temperature=1e-4)).tolist()) == {0}


def test_how_many_candidates_are_looked_at_changes_no_draw() -> None:
    logits = torch.randn(60, 3000).bfloat16().float()  # bfloat16 makes many ties.
    for params in (
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_k": 70},
        {"top_k": 2000, "top_p": 0.999, "temperature": 2.0},
    ):
        draws = [Sampler(3000, candidates=n).draw(logits, rows(60, **params)) for n in (16, 300, 3000)]
        assert torch.equal(draws[0], draws[1])
        assert torch.equal(draws[0], draws[2])


def test_a_draw_depends_on_seed_position_and_its_own_logits_only() -> None:
    logits = torch.randn(7, 400)
    params = [
        {},
        {"temperature": 0.0},
        {"top_k": 9},
        {"min_p": 0.2},
        {"top_p": 0.5},
        {"top_p": 0.99, "temperature": 3.0},
        {},
    ]
    singles = [rows(1, seed=i, first=10 * i, **how) for i, how in enumerate(params)]
    batch = SampleRows(
        *(
            np.concatenate([getattr(one, name) for one in singles])
            for name in SampleRows.__slots__
            if name != "masks"
        )
    )
    together = Sampler(400).draw(logits, batch)
    alone = torch.cat([Sampler(400).draw(logits[i : i + 1], one) for i, one in enumerate(singles)])
    assert torch.equal(together, alone)
    assert not torch.equal(
        Sampler(400).draw(logits, rows(7, seed=1)), Sampler(400).draw(logits, rows(7, seed=2))
    )
    assert not torch.equal(Sampler(400).draw(logits, rows(7)), Sampler(400).draw(logits, rows(7, first=1)))


def test_rows_without_finite_logits_fail_alone() -> None:
    logits = torch.randn(4, 100)
    logits[1, 3], logits[2, 7] = torch.nan, torch.inf
    drawn = Sampler(100).draw(logits, rows(4, top_p=0.9))
    assert drawn[1:3].tolist() == [-1, -1]
    packed = results(logits, drawn, np.array([5, 0, 2, 3]), [None] * 6)
    assert [sampled.row for sampled in packed] == [5, 0, 2, 3]
    assert [sampled.error for sampled in packed] == [None, NOT_NUMBERS, NOT_NUMBERS, None]
    healthy = Sampler(100).draw(logits[[0, 3]], rows(4, top_p=0.9).pick(np.array([0, 3])))
    assert [packed[0].token_id, packed[3].token_id] == healthy.tolist()


def test_logprobs_are_those_of_the_unscaled_distribution() -> None:
    logits = torch.randn(2, 30)
    packed = results(logits, torch.tensor([4, 9]), np.array([0, 1]), [0, 3])
    expected = logits.double().log_softmax(-1)
    first, second = packed[0].logprob, packed[1].logprob
    assert first is not None
    assert second is not None
    assert first.top == ()
    assert first.logprob == pytest.approx(float(expected[0, 4]), abs=1e-6)
    assert [token for token, _ in second.top] == expected[1].argsort(descending=True)[:3].tolist()
    assert [value for _, value in second.top] == pytest.approx(
        sorted(expected[1].tolist(), reverse=True)[:3], abs=1e-6
    )


def test_equal_logprobs_are_listed_by_id() -> None:
    packed = results(torch.zeros(1, 6), torch.tensor([2]), np.array([0]), [6])
    assert packed[0].logprob is not None
    assert [token for token, _ in packed[0].logprob.top] == [0, 1, 2, 3, 4, 5]

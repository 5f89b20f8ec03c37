"""The native sampler draws what the torch sampler draws, on every instruction set."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.engine.adjustments import Masks
from penstock.engine.sampler import NativeSampler, Sampler, SampleRows

CASES = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-3},
    {"temperature": 0.6},
    {"temperature": 8.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 2999, "temperature": 3.0},
    {"top_k": 3000},
    {"top_k": 10**9},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 2.0},
    {"top_p": 0.999999, "temperature": 20.0},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
]


def rows(cases: list[dict[str, float]], *, first: int = 0) -> SampleRows:
    def column(name: str, default: float, dtype: type) -> np.ndarray:
        return np.array([case.get(name, default) for case in cases], dtype)

    return SampleRows(
        column("temperature", 1.0, np.float32),
        column("top_k", 0, np.int64),
        column("top_p", 1.0, np.float64),
        column("min_p", 0.0, np.float32),
        np.arange(len(cases), dtype=np.uint64) * 77 + 3,
        np.arange(first, first + len(cases)),
    )


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 257, 3000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_draws_are_those_of_the_torch_sampler(kernels, rng, vocab_size: int, spread: float) -> None:
    cases = CASES * 30
    # bfloat16 makes many ties, which must rank by lowest id.
    logits = (torch.randn(len(cases), vocab_size, generator=rng) * spread).bfloat16().float()
    ours = NativeSampler(kernels).draw(logits, rows(cases))
    expected = Sampler(vocab_size).draw(logits, rows(cases))
    differ = (ours != expected).nonzero()[:, 0].tolist()
    assert len(differ) <= 1, [cases[i] for i in differ]  # Scores are rounded in different places.


@pytest.mark.parametrize("vocab_size", [5, 257, 3000])
@pytest.mark.parametrize("share", [0.002, 0.2, 0.98])
def test_only_tokens_whose_bits_are_set_are_drawn(kernels, rng, vocab_size: int, share: float) -> None:
    cases = CASES * 10
    logits = torch.randn(len(cases), vocab_size, generator=rng) * 3
    logits[0, :] = torch.nan  # Of a row whose mask hides all of it but one token.
    logits[0, 3] = 1.0
    allowed = torch.rand(len(cases), vocab_size, generator=rng) < share
    allowed[:, 3] = True
    allowed[0, :] = False
    allowed[0, 3] = True
    num_words = -(-vocab_size // 32)
    padded = np.zeros((len(cases), num_words * 32), np.uint8)
    padded[:, :vocab_size] = allowed.numpy()
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    of_row = np.arange(len(cases), dtype=np.int32)
    of_row[1::4] = -1
    masked = replace(rows(cases), masks=Masks(bits, of_row))
    before = logits.clone()
    ours = NativeSampler(kernels).draw(logits, masked)
    theirs = Sampler(vocab_size).draw(logits, masked)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits are not changed"
    differ = (ours != theirs).nonzero()[:, 0].tolist()
    assert len(differ) <= 1, [cases[i] for i in differ]
    free = torch.from_numpy(of_row < 0)
    assert (allowed.gather(1, ours[:, None])[:, 0] | free).all()
    assert torch.equal(ours[free], NativeSampler(kernels).draw(logits, rows(cases))[free])
    hidden = NativeSampler(kernels).draw(logits.masked_fill(~allowed, -torch.inf), rows(cases))
    assert torch.equal(ours[~free], hidden[~free])


def test_a_winner_among_all_tokens_is_the_winner_among_those_that_are_allowed(kernels, rng) -> None:
    """Rows without filters need no mask where their grammar allows what they draw."""
    cases = [{"temperature": each} for each in (0.0, 0.7, 1.0, 1.5)] * 50
    logits = torch.randn(len(cases), 3000, generator=rng) * 3
    allowed = torch.rand(len(cases), 3008, generator=rng) < 0.8
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int32)
    masked = replace(rows(cases), masks=Masks(bits, np.arange(len(cases), dtype=np.int32)))
    for sampler in (NativeSampler(kernels), Sampler(3000)):
        found, among_allowed = sampler.draw(logits, rows(cases)), sampler.draw(logits, masked)
        may = allowed.gather(1, found[:, None])[:, 0]
        assert 20 < may.sum() < len(cases)
        assert torch.equal(found[may], among_allowed[may])


def test_a_row_depends_on_itself_alone(kernels, rng) -> None:
    logits = torch.randn(len(CASES), 700, generator=rng)
    sampler = NativeSampler(kernels)
    alone = [
        sampler.draw(logits[i : i + 1], rows(CASES).pick(np.array([i]))).item() for i in range(len(CASES))
    ]
    kernels.set_threads(3)
    assert sampler.draw(logits, rows(CASES)).tolist() == alone
    wider = torch.full((len(CASES), 1000), torch.nan)
    wider[:, :700] = logits
    assert sampler.draw(wider[:, :700], rows(CASES)).tolist() == alone


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 15, 16, 99])
def test_rows_that_are_not_numbers_draw_nothing(kernels, rng, bad: float, where: int) -> None:
    logits = torch.randn(3, 100, generator=rng)
    logits[1, where] = bad
    drawn = NativeSampler(kernels).draw(logits, rows([{}, {"top_p": 0.5}, {"top_k": 3}])).tolist()
    assert drawn[0] >= 0
    assert drawn[2] >= 0
    assert (drawn[1] == -1) == (bad != -torch.inf)  # A masked token is a number's absence, not a fault.
    logits[1] = -torch.inf
    assert NativeSampler(kernels).draw(logits, rows([{}, {}, {}]))[1] == -1


def test_the_distribution_is_right(kernels) -> None:
    draws = 100_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -20.0, 0.0])
    params = SampleRows(
        np.full(draws, 1.5, np.float32),
        np.full(draws, 5),
        np.full(draws, 1.0),
        np.zeros(draws, np.float32),
        np.full(draws, 9, np.uint64),
        np.arange(draws),
    )
    counts = np.bincount(NativeSampler(kernels).draw(logits.expand(draws, -1), params), minlength=7)
    kept = np.exp(logits.double().numpy() / 1.5)
    kept[[2, 5]] = 0.0
    expected = kept / kept.sum() * draws
    assert counts[[2, 5]].tolist() == [0, 0]
    seen = expected > 0
    # Chance exceeds this bound for 4 degrees of freedom once in about 3 million.
    assert float(((counts - expected)[seen] ** 2 / expected[seen]).sum()) < 36.0

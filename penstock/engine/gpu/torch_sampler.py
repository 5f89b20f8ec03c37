"""The sampler's twin: `engine/sampler.py` in fixed shapes, with parameters from the device's row tables."""

import torch
from torch import Tensor

from penstock.engine.gpu.step import RowState
from penstock.engine.sampler import GREEDY_BELOW, exponential

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
"""SplitMix64's constants (Steele et al. 2014) as torch's int64 has them."""


def draw(logits: Tensor, state: RowState, rows: Tensor, positions: Tensor) -> Tensor:
    """The next token of every sample: `[num_samples]` int64, from finite `[num_samples, vocab_size]` float32
    logits.

    Args:
        logits: not changed.
        state: the rows' parameters.
        rows: `[num_samples]` int64 rows of the tables.
        positions: `[num_samples]` int64 positions of the tokens to be drawn.
    """
    temperature = state.temperature[rows][:, None]
    greedy = temperature < GREEDY_BELOW
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperature)
    values, token_ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    kept = _kept(values, state, rows) & (values >= torch.log(state.min_p[rows])[:, None])
    random = values - torch.log(exponential(token_ids.int(), row_keys(state.seed[rows], positions)))
    scores = torch.where(kept, torch.where(greedy, values, random), -torch.inf)
    best = scores == scores.amax(-1, keepdim=True)
    return torch.where(best, token_ids, logits.shape[1]).amin(-1)


def _kept(values: Tensor, state: RowState, rows: Tensor) -> Tensor:
    """Which of the ranked values `[num_samples, vocab_size]` top-k and then top-p keep."""
    size = values.shape[1]
    ranks = torch.arange(size, device=values.device)
    top_k, top_p = state.top_k[rows].long()[:, None], state.top_p[rows][:, None]
    limit = torch.where(top_k > 0, top_k, size).clamp_(max=size)
    weights = values.exp().double()
    running = weights.cumsum(-1)
    inside = (running - weights) < top_p * running.gather(1, limit - 1)
    return (ranks < limit) & (inside | (top_p >= 1.0) | (ranks == 0))


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As `sampler.row_keys`, on the device: two int32 keys `[num_samples, 1]` per (seed, position), both
    int64.
    """
    mixed = _split_mix(_split_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    halves = mixed.view(torch.int32).view(-1, 2)
    return halves[:, :1], halves[:, 1:]


def _split_mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

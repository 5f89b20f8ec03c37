"""The torch twin of every kernel: what `TritonOps` is tested against, and what stands in for it on any
device.

Fixed shapes and no host synchronisation here too, so a graph can be captured over it. Made to be read, not to
be fast: attention walks over every row's whole table.

The sampler's twin: `engine/sampler.py` in fixed shapes, with parameters from the device's row tables.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.gpu.ops import AttentionLayer, HeadRotation, Partials
from penstock.engine.gpu.packed import MatrixOps, TorchMatrixOps
from penstock.engine.gpu.step import NUM_SAMPLES, NUM_TOKENS, DeviceStep, Drawn, Int32Array, RowState
from penstock.engine.kv_cache import KVCache
from penstock.engine.sampler import GREEDY_BELOW, exponential
from penstock.models.spec import DecoderSpec
from penstock.types import BLOCK_TOKENS

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


_TILE_TOKENS = 128
FLOAT8_MAX = 448.0


def _bytes(tensor: Tensor) -> Tensor:
    """FP8 as bytes; all else as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


class TorchOps:
    """See `Ops`."""

    name = "torch"
    captures = True
    matrices: MatrixOps = TorchMatrixOps()

    def check(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """See `Ops`: every model."""

    def plan(self, rows: Int32Array, computed: Int32Array, num_tokens: Int32Array, state: RowState) -> None:
        """See `Ops`: nothing is planned on the host."""

    def prepare(self, step: DeviceStep, slots_per_block: int) -> None:
        """See `Ops`."""
        buffer, state, inputs = step.buffer, step.state, step.inputs
        tokens = torch.arange(inputs.token_ids.shape[0], dtype=torch.int32, device=buffer.flat.device)
        live = tokens < buffer.counts[NUM_TOKENS]
        work = torch.searchsorted(buffer.starts[1:], tokens, right=True).clamp_(max=buffer.rows.shape[0] - 1)
        rows = torch.where(live, buffer.rows[work], state.unused_row)
        positions = torch.where(live, buffer.computed[work] + tokens - buffer.starts[work], 0)
        blocks = state.block_tables[rows, positions // BLOCK_TOKENS].long()
        inputs.token_ids.copy_(torch.where(live, state.token_ids[rows, positions], 0))
        inputs.positions.copy_(positions)
        inputs.slots.copy_(torch.where(live, blocks * slots_per_block + positions % BLOCK_TOKENS, -1))
        inputs.token_rows.copy_(rows)
        samples = torch.arange(inputs.sample_rows.shape[0], device=buffer.flat.device)
        drawing = samples < buffer.counts[NUM_SAMPLES]
        work = torch.where(drawing, buffer.sampled[: len(samples)], 0)
        ends = buffer.starts[work + 1]
        inputs.sample_tokens.copy_(torch.where(drawing, ends - 1, 0))
        inputs.sample_rows.copy_(torch.where(drawing, buffer.rows[work], state.unused_row))
        length = buffer.computed[work] + ends - buffer.starts[work]
        inputs.sample_positions.copy_(torch.where(drawing, length, 0))

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Ops`."""
        out.copy_(_normed(x.float(), weight, eps))

    def add_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Ops`."""
        residual.copy_(residual.float() + x.float())
        self.norm(residual, weight, eps, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Ops`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(gate / (1 + torch.exp(-gate)) * up)

    def gelu_tanh_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Ops`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate * gate * gate)
        out.copy_(0.5 * gate * (1 + torch.tanh(inner)) * up)

    def rotate_store(
        self, qkv: Tensor, q: Tensor, cache: KVCache, layer: int, step: DeviceStep, rotation: HeadRotation
    ) -> None:
        """See `Ops`."""
        num_heads, num_kv_heads = q.shape[1], cache.num_kv_heads
        heads, first_value = qkv.float(), num_heads + num_kv_heads
        queries, keys, values = heads[:, :num_heads], heads[:, num_heads:first_value], heads[:, first_value:]
        if rotation.norms is not None:
            q_norm, k_norm = rotation.norms
            queries, keys = _normed(queries, q_norm, rotation.eps), _normed(keys, k_norm, rotation.eps)
        q.copy_(_rotated(queries, rotation, step.inputs.positions))
        slots = step.inputs.slots
        live = slots >= 0
        # Padding writes zeros, into the cache's last block, which stays zero.
        nowhere = cache.zero_block * cache.pages_per_block * BLOCK_TOKENS
        first = torch.where(live, slots, nowhere) + layer * 2 * BLOCK_TOKENS
        for part, place in ((_rotated(keys, rotation, step.inputs.positions), 0), (values, BLOCK_TOKENS)):
            kept = torch.where(live[:, None], part.flatten(1), 0.0).to(qkv.dtype)
            if cache.slots.dtype == torch.float8_e4m3fn:
                kept.clamp_(-FLOAT8_MAX, FLOAT8_MAX)
            # As bytes, since torch does not move FP8 everywhere.
            _bytes(cache.slots).index_copy_(0, first + place, _bytes(kept.to(cache.slots.dtype)))

    def attend(
        self,
        q: Tensor,
        out: Tensor,
        cache: KVCache,
        step: DeviceStep,
        how: AttentionLayer,
        partials: Partials,
    ) -> None:
        """See `Ops`."""
        tables = step.state.block_tables[step.inputs.token_rows]
        positions = step.inputs.positions
        num_tokens, num_heads, head_dim = q.shape
        queries = q.float().view(num_tokens, cache.num_kv_heads, -1, head_dim)
        running = _Running(queries)
        width = _TILE_TOKENS // BLOCK_TOKENS
        for first in range(0, tables.shape[1], width):
            blocks = tables[:, first : first + width].long()
            kv = (
                _bytes(cache.tensor)[blocks, how.layer].view(cache.tensor.dtype).float()
            )  # [tokens, blocks, 2, 16, heads, dim]
            keys, values = kv.transpose(1, 2).flatten(2, 3).permute(1, 0, 3, 2, 4)
            places = torch.arange(keys.shape[2], device=q.device) + first * BLOCK_TOKENS
            distance = (positions[:, None] - places)[:, None, None]
            hidden = distance < 0
            if how.window:
                hidden = hidden | (distance >= how.window)
            # Beyond the row's end the table may name anybody's block, whatever it holds.
            unseen = hidden[:, :, 0, :, None]
            scores = queries @ keys.masked_fill(unseen, 0.0).transpose(2, 3) * how.scale
            if how.softcap:
                scores = how.softcap * torch.tanh(scores / how.softcap)
            running.take(scores.masked_fill(hidden, -torch.inf), values.masked_fill(unseen, 0.0))
        out.copy_(running.result().view(num_tokens, num_heads, head_dim))

    def sample(self, logits: Tensor, step: DeviceStep, drawn: Drawn) -> None:
        """See `Ops`."""
        state, inputs = step.state, step.inputs
        rows, positions = inputs.sample_rows.long(), inputs.sample_positions.long()
        healthy = logits.amax(-1).isfinite()  # A NaN anywhere is the maximum.
        drawn.healthy.copy_(healthy)
        token_ids = draw(torch.where(healthy[:, None], logits, 0.0), state, rows, positions)
        drawn.token_ids.copy_(torch.where(healthy, token_ids, 0))
        state.token_ids[rows, positions] = drawn.token_ids


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of float32 rows (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(x: Tensor, rotation: HeadRotation, positions: Tensor) -> Tensor:
    """Heads `[num_tokens, heads, head_dim]` turned to their positions."""
    table = rotation.table
    cos, sin = table.cos[positions][:, None], table.sin[positions][:, None]
    turning, still = x[..., : table.rotary_dim], x[..., table.rotary_dim :]
    flipped = torch.cat((turning.roll(table.rotary_dim // 2, dims=-1), still), dim=-1)
    return x * cos + flipped * sin


@dataclass(slots=True)
class _Running:
    """Softmax-weighted values, tile by tile (Dao et al. 2022, arXiv 2205.14135)."""

    queries: Tensor
    top: Tensor
    den: Tensor
    acc: Tensor

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries
        self.top = torch.full_like(queries[..., 0], -torch.inf)
        self.den = torch.zeros_like(self.top)
        self.acc = torch.zeros_like(queries)

    def take(self, scores: Tensor, values: Tensor) -> None:
        """One tile: scores `[tokens, kv heads, group, n]` (-inf: unseen), values
        `[tokens, kv heads, n, dim]`.
        """
        top = torch.maximum(self.top, scores.amax(-1))
        shift = torch.where(top == -torch.inf, 0.0, top)
        weights, keep = torch.exp(scores - shift[..., None]), torch.exp(self.top - shift)
        self.den = self.den * keep + weights.sum(-1)
        self.acc = self.acc * keep[..., None] + weights @ values
        self.top = top

    def result(self) -> Tensor:
        """`[tokens, kv heads, group, dim]`; padding that saw nothing is zero."""
        return self.acc / self.den.clamp(min=1e-30)[..., None]

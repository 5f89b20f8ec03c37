"""How weights are rounded so that a layer's outputs change least: GPTQ, AWQ's scales, and to the nearest; and
what the inputs of every linear layer look like on a text, which they go by.

The torch decoder runs on the text, and its layers record their inputs. All methods take a weight W [n, k] in
float32. Inputs x [k] are known by their Gram matrix G = sum of x x^T over the text: the error of a layer's
outputs is then tr(E G E^T) with E the error of its weights.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from penstock.engine.attention.base import AttentionBatch
from penstock.engine.decoder import Decoder, DecoderLimits, WeightSource
from penstock.engine.kernels import TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import Linear
from penstock.engine.loader import load_weights
from penstock.engine.quantized import Kept, QuantizedMatrix
from penstock.models.registry import read_spec
from penstock.models.spec import DecoderSpec
from penstock.types import BLOCK_TOKENS

SEQUENCE_TOKENS = 512
CPU = torch.device("cpu")


@dataclass(slots=True)
class Inputs:
    """Of one layer."""

    gram: Tensor
    """[k, k]: sum of x x^T."""
    magnitude: Tensor
    """[k]: sum of |x|."""
    count: int = 0


@dataclass(slots=True)
class _Listened:
    """Layers that are listened to, by their weight's key; experts have `#` and their number behind it."""

    wanted: frozenset[str] = frozenset()
    inputs: dict[str, Inputs] = field(default_factory=dict[str, Inputs])
    last_key: str = ""

    def hear(self, name: str, x: Tensor) -> None:
        if name.partition("#")[0] not in self.wanted:
            return
        k = x.shape[1]
        found = self.inputs.setdefault(name, Inputs(torch.zeros(k, k), torch.zeros(k)))
        found.gram.addmm_(x.t(), x)
        found.magnitude += x.abs().sum(0)
        found.count += len(x)


class _Source:
    """Weights that remember which was taken last: it is the one that a linear layer is made of next."""

    def __init__(self, weights: WeightSource, listened: _Listened) -> None:
        self._weights, self._listened = weights, listened

    def take(self, key: str) -> Tensor:
        self._listened.last_key = key
        return self._weights.take(key)

    def take_linear(self, key: str) -> Tensor | Kept:
        self._listened.last_key = key
        return self._weights.take_linear(key)

    def take_parts(self, key: str) -> tuple[Tensor | QuantizedMatrix, ...]:
        return self._weights.take_parts(key)


class _Ear:
    """A linear layer that is listened to."""

    __slots__ = ("_hear", "_inner", "_name")

    def __init__(self, inner: Linear, name: str, hear: Callable[[str, Tensor], None]) -> None:
        self._inner, self._name, self._hear = inner, name, hear

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._inner.tensors

    def __call__(self, x: Tensor, out: Tensor) -> None:
        self._hear(self._name, x)
        self._inner(x, out)


class _Kernels(TorchKernels):
    def __init__(self, spec: DecoderSpec, listened: _Listened) -> None:
        super().__init__(spec, max_tokens=SEQUENCE_TOKENS, device=CPU, products=torch.float32)
        self._listened = listened

    def linear(self, weight: Tensor | Kept, bias: Tensor | None, *, rows_max: int) -> Linear:
        inner = super().linear(weight, bias, rows_max=rows_max)
        return _Ear(inner, self._listened.last_key, self._listened.hear)

    def linears(self, weight: Tensor, *, count: int, rows_max: int) -> Sequence[Linear]:
        inner = super().linears(weight, count=count, rows_max=rows_max)
        key, hear = self._listened.last_key, self._listened.hear
        return [_Ear(expert, f"{key}#{number}", hear) for number, expert in enumerate(inner)]


class Calibration:
    """A model in float32 and a text, ready to say what the inputs of any of its layers look like.

    Raises:
        CheckpointError: the directory holds no model with dense weights.
    """

    def __init__(self, directory: Path, sequences: Sequence[Sequence[int]]) -> None:
        assert sequences
        assert max(map(len, sequences)) <= SEQUENCE_TOKENS
        self._sequences = sequences
        spec, names = read_spec(directory)
        self._listened = _Listened()
        weights = load_weights(directory, spec, names, torch.float32, lambda _done, _total: None)
        kernels = _Kernels(spec, self._listened)
        limits = DecoderLimits(step_tokens=SEQUENCE_TOKENS, max_samples=1, max_model_len=SEQUENCE_TOKENS)
        self._decoder = Decoder(spec, _Source(weights, self._listened), kernels, limits)
        self._cache = KVCache(spec, SEQUENCE_TOKENS // BLOCK_TOKENS, torch.float32, CPU)
        self._attention = kernels.attention(self._cache, self._decoder.rotary)

    @torch.inference_mode()
    def listen(self, keys: Iterable[str], on_sequence: Callable[[], None]) -> dict[str, Inputs]:
        """The inputs of the layers with these keys, over the whole text."""
        self._listened.wanted, self._listened.inputs = frozenset(keys), {}
        for token_ids in self._sequences:
            self._run(token_ids)
            on_sequence()
        found, self._listened.inputs = self._listened.inputs, {}
        return found

    def _run(self, token_ids: Sequence[int]) -> None:
        count = len(token_ids)
        blocks = np.arange(-(-count // BLOCK_TOKENS), dtype=np.int32)
        self._cache.clear(list(range(len(blocks))))
        batch = AttentionBatch(
            num_computed=np.zeros(1, np.int32),
            num_tokens=np.array([count], np.int32),
            positions=torch.arange(count),
            block_tables=blocks[None],
        )
        self._attention.begin(batch)
        self._decoder.forward(torch.tensor(token_ids), torch.tensor([count - 1]), self._attention)


DAMPING = 0.01
"""Share of the mean of G's diagonal that is added to it (GPTQ's own)."""
BLOCK = 128
"""Columns whose later corrections are gathered (GPTQ's lazy batches). A multiple of every group."""
SHRINKS = tuple(1.0 - 0.02 * i for i in range(20))
"""Parts of the full range that are tried for a group's scale: clipping a far value may cost less than a
coarse grid for all others."""
ALPHAS = tuple(0.05 * i for i in range(20))
"""AWQ's exponents of the mean magnitude of an input."""
CLIPS = tuple(1.0 - 0.05 * i for i in range(11))
"""AWQ's parts of a group's range that are kept; what lies beyond takes the nearest value within."""
CLIP_VALUES_AT_ONCE = 1 << 22
LEVELS = 15
FP8_MAX = 448.0
_TINY = 1e-10
_linalg = cast(Any, torch.linalg)  # Its stubs leave most types open.


class Rounded(NamedTuple):
    """Unsigned four-bit values with their scales, W = (values - zeros) * scale per group."""

    values: Tensor
    """[n, k] uint8."""
    scale: Tensor
    """[n, groups] float32, representable in float16."""
    zeros: Tensor
    """[n, groups] uint8."""

    def dense(self) -> Tensor:
        """W as it is now."""
        n, k = self.values.shape
        blocks = self.values.float().view(n, self.scale.shape[1], -1) - self.zeros.float()[:, :, None]
        return (blocks * self.scale[:, :, None]).view(n, k)


def relative_error(weight: Tensor, rounded: Tensor, gram: Tensor) -> float:
    """Root of the outputs' squared error over their square, on the calibration text."""
    error, whole = weight - rounded, weight
    lost = ((error @ gram) * error).sum().clamp_min(0)
    return float((lost / ((whole @ gram) * whole).sum().clamp_min(_TINY)).sqrt())


def gptq(weight: Tensor, gram: Tensor, group: int) -> Rounded:
    """Round column by column; each column's error is made up for by those that follow (Frantar et al. 2022,
    arXiv 2210.17323). Symmetric, with a scale per output and `group` inputs.
    """
    weight = weight.clone()
    n, k = weight.shape
    importance = gram.diagonal().clone()
    unused = importance <= 0
    gram = gram.clone()
    gram[unused, unused] = 1.0
    weight[:, unused] = 0.0
    gram.diagonal().add_(DAMPING * float(importance.mean()) + _TINY)
    # In float64: inputs with a few huge values leave little of float32's digits.
    lower = cast(Tensor, _linalg.cholesky(gram.double()))
    inverse = cast(Tensor, _linalg.cholesky(torch.cholesky_inverse(lower), upper=True)).float()
    values = torch.empty(n, k, dtype=torch.uint8)
    scale = torch.empty(n, k // group)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        errors = torch.empty(n, end - start)
        for column in range(start, end):
            if column % group == 0:
                part = weight[:, column : column + group]
                scale[:, column // group] = _symmetric_scale(part, importance[column : column + group])
            current, step = weight[:, column], scale[:, column // group]
            q = (current / step).round().clamp(-8, 7)
            values[:, column] = (q + 8).to(torch.uint8)
            error = (current - q * step) / inverse[column, column]
            errors[:, column - start] = error
            weight[:, column:end] -= error[:, None] * inverse[column, column:end]
        weight[:, end:] -= errors @ inverse[start:end, end:]
    return Rounded(values, scale, torch.full((n, k // group), 8, dtype=torch.uint8))


def _symmetric_scale(part: Tensor, importance: Tensor) -> Tensor:
    """The step [n] of -8 to 7 that loses least of a group [n, group]."""
    largest = part.abs().amax(1).clamp_min(_TINY) / 7.5
    best, least = _half(largest), torch.full_like(largest, torch.inf)
    for shrink in SHRINKS:
        step = _half(largest * shrink)
        error = part - (part / step[:, None]).round().clamp(-8, 7) * step[:, None]
        lost = (error.square() * importance).sum(1)
        best, least = torch.where(lost < least, step, best), torch.minimum(lost, least)
    return best


def nearest(weight: Tensor, group: int, kept: Tensor | None = None) -> Rounded:
    """Four bits with zero points, rounded to nearest: what AWQ does with weights that were scaled before.

    Args:
        weight: [n, k].
        group: inputs that share a scale.
        kept: [n, groups], the part of each group's range that is kept; all of it if None.
    """
    n, k = weight.shape
    blocks = weight.reshape(n, k // group, group)
    low, high = blocks.amin(2).clamp_max(0), blocks.amax(2).clamp_min(0)
    if kept is not None:
        low, high = low * kept, high * kept
    scale = _half(((high - low) / LEVELS).clamp_min(_TINY))
    zeros = (-low / scale).round().clamp(0, LEVELS)
    values = ((blocks / scale[:, :, None]).round() + zeros[:, :, None]).clamp(0, LEVELS)
    return Rounded(values.reshape(n, k).to(torch.uint8), scale, zeros.to(torch.uint8))


def awq_clips(weight: Tensor, gram: Tensor, group: int) -> Tensor:
    """The part [n, groups] of each group's range whose loss loses least of the outputs: few far values cost
    all others their digits. The second half of AWQ's search; groups are taken one by one, as the paper does.

    Args:
        weight: [n, k], its inputs scaled already.
        gram: [k, k] of the scaled inputs.
        group: inputs that share a scale.
    """
    n, k = weight.shape
    count = k // group
    within = torch.stack([gram[at : at + group, at : at + group] for at in range(0, k, group)])
    best = torch.ones(n, count)
    step = max(1, CLIP_VALUES_AT_ONCE // k)
    for first in range(0, n, step):
        part = weight[first : first + step]
        least = torch.full((len(part), count), torch.inf)
        for ratio in CLIPS:
            error = part - nearest(part, group, torch.full((len(part), count), ratio)).dense()
            by_group = error.view(len(part), count, group).transpose(0, 1)
            lost = ((by_group @ within) * by_group).sum(2).t()
            better = lost < least
            best[first : first + step][better], least = ratio, torch.minimum(lost, least)
    return best


def awq_scales(weight: Tensor, gram: Tensor, magnitude: Tensor, group: int) -> Tensor:
    """Factors [k] of the inputs' columns, whose inverse goes to what computes the inputs.

    Inputs that are large on average keep more digits (Lin et al. 2023, arXiv 2306.00978).

    Args:
        weight: of all layers that read these inputs, stacked [n, k].
        gram: [k, k].
        magnitude: [k], the mean of |x|.
        group: inputs that share a scale.
    """
    best, least = torch.ones_like(magnitude), torch.inf
    for alpha in ALPHAS:
        factor = magnitude.clamp_min(1e-4) ** alpha
        factor = factor / (factor.max() * factor.min()).sqrt()
        error = weight - nearest(weight * factor, group).dense() / factor
        lost = float(((error @ gram) * error).sum())
        if lost < least:
            best, least = factor, lost
    return best


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 [n, k] and a scale per output [n, 1]."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(_TINY) / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 [n, k] and a scale per output [n, 1]."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(_TINY) / FP8_MAX
    return (weight / scale).to(torch.float8_e4m3fn), scale


def _half(scale: Tensor) -> Tensor:
    """The scale as the file can hold it: float16, never zero."""
    return scale.half().float().clamp_min(2.0**-24)

"""What the inputs of every linear layer look like on a text: the torch decoder runs, and its layers record
them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.engine.attention.base import AttentionBatch
from penstock.engine.decoder import Decoder, DecoderLimits, WeightSource
from penstock.engine.kernels import TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import Linear
from penstock.engine.loader import load_weights
from penstock.engine.quantized import QuantizedMatrix
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
        super().__init__(spec, max_tokens=SEQUENCE_TOKENS, device=CPU)
        self._listened = listened

    def linear(self, weight: Tensor, bias: Tensor | None, *, rows_max: int) -> Linear:
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
        """What goes into the layers with these keys, over the whole text."""
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

"""Steps of models whose hidden states are wanted: a decoder's (tables, forward pass, pooling), and an
encoder's, on the processor.

A decoder's prompt may be computed in several chunks. The mean is a sum in float64, token by token in the
order of the text, so that it has the same bits however the text was cut.

An encoder's texts of one step are packed behind one another, without padding or a KV cache: layers see one
long row of tokens, and only attention looks at texts one by one, those of equal length at once. The scheduler
may cut a text into chunks, for it plans by tokens; it is computed, as a whole, with its last chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.clock import Clock
from penstock.engine.arrays import as_tensor
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.inputs import RowTables, StepInputs
from penstock.engine.memory import blocks_of, largest_step
from penstock.engine.runner import RunnerParts
from penstock.engine.weight_check import WeightCheck
from penstock.models.vectors import EncoderSpec, PoolingSpec
from penstock.protocol.worker import ModelInfo
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import RowWork, Sampled, StepPlan, StepResult

_NORM_MIN = 1e-12
"""Of a vector that is scaled to length 1."""


def vector_of(values: npt.NDArray[np.floating], *, normalise: bool) -> tuple[bytes, str | None]:
    """A vector as it is sent, and what is wrong with it, if anything is."""
    found = np.asarray(values, np.float64)
    if not np.isfinite(found).all():
        return b"", "the model's hidden states are not finite numbers"
    if normalise:
        found = found / max(float(np.sqrt(np.square(found).sum())), _NORM_MIN)
    return found.astype("<f4").tobytes(), None


class PoolingRunner:
    """One decoder on the CPU. Not thread-safe: one step at a time."""

    def __init__(self, parts: RunnerParts, info: ModelInfo, pooling: PoolingSpec) -> None:
        """`info`: the reported facts, in the place of the decoder's own."""
        self.info, self.floor = info, parts.floor
        self._model, self._cache, self._host = parts.model, parts.cache, parts.host
        self._step_tokens = parts.step_tokens
        self._tables = RowTables(max_running=parts.info.max_running, max_model_len=parts.info.max_model_len)
        self._pooling = pooling
        self._sums: dict[int, FloatArray] = {}
        """By row, of the tokens that were computed."""

    @property
    def kernels(self) -> str:
        """The name of the kernels, for people."""
        return self._model.kernels

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's step; what samples in it gets its vector."""
        self._host.start(plan)
        for row in (*plan.freed_rows, *(new.row for new in plan.new_rows)):
            self._sums.pop(row, None)
        if not plan.work:
            self._tables.enter(plan)
            return StepResult(plan.step, (), copied=self._host.collect(wait=True))
        inputs = self._tables.apply(plan)
        self._cache.clear(inputs.fresh_blocks)
        takes_all = self._pooling.kind == "mean"
        hidden = self._hidden(inputs, every_token=takes_all)
        if takes_all:
            sampled = self._means(plan.work, hidden)
        else:
            rows = [work.row for work in plan.work if work.samples]
            sampled = tuple(self._sampled(row, each) for row, each in zip(rows, hidden, strict=True))
        return StepResult(plan.step, sampled, (), self._host.collect(wait=False))

    def weight_check(self, clock: Clock) -> WeightCheck:
        """The background check of its weights in idle time."""
        return WeightCheck(self._model.weights(), clock)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the largest step that can come; see `Runner.warm_up`."""
        bounds = BatchLimits(self._step_tokens, self.info.max_running, self.info.max_model_len)
        plan = largest_step(bounds, self.info.num_blocks)
        with self._model.rehearsing():
            self.run(plan)
        self._sums.clear()
        self._cache.clear(list(range(blocks_of(plan))))

    def _hidden(self, inputs: StepInputs, *, every_token: bool) -> npt.NDArray[np.float32]:
        """Hidden states of all tokens, or of those at which a text ends."""
        wanted = np.arange(len(inputs.token_ids)) if every_token else inputs.logit_tokens
        batch: AttentionBatch = inputs.batch
        hidden = self._model.compute(as_tensor(inputs.token_ids), as_tensor(wanted), batch)
        return hidden.numpy()

    def _means(self, works: tuple[RowWork, ...], hidden: npt.NDArray[np.float32]) -> tuple[Sampled, ...]:
        sampled: list[Sampled] = []
        start = 0
        for work in works:
            chunk = hidden[start : start + work.num_tokens].astype(np.float64)
            start += work.num_tokens
            if work.num_computed:
                chunk[0] += self._sums[work.row]
            # Along the first axis numpy adds row to row, in order.
            total: FloatArray = np.add.reduce(chunk, axis=0)
            if work.samples:
                self._sums.pop(work.row, None)
                sampled.append(self._sampled(work.row, total / (work.num_computed + work.num_tokens)))
            else:
                self._sums[work.row] = total
        return tuple(sampled)

    def _sampled(self, row: int, values: npt.NDArray[np.floating]) -> Sampled:
        vector, error = vector_of(values, normalise=self._pooling.normalise)
        return Sampled(row, 0, error=error, vector=vector)


_APPROXIMATE = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


@dataclass(slots=True, frozen=True)
class EncoderText:
    """One text of a step."""

    row: int
    ids: npt.NDArray[np.int64]
    num_first: int
    """Of a pair: leading tokens of the first; 0: it is none."""


class Encoder:
    """The model. `compute` takes texts in the order of their lengths."""

    def __init__(self, spec: EncoderSpec, weights: Mapping[str, Tensor]) -> None:
        self._spec, self._weights = spec, dict(weights)
        for i in range(spec.num_layers):
            for kind in ("weight", "bias"):
                names = [
                    f"encoder.layer.{i}.attention.self.{each}.{kind}" for each in ("query", "key", "value")
                ]
                self._weights[f"{i}.qkv.{kind}"] = torch.cat([self._weights.pop(name) for name in names])

    @property
    def weights(self) -> list[Tensor]:
        """The weights that it computes with, as they lie in memory."""
        return list(self._weights.values())

    def compute(self, texts: Sequence[EncoderText]) -> Tensor:
        """`[num_tokens, hidden_size]` hidden states, text behind text."""
        ids = as_tensor(np.concatenate([text.ids for text in texts]))
        positions = as_tensor(np.concatenate([self._positions(text.ids) for text in texts]))
        types = as_tensor(np.concatenate([self._types(text) for text in texts]))
        table = self._weights
        x = table["embeddings.word_embeddings.weight"][ids]
        x = x + table["embeddings.token_type_embeddings.weight"][types]
        x = x + table["embeddings.position_embeddings.weight"][positions]
        x = self._norm(x, "embeddings.LayerNorm")
        groups = [(length, len(list(group))) for length, group in groupby(len(text.ids) for text in texts)]
        for i in range(self._spec.num_layers):
            layer = f"encoder.layer.{i}."
            attended = self._attend(self._linear(x, f"{i}.qkv"), groups)
            x = self._norm(
                x + self._linear(attended, f"{layer}attention.output.dense"),
                f"{layer}attention.output.LayerNorm",
            )
            inner = self._activate(self._linear(x, f"{layer}intermediate.dense"))
            x = self._norm(x + self._linear(inner, f"{layer}output.dense"), f"{layer}output.LayerNorm")
        return x

    def scores(self, first: Tensor) -> Tensor:
        """`[num_texts, 1]` of the first tokens' hidden states."""
        dense, last = self._spec.head
        found = self._linear(torch.tanh(self._linear(first, dense)), last).float()
        return torch.sigmoid(found) if self._spec.applies_sigmoid else found

    def _positions(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        padding = self._spec.padding_id
        if padding is None:
            return np.arange(len(ids))
        counts = ids != padding
        return np.cumsum(counts) * counts + padding

    def _types(self, text: EncoderText) -> npt.NDArray[np.int64]:
        types = np.zeros(len(text.ids), np.int64)
        if text.num_first and self._spec.num_types > 1:
            types[text.num_first :] = 1
        return types

    def _attend(self, qkv: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        """Attention within each text; `groups`: (length, number) of those that are equally long."""
        heads, hidden = self._spec.num_heads, self._spec.hidden_size
        out, start = qkv.new_empty(qkv.shape[0], hidden), 0
        for length, count in groups:
            end = start + length * count
            parts = qkv[start:end].view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            found = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
            out[start:end] = found.transpose(1, 2).reshape(end - start, hidden)
            start = end
        return out

    def _activate(self, x: Tensor) -> Tensor:
        kind = self._spec.activation
        return functional.relu(x) if kind == "relu" else functional.gelu(x, approximate=_APPROXIMATE[kind])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, self._spec.norm_eps)


class EncoderRunner:
    """One encoder behind the scheduler's plans."""

    kernels = "torch"
    """The name of the kernels, for people."""

    def __init__(self, encoder: Encoder, info: ModelInfo, pooling: PoolingSpec, *, step_tokens: int) -> None:
        self.info = info
        self._encoder, self._pooling, self._step_tokens = encoder, pooling, step_tokens
        self._texts: dict[int, EncoderText] = {}
        """By row."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute the texts whose last chunk is planned."""
        for row in plan.freed_rows:
            self._texts.pop(row, None)
        for new in plan.new_rows:
            self._texts[new.row] = EncoderText(new.row, np.array(new.token_ids, np.int64), new.num_first)
        ending = [self._texts[work.row] for work in plan.work if work.samples]
        found: dict[int, Sampled] = {}
        if ending:
            texts = sorted(ending, key=lambda text: len(text.ids))
            hidden, start = self._encoder.compute(texts), 0
            parts: list[Tensor] = []
            for text in texts:
                parts.append(hidden[start : start + len(text.ids)])
                start += len(text.ids)
            values = self._pooled(parts)
            for text, value in zip(texts, values, strict=True):
                vector, error = vector_of(value, normalise=self._pooling.normalise)
                found[text.row] = Sampled(text.row, 0, error=error, vector=vector)
        return StepResult(plan.step, tuple(found[text.row] for text in ending))

    def _pooled(self, parts: Sequence[Tensor]) -> npt.NDArray[np.floating]:
        kind = self._pooling.kind
        if self.info.pooling == "scores":
            return self._encoder.scores(torch.stack([part[0] for part in parts])).numpy()
        if kind == "mean":
            rows = [part.double().mean(0) for part in parts]
        else:
            assert kind == "cls", kind
            rows = [part[0].double() for part in parts]
        return torch.stack(rows).numpy()

    def weight_check(self, clock: Clock) -> WeightCheck:
        """The background check of its weights in idle time."""
        return WeightCheck(self._encoder.weights, clock)

    def warm_up(self) -> None:
        """Run the largest step that can come."""
        bounds = BatchLimits(self._step_tokens, self.info.max_running, self.info.max_model_len)
        self.run(largest_step(bounds, self.info.num_blocks))
        self._texts.clear()


FloatArray = npt.NDArray[np.float64]

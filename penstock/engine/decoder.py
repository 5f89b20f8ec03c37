"""The one decoder: pre-norm blocks of grouped-query attention and a gated MLP, driven by a `DecoderSpec`.

Owns the order of operations and the activations of one step. It knows nothing about files, blocks, sampling
or the device: weights come from a `WeightSource`, computing from `Kernels`, the KV cache sits behind
`Attention`.

    token ids -> embedding -> [norm -> qkv -> (head norm) RoPE -> attention -> o -> join
                               norm -> gate_up -> gate -> down (or experts) -> join] x layers -> norm ->
                               head -> logits

A join adds what a sublayer gives to the residual (normalised before, for some families) and norms the sum for
the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.attention.base import Attention
from penstock.engine.kernels import Kernels, Norm
from penstock.engine.layers.linear import Linear
from penstock.engine.layers.mlp import DenseMlp, Mlp, MoeMlp, MoeScratch
from penstock.engine.layers.rowwise import Embedding, RotaryTable, RotaryWeights, ScaledEmbedding, soft_cap_
from penstock.engine.quantized import Kept, QuantizedMatrix
from penstock.models.spec import DecoderSpec


class WeightSource(Protocol):
    """Hands out every weight once, by the keys of `models/names.py`."""

    def take(self, key: str) -> Tensor:
        """The weight, which now belongs to the caller."""
        ...

    def take_linear(self, key: str) -> Tensor | Kept:
        """The weight, which now belongs to the caller; as the checkpoint has it where the kernels compute
        with that.
        """
        ...

    def take_parts(self, key: str) -> tuple[Tensor | QuantizedMatrix, ...]:
        """The weight as the checkpoint has it, in one or more parts to be stacked; for who copies it at once.

        The parts may lie in a mapped file: it must be neither changed nor kept.
        """
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class DecoderLimits:
    """The sizes of buffers."""

    step_tokens: int
    max_samples: int
    """Rows that get logits in one step at most."""
    max_model_len: int


Adapt = Callable[[Linear, int, str], Linear]
"""Makes a linear of a layer one that rows' adapters are added to; (the linear, layer, key)."""

_Join = Callable[[Tensor, Tensor, Tensor], None]
"""(residual, what to add to it, where the normalised sum goes)."""


@dataclass(slots=True, frozen=True)
class _Layer:
    qkv: Linear
    o: Linear
    join_mlp: _Join
    mlp: Mlp
    join_next: _Join


@dataclass(slots=True, frozen=True)
class _Rows:
    """Views of the activations for one number of tokens."""

    residual: Tensor
    normed: Tensor
    delta: Tensor
    qkv: Tensor
    heads: Tensor
    q: Tensor
    attended: Tensor
    inner: tuple[Tensor, Tensor]
    """The memory that the feed-forward layer computes in: gate and up, and what passes the gate."""


class Decoder:
    """The model, ready to run steps. Buffers are reused: logits are valid until the next `forward`."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        kernels: Kernels,
        limits: DecoderLimits,
        adapt: Adapt | None = None,
    ) -> None:
        self._spec = spec
        table = weights.take("embedding")
        self.dtype = table.dtype
        """Of weights, activations and the KV cache."""
        self.table = table
        """The embedding's rows."""
        self._embed = _embedding(spec, table)
        self._first_norm = _norm(spec, weights, kernels, "0.input_norm")
        scratch = MoeScratch(
            limits.step_tokens if spec.moe else 0, spec.hidden_size, table.dtype, table.device
        )
        made = _Made(spec, weights, kernels, limits, scratch, adapt)
        self._layers = [_layer(made, i) for i in range(spec.num_layers)]
        self._final_norm = _norm(spec, weights, kernels, "final_norm")
        self._head: Callable[[Tensor, Tensor], None] = _copy
        if not spec.embeds:
            head = table if spec.tied_head else weights.take("head")
            self._head = kernels.linear(head, None, rows_max=limits.max_samples)
        self.rotary = RotaryWeights(
            _rotary_tables(spec, limits.max_model_len, table.device),
            _head_norms(spec, weights),
            spec.norm_eps,
            spec.num_heads,
            spec.num_kv_heads,
        )
        """The weights that attention needs; runner.py passes it on."""
        self._buffers = _buffers(spec, table, limits.step_tokens)
        self._samples = table.new_empty(2, limits.max_samples, spec.hidden_size)
        self._raw_logits = table.new_empty(limits.max_samples, spec.output_size)
        self.logits = torch.empty(limits.max_samples, spec.output_size, device=table.device)
        """The rows that `forward` writes to, from the first one on."""
        capped = spec.logit_softcap and not spec.embeds
        self._finish = partial(soft_cap_, cap=spec.logit_softcap) if capped else _as_they_are
        self._views: dict[int, _Rows] = {}

    def forward(
        self, token_ids: Tensor, samples: Tensor, attention: Attention, states: Tensor | None = None
    ) -> Tensor:
        """Compute one step; `attention.begin` has been called for it.

        Args:
            token_ids: `[num_tokens]` int64.
            samples: `[num_samples]` int64 indices of the tokens whose logits are wanted.
            attention: where keys and values go.
            states: `[num_tokens, hidden_size]` for what the head would read of every token; None: unwanted.

        Returns:
            `[num_samples, vocab_size]` float32 logits; of a model that embeds, `[num_samples, hidden_size]`.
        """
        rows = self._rows(token_ids.shape[0])
        self._embed(token_ids, rows.residual)
        self._first_norm(rows.residual, rows.normed)
        for i, layer in enumerate(self._layers):
            layer.qkv(rows.normed, rows.qkv)
            attention.store(i, rows.heads, rows.q)
            attention.attend(i, rows.q, rows.attended)
            layer.o(rows.attended.flatten(1), rows.delta)
            layer.join_mlp(rows.residual, rows.delta, rows.normed)
            layer.mlp(rows.normed, rows.inner, rows.delta)
            layer.join_next(rows.residual, rows.delta, rows.normed)
        if states is not None:
            self._final_norm(rows.residual, states)
        return self._sample_logits(rows.residual, samples)

    def head(self, states: Tensor, out: Tensor) -> None:
        """See `StepModel`."""
        raw = self._raw_logits[: len(states)]
        self._head(states, raw)
        out.copy_(raw)

    def _sample_logits(self, residual: Tensor, samples: Tensor) -> Tensor:
        num_samples = samples.shape[0]
        picked, normed = self._samples[0, :num_samples], self._samples[1, :num_samples]
        raw, logits = self._raw_logits[:num_samples], self.logits[:num_samples]
        if num_samples:
            torch.index_select(residual, 0, samples, out=picked)
            self._final_norm(picked, normed)
            self._head(normed, raw)
            logits.copy_(raw)
            self._finish(logits)
        return logits

    def _rows(self, num_tokens: int) -> _Rows:
        rows = self._views.get(num_tokens)
        if rows is None:
            rows = self._views[num_tokens] = _views(self._spec, self._buffers, num_tokens)
        return rows


class _Normed:
    """A join that norms what it adds first."""

    __slots__ = ("_join", "_norm")

    def __init__(self, norm: Norm, join: _Join) -> None:
        self._norm, self._join = norm, join

    def __call__(self, residual: Tensor, x: Tensor, out: Tensor) -> None:
        self._norm(x, x)
        self._join(residual, x, out)


def _only_add(residual: Tensor, x: Tensor, out: Tensor) -> None:
    """The join after the last layer: only the rows that are sampled need the final norm."""
    residual.add_(x)


def _copy(x: Tensor, out: Tensor) -> None:
    """In the place of a head: hidden states are what is wanted."""
    out.copy_(x)


def _as_they_are(logits: Tensor) -> Tensor:
    return logits


def _embedding(spec: DecoderSpec, table: Tensor) -> Embedding:
    return Embedding(table) if spec.embedding_scale == 1.0 else ScaledEmbedding(table, spec.embedding_scale)


def _norm(spec: DecoderSpec, weights: WeightSource, kernels: Kernels, key: str) -> Norm:
    return kernels.norm(_norm_weight(spec, weights, key), spec.norm_eps)


def _norm_weight(spec: DecoderSpec, weights: WeightSource, key: str) -> Tensor:
    weight = weights.take(key)
    # The sum stays in float32: near 1 the checkpoint's type would lose most of what was learned.
    return weight.float() + spec.norm_offset if spec.norm_offset else weight


@dataclass(slots=True, frozen=True)
class _Made:
    """The parts that layers are made from."""

    spec: DecoderSpec
    weights: WeightSource
    kernels: Kernels
    limits: DecoderLimits
    scratch: MoeScratch
    adapt: Adapt | None


def _layer(made: _Made, i: int) -> _Layer:
    spec, weights, kernels, limits = made.spec, made.weights, made.kernels, made.limits

    def linear(key: str, has_bias: bool) -> Linear:
        bias = weights.take(f"{i}.{key}_bias") if has_bias else None
        plain = kernels.linear(weights.take_linear(f"{i}.{key}"), bias, rows_max=limits.step_tokens)
        return plain if made.adapt is None else made.adapt(plain, i, key)

    def linears(key: str) -> Sequence[Linear]:
        count = spec.moe.num_experts if spec.moe is not None else 1
        return kernels.linears(weights.take(f"{i}.{key}"), count=count, rows_max=limits.step_tokens)

    def join(key: str, norm: _Join) -> _Join:
        """The join that norms with `norm`, after the norm named `key` if the family has it."""
        return _Normed(_norm(spec, weights, kernels, key), norm) if spec.sublayer_norms else norm

    gate = kernels.activation()
    if spec.moe is None:
        mlp = DenseMlp(linear("gate_up", spec.mlp_bias), gate, linear("down", spec.mlp_bias))
    else:
        pairs = zip(linears("gate_up"), linears("down"), strict=True)
        experts = [DenseMlp(into, gate, back) for into, back in pairs]
        top_k, normalise = spec.moe.top_k, spec.moe.normalise
        mlp = MoeMlp(linear("router", False), experts, made.scratch, top_k=top_k, normalise=normalise)
    is_last = i + 1 == spec.num_layers
    next_norm = _only_add if is_last else _norm(spec, weights, kernels, f"{i + 1}.input_norm").add
    mlp_norm = _norm(spec, weights, kernels, f"{i}.post_attention_norm").add
    return _Layer(
        qkv=linear("qkv", spec.qkv_bias),
        o=linear("o", spec.o_bias),
        join_mlp=join(f"{i}.attention_out_norm", mlp_norm),
        mlp=mlp,
        join_next=join(f"{i}.mlp_out_norm", next_norm),
    )


def _rotary_tables(spec: DecoderSpec, max_len: int, device: torch.device) -> tuple[RotaryTable, ...]:
    ropes = [spec.layer_rope(i) for i in range(spec.num_layers)]
    tables = {rope: RotaryTable(rope, spec.head_dim, max_len, device) for rope in set(ropes)}
    return tuple(tables[rope] for rope in ropes)


def _head_norms(spec: DecoderSpec, weights: WeightSource) -> tuple[tuple[Tensor, Tensor], ...]:
    if not spec.qk_norm:
        return ()
    return tuple(
        (_norm_weight(spec, weights, f"{i}.q_norm"), _norm_weight(spec, weights, f"{i}.k_norm"))
        for i in range(spec.num_layers)
    )


def _buffers(spec: DecoderSpec, like: Tensor, max_tokens: int) -> dict[str, Tensor]:
    widths = {
        "residual": spec.hidden_size,
        "normed": spec.hidden_size,
        "delta": spec.hidden_size,
        "qkv": spec.q_size + 2 * spec.kv_size,
        "q": spec.q_size,
        "attended": spec.q_size,
        "gate_up": 2 * spec.intermediate_size,
        "gated": spec.intermediate_size,
    }
    return {name: like.new_empty(max_tokens, width) for name, width in widths.items()}


def _views(spec: DecoderSpec, buffers: dict[str, Tensor], num_tokens: int) -> _Rows:
    rows = {name: buffer[:num_tokens] for name, buffer in buffers.items()}
    per_head = (num_tokens, -1, spec.head_dim)
    return _Rows(
        residual=rows["residual"],
        normed=rows["normed"],
        delta=rows["delta"],
        qkv=rows["qkv"],
        heads=rows["qkv"].view(per_head),
        q=rows["q"].view(per_head),
        attended=rows["attended"].view(per_head),
        inner=(rows["gate_up"], rows["gated"]),
    )

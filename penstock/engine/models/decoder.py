"""The one decoder: pre-norm blocks of grouped-query attention and SwiGLU, driven by a `DecoderSpec`.

Owns the order of operations and the activations of one step. It knows nothing about files, blocks, sampling or
the device: weights come from a `WeightSource`, computing from `Kernels`, the KV cache sits behind `Attention`.

    token ids -> embedding -> [norm -> qkv -> (head norm) RoPE -> attention -> o -> +
                               norm -> gate_up -> SwiGLU -> down -> +] x layers -> norm -> head -> logits
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.attention.base import Attention
from penstock.engine.kernels import Activation, Kernels, Norm
from penstock.engine.layers.linear import Linear
from penstock.engine.layers.rotary import RotaryTable, RotaryWeights
from penstock.engine.models.spec import DecoderSpec


class WeightSource(Protocol):
    """Hands out every weight once, by the keys of `models/names.py`."""

    def take(self, key: str) -> Tensor:
        """The weight, which now belongs to the caller."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class DecoderLimits:
    """What buffers are sized for."""

    step_tokens: int
    max_samples: int
    """Rows that get logits in one step at most."""
    max_model_len: int


@dataclass(slots=True, frozen=True)
class _Layer:
    input_norm: Norm
    qkv: Linear
    o: Linear
    post_attention_norm: Norm
    gate_up: Linear
    activation: Activation
    down: Linear


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
    gate_up: Tensor
    gated: Tensor


class Decoder:
    """The model, ready to run steps. Buffers are reused: logits are valid until the next `forward`."""

    def __init__(
        self, spec: DecoderSpec, weights: WeightSource, kernels: Kernels, limits: DecoderLimits
    ) -> None:
        self._spec = spec
        self._embedding = weights.take("embedding")
        self._layers = [_layer(spec, weights, kernels, limits, i) for i in range(spec.num_layers)]
        self._final_norm = kernels.norm(weights.take("final_norm"), spec.norm_eps)
        head = self._embedding if spec.tied_head else weights.take("head")
        self._head = kernels.linear(head, None, rows_max=limits.max_samples)
        self.rotary = RotaryWeights(
            _rotary_tables(spec, limits.max_model_len, self._embedding.device),
            _head_norms(spec, weights),
            spec.norm_eps,
            spec.num_heads,
            spec.num_kv_heads,
        )
        """What attention needs of the weights: whoever wires the engine hands it on."""
        self._buffers = _buffers(spec, self._embedding, limits.step_tokens)
        self._samples = self._embedding.new_empty(2, limits.max_samples, spec.hidden_size)
        self._raw_logits = self._embedding.new_empty(limits.max_samples, spec.vocab_size)
        self._logits = torch.empty(limits.max_samples, spec.vocab_size, device=head.device)
        self._views: dict[int, _Rows] = {}

    def forward(self, token_ids: Tensor, samples: Tensor, attention: Attention) -> Tensor:
        """Compute one step; `attention.begin` has been called for it.

        Args:
            token_ids: `[num_tokens]` int64.
            samples: `[num_samples]` int64 indices of the tokens whose logits are wanted.
            attention: where keys and values go.

        Returns:
            `[num_samples, vocab_size]` float32 logits.
        """
        rows = self._rows(token_ids.shape[0])
        torch.index_select(self._embedding, 0, token_ids, out=rows.residual)
        first = True
        for i, layer in enumerate(self._layers):
            if first:
                layer.input_norm(rows.residual, rows.normed)
                first = False
            else:
                layer.input_norm.add(rows.residual, rows.delta, rows.normed)
            layer.qkv(rows.normed, rows.qkv)
            attention.store(i, rows.heads, rows.q)
            attention.attend(i, rows.q, rows.attended)
            layer.o(rows.attended.flatten(1), rows.delta)
            layer.post_attention_norm.add(rows.residual, rows.delta, rows.normed)
            layer.gate_up(rows.normed, rows.gate_up)
            layer.activation(rows.gate_up, rows.gated)
            layer.down(rows.gated, rows.delta)
        rows.residual.add_(rows.delta)
        return self._sample_logits(rows.residual, samples)

    def _sample_logits(self, residual: Tensor, samples: Tensor) -> Tensor:
        num_samples = samples.shape[0]
        picked, normed = self._samples[0, :num_samples], self._samples[1, :num_samples]
        raw, logits = self._raw_logits[:num_samples], self._logits[:num_samples]
        if num_samples:
            torch.index_select(residual, 0, samples, out=picked)
            self._final_norm(picked, normed)
            self._head(normed, raw)
            logits.copy_(raw)
        return logits

    def _rows(self, num_tokens: int) -> _Rows:
        rows = self._views.get(num_tokens)
        if rows is None:
            rows = self._views[num_tokens] = _views(self._spec, self._buffers, num_tokens)
        return rows


def _layer(
    spec: DecoderSpec, weights: WeightSource, kernels: Kernels, limits: DecoderLimits, i: int
) -> _Layer:
    def linear(key: str, has_bias: bool) -> Linear:
        bias = weights.take(f"{i}.{key}_bias") if has_bias else None
        return kernels.linear(weights.take(f"{i}.{key}"), bias, rows_max=limits.step_tokens)

    return _Layer(
        input_norm=kernels.norm(weights.take(f"{i}.input_norm"), spec.norm_eps),
        qkv=linear("qkv", spec.qkv_bias),
        o=linear("o", spec.o_bias),
        post_attention_norm=kernels.norm(weights.take(f"{i}.post_attention_norm"), spec.norm_eps),
        gate_up=linear("gate_up", spec.mlp_bias),
        activation=kernels.activation(),
        down=linear("down", spec.mlp_bias),
    )


def _rotary_tables(spec: DecoderSpec, max_len: int, device: torch.device) -> tuple[RotaryTable, ...]:
    return (RotaryTable(spec.rope, spec.head_dim, max_len, device),) * spec.num_layers


def _head_norms(spec: DecoderSpec, weights: WeightSource) -> tuple[tuple[Tensor, Tensor], ...]:
    if not spec.qk_norm:
        return ()
    return tuple((weights.take(f"{i}.q_norm"), weights.take(f"{i}.k_norm")) for i in range(spec.num_layers))


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
        gate_up=rows["gate_up"],
        gated=rows["gated"],
    )

"""Which checkpoint tensors make which weight of the decoder: names, shapes and how parts are fused.

Pure data about names; `engine/loader.py` reads the files.
"""

from dataclasses import dataclass, field, replace

from penstock.models.spec import DecoderSpec

HEAD_JOIN, HEAD_BIAS = "fc.weight", "fc.bias"
"""Tensors that only a head on a decoder's states has (`head_weights`)."""


@dataclass(slots=True, frozen=True)
class TensorPart:
    """One tensor of the checkpoint and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Weight:
    """One weight of the decoder: its parts stacked along the first dimension, in order."""

    key: str
    parts: tuple[TensorPart, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The stacked shape."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


@dataclass(slots=True, frozen=True)
class CheckpointNames:
    """A family's tensor names. `{i}` is the layer."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{i}."
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    """The three above as one tensor, if the checkpoint has them so."""
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    """The two above as one tensor, gate first."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{e}.gate_proj"
    expert_up: str = "mlp.experts.{e}.up_proj"
    expert_down: str = "mlp.experts.{e}.down_proj"
    """`{e}` is the expert."""
    input_norm: str = "input_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    """Of the residual before the feed-forward layer (some families have another norm by this name)."""
    attention_out_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    ignored_suffixes: tuple[str, ...] = field(default=("rotary_emb.inv_freq",))
    """Tensors that some checkpoints carry and that we compute ourselves."""
    ignored_prefixes: tuple[str, ...] = ()
    """Parts of the checkpoint that are not the decoder."""

    def bare(self) -> "CheckpointNames":
        """The decoder as it was stored without the model around it, whose name its tensors bear no more."""
        prefix = self.embedding.removesuffix("embed_tokens.weight")
        assert self.layer.startswith(prefix), "all of a decoder bears one name"
        return replace(
            self,
            embedding=self.embedding.removeprefix(prefix),
            final_norm=self.final_norm.removeprefix(prefix),
            layer=self.layer.removeprefix(prefix),
        )

    def within(self, prefix: str, *, beside: tuple[str, ...]) -> "CheckpointNames":
        """The same decoder as one part of a larger checkpoint, whose parts `beside` it are not read."""
        return replace(
            self,
            embedding=prefix + self.embedding,
            final_norm=prefix + self.final_norm,
            head=prefix + self.head,
            layer=prefix + self.layer,
            ignored_prefixes=beside,
        )


def decoder_weights(spec: DecoderSpec, names: CheckpointNames) -> list[Weight]:
    """Every weight of the decoder, in the order in which it is built."""
    table = (spec.vocab_size, spec.hidden_size)
    weights = [Weight("embedding", (TensorPart(names.embedding, table),))]
    for i in range(spec.num_layers):
        weights += _layer_weights(spec, names, i)
    weights.append(Weight("final_norm", (TensorPart(names.final_norm, (spec.hidden_size,)),)))
    if not spec.tied_head and not spec.embeds:
        weights.append(Weight("head", (TensorPart(names.head, table),)))
    return weights


def head_weights(spec: DecoderSpec, names: CheckpointNames, *, table: bool, bias: bool) -> list[Weight]:
    """Those of a head that guesses from a decoder's states, as EAGLE publishes them: one layer, without the
    norm before it, and what joins a state and an embedding.

    Args:
        spec: of the layer.
        names: of its tensors.
        table: it has an embedding of its own.
        bias: what joins the two has one.
    """
    hidden = spec.hidden_size
    weights = [Weight("fc", (TensorPart(HEAD_JOIN, (hidden, 2 * hidden)),))]
    if bias:
        weights.append(Weight("fc_bias", (TensorPart(HEAD_BIAS, (hidden,)),)))
    if table:
        weights.append(Weight("embedding", (TensorPart(names.embedding, (spec.vocab_size, hidden)),)))
    return weights + [each for each in _layer_weights(spec, names, 0) if each.key != "0.input_norm"]


def _layer_weights(spec: DecoderSpec, names: CheckpointNames, i: int) -> list[Weight]:
    prefix, hidden, inner = names.layer.format(i=i), spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.q_size, spec.kv_size
    qkv = [(names.q, q_size), (names.k, kv_size), (names.v, kv_size)]
    if names.qkv is not None:
        qkv = [(names.qkv, q_size + 2 * kv_size)]
    gate_up, down = _mlp_rows(spec, names)

    def weight(key: str, *parts: tuple[str, tuple[int, ...]], suffix: str = ".weight") -> Weight:
        return Weight(f"{i}.{key}", tuple(TensorPart(prefix + name + suffix, shape) for name, shape in parts))

    weights = [
        weight("input_norm", (names.input_norm, (hidden,))),
        weight("qkv", *((name, (rows, hidden)) for name, rows in qkv)),
        weight("o", (names.o, (hidden, q_size))),
        weight("post_attention_norm", (names.post_attention_norm, (hidden,))),
        weight("gate_up", *((name, (rows, hidden)) for name, rows in gate_up)),
        weight("down", *((name, (rows, inner)) for name, rows in down)),
    ]
    if spec.moe is not None:
        weights.append(weight("router", (names.router, (spec.moe.num_experts, hidden))))
    if spec.sublayer_norms:
        weights.append(weight("attention_out_norm", (names.attention_out_norm, (hidden,))))
        weights.append(weight("mlp_out_norm", (names.mlp_out_norm, (hidden,))))
    if spec.qk_norm:
        weights.append(weight("q_norm", (names.q_norm, (spec.head_dim,))))
        weights.append(weight("k_norm", (names.k_norm, (spec.head_dim,))))
    if spec.qkv_bias:
        weights.append(weight("qkv_bias", *((name, (rows,)) for name, rows in qkv), suffix=".bias"))
    if spec.o_bias:
        weights.append(weight("o_bias", (names.o, (hidden,)), suffix=".bias"))
    if spec.mlp_bias:
        weights.append(weight("gate_up_bias", *((name, (rows,)) for name, rows in gate_up), suffix=".bias"))
        weights.append(weight("down_bias", (names.down, (hidden,)), suffix=".bias"))
    return weights


def _mlp_rows(
    spec: DecoderSpec, names: CheckpointNames
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Names and rows of the parts of gate and up, and of down; experts one after the other."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    if spec.moe is not None:
        numbers = range(spec.moe.num_experts)
        gates = [(names.expert_gate.format(e=e), names.expert_up.format(e=e)) for e in numbers]
        return [(name, inner) for pair in gates for name in pair], [
            (names.expert_down.format(e=e), hidden) for e in numbers
        ]
    if names.gate_up is not None:
        return [(names.gate_up, 2 * inner)], [(names.down, hidden)]
    return [(names.gate, inner), (names.up, inner)], [(names.down, hidden)]

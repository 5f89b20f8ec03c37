"""The memory that a decoder takes, before a weight of it is read: shapes and widths, nothing of a device."""

from penstock.engine.decoder import DecoderLimits
from penstock.engine.quantized import KEPT_GROUPS
from penstock.models.spec import DecoderSpec


def beside_bytes(spec: DecoderSpec, limits: DecoderLimits, *, itemsize: int, native: bool) -> int:
    """What a decoder holds beside its weights as they are read: tables of the rotation, a step's logits, and
    what the native kernels widen to float32.
    """
    max_len, logits = limits.max_model_len, limits.max_samples * spec.output_size * 4
    kinds = len({spec.layer_rope(layer) for layer in range(spec.num_layers)})
    rotation = kinds * max_len * spec.head_dim * (4 if native else 8)
    if not native:  # A head that is the table too is kept in another order beside it.
        logits += limits.max_samples * spec.output_size * itemsize
        tied = spec.tied_head and not spec.embeds
        return rotation + logits + tied * spec.vocab_size * spec.hidden_size * itemsize
    outputs = (spec.q_size + 2 * spec.kv_size) * spec.qkv_bias + spec.hidden_size * spec.o_bias
    outputs += (2 * spec.intermediate_size + spec.hidden_size) * spec.mlp_bias
    norms = spec.hidden_size * (4 if spec.sublayer_norms else 2) + 2 * spec.head_dim * spec.qk_norm
    widened = spec.num_layers * (outputs + norms) + spec.hidden_size
    return rotation + logits + widened * (4 - itemsize)


def rounded_bytes(spec: DecoderSpec, num_bytes: int, *, itemsize: int, bits: int, int8_head: bool) -> int:
    """Memory of dense weights that take `num_bytes`, when they are rounded while they are loaded.

    Args:
        spec: of the model.
        num_bytes: of all weights as they are read.
        itemsize: bytes of a weight as it is read.
        bits: 8 or 4, of the layers' weights.
        int8_head: the head is rounded to eight bits; the table that tokens are looked up in never is.
    """
    inner, experts = spec.intermediate_size, 1 if spec.moe is None else spec.moe.num_experts
    shapes = [(spec.q_size + 2 * spec.kv_size, spec.hidden_size), (spec.hidden_size, spec.q_size)]
    shapes += [(2 * inner, spec.hidden_size), (spec.hidden_size, inner)] * experts
    for n, k in shapes:
        group = next((group for group in KEPT_GROUPS if k % group == 0), KEPT_GROUPS[-1])
        kept = n * k + 8 * n if bits == 8 else n * k // 2 + 4 * n * -(-k // group)
        num_bytes += spec.num_layers * (kept - n * k * itemsize)
    if int8_head and not spec.embeds:
        table = spec.vocab_size * spec.hidden_size
        num_bytes += table + 8 * spec.vocab_size - (0 if spec.tied_head else table * itemsize)
    return num_bytes

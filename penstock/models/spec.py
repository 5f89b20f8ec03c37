"""A decoder, as data: one frozen spec that every family maps its `config.json` to.

Knows nothing about files, tensors or where the decoder runs.
"""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
ActivationKind = Literal["silu", "gelu_tanh"]


ROUNDED_EXTRA_BYTES = 4
"""Behind every head of a KV cache that is rounded to int8: its scale, a float32."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and how it was stretched."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    """How many times longer than trained the context became (linear, llama3 and yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    """Context of the pretraining, which tells long wavelengths from short ones (llama3, yarn, longrope)."""
    partial: float = 1.0
    """Share of each head's dimensions that turns; the rest stays."""
    attention_factor: float = 1.0
    """Factor of rotated queries and keys (yarn and longrope)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Turns within the original context above which yarn keeps a wave, and below which it slows it in
    full."""
    truncate: bool = True
    """Yarn's ramp begins and ends at whole dimensions."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """Longrope's factors, one per pair of dimensions, within and beyond the original context."""

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.partial)


@dataclass(slots=True, frozen=True, kw_only=True)
class AttentionSpec:
    """How scores become weights. Plain causal attention is the default.

    A window only masks: keys and values that left it stay in the cache, since other layers and the prefix
    cache may still want their block.
    """

    scale: float | None = None
    """Factor of the scores; None: `head_dim ** -0.5`."""
    softcap: float = 0.0
    """Scores s become `softcap * tanh(s / softcap)` before they are masked; 0: they stay."""
    windows: tuple[int, ...] = ()
    """Per layer how many positions a query sees, its own included; 0: all. Empty: no layer has a window."""

    def window(self, layer: int) -> int:
        """The window of one layer; 0: none."""
        return self.windows[layer] if self.windows else 0


@dataclass(slots=True, frozen=True, kw_only=True)
class MoeSpec:
    """A mixture of experts in place of the feed-forward layer, in every layer."""

    num_experts: int
    top_k: int
    """Experts that compute each token."""
    normalise: bool
    """The chosen experts' shares are scaled to sum to one."""


@dataclass(slots=True, frozen=True, kw_only=True)
class DecoderSpec:
    """The shape of a dense pre-norm decoder: RMSNorm, RoPE, grouped-query attention, a gated feed-forward
    layer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the feed-forward layer, or of each expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Tokens of the longest context the model was made for."""
    norm_eps: float
    rope: RopeSpec
    attention: AttentionSpec = AttentionSpec()
    local_rope: RopeSpec | None = None
    """How windowed layers turn, if not as `rope` says (Gemma 3)."""
    moe: MoeSpec | None = None
    activation: ActivationKind = "silu"
    """Of the gate: SwiGLU, or GeGLU with the tanh approximation (Gemma)."""
    norm_offset: float = 0.0
    """Added to every norm's weight (Gemma: 1)."""
    sublayer_norms: bool = False
    """RMSNorm over what attention and feed-forward layers give, before it is added to the residual (Gemma
    2)."""
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    """Logits become `cap * tanh(logits / cap)`; 0: they stay."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over every query and key head before the rotation (Qwen3)."""
    tied_head: bool = False
    """The output projection is the embedding table."""
    embeds: bool = False
    """It gives hidden states, behind the last norm, and no logits: there is no output projection."""

    def layer_rope(self, layer: int) -> RopeSpec:
        """How one layer turns."""
        if self.local_rope is not None and self.attention.window(layer):
            return self.local_rope
        return self.rope

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Numbers that it gives of a token: a logit for each word, or the hidden state."""
        return self.hidden_size if self.embeds else self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; a tied head counts once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = hidden * (self.q_size + 2 * self.kv_size) + self.q_size * hidden
        attention += (self.q_size + 2 * self.kv_size) * self.qkv_bias + hidden * self.o_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * hidden * inner + (2 * inner + hidden) * self.mlp_bias
        if self.moe is not None:
            mlp = self.moe.num_experts * (mlp + hidden)
        norms = hidden * (4 if self.sublayer_norms else 2)
        embeddings = self.vocab_size * hidden * (1 if self.tied_head or self.embeds else 2)
        return embeddings + hidden + self.num_layers * (attention + mlp + norms)

    def kv_bytes_per_token(self, bytes_per_value: int, *, rounded: bool = False) -> int:
        """Bytes that one token occupies in the KV cache, over all layers; rounded: as int8."""
        head = self.head_dim + ROUNDED_EXTRA_BYTES if rounded else self.head_dim * bytes_per_value
        return self.num_layers * 2 * self.num_kv_heads * head

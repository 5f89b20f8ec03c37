"""The training model: a compact decoder with exactly the mathematics of `Qwen3ForCausalLM`.

Parameter names equal the Hugging Face names, so an exported state dict loads in `transformers` and in the
engine unchanged. This file knows nothing about data, optimisers or files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLAIN_ATTENTION_LENGTH = 256
HEAD_ROWS = 512


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one Qwen3-style decoder; field names are those of `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def to_hf(self, *, eos_token_id: int, pad_token_id: int) -> dict[str, object]:
        """The content of `config.json` for this shape."""
        fixed: dict[str, object] = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }
        return dict(sorted((fixed | asdict(self)).items()))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich, 2019), computed in float32 like Qwen3's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rope_tables(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles (Su et al., 2021), each `[length, head_dim]`, float32."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    inverse = 1.0 / (config.rope_theta ** (half / config.head_dim))
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of `x` `[batch, heads, length, head_dim]` by its position's angles."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention: `q` is `[batch, heads, length, head_dim]`; `k` and `v` have fewer heads.

    `mask` `[batch, 1, length, length]` is true where a query may look. On a CPU the fused kernel's backward
    pass is slow for short sequences, so those multiply plainly.
    """
    if q.device.type != "cpu" or q.shape[2] > PLAIN_ATTENTION_LENGTH:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(2, 3)).float() * q.shape[3] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v


def causal_mask(documents: Tensor) -> Tensor:
    """Look only back, and only within one's own document: `[batch, length]` ids to
    `[batch, 1, length, length]`.

    Rotary positions are relative, so a document's place in its row makes no difference.
    """
    length = documents.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & past)[:, None]


class Attention(nn.Module):
    """Causal grouped-query attention with RMS-normalised queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        mixed = attend(q, k, v, mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """The gated feed-forward block (SwiGLU; Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: everything but the output head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


def padded_indices(weights: Tensor) -> Tensor:
    """Where `weights` `[n]` is not zero, filled up with a place of weight 0 to a multiple of `HEAD_ROWS`.

    Every new shape costs the matrix library a fresh kernel and its memory, so there should be few.
    """
    chosen = weights.nonzero().flatten()
    missing = -len(chosen) % HEAD_ROWS
    return torch.cat([chosen, torch.full((missing,), len(weights) - 1, device=weights.device)])


class CausalLM(nn.Module):
    """The whole model; the output head is the transposed embedding (tied)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)

    def hidden(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """Final hidden states `[batch, length, hidden_size]` of `tokens` `[batch, length]`."""
        x = self.model.embed_tokens(tokens)
        cos, sin = rope_tables(self.config, tokens.shape[1], tokens.device)
        if torch.is_autocast_enabled(tokens.device.type):
            x, cos, sin = (t.to(torch.bfloat16) for t in (x, cos, sin))
        return self.model(x, cos, sin, causal_mask(documents))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, length, vocab_size]`; every row is one document."""
        return F.linear(self.hidden(tokens, torch.zeros_like(tokens)), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, weights: Tensor, documents: Tensor) -> Tensor:
        """Sum of the next-token cross-entropies, each times its weight.

        All are `[batch, length]`; `weights[:, i]` belongs to the prediction *of* token `i`, and is 0 where a
        document begins. Logits are made only where the weight is not zero: prompts cost nothing in the head.
        """
        scale = F.pad(weights[:, 1:], (0, 1)).flatten()
        chosen = padded_indices(scale)
        states = self.hidden(tokens, documents).flatten(0, 1)[chosen]
        logits = F.linear(states, self.model.embed_tokens.weight).float()
        targets = F.pad(tokens[:, 1:], (0, 1)).flatten()
        each = F.cross_entropy(logits, targets[chosen], reduction="none")
        return (each * scale[chosen]).sum()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights: scaled normal matrices, and small output projections for a quiet start."""
        depth = (2 * self.config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            scale = 0.02 if "embed" in name else weight.shape[1] ** -0.5
            scale *= depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weight.normal_(0.0, scale, generator=generator)

    def num_parameters(self) -> int:
        """How many weights the model has; the tied head counts once."""
        return sum(weight.numel() for weight in self.parameters())


def read_config(text: str) -> ModelConfig:
    """The shape in the text of a `config.json`."""
    known = ModelConfig.__dataclass_fields__
    return ModelConfig(**{name: value for name, value in json.loads(text).items() if name in known})

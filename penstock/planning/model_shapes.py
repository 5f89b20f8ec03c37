"""Shapes of models, as far as they cost time and memory: named ones, and those of a `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.models.config import CONFIG_FILE, positive, read_config_file
from penstock.planning.accelerators import unknown

BYTES_PER_WEIGHT: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1, "int8": 1, "fp4": 0.5, "int4": 0.5}
MAX_MODEL_LEN = 131_072
"""Where a model does not say how long its context is."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward layer, maybe of experts."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the feed-forward layer, or of each expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    top_k: int = 0
    tied_head: bool = False
    max_model_len: int = MAX_MODEL_LEN

    @property
    def attention_parameters(self) -> int:
        """Of all layers' attention: queries, keys, values and output."""
        return self.num_layers * self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one expert in every layer; of the whole feed-forward part where there are no experts."""
        return self.num_layers * 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Of the output projection."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights (norms and router aside, which are less than a thousandth)."""
        embeddings = self.head_parameters * (1 if self.tied_head else 2)
        return embeddings + self.attention_parameters + self.expert_parameters * max(1, self.num_experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with, the output projection aside."""
        return self.attention_parameters + self.expert_parameters * max(1, self.top_k)

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> float:
        """Keys and values of one token over all layers: 2 x layers x KV heads x head size x bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    def touched_experts(self, num_tokens: int) -> float:
        """Experts per layer that `num_tokens` tokens reach, if they choose evenly; 1 where there are no
        experts.
        """
        if not self.num_experts:
            return 1.0
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


def _shape(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, vocab: int,
    *, experts: int = 0, top_k: int = 0, tied: bool = False, length: int = MAX_MODEL_LEN,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name, num_layers=layers, hidden_size=hidden, intermediate_size=inner, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, vocab_size=vocab, num_experts=experts, top_k=top_k,
        tied_head=tied, max_model_len=length,
    )  # fmt: skip


MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _shape("28m", 8, 512, 1088, 8, 4, 64, 16_384, tied=True, length=4096),
        _shape("0.5b", 24, 896, 4864, 14, 2, 64, 151_936, tied=True, length=32_768),  # Qwen2.5-0.5B
        _shape("7b", 32, 4096, 14_336, 32, 8, 128, 32_000, length=32_768),  # Mistral-7B
        _shape("8b", 32, 4096, 14_336, 32, 8, 128, 128_256),  # Llama-3.1-8B
        _shape("13b", 40, 5120, 13_824, 40, 40, 128, 32_000, length=4096),  # Llama-2-13B
        _shape("70b", 80, 8192, 28_672, 64, 8, 128, 128_256),  # Llama-3.1-70B
        _shape("8x7b", 32, 4096, 14_336, 32, 8, 128, 32_000, experts=8, top_k=2, length=32_768),  # Mixtral
        _shape("30b-a3b", 48, 2048, 768, 32, 4, 128, 151_936, experts=128, top_k=8),  # Qwen3-30B-A3B
    )
}


def model_shape(name: str) -> ModelShape:
    """The shape of a known name, or of the `config.json` at (or in the directory) `name`.

    Raises:
        ConfigError: it is neither; the message has the nearest name.
        CheckpointError: the file is not a decoder's configuration.
    """
    if (found := MODELS.get(name.lower())) is not None:
        return found
    path = Path(name).expanduser()
    path = path / CONFIG_FILE if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        return shape_of_config(path)
    raise ConfigError(f"model: {unknown(name, MODELS)} (or give a directory with a config.json)")


def shape_of_config(path: Path) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes.

    Raises:
        CheckpointError: it cannot be read, or a number is missing or absurd.
    """
    whole = read_config_file(path)
    config = whole.text_config or whole
    num_experts = config.num_local_experts or config.num_experts or 0
    num_heads = positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    intermediate_size = (config.moe_intermediate_size if num_experts else None) or positive(
        config, "intermediate_size"
    )
    return ModelShape(
        name=path.parent.name,
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads or num_heads,
        head_dim=config.head_dim or hidden_size // num_heads,
        vocab_size=positive(config, "vocab_size"),
        num_experts=num_experts,
        top_k=(config.num_experts_per_tok or 1) if num_experts else 0,
        tied_head=bool(config.tie_word_embeddings),
        max_model_len=config.max_position_embeddings or MAX_MODEL_LEN,
    )

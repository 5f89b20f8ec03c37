"""A low-rank adapter (LoRA, Hu et al. 2021, arXiv 2106.09685) in PEFT's format: its `adapter_config.json` as
data, and which tensors of it change which linear of the decoder.

    y += scale * (x A^T) B^T        scale = alpha / rank, or alpha / sqrt(rank) if it is rank-stabilised
                                    (Kalajdzievski 2023, arXiv 2312.03732)

Pure; `engine/adapters/` reads the tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from penstock.errors import CheckpointError
from penstock.models.names import CheckpointNames
from penstock.models.spec import DecoderSpec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
RANK_MAX = 128
CONFIG_BYTES_MAX = 1 << 20
FILE_BYTES_MAX = 4 << 30
NAME_CHARS_MAX = 256
_PATTERNS_MAX = 4096
_ALPHA_MAX = 1e6

Fused = Literal["qkv", "o", "gate_up", "down"]
"""The decoder's linears that adapters may change; as in `models/names.py`."""
FUSED: tuple[Fused, ...] = ("qkv", "o", "gate_up", "down")

_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "lora_bias": "biases of its own (lora_bias)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "layer_replication": "replicated layers (layer_replication)",
    "target_parameters": "bare parameters (target_parameters)",
    "trainable_token_indices": "embeddings (trainable_token_indices)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QA-LoRA",
    "megatron_config": "Megatron's layers (megatron_config)",
}
"""Fields that must be empty or false, and what they would mean."""
_INITS_WITH_ANOTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_PLAIN_PATH = re.compile(r"[\w.]+")


class _Config(msgspec.Struct):
    """The fields of `adapter_config.json` that are read."""

    peft_type: str = ""
    r: int = 0
    lora_alpha: float = 0
    use_rslora: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    init_lora_weights: bool | str | None = True
    base_model_name_or_path: str | None = None


@dataclass(slots=True, frozen=True)
class AdapterConfig:
    """An adapter's description of itself."""

    rank: int
    alpha: float
    is_stabilised: bool
    has_ranks: bool
    """Some modules have a rank of their own: that of their tensors."""
    alphas: tuple[tuple[str, float], ...]
    """Modules, by the end of their path, with an alpha of their own; the first that fits counts."""
    base: str
    """The base model, in the words of its trainer."""

    def scale(self, module: str, rank: int) -> float:
        """The factor of one module's product."""
        fits = (alpha for path, alpha in self.alphas if module == path or module.endswith("." + path))
        alpha = next(fits, self.alpha)
        return alpha / (rank**0.5 if self.is_stabilised else rank)


def read_adapter_config(given: bytes, where: str) -> AdapterConfig:
    """An `adapter_config.json`; `where` names the file in messages.

    Raises:
        CheckpointError: it is none, or asks for what is not done here, by name.
    """
    try:
        raw = msgspec.json.decode(given)
        config = msgspec.convert(raw, _Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not the configuration of a PEFT adapter: {error}") from error
    fields = cast(Mapping[str, Any], raw)
    if config.peft_type != "LORA":
        raise CheckpointError(f"{where}: peft_type is {config.peft_type[:64]!r}, expected 'LORA'")
    for field, words in _REFUSED.items():
        if fields.get(field):
            raise CheckpointError(f"{where}: {field} is set: adapters with {words} are not supported")
    if config.bias != "none":
        raise CheckpointError(f"{where}: bias is {config.bias[:64]!r}, expected 'none'")
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(_INITS_WITH_ANOTHER_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights is {init[:64]!r}, which changes the base model too: convert it to a "
            "plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    if not 1 <= config.r <= RANK_MAX:
        raise CheckpointError(f"{where}: r is {config.r}, expected 1 to {RANK_MAX}")
    for name, alpha in (("lora_alpha", config.lora_alpha), *config.alpha_pattern.items()):
        if not 0 < alpha <= _ALPHA_MAX:
            raise CheckpointError(
                f"{where}: {name[:64]} is {alpha:g}, expected more than 0 and at most {_ALPHA_MAX:g}"
            )
    if len(config.alpha_pattern) > _PATTERNS_MAX:
        raise CheckpointError(f"{where}: alpha_pattern has more than {_PATTERNS_MAX} entries")
    for path in config.alpha_pattern:
        if not _PLAIN_PATH.fullmatch(path):
            raise CheckpointError(
                f"{where}: alpha_pattern has {path[:64]!r}, expected the end of a module's path and no other "
                "regular expression"
            )
    return AdapterConfig(
        rank=config.r,
        alpha=config.lora_alpha,
        is_stabilised=config.use_rslora,
        has_ranks=bool(config.rank_pattern),
        alphas=tuple(config.alpha_pattern.items()),
        base=(config.base_model_name_or_path or "")[:NAME_CHARS_MAX],
    )


@dataclass(slots=True, frozen=True)
class AdapterTarget:
    """A module of the checkpoint, as rows of one of the decoder's fused linears."""

    fused: Fused
    first: int
    """Of the fused linear's outputs, the first one that is the module's."""
    num_outputs: int
    num_inputs: int


def adapter_targets(spec: DecoderSpec, names: CheckpointNames) -> dict[str, AdapterTarget]:
    """The modules of a layer that adapters may change, by their path within it.

    Experts and what chooses them are not among them.
    """
    hidden, inner, q_size, kv_size = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    found = {names.o: AdapterTarget("o", 0, hidden, q_size)}
    if names.qkv is not None:
        found[names.qkv] = AdapterTarget("qkv", 0, q_size + 2 * kv_size, hidden)
    else:
        found[names.q] = AdapterTarget("qkv", 0, q_size, hidden)
        found[names.k] = AdapterTarget("qkv", q_size, kv_size, hidden)
        found[names.v] = AdapterTarget("qkv", q_size + kv_size, kv_size, hidden)
    if spec.moe is not None:
        return found
    found[names.down] = AdapterTarget("down", 0, hidden, inner)
    if names.gate_up is not None:
        found[names.gate_up] = AdapterTarget("gate_up", 0, 2 * inner, hidden)
    else:
        found[names.gate] = AdapterTarget("gate_up", 0, inner, hidden)
        found[names.up] = AdapterTarget("gate_up", inner, inner, hidden)
    return found


_TENSOR = re.compile(
    r"base_model\.model\.(?P<root>[\w.]*?)layers\.(?P<layer>\d{1,5})\.(?P<module>[\w.]+)"
    r"\.lora_(?P<side>[AB])\.weight"
)
_ROOTS = ("", "model.", "language_model.model.", "model.language_model.", "language_model.")
"""The prefixes before the decoder's layers: in it alone, and where it is a part of a larger model."""


@dataclass(slots=True, frozen=True)
class TensorName:
    """The place that a tensor of an adapter belongs to."""

    layer: int
    module: str
    side: Literal["A", "B"]


def parse_tensor_name(name: str) -> TensorName | None:
    """The meaning of PEFT's name of a tensor; None if it is nothing that a decoder's linear has."""
    found = _TENSOR.fullmatch(name) if len(name) <= NAME_CHARS_MAX else None
    if found is None or found["root"] not in _ROOTS:
        return None
    return TensorName(int(found["layer"]), found["module"], "A" if found["side"] == "A" else "B")

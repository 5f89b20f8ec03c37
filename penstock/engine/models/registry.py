"""The families that can be served, by the architecture name in `config.json`.

To add one: write `models/<family>.py` with a function from `HfConfig` to `DecoderSpec`, and name it here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.models.config import CONFIG_FILE, HfConfig, read_config
from penstock.engine.models.llama import llama_spec
from penstock.engine.models.mistral import mistral_spec
from penstock.engine.models.names import CheckpointNames
from penstock.engine.models.phi3 import PHI3_NAMES, phi3_spec
from penstock.engine.models.qwen2 import qwen2_spec
from penstock.engine.models.qwen3 import qwen3_spec
from penstock.engine.models.spec import DecoderSpec
from penstock.errors import CheckpointError


@dataclass(slots=True, frozen=True)
class Family:
    """How to read one family's configuration, and what its tensors are called."""

    spec: Callable[[HfConfig], DecoderSpec]
    names: CheckpointNames = CheckpointNames()  # noqa: RUF009  (frozen)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama_spec),
    "MistralForCausalLM": Family(mistral_spec),
    "Phi3ForCausalLM": Family(phi3_spec, PHI3_NAMES),
    "Qwen2ForCausalLM": Family(qwen2_spec),
    "Qwen3ForCausalLM": Family(qwen3_spec),
}


def read_spec(directory: Path) -> tuple[DecoderSpec, CheckpointNames]:
    """The decoder in a model directory, and the names of its tensors.

    Raises:
        CheckpointError: no config, an unknown architecture, or a setting that is not supported.
    """
    config = read_config(directory)
    path = directory / CONFIG_FILE
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unnamed")
        raise CheckpointError(
            f"{path}: quantization_config ({method}) is not supported; expected plain weights"
        )
    architectures = config.architectures or []
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if family is None:
        given = ", ".join(architectures) or "none"
        raise CheckpointError(
            f"{path}: architecture {given} is not supported; expected one of {', '.join(FAMILIES)}"
        )
    if config.hidden_act != "silu":
        raise CheckpointError(f"{path}: hidden_act {config.hidden_act!r} is not supported; expected 'silu'")
    return family.spec(config), family.names

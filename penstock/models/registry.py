"""The checkpoints that can be served: families by the architecture name in `config.json`, and weights by
their form. Others are refused by name, with what to do, before anything starts.

To add a family: write `models/families/<family>.py` with a function from `HfConfig` to `DecoderSpec`, and
name it here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config.checkpoints import BY_VLLM, WEIGHTS, first_match, path_of, weight_files
from penstock.config.tree import ModelConfig
from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig
from penstock.models.families.gemma import GEMMA_ACTIVATION, GEMMA_NAMES, gemma2_spec, gemma3_spec
from penstock.models.families.llama import llama_spec
from penstock.models.families.mistral import MIXTRAL_NAMES, mistral_spec, mixtral_spec
from penstock.models.families.multimodal import (
    GEMMA3_TEXT_NAMES,
    MISTRAL3_TEXT_NAMES,
    gemma3_text_spec,
    mistral3_text_spec,
)
from penstock.models.families.phi3 import PHI3_NAMES, phi3_spec
from penstock.models.families.qwen import qwen2_spec, qwen3_moe_spec, qwen3_spec
from penstock.models.files import is_gguf, read_config
from penstock.models.gguf_config import gguf_config, gguf_has_biases, gguf_names, gguf_quantization, read_gguf
from penstock.models.names import CheckpointNames
from penstock.models.quantization import Quantization, find_quantization, read_quantization
from penstock.models.spec import DecoderSpec
from penstock.models.vectors import PoolingSpec, read_pooling


@dataclass(slots=True, frozen=True)
class Family:
    """How to read one family's configuration, and what its tensors are called."""

    spec: Callable[[HfConfig], DecoderSpec]
    names: CheckpointNames = CheckpointNames()  # noqa: RUF009  (frozen)
    activation: str = "silu"
    """The required `hidden_act`."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama_spec),
    "Gemma2ForCausalLM": Family(gemma2_spec, GEMMA_NAMES, GEMMA_ACTIVATION),
    "Gemma3ForCausalLM": Family(gemma3_spec, GEMMA_NAMES, GEMMA_ACTIVATION),
    "Gemma3ForConditionalGeneration": Family(gemma3_text_spec, GEMMA3_TEXT_NAMES, GEMMA_ACTIVATION),
    "MistralForCausalLM": Family(mistral_spec),
    "Mistral3ForConditionalGeneration": Family(mistral3_text_spec, MISTRAL3_TEXT_NAMES),
    "MixtralForCausalLM": Family(mixtral_spec, MIXTRAL_NAMES),
    "Phi3ForCausalLM": Family(phi3_spec, PHI3_NAMES),
    "Qwen2ForCausalLM": Family(qwen2_spec),
    "Qwen3ForCausalLM": Family(qwen3_spec),
    "Qwen3MoeForCausalLM": Family(qwen3_moe_spec),
}
BARE: dict[str, str] = {
    "LlamaModel": "LlamaForCausalLM",
    "Gemma2Model": "Gemma2ForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "MixtralModel": "MixtralForCausalLM",
    "Phi3Model": "Phi3ForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
    "Qwen3MoeModel": "Qwen3MoeForCausalLM",
}
"""Decoders without an output projection, and the family that each is of: they give vectors."""


def stored_pooling(directory: Path) -> PoolingSpec | None:
    """How the decoder in a model directory makes vectors of texts; None: it generates text.

    Raises:
        CheckpointError: no config, or a way that is not supported.
    """
    if is_gguf(directory):
        return None
    config = read_config(directory)
    is_bare = any(name in BARE for name in config.architectures or ())
    return read_pooling(directory, config, bare="last" if is_bare else None)


def stored_quantization(directory: Path) -> Quantization | None:
    """How a checkpoint's linear layers are quantized, most of them; None: they are dense.

    Raises:
        CheckpointError: no config, or a method or width that is not read.
    """
    if is_gguf(directory):
        return gguf_quantization(read_gguf(directory))
    read_config(directory)
    found = find_quantization(directory)
    return None if found is None else read_quantization(found[0], str(found[1]))


def read_spec(directory: Path) -> tuple[DecoderSpec, CheckpointNames]:
    """The decoder in a model directory or GGUF file, and the names of its tensors.

    Raises:
        CheckpointError: no config, an unknown architecture, or a setting that is not supported.
    """
    if is_gguf(directory):
        return _read_gguf_spec(directory)
    config = read_config(directory)
    path = directory / CONFIG_FILE
    architectures = [BARE.get(name, name) for name in config.architectures or []]
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if family is None:
        given = ", ".join(config.architectures or []) or "none"
        raise CheckpointError(
            f"{path}: architecture {given} is not supported; expected one of {', '.join(FAMILIES)}"
        )
    text = config.text_config or config
    activation = text.hidden_activation or text.hidden_act or family.activation
    if activation != family.activation:
        raise CheckpointError(
            f"{path}: hidden_act {activation!r} is not supported; expected {family.activation!r}"
        )
    if text.is_causal is False:
        raise CheckpointError(f"{path}: is_causal is false, which is not supported for {architectures[0]}")
    try:
        spec = family.spec(config)
    except CheckpointError as error:  # It begins with the file's name.
        raise CheckpointError(f"{directory}/{error}") from error
    return replace(spec, embeds=stored_pooling(directory) is not None), family.names


def _read_gguf_spec(path: Path) -> tuple[DecoderSpec, CheckpointNames]:
    gguf, config = read_gguf(path), read_config(path)
    (architecture,) = config.architectures or ("",)
    try:
        spec = FAMILIES[architecture].spec(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: its keys, read as a {CONFIG_FILE}: {error}") from error
    if config.model_type == "llama":  # Families of that name differ in their biases alone.
        qkv, out, inner = gguf_has_biases(gguf)
        spec = replace(spec, qkv_bias=qkv, o_bias=out, mlp_bias=inner)
    return spec, gguf_names(gguf)


def check_loads(directory: Path, *, needs_weights: bool = True) -> None:
    """Refuse weights in a form that our engine does not read.

    Raises:
        CheckpointError: they are quantized in a way that is not read, or neither safetensors nor GGUF.
    """
    if is_gguf(directory):
        gguf_config(read_gguf(directory))
        return
    if (quantized := find_quantization(directory)) is not None:
        try:
            read_quantization(quantized[0], str(quantized[1]))
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; give the model's plain weights, which --quantization int8 or int4 rounds while "
                f"loading, {BY_VLLM}"
            ) from error
    if not needs_weights or weight_files(directory):
        return
    if found := first_match(directory, "pytorch_model*.bin"):
        raise CheckpointError(
            f"{directory}: has its weights in {found}, a pickle, which is not read because loading one runs "
            f"code: convert it with transformers "
            f"(AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(DIRECTORY), and copy "
            f"the "
            "tokenizer's files)"
        )
    if found := first_match(directory, "tf_model*.h5") or first_match(directory, "flax_model*.msgpack"):
        raise CheckpointError(
            f"{directory}: has its weights in {found}, of TensorFlow or Flax: our engine reads *.safetensors"
        )
    for path in sorted(directory.glob("*.safetensors")):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path}: is a link to {path.readlink()}, which is not there; copy a hub's snapshot with its "
                f"blobs"
            )
    raise CheckpointError(f"{directory}: has neither {WEIGHTS[0]} nor {WEIGHTS[1]}")


def check_local_models(models: Iterable[ModelConfig]) -> None:
    """Of every model that this process is to launch and that is here: what can be said before anything
    starts.

    Hub ids and demo models are looked at when they are there.

    Raises:
        CheckpointError: one is something that our engine does not load.
        ConfigError: one is a file of another kind.
    """
    for model in models:
        path = Path(model.path).expanduser()
        if path.is_file() or (model.replicas and path.is_dir()):
            found = path_of(path)
            if model.replicas:
                check_loads(found, needs_weights=model.engine.load_format == "safetensors")

"""What lies in a model's place that our engine cannot load: named for what it is, with what to do, before
anything starts.

Looks at names, at `config.json` and at the first bytes of a file, never at weights. Whether a checkpoint that
passes can be loaded is the engine's to say.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from penstock.config.tree import ModelConfig
from penstock.errors import CheckpointError, ConfigError

GGUF_MAGIC = b"GGUF"
JSON_BYTES_MAX = 16 * 1024 * 1024
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_BY_VLLM = "or let a vLLM worker serve it (`workers`, docs/backends.md)"
_GGUF = (
    "GGUF, llama.cpp's format, which our engine does not read: give the directory with the *.safetensors "
    "that it was made from; --quantization int8 or int4 rounds them while loading"
)
_METHODS = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}


def refuse_file(path: str) -> ConfigError:
    """The error for a model's path that is a file."""
    try:
        with Path(path).open("rb") as file:
            is_gguf = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC or path.lower().endswith(".gguf")
    except OSError:
        is_gguf = False
    if is_gguf:
        return ConfigError(f"{path}: is {_GGUF}")
    return ConfigError(f"{path}: is a file; give the Hugging Face model directory")


def check_is_model(directory: Path) -> None:
    """Refuse a directory that holds something else than a Hugging Face model.

    Raises:
        CheckpointError: it has no `config.json`; the message says what it has.
    """
    if (directory / "adapter_config.json").is_file() and not _has_any(directory, WEIGHTS):
        base = str(
            _json(directory / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        )
        raise CheckpointError(
            f"{directory}: is an adapter (LoRA) of {base[:128]}, not a whole model: merge it into that "
            f"(peft: merge_and_unload, save_pretrained), {_BY_VLLM}"
        )
    if (directory / "config.json").is_file():
        return
    if gguf := _first(directory, "*.gguf"):
        raise CheckpointError(f"{directory}: {gguf} is {_GGUF}")
    if (directory / "params.json").is_file() and _first(directory, "consolidated*"):
        raise CheckpointError(
            f"{directory}: is in the layout of Meta's and Mistral's own tools (params.json); give the "
            f"directory of the same model "
            "in Hugging Face's (config.json, *.safetensors)"
        )
    raise CheckpointError(f"{directory}: no config.json there, so not a Hugging Face model directory")


def check_loads(directory: Path, *, needs_weights: bool = True) -> None:
    """Refuse weights in a form that our engine does not read.

    Raises:
        CheckpointError: they are quantized, or no safetensors.
    """
    config = _json(directory / "config.json")
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method = str(cast(dict[str, Any], quantized).get("quant_method") or "an unnamed method")
        raise CheckpointError(
            f"{directory}: is quantized with {_METHODS.get(method, method[:64])} (quantization_config in "
            f"config.json), which our engine "
            "does not read: give the model's plain weights, which --quantization int8 or int4 rounds while "
            "loading, "
            f"{_BY_VLLM}"
        )
    if not needs_weights or _has_any(directory, WEIGHTS):
        return
    if found := _first(directory, "pytorch_model*.bin"):
        raise CheckpointError(
            f"{directory}: has its weights in {found}, a pickle, which is not read because loading one runs "
            f"code: convert it with transformers "
            f"(AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(DIRECTORY), and copy "
            f"the "
            "tokenizer's files)"
        )
    if found := _first(directory, "*.gguf"):
        raise CheckpointError(f"{directory}: {found} is {_GGUF}")
    if found := _first(directory, "tf_model*.h5") or _first(directory, "flax_model*.msgpack"):
        raise CheckpointError(
            f"{directory}: has its weights in {found}, of TensorFlow or Flax: our engine reads *.safetensors"
        )
    raise CheckpointError(f"{directory}: has neither {WEIGHTS[0]} nor {WEIGHTS[1]}")


def check_local_models(models: Iterable[ModelConfig]) -> None:
    """Of every model that this process is to launch and that is a directory here: what can be said before
    anything starts.

    Hub ids and demo models are looked at when they are there.

    Raises:
        CheckpointError: one is something that our engine does not load.
        ConfigError: one is a file.
    """
    for model in models:
        path = Path(model.path).expanduser()
        if path.is_file():
            raise refuse_file(str(path))
        if model.replicas and path.is_dir():
            check_is_model(path)
            check_loads(path, needs_weights=model.engine.load_format == "safetensors")


def _has_any(directory: Path, names: Iterable[str]) -> bool:
    return any((directory / name).is_file() for name in names)


def _first(directory: Path, pattern: str) -> str:
    """The name of the first file that matches; empty if none does."""
    return min((path.name for path in directory.glob(pattern)), default="")


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where it cannot be read: the tokenizer's and the engine's readers say why,
    and better.
    """
    try:
        with path.open("rb") as file:
            found: object = json.loads(file.read(JSON_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}

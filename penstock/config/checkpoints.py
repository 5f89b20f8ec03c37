"""A model's path that holds no Hugging Face model: named for what it is, with what to do, before anything
starts.

Looks at names, at `config.json` and at the first bytes of a file, never at weights. `models/loadable.py` says
whether the engine reads the weights of one that passes.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from penstock.errors import CheckpointError, ConfigError

GGUF_MAGIC = b"GGUF"
JSON_BYTES_MAX = 16 * 1024 * 1024
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
BY_VLLM = "or let a vLLM worker serve it (`workers`, docs/backends.md)"
GGUF_ADVICE = (
    "GGUF, llama.cpp's format, which our engine does not read: give the directory with the *.safetensors "
    "that it was made from; --quantization int8 or int4 rounds them while loading"
)


def refuse_file(path: str) -> ConfigError:
    """The error for a model's path that is a file."""
    try:
        with Path(path).open("rb") as file:
            is_gguf = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC or path.lower().endswith(".gguf")
    except OSError:
        is_gguf = False
    if is_gguf:
        return ConfigError(f"{path}: is {GGUF_ADVICE}")
    return ConfigError(f"{path}: is a file; give the Hugging Face model directory")


def check_is_model(directory: Path) -> None:
    """Refuse a directory that holds something else than a Hugging Face model.

    Raises:
        CheckpointError: it has no `config.json`; the message says what it has.
    """
    if (directory / "adapter_config.json").is_file() and not has_any(directory, WEIGHTS):
        base = str(
            json_object(directory / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        )
        raise CheckpointError(
            f"{directory}: is an adapter (LoRA) of {base[:128]}, not a whole model: merge it into that "
            f"(peft: merge_and_unload, save_pretrained), {BY_VLLM}"
        )
    if (directory / "config.json").is_file():
        return
    if gguf := first_match(directory, "*.gguf"):
        raise CheckpointError(f"{directory}: {gguf} is {GGUF_ADVICE}")
    if (directory / "params.json").is_file() and first_match(directory, "consolidated*"):
        raise CheckpointError(
            f"{directory}: is in the layout of Meta's and Mistral's own tools (params.json); give the "
            f"directory of the same model "
            "in Hugging Face's (config.json, *.safetensors)"
        )
    raise CheckpointError(f"{directory}: no config.json there, so not a Hugging Face model directory")


def has_any(directory: Path, names: Iterable[str]) -> bool:
    """Whether one of the files is there."""
    return any((directory / name).is_file() for name in names)


def first_match(directory: Path, pattern: str) -> str:
    """The name of the first file that matches; empty if none does."""
    return min((path.name for path in directory.glob(pattern)), default="")


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty where it cannot be read: the tokenizer's and the engine's readers say why,
    and better.
    """
    try:
        with path.open("rb") as file:
            found: object = json.loads(file.read(JSON_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}

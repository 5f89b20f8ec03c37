"""Which weights our engine reads: the others are refused by name, with what to do, before anything starts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from penstock.config.checkpoints import BY_VLLM, WEIGHTS, first_match, has_any, json_object, path_of
from penstock.config.tree import ModelConfig
from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE
from penstock.models.files import is_gguf
from penstock.models.gguf_config import gguf_config, read_gguf
from penstock.models.quantization import read_quantization


def check_loads(directory: Path, *, needs_weights: bool = True) -> None:
    """Refuse weights in a form that our engine does not read.

    Raises:
        CheckpointError: they are quantized in a way that is not read, or neither safetensors nor GGUF.
    """
    if is_gguf(directory):
        gguf_config(read_gguf(directory))
        return
    config = json_object(directory / "config.json")
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        try:
            read_quantization(cast(dict[str, Any], quantized), str(directory / CONFIG_FILE))
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; give the model's plain weights, which --quantization int8 or int4 rounds while "
                f"loading, {BY_VLLM}"
            ) from error
    if not needs_weights or has_any(directory, WEIGHTS):
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

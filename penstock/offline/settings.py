"""The arguments of `LLM(model, ...)`: vLLM's words, and the engine's own settings.

An argument of vLLM that this engine does not have is refused by name where answers or places depend on it. An
argument that only tunes vLLM's own machinery is passed over with a warning, so that a script runs as it
stands.
"""

import difflib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from penstock.config.checkpoints import resolve, served_name
from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import MODEL_LEN_MIN, EngineConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.models.quantization import find_quantization
from penstock.models.registry import check_loads
from penstock.types import ModelName

_SAME = {
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "step_tokens",
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_memory_bytes": "kv_memory_bytes",
    "max_loras": "adapter_slots",
}
"""vLLM's names and ours, where they mean the same."""
_OURS = ("dtype", "device", "max_model_len", *_SAME.values(), "kernels", "threads")
"""The engine's settings that have an argument of their own; `engine_config` takes all of them."""
_ONLY: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "tokenizer_revision": (),
    "runner": ("auto", "generate", "pooling"),
    "task": ("auto", "generate", "embed", "score"),
    "convert": ("auto", "none", "embed"),
    "hf_overrides": ({},),
    "allowed_local_media_path": ("",),
    "cpu_offload_gb": (0,),
    "enable_expert_parallel": (False,),
    "config_format": ("auto",),
}
"""Taken with these values and None, for they ask for nothing."""
_PASSED_OVER = frozenset({
    "gpu_memory_utilization", "swap_space", "enforce_eager", "disable_custom_all_reduce",
    "disable_log_stats", "compilation_config", "max_seq_len_to_capture", "distributed_executor_backend",
    "enable_chunked_prefill", "disable_async_output_proc", "max_logprobs", "max_lora_rank",
    "limit_mm_per_prompt", "mm_processor_kwargs", "block_size", "trust_remote_code", "max_cpu_loras",
    "async_scheduling", "disable_cascade_attn", "enable_log_requests",
})  # fmt: skip
"""Arguments that only tune vLLM. No code of checkpoints is ever run, so trusting it means nothing."""
_SILENT = frozenset(
    {"trust_remote_code", "disable_log_stats", "enforce_eager", "max_lora_rank", "enable_log_requests"}
)
"""Of those, what changes nothing that a user could notice."""
_METHODS = ("ngram", "draft_model", "eagle")
_OF_SPECULATION = frozenset(
    {"num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size"}
)
"""Of `speculative_config`, what says how many tokens are guessed: here as many as pay."""
_STORED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "fp8", "modelopt", "gguf")
_DTYPES = {"float": "float32", "float32": "float32", "bfloat16": "bfloat16", "auto": "auto"}
_LOAD_FORMATS = {"auto": "safetensors", "safetensors": "safetensors", "dummy": "random", "random": "random"}


@dataclass(slots=True, frozen=True, kw_only=True)
class OfflineSettings:
    """The model to run, and the place."""

    directory: Path
    """With the model, or its GGUF file."""
    name: ModelName
    engine: EngineSettings
    seed: int = 0
    """Requests without a seed of their own take theirs from this one, by number."""
    in_process: bool = False
    """The engine computes in a thread of this process, and torch is loaded into it; else in a child."""


def read_settings(model: str, given: Mapping[str, Any]) -> OfflineSettings:
    """The arguments of `LLM`, checked.

    Raises:
        ConfigError: one is unknown, or says what this engine cannot do; the message names it.
        CheckpointError: there is no model, or none that the engine loads.
    """
    # Users may not check types.
    if not isinstance(model, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"model: expected a directory, a hub id or a demo model, got {model!r}")
    left = {name: value for name, value in given.items() if value is not None}
    path = str(model) + (f"@{left.pop('revision')}" if "revision" in left else "")
    if (tokenizer := left.pop("tokenizer", None)) not in (None, model, str(model)):
        raise ConfigError(f"tokenizer: {tokenizer!r} is not the model's own, and no other one is used")
    directory = resolve(path)
    engine = _engine_settings(left, directory)
    seed, in_process = _plain(left, "seed", int, 0), _plain(left, "in_process", bool, False)
    name = _plain(left, "served_model_name", str, "")
    _refuse_rest(left)
    check_loads(directory, needs_weights=engine.load_format == "safetensors")
    return OfflineSettings(
        directory=directory,
        name=ModelName(served_name(ModelConfig(path=path, name=name))),
        engine=engine,
        seed=seed,
        in_process=in_process,
    )


def _engine_settings(left: dict[str, Any], directory: Path) -> EngineSettings:
    """Takes what concerns the engine out of `left`."""
    found: dict[str, Any] = {}
    more: object = left.pop("engine_config", {})
    if not isinstance(more, Mapping):
        raise ConfigError(f"engine_config: expected a mapping, got {type(more).__name__}")
    found |= {str(key): value for key, value in cast(Mapping[object, Any], more).items()}
    if unknown := found.keys() - set(EngineConfig.__struct_fields__):
        raise ConfigError(_unknown(f"engine_config.{min(unknown)}", EngineConfig.__struct_fields__))
    for theirs, ours in _SAME.items():
        if theirs in left:
            found[ours] = left.pop(theirs)
    found |= {name: left.pop(name) for name in _OURS if name in left}
    if (dtype := found.get("dtype")) is not None:
        found["dtype"] = _one_of("dtype", str(dtype).removeprefix("torch."), _DTYPES)
    if "kv_cache_dtype" in left:
        found["kv_dtype"] = _one_of(
            "kv_cache_dtype", left.pop("kv_cache_dtype"), {"auto": "auto", "int8": "int8"}
        )
    if "load_format" in left:
        found["load_format"] = _one_of("load_format", left.pop("load_format"), _LOAD_FORMATS)
    if "quantization" in left:
        found["quantization"] = _quantization(left.pop("quantization"), directory)
    if "speculative_config" in left:
        found["speculation"] = _speculation(left.pop("speculative_config"))
    if left.pop("enable_lora", True) is False:
        found["adapter_slots"] = 0
    # One tenant: no other program wants a part of the cache, and no promise is made.
    found = {"kv_quota_fraction": 1.0, "tpot_target_ms": 0.0} | found
    try:
        config = msgspec.convert(found, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("`", "").replace("$.", "")) from None
    if 0 < config.max_model_len < MODEL_LEN_MIN:
        raise ConfigError(
            f"max_model_len: at least {MODEL_LEN_MIN}, a token of a prompt and one of an answer"
        )
    return EngineSettings.of(config)


def _speculation(given: object) -> str:
    """The proposer that vLLM's `speculative_config` names. The number of guesses follows from what pays."""
    name = "speculative_config"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}: expected a mapping, got {type(given).__name__}")
    left = {str(key): value for key, value in cast(Mapping[object, Any], given).items()}
    model, method = left.pop("model", None), left.pop("method", None)
    if model in ("ngram", "[ngram]"):  # vLLM's older way to say it.
        model, method = None, "ngram"
    if unknown := left.keys() - _OF_SPECULATION:
        raise ConfigError(_unknown(f"{name}.{min(unknown)}", ["method", "model", *sorted(_OF_SPECULATION)]))
    if method not in (None, *_METHODS):
        raise ConfigError(f"{name}.method: {method!r} is not supported: {', '.join(_METHODS)}")
    if method == "ngram":
        return "ngram"
    if not isinstance(model, (str, Path)) or not str(model):
        raise ConfigError(f"{name}.model: expected the model or head that guesses, got {model!r}")
    return str(model)


def _quantization(asked: object, directory: Path) -> str:
    """Rounding while loading, or the name of what the checkpoint has been rounded to already."""
    if asked in ("none", "int8", "int4"):
        return str(asked)
    if asked in _STORED:
        stored = None if directory.is_file() else find_quantization(directory)
        method = "gguf" if directory.is_file() else stored and stored[0].get("quant_method")
        if method == str(asked).removesuffix("_marlin"):
            return "none"
        raise ConfigError(f"quantization: the checkpoint is not {asked} but {method or 'whole'}")
    raise ConfigError(f"quantization: {asked!r} is not supported: none, int8, int4 or {', '.join(_STORED)}")


def _plain(left: dict[str, Any], name: str, kind: Callable[..., Any], default: Any) -> Any:  # noqa: ANN401
    value = left.pop(name, default)
    if type(value) is not kind:
        raise ConfigError(f"{name}: expected {kind.__name__}, got {value!r}")
    return value


def _one_of(name: str, value: object, known: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{name}: {value!r} is not supported: {', '.join(known)}")
    return known[value]


def _refuse_rest(left: dict[str, Any]) -> None:
    passed_over: list[str] = []
    for name, value in left.items():
        if name in _PASSED_OVER:
            if name not in _SILENT:
                passed_over.append(name)
        elif name not in _ONLY:
            known = [
                *_SAME,
                *_OURS,
                *_ONLY,
                *_PASSED_OVER,
                "speculative_config",
                "seed",
                "in_process",
                "quantization",
                "engine_config",
            ]
            raise ConfigError(_unknown(name, known))
        elif value not in _ONLY[name]:
            values = ", ".join(repr(each) for each in (*_ONLY[name], None))
            raise ConfigError(f"{name}: {value!r} is not supported by this engine: {values}")
    if passed_over:
        warnings.warn(f"of no effect here: {', '.join(sorted(passed_over))}", stacklevel=4)


def _unknown(name: str, known: object) -> str:
    assert isinstance(known, (list, tuple)), "names"
    near = difflib.get_close_matches(name.rpartition(".")[2], [str(each) for each in known], n=1)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return f"{name}: no such argument" + (f"; did you mean {near[0]}?" if near else "")

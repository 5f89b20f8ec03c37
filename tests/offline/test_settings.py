"""What `LLM` and `SamplingParams` may be given: vLLM's words, in our engine's settings."""

import subprocess
import sys
from typing import Any

import pytest

from penstock import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from penstock.config.checkpoints import resolve
from penstock.config.tree import EngineConfig
from penstock.errors import CheckpointError, ConfigError, InvalidRequest, PenstockError, Unsupported
from penstock.offline.settings import read_settings

MODEL = "penstock-demo-mini"


def test_the_package_itself_imports_nothing() -> None:
    code = (
        "import sys, penstock; print(sorted(name for name in sys.modules if name.startswith('penstock.')))\n"
        "assert 'LLM' in dir(penstock)\n"
        "from penstock import LLM, AsyncLLM, SamplingParams\n"
        "print('torch' in sys.modules, any(name.startswith('penstock.gateway') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["[]", "False False"]


def test_names_of_vllm_are_our_engines_settings() -> None:
    found = read_settings(MODEL, {
        "max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 128, "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 20, "kv_cache_dtype": "int8", "max_loras": 2, "load_format": "dummy",
        "dtype": "torch.float32", "quantization": None, "seed": 7, "served_model_name": "other",
        "tensor_parallel_size": 1, "tokenizer": MODEL,
        "engine_config": {"step_tokens": 32, "scheduling": "fcfs"},
    })  # fmt: skip
    engine = found.engine.configured
    assert engine == EngineConfig(
        max_running=3, step_tokens=64, max_model_len=128, prefix_cache=False, kv_memory_bytes=1 << 20,
        kv_dtype="int8", adapter_slots=2, load_format="random", dtype="float32", scheduling="fcfs",
        kv_quota_fraction=1.0, tpot_target_ms=0.0,
    )  # fmt: skip
    assert (found.name, found.seed, found.in_process) == ("other", 7, False)
    assert found.directory == resolve(MODEL)


@pytest.mark.parametrize(
    ("given", "speculation"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "ngram"),
        ({"model": "[ngram]", "num_speculative_tokens": 5}, "ngram"),
        ({"model": "some/draft", "num_speculative_tokens": 5}, "some/draft"),
        ({"method": "draft_model", "model": "some/draft"}, "some/draft"),
        ({"method": "eagle", "model": "some/head"}, "some/head"),
    ],
)
def test_who_guesses_may_be_said_as_in_vllm(given: dict[str, Any], speculation: str) -> None:
    assert read_settings(MODEL, {"speculative_config": given}).engine.speculation == speculation


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 is not supported"),
        ({"speculative_config": "ngram"}, "speculative_config: expected a mapping, got str"),
        (
            {"speculative_config": {"method": "medusa"}},
            "speculative_config.method: 'medusa' is not supported",
        ),
        ({"speculative_config": {"method": "eagle"}}, "speculative_config.model: expected the model or head"),
        (
            {"speculative_config": {"methd": "ngram"}},
            "speculative_config.methd: no such argument; did you mean method?",
        ),
        ({"max_modl_len": 3}, "max_modl_len: no such argument; did you mean max_model_len?"),
        ({"max_model_len": 1}, "max_model_len: at least 2"),
        ({"max_model_len": "4k"}, "Expected int, got str - at max_model_len"),
        ({"dtype": "float16"}, "dtype: 'float16' is not supported: float, float32"),
        ({"quantization": "awq"}, "the checkpoint is not awq but whole"),
        ({"quantization": "marlin"}, "'marlin' is not supported"),
        ({"tokenizer": "gpt2"}, "tokenizer: 'gpt2' is not the model's own"),
        ({"engine_config": {"treads": 1}}, "engine_config.treads: no such argument; did you mean threads?"),
        ({"engine_config": 3}, "engine_config: expected a mapping"),
        ({"in_process": "yes"}, "in_process: expected bool"),
        ({"seed": 1.5}, "seed: expected int"),
        ({"runner": "draft"}, "runner: 'draft' is not supported"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings(MODEL, given)
    assert words in str(raised.value)


def test_models_that_are_none(tmp_path) -> None:
    for model, kind in (("no/such", ConfigError), (str(tmp_path), CheckpointError), (3, ConfigError)):
        with pytest.raises(kind):
            read_settings(model, {})  # type: ignore


def test_what_only_tunes_vllm_is_passed_over_with_a_warning() -> None:
    given = {"gpu_memory_utilization": 0.9, "swap_space": 4, "trust_remote_code": True, "enforce_eager": True}
    with pytest.warns(UserWarning, match="of no effect here: gpu_memory_utilization, swap_space$"):
        read_settings(MODEL, given)


def test_a_rounded_checkpoint_may_be_named_for_what_it_is() -> None:
    stored = str(resolve("penstock-demo-mini").with_name("penstock-demo-mini-int4"))
    assert read_settings(stored, {"quantization": "gptq"}).engine.quantization == "none"
    assert read_settings(MODEL, {"quantization": "int8"}).engine.quantization == "int8"


@pytest.mark.parametrize(
    ("given", "kind", "param"),
    [
        ({"n": 0}, InvalidRequest, "n"),
        ({"temperature": -0.1}, InvalidRequest, "temperature"),
        ({"temperature": float("nan")}, InvalidRequest, "temperature"),
        ({"temperature": "hot"}, InvalidRequest, "temperature"),
        ({"top_p": 1.1}, InvalidRequest, "top_p"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, InvalidRequest, "min_tokens"),
        ({"stop": ["a", ""]}, InvalidRequest, "stop"),
        ({"bad_words": [" "]}, InvalidRequest, "bad_words"),
        ({"allowed_token_ids": []}, InvalidRequest, "allowed_token_ids"),
        ({"logprobs": -1}, InvalidRequest, "logprobs"),
        ({"structured_outputs": StructuredOutputsParams()}, InvalidRequest, "structured_outputs"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a", choice=["a"])},
            InvalidRequest,
            "structured_outputs",
        ),
        ({"guided_decoding": GuidedDecodingParams(json="{")}, InvalidRequest, "guided_decoding"),
        ({"structured_outputs": {"regex": "a"}}, InvalidRequest, "structured_outputs"),
        ({"logits_processors": [print]}, Unsupported, "logits_processors"),
        ({"spaces_between_special_tokens": False}, Unsupported, "spaces_between_special_tokens"),
        ({"output_kind": 1}, InvalidRequest, "output_kind"),
    ],
)
def test_sampling_parameters_are_checked_at_once(
    given: dict[str, Any], kind: type[PenstockError], param: str
) -> None:
    with pytest.raises(kind) as raised:
        SamplingParams(**given)
    assert raised.value.param == param  # type: ignore
    assert param in str(raised.value)


def test_parameters_may_be_changed_and_are_checked_again() -> None:
    params = SamplingParams()
    other = params.clone()
    other.top_p = 7
    with pytest.raises(InvalidRequest, match="top_p"):
        other.check()
    params.check()

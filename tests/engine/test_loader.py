"""Checkpoints: those that load, and those that are refused with a message that says what to mend."""

import gc
import json
import os
import struct
import weakref
from pathlib import Path

import pytest
import torch
from engine_driver import tiny_runner
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, PHI3, save, tiny_model

from penstock.engine.loader import load_weights, random_weights
from penstock.errors import CheckpointError
from penstock.models.names import decoder_weights
from penstock.models.registry import check_loads, read_spec
from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.types import RequestId, SamplingParams


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    spec, names = read_spec(path)
    weights = load_weights(path, spec, names, dtype, lambda _done, _total: None)
    keys = ("embedding", "0.qkv", "0.gate_up", "1.o", "2.down", "final_norm")
    return {key: weights.take(key) for key in keys}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tiny_model("qwen3"), tmp_path)


def edit_config(directory: Path, **changes: object) -> None:
    """Change fields; `...` takes one away."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        loaded(directory)
    return str(caught.value)


def test_fused_weights_are_the_parts_stacked(directory: Path) -> None:
    model = tiny_model("qwen3").state_dict()
    attention = "model.layers.0.self_attn."
    qkv = torch.cat([model[f"{attention}{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(loaded(directory)["0.qkv"], qkv)
    assert torch.equal(loaded(directory, torch.bfloat16)["0.qkv"], qkv.bfloat16())


def test_parts_are_those_of_the_checkpoint_and_lie_in_its_file(directory: Path) -> None:
    spec, names = read_spec(directory)
    weights = load_weights(directory, spec, names, torch.float32, lambda _done, _total: None)
    model = tiny_model("qwen3").state_dict()
    parts = weights.take_parts("0.qkv")
    for name, part in zip("qkv", parts, strict=True):
        assert torch.equal(part, model[f"model.layers.0.self_attn.{name}_proj.weight"])
    mapped = Path("/proc/self/maps").read_text().splitlines()
    ranges = [
        line.split()[0].split("-") for line in mapped if line.endswith(str(directory / "model.safetensors"))
    ]
    assert all(any(int(a, 16) <= part.data_ptr() < int(b, 16) for a, b in ranges) for part in parts)
    with pytest.raises(KeyError):
        weights.take("0.qkv")


def test_sharded_checkpoints_load_the_same(directory: Path, tmp_path: Path) -> None:
    sharded = save(tiny_model("qwen3"), tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for key, tensor in loaded(sharded).items():
        assert torch.equal(tensor, loaded(directory)[key])


def test_progress_ends_at_the_total(directory: Path) -> None:
    spec, names = read_spec(directory)
    seen: list[tuple[int, int]] = []
    progress = lambda done, total: seen.append((done, total))
    weights = load_weights(directory, spec, names, torch.bfloat16, progress)
    assert weights.num_bytes_left == 2 * spec.num_parameters
    for number, weight in enumerate(decoder_weights(spec, names)):
        (weights.take if number % 2 else weights.take_parts)(weight.key)
    assert weights.num_bytes_left == 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (2 * spec.num_parameters, 2 * spec.num_parameters)


def test_weights_that_are_read_later_are_reported_when_they_are(directory: Path) -> None:
    spec, names = read_spec(directory)
    seen: list[tuple[int, int]] = []
    progress = lambda done, total: seen.append((done, total))
    weights = load_weights(directory, spec, names, torch.bfloat16, progress)
    weights.reports_each = False
    for weight in decoder_weights(spec, names):
        weights.take_parts(weight.key)
    assert seen == []
    weights.report()
    assert seen == [(2 * spec.num_parameters, 2 * spec.num_parameters)]


def test_files_are_let_go_without_the_collector(directory: Path) -> None:
    spec, names = read_spec(directory)
    gc.disable()  # As for a worker that was launched asleep, whose collector leaves out what is frozen.
    try:
        weights = load_weights(directory, spec, names, torch.bfloat16, lambda _done, _total: None)
        kept = weakref.ref(weights)
        del weights
        assert kept() is None
        assert str(directory) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_parameters_is_right(family: str, tmp_path: Path) -> None:
    for tied in (False, True):
        changes = PHI3 if family == "phi3" else {}
        model = tiny_model(family, **changes, tie_word_embeddings=tied)
        spec, _ = read_spec(save(model, tmp_path / str(tied)))
        assert spec.num_parameters == model.num_parameters()


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    directory = save(tiny_model("qwen3", tie_word_embeddings=True), tmp_path)
    edit_tensors(directory, **{"lm_head.weight": torch.zeros(211, 48)})
    loaded(directory)


def test_random_weights_need_only_a_config_and_are_the_same_for_the_same_seed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "model.safetensors").unlink()
    plan = StepPlan(
        1,
        (NewRow(RequestId("r"), 0, (5, 6, 7), 3, SamplingParams(temperature=0.0, logprobs=5)),),
        (RowWork(0, 0, 3, samples=True, new_blocks=(1,)),),
    )
    runs = []
    for seed in (1, 1, 2):
        monkeypatch.setattr("penstock.engine.runner.RANDOM_SEED", seed)
        runs.append(tiny_runner(directory, load_format="random").run(plan).sampled)
    assert runs[0] == runs[1] != runs[2]


def test_random_weights_do_not_depend_on_each_other(directory: Path) -> None:
    spec, _ = read_spec(directory)
    weights = random_weights(spec, torch.float32, 0, lambda _done, _total: None)
    assert not torch.equal(weights.take("0.o"), weights.take("1.o"))
    assert torch.equal(weights.take("0.input_norm"), torch.ones(48))


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BertModel"]}, ["BertModel", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architecture none"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"hidden_size": "48"}, ["hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 4}, ["num_attention_heads", "num_key_value_heads"]),
        ({"head_dim": 15}, ["head_dim"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (
            {"use_sliding_window": True, "sliding_window": None, "layer_types": None, "max_window_layers": 1},
            ["sliding_window"],
        ),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 4.0}}, ["spiral", "dynamic", "llama3"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["factor"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, ["short_factor", "8 numbers"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    ],
    ids=str,
)
def test_a_config_that_is_not_understood(
    directory: Path, changes: dict[str, object], words: list[str]
) -> None:
    edit_config(directory, **changes)
    message = refusal(directory)
    assert all(word in message for word in ["config.json", *words]), message


def test_missing_directory_and_files(tmp_path: Path, directory: Path) -> None:
    assert "config.json" in refusal(tmp_path / "nothing")
    (directory / "config.json").write_text("{")
    assert "config.json" in refusal(directory)
    save(tiny_model("qwen3"), directory)
    (directory / "model.safetensors").unlink()
    assert "model.safetensors.index.json" in refusal(directory)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, ["missing", "[72, 48]"]),
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(72, 40), ["[72, 40]", "[72, 48]"]),
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(72, 48, dtype=torch.int8), ["I8", "BF16"]),
        ("model.layers.3.mlp.up_proj.weight", torch.zeros(72, 48), ["not part of a Qwen3ForCausalLM"]),
    ],
    ids=["missing", "shape", "type", "extra"],
)
def test_a_tensor_that_does_not_fit(
    directory: Path, name: str, tensor: torch.Tensor | None, words: list[str]
) -> None:
    edit_tensors(directory, **{name: tensor})
    message = refusal(directory)
    assert all(word in message for word in [name, str(directory), *words]), message


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file(directory: Path, keep: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors: not a whole safetensors file" in refusal(directory)


def test_a_file_of_something_else(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
    assert "model.safetensors: not a whole safetensors file (a pointer of git-lfs" in refusal(directory)


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 1 << 30) + b"{",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        struct.pack("<Q", 62) + b'{"x":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}    ',
        struct.pack("<Q", 70) + b'{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
    ],
    ids=["bomb", "short", "deep", "beyond", "overflow"],
)
def test_a_header_that_lies(directory: Path, raw: bytes) -> None:
    (directory / "model.safetensors").write_bytes(raw)
    assert "model.safetensors: not a whole safetensors file" in refusal(directory)


def test_weights_that_are_no_files(directory: Path) -> None:
    """A pipe, which would be waited for; a link of a hub's snapshot whose blob was left behind."""
    path = directory / "model.safetensors"
    path.rename(directory / "weights")
    os.mkfifo(path)
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": path.name}}))
    assert refusal(directory) == f"{path}: expected a file, it is something else"
    (directory / "model.safetensors.index.json").unlink()
    path.unlink()
    path.symlink_to("../../blobs/0123abc")
    with pytest.raises(CheckpointError, match=r"is a link to \.\./\.\./blobs/0123abc, which is not there"):
        check_loads(directory)


def test_a_broken_index(tmp_path: Path) -> None:
    directory = save(tiny_model("qwen3"), tmp_path, max_shard_size="60KB")
    index = directory / "model.safetensors.index.json"
    shard = next(directory.glob("model-00002*"))
    shard.unlink()
    assert shard.name in refusal(directory)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert "outside" in refusal(directory)
    index.write_text("[]")
    assert "weight_map" in refusal(directory)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, ["hidden_act", "gelu_pytorch_tanh"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma2", {"layer_types": ["full_attention"]}, ["layer_types", "1", "3"]),
        ("gemma3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, ["chunked"]),
        ("gemma3", {"sliding_window": None}, ["sliding_window"]),
        ("gemma3", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
        ("mixtral", {"num_experts_per_tok": 9}, ["num_experts_per_tok", "num_local_experts 8"]),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ["mlp_only_layers"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window"]),
        ("phi3", {"partial_rotary_factor": 0.35, "rope_parameters": None}, ["partial_rotary_factor", "0.35"]),
        ("phi3", {"rope_parameters": {"type": "su", "short_factor": [1.0]}}, ["short_factor", "8 numbers"]),
    ],
)
def test_what_a_family_does_not_support_is_refused(
    family: str, changes: dict[str, object], said: list[str], tmp_path: Path
) -> None:
    directory = save(tiny_model(family, **(PHI3 if family == "phi3" else {})), tmp_path)
    edit_config(directory, **changes)
    message = refusal(directory)
    assert all(word in message for word in ["config.json", *said]), message


def test_configs_of_transformers_4_give_the_same_gemma3(tmp_path: Path) -> None:
    directory = save(tiny_model("gemma3", sliding_window_pattern=2), tmp_path)
    new, _ = read_spec(directory)
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}
    (directory / "config.json").write_text(json.dumps(config | old))
    assert read_spec(directory)[0] == new


@pytest.mark.parametrize(
    "field", ["attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "sliding_window"]
)
def test_null_is_as_good_as_silence(directory: Path, field: str) -> None:
    edit_config(directory, **{field: ...})
    silent = read_spec(directory)
    edit_config(directory, **{field: None})
    assert read_spec(directory) == silent


def test_qwen_has_windows_from_a_layer_on_only_if_it_says_so(tmp_path: Path) -> None:
    directory = save(tiny_model("qwen2", head_dim=None), tmp_path)
    edit_config(directory, layer_types=..., sliding_window=77, max_window_layers=2)
    assert read_spec(directory)[0].attention.windows == ()
    edit_config(directory, use_sliding_window=True)
    assert read_spec(directory)[0].attention.windows == (0, 0, 77)
    edit_config(directory, max_window_layers=3)
    assert read_spec(directory)[0].attention.windows == ()
    edit_config(directory, layer_types=["sliding_attention", "full_attention", "full_attention"])
    assert read_spec(directory)[0].attention.windows == (77, 0, 0)


def test_the_text_part_of_a_published_gemma3_leaves_much_to_defaults(tmp_path: Path) -> None:
    """What the 4B model's config says of its decoder, and no more."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, names = read_spec(tmp_path)
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262_208, 8, 4, 256)
    assert (spec.max_position, spec.tied_head, spec.rope.factor, spec.rope.theta) == (131_072, True, 8.0, 1e6)
    assert [i for i, window in enumerate(spec.attention.windows) if not window] == [5, 11, 17, 23, 29]
    assert names.layer.format(i=3) == "language_model.model.layers.3."


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config"),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": "ministral3"},
            },
            "ministral3",
        ),
    ],
)
def test_a_text_part_that_is_not_understood(tmp_path: Path, config: dict[str, object], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert said in message
    assert "text_config" in message

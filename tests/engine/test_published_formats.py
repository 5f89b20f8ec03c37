"""Quantized checkpoints as people publish them: they load to the numbers that they stand for."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, distributions
from lora_checkpoints import LINEARS, write_adapter
from quantized_checkpoints import FORMATS, Tensors, gptq, quantize
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, PHI3, VOCAB_SIZE, WHOLES, save, tiny_model

from penstock.config.checkpoints import path_of
from penstock.engine.loader import load_weights
from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.quantized import QuantizedMatrix
from penstock.errors import CheckpointError
from penstock.models.names import decoder_weights
from penstock.models.registry import check_loads, read_spec, stored_quantization
from penstock.types import SamplingParams

SCRIPT = Path(__file__).parents[2] / "scripts" / "models_page.py"
_spec = importlib.util.spec_from_file_location("models_page", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
models_page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models_page)
FORMS: dict[str, tuple[str, str]] = models_page.FORMS
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
"""All inputs can be cut into groups of 32."""
SHAPES = {
    "phi3": PHI3 | {"num_attention_heads": 6},
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64},
}
KEPT = frozenset({4, 8})


def checkpoint(tmp_path: Path, name: str, family: str = "qwen3", **changes: object) -> tuple[Path, Path]:
    """A quantized checkpoint and its dense twin."""
    dense = save(tiny_model(family, **SIZES | changes), tmp_path / "dense")
    quantized, twin = tmp_path / "quantized", tmp_path / "twin"
    quantize(dense, quantized, twin, FORMATS[name])
    return quantized, twin


def weights(directory: Path, kept: frozenset[int], dtype: torch.dtype = torch.float32):
    spec, names = read_spec(directory)
    stored = stored_quantization(directory)
    source = load_weights(
        directory, spec, names, dtype, lambda _done, _total: None, quantization=stored, kept_bits=kept
    )
    return source, [weight.key for weight in decoder_weights(spec, names)]


def test_the_page_is_that_of_the_code() -> None:
    text = models_page.PAGE.read_text()
    assert models_page.page(text) == text, "make format"
    assert FORMS.keys() - {"dense"} <= FORMATS.keys()


@pytest.mark.parametrize("family", FAMILIES | WHOLES)
def test_every_family_loads_every_form(family: str, tmp_path: Path) -> None:
    """All that a decoder takes, and most of it in fewer bytes where integers are kept."""
    shape = SHAPES.get(family, {})
    dense = save(tiny_model(family, **SIZES | shape | {"num_hidden_layers": 1}), tmp_path / "dense")
    for name in FORMS.keys() - {"dense"}:
        quantized = tmp_path / name
        quantize(dense, quantized, tmp_path / f"{name}-twin", FORMATS[name])
        source, keys = weights(quantized, KEPT)
        kept = [part for key in keys for part in source.take_parts(key) if isinstance(part, QuantizedMatrix)]
        assert bool(kept) == FORMS[name][1].startswith("int")


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_numbers_that_they_stand_for(name: str, tmp_path: Path) -> None:
    quantized, twin = checkpoint(tmp_path, name)
    (found, keys), (right, _) = weights(quantized, frozenset()), weights(twin, frozenset())
    for key in keys:
        torch.testing.assert_close(found.take(key), right.take(key), rtol=1e-5, atol=1e-6)
    # As integers they are the same numbers again.
    (found, keys), (right, _) = weights(quantized, KEPT), weights(twin, frozenset())
    total, kept = found.num_bytes_left, 0
    for key in keys:
        for part, expected in zip(found.take_parts(key), right.take_parts(key), strict=True):
            if isinstance(part, QuantizedMatrix):
                kept += 1
                part = part.dense(torch.float32)
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)
    assert found.num_bytes_left == 0
    is_kept = not name.startswith("fp8") and name not in ("gptq-8bit", "packed-int8")
    assert kept == (21 if is_kept else 0)
    if is_kept:
        assert total < 0.55 * right_bytes(twin)


def right_bytes(twin: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(twin / "model.safetensors").values())


@pytest.mark.parametrize(
    ("name", "kernels", "family"),
    [
        ("gptq", "torch", "qwen3"),
        ("gptq", "native", "qwen3"),
        ("gptq-act-order", "native", "llama"),
        ("awq", "torch", "gemma2"),
        ("awq", "native", "phi3"),
        ("packed-int4", "native", "mixtral"),
        ("w8a8", "native", "qwen3"),
        ("fp8-block", "native", "mistral"),
    ],
)
def test_answers_are_those_of_the_dense_twin(name: str, kernels: str, family: str, tmp_path: Path) -> None:
    """With torch to rounding; the native kernels round inputs too where they keep the integers."""
    if kernels == "native":
        try:
            NativeLibrary()
        except KernelsUnavailable as why:
            pytest.skip(str(why))
    quantized, twin = checkpoint(tmp_path, name, family, **SHAPES.get(family, {}))
    found = distributions(quantized, dtype="float32", kernels=kernels)
    right = distributions(twin, dtype="float32", kernels=kernels)
    divergence = (right.exp() * (right - found)).sum(1).mean()
    assert divergence < (1e-7 if kernels == "torch" else 1e-2)


def test_layers_that_sort_their_inputs_otherwise_are_made_dense(tmp_path: Path) -> None:
    """Q, k and v are one product, which reads its inputs in one order."""
    quantized, twin = checkpoint(tmp_path, "gptq-act-order")
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path)
    spec, names = read_spec(quantized)
    right = load_weights(
        quantized, spec, names, torch.float32, lambda _done, _total: None,
        quantization=stored_quantization(quantized),
    ).take("0.qkv")  # fmt: skip
    dense = load_file(twin / "model.safetensors")
    rows = [right[:64], right[64:96], right[96:]]
    for row, part in zip(rows, "qkv", strict=True):
        dense[f"model.layers.0.self_attn.{part}_proj.weight"] = row.contiguous()
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    found = distributions(quantized, dtype="float32", kernels="auto")
    expected = distributions(twin, dtype="float32", kernels="auto")
    assert (expected.exp() * (expected - found)).sum(1).mean() < 5e-3


def take_all(directory: Path) -> None:
    source, keys = weights(directory, KEPT)
    for key in keys:
        source.take_parts(key)


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "config", "tensors", "words"),
    [
        ("gptq", {"bits": 3}, {}, "(gptq): bits '3' is not read; expected 4 or 8"),
        ("gptq", {"group_size": 0}, {}, "group_size must be -1 or a positive number, not '0'"),
        ("gptq", {"group_size": 36}, {}, "q_proj: its 64 inputs cannot be cut into groups of 36"),
        ("gptq", {"checkpoint_format": "marlin"}, {}, "checkpoint_format 'marlin' is not read"),
        ("gptq", {"quant_method": "bitsandbytes"}, {}, "bitsandbytes is not read; expected one of gptq, awq"),
        ("gptq", {}, {"scales": None}, f"tensor {LAYER}.scales is missing; expected one of shape [3, 64]"),
        (
            "gptq",
            {},
            {"qzeros": torch.zeros(3, 9, dtype=torch.int32)},
            "has shape [3, 9], the config calls for [3, 8]",
        ),
        (
            "gptq",
            {},
            {"qweight": torch.zeros(12, 64)},
            f"tensor {LAYER}.qweight has type F32, expected one of I32",
        ),
        (
            "gptq",
            {},
            {"g_idx": torch.zeros(96, dtype=torch.int32)},
            "g_idx must name each of its 3 groups 32 times",
        ),
        ("gptq", {}, {"extra": torch.zeros(1)}, f"tensor {LAYER}.extra is not part of a Qwen3ForCausalLM"),
        ("awq", {"version": "gemv"}, {}, "(awq): version 'gemv' is not read; expected gemm"),
        ("packed-int4", {"format": "marlin-24"}, {}, "format 'marlin-24' is not read"),
        (
            "packed-int4",
            {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            {},
            "transform_config (rotations of layers) is not read",
        ),
        ("packed-int4", {"config_groups": {}}, {}, "config_groups must be an object with at least one group"),
        (
            "packed-int4",
            {},
            {"weight_packed": torch.zeros(64, 5, dtype=torch.int32)},
            "expected [64, 12] or [64, 24]",
        ),
        ("packed-int4", {}, {"weight_scale": torch.zeros(64, 5)}, "cannot be cut into 5 groups"),
        ("fp8-block", {"weight_block_size": [0, 4]}, {}, "the block must be two positive numbers"),
        (
            "fp8-channel",
            {},
            {"weight_scale": torch.zeros(3, 1)},
            f"tensor {LAYER}.weight_scale has shape [3, 1]",
        ),
    ],
)
def test_others_are_refused_by_name(
    name: str,
    config: dict[str, object],
    tensors: dict[str, torch.Tensor | None],
    words: str,
    tmp_path: Path,
) -> None:
    quantized, _ = checkpoint(tmp_path, name)
    path = quantized / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"] |= config
    path.write_text(json.dumps(content))
    path = quantized / "model.safetensors"
    changed = load_file(path) | {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
    save_file({part: tensor for part, tensor in changed.items() if tensor is not None}, path)
    with pytest.raises(CheckpointError) as caught:
        take_all(quantized)
    assert words in str(caught.value)
    assert str(quantized) in str(caught.value)


def rewritten(
    directory: Path, config: dict[str, object], change: Callable[[Tensors], Tensors] = dict
) -> dict[str, object]:
    """Change tensors, and put `config` in the place of `quantization_config`, which is returned."""
    path = directory / "config.json"
    content = json.loads(path.read_text())
    stored = content.pop("quantization_config", {})
    path.write_text(json.dumps(content | config))
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)
    return stored


def spare_biases(value: float) -> Callable[[Tensors], Tensors]:
    """As AutoGPTQ writes them, for every layer that it rounds."""

    def change(tensors: Tensors) -> Tensors:
        return tensors | {
            name.removesuffix("qweight") + "bias": torch.full((tensor.shape[1],), value, dtype=torch.float16)
            for name, tensor in tensors.items()
            if name.endswith(".qweight")
        }

    return change


def quantize_config(directory: Path) -> None:
    """AutoGPTQ's: its own file, its own name of the weights, and biases of zeros."""
    stored = rewritten(directory, {}, spare_biases(0.0))
    kept = {name: stored[name] for name in ("bits", "group_size", "desc_act", "sym")}
    (directory / "quantize_config.json").write_text(json.dumps(kept))
    (directory / "model.safetensors").rename(directory / "gptq_model-4bit-32g.safetensors")


def quant_config(directory: Path) -> None:
    """AutoAWQ's first form."""
    rewritten(directory, {})
    given = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (directory / "quant_config.json").write_text(json.dumps(given))


def hf_quant_config(directory: Path) -> None:
    """ModelOpt's, with the scales of activations that its checkpoints have."""

    def change(tensors: Tensors) -> Tensors:
        scales = [name for name in tensors if name.endswith(".weight_scale")]
        return tensors | {
            name.replace("weight_scale", "input_scale"): tensors[name].clone() for name in scales
        }

    rewritten(directory, {}, change)
    given = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt"}, "quantization": given}
    (directory / "hf_quant_config.json").write_text(json.dumps(content))


def compression_config(directory: Path) -> None:
    """llm-compressor's first name; two parts without an index, beside a model in another layout."""
    stored = rewritten(directory, {})
    rewritten(directory, {"compression_config": stored, "quantization_config": None})
    tensors = load_file(directory / "model.safetensors")
    for i in range(2):
        part = {name: tensors[name] for name in sorted(tensors)[i::2]}
        save_file(part, directory / f"model-0000{i + 1}-of-00002.safetensors")
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")


@pytest.mark.parametrize(
    ("name", "publish"),
    [
        ("gptq", quantize_config),
        ("awq", quant_config),
        ("fp8-tensor", hf_quant_config),
        ("packed-int4", compression_config),
    ],
)
def test_what_older_tools_published_loads(name: str, publish: Callable[[Path], None], tmp_path: Path) -> None:
    quantized, twin = checkpoint(tmp_path, name)
    publish(quantized)
    check_loads(quantized)
    assert path_of(quantized) == quantized.resolve()
    (found, keys), (right, _) = weights(quantized, frozenset()), weights(twin, frozenset())
    for key in keys:
        torch.testing.assert_close(found.take(key), right.take(key), rtol=1e-5, atol=1e-6)


def test_layers_of_other_widths_are_read_by_their_tensors(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: other bits and groups for some layers, others left as they are."""
    quantized, twin = checkpoint(tmp_path, "gptq")
    wide, exact, dense = tmp_path / "wide", tmp_path / "exact", tmp_path / "dense"
    quantize(dense, wide, exact, gptq(8, 16, symmetric=False))
    others, plain = load_file(wide / "model.safetensors"), load_file(dense / "model.safetensors")

    def change(tensors: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in tensors.items() if ".down_proj." not in name}
        kept |= {name: tensor for name, tensor in plain.items() if ".down_proj." in name}
        return kept | {name: tensor for name, tensor in others.items() if ".gate_proj." in name}

    dynamic = {"+:.*gate_proj": {"bits": 8, "group_size": 16, "sym": False}, "-:.*down_proj": {}}
    rewritten(quantized, {"quantization_config": FORMATS["gptq"].config | {"dynamic": dynamic}}, change)
    (found, _), (right, _), (exactly, _) = (weights(each, frozenset()) for each in (quantized, twin, exact))
    expected = [exactly.take("0.gate_up")[:96], right.take("0.gate_up")[96:]]
    torch.testing.assert_close(found.take("0.gate_up"), torch.cat(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(found.take("0.down"), weights(dense, frozenset())[0].take("0.down"))


def test_biases_that_a_model_has_no_place_for_are_refused(tmp_path: Path) -> None:
    quantized, _ = checkpoint(tmp_path, "gptq")
    rewritten(quantized, {"quantization_config": FORMATS["gptq"].config}, spare_biases(0.5))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*\.bias is not all zeros"):
        take_all(quantized)


_FORMS = ("gptq", "awq", "packed-int4", "w8a8", "fp8-block", "gptq-act-order")
ADAPTED = {family: _FORMS[i % len(_FORMS)] for i, family in enumerate(sorted(FAMILIES | WHOLES))}
"""A form for each family."""


@pytest.mark.parametrize("family", ADAPTED)
def test_every_family_takes_adapters_on_quantized_weights(family: str, tmp_path: Path) -> None:
    """An adapter's part is added in full precision: the answer is the dense twin's with it, as near as what
    rounding of inputs leaves.
    """
    try:
        NativeLibrary()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    shape = SIZES | SHAPES.get(family, {}) | {"num_hidden_layers": 2}
    model = tiny_model(family, **shape)
    dense, quantized, twin = save(model, tmp_path / "dense"), tmp_path / "quantized", tmp_path / "twin"
    quantize(dense, quantized, twin, FORMATS[ADAPTED[family]])
    is_mixture = family in ("mixtral", "qwen3_moe")
    adapter = write_adapter(tmp_path / "a", model, rank=8, targets=LINEARS[:4] if is_mixture else LINEARS)
    prompt = list(range(5, 45))
    how = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE, max_tokens=1)

    def reported(path: Path) -> torch.Tensor:
        """Log-probabilities with the adapter and without it: `[2, vocab]`."""
        driver = Driver(path, {"a": adapter}, kernels="native", dtype="float32")
        rows = torch.full((2, VOCAB_SIZE), -torch.inf)
        for row, answer in zip(rows, driver.ask([prompt] * 2, [how] * 2, adapters=["a", ""]), strict=True):
            (one,) = answer.logprobs
            for token, value in (*one.top, (one.token_id, one.logprob)):
                row[token] = value
        return rows

    found, right = reported(quantized), reported(twin)
    off = (right.exp() * (right - found)).sum(1)
    moved = (right[1].exp() * (right[1] - right[0])).sum()
    assert moved > 0.05, "the adapter changes the answer"
    assert off.max() < 0.1 * moved

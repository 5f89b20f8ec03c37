"""GGUF files: their numbers are those that llama.cpp's library reads, and their answers those of the twin."""

import importlib.util
import json
from dataclasses import fields, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from engine_driver import distributions
from gguf import GGMLQuantizationType as Kind
from gguf_files import RECIPES, convert, pack
from tiny_models import FAMILIES, LLAMA3_ROPE, WHOLES, longrope, save, tiny_model

from penstock.engine import gguf as ours
from penstock.engine.loader import load_weights
from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.quantized import QuantizedMatrix
from penstock.errors import CheckpointError
from penstock.models.names import decoder_weights
from penstock.models.registry import read_spec, stored_quantization
from penstock.models.spec import RopeSpec

SCRIPT = Path(__file__).parents[2] / "scripts" / "models_page.py"
_spec = importlib.util.spec_from_file_location("models_page", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
models_page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models_page)
FORMS: dict[str, tuple[str, str]] = models_page.GGUF
SIZES: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""All inputs can be cut into blocks of 256."""
SHAPES: dict[str, dict[str, object]] = {
    "phi3": {"head_dim": None, "pad_token_id": 0},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
    },
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": 21},
    "gemma3": {"query_pre_attn_scalar": 64, "sliding_window": 21},
    "gemma3_whole": {"query_pre_attn_scalar": 64, "sliding_window": 21},
}  # fmt: skip
KEPT = frozenset({4, 8})


def dense(directory: Path, family: str, **changes: object) -> Path:
    save(tiny_model(family, **SIZES | SHAPES.get(family, {}) | changes), directory)
    if family.startswith("mistral"):  # llama.cpp knows of no window there.
        config = json.loads((directory / "config.json").read_text())
        config.get("text_config", config)["sliding_window"] = None
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def weights(model: Path, kept: frozenset[int] = frozenset()):
    spec, names = read_spec(model)
    source = load_weights(model, spec, names, torch.float32, lambda _done, _total: None, kept_bits=kept)
    return source, [weight.key for weight in decoder_weights(spec, names)]


@pytest.mark.parametrize(
    "kind",
    [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q6_K],
)
def test_numbers_are_those_of_the_library_to_the_last_bit(kind: Kind) -> None:
    """Of any bytes at all: each is a block of some numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    raw = random.integers(0, 256, (37, 512 // block, size), np.uint8)
    two = dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), ((0, 2), (2, 4)))
    halves = (two | {Kind.Q6_K: ((208, 210),)}).get(kind, ((0, 2),))
    for first, last in halves:  # Random bytes may be no number.
        scale = random.normal(size=raw.shape[:2]).astype("<f2")
        raw[:, :, first:last] = scale[..., None].view(np.uint8)
    expected = gguf.quants.dequantize(raw.reshape(37, -1), kind)
    rows = torch.from_numpy(raw.reshape(37, -1))
    assert np.array_equal(ours._DEQUANTIZE[kind.name](rows).numpy(), expected)  # pyright: ignore[reportPrivateUsage]
    if kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K):
        integers = ours._INTEGERS[kind.name](rows)  # pyright: ignore[reportPrivateUsage]
        np.testing.assert_allclose(integers.dense(torch.float32).numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES | WHOLES)
def test_every_family_loads_every_type(family: str, tmp_path: Path) -> None:
    """To the numbers of the twin, exactly; four bits stay integers that stand for the same."""
    checkpoint = dense(tmp_path / "dense", family)
    assert FORMS.keys() <= RECIPES.keys()
    for recipe in RECIPES:
        file = convert(checkpoint, tmp_path / f"{recipe}.gguf", tmp_path / recipe, recipe)
        (found, keys), (right, theirs) = weights(file), weights(tmp_path / recipe)
        assert keys == theirs
        for key in keys:
            assert torch.equal(found.take(key), right.take(key)), (recipe, key)
        (found, keys), kept = weights(file, KEPT), 0
        right, _ = weights(tmp_path / recipe)
        for key in keys:
            parts = found.take_parts(key)
            kept += sum(isinstance(part, QuantizedMatrix) for part in parts)
            numbers = [
                part.dense(torch.float32) if isinstance(part, QuantizedMatrix) else part for part in parts
            ]
            torch.testing.assert_close(torch.cat(numbers), right.take(key), rtol=1e-5, atol=1e-6)
        assert found.num_bytes_left == 0
        assert bool(kept) == FORMS.get(recipe, ("", ""))[1].startswith("int4")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
                    "original_max_position_embeddings": 160,
                },
            },
        ),
        ("gemma2", {"num_hidden_layers": 2}),
        ("gemma3", {"num_hidden_layers": 7}),
        (
            "phi3",
            {
                "rope_parameters": longrope(4.0, 64) | {"partial_rotary_factor": 1.0},
                "original_max_position_embeddings": 64,
            },
        ),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("mistral", {}),
    ],
)  # fmt: skip
def test_answers_are_those_of_the_twin(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    """The keys say what config.json says; the twin is a checkpoint whose logits are those of transformers."""
    checkpoint, file = dense(tmp_path / "dense", family, **changes), tmp_path / "model.gguf"
    convert(checkpoint, file, tmp_path / "twin")
    (found, _), (right, _) = read_spec(file), read_spec(tmp_path / "twin")
    if changes.get("rope_parameters") != LLAMA3_ROPE:  # There they are factors, worked out.
        assert replace(found, architecture="", rope=RopeSpec()) == replace(
            right, architecture="", rope=RopeSpec()
        )
        for field in fields(RopeSpec):
            value = getattr(right.rope, field.name)
            assert getattr(found.rope, field.name) == (
                value if field.name == "kind" else pytest.approx(value)
            )
    answers = distributions(file, dtype="float32", kernels="torch")
    torch.testing.assert_close(
        answers, distributions(tmp_path / "twin", dtype="float32", kernels="torch"), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("recipe", ["gguf-q8_0", "gguf-q4_0", "gguf-q4_k_m"])
def test_native_answers_are_close_to_the_twins(recipe: str, tmp_path: Path) -> None:
    """The kernels round inputs where they keep the integers."""
    try:
        NativeLibrary()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    checkpoint, file = dense(tmp_path / "dense", "llama"), tmp_path / "model.gguf"
    convert(checkpoint, file, tmp_path / "twin", recipe)
    stored = stored_quantization(file)
    assert stored is not None
    assert stored.bits == (8 if recipe == "gguf-q8_0" else 4)
    found = distributions(file, dtype="float32", kernels="native")
    right = distributions(tmp_path / "twin", dtype="float32", kernels="native")
    assert (right.exp() * (right - found)).sum(1).mean() < 1e-2


def test_a_split_model_is_one(tmp_path: Path) -> None:
    checkpoint = dense(tmp_path / "dense", "qwen3")
    whole = convert(checkpoint, tmp_path / "whole.gguf", recipe="gguf-q8_0")
    first = convert(checkpoint, tmp_path / "some.gguf", recipe="gguf-q8_0", split=4)
    (found, keys), (right, _) = weights(first), weights(whole)
    assert first.name.endswith("-00001-of-00004.gguf")
    for key in keys:
        assert torch.equal(found.take(key), right.take(key))
    second = first.with_name(first.name.replace("-00001-", "-00002-"))
    with pytest.raises(CheckpointError, match=f"is not the first of its 4 files; give {first.name}"):
        read_spec(second)
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second.name}: no such file"):
        read_spec(first)


def test_memory_is_said_before_it_is_taken(tmp_path: Path) -> None:
    """Four bits: half a byte per weight and a float32 (two with minima) per group of 32."""
    checkpoint = dense(tmp_path / "dense", "llama")
    file = convert(checkpoint, tmp_path / "model.gguf", recipe="gguf-q4_0")
    source, _ = weights(file, KEPT)
    linears, rest = 256 * (256 + 2 * 128 + 256 + 3 * 256), 2 * 211 * 256 + 3 * 256
    assert source.num_bytes_left == linears // 2 + linears // 32 * 4 + rest * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama.block_count": 0}, "llama.block_count is 0; expected a whole number above zero"),
        ({"llama.block_count": 1 << 31}, "num_hidden_layers is 2147483648; expected at most 1024"),
        ({"llama.block_count": 900}, "describe a LlamaForCausalLM of 900 layers"),
        (
            {"llama.embedding_length": 255},
            "tensor token_embd.weight has shape [211, 256]; expected [tokens, 255]",
        ),
        ({"llama.attention.head_count": 3}, "num_attention_heads 3 is not a multiple"),
        (
            {"llama.feed_forward_length": 512},
            "tensor blk.0.ffn_gate.weight has shape [256, 256], the keys call for",
        ),
        ({"llama.attention.value_length": 32}, "value_length is 32; expected the 64 of attention.key_length"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count is 32; expected the head size 64"),
        (
            {"general.architecture": "mamba"},
            "general.architecture 'mamba' is not supported; expected one of gemma2",
        ),
    ],
)
def test_keys_that_do_not_fit_are_named(change: dict[str, int | str], words: str, tmp_path: Path) -> None:
    file = convert(dense(tmp_path / "dense", "llama"), tmp_path / "model.gguf")
    ((key, value),) = change.items()
    reader = gguf.GGUFReader(file, "r+")
    field = reader.get_field(key)
    assert field is not None
    if isinstance(value, str):
        content = file.read_bytes()
        at = content.index(b"general.architecture") + len("general.architecture") + 12
        file.write_bytes(content[:at] + value.encode() + content[at + 5 :])
    else:
        field.parts[field.data[0]][0] = value
    del reader, field
    with pytest.raises(CheckpointError) as caught:
        weights(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_tensor_of_another_name_is_named(tmp_path: Path) -> None:
    file = convert(dense(tmp_path / "dense", "llama"), tmp_path / "model.gguf")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.0.ffn_norm.weight", b"blk.0.ffn_form.weight"))
    with pytest.raises(
        CheckpointError, match=r"tensor blk\.0\.ffn_norm\.weight is missing; expected one of shape"
    ):
        weights(file)


def test_blocks_packed_here_are_what_the_library_reads() -> None:
    """Near what was packed: the test's own quantizers are right."""
    numbers = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    for kind, error in ((Kind.Q4_K, 0.12), (Kind.Q6_K, 0.03)):
        found = gguf.quants.dequantize(pack(numbers, kind), kind)
        assert np.sqrt(((found - numbers) ** 2).mean()) < error

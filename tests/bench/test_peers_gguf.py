"""The converter to GGUF, read back with a reader written here from the format's specification."""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.peers.gguf import convert, interleaved
from bench.peers.shapes import SHAPES, Shape, make_model
from bench.peers.vocabulary import SPECIAL, make_vocabulary, save_tokenizer

SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}
TINY = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "vocab": 1200}


@dataclass
class File:
    """What a GGUF file holds."""

    fields: dict
    tensors: dict


class Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, form: str):
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        size = self.take("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int):
        if kind == 8:
            return self.text()
        if kind == 9:
            item, count = self.take("<I"), self.take("<Q")
            return [self.value(item) for _ in range(count)]
        return self.take(SCALARS[kind])


def read(path: Path) -> File:
    reader = Reader(path.read_bytes())
    assert reader.data[:4] == b"GGUF"
    reader.at = 4
    assert reader.take("<I") == 3
    num_tensors, num_fields = reader.take("<Q"), reader.take("<Q")
    fields = {}
    for _ in range(num_fields):
        key = reader.text()
        fields[key] = reader.value(reader.take("<I"))
    places = {}
    for _ in range(num_tensors):
        name = reader.text()
        dimensions = [reader.take("<Q") for _ in range(reader.take("<I"))]
        places[name] = (dimensions[::-1], reader.take("<I"), reader.take("<Q"))
    start = -(-reader.at // 32) * 32
    tensors = {}
    for name, (shape, kind, offset) in places.items():
        assert offset % 32 == 0
        count = int(np.prod(shape))
        if kind == 0:
            found = np.frombuffer(reader.data, "<f4", count, start + offset)
        else:
            assert kind == 30, "bfloat16"
            bits = np.frombuffer(reader.data, "<u2", count, start + offset).astype(np.uint32) << 16
            found = bits.view(np.float32)
        tensors[name] = found.reshape(shape)
    return File(fields, tensors)


def tiny(family: str) -> Shape:
    base = SHAPES["28m" if family == "llama" else "494m"]
    return replace(base, **TINY)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_weight_arrives_under_its_gguf_name(tmp_path, family):
    folder = make_model(tiny(family), tmp_path / family)
    convert(folder, tmp_path / "model.gguf")
    found, weights = read(tmp_path / "model.gguf"), load_file(folder / "model.safetensors")
    assert len(found.tensors) == len(weights)
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }
    if family == "qwen2":
        pairs |= {f"blk.0.attn_{x}.bias": f"model.layers.0.self_attn.{x}_proj.bias" for x in "qkv"}
        pairs |= {f"blk.0.attn_{x}.weight": f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk"}
    for name, source in pairs.items():
        np.testing.assert_array_equal(found.tensors[name], weights[source].float().numpy(), err_msg=name)


def test_the_header_describes_the_model_and_its_tokenizer(tmp_path):
    shape = tiny("llama")
    folder = make_model(shape, tmp_path / "model")
    convert(folder, tmp_path / "model.gguf")
    fields = read(tmp_path / "model.gguf").fields
    assert fields["general.architecture"] == "llama"
    assert fields["llama.embedding_length"] == shape.hidden
    assert fields["llama.attention.head_count_kv"] == shape.kv_heads
    assert fields["llama.rope.dimension_count"] == shape.hidden // shape.heads
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(shape.norm_eps)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert fields["tokenizer.ggml.tokens"] == sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    assert len(fields["tokenizer.ggml.merges"]) == len(tokenizer["merges"])
    control = [i for i, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3]
    assert [fields["tokenizer.ggml.tokens"][i] for i in control] == list(SPECIAL)
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"


def test_llama_rows_are_reordered_so_that_the_two_ways_to_rotate_agree(tmp_path):
    """Rotating halves before the reordering is rotating neighbours after it."""
    folder = make_model(tiny("llama"), tmp_path / "model")
    convert(folder, tmp_path / "model.gguf")
    name, heads = "model.layers.0.self_attn.k_proj.weight", TINY["kv_heads"]
    original = load_file(folder / "model.safetensors")[name].float().numpy()
    stored = read(tmp_path / "model.gguf").tensors["blk.0.attn_k.weight"]
    hidden = np.random.default_rng(1).normal(size=TINY["hidden"])
    angles = np.array([0.3, 1.1, 2.0, 2.9])
    halves = rotate_halves((original @ hidden).reshape(heads, -1), angles)
    neighbours = rotate_neighbours((stored @ hidden).reshape(heads, -1), angles)
    expected = interleaved(halves.reshape(-1, 1), heads).reshape(heads, -1)
    np.testing.assert_allclose(neighbours, expected, atol=1e-6)


def rotate_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=1)
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=1
    )


def rotate_neighbours(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    a, b, out = x[:, 0::2], x[:, 1::2], np.empty_like(x)
    out[:, 0::2] = a * np.cos(angles) - b * np.sin(angles)
    out[:, 1::2] = b * np.cos(angles) + a * np.sin(angles)
    return out


def test_a_checkpoint_of_another_dtype_is_refused_by_the_tensors_name(tmp_path):
    shape = tiny("llama")
    (tmp_path / "config.json").write_text(json.dumps(shape.config()))
    save_tokenizer(make_vocabulary(shape.vocab), tmp_path, context=64)
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is torch\.float32, expected bfloat16"):
        convert(tmp_path, tmp_path / "model.gguf")


def test_a_tensor_without_a_place_in_gguf_is_refused(tmp_path):
    shape = tiny("llama")
    (tmp_path / "config.json").write_text(json.dumps(shape.config()))
    save_tokenizer(make_vocabulary(shape.vocab), tmp_path, context=64)
    save_file(
        {"model.layers.0.mlp.unheard_of.weight": torch.ones(4, 4).bfloat16()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match="unheard_of"):
        convert(tmp_path, tmp_path / "model.gguf")

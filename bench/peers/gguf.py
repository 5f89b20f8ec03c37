"""From our model directories to GGUF, llama.cpp's file format (version 3), in bfloat16.

llama.cpp's own converter knows tokenizers by a fingerprint of their output and refuses those it has not met,
ours among them. Quantized files are made from this one by llama.cpp's own quantizer.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from peers.vocabulary import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL, TURN_END

VERSION = 3
ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TENSOR_F32, TENSOR_BF16 = 0, 30
FILE_TYPE_BF16 = 32
TOKEN_NORMAL, TOKEN_CONTROL = 1, 3
_SCALARS = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Field:
    """One key of the header. `item` is the type of an array's elements."""

    key: str
    kind: int
    value: object
    item: int = STRING


@dataclass(frozen=True)
class StoredTensor:
    """A bfloat16 tensor of a safetensors file, not read yet. `start` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    start: int


def convert(folder: Path, target: Path) -> None:
    """Write `target` from a model directory made by `shapes.make_model`.

    Raises:
        ValueError: the checkpoint holds a tensor that is not bfloat16, or of a name that has no place in
            GGUF.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    source = folder / "model.safetensors"
    stored = list(stored_tensors(source))
    partial = target.with_suffix(".partial")
    data = np.memmap(source, dtype=np.uint8, mode="r")
    with partial.open("wb") as file:
        _write_header(file, [*_model_fields(config), *_tokenizer_fields(folder)], stored)
        for tensor in stored:
            _pad(file)
            _write_tensor(file, tensor, data, config)
        _pad(file)
    partial.rename(target)


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file, in file order."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, expected BF16")
        yield StoredTensor(name, tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])


def gguf_name(name: str) -> str:
    """llama.cpp's name of a checkpoint tensor."""
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    head, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    if part not in _NAMES or not head.isdigit():
        raise ValueError(f"{name}: no such tensor in GGUF's llama and qwen2")
    return f"blk.{head}.{_NAMES[part]}.{kind}"


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection, [heads * size, columns], for rotary pairs that lie side
    by side.

    Checkpoints rotate row i of a head with row i + size/2; llama.cpp's "llama" rotates row 2i with 2i + 1.
    """
    rows, columns = weights.shape
    split = weights.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows, columns)


def _model_fields(config: dict) -> Iterator[Field]:
    family = config["model_type"]
    yield Field("general.architecture", STRING, family)
    yield Field("general.name", STRING, "random weights")
    yield Field("general.file_type", UINT32, FILE_TYPE_BF16)
    counts = {
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }
    for key, name in counts.items():
        yield Field(f"{family}.{key}", UINT32, config[name])
    head_size = config["hidden_size"] // config["num_attention_heads"]
    yield Field(f"{family}.rope.dimension_count", UINT32, head_size)
    yield Field(f"{family}.rope.freq_base", FLOAT32, config["rope_theta"])
    yield Field(f"{family}.attention.layer_norm_rms_epsilon", FLOAT32, config["rms_norm_eps"])


def _tokenizer_fields(folder: Path) -> Iterator[Field]:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [TOKEN_CONTROL if token in SPECIAL else TOKEN_NORMAL for token in tokens]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    yield Field("tokenizer.ggml.model", STRING, "gpt2")
    yield Field("tokenizer.ggml.pre", STRING, "gpt-2")
    yield Field("tokenizer.ggml.tokens", ARRAY, tokens)
    yield Field("tokenizer.ggml.token_type", ARRAY, kinds, item=INT32)
    yield Field("tokenizer.ggml.merges", ARRAY, merges)
    yield Field("tokenizer.ggml.eos_token_id", UINT32, TURN_END)
    yield Field("tokenizer.ggml.padding_token_id", UINT32, END_OF_TEXT)
    yield Field("tokenizer.ggml.add_bos_token", BOOL, value=False)
    yield Field("tokenizer.chat_template", STRING, CHAT_TEMPLATE)


def _write_header(file: BinaryIO, fields: list[Field], stored: list[StoredTensor]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(stored), len(fields)))
    file.writelines(_text(field.key) + struct.pack("<I", field.kind) + _value(field) for field in fields)
    offset = 0
    for tensor in stored:
        is_matrix = len(tensor.shape) > 1
        kind, width = (TENSOR_BF16, 2) if is_matrix else (TENSOR_F32, 4)
        dimensions = tensor.shape[::-1]  # GGUF names the fastest dimension first.
        file.write(_text(gguf_name(tensor.name)) + struct.pack("<I", len(dimensions)))
        file.write(struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, offset))
        offset += _aligned(int(np.prod(tensor.shape)) * width)


def _write_tensor(file: BinaryIO, tensor: StoredTensor, data: np.ndarray, config: dict) -> None:
    size = int(np.prod(tensor.shape)) * 2
    bits = data[tensor.start : tensor.start + size].view(np.uint16).reshape(tensor.shape)
    if len(tensor.shape) == 1:
        # Vectors are float32 in GGUF; a bfloat16 is the upper half of one.
        file.write((bits.astype(np.uint32) << 16).tobytes())
        return
    if config["model_type"] == "llama" and tensor.name.endswith("q_proj.weight"):
        bits = interleaved(bits, config["num_attention_heads"])
    elif config["model_type"] == "llama" and tensor.name.endswith("k_proj.weight"):
        bits = interleaved(bits, config["num_key_value_heads"])
    file.write(bits.tobytes())


def _value(field: Field) -> bytes:
    if field.kind == ARRAY:
        assert isinstance(field.value, list)
        head = struct.pack("<IQ", field.item, len(field.value))
        return head + b"".join(_scalar(field.item, item) for item in field.value)
    return _scalar(field.kind, field.value)


def _scalar(kind: int, value: object) -> bytes:
    return _text(str(value)) if kind == STRING else struct.pack(_SCALARS[kind], value)


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(_aligned(file.tell()) - file.tell()))

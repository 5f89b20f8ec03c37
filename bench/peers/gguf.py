"""From our model directories to GGUF, llama.cpp's file format, in bfloat16, with llama.cpp's own writer.

llama.cpp's own converter knows tokenizers by a fingerprint of their output and refuses those it has not met,
ours among them. Quantized files are made from this one by llama.cpp's own quantizer.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from bench.peers.vocabulary import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL, TURN_END

BF16 = gguf.GGMLQuantizationType.BF16
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
    data = np.memmap(source, dtype=np.uint8, mode="r")
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, config["model_type"])
    _add_model(writer, config)
    _add_tokenizer(writer, folder)
    for tensor in stored_tensors(source):
        _add_tensor(writer, tensor, data, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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


def _add_model(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_name("random weights")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(TURN_END)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(writer: gguf.GGUFWriter, tensor: StoredTensor, data: np.ndarray, config: dict) -> None:
    size = int(np.prod(tensor.shape)) * 2
    bits = data[tensor.start : tensor.start + size].view(np.uint16).reshape(tensor.shape)
    name = gguf_name(tensor.name)
    if len(tensor.shape) == 1:
        # Vectors are float32 in GGUF; a bfloat16 is the upper half of one.
        writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        return
    if config["model_type"] == "llama" and tensor.name.endswith("q_proj.weight"):
        bits = interleaved(bits, config["num_attention_heads"])
    elif config["model_type"] == "llama" and tensor.name.endswith("k_proj.weight"):
        bits = interleaved(bits, config["num_key_value_heads"])
    writer.add_tensor(name, bits.view(np.uint8), raw_dtype=BF16)

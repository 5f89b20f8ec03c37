"""From our model directories to GGUF, llama.cpp's file format, in bfloat16, with llama.cpp's own writer.

llama.cpp's own converter knows tokenizers by a fingerprint of their output and refuses those it has not met,
ours among them. Quantized files are made from this one by llama.cpp's own quantizer.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

from bench.peers.vocabulary import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL, TURN_END

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
INTERLEAVED = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
"""Of llama's queries and keys: where the number of heads stands."""


def convert(folder: Path, target: Path) -> None:
    """Write `target` from a model directory made by `shapes.make_model`.

    Raises:
        ValueError: the checkpoint holds a tensor that is not bfloat16, or of a name that has no place in
            GGUF.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family, partial = config["model_type"], target.with_suffix(".partial")
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(partial, family)
    _add_model(writer, config)
    _add_tokenizer(writer, folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 It is no mapping.
            tensor, given = file.get_tensor(name), names.get_name(name, (".weight", ".bias"))
            if tensor.dtype is not torch.bfloat16:
                raise ValueError(f"{name} is {tensor.dtype}, expected bfloat16")
            if given is None:
                raise ValueError(f"{name}: no such tensor in GGUF's {family}")
            bits = tensor.view(torch.uint16).numpy()
            heads = INTERLEAVED.get(".".join(name.split(".")[-2:])) if family == "llama" else None
            if tensor.ndim == 1:  # Vectors are float32 in GGUF.
                writer.add_tensor(given, tensor.float().numpy())
                continue
            bits = interleaved(bits, config[heads]) if heads else bits
            writer.add_tensor(given, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


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

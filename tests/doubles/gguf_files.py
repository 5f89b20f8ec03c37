"""GGUF files made of Hugging Face checkpoints with llama.cpp's own Python library.

The library has the names of tensors and keys, the layout of the file, and the quantizers of Q8_0 and Q4_0.
Those of the K types are in llama.cpp's C code only: here blocks are packed as its comments describe them,
rounded plainly. Every file has a twin: the dense checkpoint of the numbers that the library reads back out of
it.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, Any]
ARCHITECTURES = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
RECIPES: dict[str, Callable[[str], Kind]] = {
    "gguf-f32": lambda _: Kind.F32,
    "gguf-bf16": lambda _: Kind.BF16,
    "gguf-f16": lambda name: Kind.F16 if "attn" in name else Kind.BF16,
    "gguf-q8_0": lambda _: Kind.Q8_0,
    "gguf-q4_0": lambda name: Kind.Q4_0 if name.startswith("blk.") else Kind.Q6_K,
    "gguf-q4_k_m": lambda name: (
        Kind.Q6_K if "ffn_down" in name or "attn_v" in name or "blk." not in name else Kind.Q4_K
    ),
    "gguf-q4_k_m-odd": lambda name: {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q5_1}.get(
        name.split(".")[-2], Kind.Q5_0
    ),
    "gguf-q4_1": lambda name: Kind.Q4_1 if "ffn_down" in name else Kind.Q4_0,
    "gguf-q5_k_m": lambda name: Kind.Q6_K if "attn_v" in name or "blk." not in name else Kind.Q5_K,
    "gguf-q6_k": lambda _: Kind.Q6_K,
}
"""Which type a matrix of a name is stored in."""


def convert(
    dense: Path, target: Path, twin: Path | None = None, recipe: str = "gguf-f32", *, split: int = 0,
    pre: str = "qwen2",
) -> Path:  # fmt: skip
    """Write the checkpoint `dense` as a GGUF file, and what the file stands for as the checkpoint `twin`;
    `pre` is llama.cpp's name of how the tokenizer cuts text.

    With `split`, as files of so many tensors each; returned is the first.
    """
    config = json.loads((dense / "config.json").read_text())
    text = config.get("text_config", config)
    architecture = ARCHITECTURES[text["model_type"]]
    if config["model_type"] == "mistral3":
        architecture = gguf.MODEL_ARCH.MISTRAL3
    name = gguf.MODEL_ARCH_NAMES[architecture]
    tensors = {
        part: tensor.float().numpy() for part, tensor in load_file(dense / "model.safetensors").items()
    }
    writer = gguf.GGUFWriter(target, name, split_max_tensors=split)
    _add_keys(writer, text, architecture)
    if (dense / "tokenizer.json").exists():
        add_bytes_tokenizer(writer, dense, text["vocab_size"], pre)
    same = dict[str, Array]()
    names = gguf.get_tensor_name_map(architecture, text["num_hidden_layers"])
    for part, stacked, members in _merged(tensors):
        stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
        assert stored is not None, part
        there, back = _changes(stored, architecture, text)
        array = there(stacked)
        kind = RECIPES[recipe](stored) if array.ndim > 1 and "ffn_gate_inp" not in stored else Kind.F32
        raw = pack(array, kind)
        writer.add_tensor(stored, raw, raw_dtype=kind)
        read_back = back(gguf.quants.dequantize(raw, kind).reshape(array.shape))
        same |= {each: read_back[i] if len(members) > 1 else read_back for i, each in enumerate(members)}
    for stored, factors in _rotation_factors(text, architecture).items():
        writer.add_tensor(stored, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if twin is not None:
        twin.mkdir()
        (twin / "config.json").write_text(json.dumps(config))
        save_file(
            {part: torch.from_numpy(np.ascontiguousarray(array)) for part, array in same.items()},
            twin / "model.safetensors",
            metadata={"format": "pt"},
        )
    return target if not split else min(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))


def pack(array: Array, kind: Kind) -> Array:
    """The bytes of a tensor."""
    quantize = {Kind.Q4_K: _q4_k, Kind.Q5_K: _q5_k, Kind.Q6_K: _q6_k}.get(kind)
    if quantize is None:
        return gguf.quants.quantize(np.ascontiguousarray(array), kind)
    blocks = quantize(array.reshape(-1, 256).astype(np.float32))
    return blocks.reshape(*array.shape[:-1], -1)


def _half(numbers: Array) -> tuple[Array, Array]:
    """As two bytes, and what those stand for."""
    short = numbers.astype("<f2")
    return short.reshape(-1, 1).view(np.uint8), np.maximum(short.astype(np.float32), 1e-7)


def _q4_k(blocks: Array) -> Array:
    scales, values = _k_groups(blocks, 15)
    return np.concatenate([scales, _halves(values)], 1)


def _q5_k(blocks: Array) -> Array:
    scales, values = _k_groups(blocks, 31)
    fifth = ((values >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    return np.concatenate([scales, fifth, _halves(values & 15)], 1)


def _halves(values: Array) -> Array:
    pairs = values.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


def _k_groups(blocks: Array, largest: int) -> tuple[Array, Array]:
    """The 16 bytes of scales and minima, and values [blocks, 8, 32] from 0 to `largest`."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.minimum(groups.min(2), 0.0)
    width = (groups.max(2) - least) / largest
    d_bytes, d = _half(width.max(1) / 63)
    m_bytes, m = _half(-least.min(1) / 63)
    scales = np.clip(np.rint(width / d[:, None]), 0, 63).astype(np.uint8)
    minima = np.clip(np.rint(-least / m[:, None]), 0, 63).astype(np.uint8)
    step = np.maximum(d[:, None] * scales, 1e-9)[..., None]
    values = np.clip(np.rint((groups + (m[:, None] * minima)[..., None]) / step), 0, largest)
    low = [scales[:, :4] | (scales[:, 4:] >> 4 << 6), minima[:, :4] | (minima[:, 4:] >> 4 << 6)]
    packed = np.concatenate([*low, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], axis=1)
    return np.concatenate([d_bytes, m_bytes, packed], 1), values.astype(np.uint8)


def _q6_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 16, 16)
    width = np.abs(groups).max(2) / 31
    d_bytes, d = _half(width.max(1) / 127)
    scales = np.clip(np.rint(width / d[:, None]), 0, 127).astype(np.int8)
    step = np.maximum(d[:, None] * scales, 1e-9)[..., None]
    values = (np.clip(np.rint(groups / step), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (values[:, :, :2] & 15) | (values[:, :, 2:] & 15) << 4
    high = values >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), d_bytes], 1)


def _merged(tensors: dict[str, Array]) -> list[tuple[str, Array, list[str]]]:
    """(name, array, names of the parts) of the text's tensors; experts as one."""
    found: list[tuple[str, Array, list[str]]] = []
    experts: dict[str, list[str]] = {}
    for name, array in sorted(tensors.items()):
        if name.startswith(("vision_tower", "multi_modal", "model.vision", "model.multi")):
            continue
        short = name.removeprefix("language_model.")
        if ".experts." not in name:
            found.append((short, array, [name]))
            continue
        base, _, rest = name.partition(".experts.")
        part = rest.split(".")[1]
        inner = f"layers.{base.split('.')[2]}.feed_forward" if part.startswith("w") else base
        experts.setdefault(f"{inner}.experts.{part}.weight", []).append(name)
    for name, members in experts.items():
        members.sort(key=lambda each: int(each.partition(".experts.")[2].split(".")[0]))
        found.append((name, np.stack([tensors[each] for each in members]), members))
    return found


def _changes(
    stored: str, architecture: gguf.MODEL_ARCH, config: dict[str, Any]
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """What llama.cpp's converter does to a tensor, and the way back."""
    reordered = architecture in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.MISTRAL3)
    if reordered and (".attn_q." in stored or ".attn_k." in stored):
        heads = config["num_attention_heads" if ".attn_q." in stored else "num_key_value_heads"]
        return (
            lambda a: a.reshape(heads, 2, -1, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape),
            lambda a: a.reshape(heads, -1, 2, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape),
        )
    if architecture in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and stored.endswith("norm.weight"):
        return lambda a: a + np.float32(1), lambda a: a - np.float32(1)
    return lambda a: a, lambda a: a


def _add_keys(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: gguf.MODEL_ARCH) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3, gguf.MODEL_ARCH.PHI3):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if architecture is gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if rope.get("rope_type") in ("linear", "yarn"):
        kind = gguf.RopeScalingType.LINEAR if rope["rope_type"] == "linear" else gguf.RopeScalingType.YARN
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(rope["factor"])
    if original := rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope" and (scale := config["max_position_embeddings"] / original) > 1:
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _rotation_factors(config: dict[str, Any], architecture: gguf.MODEL_ARCH) -> dict[str, list[float]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": rope[f"{kind}_factor"] for kind in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found: list[float] = []
    for i in range(0, dim, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        if wave < original / high:
            found.append(1.0)
        elif wave > original / low:
            found.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            found.append(float(1 / ((1 - smooth) / factor + smooth)))
    return {"rope_freqs.weight": found}


def add_bytes_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab_size: int, pre: str = "qwen2") -> None:
    """The tokenizer of a directory whose tokens are bytes, as llama.cpp's converter writes one."""
    content = json.loads((source / "tokenizer.json").read_text())
    config = json.loads((source / "tokenizer_config.json").read_text())
    ids: dict[str, int] = content["model"]["vocab"]
    added = {each["id"]: each for each in content["added_tokens"]}
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab_size)], [gguf.TokenType.UNUSED] * vocab_size
    for token, i in ids.items():
        tokens[i], kinds[i] = token, gguf.TokenType.NORMAL
    for i, each in added.items():
        tokens[i] = each["content"]
        kinds[i] = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    pairs = content["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    writer.add_add_bos_token(False)
    by_content = {each["content"]: i for i, each in added.items()}
    for name, add in (("eos_token", writer.add_eos_token_id), ("pad_token", writer.add_pad_token_id)):
        if (token := config.get(name)) is not None:
            add(by_content[token if isinstance(token, str) else token["content"]])
    template = source / "chat_template.jinja"
    if template.exists() or "chat_template" in config:
        writer.add_chat_template(template.read_text() if template.exists() else config["chat_template"])

"""Quantized checkpoints in the layouts that others publish, made from dense ones.

Each comes with its twin: the dense checkpoint of exactly the numbers that the integers stand for. The packing
follows the formats' own documentation, column by column in numpy, and shares no line with the engine.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LINEARS = ("_proj.weight",)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """One way to publish: what `config.json` says, and how one layer's weight [n, k] is stored."""

    config: dict[str, object]
    store: Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]
    """(layer's name, weight) to its tensors and the numbers that they stand for."""


def quantize(dense: Path, quantized: Path, twin: Path, how: Format) -> None:
    """Write `dense` with its linear layers quantized, and the twin."""
    tensors = load_file(dense / "model.safetensors")
    stored: Tensors = {}
    same: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(LINEARS) or "vision" in name:
            stored[name] = same[name] = tensor
            continue
        parts, numbers = how.store(name.removesuffix(".weight"), tensor.float().numpy())
        stored |= {part: value.contiguous() for part, value in parts.items()}
        same[name] = torch.from_numpy(np.ascontiguousarray(numbers, np.float32))
    config = json.loads((dense / "config.json").read_text())
    for directory, content, extra in (
        (quantized, stored, {"quantization_config": how.config}),
        (twin, same, {}),
    ):
        directory.mkdir()
        save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config | extra))


def _groups(
    weight: np.ndarray, group: int, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned values [n, k], scales and zero points [n, g], rounded to nearest."""
    n, k = weight.shape
    blocks = weight.reshape(n, k // group, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = np.abs(blocks).max(2) / (1 << (bits - 1))
        zero = np.full_like(scale, 1 << (bits - 1))
    else:
        low, high = np.minimum(blocks.min(2), 0), np.maximum(blocks.max(2), 0)
        scale = (high - low) / top
        zero = np.clip(np.round(-low / scale), 1, top)
    scale = np.maximum(scale, 1e-4).astype(np.float16).astype(np.float32)
    values = np.clip(np.round(blocks / scale[:, :, None]) + zero[:, :, None], 0, top)
    return values.reshape(n, k).astype(np.uint32), scale, zero.astype(np.uint32)


def _numbers(values: np.ndarray, scale: np.ndarray, zero: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32) - zero.astype(np.float32)[:, group_of]) * scale[:, group_of]


def _words(rows: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack along the last dimension, `places[i]` being where the i-th value of a word goes."""
    per = 32 // bits
    pad = -rows.shape[1] % per
    rows = np.pad(rows, ((0, 0), (0, pad)))
    words = np.zeros((rows.shape[0], rows.shape[1] // per), np.uint32)
    for column in range(rows.shape[1]):
        place = column % per if places is None else places[column % per]
        words[:, column // per] |= rows[:, column] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def gptq(
    bits: int = 4, group: int = 32, *, act_order: bool = False, symmetric: bool = True, v2: bool = False
) -> Format:
    """AutoGPTQ's and GPTQModel's."""

    def store(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        k = weight.shape[1]
        size = k if group == -1 else group
        group_of = np.arange(k) // size
        if act_order:  # The same order for all layers with the same inputs, as one Hessian gives.
            group_of = group_of[np.random.default_rng(k + ("o_proj" in name)).permutation(k)]
        sort = np.argsort(group_of, kind="stable")
        sorted_values, scale, zero = _groups(weight[:, sort], size, bits, symmetric)
        values = np.empty_like(sorted_values)
        values[:, sort] = sorted_values
        stored_zero = zero if v2 else zero - 1
        return {
            f"{name}.qweight": _words(values, bits).t(),
            f"{name}.qzeros": _words(stored_zero.T.copy(), bits),
            f"{name}.scales": torch.from_numpy(scale.T.copy()).half(),
            f"{name}.g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }, _numbers(values, scale, zero, group_of)

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }  # fmt: skip
    return Format(config, store)


def awq(group: int = 32) -> Format:
    """AutoAWQ's "gemm"."""

    def store(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        values, scale, zero = _groups(weight, group, 4, symmetric=False)
        places = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ: word nibble i holds column (0, 2, 4, 6, 1, 3, 5, 7)[i].
        return {
            f"{name}.qweight": _words(values.T.copy(), 4, places),
            f"{name}.qzeros": _words(zero.T.copy(), 4, places),
            f"{name}.scales": torch.from_numpy(scale.T.copy()).half(),
        }, _numbers(values, scale, zero, np.arange(weight.shape[1]) // group)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config, store)


def compressed(form: str, **weights: object) -> dict[str, object]:
    """llm-compressor's `quantization_config`."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def packed(bits: int = 4, group: int = 32, *, symmetric: bool = True) -> Format:
    """compressed-tensors' pack-quantized."""

    def store(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        n, k = weight.shape
        values, scale, zero = _groups(weight, group, bits, symmetric)
        tensors = {
            f"{name}.weight_packed": _words(values, bits),
            f"{name}.weight_scale": torch.from_numpy(scale).bfloat16(),
            f"{name}.weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = _words(zero.T.copy(), bits).t()
        rounded = tensors[f"{name}.weight_scale"].float().numpy()
        return tensors, _numbers(values, rounded, zero, np.arange(k) // group)

    how = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    return Format(compressed("pack-quantized", **how), store)


def int8_channels() -> Format:
    """compressed-tensors' int-quantized, W8A8."""

    def store(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        values = np.clip(np.round(weight / scale), -128, 127)
        tensors = {
            f"{name}.weight": torch.from_numpy(values.astype(np.int8)),
            f"{name}.weight_scale": torch.from_numpy(scale),
        }
        return tensors, values * scale

    how = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    return Format(compressed("int-quantized", **how), store)


def float8(strategy: str, block: tuple[int, int] = (16, 32)) -> Format:
    """FP8: "channel" and "tensor" as compressed-tensors has them, "block" as DeepSeek does."""

    def store(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        n, k = weight.shape
        rows, columns = {"tensor": (n, k), "channel": (1, k), "block": block}[strategy]
        scale = np.zeros((-(-n // rows), -(-k // columns)), np.float32)
        spread = np.zeros((n, k), np.float32)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                place = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scale[i, j] = spread[place] = np.abs(weight[place]).max() / 448
        values = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
        suffix = "weight_scale_inv" if strategy == "block" else "weight_scale"
        stored = torch.from_numpy(scale.reshape(()) if strategy == "tensor" else scale)
        tensors = {f"{name}.weight": values, f"{name}.{suffix}": stored}
        return tensors, values.float().numpy() * spread

    if strategy == "block":
        return Format({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}, store)
    return Format(compressed("float-quantized", num_bits=8, type="float", strategy=strategy), store)


FORMATS = {
    "gptq": gptq(),
    "gptq-8bit": gptq(8),
    "gptq-rows": gptq(4, -1),
    "gptq-act-order": gptq(act_order=True, symmetric=False),
    "gptq-v2": gptq(symmetric=False, v2=True),
    "awq": awq(),
    "packed-int4": packed(),
    "packed-int4-zeros": packed(symmetric=False),
    "packed-int8": packed(8),
    "w8a8": int8_channels(),
    "fp8-tensor": float8("tensor"),
    "fp8-channel": float8("channel"),
    "fp8-block": float8("block"),
}

"""How a published checkpoint quantizes its linear layers: `quantization_config` of `config.json`, as data.

    gptq                 Frantar et al. 2022 (arXiv 2210.17323): 4 or 8 bits, groups, act-order
    awq                  Lin et al. 2023 (arXiv 2306.00978): 4 bits, groups, zero points ("gemm" layout)
    compressed-tensors   llm-compressor's: packed 4 or 8 bits; int8, FP8 per tensor, channel, group or block
    fp8, fbgemm_fp8      FP8 (e4m3) per tensor, per channel, or in blocks (DeepSeek's, Qwen's)
    modelopt             NVIDIA's: FP8 per tensor

Older tools wrote it into files of their own beside `config.json`. Which tensors a layer then has, and what
they mean, is in `engine/quantized.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from penstock.config.checkpoints import json_object
from penstock.errors import CheckpointError

Method = Literal["gptq", "awq", "compressed-tensors", "fp8", "gguf"]

_BESIDE = (
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
    ("hf_quant_config.json", "modelopt"),
)
"""Files in which AutoGPTQ, AutoAWQ and ModelOpt say it, and the method where they name none."""
_WIDTHS = (4, 8)
_COMPRESSED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Quantization:
    """The facts that reading a checkpoint's quantized layers takes; the tensors themselves say the rest."""

    method: Method
    bits: int
    """Of a weight; the most, where layers differ."""
    group: int | None = None
    """Inputs that share a scale, as the config says; None: all of them, or each layer's scales tell."""
    zeros_less_one: bool = False
    """GPTQ's first format stores zero points less one."""
    mixed: bool = False
    """GPTQ: widths and groups of some layers are others (`dynamic`), which their tensors tell."""
    symmetric: bool = False
    """No zero points beside the middle of the range (GPTQ stores them all the same)."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale (FP8 in blocks)."""
    layout: str = ""
    """GGUF's name of the type that most weights have."""

    @property
    def name(self) -> str:
        """For people: the method and the width."""
        return f"{self.method} {self.layout or f'{self.bits} bit'}"

    def kept(self, widths: frozenset[int]) -> int:
        """The width of the integers that kernels compute with which know these; 0: weights are made dense."""
        return self.bits if self.bits in widths and (self.method != "gguf" or self.bits == 4) else 0


def find_quantization(directory: Path) -> tuple[dict[str, Any], Path] | None:
    """The object that says how a model directory's layers are quantized, and its file; None: they are dense.

    In `config.json`, of the whole or of its text part; `compression_config` is llm-compressor's first name.
    """
    config = json_object(directory / "config.json")
    text = config.get("text_config")
    for part in (config, cast(dict[str, Any], text) if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if isinstance(part.get(name), dict):
                return cast(dict[str, Any], part[name]), directory / "config.json"
    for name, method in _BESIDE:
        given = json_object(directory / name)
        given = given.get("quantization", given)
        if isinstance(given, dict) and given:
            return {"quant_method": method} | cast(dict[str, Any], given), directory / name
    return None


def read_quantization(given: Mapping[str, Any], where: str) -> Quantization:
    """The content of `quantization_config`.

    Args:
        given: the object.
        where: the file, for messages.

    Raises:
        CheckpointError: a method, width or layout that is not read, by name.
    """
    named = str(given.get("quant_method") or "an unnamed method")[:64]
    if named not in _READERS:
        raise CheckpointError(
            f"{where}: quantization_config: {named} is not read; expected one of {', '.join(_READERS)}"
        )
    return _READERS[named](given, f"{where}: quantization_config ({named})")


def _gptq(given: Mapping[str, Any], where: str) -> Quantization:
    _one_of(given.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"), where, "checkpoint_format")
    overrides = given.get("dynamic")
    each = cast(Mapping[str, Any], overrides).values() if isinstance(overrides, Mapping) else ()
    settings = [given, *(cast(Mapping[str, Any], some) for some in each if isinstance(some, Mapping))]
    return Quantization(
        method="gptq",
        bits=_width(given.get("bits"), where, "bits"),
        group=_group(given.get("group_size", -1), where),
        symmetric=all(some.get("sym", True) is True for some in settings),
        zeros_less_one=given.get("checkpoint_format", "gptq") != "gptq_v2",
        mixed=bool(given.get("dynamic")),
    )


def _awq(given: Mapping[str, Any], where: str) -> Quantization:
    _one_of(str(given.get("version", "gemm")).lower(), ("gemm",), where, "version")
    bits = given.get("bits", given.get("w_bit"))
    _one_of(bits, (4,), where, "bits")
    return Quantization(
        method="awq", bits=4, group=_group(given.get("group_size", given.get("q_group_size", 128)), where)
    )


def _fp8(given: Mapping[str, Any], where: str) -> Quantization:
    _one_of(given.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"), where, "fmt")
    return Quantization(method="fp8", bits=8, block=_block(given.get("weight_block_size"), where))


def _modelopt(given: Mapping[str, Any], where: str) -> Quantization:
    _one_of(given.get("quant_algo"), ("FP8",), where, "quant_algo")
    return Quantization(method="fp8", bits=8)


def _compressed(given: Mapping[str, Any], where: str) -> Quantization:
    _one_of(given.get("format", "dense"), _COMPRESSED, where, "format")
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity:
        _one_of(
            cast(dict[str, Any], sparsity).get("format", "dense"), ("dense",), where, "sparsity_config.format"
        )
    transforms = given.get("transform_config")
    if isinstance(transforms, dict) and cast(dict[str, Any], transforms).get("config_groups"):
        raise CheckpointError(f"{where}: transform_config (rotations of layers) is not read; expected none")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: config_groups must be an object with at least one group")
    widths: list[int] = []
    block: tuple[int, int] | None = None
    for name, group in cast(dict[str, Any], groups).items():
        at = f"config_groups.{str(name)[:64]}.weights"
        weights = cast(dict[str, Any], group).get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(f"{where}: {at} must be an object")
        weights = cast(dict[str, Any], weights)
        widths.append(_width(weights.get("num_bits"), where, f"{at}.num_bits"))
        _one_of(weights.get("type", "int"), ("int", "float"), where, f"{at}.type")
        if weights.get("type") == "float":
            _one_of(weights.get("num_bits"), (8,), where, f"{at}.num_bits of a float")
        if weights.get("strategy") == "block":
            block = _block(weights.get("block_structure"), where)
    return Quantization(method="compressed-tensors", bits=max(widths), block=block)


_READERS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
}
"""By the name in `quant_method`."""


def _one_of(value: object, known: tuple[object, ...], where: str, field: str) -> None:
    if value not in known:
        expected = " or ".join(str(each) for each in known)
        raise CheckpointError(f"{where}: {field} {str(value)[:64]!r} is not read; expected {expected}")


def _width(value: object, where: str, field: str) -> int:
    _one_of(value, _WIDTHS, where, field)
    return cast(int, value)


def _group(value: object, where: str) -> int | None:
    """Inputs per scale; -1 means all of a row."""
    if value in (None, -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: group_size must be -1 or a positive number, not {str(value)[:64]!r}")
    return value


def _block(value: object, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sides = cast(list[object], value) if isinstance(value, list) else []
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(f"{where}: the block must be two positive numbers, rows and columns")
    return cast(tuple[int, int], tuple(sides))

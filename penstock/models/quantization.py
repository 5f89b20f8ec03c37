"""How a published checkpoint quantizes its linear layers: `quantization_config` of `config.json`, as data.

    gptq                 Frantar et al. 2022 (arXiv 2210.17323): 4 or 8 bits, groups, act-order
    awq                  Lin et al. 2023 (arXiv 2306.00978): 4 bits, groups, zero points ("gemm" layout)
    compressed-tensors   llm-compressor's: packed 4 or 8 bits; int8, FP8 per tensor, channel, group or block
    fp8, fbgemm_fp8      FP8 (e4m3) per tensor, per channel, or in blocks (DeepSeek's, Qwen's)

Which tensors a layer then has, and what they mean, is in `engine/quantized.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from penstock.errors import CheckpointError

Method = Literal["gptq", "awq", "compressed-tensors", "fp8", "gguf"]

READ: dict[str, Method] = {
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
}
"""Names in `quant_method`, and whose layout each means."""
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


def read_quantization(given: Mapping[str, Any], where: str) -> Quantization:
    """The content of `quantization_config`.

    Args:
        given: the object.
        where: the file, for messages.

    Raises:
        CheckpointError: a method, width or layout that is not read, by name.
    """
    named = str(given.get("quant_method") or "an unnamed method")[:64]
    method = READ.get(named)
    if method is None:
        raise CheckpointError(
            f"{where}: quantization_config: {named} is not read; expected one of {', '.join(READ)}"
        )
    return _READERS[method](given, f"{where}: quantization_config ({named})")


def _gptq(given: Mapping[str, Any], where: str) -> Quantization:
    _one_of(given.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"), where, "checkpoint_format")
    return Quantization(
        method="gptq",
        bits=_width(given.get("bits"), where, "bits"),
        group=_group(given.get("group_size", -1), where),
        symmetric=given.get("sym", True) is True,
        zeros_less_one=given.get("checkpoint_format", "gptq") != "gptq_v2",
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


def _compressed(given: Mapping[str, Any], where: str) -> Quantization:
    _one_of(given.get("format", "dense"), _COMPRESSED, where, "format")
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity:
        _one_of(
            cast(dict[str, Any], sparsity).get("format", "dense"), ("dense",), where, "sparsity_config.format"
        )
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


_READERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8}


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

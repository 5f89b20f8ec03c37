"""Which code computes a decoder on the CPU, and in which precision: the native kernels where they can, else
torch. Chosen once, here.

    NativeDecoder + NativeAttention     one call per step, any SIMD level from AVX2 up
    Decoder + CpuAttention              torch alone, any machine; the twin that the other is tested against
"""

import logging
from dataclasses import dataclass

import torch

from penstock.config.tree import EngineConfig
from penstock.engine.fingerprint import torch_kernels
from penstock.engine.native.decoder import Precision, unsupported
from penstock.engine.native.library import KernelsUnavailable, NativeLibrary, Type
from penstock.errors import ConfigError
from penstock.models.spec import DecoderSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Computing:
    """What computes a model, and in which precision."""

    native: NativeLibrary | None
    """None: torch."""
    dtype: torch.dtype
    """Of activations and the KV cache, and of weights that are not quantized."""
    precision: Precision = "native"
    """Of the weights."""

    @property
    def kept_bits(self) -> frozenset[int]:
        """Widths of a checkpoint's own integers that are computed with; others are made dense."""
        if self.native is None or self.precision != "native":
            return frozenset()
        widths = ((4, Type.I4), (8, Type.I8))
        return frozenset(bits for bits, kind in widths if self.native.supports(kind))

    @property
    def kernels(self) -> str:
        """Names them, and what their bits depend on."""
        return torch_kernels() if self.native is None else f"native {self.native.isa}"


def choose_computing(config: EngineConfig, spec: DecoderSpec) -> Computing:
    """The native kernels if the config wants them and they can compute this model here, else torch.

    Raises:
        ConfigError: the config insists on what cannot be done here, by the setting's name.
    """
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    precision: Precision = "native" if config.quantization == "none" else config.quantization
    native, reason = _native_kernels(config, spec, dtype, precision)
    if native is not None:
        return Computing(native, dtype, precision)
    for setting, insists in (
        (f"engine.kernels is {config.kernels}", config.kernels == "native"),
        (f"engine.quantization is {config.quantization}", config.quantization != "none"),
    ):
        if insists:
            raise ConfigError(f"{setting}, but {reason}")
    if config.kernels == "auto":
        _log.info("computing with torch, which is slower than the native kernels: %s", reason)
    return Computing(None, _torch_dtype() if config.dtype == "auto" else dtype)


def _native_kernels(
    config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, precision: Precision
) -> tuple[NativeLibrary | None, str]:
    """The kernels, or why there are none."""
    if config.kernels == "torch":
        return None, "engine.kernels is torch, which computes with whole weights only"
    try:
        kernels = NativeLibrary()
    except KernelsUnavailable as error:
        return None, str(error)
    reason = unsupported(spec, dtype, kernels, precision)
    return (kernels, "") if reason is None else (None, reason)


def _torch_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it natively: elsewhere torch is far slower with it than with
    float32.
    """
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
    return torch.bfloat16 if fast else torch.float32

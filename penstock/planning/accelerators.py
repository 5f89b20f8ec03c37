"""Accelerators by name: what the roofline and the planner count with.

Every figure is a default that may be replaced.

Memory, bandwidth and peaks are the vendors' data sheets (dense, without sparsity; links: one direction).
Prices are what rental companies asked on demand for one of them per hour in 2025, rounded: replace them by
your own contract's. `cpu-2` is the two-core machine that this repository's figures come from (docs/bench.md):
from its own measured steps.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError

GB, TB, TFLOPS = 10**9, 10**12, 10**12


@dataclass(slots=True, frozen=True, kw_only=True)
class Accelerator:
    """One device. Peaks are in operations per second, bandwidths in bytes per second."""

    name: str
    memory_bytes: int
    bandwidth: float
    """Of the device's memory."""
    peak: Mapping[str, float]
    """Dense matrix products, by type: "bf16", "fp8", "int8", "fp32"."""
    link: float
    """To its neighbours (NVLink, or the bus), one direction."""
    price_per_hour: float
    """USD."""
    source: str
    overhead_ns: int = 1_500_000
    """Of one step, whatever it computes: launches, planning, sampling."""

    def peak_of(self, dtype: str) -> float:
        """Operations per second in a type.

        Raises:
            ConfigError: the device does not compute in it.
        """
        if dtype not in self.peak:
            raise ConfigError(
                f"dtype: {self.name} does not compute in {dtype}; it knows {', '.join(self.peak)}"
            )
        return self.peak[dtype]


def _device(
    name: str,
    gigabytes: float,
    tb_per_s: float,
    peak: Mapping[str, float],
    link_gb: float,
    price: float,
    source: str,
) -> Accelerator:
    return Accelerator(
        name=name, memory_bytes=int(gigabytes * GB), bandwidth=tb_per_s * TB, link=link_gb * GB,
        peak={dtype: value * TFLOPS for dtype, value in peak.items()}, price_per_hour=price, source=source,
    )  # fmt: skip


ACCELERATORS: Mapping[str, Accelerator] = {
    device.name: device
    for device in (
        _device("h100", 80, 3.35, {"bf16": 989, "fp8": 1979, "int8": 1979, "fp32": 67}, 450, 3.0,
            "NVIDIA H100 "
        "SXM"),
        _device("h200", 141, 4.8, {"bf16": 989, "fp8": 1979, "int8": 1979, "fp32": 67}, 450, 3.8,
            "NVIDIA H200 "
        "SXM"),
        _device("b200", 180, 7.7, {"bf16": 2250, "fp8": 4500, "fp4": 9000, "fp32": 75}, 900, 5.5,
            "NVIDIA HGX B200"),
        _device("a100-80", 80, 2.039, {"bf16": 312, "int8": 624, "fp32": 19.5}, 300, 1.8, "NVIDIA A100 80GB "
        "SXM"),
        _device("a100-40", 40, 1.555, {"bf16": 312, "int8": 624, "fp32": 19.5}, 300, 1.3, "NVIDIA A100 40GB "
        "SXM"),
        _device("l40s", 48, 0.864, {"bf16": 362, "fp8": 733, "int8": 733, "fp32": 91.6}, 32, 1.0,
            "NVIDIA L40S"),
        _device("l4", 24, 0.3, {"bf16": 121, "fp8": 242, "int8": 242, "fp32": 30.3}, 32, 0.7, "NVIDIA L4"),
        _device("a10g", 24, 0.6, {"bf16": 70, "int8": 140, "fp32": 35}, 32, 1.0, "NVIDIA A10G, AWS g5"),
        _device("mi300x", 192, 5.3, {"bf16": 1307, "fp8": 2615, "int8": 2615, "fp32": 163}, 448, 2.5,
            "AMD MI300X"),
        _device("cpu-2", 8, 0.02, {"bf16": 0.16, "int8": 0.32, "fp32": 0.16}, 0.1, 0.08,
            "measured: docs/bench.md"),
    )
}  # fmt: skip


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name.

    Raises:
        ConfigError: there is none; the message has the nearest name.
    """
    if (found := ACCELERATORS.get(name.lower())) is not None:
        return found
    raise ConfigError(f"accelerator: {unknown(name, ACCELERATORS)}")


def unknown(name: str, known: Mapping[str, object]) -> str:
    """Words for a name that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"{name!r} is not known; {hint}"

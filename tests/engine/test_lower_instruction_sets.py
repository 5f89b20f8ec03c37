"""The promise of `test_invariance.py` on instruction sets below this processor's best: what a smaller
processor would compute with.

Every library chooses its kernels when it is loaded, so each smaller processor is a process of its own, in
which all libraries are lowered to what it has, that runs a part of those tests. A library is left as it is
where the processor has nothing above that set, and where it does not heed its own variable: MKL takes
MKL_ENABLE_INSTRUCTIONS from Intel's processors only, and MKL_CBWR=COMPATIBLE from all.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)
HERE = Path(__file__).parent
FILES = [str(HERE / "layers"), str(HERE / "attention" / "test_cpu.py"), str(HERE / "test_invariance.py")]
PARTS = {
    "torch": "place or how_many or (company and plain and dtype0 and (shape0 or shape5))"
    " or mixtral-float32-torch-16 or qwen3-float32-torch-7 or (batch and qwen3-bfloat16-torch)",
    "native": "native and (batch or chunks_change)",
}
"""What `pytest -k` takes of them."""
PROBE = """
import torch
from penstock.engine.native import NativeLibrary, KernelsUnavailable
with torch.backends.mkl.verbose(1), torch.backends.mkldnn.verbose(1):
    torch.randn(64, 64) @ torch.randn(64, 64)
    torch.relu(torch.randn(1, 4, 16, 16).to_mkldnn())
print("aten:", torch.backends.cpu.get_cpu_capability())
try:
    print("native:", NativeLibrary().isa)
except KernelsUnavailable:
    print("native: none")
"""
SEEN = {
    "ATen": r"^aten: (.*)$",
    "oneDNN": r"cpu,isa:(.*)$",
    # The sets it uses, and whether it sums in the order of the oldest.
    "MKL": r"^MKL_VERBOSE (?:oneMKL|Intel).*architecture (.*), Lnx|CNR:(\w+)",
    "native": r"^native: (.*)$",
}


@dataclass(frozen=True)
class Level:
    library: str
    variable: str
    value: str
    above: tuple[str, ...]
    """Flags of the processor, any of which means that the library has more than this level."""


PROCESSORS = {
    "in MKL's oldest order": (Level("MKL", "MKL_CBWR", "COMPATIBLE", ("sse2",)),),
    "without AVX2": (
        Level("ATen", "ATEN_CPU_CAPABILITY", "default", ("avx2",)),
        Level("oneDNN", "ONEDNN_MAX_CPU_ISA", "SSE41", ("avx",)),
        Level("MKL", "MKL_ENABLE_INSTRUCTIONS", "SSE4_2", ("avx",)),
    ),
    "AVX2": (
        Level("ATen", "ATEN_CPU_CAPABILITY", "avx2", ("avx512f",)),
        Level("oneDNN", "ONEDNN_MAX_CPU_ISA", "AVX2", ("avx512f",)),
        Level("MKL", "MKL_ENABLE_INSTRUCTIONS", "AVX2", ("avx512f",)),
        Level("native", "PENSTOCK_NATIVE_ISA", "avx2", ("avx512f",)),
    ),
    "AVX-512": (
        Level("oneDNN", "ONEDNN_MAX_CPU_ISA", "AVX512_CORE", ("avx512_bf16",)),
        Level("native", "PENSTOCK_NATIVE_ISA", "avx512", ("avx512_vnni", "avx512_bf16", "amx_tile")),
    ),
    "AVX-512 with BF16": (Level("oneDNN", "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", ("amx_tile",)),),
}


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    # Not a process of this run of pytest-xdist: a run of its own.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=own | environment, capture_output=True, text=True, check=False)


@cache
def said(*lowered: Level) -> str:
    """The libraries' own words of what they compute with."""
    done = python({each.variable: each.value for each in lowered}, "-c", PROBE)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def in_use(library: str, *lowered: Level) -> list[tuple[str, ...]]:
    found = [match.groups() for match in re.finditer(SEEN[library], said(*lowered), re.MULTILINE)]
    assert found, said(*lowered)
    return found


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_promise_holds_below_the_best_instruction_set(processor: str) -> None:
    flags = processor_flags()
    levels = tuple(each for each in PROCESSORS[processor] if flags & {*each.above})
    if not levels:
        pytest.skip("this processor has nothing above that instruction set")
    heeded = [each for each in levels if in_use(each.library, *levels) != in_use(each.library)]
    if not heeded:
        deaf = ", ".join(each.library for each in levels)
        pytest.skip(f"on this processor none heeds its variable of {deaf}")
    lowers_native = any(each.library == "native" for each in heeded)
    lowers_torch = any(each.library != "native" for each in heeded)
    parts = [PARTS[name] for name, is_in in (("torch", lowers_torch), ("native", lowers_native)) if is_in]
    lowered = {each.variable: each.value for each in levels}
    tests = " or ".join(f"({part})" for part in parts)
    done = python(lowered, "-m", "pytest", "-p", "no:cacheprovider", "-x", *FILES, "-k", tests)
    # No test at all is an error to pytest as well.
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("processor", ["AVX2", "AVX-512"])
def test_our_own_kernels_heed_their_variable(processor: str) -> None:
    flags = processor_flags()
    levels = tuple(each for each in PROCESSORS[processor] if flags & {*each.above})
    native = [each.value for each in levels if each.library == "native"]
    if not native or in_use("native") == [("none",)]:
        pytest.skip("no kernels, or none above that instruction set")
    assert in_use("native", *levels) == [(*native,)]

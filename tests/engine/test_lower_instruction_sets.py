"""The promise of `test_invariance.py` on instruction sets below this processor's best: what a smaller
processor would compute with.

Every library chooses its kernels when it is loaded, so each level is a process of its own that runs a part of
those tests. A level is skipped where the processor has nothing above it, and where the library does not heed
its own variable: MKL takes MKL_ENABLE_INSTRUCTIONS from Intel's processors only, and MKL_CBWR=COMPATIBLE from
all.
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

    def __str__(self) -> str:
        return f"{self.library}-{self.value}"


LEVELS = (
    Level("ATen", "ATEN_CPU_CAPABILITY", "default", ("avx2",)),
    Level("ATen", "ATEN_CPU_CAPABILITY", "avx2", ("avx512f",)),
    Level("oneDNN", "ONEDNN_MAX_CPU_ISA", "AVX2", ("avx512f",)),
    Level("oneDNN", "ONEDNN_MAX_CPU_ISA", "AVX512_CORE", ("avx512_bf16",)),
    Level("oneDNN", "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", ("amx_tile",)),
    Level("MKL", "MKL_CBWR", "COMPATIBLE", ("sse2",)),
    Level("MKL", "MKL_ENABLE_INSTRUCTIONS", "SSE4_2", ("avx",)),
    Level("MKL", "MKL_ENABLE_INSTRUCTIONS", "AVX2", ("avx512f",)),
    Level("native", "PENSTOCK_NATIVE_ISA", "avx2", ("avx512f",)),
    Level("native", "PENSTOCK_NATIVE_ISA", "avx512", ("avx512_vnni", "avx512_bf16", "amx_tile")),
)


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    # Not a process of this run of pytest-xdist: a run of its own.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=own | environment, capture_output=True, text=True, check=False)


@cache
def in_use(library: str, variable: str = "", value: str = "") -> list[tuple[str, ...]]:
    """What the library says of itself when it computes."""
    done = python({variable: value} if variable else {}, "-c", PROBE)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [match.groups() for match in re.finditer(SEEN[library], done.stdout, re.MULTILINE)]
    assert found, done.stdout
    return found


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_the_promise_holds_below_the_best_instruction_set(level: Level) -> None:
    if not processor_flags() & {*level.above}:
        pytest.skip("this processor has nothing above that instruction set")
    lowered = {level.variable: level.value}
    if in_use(level.library, level.variable, level.value) == in_use(level.library):
        pytest.skip(f"{level.library} does not heed {level.variable} on this processor")
    part = PARTS["native" if level.library == "native" else "torch"]
    done = python(lowered, "-m", "pytest", "-p", "no:cacheprovider", "-x", *FILES, "-k", part)
    # No test at all is an error to pytest as well.
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

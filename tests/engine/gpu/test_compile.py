"""The kernels compile for a GPU of compute capability 9.0, and into what they were made for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "doubles" / "compile_kernels.py"
SHARED_BYTES_MAX = 227 * 1024
"""What one block of threads can have on Hopper."""
SPILL_BYTES_MAX = 64
SAMPLER_SPILL_BYTES_MAX = 128
"""Its first pass keeps sums for eight levels in registers."""

pytestmark = pytest.mark.timeout(300)
Compiled = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    reported = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert reported.returncode == 0, reported.stderr[-3000:]
    return json.loads(reported.stdout)


def test_every_kernel_fits_its_machine(compiled: Compiled) -> None:
    assert len(compiled) >= 19
    for name, kernel in compiled.items():
        assert kernel["shared_bytes"] <= SHARED_BYTES_MAX, name
        assert kernel["stack_bytes"] <= (SAMPLER_SPILL_BYTES_MAX if name == "sample" else SPILL_BYTES_MAX), (
            name
        )


def test_programs_of_attention_share_a_multiprocessor(compiled: Compiled) -> None:
    """`TritonOps` launches two for each, of 128 threads for rows that decode."""
    for name in ("attend 8b decode", "attend 14b decode"):
        kernel = compiled[name]
        assert 2 * (kernel["shared_bytes"] + 1024) <= SHARED_BYTES_MAX, name
        assert 2 * 128 * kernel["registers"] <= 65_536, name


def test_attention_uses_the_matrix_units_and_copies_ahead(compiled: Compiled) -> None:
    for name, kernel in compiled.items():
        if name.startswith("attend"):
            assert kernel["mma"] + kernel["wgmma"] > 0, name
            assert kernel["async_copies"] > 0, name
            assert (kernel["wgmma"] > 0) == name.endswith("chunk"), name


def test_quantized_weights_are_copied_ahead_to_the_matrix_units(compiled: Compiled) -> None:
    for name in ("int4 few rows", "int4 many rows", "int8 few rows", "fp8 few rows"):
        assert compiled[name]["mma"] + compiled[name]["wgmma"] > 0, name
        assert compiled[name]["async_copies"] > 0, name


def test_kernels_that_move_bytes_load_sixteen_at_a_time(compiled: Compiled) -> None:
    for name in ("rotate 8b", "norm add=True", "gate gelu=False", "combine 8b"):
        assert compiled[name]["wide_loads"] > 0, name

"""Compiles the CPU kernels into one plain shared library. Needs only the standard library and a C++ compiler.

`python -m penstock.engine.native.build` builds in place, for work on the code; `setup.py` calls the same
`build` when the package is installed. One build runs on every x86-64 machine: each instruction set has its
own translation unit and the library chooses at run time.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY_NAME = "_kernels.so"
LIBRARY = HERE / LIBRARY_NAME

AVX2 = ("-mavx2", "-mfma", "-mbmi2")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
AVX512_VNNI = (*AVX512, "-mavx512vnni")
AVX512_BF16 = (*AVX512_VNNI, "-mavx512bf16")
UNITS: dict[str, tuple[str, ...]] = {
    "adapters.cpp": (),
    "api.cpp": (),
    "cpu.cpp": (),
    "draft.cpp": (),
    "experts.cpp": (),
    "lookup.cpp": (),
    "pack.cpp": (),
    "pool.cpp": (),
    "step.cpp": (),
    "isa_avx2.cpp": AVX2,
    "isa_avx512.cpp": AVX512,
    "isa_avx512_vnni.cpp": AVX512_VNNI,
    "isa_avx512_bf16.cpp": AVX512_BF16,
    "isa_amx.cpp": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mprfchw"),
}
EMULATE_TILES = "-DPENSTOCK_EMULATE_TILES"
"""Builds tile kernels that run without tiles, for tests on machines that have none."""
# Contraction off: whether a * b + c is fused must not depend on how the compiler inlined a function,
# or the same row could get other bits in another batch.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off",
    "-fno-strict-aliasing", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
    "-Wno-psabi",
)  # fmt: skip
LINK = ("-shared", "-static-libstdc++", "-static-libgcc", "-lpthread")


class CannotBuild(Exception):
    """The kernels cannot be compiled here; the engine then computes with torch."""


def compiler_names() -> list[str]:
    """The programs that are looked for."""
    return [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]


def compiler() -> str:
    """The C++ compiler to use: `$CXX`, else g++, else c++.

    Raises:
        CannotBuild: there is none, or this machine is not one that the kernels are written for.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise CannotBuild(f"the kernels are for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    names = compiler_names()
    for name in names:
        if found := shutil.which(name):
            return found
    raise CannotBuild(
        f"no C++ compiler: looked for {', '.join(names)} (on Debian and Ubuntu: sudo apt-get install g++)"
    )


def build(output: Path, extra: tuple[str, ...] = ()) -> Path:
    """Compile every unit, link, and put the library at `output` in one move.

    Raises:
        CannotBuild: no compiler, or one that is too old for these instruction sets (it says what it said).
    """
    cxx = compiler()
    sources = HERE / "kernels"
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:

        def compile_unit(item: tuple[str, tuple[str, ...]]) -> str:
            name, flags = item
            if EMULATE_TILES in extra and name == "isa_amx.cpp":
                flags = AVX512_VNNI
            made = str(Path(scratch) / f"{name}.o")
            _run([cxx, *FLAGS, *extra, *flags, "-c", str(sources / name), "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
            objects = list(workers.map(compile_unit, UNITS.items()))
        linked = Path(scratch) / LIBRARY_NAME
        _run([cxx, *extra, *objects, *LINK, "-o", str(linked)])
        # A library that a running process has mapped must be replaced, never rewritten.
        beside = output.with_name(f".{output.name}.new")
        shutil.copy2(linked, beside)
        beside.replace(output)
    return output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{' '.join(command)}\n{done.stderr.strip()[-4000:]}")


def main() -> int:
    """Build in place and say where it went."""
    try:
        print(f"built {build(LIBRARY, tuple(sys.argv[1:]))}")
    except CannotBuild as why:
        print(f"not built: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

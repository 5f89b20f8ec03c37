"""Which kernels compute on this machine, in words for people: the banner, `penstock doctor`, and benches,
whose figures mean little without it.

Loads the library and knows nothing of models: one that it cannot compute runs on torch all the same.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.native.build import compiler_names
from penstock.engine.native.library import KernelsUnavailable, NativeLibrary

TORCH_COST = "3 to 8 times slower than the compiled kernels"
"""Decode steps of the 28M model with 1 to 32 rows (docs/design/034-torch-without-kernels.md)."""
_SOURCES = Path(__file__).with_name("kernels")


@dataclass(slots=True, frozen=True)
class KernelsHere:
    """The kernels that are installed, and if there are none: why not, and what gives them."""

    isa: str
    """Empty: there are none, and torch computes."""
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"native {self.isa}" if self.isa else f"torch, {TORCH_COST}"


def kernels_here() -> KernelsHere:
    """Look for the compiled kernels as the engine does."""
    try:
        return KernelsHere(NativeLibrary().isa)
    except KernelsUnavailable as why:
        return KernelsHere("", str(why), remedy())


def remedy() -> str:
    """The command that gives the kernels, in one line; only a checkout has their sources."""
    if not _SOURCES.is_dir():
        return "install the wheel for linux_x86_64, which has them; the one for any machine does not"
    build = "python -m penstock.engine.native.build"
    if any(shutil.which(name) for name in compiler_names()):
        return build
    return f"sudo apt-get install g++ && {build}"

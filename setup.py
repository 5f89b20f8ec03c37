"""Builds the optional native kernels; everything else about the package is in pyproject.toml.

Without a C++ compiler, on another processor, or with PENSTOCK_NO_NATIVE=1 the package installs all the same
and the engine computes with torch.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("penstock/engine/native")


def recipe() -> ModuleType:
    """`penstock.engine.native.build`, loaded by path: the package's own dependencies are not here yet."""
    spec = importlib.util.spec_from_file_location("penstock_native_build", NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Makes a plain shared library that ctypes loads, not a Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python version in the name."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Compile, or say why not and go on."""
        if os.environ.get("PENSTOCK_NO_NATIVE"):
            return
        build = recipe()
        try:
            build.build(Path(self.get_ext_fullpath(ext.name)))
        except build.CannotBuild as why:
            print(f"penstock: no native kernels, the engine will use torch: {why}", file=sys.stderr)


setup(
    ext_modules=[Extension("penstock.engine.native._kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)

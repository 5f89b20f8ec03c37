"""What a wheel holds beside the Python files, and how it is tagged; everything else is in pyproject.toml.

- The native kernels, where they can be built. ctypes loads them, so one wheel fits every Python:
  py3-none-linux_x86_64. Without a C++ compiler, on another processor, or with PENSTOCK_NO_NATIVE=1 the wheel
  is py3-none-any, and the engine computes with torch.
- The demo models, which a checkout has in `models/`, so that `penstock serve` answers wherever it was
  installed.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

NATIVE = Path("penstock/engine/native")
KERNELS = "penstock.engine.native._kernels"
MODELS = Path("models")
IN_WHEEL = ("penstock-demo", "penstock-demo-mini")
"""Their quantized copies are in a checkout only: `penstock quantize` makes them in a minute."""


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


class BuildFiles(build_py):
    """The Python files and the demo models, in a directory that holds nothing of an earlier build."""

    def run(self) -> None:
        """An installation in place (`pip install -e`) finds `models/` where it is."""
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        for source, target in self._models().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """With the models."""
        return [*super().get_outputs(include_bytecode), *self._models().values()]

    def get_source_files(self) -> list[str]:
        """With the models, so that a source distribution has them too."""
        return [*super().get_source_files(), *self._models()]

    def _models(self) -> dict[str, str]:
        """Where each file of the models comes from, and where it goes."""
        if self.editable_mode:
            return {}
        goal = Path(self.build_lib, "penstock", "demo_models")
        files = sorted(path for name in IN_WHEEL for path in (MODELS / name).iterdir() if path.is_file())
        return {str(path): str(goal / path.relative_to(MODELS)) for path in files}


class BuildWheel(bdist_wheel):
    """Tagged for what is in it: a machine if there are kernels, and never a version of Python."""

    def run(self) -> None:
        """Whether the kernels can be built is known once that was tried."""
        self.run_command("build")
        built = Path(self.get_finalized_command("build_ext").get_ext_fullpath(KERNELS))
        self.root_is_pure = not built.exists()
        if self.root_is_pure:
            self.distribution.ext_modules = []
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """See the class."""
        platform = super().get_tag()[2]
        return "py3", "none", "any" if self.root_is_pure else platform


setup(
    ext_modules=[Extension(KERNELS, sources=[], optional=True)],
    cmdclass={"bdist_wheel": BuildWheel, "build_ext": BuildKernels, "build_py": BuildFiles},
)

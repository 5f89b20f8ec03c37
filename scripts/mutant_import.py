"""A pytest plugin: one module is imported with a mutation in it, the files stay as they are.

scripts/mutants.py starts pytest with it. `PENSTOCK_MUTANT` is a JSON list: the module's name and the
mutation's key.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from hypothesis import Phase, settings
from mutations import mutated


class MutantLoader(SourceLoader):
    """Compiles a module with one mutation in it."""

    def __init__(self, name: str, path: str, key: str) -> None:
        self._name, self._path, self._key = name, path, key

    def get_filename(self, fullname: str) -> str:
        """Where the unchanged source is."""
        return self._path

    def get_data(self, path: str) -> bytes:
        """Read the unchanged source."""
        return Path(path).read_bytes()

    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache."""
        return compile(mutated(Path(self._path).read_text(), self._key), self._path, "exec")


class MutantFinder(MetaPathFinder):
    """Finds the one module, before anything else finds it."""

    def __init__(self, name: str, key: str) -> None:
        self._name, self._key = name, key

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib`."""
        if fullname != self._name:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        assert found is not None
        assert found.origin is not None
        return importlib.util.spec_from_file_location(
            fullname, found.origin, loader=MutantLoader(fullname, found.origin, self._key)
        )


if wanted := os.environ.get("PENSTOCK_MUTANT"):
    module, key = json.loads(wanted)
    assert module not in sys.modules, f"{module} was imported before it could be changed"
    sys.meta_path.insert(0, MutantFinder(module, key))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A mutant that no test imported was not tested."""
    if wanted and exitstatus == pytest.ExitCode.OK and module not in sys.modules:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


def pytest_configure() -> None:
    """Do not look for the smallest failing example: that there is one is enough.

    After conftest.py's own settings.
    """
    settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate), database=None)
    settings.load_profile("mutants")

"""The mutation run's own parts: what is changed, and by which name it is found again."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
QUIET = ("-p", "no:cacheprovider", "-p", "no:kmock")
"""No plug-ins that leave files or want others."""
SOURCE = """
BOUND = 7


class Bounds:
    size_max: int = 3
    'Bytes.'


class Contract(Protocol):
    def size(self) -> int:
        return 1


class Counter:
    def add(self, n: int = 2) -> int:
        assert n > 0
        if n < 5 and not self.closed:
            self.total += n
        if n > 9:
            raise ValueError(f"{n + 1}")
        return self.total

    def check_invariants(self) -> None:
        self.total += 1
"""


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("mutations")


def test_what_is_changed_and_what_is_left_alone(mutations) -> None:
    found = {(each.kind, each.before, each.after) for each in mutations.mutations(SOURCE)}
    assert found == {
        ("constant", "2", "3"),
        ("constant", "5", "6"),
        ("constant", "9", "10"),
        ("boolean", "n < 5 and (not self.closed)", "n < 5 or not self.closed"),
        ("condition", "n < 5 and (not self.closed)", "not (n < 5 and (not self.closed))"),
        ("condition", "not self.closed", "self.closed"),
        ("condition", "n > 9", "not n > 9"),
        ("compare", "n < 5", "n <= 5"),
        ("compare", "n > 9", "n >= 9"),
        ("delete", "self.total += n", "pass"),
        ("arithmetic", "self.total += n", "self.total -= n"),
        ("delete", "raise ValueError(f'{n + 1}')", "pass"),
        ("return", "return self.total", "return None"),
    }


def test_every_mutation_has_a_name_and_changes_one_place(mutations) -> None:
    names = [each.key for each in mutations.mutations(SOURCE)]
    assert len(set(names)) == len(names)
    plain = ast.unparse(ast.parse(SOURCE))
    changed = [ast.unparse(mutations.mutated(SOURCE, name)) for name in names]
    assert plain not in changed
    assert len(set(changed)) == len(names)
    with pytest.raises(LookupError):
        mutations.mutated(SOURCE, "Counter.add: constant: 3 -> 4")


def test_a_name_stays_when_other_functions_change(mutations) -> None:
    names = {each.key for each in mutations.mutations(SOURCE)}
    assert names <= {
        each.key for each in mutations.mutations(SOURCE + "\n\ndef more(x):\n    return x + 1\n")
    }


def test_a_mutant_is_imported_in_place_of_its_module_and_files_stay(tmp_path, mutations) -> None:
    """A pytest of its own, as the run starts it: the mutant is noticed, a module that nothing imports is an
    error.
    """
    (tmp_path / "module.py").write_text("def double(x):\n    return x * 2\n")
    (tmp_path / "test_module.py").write_text(
        "from module import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    key = "double: arithmetic: x * 2 -> x // 2"

    def status(*wanted: str) -> int:
        environ = {
            **os.environ,
            "PYTHONPATH": str(SCRIPTS),
            "PENSTOCK_MUTANT": json.dumps(wanted) if wanted else "",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutant_import", *QUIET, "."]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=False).returncode

    assert status() == 0
    assert status("module", key) == 1
    assert status("other", key) == 4

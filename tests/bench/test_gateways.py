"""How the relay's bench starts ours with another build of Python, from any folder."""

from pathlib import Path

import pytest

from bench.harness import REPOSITORY
from bench.relay.gateways import Place, command_of


def place(directory: Path) -> Place:
    return Place(port=1, upstream=2, worker="w.sock", venv=directory, directory=directory, key="k")


def test_a_path_of_python_may_have_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = command_of("penstock.http.bare@/opt/python-3.11/bin/python", place(tmp_path))
    assert command[2] == "/opt/python-3.11/bin/python"
    assert command[1].startswith(f"PYTHONPATH={REPOSITORY}:")


def test_features_behind_a_dash_are_off(tmp_path: Path) -> None:
    assert command_of("penstock-ledger+access", place(tmp_path))[-1] == "ledger+access"
    assert command_of("penstock", place(tmp_path))[-1] == "all"

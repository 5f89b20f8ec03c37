"""How the relay's bench starts ours with another build of Python, from any folder."""

import sys
import sysconfig
from pathlib import Path

import pytest

from bench.harness import REPOSITORY
from bench.relay.gateways import PROCESSES, Gateway, command_of
from penstock.config.load import load_config


def started(gateway: Gateway, directory: Path) -> list[str]:
    return command_of(gateway, directory, directory, port=1, upstream=2)


def python_of(version: str, directory: Path) -> Path:
    """A program that says that it is this version of Python."""
    python = directory / f"python-{version.replace(' ', '.')}/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    return python


def test_a_path_of_python_may_have_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = python_of(f"3 {sys.version_info.minor}", tmp_path)
    command = started(Gateway.named(f"penstock.http.bare@{python}"), tmp_path)
    assert command[2] == str(python)
    assert command[1] == f"PYTHONPATH={REPOSITORY}:{sysconfig.get_paths()['purelib']}"


def test_a_python_of_another_version_has_packages_of_its_own(tmp_path: Path) -> None:
    python = python_of("3 99", tmp_path)
    assert started(Gateway.named(f"penstock.http@{python}"), tmp_path)[1] == f"PYTHONPATH={REPOSITORY}"


@pytest.mark.parametrize("kind", sorted(PROCESSES))
def test_what_ours_are_configured_with_is_read(kind: str, tmp_path: Path) -> None:
    command = started(Gateway(kind), tmp_path)
    config = load_config(Path(command[-1]))
    assert len(config.models[0].workers) == 1


def test_a_peer_that_is_not_there_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"run bench/relay/install_peers\.sh"):
        started(Gateway("smg"), tmp_path)

import sys

import pytest

from penstock.cli.commands import doctor
from penstock.cli.commands.doctor import CheckState
from penstock.cli.python_build import PLAIN_COST, python_advice, python_build


@pytest.mark.parametrize(
    ("config", "flags", "prefix", "build"),
    [
        ("'--prefix=/x'", "-O3 -Wall", "/x", "plain"),
        ("'--enable-optimizations' '--with-lto'", "-O3", "/usr/local", "PGO+LTO"),
        ("'--prefix=/x'", "-O2 -fprofile-use", "/x", "PGO"),
        ("'--prefix=/x'", "-O2 -fprofile-instr-use=code.profclangd", "/x", "PGO"),
        ("'--prefix=/x'", "-flto=auto", "/x", "LTO"),
        ("'--enable-shared' '--prefix=/usr'", "-O2", "/usr", ""),
        ("", "", "/x", ""),
        ("'--enable-shared'", "-O3", "/usr/local", "plain"),
    ],
)
def test_how_python_was_built_is_read_from_its_flags(
    config: str, flags: str, prefix: str, build: str
) -> None:
    assert python_build(config, flags, prefix) == build


@pytest.mark.parametrize(("build", "is_slow"), [("plain", True), ("PGO", False), ("", False)])
def test_only_a_build_that_is_known_to_be_slow_is_called_so(build: str, is_slow: bool) -> None:
    advice = python_advice(build)
    assert (PLAIN_COST in advice, "--enable-optimizations" in advice) == (is_slow, is_slow)


def test_doctor_names_a_slow_build_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "python_build", lambda: "PGO")
    assert doctor.check_python().state is CheckState.OK
    monkeypatch.setattr(doctor, "python_build", lambda: "plain")
    check = doctor.check_python()
    assert check.state is CheckState.NOTE
    assert sys.executable in check.detail
    assert PLAIN_COST in check.hint

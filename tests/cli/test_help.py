"""`--help` is part of the product: its text has golden files.

`UPDATE_GOLDEN=1 pytest tests/cli` rewrites them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import __version__
from penstock.cli.main import main

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "serve",
        "worker",
        "chat",
        "bench",
        "doctor",
        "usage",
        "simulate",
        "plan",
        "keys",
        "keys create",
        "keys list",
        "keys rotate",
        "keys revoke",
        "top",
        "drain",
        "sleep",
        "wake",
        "explain",
        "alerts",
        "quantize",
        "generate",
        "scale",
        "cache",
        "completion",
    ],
)
def test_help_reads_as_written_down(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([*command.split(), "--help"])
    assert exited.value.code == 0
    text = capsys.readouterr().out
    path = GOLDEN / f"{'-'.join(['help', *command.split()])}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    if sys.version_info < (3, 13):
        assert text == path.read_text()
    else:
        assert words_of(text) == words_of(path.read_text())
    assert max(map(len, text.splitlines())) <= 105


def words_of(text: str) -> list[str]:
    """Without the layout, and without an argument's name behind an option's short form: from Python 3.13 on,
    argparse shows it behind the long form alone.
    """
    return re.sub(r"(-\w) [A-Z]+, --", r"\1, --", text).split()


def test_version_and_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"penstock {__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "required: COMMAND"),
        (["sevre"], "invalid choice: 'sevre'; did you mean 'serve'?"),
        (["keys", "creat"], "invalid choice: 'creat'; did you mean 'create'?"),
        (["usage", "--format", "jsn"], "invalid choice: 'jsn'; did you mean 'json'?"),
        (["completion", "tcl"], "invalid choice: 'tcl' (choose from"),
        (["serve", "--prot", "1"], "unrecognized arguments"),
        (["serve", "--port", "70000"], "'70000' is not a number from 0 to 65535"),
        (["serve", "--max-model-len", "1"], "--max-model-len: '1' is not a number from 2 to 100000000"),
        (["serve", "--kv-memory", "lots"], "'lots' is not a size such as 512M or 2GiB"),
        (["bench", "--concurrency", "1,x"], "'x' is not a number from 1 to 10000"),
        (["bench", "--concurrency", "1", "--rate", "2"], "not allowed with"),
        (["keys"], "required: ACTION"),
        (["keys", "create"], "required: --tenant"),
        (["keys", "create", "--tenant", "a", "--expires", "soon"], "'soon' is not a time such as 90s"),
        (["chat", "--temperature", "nan"], "'nan' is not a number from 0 to 2"),
    ],
)
def test_wrong_usage(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(argv)
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err

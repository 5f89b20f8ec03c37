"""`penstock completion`: the shells themselves say what they would complete."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("se",), {"serve"}),
        (("serve", "--quantiz"), {"--quantization"}),
        (("serve", "--quantization", ""), {"none", "int8", "int4"}),
        (("keys", "cr"), {"create"}),
        (("usage", "--format", "pa"), {"parquet"}),
        (("completion", ""), {"bash", "zsh", "fish"}),
    ],
)
def test_bash(
    words: tuple[str, ...], wanted: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "completion").write_text(script("bash", capsys))
    asked = " ".join(f"'{word}'" for word in ("penstock", *words))
    code = (
        f"source completion; COMP_WORDS=({asked}); COMP_CWORD={len(words)}; _shtab_penstock; printf "
        f"'%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert wanted <= set(done.stdout.split())
    if words[-1]:
        assert all(found.startswith(words[-1]) for found in done.stdout.split())


def test_the_others_name_every_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for shell, check in (("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"])):
        text = script(shell, capsys)
        for word in ("serve", "doctor", "completion", "quantization"):
            assert word in text
        path = tmp_path / shell
        path.write_text(text)
        if shutil.which(shell):
            assert subprocess.run([*check, path], check=False, capture_output=True).returncode == 0


def test_as_a_command_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "completion", "zsh"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#compdef penstock")

"""Scripts of the shape of vLLM's own examples run with nothing changed but the import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "vllm_scripts"

pytestmark = pytest.mark.timeout(180)


def moved(name: str) -> str:
    source = (SCRIPTS / name).read_text()
    changed, count = re.subn(r"^from vllm import", "from penstock import", source, flags=re.MULTILINE)
    assert count == 1
    assert len(changed.splitlines()) == len(source.splitlines())
    return changed


def run(name: str, model: Path) -> list[str]:
    """The lines that it prints, as a program of its own that must not warn."""
    code = f"MODEL = {str(model)!r}\n{moved(name)}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_prompts_in_a_batch(mini: Path) -> None:
    lines = run("basic.py", mini)
    assert [line.partition(" -> ")[0] for line in lines] == [
        "'The capital of France is'", "'Water boils at'", "'A penstock is'",
    ]  # fmt: skip
    assert all(re.search(r"(stop|length)$", line) for line in lines)


def test_conversations(mini: Path) -> None:
    *lines, last = run("chat.py", mini)
    assert [line[:2] for line in lines] == ["0:", "0:", "1:", "0:", "1:"]
    assert "Paris" in last


def test_streams(mini: Path) -> None:
    lines = run("streaming.py", mini)
    assert len(lines) == 2
    assert all(len(line) > 10 for line in lines)

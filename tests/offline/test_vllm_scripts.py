"""Scripts of the shape of vLLM's own examples run with nothing changed but the import."""

import contextlib
import gc
import io
import re
import runpy
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


def run(name: str, model: Path, place: Path) -> list[str]:
    """The lines that it prints. Whatever it leaves behind is a warning, and so an error of the test."""
    script, out, err = place / name, io.StringIO(), io.StringIO()
    script.write_text(moved(name))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        runpy.run_path(str(script), {"MODEL": str(model)}, run_name="__main__")
    gc.collect()
    assert err.getvalue() == ""
    return out.getvalue().splitlines()


def test_prompts_in_a_batch(mini: Path, tmp_path: Path) -> None:
    lines = run("basic.py", mini, tmp_path)
    assert [line.partition(" -> ")[0] for line in lines] == [
        "'The capital of France is'", "'Water boils at'", "'A penstock is'",
    ]  # fmt: skip
    assert all(re.search(r"(stop|length)$", line) for line in lines)


def test_conversations(mini: Path, tmp_path: Path) -> None:
    *lines, last = run("chat.py", mini, tmp_path)
    assert [line[:2] for line in lines] == ["0:", "0:", "1:", "0:", "1:"]
    assert "Paris" in last


def test_streams(mini: Path, tmp_path: Path) -> None:
    lines = run("streaming.py", mini, tmp_path)
    assert len(lines) == 2
    assert all(len(line) > 10 for line in lines)

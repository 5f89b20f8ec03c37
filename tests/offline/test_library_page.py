"""The examples of docs/library.md run as they stand, one after the other, and print what the page says."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


@pytest.mark.timeout(180)
def test_the_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    script, out = tmp_path / "page.py", io.StringIO()
    script.write_text("\n".join(blocks))
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(script))
    said = out.getvalue()
    assert "'The capital of France is' -> " in said
    assert "The capital of France is Paris." in said
    assert re.search(r"^(yes|no)$", said, flags=re.MULTILINE)
    near, far = re.findall(r"^(0\.\d+\S*) > (0\.\d+\S*|\S+e-\d+)$", said, flags=re.MULTILINE)[0]
    assert float(near) > float(far)

"""What a run of the suite says of what it could not run, and of the machine that it ran on."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOME_SKIP = """
import pytest

@pytest.mark.parametrize("n", range(4))
def test_runs(n):
    if n:
        pytest.skip("no such instruction set")

@pytest.mark.skip(reason="no such server")
def test_never_runs():
    pass
"""


def test_skips_are_summed_up_by_reason_at_the_end(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_some_skip.py").write_text(SOME_SKIP)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:kmock",
        "-n",
        "2",
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    assert (
        lines[-2] == "4 skipped: 3 x no such instruction set; 1 x no such server"
    )  # Then pytest's own counts.


def test_ci_names_the_processor_first() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands.index("scripts/processor.sh") < commands.index("make check test simulate")
    done = subprocess.run(
        [str(ROOT / "scripts" / "processor.sh")], capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    cpuinfo = Path("/proc/cpuinfo").read_text()
    if (model := re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)) is not None:
        assert model[1].strip() in line
    flags = re.search(r"^flags\s*: (.*)$", cpuinfo, re.MULTILINE)
    for name in ("avx2", "avx512f", "amx_tile"):
        assert (name in line.split()) == (flags is not None and name in flags[1].split())

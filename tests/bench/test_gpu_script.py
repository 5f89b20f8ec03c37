"""bench/gpu.sh from end to end on the CPU: every section's own logic, with tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(out: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(out), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [ROOT / "bench" / "gpu.sh", *flags], env=environment, capture_output=True, text=True, check=False
    )
    found = list(out.glob("*.json"))
    assert len(found) == 1, done.stderr
    return done.returncode, json.loads(found[0].read_text()), done.stdout


def test_everything_runs_on_the_cpu(tmp_path: Path) -> None:
    code, found, printed = run(tmp_path, "--cpu", "--tiny", "--in-process")
    sections = found["sections"]
    errors = {name: one["error"] for name, one in sections.items() if "error" in one}
    assert (code, errors) == (0, {}), printed
    assert list(sections) == [
        "ceilings", "kernels", "correctness", "qwen3-0.6b", "llama-3-8b", "qwen3-14b", "throughput",
    ]  # fmt: skip
    assert all(check["ok"] for check in sections["kernels"]["checks"].values())
    assert sections["correctness"]["families"]["qwen3"]["float32_same_tokens"]
    decode = sections["llama-3-8b"]["decode"]["3"]
    assert decode["step_ms"] > 0
    assert decode["without_overlap_ratio"] > 0
    assert 0 < decode["mbu"] < 1
    assert sections["throughput"]["output_tokens"] > 0
    assert "qwen3-14b" in printed


def test_what_fails_is_an_error_text(tmp_path: Path) -> None:
    """No GPU here: the section's process says so, and the script says it to the end."""
    code, found, _ = run(tmp_path, "--tiny", "--sections", "throughput")
    assert code == 1
    assert found["sections"]["throughput"]["error"].startswith(
        "ConfigError: engine.device is cuda, but torch sees"
    )

"""bench/gpu.sh from end to end on the CPU: every section's own logic, with tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import main

ROOT = Path(__file__).parents[2]


def written(out: Path) -> dict[str, Any]:
    (found,) = out.glob("*.json")
    return json.loads(found.read_text())


@pytest.mark.timeout(300)
def test_everything_runs_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [
        "ceilings", "kernels", "correctness", "quantized", "formats", "llama-3-8b", "llama-3-8b int4",
        "qwen3-14b", "throughput", "serving",
    ]  # fmt: skip
    flags = ["--cpu", "--tiny", "--in-process", "--out", str(tmp_path), "--sections", ",".join(wanted)]
    monkeypatch.setattr(sys, "argv", ["main.py", *flags])
    ended = main.main()
    sections, printed = written(tmp_path)["sections"], capsys.readouterr().out
    errors = {name: one["error"] for name, one in sections.items() if "error" in one}
    assert (ended, errors) == (0, {}), printed
    assert list(sections) == wanted
    assert all(check["ok"] for check in sections["kernels"]["checks"].values())
    assert all(check["ok"] for check in sections["quantized"]["checks"].values())
    assert sections["llama-3-8b int4"]["weight_bytes"] < sections["llama-3-8b int4"]["parameters"] * 4
    assert all(check["ok"] for check in sections["formats"]["forms"].values())
    assert sections["correctness"]["families"]["qwen3"]["float32_same_tokens"]
    decode = sections["llama-3-8b"]["decode"]["3"]
    assert decode["step_ms"] > 0
    assert decode["without_overlap_ratio"] > 0
    assert 0 < decode["mbu"] < 1
    assert sections["throughput"]["output_tokens"] > 0
    assert sections["serving"]["answers"]["equal"] == 8
    assert sections["serving"]["qwen3-0.6b"]["levels"][-1]["output_tokens_per_s"] > 0
    assert "qwen3-14b" in printed


def test_what_fails_is_an_error_text(tmp_path: Path) -> None:
    """No GPU here: the section's process says so, and the script says it to the end."""
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [ROOT / "bench" / "gpu.sh", "--tiny", "--sections", "throughput"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    error = written(tmp_path)["sections"]["throughput"]["error"]
    assert error.startswith("ConfigError: engine.device is cuda, but torch sees")

"""The labelled requests, and how well the defaults do on the third that was not tuned on."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = "bench.policy.complexity"


def figures(tmp_path: Path, part: str) -> dict:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", SCRIPT, "--part", part, "--json", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    found = json.loads(out.read_text())
    assert f"{found['requests']} requests ({part})" in shown
    return found


def test_regret_on_the_held_out_third_stays_under_its_bound(tmp_path: Path) -> None:
    found = figures(tmp_path, "held-out")
    assert found["regret"] <= 0.20
    assert found["under"] <= 0.35
    assert found["over"] <= 0.15
    assert found["cost_to_always_large"] <= 0.5


def test_the_set_is_large_and_varied() -> None:
    rows = [json.loads(line) for line in (ROOT / "bench/data/complexity.jsonl").read_text().splitlines()]
    assert len(rows) >= 300
    assert len({row["category"] for row in rows}) >= 10
    assert len({row["language"] for row in rows}) >= 10
    assert len({tuple(row["turns"]) for row in rows}) == len(rows)
    assert 0.25 <= sum(row["large"] for row in rows) / len(rows) <= 0.5

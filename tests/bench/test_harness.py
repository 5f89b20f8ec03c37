"""A bench's result file is added to by further calls, and says how each of its parts was measured."""

import json
from pathlib import Path

from bench.harness import extend_result


def test_parts_of_a_question_end_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out" / "figures.json"
    extend_result(path, {"trials": 2, "versions": {"equal": {"back": 0, "steps": [1]}}})
    first = json.loads(path.read_text())
    assert "earlier_parts" not in first
    extend_result(path, {"trials": 2, "versions": {"slow": {"back": 2}}})
    extend_result(path, {"trials": 3, "versions": {"equal": {"steps": [2]}}})
    found = json.loads(path.read_text())
    assert found["trials"] == 3
    assert found["versions"] == {"equal": {"back": 0, "steps": [2]}, "slow": {"back": 2}}
    assert found["earlier_parts"][0]["date"] == first["measured"]["date"]
    assert len(found["earlier_parts"]) == 2
    assert found["measured"]["commit"] == first["measured"]["commit"]


def test_without_a_file_nothing_is_written() -> None:
    extend_result(None, {})

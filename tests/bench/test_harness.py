"""A bench's result file is added to by further calls, and says how each of its parts was measured."""

import json
from pathlib import Path

import pytest

from bench.harness import REPOSITORY, command_of, extend_result


def test_parts_of_a_question_end_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out" / "figures.json"
    extend_result(path, {"versions": {"equal": {"back": 0, "in_step": {1.0: 3}}, "cold": {"back": 0}}})
    first = json.loads(path.read_text())
    assert "earlier_parts" not in first
    extend_result(path, {"versions": {"slow": {"back": 2}}})
    extend_result(path, {"versions": {"equal": {"back": 1, "in_step": {5.0: 1}}}})
    found = json.loads(path.read_text())
    equal = {"back": 1, "in_step": {"5.0": 1}}
    assert found["versions"] == {"equal": equal, "cold": {"back": 0}, "slow": {"back": 2}}
    assert [part["gave"] for part in found["earlier_parts"]] == [["versions / cold"], ["versions / slow"]]
    assert found["earlier_parts"][0]["date"] == first["measured"]["date"]
    assert found["measured"]["commit"] == first["measured"]["commit"]


def test_a_part_of_which_nothing_is_left_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    extend_result(path, {"cells": {"missed_s": 0.2}})
    extend_result(path, {"scale": {"out_s": 6.7}})
    extend_result(path, {"cells": {"east": {"missed_s": 0.3}}})
    found = json.loads(path.read_text())
    assert found["cells"] == {"east": {"missed_s": 0.3}}
    assert [part["gave"] for part in found["earlier_parts"]] == [["scale"]]


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    extend_result(None, {"cells": {"missed_s": 0.2}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--tree . ../elsewhere/old --json /srv/x/cost.json", "--tree . old --json cost.json"),
        ("--json docs/results/cost.json", "--json cost.json"),
        (
            "--fit docs/results/noise.json --only 2 % slower",
            "--fit docs/results/noise.json --only 2 % slower",
        ),
        ("--only a.http@/opt/my-py/bin/python,b --keep=/srv/run", "--only a.http@python,b --keep=run"),
        (f"--keep {REPOSITORY}/bench/out/run", "--keep bench/out/run"),
        ("--url http://127.0.0.1:8000/v1", "--url http://127.0.0.1:8000/v1"),
    ],
)
def test_a_command_has_no_places_of_one_machine(words: str, shown: str) -> None:
    assert command_of(words.split(" ")) == shown

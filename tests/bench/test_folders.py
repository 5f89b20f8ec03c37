"""Scripts of bench/ that a page, a target or a script names are there, and so is what the ratchet holds."""

import ast
import json
import re
from pathlib import Path

import pytest

from bench.harness import Spread
from bench.ratchet import QUESTIONS, RECORD

ROOT = Path(__file__).parents[2]
OLD = ("031-answered-questions.md",)
"""A page that names scripts of earlier commits."""
PAGES = sorted(
    path
    for path in [
        ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").rglob("*.py"), *(ROOT / "scripts").iterdir(),
    ]
    if path.is_file() and path.name not in OLD and (ROOT / "bench" / "out") not in path.parents
)  # fmt: skip


def test_a_named_script_is_there() -> None:
    missing: list[str] = []
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"(?<![\w/])bench/(?!out/|test_)[a-z_0-9/]+\.(?:py|sh|cpp?|json|txt)\b", text)
        named += [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (bench(?:\.[a-z_0-9]+)+)", text)]
        missing += [f"{page.relative_to(ROOT)}: {name}" for name in named if not (ROOT / name).is_file()]
    assert missing == []


def test_each_part_has_a_folder_that_is_described() -> None:
    folders = {path.parent.name for path in (ROOT / "bench").glob("*/*.py")} - {"out"}
    assert len(folders) >= 6
    page = (ROOT / "docs" / "bench.md").read_text()
    assert [folder for folder in sorted(folders) if f"`{folder}/`" not in page] == []
    assert set(re.findall(r"^\| `(\w+)/` \|", page, flags=re.MULTILINE)) <= folders
    assert {path.name for path in (ROOT / "bench").glob("*.py")} == {
        "__init__.py",
        "harness.py",
        "process.py",
        "ratchet.py",
    }


SCRIPTS = [
    path
    for path in sorted([*(ROOT / "bench").glob("*.py"), *(ROOT / "bench").glob("*/*.py")])
    if "if __name__ ==" in path.read_text() and path.name != "stand_in_worker.py"
]
"""Those that are run by hand."""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_in_its_first_line_what_it_asks_and_how_it_answers(path: Path) -> None:
    """What `--help` begins with."""
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    assert re.fullmatch(r"[A-Z].*\? [A-Z`].*\.", first), first


def test_the_recorded_ratios_are_read_and_name_questions() -> None:
    ratios = json.loads(RECORD.read_text())["ratios"]
    assert {key.partition(",")[0] for key in ratios} <= set(QUESTIONS)
    spreads = [Spread(**each) for figures in ratios.values() for each in figures.values()]
    assert spreads
    assert all(each.least <= each.median <= each.limit for each in spreads)

"""The recipes of docs/architecture.md: what is there already is made of the files that they name, and of no
others.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
RECIPES = {
    "a model family": (3, r"(?i)phi3_(spec|names)", ("models/families/phi3.py", "models/registry.py")),
    "a scorer of workers": (
        3, r'WeightedScore|"weighted"[,:]', ("policy/placement/score.py", "config/routing.py"),
    ),
    "a configuration key": (2, r"media_hosts", ("config/flow.py", "gateway/api/generate.py")),
    "an endpoint": (
        5,
        r"DetokenizeRequest|def detokenize\b|inspect\.detokenize\b",
        ("gateway/api/inspect.py", "gateway/api/routes.py", "protocol/openai.py"),
    ),
    "an order of the engine's queue": (3, r'"fcfs"|FCFSQueue', ("schedule/queue.py", "config/tree.py")),
}  # fmt: skip
"""By what is added: how many files at most, an example's words, and the modules that have them."""


def row(name: str) -> list[str]:
    """The cells of a recipe: the code, and what goes with it."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    return line.strip("| ").split(" | ")[1:3]


@pytest.mark.parametrize("name", RECIPES)
def test_the_example_is_in_the_files_of_its_recipe_and_in_no_others(name: str) -> None:
    _, words, files = RECIPES[name]
    found = {
        str(path.relative_to(ROOT / "penstock"))
        for path in (ROOT / "penstock").rglob("*.py")
        if re.search(words, path.read_text())
    }
    assert found == set(files)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_and_names_these_files(name: str) -> None:
    files_max, _, files = RECIPES[name]
    code, besides = row(name)
    named = [part.strip("`/").rpartition("/")[2] for part in re.findall(r"`[^`]+`", code)]
    for path in map(Path, files):
        assert {path.name, path.parent.name, "NAME.py"} & {*named} or "what reads it" in code, path
    tests_and_pages = 0 if name == "a configuration key" else len(besides.split(", "))
    assert len(files) + tests_and_pages <= files_max
    for test in re.findall(r"tests/[\w/]+\.py", besides):
        assert (ROOT / test).exists(), test


def test_a_requests_way_has_ten_boxes() -> None:
    """A reader can draw it from memory."""
    drawing = PAGE.partition("## A request's way")[2].split("```")[0].partition("\n- ")[0]
    boxes = [int(number) for number in re.findall(r"(?<![\w.])(\d+) [a-z]", drawing)]
    assert sorted(boxes) == list(range(1, 11))
    for room in re.findall(r"\b([a-z]+(?:/[a-z_]+)*)/?(?= |$)", drawing):
        if "/" in room:
            assert any((ROOT / "penstock" / base / room).with_suffix(end).exists()
                       for base in ("", "gateway") for end in ("", ".py")), room  # fmt: skip

"""Measured figures of README and pages name the script that measured them, the date and the machine.

A section has figures if it links a result file, gives a spread ("1.2 (1.1 to 1.4)"), a ratio ("1.2 times
less"), a rate or a time of microseconds, or says "measured" or "median" of a number with a unit. Such a
section names script, date and machine itself, above its subsections, or in a section that it links to.
None was taken "by hand", and none has "no file".
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

UNIT = r"(?:ns|us|µs|ms|s|min|minutes|KB|MB|GB|GiB|MiB|tok/s|tokens/s|x|%)"
NUMBER = rf"-?\d[\d,]*(?:\.\d+)?(?: ?{UNIT})?"
EXACT = rf"-?\d[\d,]*(?:\.\d+(?: ?{UNIT})?| ?{UNIT})(?!\w)"
"""With a decimal point or a unit: a setting and its bounds ("1 (0 to 1)") mostly have neither."""
FIGURE = re.compile(
    r"results/[\w.-]+\.json"
    rf"|{EXACT} \({NUMBER} to -?\d|\d \({EXACT} to -?\d|\d \({NUMBER} to {EXACT}"
    r"|\d times (?:less|more|sooner|later|longer|faster|slower|better)"
    r"|\d times (?:as (?:much|many|long)|the (?:CPU|time|speed))"
    r"|\d (?:us|µs|tok/s|tokens/s|tokens a second|requests/s)\b"
    rf"|\b(?:[Mm]easured|[Mm]edians?)\b[^.|]*\d ?{UNIT}(?![\w%])"
)
SCRIPT = re.compile(
    r"python -m (?:bench|training|scripts)\b|`(?:bench|training|scripts)[./]\w|\bbench/gpu\.sh"
    r"|\bmake (?:bench|soak|simulate)|`penstock (?:bench|simulate)|results/[\w.-]+\.json|031-answered"
)
MONTHS = "January February March April May June July August September October November December"
DATE = re.compile(
    rf"\b(?:\d{{1,2}} (?:{MONTHS.replace(' ', '|')}) 20\d\d|20\d\d-\d\d-\d\d)\b"
    r"(?![\w.-]*\.json)"  # Nor are names of files.
)
MACHINE = re.compile(r"\b(?:EPYC|Xeon|[AH]\d00|virtual time)\b")
WANTED = {
    "a script (`python -m bench.NAME`, or a link to docs/results/NAME.json)": SCRIPT,
    "a date (27 November 2026 or 2026-11-27)": DATE,
    'a machine (EPYC, Xeon, H100 and the like; of the simulator "virtual time")': MACHINE,
}
NO_FILE = re.compile(r"\b(?:no|without a) file\b(?! descriptor| is )")
BY_HAND = re.compile(r"\bby hand\b")
"""Of figures: workers may be drained by hand."""
LINK = re.compile(r"\]\(([\w./-]*\.md)?#([\w-]+)\)")


class Section(NamedTuple):
    page: Path
    title: str
    own: str
    above: str
    """The text of the sections that it is a part of, without their other parts."""


def sections(page: Path, text: str) -> Iterator[Section]:
    """The page's text from each heading to the next."""
    text = re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    above: dict[int, str] = {}
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        title, _, own = part.partition("\n")
        own = " ".join(own.split())
        depth = len(title) - len(title.lstrip("#"))
        above = {each: said for each, said in above.items() if each < depth}
        yield Section(page, title.lstrip("# "), own, "\n".join(above.values()))
        above[depth] = own


def anchor(title: str) -> str:
    """The heading's anchor, as GitHub makes it."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def linked(section: Section, known: dict[tuple[Path, str], Section]) -> str:
    """The text of all sections that this one links to."""
    found = []
    for page, name in LINK.findall(section.own + section.above):
        other = (section.page.parent / page).resolve() if page else section.page
        if target := known.get((other, name)):
            found.append(target.own + target.above)
    return "\n".join(found)


def missing(section: Section, known: dict[tuple[Path, str], Section]) -> list[str]:
    """The names that the figures of a section lack, if it has any."""
    if not FIGURE.search(section.own):
        return []
    said = section.own + section.above + linked(section, known)
    lacks = [form for form, pattern in WANTED.items() if not pattern.search(said)]
    excuses = {found for pattern in (NO_FILE, BY_HAND) for found in pattern.findall(section.own)}
    return lacks + [f"more than {found!r}" for found in sorted(excuses)]


def changelog_entries(page: Path) -> list[Section]:
    """The entries of the newest version in the changelog."""
    newest = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1]
    entries = re.split(r"^(?:- |#+ )", newest, flags=re.MULTILINE)[1:]
    return [Section(page, entry[:60], " ".join(entry.split()), "") for entry in entries]


def failures(found: list[Section], known: dict[tuple[Path, str], Section]) -> list[str]:
    return [
        f"{section.page.relative_to(ROOT)}, {section.title!r}: needs {', '.join(lacks)}"
        for section in found
        if (lacks := missing(section, known))
    ]


def test_figures_name_script_date_and_machine() -> None:
    found = [section for page in PAGES for section in sections(page, page.read_text())]
    known = {(section.page, anchor(section.title)): section for section in found}
    lacking = failures([*found, *changelog_entries(ROOT / "CHANGELOG.md")], known)
    assert not lacking, "\n".join(lacking)


def kept_results() -> set[str]:
    """The files that git has: `bench/gpu.sh` and others may have written more. All of them where git does not
    know this folder.
    """
    command = ["git", "-C", str(RESULTS), "ls-files", "*.json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        tracked = list[str]()
    else:
        tracked = done.stdout.split()
    return set(tracked) or {path.name for path in RESULTS.glob("*.json")}


def test_results_are_those_that_pages_name() -> None:
    named = {name for page in PAGES for name in re.findall(r"results/([\w.-]+\.json)", page.read_text())}
    kept = kept_results() - {"mutants.json"}
    assert kept <= named, f"no page names {sorted(kept - named)}"
    absent = named - kept - {"mutants.json"}
    assert not absent, f"pages name what git does not have: {sorted(absent)}"


@pytest.mark.parametrize(
    ("said", "is_figure"),
    [
        ("`top_p` is 1 (0 to 1)", False),
        ("1.2 (1.1 to 1.4)", True),
        ("12 (11 to 13.5)", True),
        ("12 (11.5 to 13)", True),
        ("0.8x (0.7 to 0.9)", True),
        ("31 % (30 % to 33 %)", True),
        ("95% (90% to 99%)", True),
        ("31 ms (-2 to 33)", True),
        ("-3 % (-5 % to 1 %)", True),
    ],
)
def test_a_spread_is_a_figure_and_the_bounds_of_a_setting_are_none(said: str, is_figure: bool) -> None:
    assert (FIGURE.search(said) is not None) == is_figure


def test_dates_of_both_forms_count_but_not_those_of_file_names() -> None:
    assert DATE.search("on 27 November 2026")
    assert DATE.search("on 2026-11-27.")
    assert not DATE.search("[JSON](../results/2026-11-27-house.json)")


def test_a_section_is_answerable_for_its_own_figures() -> None:
    page = ROOT / "docs/page.md"
    text = """# Page

On an AMD EPYC, 27 November 2026.

## Fast

It takes 1.2 times less (`python -m bench.engine.step`).

## Slow

It takes 1.2 times more.

```
It takes 9 us.
```

### Not ours

At most 12 requests of 4 KB, within 30 s; `top_p` is 1 (0 to 1), and what has no file is a pipe.

## Elsewhere

It takes 30 us (tried by hand, no file) where [fast](#fast) is.

## Spread

It takes 12 (11 to 13.5) times as long, since 2026-11-27.
"""
    found = list(sections(page, text))
    known = {(section.page, anchor(section.title)): section for section in found}
    script, *_ = WANTED
    assert failures(found, known) == [
        f"docs/page.md, 'Slow': needs {script}",
        "docs/page.md, 'Elsewhere': needs more than 'by hand', more than 'no file'",
        f"docs/page.md, 'Spread': needs {script}",
    ]

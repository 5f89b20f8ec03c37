"""The harness of every bench: rounds in turns, ratios with their spread, tables, and result files that say
where, when and with what they were measured.

    parser = command_line(__doc__)                    `--json FILE`, and what the bench adds
    rounds = in_turns(7, {"ours": ours, "theirs": theirs})
    print(ratio(rounds["ours"], rounds["theirs"]))    1.12 (0.98 to 1.31)
    write_result(args.json, {"rounds": rounds})       one JSON object: {"measured": {...}, "rounds": ...}

A figure is a ratio to a baseline of the same round, since the speed of a shared machine changes within
minutes. A plain build of Python costs about a fifth more CPU than one with profile-guided and link-time
optimization, so the file says which it was.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from penstock.bench.report import read_environment
from penstock.cli.python_build import python_build

REPOSITORY = Path(__file__).resolve().parents[1]
OUT = REPOSITORY / "bench" / "out"
"""For what is made and kept: models, peers, logs; not in the repository."""


def measured(versions: Mapping[str, str] | None = None) -> dict[str, object]:
    """The command, the machine, its load, Python and how it was built, our commit; `versions` of what else
    took part.
    """
    return {
        "command": command_of(["python", *_script(), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "commit": commit(),
        **msgspec.to_builtins(read_environment()),
        "python_build": python_build() or "not told",
        **({"versions": dict(versions)} if versions is not None else {}),
    }


PATH = re.compile(r"(?<![\w/.~-])(?:(?:\.\./)+|~?/(?!/))[^\s,=@]*")
"""A path that begins at the root, at home or above this folder: in a word, behind `=`, `@` or a comma."""


def command_of(words: Sequence[str]) -> str:
    """A command without the places of one machine: a path outside the repository is its last part, one in it
    begins at its root, and the file of figures is its name.
    """
    shown: list[str] = []
    for word, before in zip(words, ("", *words), strict=False):
        is_file = before in ("--json", "--out")
        shown.append(Path(word).name if is_file else PATH.sub(_shown, word))
    return " ".join(shown)


def _shown(path: re.Match[str]) -> str:
    whole = Path(os.path.abspath(Path(path[0]).expanduser()))
    return str(whole.relative_to(REPOSITORY)) if whole.is_relative_to(REPOSITORY) else whole.name


def _script() -> tuple[str, ...]:
    """As it was called: `-m bench.sim.speed`, or a file."""
    spec = sys.modules["__main__"].__spec__
    return (os.path.relpath(sys.argv[0]),) if spec is None else ("-m", spec.name)


def commit(tree: Path = REPOSITORY) -> str:
    """The commit that is checked out, with "+" if files differ from it; empty where no repository begins."""
    try:
        if Path(_git(tree, "rev-parse", "--show-toplevel")) != tree.resolve():
            return ""  # It only lies within one.
        head = _git(tree, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(tree, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def installed(venv: Path, packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of `packages` that an environment has."""
    command = [str(venv / "bin/python"), "-m", "pip", "list", "--format=json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = {each["name"].lower(): each["version"] for each in json.loads(done.stdout)}
    return {name: found[name] for name in packages if name in found}


Value = TypeVar("Value")


def cpu_us(work: Callable[[], object], units: int = 1) -> float:
    """Microseconds of this process's processor time for each of the `units` of one call."""
    began_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - began_ns) / units / 1e3


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Spread(NamedTuple):
    """Of the rounds of one figure."""

    median: float
    least: float
    limit: float

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.least)} to {short(self.limit)})"

    def rounded(self, digits: int = 4) -> dict[str, float]:
        """For a result file."""
        return {name: round(value, digits) for name, value in self._asdict().items()}


def spread(values: Iterable[float]) -> Spread:
    """Median and range.

    Raises:
        statistics.StatisticsError: there are no values.
    """
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def shown(values: Sequence[float]) -> Spread | str:
    """Median and range; of one round the figure; of none nothing."""
    return spread(values) if len(values) > 1 else "".join(map(short, values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, round by round."""
    return spread(mine / other for mine, other in zip(ours, theirs, strict=True))


def in_turns(
    rounds: int, kinds: Mapping[str, Callable[[], Value]], *, warm_up: bool = True
) -> dict[str, list[Value]]:
    """Each kind once a round, in an order that turns by round, so that a noisy moment falls on all of them.

    `warm_up`: a first round does not count.
    """
    names = list(kinds)
    found: dict[str, list[Value]] = {name: [] for name in names}
    for number in range(-1 if warm_up else 0, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            value = kinds[name]()
            if number >= 0:
                found[name].append(value)
    return found


Rounds = Mapping[str, Mapping[str, Sequence[float]]]
"""By case and kind a figure of each round. A case's first kind is its baseline."""


def ratios(found: Rounds) -> dict[str, Spread]:
    """Of each kind over the baseline of its case, by "case, kind"."""
    return {
        f"{case}, {kind}": ratio(each, next(iter(kinds.values())))
        for case, kinds in found.items()
        for kind, each in list(kinds.items())[1:]
    }


def rounds_table(title: str, unit: str, found: Rounds) -> str:
    """Every case and kind with its spread and its ratio."""
    over = ratios(found)
    rows = [
        (case, kind, spread(each), over.get(f"{case}, {kind}", ""))
        for case, kinds in found.items()
        for kind, each in kinds.items()
    ]
    return table((title, "", unit, "over the first"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table in columns of one width: the first to the left, figures to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| "
        + " | ".join(
            c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def command_line(doc: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """The bench's docstring as its help, `--json FILE` and, with a default for it, `--rounds`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--json", "--out", type=Path, dest="json", metavar="FILE", help="write the figures here"
    )
    return parser


def write_result(
    path: Path | None, result: Mapping[str, object], versions: Mapping[str, str] | None = None
) -> None:
    """Write a result with what it was measured with in front; without a path nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"measured": measured(versions), **result}, indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)


def _git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()

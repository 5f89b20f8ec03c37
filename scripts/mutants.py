"""A mutation run over the packages that decide: does a test notice when one operator, number or statement is
wrong?

    make mutants                                   60 mutants per package, taken up where the last run stopped
    make mutants ARGS="--count 10 --minutes 3 kv"  a part of it

Every mutation (mutations.py says which there are) has a rank, made from the seed and its name, and the first
`--count` of each package are the sample: the same ones on every machine, and nearly the same ones after a
change of the code. Each mutant is imported by a pytest of its own (mutant_import.py; no file is changed),
which runs the test files of the package that import the mutated module, those with its name first, up to the
first failure. A mutant that survives them meets every other test file of the package that reaches the module
by whatever imports (unless `--narrow`).

The result is a JSON file, written after every mutant. A mutant in it is not run again unless it survived and
has no verdict (`--again`: all survivors). "verdict" is written by hand into a survivor's row: why no test can
notice it. The exit status is 1 if more than a tenth of a package's mutants survived.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic

from mutations import Mutation, mutations

ROOT = Path(__file__).parents[1]
PACKAGES = ("policy", "schedule", "kv")
DOUBLES = ROOT / "tests/doubles"
RESULT = ROOT / "docs/results/mutants.json"
SURVIVORS_MAX = 0.10
PATIENCE = 4.0
"""A mutant may take so many times as long as the unchanged module, and the pause beside that."""
PAUSE_S = 30.0
UNCHANGED_MAX_S = 600.0
USAGE_ERROR = 4
"""pytest's exit status; mutant_import.py gives it too."""


@dataclass(frozen=True)
class Candidate:
    """One mutation of one module of a package."""

    package: str
    path: Path
    mutation: Mutation
    rank: str

    @property
    def name(self) -> str:
        """The same wherever in its package the module lies."""
        return f"{self.package}/{self.path.stem}: {self.mutation.key}"

    @property
    def module(self) -> str:
        """The imported module."""
        return module_of(self.path)


@dataclass
class Row:
    """The result of a mutant, as it is written down."""

    name: str
    where: str
    kind: str
    before: str
    after: str
    outcome: str
    """killed, timeout (killed as well) or survived."""
    by: str
    """The test that failed."""
    tests: list[str] = field(default_factory=list[str])
    """The test files that a survivor met."""
    verdict: str = ""


def main() -> int:
    """Run the sample, write the result, print what survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", default=PACKAGES, help=f"of {', '.join(PACKAGES)} (all)")
    parser.add_argument("--seed", type=int, default=1, help="which sample (1)")
    parser.add_argument("--count", type=int, default=60, help="mutants per package (60)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    parser.add_argument(
        "--narrow", action="store_true", help="survivors do not meet the package's other tests"
    )
    parser.add_argument("--again", action="store_true", help="run survivors again, even those with a verdict")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"the result ({RESULT.relative_to(ROOT)})")
    args = parser.parse_args()
    result = read(args.out, args.seed)
    known = result.mutants
    sample = [each for package in args.packages for each in sampled(package, args.seed, args.count)]
    deadline = monotonic() + 60 * args.minutes
    for each in sample:
        row = known.get(each.name)
        if row is not None and (row.outcome != "survived" or (row.verdict and not args.again)):
            continue
        if monotonic() > deadline:
            print("out of time: run again to go on")
            break
        tests = fitting(each)
        wider = [] if args.narrow else others(each, tests)
        known[each.name] = row = run(each, (tests, wider), result.unchanged_s, row.verdict if row else "")
        print(f"{row.outcome:9} {row.name}  {row.by}", flush=True)
        write(args.out, result)
    return report([known[each.name] for each in sample if each.name in known])


def sampled(package: str, seed: int, count: int) -> list[Candidate]:
    """The first `count` mutations of a package by rank."""
    found = list[Candidate]()
    for path in sorted((ROOT / "penstock" / package).rglob("*.py")):
        for each in mutations(path.read_text()):
            rank = hashlib.sha256(f"{seed} {package}/{path.stem}: {each.key}".encode()).hexdigest()
            found.append(Candidate(package, path, each, rank))
    return sorted(found, key=lambda each: each.rank)[:count]


# --- which tests -----------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    """The name by which a file of the package is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """The modules of ours, and the files of tests/doubles, that a file imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(name for name in found if file_of(name).exists())


def file_of(name: str) -> Path:
    """Where an imported module is, if it is one of ours."""
    return (ROOT if name.startswith("penstock.") else DOUBLES) / Path(*name.split(".")).with_suffix(".py")


@cache
def reached(path: Path) -> frozenset[str]:
    """Every module of ours that a file imports, directly or through others."""
    seen, todo = set[str](), list(imports(path))
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += imports(file_of(name))
    return frozenset(seen)


def test_files(package: str) -> list[Path]:
    """Those of the package's folder. Pages and figures do not test code."""
    return [
        path for path in sorted((ROOT / "tests" / package).rglob("test_*.py")) if "_page" not in path.stem
    ]


def fitting(each: Candidate) -> list[str]:
    """The test files that import the module or have its name, those first; if there are none, those that
    reach it.
    """
    files, stem = test_files(each.package), each.path.stem
    direct = [path for path in files if each.module in imports(path) or path.stem.startswith(f"test_{stem}")]
    found = direct or [path for path in files if each.module in reached(path)]
    return [str(path.relative_to(ROOT)) for path in sorted(found, key=lambda path: stem not in path.stem)]


def others(each: Candidate, tests: list[str]) -> list[str]:
    """The package's other test files that reach the module."""
    found = [str(path.relative_to(ROOT)) for path in test_files(each.package) if each.module in reached(path)]
    return [name for name in found if name not in tests]


# --- running ---------------------------------------------------------------------------------------


def run(each: Candidate, rounds: tuple[list[str], ...], unchanged_s: dict[str, float], verdict: str) -> Row:
    """Put the mutant before its tests, round by round."""
    where = f"{each.path.relative_to(ROOT)}:{each.mutation.line}"
    row = Row(each.name, where, each.mutation.kind, each.mutation.before, each.mutation.after, "survived", "")
    met = list[str]()
    for files in filter(None, rounds):
        status, output = pytest(files, limit_s(files, unchanged_s), each)
        met += files
        if status == USAGE_ERROR:
            sys.exit(f"the tests did not import the mutant {each.name}\n{output}")
        if status != 0:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            row.outcome = "timeout" if status is None else "killed"
            row.by = "" if status is None else failed[1] if failed else "import"
            return row
    row.tests, row.verdict = met, verdict
    return row


def limit_s(files: list[str], unchanged_s: dict[str, float]) -> float:
    """How long a mutant may take, from how long the unchanged module takes. There, the tests must pass."""
    for name in files:
        if name not in unchanged_s:
            began = monotonic()
            status, output = pytest([name], UNCHANGED_MAX_S)
            if status != 0:
                sys.exit(f"{name} fails without a mutation\n{output}")
            unchanged_s[name] = round(monotonic() - began, 1)
    return PAUSE_S + PATIENCE * sum(unchanged_s[name] for name in files)


def pytest(files: list[str], limit_s: float, mutant: Candidate | None = None) -> tuple[int | None, str]:
    """The exit status (None: it took too long) and the output of a run up to the first failure."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "mutant_import", "--hypothesis-seed=0", "--tb=no"]
    with tempfile.TemporaryDirectory() as scratch:
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "scripts"),
            "PENSTOCK_MUTANT": json.dumps([mutant.module, mutant.mutation.key]) if mutant else "",
            "HYPOTHESIS_STORAGE_DIRECTORY": scratch,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", *options, f"--basetemp={scratch}/tmp", *files]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return None, ""
    return done.returncode, done.stdout + done.stderr


# --- the result ------------------------------------------------------------------------------------


@dataclass
class Result:
    """The written result."""

    seed: int
    mutants: dict[str, Row] = field(default_factory=dict[str, Row])
    unchanged_s: dict[str, float] = field(default_factory=dict[str, float])
    """By test file: how long it takes without a mutation, on the machine that ran it first."""


def read(path: Path, seed: int) -> Result:
    """An earlier run's result, if there is one."""
    if not path.exists():
        return Result(seed)
    found = json.loads(path.read_text())
    return Result(seed, {row["name"]: Row(**row) for row in found["mutants"]}, found["unchanged_s"])


def write(path: Path, result: Result) -> None:
    """All rows, sorted, so that two runs compare line by line."""
    listed = [asdict(result.mutants[name]) for name in sorted(result.mutants)]
    times = dict(sorted(result.unchanged_s.items()))
    found = {"seed": result.seed, "mutants": listed, "unchanged_s": times}
    path.write_text(json.dumps(found, indent=1) + "\n")


def report(rows: list[Row]) -> int:
    """Survivors one by one, and a line per package."""
    for row in rows:
        if row.outcome == "survived":
            print(f"\n{row.name}\n  {row.where}\n  {row.verdict or 'no verdict yet'}")
    print()
    failed = False
    for package, outcomes in by_package(rows):
        total, survived = outcomes.total(), outcomes["survived"]
        failed |= survived > SURVIVORS_MAX * total
        print(f"{package:9} {total} mutants, {total - survived} killed ({outcomes['timeout']} by the time "
              f"limit), {survived} survived ({survived / total:.0%})")  # fmt: skip
    return int(failed)


def by_package(rows: list[Row]) -> Iterator[tuple[str, Counter[str]]]:
    """Outcomes, counted."""
    for package in dict.fromkeys(row.name.partition("/")[0] for row in rows):
        yield package, Counter(row.outcome for row in rows if row.name.startswith(f"{package}/"))


if __name__ == "__main__":
    sys.exit(main())

"""A mutation run over the packages that decide: does a test notice when one operator, number or statement is
wrong?

    make mutants                                   60 mutants per package, taken up where the last run stopped
    make mutants ARGS="--count 10 --minutes 3 kv"  a part of it

Every mutation (mutations.py says which there are) has a rank, made from the seed and its name, and the first
`--count` of each package are the sample: the same ones on every machine, and nearly the same ones after a
change of the code. A package's tests are run once without a mutation, which says which of them run the
statement that a mutant changes; each mutant then meets those of the package that do, up to the first
failure, in a fork of the process that has collected them (mutant_forks.py; no file is changed). A mutant of
code that runs while modules are imported (defaults, values of classes) is imported by a pytest of its own
(mutant_import.py), which runs the test files that import the module, and then every other that reaches it.

The result is a JSON file, written after every mutant, with the commit of the last run. A mutant in it is not
run again unless it survived and has no verdict, or its function has changed since (`--again`: all are). A run
of the whole sample drops the rows of mutants that are not in it any more. "verdict" is written by hand into a
survivor's row: why no test can notice it. The exit status is 1 if more than a tenth of a package's mutants
survived.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

from mutations import Mutation, mutations

ROOT = Path(__file__).parents[1]
PACKAGES = ("policy", "schedule", "kv")
COUNT = 60
DOUBLES = ROOT / "tests/doubles"
RESULT = ROOT / "docs/results/mutants.json"
SURVIVORS_MAX = 0.10
ELSEWHERE = {"schedule": ("tests/engine/test_adapter_manager.py", "tests/sim/test_fast_forward.py")}
"""Tests of a package's modules that stand where the other half of what they need is."""
PATIENCE = 4.0
"""An imported mutant may take so many times as long as the unchanged module, and the pause beside that."""
PAUSE_S = 60.0
USAGE_ERROR = 4
"""pytest's exit status; mutant_import.py gives it too."""
NO_TESTS_RAN = 5
PYTEST = (
    sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutant_import",
    "--hypothesis-seed=0",
)  # fmt: skip


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

    @property
    def where(self) -> str:
        """The changed line."""
        return f"{self.path.relative_to(ROOT)}:{self.mutation.line}"

    @property
    def function(self) -> str:
        """A digest of the innermost function around the change, its comments and layout left out."""
        tree, line = ast.parse(self.path.read_text()), self.mutation.line
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        around = [node for node in ast.walk(tree) if isinstance(node, kinds)
                  and node.lineno <= line <= (node.end_lineno or line)]  # fmt: skip
        found = max(around, key=lambda node: node.lineno, default=tree)
        return hashlib.sha256(ast.unparse(found).encode()).hexdigest()[:8]


@dataclass
class Row:
    """The result of a mutant, as it is written down."""

    name: str
    where: str
    outcome: str
    """killed, timeout (killed as well) or survived."""
    by: str = ""
    """The test that failed."""
    tests: list[str] = field(default_factory=list[str])
    """The test files that a survivor met, with how many of their tests run its statement."""
    function: str = ""
    """A digest of a survivor's function."""
    verdict: str = ""


def main() -> int:
    """Run the sample, write the result, print what survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", default=PACKAGES, help=f"of {', '.join(PACKAGES)} (all)")
    parser.add_argument("--seed", type=int, default=1, help="which sample (1)")
    parser.add_argument("--count", type=int, default=COUNT, help=f"mutants per package ({COUNT})")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many minutes")
    parser.add_argument("--again", action="store_true", help="run all of them, those with a result too")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"the result ({RESULT.relative_to(ROOT)})")
    args = parser.parse_args()
    result = read(args.out, args.seed)
    known = result.mutants
    samples = {package: sampled(package, args.seed, args.count) for package in args.packages}
    sample_of_all = [each for sample in samples.values() for each in sample]
    if set(args.packages) == set(PACKAGES) and args.count >= COUNT:
        result.keep(sample_of_all)
    ends_at = monotonic() + 60 * args.minutes
    for package, sample in samples.items():
        todo = [each for each in sample if args.again or is_open(each, known.get(each.name))]
        for row in run(package, sample, todo, ends_at) if todo else ():
            row.verdict = known[row.name].verdict if row.name in known and row.outcome == "survived" else ""
            known[row.name] = row
            print(f"{row.outcome:9} {row.name}  {row.by}", flush=True)
            write(args.out, result)
        if monotonic() > ends_at:
            print("out of time: run again to go on")
            break
    write(args.out, result)
    return report([known[each.name] for each in sample_of_all if each.name in known])


def is_open(each: Candidate, row: Row | None) -> bool:
    """Whether a mutant must be run: it never was, or it survived without a verdict on today's code."""
    if row is None or row.outcome != "survived":
        return row is None
    return not row.verdict or row.function != each.function


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
    """Those of the package's folder, and `ELSEWHERE`. Pages and figures do not test code."""
    own = [path for path in (ROOT / "tests" / package).rglob("test_*.py") if "_page" not in path.stem]
    return sorted([*own, *(ROOT / name for name in ELSEWHERE.get(package, ()))])


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


def run(package: str, sample: list[Candidate], todo: list[Candidate], ends_at: float) -> Iterator[Row]:
    """Put mutants before their tests, in forks of one process; afterwards those of statements that run while
    modules are imported, in a process each.
    """
    known = Known(package, sample)
    handed_back = list[Candidate]()
    for line in forks(package, sample, [sample.index(each) for each in todo], known.lines, ends_at):
        if "test" in line:
            known.add(line)
        elif "mutant" not in line:
            sys.exit(f"without a mutation this fails: {line.get('fails') or line.get('broke')}")
        elif line["outcome"] == "at import":
            handed_back.append(sample[line["mutant"]])
        else:
            yield row_of(sample[line["mutant"]], line["outcome"], line["by"], line["tests"])
    for each in handed_back:
        if monotonic() < ends_at:
            yield imported(each, known)


def row_of(each: Candidate, outcome: str, by: str, tests: list[str]) -> Row:
    """A survivor's tests are written down by file, with how many of it ran."""
    files = Counter(name.partition("::")[0] for name in tests if outcome == "survived")
    is_by_file = all("::" not in name for name in tests)
    met = [name if is_by_file else f"{name} ({count})" for name, count in sorted(files.items())]
    return Row(each.name, each.where, outcome, by, met, each.function if outcome == "survived" else "")


class Known:
    """Lines about the package's unchanged tests, kept in a file as long as nothing that they run changes."""

    def __init__(self, package: str, sample: list[Candidate]) -> None:
        tests = test_files(package)
        used = {file_of(name) for path in tests for name in reached(path)}
        digest = hashlib.sha256("\n".join(each.name for each in sample).encode())
        for path in sorted({*tests, *used}):
            digest.update(path.read_bytes())
        self._path = ROOT / f"bench/out/mutants/{package}-{digest.hexdigest()[:12]}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.read_text().splitlines() if self._path.exists() else []
        self.lines = [json.loads(line) for line in written]

    def add(self, line: dict[str, Any]) -> None:
        """Keep one."""
        self.lines.append(line)
        with self._path.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def seconds(self, files: list[str]) -> float:
        """The CPU time of the tests of these files."""
        return sum(line["s"] for line in self.lines if line["test"].partition("::")[0] in files)


def forks(
    package: str, sample: list[Candidate], todo: list[int], known: list[dict[str, Any]], ends_at: float
) -> Iterator[dict[str, Any]]:
    """The lines of mutant_forks.py, as they come."""
    read, write = os.pipe()
    job = {
        "out": write, "jobs": os.cpu_count() or 1, "ends_at": ends_at, "todo": todo, "known": known,
        "modules": {each.module: str(each.path) for each in sample},
        "mutants": [(each.module, each.mutation.key) for each in sample],
    }  # fmt: skip
    files = [str(path.relative_to(ROOT)) for path in test_files(package)]
    with environment(PENSTOCK_MUTANTS=json.dumps(job)) as environ, tempfile.TemporaryFile() as log:
        command = [
            *PYTEST,
            "-p",
            "mutant_forks",
            "--capture=no",
            *files,
        ]
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log, pass_fds=[write])
        os.close(write)
        with open(read) as lines:
            yield from map(json.loads, lines)
        if process.wait() not in (0, NO_TESTS_RAN):
            log.seek(0)
            sys.exit(f"the tests of {package} could not be run\n{log.read().decode()}")


def imported(each: Candidate, known: Known) -> Row:
    """A mutant that is imported in place of its module, as no fork can put it in afterwards."""
    near = fitting(each)
    rounds, met = (near, others(each, near)), list[str]()
    for files in filter(None, rounds):
        status, output = pytest(files, each, PAUSE_S + PATIENCE * known.seconds(files))
        met += files
        if status == USAGE_ERROR:
            sys.exit(f"the tests did not import the mutant {each.name}\n{output}")
        if status != 0:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            by = "" if status is None else failed[1] if failed else "import"
            return row_of(each, "timeout" if status is None else "killed", by, met)
    return row_of(each, "survived", "", met)


def pytest(files: list[str], mutant: Candidate, limit_s: float) -> tuple[int | None, str]:
    """The exit status (None: it took too long) and the output of a run up to the first failure."""
    wanted = json.dumps([mutant.module, mutant.mutation.key])
    with environment(PENSTOCK_MUTANT=wanted) as environ:
        command = [*PYTEST, "-x", "--tb=no", f"--basetemp={environ['TMPDIR']}/tmp", *files]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return None, ""
    return done.returncode, done.stdout + done.stderr


@contextmanager
def environment(**own: str) -> Iterator[dict[str, str]]:
    """Of a process that leaves nothing behind."""
    with tempfile.TemporaryDirectory() as scratch:
        yield {
            **os.environ,
            "PYTHONPATH": str(ROOT / "scripts"),
            "HYPOTHESIS_STORAGE_DIRECTORY": scratch,
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": scratch,
            **own,
        }


# --- the result ------------------------------------------------------------------------------------


@dataclass
class Result:
    """The written result."""

    seed: int
    mutants: dict[str, Row] = field(default_factory=dict[str, Row])

    def keep(self, sample: list[Candidate]) -> None:
        """These alone, where they are today."""
        where = {each.name: each.where for each in sample}
        for name in self.mutants.keys() - where.keys():
            del self.mutants[name]
        for name, row in self.mutants.items():
            row.where = where[name]


def read(path: Path, seed: int) -> Result:
    """An earlier run's result, if there is one."""
    if not path.exists():
        return Result(seed)
    found = json.loads(path.read_text())
    return Result(seed, {row["name"]: Row(**row) for row in found["mutants"]})


def write(path: Path, result: Result) -> None:
    """A line for each row, sorted, so that two runs compare line by line; nothing of what is empty."""
    listed = [
        json.dumps({key: value for key, value in asdict(result.mutants[name]).items() if value})
        for name in sorted(result.mutants)
    ]
    rows = ",\n ".join(listed)
    path.write_text(f'{{"seed": {result.seed}, "commit": "{commit()}", "mutants": [\n {rows}\n]}}\n')


@cache
def commit() -> str:
    """Of this tree."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


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

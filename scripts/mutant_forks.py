"""A pytest plugin: the tests of a package are collected once, and each mutant meets those that run its
statement, in a fork of that process.

scripts/mutants.py starts pytest with it. `PENSTOCK_MUTANTS` is a JSON object, a `Job`; what is found goes to
the file descriptor `out`, a JSON object a line.

1. The package's modules are imported with a probe in front of each statement that a mutant changes.
2. The unchanged tests run once, in forks: which probes does a test pass, and how many CPU seconds does it
   take? A line each, so that a run that was cut off goes on (`known`).
3. For each mutant a fork gives the functions of the module their changed code, and runs the tests that pass
   its probe up to the first failure: those in a file with the module's name first, then the shortest.

A mutant of a statement that runs while modules are imported cannot be put in afterwards: it is handed back.
"""

import ast
import builtins
import gc
import importlib.util
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from mutations import mutated, probed

LIMIT_S = float(os.environ.get("PENSTOCK_MUTANT_LIMIT_S", "10"))
PATIENCE = 5.0
"""A test may take so many times the CPU time of the unchanged module, and the limit beside."""
MEMORY_BYTES = 4 << 30
"""A mutant may need so much address space more than the process before it."""
Key = tuple[str, int]
"""Names a function of a module: its qualified name and its first line."""


@dataclass(frozen=True)
class Job:
    """The mutants and tests of one process, as mutants.py passes them."""

    out: int
    jobs: int
    """Forks at a time."""
    ends_at: float
    """In seconds of the monotonic clock: afterwards nothing more begins."""
    modules: dict[str, str]
    """Source file by name."""
    mutants: list[tuple[str, str]]
    """The sample: module, key. The place in it is the number of the probe."""
    todo: list[int]
    known: list[dict[str, Any]]
    """Lines about tests that an earlier run gave."""


@dataclass
class Passed:
    """Of one test, unchanged."""

    seconds: float
    probes: set[int] = field(default_factory=set[int])


JOB: Job | None = None
HITS = set[int]()
"""The probes that were passed since it was emptied."""
IN_SETUP = set[int]()
AT_IMPORT = set[int]()
FAILED, REASONS = list[str](), list[str]()
"""The tests of this process that failed, and how."""
if given := os.environ.get("PENSTOCK_MUTANTS"):
    JOB = Job(**json.loads(given))
    builtins.__probe__ = HITS.add  # type: ignore[attr-defined]


class ProbedLoader(SourceLoader):
    """Compiles a module with its probes in it."""

    def __init__(self, path: str, numbers: dict[str, int]) -> None:
        self._path, self._numbers = path, numbers

    def get_filename(self, fullname: str) -> str:
        """Where the unchanged source is."""
        return self._path

    def get_data(self, path: str) -> bytes:
        """Read the unchanged source."""
        return Path(path).read_bytes()

    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache."""
        return compile(probed(Path(self._path).read_text(), self._numbers), self._path, "exec")


class ProbedFinder(MetaPathFinder):
    """Finds the modules of the sample, before anything else finds them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._numbers: dict[str, dict[str, int]] = {}
        for number, (module, key) in enumerate(job.mutants):
            self._numbers.setdefault(module, {})[key] = number

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib`."""
        if fullname not in self._numbers:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        assert found is not None
        loader = ProbedLoader(self._job.modules[fullname], self._numbers[fullname])
        return importlib.util.spec_from_file_location(
            fullname, found.origin, loader=loader, submodule_search_locations=found.submodule_search_locations
        )


if JOB is not None:
    sys.meta_path.insert(0, ProbedFinder(JOB))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In place of pytest's own loop."""
    if JOB is None:
        return None
    AT_IMPORT.update(HITS)
    items = {each.nodeid: each for each in session.items}
    passed = unchanged(JOB, items)
    if passed is not None:
        run_mutants(JOB, items, passed)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what failed."""
    if report.failed:
        FAILED.append(report.nodeid)
        REASONS.append(report.longreprtext)


def write(out: int, line: dict[str, Any]) -> None:
    """One line."""
    os.write(out, (json.dumps(line) + "\n").encode())


# --- forks -----------------------------------------------------------------------------------------


def in_forks(jobs: int, works: Iterable[tuple[int, Callable[[int], None]]]) -> Iterator[tuple[int, str]]:
    """Each work in a process of its own, so many at a time: its number and, as soon as they come, the lines
    that it wrote to the descriptor that it is given; the line "" when it ends.
    """
    waiting, running = iter(works), dict[int, tuple[int, int, bytes]]()
    while True:
        while len(running) < jobs and (work := next(waiting, None)) is not None:
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                os.close(read)
                live(work[1], write)
            os.close(write)
            running[read] = (work[0], pid, b"")
        if not running:
            return
        for read in select.select(list(running), [], [])[0]:
            number, pid, begun = running[read]
            got = os.read(read, 1 << 16)
            *lines, rest = (begun + got).split(b"\n")
            running[read] = (number, pid, rest)
            yield from ((number, line.decode()) for line in lines)
            if not got:
                del running[read]
                os.close(read)
                if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGXCPU:
                    yield number, json.dumps({"outcome": "timeout", "by": "a loop outside Python"})
                yield number, ""


def live(work: Callable[[int], None], out: int) -> None:
    """The life of a fork: it never returns to pytest."""
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):
            os.dup2(silent, each)
        work(out)
    except BaseException:  # noqa: BLE001  (nothing may return to pytest)
        write(out, {"broke": traceback.format_exc()})
    finally:
        os._exit(0)


def run(items: Sequence[pytest.Item], i: int) -> None:
    """One test by pytest's own protocol."""
    item, following = items[i], items[i + 1] if i + 1 < len(items) else None
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


# --- the unchanged module --------------------------------------------------------------------------


def unchanged(job: Job, items: dict[str, pytest.Item]) -> dict[str, Passed] | None:
    """Which probes every test passes; None if there was no time for all, or one fails."""
    passed = {each["test"]: Passed(each["s"], set(each["probes"])) for each in job.known}
    left: dict[str, list[pytest.Item]] = {}
    for name, item in items.items():
        if name not in passed:
            left.setdefault(name.partition("::")[0], []).append(item)
    works = [(number, measuring(job, group)) for number, group in enumerate(left.values())]
    for _, line in in_forks(job.jobs, works):
        if line:
            found = json.loads(line)
            write(job.out, found)
            if "test" not in found:
                return None
            passed[found["test"]] = Passed(found["s"], set(found["probes"]))
    return passed if passed.keys() >= items.keys() else None


def measuring(job: Job, items: Sequence[pytest.Item]) -> Callable[[int], None]:
    """Run the tests of a file and write a line for each.

    What a fixture of the whole file passes counts for every test after it: it runs once only.
    """

    def work(out: int) -> None:
        shared = set[int]()
        for i in range(len(items)):
            if time.monotonic() > job.ends_at:
                return
            HITS.clear()
            began = time.process_time()
            run(items, i)
            seconds = round(time.process_time() - began, 3)
            if FAILED:
                write(out, {"fails": f"{FAILED[0]}\n{REASONS[0]}"})
                return
            shared |= IN_SETUP
            write(out, {"test": items[i].nodeid, "s": seconds, "probes": sorted(HITS | shared)})

    return work


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """The test's fixtures are made."""
    IN_SETUP.clear()
    IN_SETUP.update(HITS)


# --- a mutant --------------------------------------------------------------------------------------


def run_mutants(job: Job, items: dict[str, pytest.Item], passed: dict[str, Passed]) -> None:
    """Put each mutant before its tests."""
    live_functions = functions_of(set(job.modules.values()))
    works, chosen = list[tuple[int, Callable[[int], None]]](), dict[int, list[pytest.Item]]()
    for number in job.todo:
        module, key = job.mutants[number]
        change = None if number in AT_IMPORT else changes(job.modules[module], key, live_functions)
        if change is None:
            write(job.out, {"mutant": number, "outcome": "at import", "by": "", "tests": []})
            continue
        chosen[number] = [items[name] for name in order(module, number, passed) if name in items]
        works.append((number, trying(chosen[number], change, passed)))
    verdicts = dict[int, dict[str, Any]]()
    for number, line in in_forks(job.jobs, in_time(job, works)):
        if line:
            verdicts[number] = json.loads(line)
            continue
        names = [each.nodeid for each in chosen[number]]
        write(
            job.out,
            {"mutant": number, "tests": names, **verdicts.get(number, {"outcome": "killed", "by": "crash"})},
        )


def in_time(job: Job, works: Iterable[tuple[int, Callable[[int], None]]]) -> Iterator[Any]:
    """Those that may still begin."""
    for work in works:
        if time.monotonic() < job.ends_at:
            yield work


def order(module: str, number: int, passed: dict[str, Passed]) -> list[str]:
    """The tests that pass the mutant's statement: the module's own first, then the shortest."""
    stem = module.rpartition(".")[2]

    def nearness(name: str) -> tuple[bool, float]:
        return stem not in Path(name.partition("::")[0]).stem, passed[name].seconds

    return sorted((name for name, each in passed.items() if number in each.probes), key=nearness)


def trying(
    items: Sequence[pytest.Item], change: list[tuple[FunctionType, CodeType]], passed: dict[str, Passed]
) -> Callable[[int], None]:
    """Change the functions, run the tests up to the first failure."""

    def work(out: int) -> None:
        def end(outcome: str, by: str) -> None:
            write(out, {"outcome": outcome, "by": by})

        def too_long(*_: object) -> None:
            end("timeout", running)
            os._exit(0)

        running = ""
        signal.signal(signal.SIGPROF, too_long)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
        for function, code in change:
            function.__code__ = code
        for i, item in enumerate(items):
            running = item.nodeid
            limit_s = LIMIT_S + PATIENCE * passed[running].seconds
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            ends_s = math.ceil(time.process_time() + 2 * limit_s) + 1  # A loop in C hears no signal but this.
            resource.setrlimit(resource.RLIMIT_CPU, (ends_s, resource.RLIM_INFINITY))
            run(items, i)
            if FAILED:
                end("killed", FAILED[0])
                return
        end("survived", "")

    return work


def functions_of(paths: set[str]) -> dict[tuple[str, Key], list[FunctionType]]:
    """The functions of these files that exist, by file and name."""
    found: dict[tuple[str, Key], list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in paths:
            found.setdefault((each.__code__.co_filename, key_of(each.__code__)), []).append(each)
    return found


def key_of(code: CodeType) -> Key:
    """By which a function of the mutated module is that of the unchanged one."""
    return code.co_qualname, code.co_firstlineno


def changes(
    path: str, key: str, live_functions: dict[tuple[str, Key], list[FunctionType]]
) -> list[tuple[FunctionType, CodeType]] | None:
    """The functions that exist with their changed code; None if the mutation changes none of them, or one
    cannot be given its code.
    """
    source = Path(path).read_text()
    plain, after = (nested(compile(tree, path, "exec")) for tree in (ast.parse(source), mutated(source, key)))
    found = list[tuple[FunctionType, CodeType]]()
    for name, code in after.items():
        if plain.get(name) == code:
            continue
        if MANY in (code, plain.get(name)):
            return None
        for function in live_functions.get((path, name), []):
            if function.__code__.co_freevars != code.co_freevars:
                return None
            found.append((function, code))
    return found or None


MANY = compile("", "several", "exec")


def nested(code: CodeType) -> dict[Key, CodeType]:
    """All functions of a module by name; `MANY` where a name is not one's alone."""
    found, todo = dict[Key, CodeType](), [code]
    while todo:
        each = todo.pop()
        inner = [const for const in each.co_consts if isinstance(const, CodeType)]
        todo += inner
        for const in inner:
            found[key_of(const)] = MANY if key_of(const) in found else const
    return found

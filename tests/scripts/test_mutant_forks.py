"""A mutation run over a package of one module, as scripts/mutants.py starts it: which tests each mutant
meets, and what becomes of it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODULE = """
def double(x, times=2):
    if x > 100:
        return 0
    return x * times


def unused(x):
    return x + 1


class Loop:
    def until(self, n):
        while n > 0:
            n -= 1
        return n


def summed(n):
    return sum(range(n // 10**9))
"""
TESTS = """
from mutable import Loop, double, summed


def test_small():
    assert double(3) == 6


def test_large():
    assert double(1000) == 0


def test_loop():
    assert Loop().until(5) == 0


def test_loop_in_c():
    assert summed(4 * 10**9) == 6
"""
KEYS = {
    "double: arithmetic: x * times -> x // times": "killed",
    "double: constant: 100 -> 101": "survived",
    "double: constant: 2 -> 3": "at import",
    "unused: return: return x + 1 -> return None": "survived",
    "Loop.until: delete: n -= 1 -> pass": "timeout",
    "summed: arithmetic: n // 10 ** 9 -> n * 10 ** 9": "timeout",
}


def test_each_mutant_meets_the_tests_that_run_its_statement(tmp_path: Path) -> None:
    (tmp_path / "mutable.py").write_text(MODULE)
    (tmp_path / "test_mutable.py").write_text(TESTS)
    read, write = os.pipe()
    job = {
        "out": write, "jobs": 2, "ends_at": time.monotonic() + 600, "todo": list(range(len(KEYS))),
        "known": [],
        "modules": {"mutable": str(tmp_path / "mutable.py")}, "mutants": [("mutable", key) for key in KEYS],
    }  # fmt: skip
    environ = os.environ | {
        "PYTHONPATH": f"{SCRIPTS}:{tmp_path}", "PENSTOCK_MUTANTS": json.dumps(job),
        "PENSTOCK_MUTANT_LIMIT_S": "0.2",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:kmock"]
    with subprocess.Popen(
        [*command, "-p", "mutant_forks", "--capture=no", "."],
        cwd=tmp_path, env=environ, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        os.close(write)
        with open(read) as lines:
            found = [json.loads(line) for line in lines]
    assert process.returncode == 0
    tests = {line["test"].partition("::")[2]: set(line["probes"]) for line in found if "test" in line}
    assert tests == {"test_small": {0, 1}, "test_large": {1}, "test_loop": {4}, "test_loop_in_c": {5}}
    mutants = {line["mutant"]: line for line in found if "mutant" in line}
    assert {key: mutants[number]["outcome"] for number, key in enumerate(KEYS)} == KEYS
    assert mutants[0]["by"].endswith("::test_small")
    assert mutants[3]["tests"] == [], "no test runs it"

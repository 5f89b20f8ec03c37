import fcntl
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from penstock.engine.native.build import LIBRARY
from penstock.engine.native.library import ABI_VERSION

# GPU kernels run in Triton's interpreter, on the CPU. Triton reads this when it is imported, which others do
# too: so here.
os.environ["TRITON_INTERPRET"] = "1"

# `make test` runs several processes: torch's threads would only take turns with the others'. Read at its
# import too.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Some machines (containers mostly) tell Python to keep no bytecode. Every server that a test starts would
# compile all of Penstock again, and every run would rewrite all tests' assertions.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).parent
# Directories whose tests start servers.
WAITING = ("cli", "engine_process", "fleet")

# A test may run pytest in a process of its own, whose tests are its parts: it holds their locks already.
INSIDE_A_TEST = "PYTEST_CURRENT_TEST" in os.environ

# No test is about how long it takes: a busy machine must not fail one.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        _begin_elsewhere(config)
    elif not INSIDE_A_TEST and LIBRARY.exists():
        _build_kernels()


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, as many tests wait for servers and for time."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it.
    return (len(affinity(0)) if affinity else os.cpu_count() or 1) + 1


def _begin_elsewhere(config: pytest.Config) -> None:
    """Each worker of pytest-xdist reads the tests from another folder on. What one has prepared and written
    (the bytecode of tests, with their assertions) the next finds; side by side each would prepare everything.
    """
    if [Path(arg).resolve() for arg in config.args] == [TESTS]:
        folders = sorted({TESTS / path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")})
        number, count = (os.environ[f"PYTEST_XDIST_WORKER{name}"] for name in ("", "_COUNT"))
        first = len(folders) * int(number.removeprefix("gw")) // int(count)
        config.args = [str(path) for path in folders[first:] + folders[:first]]


def _build_kernels() -> None:
    """Kernels that were built for another version of the code are built again: after a pull or a merge.

    In a process of its own each, as this one would keep the library that it has loaded once.
    """
    asked = f"import ctypes; print(ctypes.CDLL({str(LIBRARY)!r}).ps_abi_version())"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    if found.stdout.strip() != str(ABI_VERSION):
        subprocess.run([sys.executable, "-m", "penstock.engine.native.build"], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes take file after file in this order: those that mostly wait (for servers that start,
    for time that passes) stand between those that compute, and are all done before the end, where a long file
    would keep one process busy and leave the others idle.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    waiting = sorted({item.path for item in items if item.path.parent.name in WAITING})
    computing = sorted({item.path for item in items} - {*waiting})
    place = {path: 0.8 * at / len(waiting) for at, path in enumerate(waiting)}
    place |= {path: at / len(computing) for at, path in enumerate(computing)}
    items.sort(key=lambda item: (place[item.path], item.path))


_held: list[int] = []
"""Door and room, as they are open and locked while a test runs."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """A test that is marked `alone` waits until no other runs, in any process, and none begins until it has
    ended.

    Whoever goes in locks the door first (this file), then the room (this directory): so nobody slips in ahead
    of one who waits for the room to be empty. Outermost of all, so that waiting is no part of the test's
    timeout. Tests that follow each other and are all alone keep the room, or each would wait anew until the
    others' current tests have ended.
    """
    if INSIDE_A_TEST:
        return (yield)
    is_alone = item.get_closest_marker("alone") is not None
    if not _held:
        _held[:] = os.open(__file__, os.O_RDONLY), os.open(TESTS, os.O_RDONLY)
        door, room = _held
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
    try:
        return (yield)
    finally:
        if not (is_alone and nextitem is not None and nextitem.get_closest_marker("alone")):
            while _held:
                # Not only closed: a forked child of the test may have it open still.
                fcntl.flock(_held[-1], fcntl.LOCK_UN)
                os.close(_held.pop())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that says what did not run and why, most first: a machine that lacks something must not look
    like one that passed.
    """
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        # A tuple (file, line, reason) from a skip; this process has the reports of all of pytest-xdist's.
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ").partition("\n")[0]] += 1
    if reasons:
        parts = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"{reasons.total()} skipped: {parts}")


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """A shell's background jobs ignore SIGINT, and so would every program that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ledgers of servers that tests start are kept here, not in the developer's home."""
    directory = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(directory)
    return directory

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

# `make test` runs a process per core: torch's threads would only take turns with the others'. Read at its
# import too.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Some machines (containers mostly) tell Python to keep no bytecode. Every server that a test starts would
# compile all of Penstock again, and every run would rewrite all tests' assertions.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A test may run pytest in a process of its own, whose tests are its parts: it holds their locks already.
INSIDE_A_TEST = "PYTEST_CURRENT_TEST" in os.environ

# No test is about how long it takes: a busy machine must not fail one.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


def pytest_configure() -> None:
    """Kernels that were built for another version of the code are built again: after a pull or a merge.

    In a process of its own each, as this one would keep the library that it has loaded once.
    """
    if "PYTEST_XDIST_WORKER" in os.environ or INSIDE_A_TEST or not LIBRARY.exists():
        return
    asked = f"import ctypes; print(ctypes.CDLL({str(LIBRARY)!r}).ps_abi_version())"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    if found.stdout.strip() != str(ABI_VERSION):
        subprocess.run([sys.executable, "-m", "penstock.engine.native.build"], check=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is marked `alone` waits until no other runs, in any process, and none begins until it has
    ended.

    Whoever goes in locks the door first (this file), then the room (this directory): so nobody slips in ahead
    of one who waits for the room to be empty. Outermost of all, so that waiting is no part of the test's
    timeout.
    """
    if INSIDE_A_TEST:
        return (yield)
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    door, room = os.open(__file__, os.O_RDONLY), os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, how)
        fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)
    finally:
        for held in (door, room):
            fcntl.flock(
                held, fcntl.LOCK_UN
            )  # Not only closed: a forked child of the test may have it open still.
            os.close(held)


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

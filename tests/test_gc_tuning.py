import gc
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.gc_tuning import _heap_ranges, rare_gc, tune_server

MIB = 1 << 20
OFFER = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_a_server_lets_no_thread_keep_the_interpreter_for_long_and_collects_rarely() -> None:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        tune_server()
        assert sys.getswitchinterval() <= 0.001 < interval
        assert gc.get_threshold() > thresholds
        assert gc.get_freeze_count() > 0
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_what_a_simulation_changes_is_as_before_at_its_end() -> None:
    thresholds = gc.get_threshold()
    with rare_gc():
        assert gc.get_threshold() > thresholds
    assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, 0)


def area(begin: int, size: int, rss: int, *, rights: str = "rw-p", inode: int = 0, name: str = "") -> str:
    """As /proc/PID/smaps has it."""
    where = f"{begin:x}-{begin + size:x} {rights} 00000000 00:00 {inode} {name}".rstrip()
    return f"{where}\nSize: {size // 1024:10} kB\nKernelPageSize: 4 kB\nRss: {rss // 1024:10} kB\nPss: 7 kB\n"


def test_a_heap_in_use_is_moved_to_huge_pages_and_no_stack_file_or_rest_of_a_page() -> None:
    smaps = [
        area(3 * MIB, 6 * MIB, 5 * MIB, name="[heap]"),
        area(20 * MIB, 2 * MIB, 2 * MIB),
        area(31 * MIB, 2 * MIB, 2 * MIB),  # Holds no whole page.
        area(40 * MIB, 8 * MIB, MIB),  # A thread's stack.
        area(60 * MIB, 4 * MIB, 4 * MIB, rights="r-xp"),
        area(70 * MIB, 4 * MIB, 4 * MIB, inode=17, name="/tmp/a file"),
        area(80 * MIB, 8 * MIB, 8 * MIB, name="[stack]"),
    ]
    assert _heap_ranges("".join(smaps)) == [(4 * MIB, 8 * MIB), (20 * MIB, 22 * MIB)]


@pytest.mark.skipif(not OFFER.exists() or "[never]" in OFFER.read_text(), reason="no huge pages here")
def test_a_tuned_servers_objects_lie_in_huge_pages_and_are_what_they_were() -> None:
    script = """
import hashlib, re
from penstock.gc_tuning import tune_server
kept = [str(number) for number in range(1_000_000)]
before = hashlib.sha256("".join(kept).encode()).hexdigest()
tune_server()
assert hashlib.sha256("".join(kept).encode()).hexdigest() == before
rollup = open("/proc/self/smaps_rollup").read()
print(re.search(r"AnonHugePages: +(\\d+)", rollup)[1])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.gc_tuning import _heap_ranges, _use_huge_pages, rare_gc, tune_server

MIB = 1 << 20
OFFER = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COLLAPSE = 25


def test_a_server_lets_no_thread_keep_the_interpreter_for_long_and_collects_rarely() -> None:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(0.005)  # Another test may have tuned its process.
    gc.set_threshold(700, 10, 10)
    try:
        tune_server()
        assert sys.getswitchinterval() <= 0.001
        assert gc.get_threshold() > (700, 10, 10)
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


@pytest.fixture
def huge_pages() -> None:
    """Tests with it need a system that moves memory into huge pages when it is asked to."""
    if not OFFER.exists() or "[never]" in OFFER.read_text():
        pytest.skip("no huge pages here")
    with mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"1" * len(memory))
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        where, length = ctypes.c_void_p(start + -start % (2 * MIB)), ctypes.c_size_t(2 * MIB)
        if ctypes.CDLL(None).madvise(where, length, COLLAPSE):
            pytest.skip("this system does not collapse pages when it is asked to (Linux 6.1 does)")


@pytest.mark.usefixtures("huge_pages")
def test_a_mapped_file_whose_name_is_no_text_does_no_harm(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xff\r\x85")
    with open(path, "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert _use_huge_pages() > 0


def test_an_operators_never_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = tmp_path / "enabled"
    offer.write_text("always madvise [never]\n")
    monkeypatch.setattr("penstock.gc_tuning._OFFER", offer)
    assert _use_huge_pages() == 0


@pytest.mark.usefixtures("huge_pages")
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

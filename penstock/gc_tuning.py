"""Python's collector of cycles, for programs that hardly make any, how long its threads may keep the
interpreter, and the pages that its heap lies in.

By default it looks at everything young after every 700 new objects, and at everything there is when a quarter
more of it is new: a tenth of a simulation's time, a twenty-fifth of the gateway's, and for ten thousand
streams a pause of a tenth of a second; and it finds next to nothing. Memory stays bounded: what does make
cycles (errors with their tracebacks) is still collected, later.
"""

import ctypes
import gc
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_SIMULATED = (200_000, 20, 20)
"""New objects between two looks at the young ones, such looks between two at the middle ones, and so on; an
object takes some 100 bytes."""
_SERVED = (5_000, 20, 1000)
"""Of ten thousand streams there are a million objects, and a look at all of them holds everybody up for half
a second."""


_SWITCH_S = 0.0005
"""By default a thread that works in Python gives the interpreter up after 5 ms: so long would a request wait
whose event loop wakes while the ledger's delivery works."""


_HUGE_PAGE = 2 << 20
_OFFER = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_AREA = re.compile(
    r"^(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?\n"
    r"(?:\w+: .*\n)*?Rss: +(?P<rss>\d+)",
    re.MULTILINE,
)
"""One area of anonymous memory in /proc/PID/smaps."""


def tune_server() -> None:
    """The objects of now stay as long as the process: never look at it again, and rarely at what comes. They
    lie in huge pages, and no thread keeps the event loop waiting.

    For servers that have started.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SERVED)
    with suppress(OSError, AttributeError):
        _use_huge_pages()


def _use_huge_pages() -> int:
    """Move the heap of now into pages of 2 MiB, where Linux can (6.1 and newer) and may: how many.

    A request touches objects all over the heap. Beside other processes, and more so in a virtual machine,
    finding where small pages are takes a tenth of its time.
    """
    if "[never]" in _OFFER.read_text():
        return 0  # Collapsing would override what the operator said.
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    smaps = Path("/proc/self/smaps").read_text(errors="replace")  # A file's name may be no text.
    for begin, end in _heap_ranges(smaps):
        if libc.madvise(begin, end - begin, _MADV_HUGEPAGE) == 0:
            pages = range(begin, end, _HUGE_PAGE)
            moved += sum(libc.madvise(page, _HUGE_PAGE, _MADV_COLLAPSE) == 0 for page in pages)
    return moved


def _heap_ranges(smaps: str) -> list[tuple[int, int]]:
    """Begin and end, on bounds of huge pages, of memory that is no file's and mostly in use: not the stacks
    of threads, of which huge pages would use more.
    """
    ranges: list[tuple[int, int]] = []
    for area in _AREA.finditer(smaps):
        begin, end = int(area["begin"], 16), int(area["end"], 16)
        first, last = -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if first < last and int(area["rss"]) * 1024 * 2 >= end - begin:
            ranges.append((first, last))
    return ranges


@contextmanager
def rare_gc() -> Generator[None]:
    """Let the collector look rarely, and never at what is there already. As before at the end."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SIMULATED)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()

"""How the C library gives memory out in a worker: settings for a process that lives long and must not grow.

Left alone, glibc keeps what large tensors leave behind on its heap, in one heap per thread, and the more the
larger they were: a step that needs no more than the largest one did at start-up may still find no hole that
fits. Then the heap grows.
"""

import ctypes
import logging

MMAP_BYTES_MIN = 256 * 1024
"""Blocks from this size on are mapped one by one, and given back as soon as they are free. Steps make few:
what is large and needed in every step is scratch that was made at start-up."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_log = logging.getLogger(__name__)


def settle_malloc() -> bool:
    """Make peak memory depend on what is in use at once, and not on what was.

    False where the C library is another.

    Call it first: it does not change what has been given out.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        _log.info(
            "the C library is not glibc: peak memory may grow after start-up by what its allocator keeps"
        )
        return False
    settings = {_M_MMAP_THRESHOLD: MMAP_BYTES_MIN, _M_TRIM_THRESHOLD: 2 * MMAP_BYTES_MIN, _M_ARENA_MAX: 1}
    accepted = [library.mallopt(name, value) for name, value in settings.items()]
    return all(accepted)

"""The cache's memory: pages are committed before a step needs them, and no earlier than that."""

import ctypes
import gc
import mmap
import sys
import threading
import time

import pytest
import torch

from penstock.engine.kv_cache import AHEAD_BYTES, HUGE_PAGE_BYTES, KVCache
from penstock.models.spec import DecoderSpec, RopeSpec

TIMEOUT_S = 60.0
POPULATE_WRITE = 23
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def cache() -> KVCache:
    """Of 64 MiB, none of which was touched; a block is 128 KiB."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        where = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        if LIBC.madvise(where, ctypes.c_size_t(mmap.PAGESIZE), POPULATE_WRITE):
            pytest.skip("this system does not commit memory when it is asked to")
    spec = DecoderSpec(
        architecture="LlamaForCausalLM", vocab_size=8, hidden_size=256, intermediate_size=8, num_layers=8,
        num_heads=2, num_kv_heads=2, head_dim=128, max_position=1024, norm_eps=1e-6, rope=RopeSpec(),
    )  # fmt: skip
    made = KVCache(spec, 511, torch.bfloat16, torch.device("cpu"))
    assert made.tensor.nbytes == 4 * AHEAD_BYTES
    return made


def resident(cache: KVCache, first: int, end: int) -> int:
    """How many of the bytes from `first` to before `end` are in memory (mincore(2))."""
    found = (ctypes.c_ubyte * ((end - first) // mmap.PAGESIZE))()
    where, length = ctypes.c_void_p(cache.tensor.data_ptr() + first), ctypes.c_size_t(end - first)
    assert LIBC.mincore(where, length, found) == 0, ctypes.get_errno()
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def wait_for(cache: KVCache, first: int, end: int) -> None:
    """Until all of them are."""
    end_s = time.monotonic() + TIMEOUT_S
    while (found := resident(cache, first, end)) < end - first:
        assert time.monotonic() < end_s, f"{found} of {end - first} bytes are committed"
        time.sleep(0.01)


def test_memory_is_there_before_the_blocks_in_it_are_used(cache: KVCache) -> None:
    total = cache.tensor.nbytes
    assert resident(cache, 0, total) < HUGE_PAGE_BYTES, "nothing has touched it"
    cache.commit_ahead()
    wait_for(cache, 0, AHEAD_BYTES)
    assert not resident(cache, AHEAD_BYTES, total - HUGE_PAGE_BYTES), "no more than is soon used"
    page_blocks = HUGE_PAGE_BYTES // cache.tensor[0].nbytes
    cache.clear([0, page_blocks])  # The second page is begun.
    wait_for(cache, 0, AHEAD_BYTES + 2 * HUGE_PAGE_BYTES)
    assert not resident(cache, AHEAD_BYTES + 2 * HUGE_PAGE_BYTES, total - HUGE_PAGE_BYTES)


def test_what_a_page_holds_stays_and_the_end_is_the_end(cache: KVCache) -> None:
    block_bytes = cache.tensor[0].nbytes
    cache.tensor[505].fill_(7)
    cache.commit_ahead()
    cache.clear([400])
    wait_for(cache, 400 * block_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, cache.tensor.nbytes)
    cache.clear([510])
    assert bool((cache.tensor[505] == 7).all())
    assert not cache.tensor[[400, 504, 506, 510]].any()


def test_pages_that_were_skipped_are_not_committed_for_it(cache: KVCache) -> None:
    cache.commit_ahead()
    wait_for(cache, 0, AHEAD_BYTES)
    cache.clear([400])
    used = 401 * cache.tensor[0].nbytes
    wait_for(cache, used // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, cache.tensor.nbytes)
    assert not resident(cache, AHEAD_BYTES, 400 * cache.tensor[0].nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)


def test_idle_time_commits_further_and_no_more_than_is_worth_it(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = AHEAD_BYTES + 4 * HUGE_PAGE_BYTES
    monkeypatch.setattr("penstock.engine.kv_cache.IDLE_AHEAD_BYTES", end)
    assert not cache.commit_idly(), "before it serves"
    cache.commit_ahead()
    wait_for(cache, 0, AHEAD_BYTES)
    for committed in range(AHEAD_BYTES, end, HUGE_PAGE_BYTES):
        assert cache.commit_idly()
        assert resident(cache, committed, committed + HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES
    assert not cache.commit_idly()
    assert not resident(cache, end, cache.tensor.nbytes - HUGE_PAGE_BYTES)
    cache.clear([HUGE_PAGE_BYTES // cache.tensor[0].nbytes])
    assert cache.commit_idly(), "one page more is used"


def test_a_system_that_cannot_commit_is_not_asked_again(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.commit_ahead()
    wait_for(cache, 0, AHEAD_BYTES)
    asked = list[int]()
    monkeypatch.setattr("penstock.engine.kv_cache._populate", lambda address, _: bool(asked.append(address)))
    assert not cache.commit_idly()
    assert not cache.commit_idly()
    assert len(asked) == 1


def test_a_machine_without_another_thread_serves_all_the_same(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    unraisable = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    cache.commit_ahead()
    cache.clear([0, 400])
    gc.collect()
    assert not unraisable

"""The KV cache tensor, where keys and values of every block lie, and who commits its memory ahead of use; the
host tier's memory behind it; and what copies between the two while steps run.

A slot of the host tier is one block with all its layers, as in `KVCache`: one contiguous piece, so a copy is
one `copy_` per run of neighbours. Which block is whose, and which goes where, is decided in `kv/cache/`.

Both sides that copy have the same face: `start` queues a plan's copies, `collect` tells which ended. On the
CPU a thread copies (`copy_` releases the interpreter's lock), but for a plan that has nothing to do but to
wait for its loads: handing those to a thread would only add two wake-ups. With CUDA it is a stream of its own
and pinned memory, so that the GPU's copy engines work beside its kernels. The CUDA side has not been measured
yet.
"""

import ctypes
import logging
import mmap
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import as_tensor
from penstock.errors import ConfigError
from penstock.kv.cache.host_tier import BlockCopy, Copied
from penstock.models.spec import ROUNDED_EXTRA_BYTES, DecoderSpec
from penstock.schedule.plan import StepPlan
from penstock.types import BLOCK_TOKENS

HUGE_PAGE_BYTES = 2 * 1024 * 1024
AHEAD_BYTES = 8 * HUGE_PAGE_BYTES
"""Of a cache that are committed before a step needs them."""
IDLE_AHEAD_BYTES = 32 * HUGE_PAGE_BYTES
"""The same, by the time that nothing has run for long enough."""
_STEPS = 127.0
"""Of a rounded head, from zero to its largest value."""
_LEAST = 1e-30
"""A head whose values are all below is rounded to zeros."""


class KVCache:
    """Physical layout `[num_blocks + 1, num_layers, 2, 16 tokens, num_kv_heads, head_dim]`, keys before
    values.

    A block is one contiguous piece across all layers, so that it can be moved (host tier, another worker) in
    one copy. The last block is never allocated and stays zero: gathers are padded with it.

    Two flat views serve the layers without any per-layer tensors: *pages* are
    `[2 * layers * blocks, 16 * heads * dim]` (keys, or values, of one block in one layer) and *slots* are
    `[16 * pages, heads * dim]` (one token's).

    A rounded cache is int8: each head of a token is `head_dim` integers of at most 127 and, as the
    `ROUNDED_EXTRA_BYTES` after them, the float32 that they are to be multiplied by. So `head_dim` is that
    much more wherever a shape is said above, and a block is still one piece that carries all of its meaning.
    """

    __slots__ = (
        "_ahead", "_block_bytes", "dtype", "head_dim", "num_blocks", "num_kv_heads", "num_layers", "pages",
        "rounded", "slots", "tensor",
    )  # fmt: skip

    def __init__(
        self,
        spec: DecoderSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rounded: bool = False,
        float8: bool = False,
        products: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of the cache unless it is `rounded`, or in FP8 (e4m3; as they are, without
        scales). `products` is the type of attention's products if it is a wider one.

        Raises:
            ConfigError: heads of this size cannot be rounded.
        """
        if rounded and spec.head_dim % ROUNDED_EXTRA_BYTES:
            raise ConfigError(
                f"engine.kv_dtype is int8, which takes heads of a multiple of {ROUNDED_EXTRA_BYTES} values, "
                f"not {spec.head_dim}"
            )
        self.num_blocks, self.num_layers = num_blocks, spec.num_layers
        self.num_kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        self.dtype, self.rounded = products or dtype, rounded
        size = spec.head_dim + (ROUNDED_EXTRA_BYTES if rounded else 0)
        stored = torch.int8 if rounded else torch.float8_e4m3fn if float8 else dtype
        shape = (num_blocks + 1, spec.num_layers, 2, BLOCK_TOKENS, spec.num_kv_heads, size)
        self.tensor = (
            _lazy_zeros(shape, stored)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=stored, device=device)
        )
        self.pages = self.tensor.view(-1, BLOCK_TOKENS * spec.num_kv_heads * size)
        self.slots = self.tensor.view(-1, spec.num_kv_heads * size)
        self._ahead: _CommitAhead | None = None
        self._block_bytes = self.tensor[0].nbytes

    def commit_ahead(self) -> None:
        """From now on memory is committed before blocks in it are used. For a cache in main memory."""
        with suppress(RuntimeError):  # No further thread may start: pages come when they are touched.
            ahead = _CommitAhead(self.tensor.data_ptr(), self.tensor.nbytes)
            ahead.used_to(0)
            self._ahead = ahead

    def commit_idly(self) -> bool:
        """Commit one huge page more, now that nothing runs; False: as many are as is worth it."""
        return self._ahead is not None and self._ahead.commit_one()

    def scratch(self, *shape: int) -> torch.Tensor:
        """Memory for what is read out of the cache, or goes into it."""
        return torch.empty(shape, dtype=self.dtype, device=self.tensor.device)

    def staging(self, num_tokens: int) -> torch.Tensor | None:
        """Memory for as many tokens' keys or values as the cache has them; None: products are made of the
        same.
        """
        return (
            None if self.tensor.dtype is self.dtype else self.slots.new_empty(num_tokens, self.slots.shape[1])
        )

    def gather(self, pages: torch.Tensor, out: torch.Tensor, staging: torch.Tensor | None) -> None:
        """Read pages `[count]` into `out`, `count * 16` tokens of all heads, contiguous."""
        if staging is None:
            torch.index_select(self.pages, 0, pages, out=out.view(len(pages), -1))
            return
        kept = staging[: len(pages) * BLOCK_TOKENS]
        torch.index_select(self.pages, 0, pages, out=kept.view(len(pages), -1))
        if not self.rounded:
            out.view(kept.shape).copy_(kept)
            return
        by_head = kept.view(-1, self.num_kv_heads, self.head_dim + ROUNDED_EXTRA_BYTES)
        scales = by_head[..., self.head_dim :].view(torch.float32)
        torch.mul(by_head[..., : self.head_dim], scales, out=out.view(-1, self.num_kv_heads, self.head_dim))

    def store(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write keys or values `[count, heads, dim]` at slots `[count]`."""
        kv = round_heads(kv) if self.rounded else kv.to(self.tensor.dtype)
        self.slots.index_copy_(0, slots, kv.flatten(1))

    @property
    def zero_block(self) -> int:
        """The block that pads gathers."""
        return self.num_blocks

    @property
    def pages_per_block(self) -> int:
        """Distance in `pages` from one block to the next."""
        return self.num_layers * 2

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that change hands: a masked position is still multiplied, and 0 x NaN of an earlier
        owner is NaN.
        """
        for block in blocks:
            self.tensor[block].zero_()
        if self._ahead is not None and blocks:
            self._ahead.used_to((max(blocks) + 1) * self._block_bytes)


def round_heads(kv: torch.Tensor) -> torch.Tensor:
    """Keys or values `[..., dim]` as a rounded cache has them: int8 `[..., dim + ROUNDED_EXTRA_BYTES]`."""
    exact = kv.float()
    largest = exact.abs().amax(-1, keepdim=True)
    # Divided as the native kernels do: a number over a tensor is a reciprocal and a product in torch.
    inverse = torch.where(largest > _LEAST, torch.full_like(largest, _STEPS) / largest, 0.0)
    return torch.cat(((exact * inverse).round().to(torch.int8), (largest / _STEPS).view(torch.int8)), -1)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the system hands out page by page when they are first touched.

    Zeroing gigabytes at the start would cost seconds and hold memory that few requests ever use. Mapped, not
    asked of malloc, which may give what was in use and must be cleared. Starts on a huge page.
    """
    num_bytes = prod(shape) * dtype.itemsize
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # A kernel may be built without them.
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = as_tensor(np.frombuffer(mapped, np.uint8))
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype).view(shape)


END_S = 1.0
"""How long the owner of a thread waits for its end."""
_LIBC = ctypes.CDLL(None)
_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14. Pages keep what they hold."""


class _CommitAhead:
    """A thread that has the system clear a cache's pages before a step touches them.

    The system clears a huge page when it is first touched, which takes longer than a step of a small model
    that decodes: one stream at the end of a page would hold up all. Blocks that were never used are given
    out in their order, so that what is used next is known.

    Beside steps the thread takes a core from them for as long: 0.2 ms a page, and 4 ms on a virtual machine
    whose host had taken the page back. An idle engine therefore commits further ahead (`commit_one`),
    and the thread has work only in a load that never pauses.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        """Of the cache; `address` is the start of a huge page."""
        self._address, self._num_bytes, self._asked, self._used = address, num_bytes, 0, 0
        self._can_commit = True
        self._pieces: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        # The thread must not know this object: without references, it ends its thread.
        thread = threading.Thread(target=_commit, args=(address, self._pieces), name="kv-commit", daemon=True)
        thread.start()
        self._thread = thread

    def used_to(self, num_bytes: int) -> None:
        """So many of the first bytes are used, or were. Costs nothing where no further page is begun."""
        self._used = max(self._used, num_bytes)
        wanted = -(-(num_bytes + AHEAD_BYTES) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        wanted = min(wanted, self._num_bytes)
        if wanted > self._asked:
            # Used pages are committed, or being so.
            first = max(self._asked, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
            self._asked = wanted
            self._pieces.put((first, wanted))

    def commit_one(self) -> bool:
        """One page, up to `IDLE_AHEAD_BYTES` of what is used; False: they are."""
        at, end = self._asked, min(self._used + IDLE_AHEAD_BYTES, self._num_bytes)
        if at >= end or not self._can_commit:
            return False
        self._asked = at + HUGE_PAGE_BYTES
        self._can_commit = _populate(self._address + at, min(HUGE_PAGE_BYTES, self._num_bytes - at))
        return self._can_commit

    def __del__(self) -> None:
        if (thread := getattr(self, "_thread", None)) is None:
            return  # It could not start.
        self._pieces.put(None)
        thread.join(END_S)  # The memory must not be given back under it.


def _commit(address: int, pieces: "SimpleQueue[tuple[int, int] | None]") -> None:
    """The thread's life. Where the system cannot commit ahead, pages come when they are touched."""
    while (piece := pieces.get()) is not None:
        first, end = piece
        for at in range(first, end, HUGE_PAGE_BYTES):  # One at a time: no other call waits for more.
            if not _populate(address + at, min(HUGE_PAGE_BYTES, end - at)):
                return


def _populate(address: int, num_bytes: int) -> bool:
    """Whether the system can; it does not hold the interpreter meanwhile."""
    return _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE) == 0


_log = logging.getLogger(__name__)


class HostStore(Protocol):
    """Copies blocks between the device and host slots."""

    def start(self, plan: StepPlan) -> None:
        """Begin the plan's copies. Writes of earlier steps are complete."""
        ...

    def collect(self, *, wait: bool) -> tuple[Copied, ...]:
        """The copies that ended since the last call; with `wait`, block until there is one, if any is under
        way.
        """
        ...


class NoHostStore:
    """There is no host memory: plans have no copies."""

    def start(self, plan: StepPlan) -> None:
        """Nothing to begin."""
        assert not plan.copies_out, "a copy without a host tier"
        assert not plan.copies_in, "a copy without a host tier"

    def collect(self, *, wait: bool) -> tuple[Copied, ...]:
        """Nothing ever ended."""
        return ()


def host_store(cache: KVCache, num_slots: int) -> HostStore:
    """The store that fits the cache's device. Memory of slots that were never used costs nothing on the CPU.

    Raises:
        RuntimeError: there is not that much memory to pin.
    """
    if not num_slots:
        return NoHostStore()
    on_gpu = cache.tensor.device.type == "cuda"
    shape = (num_slots, *cache.tensor.shape[1:])
    slots = torch.empty(shape, dtype=cache.tensor.dtype, pin_memory=on_gpu)
    return CudaHostStore(cache.tensor, slots) if on_gpu else ThreadHostStore(cache.tensor, slots)


@dataclass(slots=True, frozen=True)
class _Unit:
    """One plan's copies in one direction: they end together."""

    copies: tuple[BlockCopy, ...]
    out: bool


class _Copier:
    """The state of the copying thread.

    It must not know the store: a store without references ends its thread.
    """

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        self._blocks, self._slots = blocks, slots
        self._changed = threading.Condition()
        self._loads: deque[_Unit] = deque()
        self._stores: deque[_Unit] = deque()
        self._closed = False
        self.ended: SimpleQueue[tuple[Copied, ...]] = SimpleQueue()

    def add(self, plan: StepPlan) -> None:
        """Queue a plan's copies.

        Loads that the plan waits for are not queued: they are done when this returns.

        A store that the thread is at may run beside them: it has other slots, and if its block is one that is
        loaded into, then that has another content by now, and what was stored of it is dropped (see
        `kv/cache/host_tier.py`).
        """
        loads, stores = _Unit(plan.copies_in, out=False), _Unit(plan.copies_out, out=True)
        if loads.copies and not plan.work:
            self.ended.put(self._copy(loads))
            loads = _Unit((), out=False)
        if not (loads.copies or stores.copies):
            return
        with self._changed:
            if loads.copies:
                self._loads.append(loads)
            if stores.copies:
                self._stores.append(stores)
            self._changed.notify()

    def close(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def run(self) -> None:
        """The thread's life."""
        while (unit := self._next()) is not None:
            self.ended.put(self._copy(unit))

    def _next(self) -> _Unit | None:
        with self._changed:
            while not (self._loads or self._stores or self._closed):
                self._changed.wait()
            return None if self._closed else (self._loads or self._stores).popleft()

    def _copy(self, unit: _Unit) -> tuple[Copied, ...]:
        ok = True
        try:
            with torch.inference_mode():
                copy_runs(self._blocks, self._slots, unit.copies, out=unit.out)
        except Exception:  # noqa: BLE001
            # The tokens can be computed again; a dead thread would keep requests waiting.
            _log.exception("a copy between the KV cache and host memory failed")
            ok = False
        return tuple(Copied(copy.slot, ok) for copy in unit.copies)


class ThreadHostStore:
    """Copies in a thread of its own, which sleeps while there is nothing to copy. Loads go before stores.

    The queue is bounded by the scheduler (`HOST_LOADS_MAX` and `HOST_STORES_MAX` blocks).
    """

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        self._copier = _Copier(blocks, slots)
        self._under_way = 0  # Units that were started and not collected.
        self._thread = threading.Thread(target=self._copier.run, name="host-kv-copies", daemon=True)
        self._thread.start()

    def start(self, plan: StepPlan) -> None:
        """See `HostStore`."""
        if plan.copies_in or plan.copies_out:
            self._copier.add(plan)
            self._under_way += bool(plan.copies_in) + bool(plan.copies_out)

    def collect(self, *, wait: bool) -> tuple[Copied, ...]:
        """See `HostStore`."""
        if not self._under_way:
            return ()
        ended: list[Copied] = []
        try:
            if wait:
                ended += self._copier.ended.get()
                self._under_way -= 1
            while self._under_way:
                ended += self._copier.ended.get_nowait()
                self._under_way -= 1
        except Empty:
            pass
        return tuple(ended)

    def __del__(self) -> None:
        self._copier.close()
        # The end of the interpreter must not find it inside of torch.
        self._thread.join(END_S)


class CudaHostStore:
    """Copies on a stream of its own between the device and pinned memory. Not measured yet."""

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        self._blocks, self._slots = blocks, slots
        self._stream = torch.cuda.Stream(blocks.device)
        self._under_way: deque[tuple[tuple[BlockCopy, ...], torch.cuda.Event]] = deque()

    def start(self, plan: StepPlan) -> None:
        """See `HostStore`. Loads go first, since requests wait for them."""
        self._start(plan.copies_in, out=False)
        self._start(plan.copies_out, out=True)

    def _start(self, copies: tuple[BlockCopy, ...], *, out: bool) -> None:
        if not copies:
            return
        # Blocks change hands between steps, so kernels that were launched before come first.
        self._stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        with torch.cuda.stream(self._stream):
            copy_runs(self._blocks, self._slots, copies, out=out)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._under_way.append((copies, done))

    def collect(self, *, wait: bool) -> tuple[Copied, ...]:
        """See `HostStore`. The stream is in order, so the oldest ends first."""
        ended: list[Copied] = []
        while self._under_way:
            copies, done = self._under_way[0]
            if wait and not ended:
                done.synchronize()
            elif not done.query():
                break
            self._under_way.popleft()
            ended += [Copied(copy.slot) for copy in copies]
        return tuple(ended)


def copy_runs(blocks: Tensor, slots: Tensor, copies: Sequence[BlockCopy], *, out: bool) -> None:
    """Copy each pair, neighbours in both memories at once. Both tensors are `[number, ...block]`."""
    for block, slot, count in _runs(copies):
        device, host = blocks[block : block + count], slots[slot : slot + count]
        source, target = (device, host) if out else (host, device)
        target.copy_(source, non_blocking=True)


def _runs(copies: Sequence[BlockCopy]) -> Iterator[tuple[int, int, int]]:
    """(block, slot, count) of pairs that follow each other in both; the order of copies does not matter."""
    block = slot = count = 0
    for copy in sorted(copies):
        if count and copy == (block + count, slot + count):
            count += 1
            continue
        if count:
            yield block, slot, count
        block, slot, count = copy.block, copy.slot, 1
    if count:
        yield block, slot, count

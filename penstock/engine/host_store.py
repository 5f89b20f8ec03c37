"""The host tier's memory, and what copies between it and the KV cache while steps run.

A slot is one block with all its layers, as in `KVCache`: one contiguous piece, so a copy is one `copy_` per
run of neighbours. Which block goes where is decided in `kv/cache/host_tier.py`.

Both sides that copy have the same face: `start` queues a plan's copies, `collect` tells which ended. On the
CPU a thread copies (`copy_` releases the interpreter's lock), but for a plan that has nothing to do but to
wait for its loads: handing those to a thread would only add two wake-ups. With CUDA it is a stream of its own
and pinned memory, so that the GPU's copy engines work beside its kernels. The CUDA side has not been measured
yet.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.kv_cache import KVCache
from penstock.kv.cache.host_tier import BlockCopy, Copied
from penstock.schedule.plan import StepPlan

END_S = 1.0
"""How long the owner of a thread waits for its end."""
_log = logging.getLogger(__name__)


class HostStore(Protocol):
    """Copies blocks between the device and host slots."""

    def start(self, plan: StepPlan) -> None:
        """Begin the plan's copies. What earlier steps wrote is complete."""
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
    """What the copying thread knows.

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
        except Exception:  # noqa: BLE001 The tokens can be computed again; a dead thread would keep requests waiting.
            _log.exception("a copy between the KV cache and host memory failed")
            ok = False
        return tuple(Copied(copy.slot, ok) for copy in unit.copies)


class ThreadHostStore:
    """Copies in a thread of its own, which sleeps while there is nothing to copy. Loads go before stores.

    What is queued is bounded by the scheduler (`HOST_LOADS_MAX` and `HOST_STORES_MAX` blocks).
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

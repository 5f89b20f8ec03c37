"""The differences between devices for code that launches work: staging memory, events, graphs.

On the CPU work is done when the call returns, so events are nothing and a graph is the call itself: the same
runner code runs, and is tested, on either.
"""

import gc
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.arrays import as_tensor
from penstock.engine.memory import CPU_SHARE, GPU_SHARE, Share, free_memory_bytes

_cuda = cast(Any, torch.cuda)  # Its stubs leave most types open.


class Mark(Protocol):
    """A point in the device's queue."""

    def wait(self) -> None:
        """Return once everything launched before the mark is done."""
        ...


class Graph(Protocol):
    """Captured work on fixed buffers."""

    def replay(self) -> None:
        """Launch it again."""
        ...


class Platform(Protocol):
    """One device and its queue of work."""

    device: torch.device
    pci_address: str | None
    """Of the device, as in the kernel's log ("0000:3b:00"); empty if that is not known, None for a
    processor."""
    share: Share
    """The KV cache's share of the free memory."""

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that copies to and from the device without stopping the host."""
        ...

    def mark(self) -> Mark:
        """Remember the end of what is launched so far."""
        ...

    def capture(self, run: Callable[[], None]) -> Graph:
        """Record what `run` launches; it was run before, so that nothing is set up lazily any more."""
        ...

    def reserved_bytes(self) -> int:
        """Device memory that this process has taken; 0 where it is not counted."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run something, and give the most device memory that it had taken at any time; 0 where it is not
        counted.

        It is returned to the device afterwards.
        """
        ...

    def free_bytes(self) -> int:
        """Memory that a KV cache could have now."""
        ...


class _Done:
    def wait(self) -> None:
        """Nothing is ever under way."""


class _Again:
    """A graph of a device that works while the host waits."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class CpuPlatform:
    """See `Platform`: everything at once."""

    device = torch.device("cpu")
    share = CPU_SHARE
    pci_address: str | None = None
    _done = _Done()

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Platform`."""
        return torch.zeros(shape, dtype=dtype)

    def mark(self) -> Mark:
        """See `Platform`."""
        return self._done

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Platform`."""
        return _Again(run)

    def reserved_bytes(self) -> int:
        """See `Platform`."""
        return 0

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """See `Platform`; not run, since memory is not counted."""
        return 0

    def free_bytes(self) -> int:
        """See `Platform`."""
        return free_memory_bytes()


class _CudaMark:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = _cuda.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaPlatform:
    """See `Platform`: one CUDA device, its current stream, and one memory pool for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.share = GPU_SHARE
        self.pci_address: str | None = _pci_address(device)
        self._pool: object | None = None

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Platform`."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        """See `Platform`."""
        return _CudaMark()

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Platform`."""
        if self._pool is None:
            # Steps run one after another, so all graphs may use the same scratch.
            self._pool = _cuda.graph_pool_handle()
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph, pool=self._pool):
            run()
        return cast(Graph, graph)

    def reserved_bytes(self) -> int:
        """See `Platform`."""
        return int(_cuda.memory_reserved(self.device))

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """See `Platform`."""
        _cuda.reset_peak_memory_stats(self.device)
        before = int(_cuda.memory_allocated(self.device))
        run()
        taken = int(_cuda.max_memory_allocated(self.device)) - before
        gc.collect()
        _cuda.empty_cache()
        return taken

    def free_bytes(self) -> int:
        """See `Platform`."""
        free, _ = cast("tuple[int, int]", _cuda.mem_get_info(self.device))
        return free


# From the host's arrays to the device without stopping the host: memory that copies run from, one area per
# step.

STAGING_WORDS = 128 * 1024
"""int32 words of one area: block ids of 2M tokens of context, or a prompt of 128K tokens."""


class Staging:
    """An area that one step's small arrays are copied from. Filled again only when that step is done."""

    def __init__(self, platform: Platform, words: int = STAGING_WORDS) -> None:
        self._device = platform.device
        self._words = platform.staging((words,), torch.int32)
        self._array: npt.NDArray[np.int32] = self._words.numpy()
        self._used = 0

    def clear(self) -> None:
        """Start again: the step that used the area is done."""
        self._used = 0

    def put(self, values: npt.NDArray[Any]) -> Tensor:
        """The values `[n]` (a type of 4 or 8 bytes) in device memory.

        An array that does not fit is copied from ordinary memory, for which the host may have to wait.
        """
        start = self._used + self._used % 2  # Eight bytes may not begin at an odd word.
        end = start + values.size * values.itemsize // 4
        if end > len(self._array):
            return as_tensor(values).to(self._device)
        self._array[start:end] = np.ascontiguousarray(values).view(np.int32)
        self._used = end
        words = self._words[start:end].view(as_tensor(values).dtype)
        return words.to(self._device, non_blocking=True)


def _pci_address(device: torch.device) -> str:
    """Empty where torch does not say."""
    facts = _cuda.get_device_properties(device)
    try:
        return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}"
    except AttributeError:
        return ""

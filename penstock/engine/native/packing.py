"""Where a model's packed weights lie, and the copies that fill it; knows nothing of what they mean."""

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.native.library import NativeLibrary, PsPack, Type

HUGE_PAGE_BYTES = 2 * 1024 * 1024
CHUNK_BYTES = 64 * 1024 * 1024
WAITING_BYTES_MAX = 64 * 1024 * 1024
MAPPED_BYTES_MAX = 1 << 30
_ALIGNMENT = 64


class Packing:
    """The memory of weights, and the copies into it, which wait until `finish`: then one call makes them all,
    and leaves the interpreter to other threads for as long.

    Values of a mapped file wait where they lie, at most `MAPPED_BYTES_MAX` of them: the copies read the file,
    and whoever reports progress before them (`on_copies`) is ahead of it by no more than that. Other values,
    rounded or converted, are in memory twice while they wait: at most `WAITING_BYTES_MAX` of them do.

    Weights lie one behind the other in huge pages. A page of the usual size where each begins and ends, and
    under all that are small, would cost as many faults as all the rest, and more of the processor's
    translations in every step.
    """

    def __init__(
        self,
        kernels: NativeLibrary,
        chunk_bytes: int = CHUNK_BYTES,
        on_copies: Callable[[], None] | None = None,
    ) -> None:
        """Memory is taken `chunk_bytes` at a time, and used as far as it is written to. `on_copies` is called
        before copies are made, which is when the interpreter is free for others.
        """
        self.kernels, self._chunk_bytes, self._on_copies = kernels, chunk_bytes, on_copies
        self._left = torch.empty(0, dtype=torch.uint8)
        self._jobs: list[PsPack] = []
        self._alive: list[Tensor] = []
        """The memory that copies read and write which wait."""
        self._mapped = MappedFiles()
        self._waiting_bytes = self._mapped_bytes = 0

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the model for `count` numbers, not yet written to."""
        num_bytes = count * dtype.itemsize
        if num_bytes > self._chunk_bytes:
            taken = self._chunk(num_bytes)
        else:
            if num_bytes > len(self._left):
                self._left = self._chunk(self._chunk_bytes)
            taken = self._left[:num_bytes]
            self._left = self._left[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        self._alive.append(taken)
        return taken.view(dtype)

    def _chunk(self, num_bytes: int) -> Tensor:
        if num_bytes < HUGE_PAGE_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        whole = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
        chunk = whole[-whole.data_ptr() % HUGE_PAGE_BYTES :][:num_bytes]
        self.kernels.advise_huge(chunk.data_ptr(), chunk.nbytes)
        return chunk

    def copy(
        self, kind: Type, sources: tuple[Tensor, Tensor | None], shape: tuple[int, int, int], out: int
    ) -> None:
        """Pack one matrix [n, k], or gate and up, to the address `out`; `shape` is (n, k, k_padded)."""
        dense = [each.contiguous() for each in sources if each is not None]
        first, second = dense[0].data_ptr(), dense[1].data_ptr() if len(dense) > 1 else None
        n, k, k_padded = shape
        self._jobs.append(
            PsPack(first=first, second=second, out=out, n=n, k=k, k_padded=k_padded, type=int(kind))
        )
        self._alive += dense
        mapped = sum(each.nbytes for each in dense if self._mapped.hold(each))
        self._mapped_bytes += mapped
        self._waiting_bytes += sum(each.nbytes for each in dense) - mapped
        if self._waiting_bytes > WAITING_BYTES_MAX or self._mapped_bytes > MAPPED_BYTES_MAX:
            self.finish()

    def finish(self) -> None:
        """Make the copies that wait."""
        if self._on_copies is not None:
            self._on_copies()
        self.kernels.pack(self._jobs)
        self._jobs.clear()
        self._alive.clear()
        self._waiting_bytes = self._mapped_bytes = 0


class MappedFiles:
    """Where this process has files mapped: in the order of addresses, as the kernel lists them."""

    def __init__(self) -> None:
        self._starts, self._ends = list[int](), list[int]()

    def hold(self, tensor: Tensor) -> bool:
        """Whether its memory is a file's, and not its own."""
        if tensor.untyped_storage().resizable():
            return False  # Torch has allocated it.
        address = tensor.data_ptr()
        if not self._find(address):
            self._read()  # It may be new.
        return self._find(address)

    def _find(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]

    def _read(self) -> None:
        """proc(5): addresses, permissions, offset, device, inode (0: no file), path, which may be no text."""
        lines = Path("/proc/self/maps").read_bytes().rstrip(b"\n").split(b"\n")
        areas = [line.split(maxsplit=5) for line in lines]
        bounds = [area[0].split(b"-") for area in areas if area[4] != b"0"]
        self._starts = [int(start, 16) for start, _ in bounds]
        self._ends = [int(end, 16) for _, end in bounds]

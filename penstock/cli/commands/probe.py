"""Prints as JSON what torch can do here. `doctor` runs it as a process of its own and reads the answer back.

A torch built for another processor ends with an illegal instruction, not with an exception: `doctor` must
survive that and say so. So torch is imported only where it is measured.
"""

import sys
from typing import TYPE_CHECKING

import msgspec

from penstock.clock import SystemClock

if TYPE_CHECKING:
    import torch

SIZE = 512
REPEATS = 8


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the probe found."""

    version: str
    threads: int
    bfloat16_speedup: float
    """How many times faster a bfloat16 matrix product is than a float32 one."""
    gpus: tuple[str, ...]
    cuda_build: str
    """The CUDA version that torch was built for; empty for a CPU build."""


def read_facts() -> TorchFacts:
    """Measure and ask."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # On a busy machine waiting for the other threads would be all that is measured.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchFacts(
        version=str(torch.__version__),
        threads=threads,
        bfloat16_speedup=_best_ns(torch.float32) / _best_ns(torch.bfloat16),
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(num_gpus)),
        cuda_build=torch.version.cuda or "",
    )


def _best_ns(dtype: "torch.dtype") -> int:
    import torch

    clock = SystemClock()
    left = torch.ones(SIZE, SIZE, dtype=dtype)
    right = torch.ones(SIZE, SIZE, dtype=dtype)
    times: list[int] = []
    for _ in range(REPEATS + 1):  # The first one warms up.
        start_ns = clock.now_ns()
        torch.mm(left, right)
        times.append(clock.now_ns() - start_ns)
    return max(1, min(times[1:]))


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(read_facts()).decode())

"""What torch can do here, told as JSON on standard output. Run as a process of its own.

A torch built for another processor ends with an illegal instruction, not with an exception: `doctor`
must survive that and say so.
"""

import sys

import msgspec
import torch

from penstock.cli.commands.torch_facts import TorchFacts
from penstock.clock import SystemClock

SIZE = 512
REPEATS = 8


def _best_ns(dtype: torch.dtype) -> int:
    clock = SystemClock()
    left = torch.ones(SIZE, SIZE, dtype=dtype)
    right = torch.ones(SIZE, SIZE, dtype=dtype)
    times: list[int] = []
    for _ in range(REPEATS + 1):  # The first one warms up.
        start_ns = clock.now_ns()
        torch.mm(left, right)
        times.append(clock.now_ns() - start_ns)
    return max(1, min(times[1:]))


def read_facts() -> TorchFacts:
    """Measure and ask."""
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


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(read_facts()).decode())

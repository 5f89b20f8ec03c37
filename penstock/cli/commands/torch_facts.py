"""What `probe` tells `doctor` about torch. Apart from both, so that `doctor` need not import torch."""

import msgspec


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found out."""

    version: str
    threads: int
    bfloat16_speedup: float
    """How many times faster a bfloat16 matrix product is than a float32 one."""
    gpus: tuple[str, ...]
    cuda_build: str
    """The CUDA version that torch was built for; empty for a CPU build."""

"""SwiGLU's gate (Shazeer 2020, arXiv 2002.05202)."""

import torch
from torch import Tensor


class SiluMul:
    """`silu(gate) * up` over the two halves of a fused projection, in float32 inside."""

    __slots__ = ("_gate", "_sigmoid")

    def __init__(self, size: int, max_tokens: int, device: torch.device) -> None:
        self._gate = torch.empty(max_tokens, size, device=device)
        self._sigmoid = torch.empty(max_tokens, size, device=device)

    def __call__(self, gate_up: Tensor, out: Tensor) -> None:
        """Write to `out` `[num_tokens, size]` from `gate_up` `[num_tokens, 2 * size]`."""
        num_tokens, size = out.shape
        gate, sigmoid = self._gate[:num_tokens], self._sigmoid[:num_tokens]
        gate.copy_(gate_up[:, :size])
        # torch's own silu computes the last elements of each thread's share with another exponential, so its
        # bits depend on the batch; exp alone does not.
        torch.neg(gate, out=sigmoid)
        sigmoid.exp_().add_(1.0)
        gate.div_(sigmoid)
        torch.mul(gate, gate_up[:, size:], out=out)

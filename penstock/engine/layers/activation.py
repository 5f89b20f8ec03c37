"""Gates of feed-forward layers, SwiGLU's and GeGLU's (Shazeer 2020, arXiv 2002.05202), in float32 inside."""

import math

import torch
from torch import Tensor


class SiluMul:
    """`silu(gate) * up` over the two halves of a fused projection."""

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


class GeluTanhMul(SiluMul):
    """`gelu(gate) * up` with the tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    __slots__ = ()

    def __call__(self, gate_up: Tensor, out: Tensor) -> None:
        """See `SiluMul`."""
        num_tokens, size = out.shape
        gate, sigmoid = self._gate[:num_tokens], self._sigmoid[:num_tokens]
        gate.copy_(gate_up[:, :size])
        # x * (1 + tanh(u)) / 2 is x / (1 + exp(-2u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
        torch.mul(gate, gate, out=sigmoid)
        sigmoid.mul_(0.044715).add_(1.0).mul_(gate).mul_(-2.0 * math.sqrt(2.0 / math.pi))
        sigmoid.exp_().add_(1.0)
        gate.div_(sigmoid)
        torch.mul(gate, gate_up[:, size:], out=out)

"""Feed-forward layers: one gated network for every token, or a router that picks some experts for each.

Own the order of operations; weights sit in `Linear`s, activations in the caller's scratch.

Gates of feed-forward layers, SwiGLU's and GeGLU's (Shazeer 2020, arXiv 2002.05202), in float32 inside.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.arrays import int_list
from penstock.engine.layers.linear import Linear

Gate = Callable[[Tensor, Tensor], None]
Scratch = tuple[Tensor, Tensor]
"""`[num_tokens, 2 * size]` and `[num_tokens, size]`; contents mean nothing between calls."""


class Mlp(Protocol):
    """A feed-forward layer, chosen when the decoder is built."""

    def __call__(self, x: Tensor, scratch: Scratch, out: Tensor) -> None:
        """Write to `out` from `x`, both `[num_tokens, hidden]`."""
        ...


class DenseMlp:
    """`down(gate(gate_up(x)))`."""

    __slots__ = ("_down", "_gate", "_gate_up")

    def __init__(self, gate_up: Linear, gate: Gate, down: Linear) -> None:
        self._gate_up, self._gate, self._down = gate_up, gate, down

    def __call__(self, x: Tensor, scratch: Scratch, out: Tensor) -> None:
        """See `Mlp`."""
        gate_up, gated = scratch
        self._gate_up(x, gate_up)
        self._gate(gate_up, gated)
        self._down(gated, out)


class MoeScratch:
    """The scratch of the experts of all layers, one after another."""

    __slots__ = ("given", "picked", "total", "weighted")

    def __init__(self, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.picked, self.given = torch.empty(2, max_tokens, hidden_size, dtype=dtype, device=device)
        self.weighted, self.total = torch.empty(2, max_tokens, hidden_size, device=device)


class MoeMlp:
    """The weighted sum of the `top_k` most probable experts of each token (Shazeer et al. 2017, arXiv
    1701.06538).

    Of equally probable ones the first are taken. Experts are added in order of their numbers, in float32, so
    a token's bits do not depend on who else chose them.
    """

    __slots__ = ("_experts", "_normalise", "_router", "_scratch", "_top_k")

    def __init__(
        self,
        router: Linear,
        experts: Sequence[DenseMlp],
        scratch: MoeScratch,
        *,
        top_k: int,
        normalise: bool,
    ) -> None:
        self._router, self._experts, self._scratch = router, experts, scratch
        self._top_k, self._normalise = top_k, normalise

    def __call__(self, x: Tensor, scratch: Scratch, out: Tensor) -> None:
        """See `Mlp`."""
        shares, chosen = self._routes(x)
        own = self._scratch
        total = own.total[: len(x)].zero_()
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts))
        for expert, count in enumerate(int_list(counts)):
            if not count:
                continue
            tokens, places = torch.where(chosen == expert)
            picked, given, weighted = own.picked[:count], own.given[:count], own.weighted[:count]
            torch.index_select(x, 0, tokens, out=picked)
            self._experts[expert](picked, (scratch[0][:count], scratch[1][:count]), given)
            weighted.copy_(given)
            total.index_add_(0, tokens, weighted.mul_(shares[tokens, places, None]))
        out.copy_(total)

    def _routes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their shares, both `[num_tokens, top_k]`."""
        logits = x.new_empty(x.shape[0], len(self._experts))
        self._router(x, logits)
        # Not topk, which leaves open which of equal ones it takes: the first, as in the native kernels.
        ranked, experts = torch.sort(torch.softmax(logits.float(), -1), dim=-1, descending=True, stable=True)
        shares, chosen = ranked[:, : self._top_k], experts[:, : self._top_k]
        if self._normalise:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares, chosen


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

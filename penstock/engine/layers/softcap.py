"""Soft caps of scores and logits (Gemma Team 2024, arXiv 2408.00118)."""

from torch import Tensor


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Turn `x` (float32) into `cap * tanh(x / cap)` in place, whatever its shape."""
    # As 1 - 2 / (exp(2x) + 1): torch's own tanh rounds a vector's tail otherwise, so its bits depend on the
    # batch.
    return x.mul_(2.0 / cap).exp_().add_(1.0).reciprocal_().mul_(-2.0).add_(1.0).mul_(cap)

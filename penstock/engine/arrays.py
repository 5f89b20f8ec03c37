"""Typed crossings between numpy, torch and Python lists, whose types torch's own stubs leave open; and the
rows of a step's tokens.
"""

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """The same memory as a CPU tensor."""
    return torch.as_tensor(array)


def int_list(values: Tensor) -> list[int]:
    """The elements of a one-dimensional integer tensor."""
    return cast("list[int]", cast(Any, values).tolist())


def float_list(values: Tensor) -> list[float]:
    """The elements of a one-dimensional float tensor."""
    return cast("list[float]", cast(Any, values).tolist())


def token_rows(num_tokens: Int32Array) -> tuple[Int64Array, Int64Array]:
    """For every token of the step: its row, and its index within the row's chunk."""
    rows = np.repeat(np.arange(len(num_tokens)), num_tokens)
    starts = np.cumsum(num_tokens, dtype=np.int64) - num_tokens
    return rows, np.arange(len(rows)) - starts[rows]

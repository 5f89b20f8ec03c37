"""Typed crossings between numpy, torch and Python lists; torch's own stubs leave their types open."""

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

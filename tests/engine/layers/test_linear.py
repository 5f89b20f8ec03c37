from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from penstock.engine.layers.linear import (
    CANDIDATE_ROWS,
    Calls,
    RowTiles,
    agreeing_rows,
    cancelling,
    torch_linear,
)
from penstock.engine.layers.mlp import SiluMul
from penstock.engine.layers.rowwise import RMSNorm

ROWS = (1, 2, 3, 5, 13, 16, 17, 31, 33, 64, 100, 200)
DTYPES = [torch.float32, torch.bfloat16]


SHAPES = [(48, 96), (48, 211), (40, 7), (40, 5), (33, 1), (64, 8), (512, 2), (384, 512), (1024, 384)]
"""(in, out). Narrow ones are a router's; a BLAS has kernels of its own for them."""


CASES = [(1, dtype, shape) for dtype in DTYPES for shape in SHAPES]
CASES += [(2, torch.float32, shape) for shape in ((40, 7), (48, 211), (384, 512))]
"""(threads, dtype, shape). Threads may share the rows of a call."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cancelling_pairs(rows: int, size: int, out_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and a weight whose product leaves rounding noise only: the order of summation shows in every
    output.
    """
    half, weight = torch.randn(rows, size // 2), torch.randn(out_size, size // 2)
    odd = torch.zeros(max(rows, out_size), size % 2)
    x = torch.cat((half, half, odd[:rows]), dim=1).to(dtype)
    return x, torch.cat((weight, -weight, odd[:out_size]), dim=1).to(dtype)


@pytest.mark.parametrize(("num_threads", "dtype", "shape"), CASES)
def test_a_row_does_not_depend_on_how_many_there_are(
    num_threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    with threads(num_threads):
        check_company(*shape, dtype)


def check_company(size: int, out_size: int, dtype: torch.dtype) -> None:
    x, weight = cancelling_pairs(200, size, out_size, dtype)
    linear = torch_linear(weight, None, rows_max=200)
    whole = torch.empty(200, out_size, dtype=dtype)
    linear(x, whole)
    for rows in ROWS:
        for start in (0, 200 - rows):
            out = torch.empty(rows, out_size, dtype=dtype)
            linear(x[start : start + rows], out)
            assert torch.equal(out, whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize(("num_threads", "dtype", "shape"), CASES)
def test_a_row_does_not_depend_on_its_place(
    num_threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    with threads(num_threads):
        check_places(*shape, dtype)


def check_places(size: int, out_size: int, dtype: torch.dtype) -> None:
    """The same row in all places, and from layers that were made for other numbers of rows."""
    x, weight = cancelling_pairs(1, size, out_size, dtype)
    expected = torch.empty(1, out_size, dtype=dtype)
    torch_linear(weight.clone(), None, rows_max=1)(x, expected)
    for rows_max in (3, 48, 200):
        linear = torch_linear(weight.clone(), None, rows_max=rows_max)
        out = torch.empty(rows_max, out_size, dtype=dtype)
        linear(x.repeat(rows_max, 1), out)
        assert torch.equal(out, expected.expand_as(out)), rows_max


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "out_size"), SHAPES)
def test_a_row_does_not_depend_on_where_it_lies_in_memory(
    size: int, out_size: int, dtype: torch.dtype
) -> None:
    x, weight = cancelling_pairs(17, size, out_size, dtype)
    linear, expected = torch_linear(weight, None, rows_max=17), torch.empty(17, out_size, dtype=dtype)
    linear(x, expected)
    for offset in (1, 3, 8):
        moved = torch.empty(offset + x.numel(), dtype=dtype)[offset:].view_as(x).copy_(x)
        out = torch.empty(offset + expected.numel(), dtype=dtype)[offset:].view_as(expected)
        linear(moved, out)
        assert torch.equal(out, expected), offset


def test_what_a_library_computes_by_place_is_called_with_single_rows() -> None:
    """Libraries that were seen, and one that is worse: which calls they leave."""
    samples, weight = cancelling(64, 16, torch.float32)

    def noisy(x: Tensor, bad: Callable[[int, int], bool]) -> Tensor:
        out = x @ weight.t()
        wrong = [bad(place, len(x)) for place in range(len(x))]
        return torch.where(torch.tensor(wrong)[:, None], torch.ones(()), torch.zeros_like(out))

    def asked(bad: Callable[[int, int], bool]) -> tuple[int, tuple[int, ...]]:
        return agreeing_rows(lambda x: noisy(x, bad), samples, rows_max=64)

    everything = tuple(rows for rows in CANDIDATE_ROWS if rows <= 64)
    assert asked(lambda place, rows: False) == (16, everything)
    assert asked(lambda place, rows: place % 4 == 3) == (2, (1, 2, 3)), "kernels of four rows"
    assert asked(lambda place, rows: place == 1) == (1, (1,)), "nothing but single rows agrees"
    assert asked(lambda place, rows: rows < 4) == (16, everything[3:]), "few rows have a kernel of their own"
    assert asked(lambda place, rows: place >= rows // 8 * 8)[1] == tuple(
        rows for rows in everything if rows % 8 == 0
    ), "the rest of a tile"


def test_the_product_is_right_with_bias_and_padding() -> None:
    weight, bias = torch.randn(7, 40), torch.randn(7)
    for rows in ROWS:
        x, out = torch.randn(rows, 40), torch.empty(rows, 7)
        torch_linear(weight.clone(), bias, rows_max=200)(x, out)
        torch.testing.assert_close(out, x @ weight.t() + bias)


def test_rows_may_be_multiplied_in_a_wider_type() -> None:
    """One rounding of float32's product, whatever the company, and the weight is widened once."""
    weight, x = torch.randn(48, 96).bfloat16(), torch.randn(200, 96).bfloat16()
    linear = torch_linear(weight, None, rows_max=200, calls=Calls(torch.float32))
    assert linear.tensors[0].dtype is torch.float32
    whole, exact = torch.empty(200, 48, dtype=torch.bfloat16), x.double() @ weight.double().t()
    linear(x, whole)
    torch.testing.assert_close(whole, exact.bfloat16(), rtol=2**-7, atol=1e-5)
    for rows in ROWS:
        out = torch.empty(rows, 48, dtype=torch.bfloat16)
        linear(x[200 - rows :], out)
        assert torch.equal(out, whole[200 - rows :]), rows


@pytest.mark.parametrize("sizes", [(1,), (16,), (2, 16, 512), (1, 2, 3, 4, 16, 32, 64)])
def test_pieces_cover_every_row_once(sizes: tuple[int, ...]) -> None:
    tiles = RowTiles(sizes)
    for num_rows in range(1, 600):
        pieces = tiles.cut(num_rows)
        covered = [row for start, rows, _ in pieces for row in range(start, start + rows)]
        assert covered == list(range(num_rows))
        assert all(size in sizes and rows <= size for _, rows, size in pieces)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 100, 384])
def test_norm_and_activation_look_at_one_row_only(size: int, dtype: torch.dtype) -> None:
    norm, activation = RMSNorm(torch.rand(size).to(dtype), 1e-6), SiluMul(size // 2, 200, torch.device("cpu"))
    x = torch.randn(200, size).to(dtype)
    whole, gated = torch.empty_like(x), torch.empty(200, size // 2, dtype=dtype)
    norm(x, whole)
    activation(x, gated)
    for rows in ROWS:
        for start in (0, 200 - rows):
            piece = x[start : start + rows].clone()
            out, out_gated = torch.empty_like(piece), torch.empty(rows, size // 2, dtype=dtype)
            norm(piece, out)
            activation(piece, out_gated)
            assert torch.equal(out, whole[start : start + rows])
            assert torch.equal(out_gated, gated[start : start + rows])


def test_norm_and_activation_are_right() -> None:
    x, weight = torch.randn(5, 48), torch.rand(48)
    out, gated = torch.empty_like(x), torch.empty(5, 24)
    RMSNorm(weight, 1e-6)(x, out)
    SiluMul(24, 8, torch.device("cpu"))(x, gated)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (48,), weight, 1e-6))
    torch.testing.assert_close(gated, torch.nn.functional.silu(x[:, :24]) * x[:, 24:])
    residual = torch.ones_like(x)
    RMSNorm(weight, 1e-6).add(residual, x, out)
    torch.testing.assert_close(residual, x + 1)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + 1, (48,), weight, 1e-6))


def test_activation_survives_extremes() -> None:
    gate_up = torch.tensor([[-1e30, 1e30, -200.0, 2.0, 2.0, 2.0]])
    out = torch.empty(1, 3)
    SiluMul(3, 4, torch.device("cpu"))(gate_up, out)
    torch.testing.assert_close(out, torch.tensor([[0.0, 2e30, 0.0]]))

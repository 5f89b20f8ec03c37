import pytest
import torch

from penstock.engine.layers.activation import SiluMul
from penstock.engine.layers.linear import torch_linear
from penstock.engine.layers.norm import RMSNorm
from penstock.engine.layers.row_tiles import ANCHOR_ROWS, RowTiles

ROWS = (1, 2, 3, 5, 13, 16, 17, 31, 33, 64, 100, 200)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "out_size"), [(48, 96), (48, 211), (40, 7), (384, 512), (1024, 384)])
def test_a_row_does_not_depend_on_how_many_there_are(size: int, out_size: int, dtype: torch.dtype) -> None:
    # Pairs that cancel leave rounding noise only: the order of summation shows in every output.
    half = torch.randn(200, size // 2)
    weight = torch.randn(out_size, size // 2)
    x = torch.cat((half, half), dim=1).to(dtype)
    linear = torch_linear(torch.cat((weight, -weight), dim=1).to(dtype), None, rows_max=200)
    whole = torch.empty(200, out_size, dtype=dtype)
    linear(x, whole)
    for rows in ROWS:
        for start in (0, 200 - rows):
            out = torch.empty(rows, out_size, dtype=dtype)
            linear(x[start : start + rows], out)
            assert torch.equal(out, whole[start : start + rows]), (rows, start)


def test_the_product_is_right_with_bias_and_padding() -> None:
    weight, bias = torch.randn(7, 40), torch.randn(7)
    for rows in ROWS:
        x, out = torch.randn(rows, 40), torch.empty(rows, 7)
        torch_linear(weight.clone(), bias, rows_max=200)(x, out)
        torch.testing.assert_close(out, x @ weight.t() + bias)


@pytest.mark.parametrize("sizes", [(16,), (2, 16, 512), (1, 2, 3, 4, 16, 32, 64)])
def test_pieces_cover_every_row_once(sizes: tuple[int, ...]) -> None:
    assert ANCHOR_ROWS in sizes
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

"""Quantized weights on a device: kernels against their twins in Triton's interpreter, and whole models."""

from pathlib import Path

import pytest
import torch
from device_driver import device_runner
from device_steps import CPU
from engine_driver import distributions_of
from quantized_checkpoints import FORMATS, quantize
from tiny_models import save, tiny_model
from torch import Tensor

from penstock.engine.gpu.packed import (
    DENSE_FROM,
    FEW_ROWS,
    Float8Linear,
    PackedLinear,
    PackedWeight,
    QuantizedLinears,
    TorchMatrixOps,
    packed,
    rounded,
)
from penstock.engine.gpu.triton_ops import Tiles, TritonMatrixOps, tiles_for
from penstock.engine.quantized import Float8Matrix, QuantizedMatrix

TWIN = TorchMatrixOps()
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
FLOAT8 = torch.float8_e4m3fn


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def four_bits(n: int, k: int, group: int, shift: str) -> QuantizedMatrix:
    rng = torch.Generator().manual_seed(n + k)
    values = torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8)
    scale = (torch.rand(n, k // group, generator=rng) * 0.1 + 0.01).half().float()
    offset = None
    if shift == "zeros":
        offset = torch.randint(-8, 8, scale.shape, generator=rng).float() * scale
    elif shift == "minima":
        offset = random(*scale.shape, seed=9) * 0.05
    return QuantizedMatrix(values=values, scale=scale, offset=offset)


def eight_bits(n: int, k: int) -> QuantizedMatrix:
    found = rounded(random(n, k), 8)
    assert found is not None
    return found


def made(matrix: QuantizedMatrix | Float8Matrix) -> PackedWeight:
    if isinstance(matrix, Float8Matrix):
        layer = QuantizedLinears(TWIN, torch.empty(0)).linear(matrix, None, rows_max=4)
        assert isinstance(layer, Float8Linear)
        return layer.few
    found = packed(matrix, CPU)
    assert found is not None
    return found


MATRICES = {
    "groups of 32": four_bits(48, 192, 32, ""),
    "groups of 64 with zeros": four_bits(40, 128, 64, "zeros"),
    "groups of 128 with minima": four_bits(16, 256, 128, "minima"),
    "groups of 32 with minima": four_bits(24, 128, 32, "minima"),
    "eight bits": eight_bits(40, 192),
}


FLOAT8S = {
    "fp8": Float8Matrix(values=random(48, 192, seed=8).to(FLOAT8), scale=random(48, 1, seed=4).abs()),
    "fp8 in blocks": Float8Matrix(values=random(208, 384).to(FLOAT8), scale=random(2, 3, seed=4).abs()),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_packed_weight_is_the_same_numbers(name: str) -> None:
    matrix = MATRICES[name]
    weight = made(matrix)
    assert weight.shape == matrix.shape
    torch.testing.assert_close(weight.dense(), matrix.dense(torch.float32), rtol=1e-6, atol=1e-7)
    if name.startswith("groups"):
        assert weight.scales.dtype == torch.float16  # As the checkpoints have them.
        zeros = None if weight.zeros is None else weight.zeros.dtype
        assert zeros == {"zeros": torch.int8, "minima": torch.float32}.get(name.split()[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [*MATRICES, *FLOAT8S])
@pytest.mark.parametrize("splits", [1, 2])
def test_products(name: str, dtype: torch.dtype, splits: int) -> None:
    weight, ops = made((MATRICES | FLOAT8S)[name]), TritonMatrixOps(CPU)
    n, k = weight.shape
    ops.tiles = Tiles(16, 16, 4, 2, splits)
    for rows, bias in ((1, None), (19, random(n, seed=5).to(dtype))):
        x = random(rows, k, seed=3).to(dtype)
        ours, theirs = x.new_full((2, rows, n), torch.nan)
        ops.multiply(x, weight, bias, ours)
        TWIN.multiply(x, weight, bias, theirs)
        half = dtype == torch.float16
        torch.testing.assert_close(ours, theirs, rtol=2e-3 if half else 1e-5, atol=1e-2 if half else 1e-4)
    dense = torch.full((n, k), torch.nan)
    ops.unpack(weight, dense)
    torch.testing.assert_close(dense, weight.dense(), rtol=1e-6, atol=1e-7)


def on_the_grid(rows: int, k: int) -> Tensor:
    """Numbers that FP8 holds under a scale of their row: Triton's interpreter rounds others wrongly, where a
    carry reaches the exponent.
    """
    values = random(rows, k, seed=1).to(FLOAT8).float()
    values.view(rows, -1, 128)[:, :, 0] = 448.0
    return values * torch.tensor([0.25, 1.0, 2.0]).repeat(rows)[:rows, None]


@pytest.mark.parametrize("in_blocks", [False, True])
def test_rounding_inputs(in_blocks: bool) -> None:
    x, ops = on_the_grid(5, 256), TritonMatrixOps(CPU)
    size = (2, 5) if in_blocks else (5,)
    results = []
    for each in (ops, TWIN):
        out, scales = torch.zeros(5, 256, dtype=FLOAT8), torch.full(size, torch.nan)
        each.round_rows(x, out, scales)
        results.append((out.float(), scales))
        columns = scales.t() if in_blocks else scales[:, None]
        back = out.float().view(5, columns.shape[1], -1) * columns[:, :, None]
        torch.testing.assert_close(back.view(5, 256), x)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("words", [torch.int16, torch.int8, FLOAT8])
def test_tiles_fill_the_device(words: torch.dtype) -> None:
    for rows in (1, 16, 17, 33, 65, DENSE_FROM):
        for outputs, inputs in ((4096, 32), (1024, 8), (28_672, 32), (64, 1)):
            tiles = tiles_for(rows, outputs, inputs, 132, words)
            assert tiles.splits in (1, 2, 4, 8)
            assert tiles.rows >= min(rows, 64)
            if rows <= 16 and inputs == 32:
                assert -(-outputs // tiles.outputs) * tiles.splits >= 3 * 132


@pytest.mark.parametrize("rows", [3, DENSE_FROM + 1])
def test_a_layer_of_integers(rows: int) -> None:
    """In the order that act-order left, by the product and made dense."""
    matrix = four_bits(32, 64, 32, "zeros")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    ordered = QuantizedMatrix(values=matrix.values, scale=matrix.scale, offset=matrix.offset, order=order)
    linears, bias = QuantizedLinears(TWIN, torch.empty(0)), random(32, seed=4)
    layer = linears.linear(ordered, bias, rows_max=rows)
    assert isinstance(layer, PackedLinear)
    x, out = random(rows, 64, seed=2), torch.full((rows, 32), torch.nan)
    layer(x, out)
    torch.testing.assert_close(out, x @ ordered.dense(torch.float32).t() + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_layer_of_float8(in_blocks: bool) -> None:
    weight = random(256, 384, seed=6)
    blocks = weight.view(2, 128, 3, 128) if in_blocks else weight.view(256, 1, 1, 384)
    scale = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).view(256, 384).to(FLOAT8)
    matrix = Float8Matrix(values=values, scale=scale)
    assert matrix.in_blocks == in_blocks
    layer = QuantizedLinears(TWIN, torch.empty(0)).linear(matrix, None, rows_max=30)
    assert isinstance(layer, Float8Linear)
    for rows in (FEW_ROWS, FEW_ROWS + 1, 30):
        x, out = random(rows, 384, seed=7), torch.full((rows, 256), torch.nan)
        layer(x, out)
        right = x @ matrix.dense(torch.float32).t()
        error = float((out - right).norm() / right.norm())
        # Of more rows the inputs have four significant bits.
        assert (1e-3 < error < 4e-2) if rows > FEW_ROWS else error < 1e-5


def test_what_the_kernels_cannot_is_made_dense() -> None:
    linears = QuantizedLinears(TWIN, torch.empty(0))
    odd = Float8Matrix(values=random(24, 32).to(FLOAT8), scale=torch.ones(24, 1))
    assert linears.linear(odd, None, rows_max=4) is None  # 24 outputs.
    assert linears.dense(odd).dtype == torch.float32
    narrow = QuantizedMatrix(values=torch.zeros(16, 24, dtype=torch.int8), scale=torch.ones(16, 1))
    assert linears.linear(narrow, None, rows_max=4) is None


@pytest.mark.parametrize(
    ("name", "family", "limit"),
    [
        ("gptq", "qwen3", 1e-4),
        ("gptq-act-order", "llama", 1e-4),
        ("awq", "gemma2", 1e-4),
        ("packed-int4-zeros", "qwen2", 1e-4),
        ("w8a8", "mistral", 1e-4),
        ("fp8-channel", "qwen3", 0.6),
        ("fp8-block", "mistral", 1e-4),
        ("packed-int4", "mixtral", 1e-4),
    ],
)
def test_a_published_checkpoint_answers_as_its_dense_twin(
    name: str, family: str, limit: float, tmp_path: Path
) -> None:
    """FP8 rounds inputs too. The tiny models' blocks are smaller than those of real ones: made dense."""
    sizes = SIZES | ({"num_local_experts": 2} if family == "mixtral" else {})
    dense = save(tiny_model(family, **sizes), tmp_path / "dense")
    quantize(dense, tmp_path / "quantized", tmp_path / "twin", FORMATS[name])
    bounds = {"max_model_len": 256, "step_tokens": 256}
    ours, right = (device_runner(tmp_path / each, **bounds) for each in ("quantized", "twin"))
    found, expected = distributions_of(ours), distributions_of(right)
    assert float((found - expected).abs().max()) <= limit
    types = {tensor.dtype for tensor in ours.weight_tensors()}
    if limit > 1e-3:
        assert FLOAT8 in types
        assert float((found - expected).abs().max()) > 1e-4
    elif name != "fp8-block":
        assert types & {torch.int16, torch.int8}
    assert ours.info.quantization != "none"

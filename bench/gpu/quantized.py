"""Products with quantized weights: each kernel against its twin. Their time is a model's: `models`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.common import Bench, Report, checked, float8_of
from bench.gpu.kernels import attended, compare, random, twins
from penstock.engine.gpu.packed import MatrixOps, PackedWeight, TorchMatrixOps, few_rows, packed, rounded
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.quantized import Float8Matrix, QuantizedMatrix

FLOAT8 = torch.float8_e4m3fn


@torch.inference_mode()
def run(bench: Bench, report: Report) -> None:
    ops = bench.ops().matrices
    wrong = checked(report, {name: partial(check, bench, ops) for name, check in CHECKS.items()})
    report.fail_if(wrong)


def integers(
    bench: Bench, n: int, k: int, bits: int, *, group: int = 128, zeros: bool = True
) -> QuantizedMatrix:
    """Random ones, as a checkpoint would have them."""
    if bits == 8:
        found = rounded(random(bench, n, k, seed=n), 8)
        assert found is not None
        return found
    generator = torch.Generator(bench.device).manual_seed(n)
    values = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8, device=bench.device)
    spread = torch.rand(n, k // group, generator=generator, device=bench.device)
    scale = ((spread + 0.5) * 0.2 * k**-0.5).half().float()
    shift = torch.randint(-4, 5, scale.shape, generator=generator, device=bench.device)
    return QuantizedMatrix(values=values, scale=scale, offset=shift.float() * scale if zeros else None)


def packed_integers(bench: Bench, bits: int, **how: Any) -> PackedWeight:  # noqa: ANN401
    found = packed(integers(bench, *((48, 256) if bench.tiny else (2304, 4096)), bits, **how), bench.device)
    assert found is not None
    return found


def float8(bench: Bench, *, in_blocks: bool) -> Float8Matrix:
    n, k = (128, 256) if bench.tiny else (2304, 4096)
    return float8_of(random(bench, n, k, seed=n).float() * k**-0.5, in_blocks=in_blocks)


def multiplied(bench: Bench, ops: MatrixOps, weight: PackedWeight, rows: int) -> dict[str, Any]:
    """Without a bias and with one."""
    n, k = weight.shape
    x, bias = random(bench, rows, k, seed=7), random(bench, n, seed=8)

    def work(each: MatrixOps) -> Tensor:
        out = torch.full((2, rows, n), torch.nan, dtype=bench.dtype, device=bench.device)
        each.multiply(x, weight, None, out[0])
        each.multiply(x, weight, bias, out[1])
        return out

    return twins(work, ops, TorchMatrixOps())


def check_product(
    bench: Bench, ops: MatrixOps, rows: int, bits: int = 4, *, group: int = 128, zeros: bool = False
) -> dict[str, Any]:
    return multiplied(bench, ops, packed_integers(bench, bits, group=group, zeros=zeros), rows)


def check_few(bench: Bench, ops: MatrixOps, *, in_blocks: bool) -> dict[str, Any]:
    return multiplied(bench, ops, few_rows(float8(bench, in_blocks=in_blocks)), 3)


def check_unpack(bench: Bench, ops: MatrixOps, bits: int) -> dict[str, Any]:
    weight = packed_integers(bench, bits)

    def work(each: MatrixOps) -> Tensor:
        out = torch.full(weight.shape, torch.nan, dtype=bench.dtype, device=bench.device)
        each.unpack(weight, out)
        return out

    return twins(work, ops, TorchMatrixOps())


def rounded_rows(bench: Bench, ops: MatrixOps, x: Tensor, *, in_blocks: bool) -> tuple[Tensor, Tensor]:
    rows, k = x.shape
    out = torch.empty(rows, k, dtype=FLOAT8, device=bench.device)
    size = (k // 128, rows) if in_blocks else (rows,)
    scales = torch.full(size, torch.nan, device=bench.device)
    ops.round_rows(x, out, scales)
    return out, scales


def check_rounding(bench: Bench, ops: MatrixOps, *, in_blocks: bool) -> dict[str, Any]:
    x = random(bench, 33, 256 if bench.tiny else 4096, seed=5)
    ours, twin = (rounded_rows(bench, each, x, in_blocks=in_blocks) for each in (ops, TorchMatrixOps()))
    same = float((ours[0].float() == twin[0].float()).float().mean())
    found = compare(ours[1], twin[1])
    # A quotient on the edge of two numbers may go to either.
    return {**found, "ok": found["ok"] and same > 0.999, "same_values": same}


def check_float8(bench: Bench, ops: MatrixOps, *, in_blocks: bool, rows: int) -> dict[str, Any]:
    weight = float8(bench, in_blocks=in_blocks)
    n, k = weight.shape
    x = random(bench, rows, k, seed=6)
    given, found = rounded_rows(bench, TorchMatrixOps(), x, in_blocks=in_blocks), []
    for each in (ops, TorchMatrixOps()):
        out = torch.full((rows, n), torch.nan, dtype=bench.dtype, device=bench.device)
        each.multiply_float8(given, weight, None, out)
        found.append(out)
    right = x.float() @ weight.dense(torch.float32).t()
    return {**compare(*found), "to_exact_inputs": compare(found[0], right)["relative_error"]}


CHECKS: dict[str, Callable[[Bench, MatrixOps], dict[str, Any]]] = {
    "attention over FP8": lambda bench, _: twins(
        partial(attended, bench, float8=True), bench.ops(), TorchOps()
    ),
    "int4, 1 row, zeros": partial(check_product, rows=1, zeros=True),
    "int4, 1 row, groups of 32": partial(check_product, rows=1, group=32),
    "int4, 9 rows, groups of 64, zeros": partial(check_product, rows=9, group=64, zeros=True),
    "int4, 40 rows, zeros": partial(check_product, rows=40, zeros=True),
    "int4, 200 rows": partial(check_product, rows=200),
    "int8, 3 rows": partial(check_product, rows=3, bits=8),
    "int4 made dense": partial(check_unpack, bits=4),
    "int8 made dense": partial(check_unpack, bits=8),
    "rounding rows": partial(check_rounding, in_blocks=False),
    "rounding blocks": partial(check_rounding, in_blocks=True),
    "fp8, 3 rows as they are": partial(check_few, in_blocks=False),
    "fp8 in blocks, 3 rows as they are": partial(check_few, in_blocks=True),
    "fp8, 1 row": partial(check_float8, in_blocks=False, rows=1),
    "fp8, 77 rows": partial(check_float8, in_blocks=False, rows=77),
    "fp8 in blocks, 20 rows": partial(check_float8, in_blocks=True, rows=20),
    "fp8 in blocks, 76 rows": partial(check_float8, in_blocks=True, rows=76),
}

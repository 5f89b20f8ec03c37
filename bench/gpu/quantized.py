"""Products with quantized weights: each kernel against its twin, then its time by rows, beside the dense
product and the weight made dense first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.ceilings import copy_rate, gemm_rate, void
from bench.gpu.common import Bench, Report, checked, shape
from bench.gpu.kernels import attend, attended, compare, random, twins
from bench.gpu.steps import Rows
from penstock.engine.gpu.packed import (
    MatrixOps,
    PackedWeight,
    TorchMatrixOps,
    few_rows,
    packed,
    rounded,
)
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.quantized import Float8Matrix, QuantizedMatrix

FLOAT8 = torch.float8_e4m3fn


@torch.inference_mode()
def run(bench: Bench, report: Report) -> None:
    ops = bench.ops().matrices
    wrong = checked(report, {name: partial(check, bench, ops) for name, check in CHECKS.items()})
    rates = {"copy": copy_rate(bench), "gemm": gemm_rate(bench)}
    report.put("measured_here", rates)
    spec = shape("llama-3-8b", tiny=bench.tiny)
    hidden, inner = (128, 128) if bench.tiny else (spec.hidden_size, spec.intermediate_size)
    qkv = hidden + 2 * (hidden if bench.tiny else spec.kv_size)
    shapes = {
        "qkv": (qkv, hidden), "o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner),
    }  # fmt: skip
    report.put("attention", attention(bench))
    for name, size in shapes.items():
        report.put(name, by_form(bench, ops, size, rates))
    report.fail_if(wrong)


# --- weights ------------------------------------------------------------------------------------------


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


def packed_weight(bench: Bench, n: int, k: int, bits: int, **how: Any) -> PackedWeight:  # noqa: ANN401
    found = packed(integers(bench, n, k, bits, **how), bench.device)
    assert found is not None
    return found


def float8(bench: Bench, n: int, k: int, *, in_blocks: bool = False) -> Float8Matrix:
    dense = random(bench, n, k, seed=n).float() * k**-0.5
    block = 128 if in_blocks else 1
    parts = dense.view(n // block, block, k // 128, 128) if in_blocks else dense.view(n, 1, 1, k)
    scale = parts.abs().amax((1, 3)) / 448
    values = (parts / scale[:, None, :, None]).view(n, k).to(FLOAT8)
    return Float8Matrix(values=values, scale=scale)


# --- against the twins ----------------------------------------------------------------------------------


def size_of(bench: Bench) -> tuple[int, int]:
    return (48, 256) if bench.tiny else (2304, 4096)


def check_product(
    bench: Bench, ops: MatrixOps, rows: int, bits: int = 4, *, group: int = 128, zeros: bool = False
) -> dict[str, Any]:
    n, k = size_of(bench)
    weight = packed_weight(bench, n, k, bits, group=group, zeros=zeros)
    x, bias = random(bench, rows, k, seed=7), random(bench, n, seed=8)

    def work(each: MatrixOps) -> Tensor:
        out = torch.full((2, rows, n), torch.nan, dtype=bench.dtype, device=bench.device)
        each.multiply(x, weight, None, out[0])
        each.multiply(x, weight, bias, out[1])
        return out

    return twins(work, ops, TorchMatrixOps())


def check_unpack(bench: Bench, ops: MatrixOps, bits: int) -> dict[str, Any]:
    n, k = size_of(bench)
    weight = packed_weight(bench, n, k, bits)

    def work(each: MatrixOps) -> Tensor:
        out = torch.full((n, k), torch.nan, dtype=bench.dtype, device=bench.device)
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
    n, k = (128, 256) if bench.tiny else (2304, 4096)
    weight, x = float8(bench, n, k, in_blocks=in_blocks), random(bench, rows, k, seed=6)
    given, found = rounded_rows(bench, TorchMatrixOps(), x, in_blocks=in_blocks), []
    for each in (ops, TorchMatrixOps()):
        out = torch.full((rows, n), torch.nan, dtype=bench.dtype, device=bench.device)
        each.multiply_float8(given, weight, None, out)
        found.append(out)
    right = x.float() @ weight.dense(torch.float32).t()
    return {**compare(*found), "to_exact_inputs": compare(found[0], right)["relative_error"]}


def check_few(bench: Bench, ops: MatrixOps, *, in_blocks: bool) -> dict[str, Any]:
    n, k = (128, 256) if bench.tiny else (2304, 4096)
    weight, x = few_rows(float8(bench, n, k, in_blocks=in_blocks)), random(bench, 3, k, seed=6)

    def work(each: MatrixOps) -> Tensor:
        out = torch.full((3, n), torch.nan, dtype=bench.dtype, device=bench.device)
        each.multiply(x, weight, None, out)
        return out

    return twins(work, ops, TorchMatrixOps())


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


# --- time ---------------------------------------------------------------------------------------------


def turns(bench: Bench, make: Callable[[], Any], num_bytes: int) -> list[Any]:
    """Several weights, so that none stays in the device's cache."""
    return [make() for _ in range(2 if bench.tiny else max(2, min(24, (256 << 20) // num_bytes)))]


def seconds_of(bench: Bench, weights: list[Any], product: Callable[[Any], None]) -> float:
    def all_weights() -> None:
        for weight in weights:
            product(weight)

    return bench.seconds(all_weights, calls=2, repeats=5) / len(weights)


def attention(bench: Bench) -> dict[str, Any]:
    """Microseconds over a cache in the model's type and in FP8."""
    spec, found = shape("llama-3-8b", tiny=bench.tiny), dict[str, Any]()
    rows: dict[str, Rows] = {"tiny": [(40, 1)] * 3}
    if not bench.tiny:
        rows = {
            "1 of 1,024": [(1024, 1)], "8 of 1,024": [(1024, 1)] * 8, "64 of 1,024": [(1024, 1)] * 64,
            "8 of 32,768": [(32_768, 1)] * 8, "chunk of 2,048": [(0, 2048)],
        }  # fmt: skip
    for name, each in rows.items():
        found[name] = {"": round(attend(bench, bench.ops(), spec, each)[0] * 1e6, 2)}
        found[name]["fp8"] = round(attend(bench, bench.ops(), spec, each, float8=True)[0] * 1e6, 2)
    return found


def by_form(bench: Bench, ops: MatrixOps, size: tuple[int, int], rates: dict[str, float]) -> dict[str, Any]:
    """Microseconds of each form by rows, with the tile shapes that the engine chooses."""
    n, k = size
    found: dict[str, Any] = {}
    makers: dict[str, tuple[Callable[[], Any], int]] = {
        "bf16": (lambda: random(bench, n, k, seed=2), 2 * n * k),
        "int4": (lambda: packed_weight(bench, n, k, 4), n * k // 2),
        "int8": (lambda: packed_weight(bench, n, k, 8), n * k),
        "fp8": (lambda: float8(bench, n, k), n * k),
    }
    if n % 128 == 0 and k % 128 == 0:
        makers["fp8 in blocks"] = (lambda: float8(bench, n, k, in_blocks=True), n * k)
    for form, (make, num_bytes) in makers.items():
        try:
            found[form] = times_of(bench, ops, form, turns(bench, make, num_bytes), size)
        except Exception as error:  # noqa: BLE001 One form's failure is a finding.
            found[form] = f"{type(error).__name__}: {error}"[:500]
    return found


def times_of(
    bench: Bench, ops: MatrixOps, form: str, weights: list[Any], size: tuple[int, int]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for rows in (1, 3) if bench.tiny else (1, 8, 64, 128, 256, 2048):
        x = random(bench, rows, size[1], seed=1)
        out = torch.empty(rows, size[0], dtype=bench.dtype, device=bench.device)
        for suffix, product in products_of(bench, ops, form, x, out).items():
            if suffix == " made dense" and rows < 64 and not bench.tiny:
                continue
            found[f"{rows}{suffix}"] = round(seconds_of(bench, weights, product) * 1e6, 2)
    return found


def products_of(
    bench: Bench, ops: MatrixOps, form: str, x: Tensor, out: Tensor
) -> dict[str, Callable[[Any], None]]:
    """One product, in the ways that there are."""
    if form == "bf16":
        return {"": lambda weight: void(torch.mm(x, weight.t(), out=out))}
    if form.startswith("int"):
        dense = torch.empty(out.shape[1], x.shape[1], dtype=bench.dtype, device=bench.device)

        def made_dense(weight: PackedWeight) -> None:
            ops.unpack(weight, dense)
            torch.mm(x, dense.t(), out=out)

        return {"": lambda weight: ops.multiply(x, weight, None, out), " made dense": made_dense}
    products: dict[str, Callable[[Any], None]] = {}
    if x.shape[0] <= 64:
        kept: dict[int, PackedWeight] = {}

        def as_it_is(weight: Float8Matrix) -> None:
            ops.multiply(x, kept.setdefault(id(weight), few_rows(weight)), None, out)

        products[""] = as_it_is
    if not form.endswith("blocks") or x.shape[0] % 4 == 0:
        given = rounded_rows(bench, ops, x, in_blocks=form.endswith("blocks"))

        def rounded_too(weight: Float8Matrix) -> None:
            ops.round_rows(x, *given)
            ops.multiply_float8(given, weight, None, out)

        products[" inputs rounded"] = rounded_too
    return products

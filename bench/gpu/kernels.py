"""Every kernel against its twin, and how near attention comes to the device's ceilings as measured
here. How long products with quantized weights take is a model's: `models`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.common import Bench, Report, checked, float8_of, shape
from penstock.engine.gpu.flashinfer_ops import flashinfer_ops
from penstock.engine.gpu.ops import AttentionLayer, HeadRotation, Ops, Partials
from penstock.engine.gpu.packed import MatrixOps, PackedWeight, TorchMatrixOps, few_rows, packed, rounded
from penstock.engine.gpu.step import (
    DeviceStep,
    DeviceStepInputs,
    Drawn,
    Int32Array,
    RowState,
    StepBuffer,
    StepLimits,
)
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.gpu.worklist import WorkList, WorkListLimits
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import RotaryTable
from penstock.engine.quantized import Float8Matrix, QuantizedMatrix
from penstock.models.spec import DecoderSpec
from penstock.types import BLOCK_TOKENS

LIMIT = 1e-2
"""Relative error of a bf16 result: one rounding is 2**-9."""
Rows = list[tuple[int, int]]
"""(tokens in the cache, new tokens) of every row; all draw."""
MIXED: Rows = [(0, 200), (1024, 1), (77, 33), (511, 1), (300, 16), (15, 1), (2000, 5)]


@dataclass(frozen=True)
class Case:
    """One step and what its kernels work on."""

    spec: DecoderSpec
    step: DeviceStep
    cache: KVCache
    partials: Partials
    rotation: HeadRotation
    host: tuple[Int32Array, Int32Array, Int32Array]
    """Places in the tables, tokens in the cache and new tokens, of each row."""

    @property
    def slots(self) -> int:
        """Of a block."""
        return self.cache.pages_per_block * BLOCK_TOKENS

    def begin(self, ops: Ops) -> None:
        """The work before a step's layers, on the host and on the device."""
        ops.plan(*self.host, self.step.state)
        ops.prepare(self.step, self.slots)

    def heads(self, seed: int, *, all_heads: bool) -> Tensor:
        """Random queries, or queries, keys and values, of the step's tokens."""
        count = self.spec.num_heads + (2 * self.spec.num_kv_heads if all_heads else 0)
        device, tokens = self.cache.tensor.device, len(self.step.inputs.token_ids)
        generator = torch.Generator(device).manual_seed(seed)
        size = (tokens, count, self.spec.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=self.cache.dtype)


def case(bench: Bench, spec: DecoderSpec, rows: Rows, *, layers: int = 2) -> Case:
    """A filled step over a cache of `layers` layers, whose blocks lie anywhere; `prepare` has not run."""
    step_tokens = sum(new for _, new in rows)
    longest = max(computed + new for computed, new in rows)
    sizes = {"max_running": len(rows), "step_tokens": step_tokens}
    work_limits = WorkListLimits.of(**sizes, group_size=spec.group_size)
    limits = StepLimits(**sizes, max_model_len=longest + BLOCK_TOKENS, work=work_limits)
    computed, new = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    places = np.arange(len(rows) - 1, -1, -1, dtype=np.int32)
    device = bench.device
    state, buffer = RowState.allocate(limits, device), StepBuffer(limits, torch.device("cpu"))
    work = WorkList.of(places, computed, new, limits.work)
    buffer.fill(places, computed, new, np.arange(len(rows), dtype=np.int32), work)
    on_device = StepBuffer(limits, device)
    on_device.flat.copy_(buffer.flat)
    inputs = DeviceStepInputs.allocate(limits, device).head(step_tokens, len(rows))
    held = -(-(computed + new) // BLOCK_TOKENS)
    small = replace(spec, num_layers=layers)
    cache = KVCache(small, int(held.sum()) + 3, bench.dtype, device)
    fill(cache, state, places, computed, held)
    state.token_ids.random_(0, spec.vocab_size)
    heads = (limits.work.partials_max, spec.num_heads)
    partials = Partials(torch.zeros(*heads, spec.head_dim, device=device), torch.zeros(*heads, device=device))
    norm = torch.linspace(0.5, 1.5, spec.head_dim, device=device).to(bench.dtype)
    table = RotaryTable(spec.rope, spec.head_dim, limits.max_model_len, device)
    rotation = HeadRotation(table, (norm, norm.flip(0)) if spec.qk_norm else None, spec.norm_eps)
    decode_only = bool((new == 1).all())
    step = DeviceStep(on_device, state, inputs, decode_only)
    return Case(small, step, cache, partials, rotation, (places, computed, new))


def fill(cache: KVCache, state: RowState, places: np.ndarray, computed: np.ndarray, held: np.ndarray) -> None:
    """Random keys and values where rows have them, NaN everywhere else: nothing may read that."""
    cache.tensor[:-1].fill_(torch.nan)
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(3))
    first = 0
    for place, known, count in zip(places.tolist(), computed.tolist(), held.tolist(), strict=True):
        blocks = order[first : first + count].to(cache.tensor.device)
        first += count
        state.block_tables[place, :count] = blocks.int()
        whole, rest = divmod(known, BLOCK_TOKENS)
        cache.tensor[blocks[:whole]] = torch.randn_like(cache.tensor[blocks[:whole]])
        if rest:
            part = cache.tensor[blocks[whole], :, :, :rest]
            cache.tensor[blocks[whole], :, :, :rest] = torch.randn_like(part)


@torch.inference_mode()
def run(bench: Bench, report: Report) -> None:
    ops = bench.ops()
    report.put("ops", ops.name)
    wrong = beside_twins(bench, report, CHECKS, ops, TorchOps())
    report.put("measured_here", rates := bench.rates())
    figures: dict[str, Any] = {}
    for name, measure in figures_of(bench, ops).items():
        seconds, moved, flops = measure()
        figures[name] = {
            "us": round(seconds * 1e6, 2),
            "gb_per_s": round(moved / seconds / 1e9, 1),
            "of_copy": round(moved / seconds / rates["copy"], 4),
            "tflops": round(flops / seconds / 1e12, 2),
            "of_gemm": round(flops / seconds / rates["gemm"], 4),
        }
        report.put("figures", figures)
    report.put("flashinfer", flashinfer(bench, ops))
    report.fail_if(wrong)


@torch.inference_mode()
def run_quantized(bench: Bench, report: Report) -> None:
    report.fail_if(beside_twins(bench, report, QUANTIZED, bench.ops().matrices, TorchMatrixOps()))


Work = Callable[..., Tensor]
"""What some operations compute, of a bench and them."""


def beside_twins(
    bench: Bench, report: Report, works: dict[str, Work], ops: object, twin: object
) -> list[str]:
    """The same work by both; those that differ."""
    checks = {
        name: partial(twins, partial(work, bench), ops, twin, exact=name in EXACT)
        for name, work in works.items()
    }
    return checked(report, checks)


def twins(work: Work, ops: object, twin: object, *, exact: bool = False) -> dict[str, Any]:
    ours, theirs = work(ops), work(twin)
    if exact:
        return {"ok": torch.equal(ours, theirs), "values_that_differ": int((ours != theirs).sum())}
    ours, theirs = ours.double(), theirs.double()
    error = float((ours - theirs).norm() / theirs.norm())
    return {"ok": error <= LIMIT, "relative_error": error}  # NaN is not below anything.


def spec_of(bench: Bench) -> DecoderSpec:
    spec = shape("qwen3-14b", tiny=bench.tiny)
    return spec if bench.tiny else replace(spec, num_heads=32, vocab_size=151_936)


def rows_of(bench: Bench) -> Rows:
    return [(0, 9), (33, 1), (17, 3)] if bench.tiny else MIXED


def prepared_step(bench: Bench, ops: Ops) -> Tensor:
    one = case(bench, spec_of(bench), rows_of(bench))
    known = one.step.state.token_ids
    known.copy_(torch.arange(known.numel()).view_as(known) % 97)
    ops.prepare(one.step, one.slots)
    at = one.step.inputs
    made = (at.token_ids, at.positions, at.slots, at.sample_tokens, at.sample_positions)
    return torch.cat([each.flatten().long() for each in made])


def normed(bench: Bench, ops: Ops) -> Tensor:
    x, residual, weight = (random(bench, n, 1024, seed=n) for n in (33, 34, 1))
    residual, out = residual[:33].clone(), torch.full_like(x, torch.nan)
    ops.add_norm(residual, x, weight[0], 1e-6, out)
    ops.norm(out, weight[0], 1e-6, out)
    return torch.cat((out, residual))


def gated(bench: Bench, ops: Ops) -> Tensor:
    x = random(bench, 33, 2 * 768, seed=5)
    out = torch.full((2, 33, 768), torch.nan, dtype=bench.dtype, device=bench.device)
    ops.silu_mul(x, out[0])
    ops.gelu_tanh_mul(x, out[1])
    return out


def rotated_and_stored(bench: Bench, ops: Ops) -> Tensor:
    one = prepared(bench, ops, rows_of(bench))
    qkv, q = one.heads(3, all_heads=True), torch.full_like(one.heads(4, all_heads=False), torch.nan)
    ops.rotate_store(qkv, q, one.cache, 1, one.step, one.rotation)
    kv, place = one.cache.slots.view(-1, one.spec.kv_size), one.step.inputs.slots + 2 * 16
    return torch.cat((q.flatten(), kv[place].flatten(), kv[place + 16].flatten()))


def attended(
    bench: Bench, ops: Ops, *, rows: Rows | None = None, window: int = 0, softcap: float = 0.0,
    float8: bool = False,
) -> Tensor:  # fmt: skip
    torch.manual_seed(1)
    one = prepared(bench, ops, rows or rows_of(bench))
    qkv, q = one.heads(3, all_heads=True), one.heads(4, all_heads=False)
    one = in_float8(one, bench.dtype) if float8 else one
    (ops if float8 else TorchOps()).rotate_store(qkv, q, one.cache, 1, one.step, one.rotation)
    out = torch.full_like(q, torch.nan)
    how = AttentionLayer(1, one.spec.head_dim**-0.5, softcap, window)
    ops.attend(q, out, one.cache, one.step, how, one.partials)
    return out


def sampled(bench: Bench, ops: Ops) -> Tensor:
    one = prepared(bench, ops, [(5 + row, 1) for row in range(24)])
    state, index = one.step.state, torch.arange(25, device=bench.device)
    state.temperature.copy_((index % 4).float() * 0.5)
    state.top_k.copy_((index % 3) * 20)
    state.top_p.copy_(1.0 - (index % 2) * 0.2)
    state.min_p.copy_((index % 5 == 4) * 0.05)
    state.seed.copy_(index.long() * 7 - 40)
    drawn = Drawn.allocate(24, bench.device)
    ops.sample(3 * random(bench, 24, spec_of(bench).vocab_size, seed=9).float(), one.step, drawn)
    return torch.cat((drawn.token_ids, drawn.healthy.int()))


DECODE: Rows = [(n, 1) for n in (0, 15, 16, 100, 517)]
CHECKS: dict[str, Work] = {
    "prepare": prepared_step, "norm": normed, "gate": gated, "rotate_store": rotated_and_stored,
    "attend mixed": attended, "attend decode": partial(attended, rows=DECODE),
    "attend window": partial(attended, window=20), "attend softcap": partial(attended, softcap=5.0),
    "attend FP8": partial(attended, float8=True), "sample": sampled,
}  # fmt: skip
EXACT = ("prepare", "sample")


def random(bench: Bench, *size: int, seed: int) -> Tensor:
    generator = torch.Generator(bench.device).manual_seed(seed)
    return torch.randn(size, generator=generator, device=bench.device, dtype=bench.dtype)


def prepared(bench: Bench, ops: Ops, rows: Rows) -> Case:
    torch.manual_seed(2)
    one = case(bench, spec_of(bench), rows)
    one.begin(ops)
    return one


def integers(bench: Bench, bits: int = 4, *, group: int = 128, zeros: bool = False) -> PackedWeight:
    """Random ones, as a checkpoint would have them."""
    n, k = (48, 256) if bench.tiny else (2304, 4096)
    matrix = rounded(random(bench, n, k, seed=n), 8)
    if bits == 4:
        generator = torch.Generator(bench.device).manual_seed(n)
        how = {"generator": generator, "device": bench.device}
        values, spread = (
            torch.randint(0, 16, (n, k), dtype=torch.uint8, **how),
            torch.rand(n, k // group, **how),
        )
        scale = ((spread + 0.5) * 0.2 * k**-0.5).half().float()
        shift = torch.randint(-4, 5, scale.shape, **how).float() * scale
        matrix = QuantizedMatrix(values=values, scale=scale, offset=shift if zeros else None)
    assert matrix is not None
    found = packed(matrix, bench.device)
    assert found is not None
    return found


def float8(bench: Bench, *, in_blocks: bool) -> Float8Matrix:
    n, k = (128, 256) if bench.tiny else (2304, 4096)
    return float8_of(random(bench, n, k, seed=n).float() * k**-0.5, in_blocks=in_blocks)


def product(
    bench: Bench, ops: MatrixOps, rows: int, make: Callable[[Bench], PackedWeight] = integers
) -> Tensor:
    """Without a bias and with one."""
    weight = make(bench)
    n, k = weight.shape
    x, bias = random(bench, rows, k, seed=7), random(bench, n, seed=8)
    out = torch.full((2, rows, n), torch.nan, dtype=bench.dtype, device=bench.device)
    ops.multiply(x, weight, None, out[0])
    ops.multiply(x, weight, bias, out[1])
    return out


def unpacked(bench: Bench, ops: MatrixOps, bits: int) -> Tensor:
    weight = integers(bench, bits, zeros=True)
    out = torch.full(weight.shape, torch.nan, dtype=bench.dtype, device=bench.device)
    ops.unpack(weight, out)
    return out


def rounded_rows(bench: Bench, ops: MatrixOps, rows: int, *, in_blocks: bool) -> tuple[Tensor, Tensor]:
    k = 256 if bench.tiny else 4096
    out = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=bench.device)
    scales = torch.full((k // 128, rows) if in_blocks else (rows,), torch.nan, device=bench.device)
    ops.round_rows(random(bench, rows, k, seed=6), out, scales)
    return out, scales


def rounding(bench: Bench, ops: MatrixOps, *, in_blocks: bool) -> Tensor:
    """What the rounded rows stand for: a quotient on the edge of two numbers may go to either."""
    values, scales = rounded_rows(bench, ops, 33, in_blocks=in_blocks)
    parts = values.float().view(33, len(scales) if in_blocks else 1, -1)
    return parts * (scales.T if in_blocks else scales[:, None])[:, :, None]


def float8_product(bench: Bench, ops: MatrixOps, rows: int, *, in_blocks: bool) -> Tensor:
    weight, given = (
        float8(bench, in_blocks=in_blocks),
        rounded_rows(bench, TorchMatrixOps(), rows, in_blocks=in_blocks),
    )
    out = torch.full((rows, weight.shape[0]), torch.nan, dtype=bench.dtype, device=bench.device)
    ops.multiply_float8(given, weight, None, out)
    return out


def few(bench: Bench, *, in_blocks: bool) -> PackedWeight:
    return few_rows(float8(bench, in_blocks=in_blocks))


QUANTIZED: dict[str, Work] = {
    "int4, 1 row, zeros": partial(product, rows=1, make=partial(integers, zeros=True)),
    "int4, 1 row, groups of 32": partial(product, rows=1, make=partial(integers, group=32)),
    "int4, 9 rows, groups of 64": partial(product, rows=9, make=partial(integers, group=64)),
    "int4, 40 rows, zeros": partial(product, rows=40, make=partial(integers, zeros=True)),
    "int4, 200 rows": partial(product, rows=200),
    "int8, 3 rows": partial(product, rows=3, make=partial(integers, bits=8)),
    "int4 made dense": partial(unpacked, bits=4), "int8 made dense": partial(unpacked, bits=8),
    "rounding rows": partial(rounding, in_blocks=False), "rounding blocks": partial(rounding, in_blocks=True),
    "fp8, 3 rows as they are": partial(product, rows=3, make=partial(few, in_blocks=False)),
    "fp8 in blocks, 3 rows as they are": partial(product, rows=3, make=partial(few, in_blocks=True)),
    "fp8, 1 row": partial(float8_product, in_blocks=False, rows=1),
    "fp8, 77 rows": partial(float8_product, in_blocks=False, rows=77),
    "fp8 in blocks, 20 rows": partial(float8_product, in_blocks=True, rows=20),
    "fp8 in blocks, 76 rows": partial(float8_product, in_blocks=True, rows=76),
}  # fmt: skip
Figure = Callable[[], tuple[float, float, float]]
"""(seconds, bytes that must move, operations) of one call."""


def figures_of(bench: Bench, ops: Ops) -> dict[str, Figure]:
    """Attention of an 8B model's shape; products are the library's, and are in `ceilings`."""
    spec, context = shape("llama-3-8b", tiny=bench.tiny), 40 if bench.tiny else 1024
    batches, chunks = ((1, 3), (32,)) if bench.tiny else ((1, 8, 64, 256), (2048, 8192))
    rows = {f"decode {batch}": [(context, 1)] * batch for batch in batches}
    rows |= {f"prefill {tokens}": [(0, tokens)] for tokens in chunks}
    figures: dict[str, Figure] = {
        f"attend {name}": partial(attend, bench, ops, spec, each) for name, each in rows.items()
    }
    return figures | {
        f"attend {name}, FP8": partial(attend, bench, ops, spec, each, float8=True)
        for name, each in rows.items()
    }


def in_float8(one: Case, dtype: torch.dtype) -> Case:
    """The same with its cache in FP8."""
    old = one.cache.tensor
    cache = KVCache(one.spec, one.cache.num_blocks, dtype, old.device, float8=True)
    cache.tensor.copy_(old)
    return replace(one, cache=cache)


def attend(
    bench: Bench, ops: Ops, spec: DecoderSpec, rows: Rows, *, float8: bool = False
) -> tuple[float, float, float]:
    # Layers enough that their keys and values do not stay in the device's cache between calls.
    layers = 2 if bench.tiny else 8
    one = case(bench, spec, rows, layers=layers)
    one.cache.tensor[:-1].normal_()
    one = in_float8(one, bench.dtype) if float8 else one
    one.begin(ops)
    q = one.heads(4, all_heads=False)
    out, scale = torch.empty_like(q), spec.head_dim**-0.5

    def all_layers() -> None:
        for layer in range(layers):
            ops.attend(q, out, one.cache, one.step, AttentionLayer(layer, scale, 0.0, 0), one.partials)

    seconds = bench.seconds(all_layers, calls=2) / layers
    size = bench.dtype.itemsize
    moved = sum((known + new) * 2 * spec.kv_size + 2 * new * spec.q_size for known, new in rows) * size
    pairs = sum(new * known + new * (new + 1) // 2 for known, new in rows)
    return seconds, moved, 4.0 * pairs * spec.q_size


def flashinfer(bench: Bench, ops: Ops) -> dict[str, Any]:
    """Attention by FlashInfer beside ours: its error against the twin, and how many times longer it takes
    (planning apart).
    """
    if bench.cpu:
        return {"left_out": "it needs a GPU"}
    try:
        theirs = flashinfer_ops(ops, bench.device)
        found: dict[str, Any] = {
            "mixed": twins(partial(attended, bench), theirs, TorchOps()),
            "decode": twins(partial(attended, bench, rows=DECODE), theirs, TorchOps()),
        }
        spec, rows_of_kind = shape("llama-3-8b", tiny=bench.tiny), {"prefill 2048": [(0, 2048)]}
        rows_of_kind |= {f"decode {n}": [(1024, 1)] * n for n in (1, 8, 64)}
        for name, rows in rows_of_kind.items():
            seconds = [attend(bench, each, spec, rows)[0] for each in (theirs, ops)]
            found[name] = {"us": round(seconds[0] * 1e6, 2), "times_ours": round(seconds[0] / seconds[1], 3)}
    except Exception as error:  # noqa: BLE001 An optional part: whatever it is, it is a finding.
        return {"left_out": f"{type(error).__name__}: {error}"[:500]}
    return found

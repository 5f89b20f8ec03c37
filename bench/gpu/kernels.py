"""Every kernel against its twin, and how near it comes to the device's ceilings as measured here."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.ceilings import copy_rate, gemm_rate, void
from bench.gpu.common import Bench, Report, checked, shape
from bench.gpu.steps import Case, Rows, case
from penstock.engine.gpu.flashinfer_ops import flashinfer_ops
from penstock.engine.gpu.ops import AttentionLayer, Ops
from penstock.engine.gpu.step import Drawn
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.kv_cache import KVCache
from penstock.models.spec import DecoderSpec

LIMIT = 1e-2
"""Relative error of a bf16 result: one rounding is 2**-9."""
MIXED: Rows = [(0, 200), (1024, 1), (77, 33), (511, 1), (300, 16), (15, 1), (2000, 5)]


@torch.inference_mode()
def run(bench: Bench, report: Report) -> None:
    ops = bench.ops()
    report.put("ops", ops.name)
    checks = {
        name: partial(twins, partial(work, bench), ops, TorchOps(), exact=name in EXACT)
        for name, work in CHECKS.items()
    }
    wrong = checked(report, checks)
    rates = {"copy": copy_rate(bench), "gemm": gemm_rate(bench)}
    report.put("measured_here", rates)
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


def compare(ours: Tensor, twin: Tensor) -> dict[str, Any]:
    ours, twin = ours.double(), twin.double()
    error = float((ours - twin).norm() / twin.norm())
    return {"ok": error <= LIMIT, "relative_error": error}  # NaN is not below anything.


def twins(work: Callable[[Any], Tensor], ops: object, twin: object, *, exact: bool = False) -> dict[str, Any]:
    """The same work by both."""
    ours, theirs = work(ops), work(twin)
    if exact:
        return {"ok": torch.equal(ours, theirs), "values_that_differ": int((ours != theirs).sum())}
    return compare(ours, theirs)


def spec_of(bench: Bench) -> DecoderSpec:
    spec = shape("qwen3-14b", tiny=bench.tiny)
    return spec if bench.tiny else replace(spec, num_heads=32, vocab_size=151_936)


def rows_of(bench: Bench) -> Rows:
    return [(0, 9), (33, 1), (17, 3)] if bench.tiny else MIXED


def prepared_step(bench: Bench, ops: Ops) -> Tensor:
    one = case(bench, spec_of(bench), rows_of(bench))
    known = one.step.state.token_ids
    known.copy_(torch.arange(known.numel()).view_as(known) % 97)
    ops.prepare(one.step, one.slots_per_block)
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
CHECKS: dict[str, Callable[..., Tensor]] = {
    "prepare": prepared_step, "norm": normed, "gate": gated, "rotate_store": rotated_and_stored,
    "attend mixed": attended, "attend decode": partial(attended, rows=DECODE),
    "attend window": partial(attended, window=20), "attend softcap": partial(attended, softcap=5.0),
    "sample": sampled,
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


Figure = Callable[[], tuple[float, float, float]]
"""(seconds, bytes that must move, operations) of one call."""


SAMPLED = {"greedy": (0.0, 1.0), "plain": (0.8, 1.0), "top-p": (0.8, 0.95)}
"""Temperature and top-p. The logits are normal with a deviation of 3: the nucleus is thousands of tokens, a
hard case."""


def figures_of(bench: Bench, ops: Ops) -> dict[str, Figure]:
    """Attention and drawing of an 8B model's shape; products are the library's, and are in `ceilings`."""
    spec, context = shape("llama-3-8b", tiny=bench.tiny), 40 if bench.tiny else 1024
    batches, chunks = ((1, 3), (32,)) if bench.tiny else ((1, 8, 64, 256), (2048, 8192))
    rows = {f"decode {batch}": [(context, 1)] * batch for batch in batches}
    rows |= {f"prefill {tokens}": [(0, tokens)] for tokens in chunks}
    figures: dict[str, Figure] = {
        f"attend {name}": partial(attend, bench, ops, spec, each) for name, each in rows.items()
    }
    figures |= {
        f"attend {name}, FP8": partial(attend, bench, ops, spec, each, float8=True)
        for name, each in rows.items()
    }
    return figures | {
        f"sample {how} {batch}": partial(sample, bench, ops, spec, how, batch)
        for how in SAMPLED
        for batch in batches
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


def sample(bench: Bench, ops: Ops, spec: DecoderSpec, how: str, batch: int) -> tuple[float, float, float]:
    one = case(bench, spec, [(5, 1)] * batch)
    one.begin(ops)
    temperature, top_p = SAMPLED[how]
    one.step.state.temperature.fill_(temperature)
    one.step.state.top_p.fill_(top_p)
    logits = 3 * random(bench, batch, spec.vocab_size, seed=9).float()
    drawn = Drawn.allocate(batch, bench.device)
    seconds = bench.seconds(lambda: void(ops.sample(logits, one.step, drawn)), calls=3)
    return seconds, 4.0 * batch * spec.vocab_size, 0.0

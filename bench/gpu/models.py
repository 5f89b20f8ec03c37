"""The device's ceilings; a model shape with random weights: decode by rows, prefill by length, host time,
start-up, graphs and overlap on and off.

MBU: bytes of weights and of KV that a decode step must read, over its time and the device's bandwidth. MFU:
operations of matrix products and attention over time and the device's rate. Both against the sheet, and
against what the device did in this process.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.common import CLOCK, Bench, Report, build, seconds_of, shape
from penstock.engine.gpu.runner import DeviceRunner
from penstock.models.spec import DecoderSpec
from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20)


@dataclass(frozen=True)
class Sizes:
    """The measured sizes."""

    batches: tuple[int, ...]
    context: int
    steps: int
    prefills: tuple[int, ...]

    @classmethod
    def of(cls, bench: Bench) -> "Sizes":
        return cls((1, 3), 40, 4, (32, 64)) if bench.tiny else cls((1, 8, 64, 256), 1024, 48, (2048, 8192))


@torch.inference_mode()
def ceilings(bench: Bench, report: Report) -> None:
    """A large copy and a large matrix product: everything else is compared with these."""
    report.put("torch", torch.__version__)
    if not bench.cpu:
        facts = torch.cuda.get_device_properties(0)
        report.put("device", facts.name)
        report.put("multiprocessors", facts.multi_processor_count)
        report.put("memory_bytes", facts.total_memory)
    found = bench.rates()
    report.put("copy_bytes_per_s", found["copy"])
    report.put("gemm_flops", found["gemm"])
    report.put("summary", f"copy {found['copy'] / 1e12:.2f} TB/s, GEMM {found['gemm'] / 1e12:.0f} TFLOP/s")


def run(bench: Bench, report: Report, name: str, form: str = "", kv_dtype: str = "auto") -> None:
    spec, sizes = shape(name, tiny=bench.tiny), Sizes.of(bench)
    if form and bench.tiny:
        spec = replace(spec, hidden_size=128, intermediate_size=128, num_heads=8, num_kv_heads=8)
    rates = bench.rates()
    report.put("measured_here", rates)
    runner, seconds = build(
        bench, spec, form=form, kv_dtype=kv_dtype, dtype="float32" if bench.cpu else "bfloat16",
        max_running=max(sizes.batches), step_tokens=max(*sizes.prefills, *sizes.batches),
        max_model_len=max(sizes.prefills) + sizes.context, kv_memory_bytes=kv_bytes(spec, sizes, bench),
    )  # fmt: skip
    report.put("kernels", runner.kernels)
    report.put("parameters", spec.num_parameters)
    report.put("weight_bytes", weight_bytes(runner, spec))
    report.put("start_up_s", seconds)
    decode: dict[str, Any] = {}
    for batch in sizes.batches:
        decode[str(batch)] = decode_figures(bench, runner, spec, batch, sizes, rates["copy"])
        report.put("decode", decode)
    prefill: dict[str, Any] = {}
    for tokens in sizes.prefills:
        prefill[str(tokens)] = prefill_figures(bench, runner, spec, tokens, rates["gemm"])
        report.put("prefill", prefill)
    report.put("graphs", len(runner.graphs))
    report.put("summary", headline(decode, prefill))


def kv_bytes(spec: DecoderSpec, sizes: Sizes, bench: Bench) -> int:
    rows = max(sizes.batches) * (sizes.context + sizes.steps + 2 * BLOCK_TOKENS)
    tokens = max(rows, max(sizes.prefills) + 2 * BLOCK_TOKENS)
    return tokens * spec.kv_bytes_per_token(bench.dtype.itemsize)


def headline(decode: dict[str, Any], prefill: dict[str, Any]) -> str:
    rows = ", ".join(
        f"{batch}: {one['tokens_per_s']:.0f} tok/s ({one['mbu']:.0%})" for batch, one in decode.items()
    )
    chunks = ", ".join(f"{tokens}: {one['mfu']:.0%}" for tokens, one in prefill.items())
    return f"decode {rows}; prefill MFU {chunks}"


def start_rows(runner: DeviceRunner, batch: int, context: int, steps: int) -> StepPlan:
    """A step that decodes `batch` rows whose context is said to be there, with blocks for `steps` more."""
    held = -(-(context + steps + 1) // BLOCK_TOKENS)
    assert batch * held <= runner.info.num_blocks, (batch, held, runner.info.num_blocks)
    vocab_size = runner.info.vocab_size
    tokens = tuple(i * 7919 % vocab_size for i in range(context + 1))
    new = tuple(NewRow(RequestId(f"d{row}"), row, tokens, context, GREEDY) for row in range(batch))
    work = tuple(
        RowWork(row, context, 1, True, tuple(range(row * held, (row + 1) * held))) for row in range(batch)
    )
    return StepPlan(0, new, work)


def decode_seconds(
    bench: Bench, runner: DeviceRunner, batch: int, sizes: Sizes, *, ahead: bool
) -> dict[str, float]:
    """Median step time and the host's part of it, one plan under way or two."""
    runner.run(start_rows(runner, batch, sizes.context, sizes.steps))
    plans = [
        StepPlan(step, (), tuple(RowWork(row, sizes.context + step, 1, True) for row in range(batch)))
        for step in range(1, sizes.steps + 1)
    ]
    times, launching = list[float](), list[float]()
    bench.sync()
    if ahead:
        runner.launch(plans[0])
    last_ns = CLOCK.now_ns()
    for plan in plans[1:]:
        launching.append(seconds_of(lambda plan=plan: runner.launch(plan))[1])
        runner.collect()
        now_ns = CLOCK.now_ns()
        times.append((now_ns - last_ns) / 1e9)
        last_ns = now_ns
    if ahead:
        runner.collect()
    warm = len(times) // 3
    return {"step_s": statistics.median(times[warm:]), "launch_s": statistics.median(launching[warm:])}


def four_digits(share: float) -> float:
    """Rounded, but never to nothing: tiny models on a busy machine use a hundred thousandth."""
    return float(f"{share:.4g}")


def decode_figures(
    bench: Bench, runner: DeviceRunner, spec: DecoderSpec, batch: int, sizes: Sizes, copy_per_s: float
) -> dict[str, Any]:
    runner.graphs.enabled = True
    ahead = decode_seconds(bench, runner, batch, sizes, ahead=True)
    waiting = decode_seconds(bench, runner, batch, sizes, ahead=False)
    runner.graphs.enabled = False
    eager = decode_seconds(bench, runner, batch, sizes, ahead=True)
    runner.graphs.enabled = True
    read = decode_bytes(runner, spec, batch, sizes.context + sizes.steps // 2)
    step_s, nominal = ahead["step_s"], bench.nominal()
    return {
        "step_ms": round(step_s * 1e3, 4),
        "tokens_per_s": round(batch / step_s, 1),
        "bytes_read": read,
        "mbu": four_digits(read / step_s / (nominal[0] if nominal else copy_per_s)),
        "of_copy": four_digits(read / step_s / copy_per_s),
        "host_launch_ms": round(ahead["launch_s"] * 1e3, 4),
        "without_overlap_ratio": round(waiting["step_s"] / step_s, 4),
        "without_graphs_ratio": round(eager["step_s"] / step_s, 4),
    }


def decode_bytes(runner: DeviceRunner, spec: DecoderSpec, batch: int, context: int) -> int:
    """Weights but for the embedding table (of which a row per token is read), and every row's keys and
    values.
    """
    kv_bytes = spec.kv_bytes_per_token(runner.cache.tensor.dtype.itemsize)
    return weight_bytes(runner, spec) + batch * context * kv_bytes


def weight_bytes(runner: DeviceRunner, spec: DecoderSpec) -> int:
    """As they lie in memory; an embedding table that is not the head too does not count."""
    once = {tensor.data_ptr(): tensor.nbytes for tensor in runner.weight_tensors()}
    table = 0 if spec.tied_head else runner.weight_tensors()[0].nbytes
    return sum(once.values()) - table


def prefill_figures(
    bench: Bench, runner: DeviceRunner, spec: DecoderSpec, tokens: int, gemm_per_s: float
) -> dict[str, Any]:
    vocab_size = runner.info.vocab_size
    prompt = tuple(i * 104_729 % vocab_size for i in range(tokens))
    blocks = tuple(range(-(-(tokens + 1) // BLOCK_TOKENS)))
    new = NewRow(RequestId("p"), 0, prompt, tokens, GREEDY)
    plan = StepPlan(0, (new,), (RowWork(0, 0, tokens, True, blocks),))
    times = [seconds_of(lambda: runner.run(plan))[1] for _ in range(2 if bench.tiny else 6)]
    step_s, nominal = statistics.median(times[1:]), bench.nominal()
    flops = prefill_flops(spec, tokens)
    return {
        "step_ms": round(step_s * 1e3, 3),
        "tokens_per_s": round(tokens / step_s, 1),
        "mfu": round(flops / step_s / (nominal[1] if nominal else gemm_per_s), 4),
        "of_gemm": round(flops / step_s / gemm_per_s, 4),
    }


def prefill_flops(spec: DecoderSpec, tokens: int) -> float:
    """Two per weight and token (the head for one token only), four per visible pair of positions and query
    dimension.
    """
    tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied_head else 2)
    dense = 2.0 * (spec.num_parameters - tables) * tokens
    attention = 2.0 * tokens * tokens * spec.q_size * spec.num_layers
    return dense + 2.0 * spec.vocab_size * spec.hidden_size + attention

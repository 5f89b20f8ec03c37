"""The shared parts of the sections: the device, timing on it, model shapes, and figures that are on disk at
once.
"""

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.decoder import WeightSource
from penstock.engine.gpu.load import Named, Target, build_on_device, cuda_target
from penstock.engine.gpu.ops import Ops
from penstock.engine.gpu.platform import CpuPlatform
from penstock.engine.gpu.runner import DeviceRunner
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.loader import random_weights
from penstock.engine.quantized import Float8Matrix
from penstock.models.config import HfConfig
from penstock.models.registry import FAMILIES
from penstock.models.spec import DecoderSpec

CLOCK = SystemClock()
Value = TypeVar("Value")
NOMINAL = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12)}
"""Bytes and bf16 operations per second on the maker's sheet."""


class Report:
    """Figures of one section; every `put` is on disk when it returns."""

    def __init__(self, path: Path) -> None:
        self.found: dict[str, Any] = {}
        self._path = path

    def put(self, name: str, value: Any) -> None:  # noqa: ANN401
        self.found[name] = value
        self._path.write_text(json.dumps(self.found))

    def fail_if(self, wrong: list[str]) -> None:
        """The section is an error if anything is wrong; the rest of its figures stand."""
        if wrong:
            self.put("error", f"these differ from their references: {', '.join(wrong)}")


def checked(
    report: Report, checks: Mapping[str, Callable[[], dict[str, Any]]], under: str = "checks"
) -> list[str]:
    """Make every check, whose failure is a finding like others; those that are not `ok`."""
    found: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception as error:  # noqa: BLE001 Whatever it is.
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"[:700]}
        report.put(under, found)
    wrong = [name for name, each in found.items() if not each["ok"]]
    report.put("summary", f"{len(found)} {under}, wrong: {', '.join(wrong) or 'none'}")
    return wrong


@dataclass(frozen=True)
class Bench:
    """Where and how large."""

    cpu: bool
    tiny: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.cpu else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.cpu else torch.bfloat16

    def target(self, **settings: object) -> Target:
        """The engine's own choice on a GPU; the twins on the CPU."""
        if self.cpu:
            config = EngineSettings(device="cpu", kernels="torch", **settings)
            return Target(config, CpuPlatform(), TorchOps(), CLOCK)
        target = cuda_target(EngineSettings(device="cuda", **settings), CLOCK)
        assert target is not None
        return target

    def ops(self) -> Ops:
        return self.target().ops

    def sync(self) -> None:
        if not self.cpu:
            torch.cuda.synchronize()

    def rates(self) -> dict[str, float]:
        """What the device does: bytes a second that a large copy reads and writes, operations a second of a
        large square product.
        """
        size, n = (1 << 16, 64) if self.tiny else (1 << 32, 8192)
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        copy = 2 * size / self.seconds(lambda: target.copy_(source), calls=3)
        a, b = (torch.randn(n, n, dtype=self.dtype, device=self.device) for _ in range(2))
        out = torch.empty_like(a)
        return {"copy": copy, "gemm": 2 * n**3 / self.seconds(lambda: torch.mm(a, b, out=out), calls=5)}

    def nominal(self) -> tuple[float, float] | None:
        """(bytes/s, bf16 operations/s) of the sheet, if we know the device."""
        if self.cpu:
            return None
        name = torch.cuda.get_device_name()
        return next((rates for model, rates in NOMINAL.items() if model in name), None)

    def seconds(self, run: Callable[[], object], *, calls: int = 10, repeats: int = 7) -> float:
        """Median time of one call.

        On a GPU `calls` of them are replayed from a graph, so launching is no part of it.
        """
        if self.cpu:
            run()
            return statistics.median(seconds_of(run)[1] for _ in range(3))
        run()
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        times: list[float] = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / calls)
        return statistics.median(times)


def seconds_of(work: Callable[[], Value]) -> tuple[Value, float]:
    """What it gives, and how long it took."""
    start_ns = CLOCK.now_ns()
    found = work()
    return found, (CLOCK.now_ns() - start_ns) / 1e9


def config_of(name: str, *, tiny: bool) -> dict[str, Any]:
    """The `config.json` of a published model; tiny: of the same kind, and small enough for a test."""
    kind = "Llama" if name.startswith("llama") else "Qwen3"
    hidden, inner, layers, heads, kv_heads, vocab, tied = {
        "qwen3-0.6b": (1024, 3072, 28, 16, 8, 151_936, True),
        "llama-3-8b": (4096, 14_336, 32, 32, 8, 128_256, False),
        "qwen3-14b": (5120, 17_408, 40, 40, 8, 151_936, False),
    }[name]
    if tiny:  # All bytes, and the load generator's words.
        hidden, inner, layers, heads, kv_heads, vocab = 32, 64, 2, 4, 2, 1200
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 16 if tiny else 128, "vocab_size": vocab,
        "max_position_embeddings": 1024 if tiny else 131_072, "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0 if kind == "Llama" else 1_000_000.0, "tie_word_embeddings": tied,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip


def shape(name: str, *, tiny: bool) -> DecoderSpec:
    """Its decoder, as the engine reads it."""
    config = msgspec.convert(config_of(name, tiny=tiny), HfConfig)
    assert config.architectures
    return FAMILIES[config.architectures[0]].spec(config)


class Float8Weights:
    """Random weights whose layers are FP8, with a scale per output or per block."""

    def __init__(self, weights: WeightSource, *, in_blocks: bool) -> None:
        self._weights, self._in_blocks = weights, in_blocks

    def take(self, key: str) -> Tensor:
        return self._weights.take(key)

    def take_linear(self, key: str) -> Float8Matrix:
        return float8_of(self._weights.take(key), in_blocks=self._in_blocks)

    def take_parts(self, key: str) -> tuple[Tensor, ...]:
        return (self.take(key),)


def float8_of(dense: Tensor, *, in_blocks: bool) -> Float8Matrix:
    """A scale per output, or per block of 128 by 128."""
    n, k = dense.shape
    parts = dense.view(n // 128, 128, k // 128, 128) if in_blocks else dense.view(n, 1, 1, k)
    scale = parts.abs().amax((1, 3)).float() / 448
    values = (parts / scale[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn)
    return Float8Matrix(values=values, scale=scale)


def build(
    bench: Bench, spec: DecoderSpec, *, form: str = "", **settings: object
) -> tuple[DeviceRunner, dict[str, float]]:
    """A warm runner with random weights and a cache full of random numbers (zeros would flatter), and the
    seconds that each part of it took.

    `form` of its layers: "int8", "int4", "fp8", "fp8-block"; empty: dense.
    """
    if form.startswith("int"):
        settings["quantization"] = form
    target, seconds = bench.target(**settings), dict[str, float]()

    def timed(name: str, work: Callable[[], Value]) -> Value:
        found, took_s = seconds_of(lambda: (work(), bench.sync())[0])
        seconds[name] = round(took_s, 3)
        return found

    def random() -> WeightSource:
        dense = random_weights(spec, bench.dtype, 0, lambda _done, _total: None, bench.device)
        return Float8Weights(dense, in_blocks=form == "fp8-block") if form.startswith("fp8") else dense

    weights = timed("weights", random)
    runner = timed("build", lambda: build_on_device(Named("bench"), spec, weights, target))
    timed("warm_up", runner.warm_up)
    with torch.inference_mode():
        for block in range(0, runner.info.num_blocks, 256):
            part = runner.cache.tensor[block : min(block + 256, runner.info.num_blocks)]
            part.copy_(torch.randn(part.shape, dtype=bench.dtype, device=bench.device))
    bench.sync()
    return runner, seconds

"""A step of forced tokens beside a step of free text, part by part, and what the machine could do at best.

    python -m bench.grammar.forced_chunks [MODEL_DIR] [--batches 1 8 32] [--rounds 3] [--shape 28m]

Of each step in the runner: its tokens, its wall time, and the time of its kernels by their own clock.
`outside` is the rest, which is no kernel: tables, the draw, grammars. `peak` is the rate of the layers'
products in steps of up to 512 prompt tokens, where each weight that is read serves the most tokens. From
these:

    faster             time per token of free text over that of long keys, whole answers
    asked              0.8 / (1 - forced share)
    at_peak            `faster`, if each product of the long keys' steps were computed at the peak's rate
    products_only      `faster`, if those were all: no attention, no head, no draw, no host
    gflop_per_s_asked  the layers' rate that the goal takes if all else were free
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.grammar.cost import DEMO, Engine, layer_flop, spread
from bench.harness import command_line, write_result
from bench.peers.engines import OUT
from bench.peers.shapes import SHAPES, make_model
from penstock.engine.native.decoder import NativeDecoder
from penstock.engine.native.library import STEP_PARTS
from penstock.engine.runner import Runner
from penstock.kv.hashing import token_array
from penstock.protocol.worker import Submit
from penstock.schedule.plan import StepPlan, StepResult
from penstock.types import RequestId, SamplingParams

PRODUCTS = ("qkv", "o", "gate_up", "down")
PEAK_TOKENS = 512


@dataclass(slots=True, frozen=True)
class Step:
    """One step in the runner, in seconds."""

    tokens: int
    wall_s: float
    parts_s: Mapping[str, float]

    def products_s(self) -> float:
        return sum(self.parts_s[name] for name in PRODUCTS)

    def outside_s(self) -> float:
        """The rest, which is no kernel: tables, the draw, grammars."""
        return self.wall_s - sum(self.parts_s.values())


class Watched:
    """An engine whose steps are noted."""

    def __init__(self, model: Path, batch: int) -> None:
        self.batch, self.steps = batch, list[Step]()
        self._counts = np.zeros(len(STEP_PARTS), np.int64)
        self.engine = Engine(model, batch, self._watch)

    def _watch(self, runner: object) -> None:
        assert isinstance(runner, Runner), "on the CPU"
        decoder: object = getattr(runner.parts.model, "_decoder")  # noqa: B009
        assert isinstance(decoder, NativeDecoder), "the kernels' clock is the native ones'"
        decoder.part_ns = self._counts
        run = runner.run

        def counted(plan: StepPlan) -> StepResult:
            self._counts[:] = 0
            began = time.perf_counter()
            result = run(plan)
            wall_s = time.perf_counter() - began
            if plan.work:
                parts = dict(zip(STEP_PARTS, (self._counts / 1e9).tolist(), strict=True))
                self.steps.append(Step(sum(work.num_tokens for work in plan.work), wall_s, parts))
            return result

        setattr(runner, "run", counted)  # noqa: B010

    def answer(self) -> dict[str, float]:
        """Run until nothing is left."""
        tokens = draws = 0
        self.steps = []
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        while self.engine.core.has_work:
            for output in self.engine.core.step().get(0, []):
                tokens += len(output.token_ids)
                draws += bool(output.token_ids)
        return {
            "tokens": tokens, "forced_share": 1 - draws / tokens,
            "wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s,
        }  # fmt: skip

    def peak(self, flop: int) -> float:
        """FLOP/s of the layers' products in steps of many prompt tokens."""
        rates = list[float]()
        for number in range(4):
            prompt = token_array([at % 4000 + number for at in range(2 * PEAK_TOKENS)])
            how = SamplingParams(temperature=0.0, max_tokens=1)
            message = Submit(request_id=RequestId(f"peak-{number}"), prompt=prompt.tobytes(), sampling=how)
            self.engine.core.submit(0, message, time.monotonic_ns())
            self.answer()
            rates += [s.tokens * flop / s.products_s() for s in self.steps if s.tokens > PEAK_TOKENS // 2]
        return statistics.median(rates[1:])


def one(watched: Watched, kind: str, number: int) -> dict[str, float]:
    """A batch of answers of one kind."""
    watched.engine.submit(kind, watched.batch, number)
    found, steps = watched.answer(), watched.steps
    return found | {
        "s_per_token": found["wall_s"] / found["tokens"], "cpu_s_per_token": found["cpu_s"] / found["tokens"],
        "computed": sum(step.tokens for step in steps), "steps": len(steps),
        "products_s": sum(step.products_s() for step in steps),
    }  # fmt: skip


def of_step(steps: list[Step], flop: int) -> dict[str, float]:
    """The typical step of many tokens of a batch, in milliseconds."""

    def ms(values: Iterator[float]) -> float:
        return round(statistics.median(values) * 1e3, 3)

    tokens = statistics.median(step.tokens for step in steps)
    products = ms(step.products_s() for step in steps)
    return {
        "steps": len(steps), "tokens": tokens, "wall_ms": ms(step.wall_s for step in steps),
        "products_ms": products,
        "attention_ms": ms(step.parts_s["attention"] for step in steps),
        "head_ms": ms(step.parts_s["head"] for step in steps),
        "other_kernels_ms": ms(
            step.parts_s["norm"] + step.parts_s["rope"] + step.parts_s["rest"] for step in steps
        ),
        "outside_ms": ms(step.outside_s() for step in steps),
        "products_gflop_per_s": round(tokens * flop / products / 1e6, 1),
    }  # fmt: skip


def measure(model: Path, batch: int, rounds: int) -> dict[str, object]:
    """Free text and long keys in turns, at one width."""
    watched, flop = Watched(model, batch), layer_flop(model)
    peak = watched.peak(flop)
    found: dict[str, list[dict[str, float]]] = {"free": [], "long_keys": []}
    typical: dict[str, list[Step]] = {"free": [], "long_keys": []}
    for number in range(rounds + 1):
        for kind, each in found.items():
            result = one(watched, kind, number)
            if number:
                each.append(result)
                is_free = kind == "free"
                typical[kind] += [
                    step for step in watched.steps
                    if step.tokens >= batch and (step.tokens == batch) is is_free
                ]  # fmt: skip
    watched.engine.compiler.close()
    pairs = list(zip(found["free"], found["long_keys"], strict=True))

    def of_pairs(value: Callable[[dict[str, float], dict[str, float]], float]) -> dict[str, float]:
        return spread([value(free, long) for free, long in pairs])

    def free_s(free: dict[str, float], long: dict[str, float]) -> float:
        return free["s_per_token"] * long["tokens"]

    return {
        "batch": batch, "peak_gflop_per_s": round(peak / 1e9, 1),
        "forced_share": of_pairs(lambda _, long: long["forced_share"]),
        "asked": of_pairs(lambda _, long: 0.8 / (1 - long["forced_share"])),
        "faster": of_pairs(lambda free, long: free["s_per_token"] / long["s_per_token"]),
        "faster_in_cpu_time": of_pairs(lambda free, long: free["cpu_s_per_token"] / long["cpu_s_per_token"]),
        "at_peak": of_pairs(
            lambda free, long: free_s(free, long)
            / (long["wall_s"] - long["products_s"] + long["computed"] * flop / peak)
        ),
        "products_only": of_pairs(lambda free, long: free_s(free, long) / (long["computed"] * flop / peak)),
        "gflop_per_s_asked": of_pairs(
            lambda free, long: long["computed"] * flop / 1e9
            / (free_s(free, long) * (1 - long["forced_share"]) / 0.8)
        ),
        "steps_per_draw": of_pairs(
            lambda _, long: long["steps"] * batch / (long["tokens"] * (1 - long["forced_share"]))
        ),
        "free_step": of_step(typical["free"], flop),
        "forced_step": of_step(typical["long_keys"], flop),
    }  # fmt: skip


def report(args: Namespace) -> dict[str, object]:
    return {
        "model": args.shape or args.model.name, "rounds": args.rounds,
        "layer_mflop_per_token": round(layer_flop(args.model) / 1e6, 2),
        "widths": [measure(args.model, batch, args.rounds) for batch in args.batches],
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    if args.shape:
        args.model = make_model(SHAPES[args.shape], OUT / "models" / args.shape)
    found = report(args)
    for width in found["widths"]:  # pyright: ignore
        print(width)
    write_result(args.json, found)


if __name__ == "__main__":
    main()

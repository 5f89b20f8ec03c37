"""Grammars beside free text: time per token of 32 streams.

    python -m bench.grammar.cost [MODEL_DIR | --shape 28m] [--turns 100] [--batch 32] [--json FILE]

Two engines in this process, of which one writes free text and one a constrained kind, eight steps each in
turn, so that whatever else the machine does hits both. `--shape` takes a shape of known_shapes.py with random
weights.
"""

import os
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
from known_shapes import SHAPES, make_model

from bench.harness import OUT, Spread, command_line, table, write_result
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, FollowsGrammars, build_core
from penstock.engine.grammar.compiler import GrammarCompiler, GrammarTokens
from penstock.engine.runner import build_runner
from penstock.kv.hashing import token_array
from penstock.protocol.worker import Submit
from penstock.protocol.worker_parts import Grammar
from penstock.types import RequestId, SamplingParams

CLOCK = SystemClock()
DEMO = Path(__file__).parents[2] / "models" / "penstock-demo"
TOKENS = 96
BLOCK = 8
"""Steps of an engine before it is the other one's turn."""
KINDS: dict[str, Any] = {
    "free": None,
    "string": {"regex": '"[^"\\\\]{400,}"'},
    "list": {"json": {"type": "array", "minItems": 200, "items": {"type": "number"}}},
}


class Engine:
    """One engine, which is given closed batches."""

    def __init__(self, model: Path, batch: int) -> None:
        config = EngineSettings(  # No promise for tokens: a busy machine would run smaller batches.
            prefix_cache=False, kv_memory_bytes=256 << 20, max_running=batch, tpot_target_ms=0.0
        )  # fmt: skip
        runner = build_runner(model, config, CLOCK, lambda _stage, _done, _total: None)
        runner.warm_up()
        tokens = GrammarTokens.load(model, runner.info.vocab_size)
        assert tokens is not None
        assert isinstance(runner, FollowsGrammars), "grammars are followed on the CPU"
        runner.use_grammars(tokens)
        self.tokens, self._batch, self._number = tokens, batch, 0
        self.core: EngineCore = build_core(runner, config, b"bench" * 8, CLOCK)
        compiler = GrammarCompiler(tokens)
        self._compiled = {
            kind: compiler.compile(b"", Grammar(form=msgspec.json.encode(form))).result()
            for kind, form in KINDS.items() if form is not None
        }  # fmt: skip
        compiler.close()

    def submit(self, kind: str) -> None:
        """One batch."""
        form, eos = KINDS[kind], self.tokens.eos_ids
        grammar = None if form is None else Grammar(form=msgspec.json.encode(form))
        prompt = token_array(self.tokens.tokenizer.encode("Write down what you know about rivers."))
        self._number += 1
        for row in range(self._batch):
            how = SamplingParams(
                temperature=1.0, seed=1000 * self._number + row, stop_token_ids=() if form is None else eos,
                max_tokens=TOKENS,
            )  # fmt: skip
            message = Submit(
                request_id=RequestId(f"{self._number}-{row}"), prompt=prompt.tobytes(), sampling=how,
                grammar=grammar,
            )  # fmt: skip
            self.core.submit(0, message, CLOCK.now_ns(), self._compiled.get(kind))

    def steps(self, num: int) -> tuple[int, float, float]:
        """So many steps: tokens, seconds, and CPU seconds of this process."""
        tokens, cpu_s, began = 0, time.process_time(), time.monotonic()
        for _ in range(num):
            tokens += sum(len(output.token_ids) for output in self.core.step().get(0, []))
        return tokens, time.monotonic() - began, time.process_time() - cpu_s


def in_blocks(free: Engine, held: Engine, kind: str, batch: int, turns: int) -> dict[str, list[float]]:
    """Time per token and CPU of a kind over those of free text, by blocks of steps that follow one another;
    the first step of each does not count, for masks may have been computed while the other engine ran.
    """
    found: dict[str, list[float]] = {"time": [], "cpu": []}
    while len(found["time"]) < turns:
        spent = 0
        for engine, what in ((free, "free"), (held, kind)):
            engine.submit(what)
            num = 1
            while engine.steps(1)[0] < batch:  # Prompts are computed beside the first rows.
                num += 1
            spent = max(spent, num)
        for block in range((TOKENS - spent - 2) // (BLOCK + 1)):
            took = dict[Engine, tuple[float, float]]()
            for engine in (free, held) if block % 2 else (held, free):
                engine.steps(1)
                tokens, wall_s, cpu_s = engine.steps(BLOCK)
                took[engine] = (wall_s / tokens, cpu_s / tokens)
            found["time"].append(took[held][0] / took[free][0])
            found["cpu"].append(took[held][1] / took[free][1])
        for engine in (free, held):
            while engine.core.has_work:
                engine.core.step()
    return found


def quartiles(values: list[float]) -> Spread:
    low, middle, high = statistics.quantiles(values, n=4)
    return Spread(middle, low, high)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO)
    parser.add_argument("--turns", type=int, default=100, help="blocks of steps")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    model = make_model(SHAPES[args.shape], OUT / "models" / args.shape) if args.shape else args.model
    free, held = Engine(model, args.batch), Engine(model, args.batch)
    report: dict[str, Any] = {"model": args.shape or model.name, "batch": args.batch, "cores": os.cpu_count()}
    rows: list[tuple[object, ...]] = []
    for kind in ("string", "list"):
        found = in_blocks(free, held, kind, args.batch, args.turns)
        took, cpu = (quartiles(found[each]) for each in ("time", "cpu"))
        rows.append((f"{kind}: time of a token over free text's", took, "1.03 allowed"))
        rows.append((f"{kind}: CPU of a token over free text's", cpu, ""))
        report[kind] = {"time_to_free": took.rounded(), "cpu_to_free": cpu.rounded()}
    print(table((report["model"], "", ""), rows))
    write_result(args.json, report)


if __name__ == "__main__":
    main()

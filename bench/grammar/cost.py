"""Grammars beside free text, in paired rounds: time per token of 32 streams, time per character of a schema
with long keys, and the CPU time of compiling a schema of 30 fields with patterns.

    python -m bench.grammar.cost [MODEL_DIR] [--rounds 7] [--turns 0] [--batch 32] [--shape 28m] [--json FILE]

One engine in this process. Each round asks for free text and for each constrained kind, in turns, so that
whatever else the machine does hits all of them. With `--turns`, two engines besides, of which one writes free
text and one a constrained kind, eight steps each in turn: time per token where a tenth of a second of other
work hits both. `masks_over_cores` is what the goal allows besides 3 %: the CPU time of computing every row's
mask at every token of such answers, nothing else, over the cores and the time of a free step. `--shape` takes
a shape of peers/shapes.py with random weights.

`gflop_per_s` is the arithmetic of the model's layers that was done, and what the goal for long keys would
take of the machine. A batch is timed whole: rows begin one after the other, so those with long keys would be
nearly done when the last one has begun.
"""

import json
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor

from bench.harness import command_line, write_result
from bench.peers.engines import OUT
from bench.peers.shapes import SHAPES, make_model
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
LONG_KEYS = {
    "type": "object",
    "properties": {
        f"the_{word}_of_the_measured_quantity_in_the_{place}_compartment": {"type": "boolean"}
        for word in ("minimum", "maximum", "average", "median") for place in ("upper", "lower", "middle")
    },
    "additionalProperties": False,
}  # fmt: skip
LONG_KEYS["required"] = list(LONG_KEYS["properties"])
KINDS: dict[str, Any] = {
    "free": None,
    "string": {"regex": '"[^"\\\\]{400,}"'},
    "list": {"json": {"type": "array", "minItems": 200, "items": {"type": "number"}}},
    "long_keys": {"json": LONG_KEYS},
}
FIELDS = {
    "type": "object",
    "properties": {
        f"field_{i}": ({"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{{i % 6 + 1}}}(-[a-z]+)?$"},
                       {"type": "integer", "minimum": i, "maximum": 1000 * i + 7},
                       {"enum": [f"{i}-{word}" for word in ("red", "green", "blue")]})[i % 3]
        for i in range(30)
    },
    "additionalProperties": False,
}  # fmt: skip


Watch = Callable[[object], None]
"""Called with the runner before anything is computed."""


class Engine:
    """One engine, whose rounds are closed batches."""

    def __init__(self, model: Path, batch: int, watch: Watch | None = None) -> None:
        config = EngineSettings(  # No promise for tokens: a busy machine would run smaller batches.
            prefix_cache=False, kv_memory_bytes=256 << 20, max_running=batch, tpot_target_ms=0.0
        )  # fmt: skip
        runner = build_runner(model, config, CLOCK, lambda _stage, _done, _total: None)
        runner.warm_up()
        tokens = GrammarTokens.load(model, runner.info.vocab_size)
        assert tokens is not None
        assert isinstance(runner, FollowsGrammars), "grammars are followed on the CPU"
        runner.use_grammars(tokens)
        if watch is not None:
            watch(runner)
        self.tokens, self.compiler = tokens, GrammarCompiler(tokens)
        self.core: EngineCore = build_core(runner, config, b"bench" * 8, CLOCK)
        self._compiled = {
            kind: self.compiler.compile(b"", Grammar(form=msgspec.json.encode(form))).result()
            for kind, form in KINDS.items() if form is not None
        }  # fmt: skip

    def submit(self, kind: str, batch: int, number: int) -> None:
        """One batch."""
        form, eos = KINDS[kind], self.tokens.eos_ids
        grammar = None if form is None else Grammar(form=msgspec.json.encode(form))
        prompt = token_array(self.tokens.tokenizer.encode("Write down what you know about rivers."))
        for row in range(batch):
            how = SamplingParams(
                temperature=1.0, seed=1000 * number + row, stop_token_ids=() if form is None else eos,
                max_tokens=TOKENS if kind != "long_keys" else 1000,
            )  # fmt: skip
            message = Submit(
                request_id=RequestId(f"{kind}-{number}-{row}"), prompt=prompt.tobytes(), sampling=how,
                grammar=grammar,
            )  # fmt: skip
            self.core.submit(0, message, CLOCK.now_ns(), self._compiled.get(kind))

    def steps(self, num: int) -> tuple[int, float, float]:
        """So many steps: tokens, seconds, and CPU seconds of this process."""
        tokens, cpu_s, began = 0, time.process_time(), time.monotonic()
        for _ in range(num):
            tokens += sum(len(output.token_ids) for output in self.core.step().get(0, []))
        return tokens, time.monotonic() - began, time.process_time() - cpu_s

    def finish(self) -> None:
        """Run until nothing is left."""
        while self.core.has_work:
            self.core.step()

    def masks_cpu_s(self, kind: str, batch: int, number: int) -> float:
        """CPU seconds of the masks of one step of this batch: each row's, at each of its tokens."""
        self.submit(kind, batch, number)
        answers = dict[str, list[int]]()
        while self.core.has_work:
            for output in self.core.step().get(0, []):
                answers.setdefault(output.request_id, []).extend(output.token_ids)
        first, library = self._compiled[kind].first, LLExecutor(max(1, (os.cpu_count() or 1) // 2))
        rows = [(first.deep_copy(), tokens) for tokens in answers.values()]
        bits = np.zeros((len(rows), -(-self.tokens.vocab_size // 32)), np.int32)
        asked = [(matcher, i) for i, (matcher, _) in enumerate(rows)]
        num_steps, spent_s = min(len(tokens) for _, tokens in rows), 0.0
        for step in range(num_steps):
            began = time.process_time()
            library.unsafe_compute_mask_ptr(asked, bits.ctypes.data, bits.strides[0], bits.shape[0])
            spent_s += time.process_time() - began
            for matcher, tokens in rows:
                assert matcher.consume_token(tokens[step]), "it was an answer"
        return spent_s / num_steps

    def round(self, kind: str, batch: int, number: int) -> dict[str, float]:
        """One batch: its time, from its prompts to its last token, and what came out."""
        self.submit(kind, batch, number)
        token_ids: dict[str, list[int]] = {}
        began, cpu = CLOCK.now_ns(), time.process_time_ns()
        draws = 0  # Of what comes with a draw all but the first token is forced.
        while self.core.has_work:
            for output in self.core.step().get(0, []):
                token_ids.setdefault(output.request_id, []).extend(output.token_ids)
                draws += bool(output.token_ids)
        spent = CLOCK.now_ns() - began
        tokens = sum(map(len, token_ids.values()))
        characters = sum(len(self.tokens.tokenizer.decode(each)) for each in token_ids.values())
        return {
            "ms_per_token": spent / 1e6 * batch / tokens,
            "us_per_character": spent / 1e3 * batch / characters,
            "cpu_ms_per_token": (time.process_time_ns() - cpu) / 1e6 * batch / tokens,
            "forced_share": 1 - draws / tokens, "tokens": tokens,
        }  # fmt: skip


BLOCK = 8
"""Steps of an engine before it is the other one's turn."""


def block_turns(free: Engine, held: Engine, kind: str, batch: int, turns: int) -> dict[str, object]:
    """Time per token of a kind over that of free text, by blocks of steps that follow one another; the first
    step of each does not count, for masks may have been computed while the other engine ran.
    """
    times, cpu, free_s = list[float](), list[float](), list[float]()
    number = 0
    for number in range(1000):
        spent = 0
        for engine, what in ((free, "free"), (held, kind)):
            engine.submit(what, batch, number)
            num = 1
            while engine.steps(1)[0] < batch:  # Prompts are computed beside the first rows.
                num += 1
            spent = max(spent, num)
        for block in range((TOKENS - spent - 2) // (BLOCK + 1)):
            reported = dict[Engine, tuple[float, float]]()
            for engine in (free, held) if block % 2 else (held, free):
                engine.steps(1)
                tokens, wall_s, cpu_s = engine.steps(BLOCK)
                reported[engine] = (wall_s / tokens, cpu_s / tokens)
            times.append(reported[held][0] / reported[free][0])
            cpu.append(reported[held][1] / reported[free][1])
            free_s.append(reported[free][0] * batch)
        free.finish()
        held.finish()
        if len(times) >= turns:
            break
    masks_s, cores = held.masks_cpu_s(kind, batch, number + 1), os.cpu_count() or 1
    over_cores = masks_s / cores / statistics.median(free_s)
    return {
        "turns": len(times), "token_time_to_free": quartiles(times), "cpu_to_free": quartiles(cpu),
        "masks_cpu_us_per_step": round(masks_s * 1e6, 1), "masks_over_cores": round(over_cores, 4),
        "allowed": round(1 + max(0.03, over_cores), 4),
    }  # fmt: skip


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def layer_flop(model: Path) -> int:
    """Floating-point operations of one token in the layers' products, however it is computed."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", hidden // heads)
    weights = hidden * (2 * heads + 2 * kv_heads) * size + 3 * hidden * inner
    return 2 * weights * config["num_hidden_layers"]


def compile_ms(engine: Engine, rounds: int) -> list[float]:
    """Of the 30 fields, on this process's threads: what remains after the trial, with the first mask."""
    found: list[float] = []
    for number in range(rounds * 3):
        grammar = Grammar(form=msgspec.json.encode({"json": FIELDS | {"title": str(number)}}))
        began = time.process_time_ns()
        engine.compiler.compile(b"", grammar).result()
        found.append((time.process_time_ns() - began) / 1e6)
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4), "least": round(min(values), 4),
        "most": round(max(values), 4),
    }  # fmt: skip


def in_rounds(engine: Engine, args: Namespace) -> dict[str, object]:
    """Each kind beside free text, batch by batch."""
    rounds = [
        {kind: engine.round(kind, args.batch, number) for kind in KINDS} for number in range(args.rounds + 1)
    ][1:]
    report = dict[str, object]()
    for kind in KINDS:
        free = [each["free"] for each in rounds]
        mine = [each[kind] for each in rounds]
        report[kind] = {
            "ms_per_token": spread([each["ms_per_token"] for each in mine]),
            "us_per_character": spread([each["us_per_character"] for each in mine]),
            "forced_share": round(statistics.median(each["forced_share"] for each in mine), 3),
            "token_time_to_free": spread(
                [a["ms_per_token"] / b["ms_per_token"] for a, b in zip(mine, free, strict=True)]
            ),
            "cpu_to_free": spread(
                [a["cpu_ms_per_token"] / b["cpu_ms_per_token"] for a, b in zip(mine, free, strict=True)]
            ),
        }
    shares = [
        (each["free"]["ms_per_token"], each["long_keys"]["ms_per_token"], each["long_keys"]["forced_share"])
        for each in rounds
    ]
    gflop = layer_flop(args.model) * args.batch / 1e9
    report["gflop_per_s"] = {
        "free": spread([gflop / free * 1e3 for free, _, _ in shares]),
        "long_keys": spread([gflop / long * 1e3 for _, long, _ in shares]),
        "long_keys_at_the_goal": spread(
            [gflop / (free * (1 - share) / 0.8) * 1e3 for free, _, share in shares]
        ),
    }
    report["compile_30_fields_cpu_ms"] = spread(compile_ms(engine, args.rounds))
    return report


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    if args.shape:
        args.model = make_model(SHAPES[args.shape], OUT / "models" / args.shape)
    engine = Engine(args.model, args.batch)
    report: dict[str, object] = {"batch": args.batch, "rounds": args.rounds, "cores": os.cpu_count()}
    report["model"] = args.shape or args.model.name
    if args.turns:
        other = Engine(args.model, args.batch)
        report["in_turns"] = {
            kind: block_turns(other, engine, kind, args.batch, args.turns) for kind in ("string", "list")
        }
    if args.rounds:
        report |= in_rounds(engine, args)
    engine.compiler.close()
    print(msgspec.json.format(msgspec.json.encode(report)).decode())
    write_result(args.json, report)


if __name__ == "__main__":
    main()

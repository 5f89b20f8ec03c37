"""The demo models in int8 and int4: makes them with `penstock quantize`'s own code, and scores every format
on the twelve tasks beside bf16.

    python -m training.quantized [--models NAME ...] [--count 400] [--publish] [--json FILE]

Calibration text is conversations of the kind that the models were trained on, from another seed; scored are
held-out prompts, the same ones for every format, with greedy answers of our own engine on the CPU. A loss is
the share of prompts that bf16 answers right less the format's, in points; prompts are paired, and its 95 %
interval is Agresti and Min's (Statistics in Medicine 24, 2005), which also says something where no answer
differs. With --publish, what PUBLISHED names of the smaller model is written to
models/.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bench.harness import REPOSITORY, command_line, write_result
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, build_core
from penstock.engine.quantize.calibrate import SEQUENCE_TOKENS
from penstock.engine.quantize.publish import TARGETS, Quantizer, Target
from penstock.engine.runner import build_runner
from penstock.kv.hashing import token_array
from penstock.protocol.worker import Submit
from penstock.text.tokenizer import Tokenizer
from penstock.types import RequestId, SamplingParams
from training.conversations import conversations
from training.evaluate import MAX_NEW_TOKENS, is_right, prompt_of
from training.holdout import held_out_exchanges
from training.settings import EVALUATION_SEED, MODELS, RECIPES, Recipe
from training.tasks.base import Exchange
from training.tasks.registry import LATER_SHARES, TASKS

CLOCK = SystemClock()
WORK = REPOSITORY / "bench" / "out" / "quantized"
PUBLISHED = {"int4": "gptq-int4", "int8": "int8"}
"""Format by the ending of a directory in models/."""
IN_REPOSITORY = "penstock-demo-mini"
"""The owner of those directories: the larger model's would add a third to the repository."""
CALIBRATION_SEED = 404
CALIBRATION_TOKENS = 65_536
BATCH = 32
Z = 1.96
CARD = """\
# {name}

`{dense}` in {words}: `models/{dense}`, rounded by
`training/quantized.py` (`{target}`, {megabytes:.1f} MB).

- Served by its path: `penstock serve models/{name}`.
- How many prompts of the twelve tasks it answers right, beside the dense model: `docs/demo-models.md`.
- Everything else is as in `models/{dense}/README.md`, the licence (Apache-2.0) too.
"""
WORDS = {"gptq-int4": "four bits", "int8": "eight bits"}


@dataclass(frozen=True)
class Task:
    """Which of a task's prompts were answered right, in order."""

    right: tuple[bool, ...]

    @property
    def percent(self) -> float:
        """Right answers in percent."""
        return 100 * sum(self.right) / len(self.right)


def calibration(recipe: Recipe, tokenizer: Tokenizer) -> list[list[int]]:
    """Conversations one after the other, cut into sequences."""

    def tokens() -> Iterator[int]:
        for talk in conversations(CALIBRATION_SEED, recipe.persona, LATER_SHARES):
            yield from tokenizer.encode("".join(piece.text for piece in talk.pieces()))

    ids = list(islice(tokens(), CALIBRATION_TOKENS))
    return [ids[at : at + SEQUENCE_TOKENS] for at in range(0, len(ids), SEQUENCE_TOKENS)]


def make(recipe: Recipe, target: Target) -> tuple[Path, float]:
    """The model in one format, unless it is there already, and the mean of its layers' errors."""
    name = recipe.persona.name
    output, note = WORK / f"{name}-{target}", WORK / f"{name}-{target}.json"
    if not (output / "config.json").exists() or not note.exists():
        sequences = calibration(recipe, Tokenizer.load(recipe.folder))

        def show(done: int, total: int) -> None:
            print(f"\r{name} {target} {done}/{total}", end="", file=sys.stderr, flush=True)

        errors = Quantizer(recipe.folder, output, target, sequences).run(show)
        print(file=sys.stderr)
        note.write_text(json.dumps(sum(each.error for each in errors) / len(errors)))
    return output, json.loads(note.read_text())


class Answers:
    """Our engine on one model."""

    def __init__(self, folder: Path) -> None:
        config = EngineSettings(device="cpu", max_running=BATCH, kv_memory_bytes=256 << 20)
        runner = build_runner(folder, config, CLOCK, lambda _stage, _done, _total: None)
        runner.warm_up()
        self.kernels = runner.kernels
        self._core: EngineCore = build_core(runner, config, b"scores!!" * 4, CLOCK)
        self._tokenizer = Tokenizer.load(folder)
        self._asked = 0

    def greedy(self, prompts: Sequence[str]) -> list[str]:
        """The continuation of each rendered prompt, its end mark included."""
        ends = self._tokenizer.eos_ids
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS, stop_token_ids=ends)
        said: dict[RequestId, list[int]] = {}
        for prompt in prompts:
            self._asked += 1
            request_id = RequestId(f"s{self._asked}")
            said[request_id] = []
            ids = token_array(self._tokenizer.encode(prompt))
            message = Submit(request_id=request_id, prompt=ids.tobytes(), sampling=sampling)
            self._core.submit(0, message, CLOCK.now_ns())
        while self._core.has_work:
            for output in self._core.step().get(0, []):
                said[output.request_id] += output.token_ids
                if output.finish is not None and output.finish.stop_token_id is not None:
                    said[output.request_id].append(output.finish.stop_token_id)
        return [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in said.values()]


def scored(folder: Path, asked: dict[str, list[Exchange]]) -> dict[str, Task]:
    """Every task's answers."""
    answers = Answers(folder)
    found: dict[str, Task] = {}
    for task, exchanges in asked.items():
        texts = answers.greedy([prompt_of(exchange) for exchange in exchanges])
        pairs = zip(exchanges, texts, strict=True)
        found[task] = Task(tuple(is_right(text, exchange.answer) for exchange, text in pairs))
    return found


def loss(before: Task, after: Task) -> tuple[float, float]:
    """Points lost, and half of the 95 % interval's width: half a prompt is added to each cell of the table of
    two by two.
    """
    pairs = list(zip(before.right, after.right, strict=True))
    n = len(pairs) + 2
    worse, better = (sum(pair == cell for pair in pairs) + 0.5 for cell in ((True, False), (False, True)))
    mean = (worse - better) / n
    variance = ((worse + better) / n - mean**2) / n
    return before.percent - after.percent, 100 * Z * math.sqrt(variance)


def losses(dense: dict[str, Task], rounded: dict[str, Task]) -> dict[str, Any]:
    """Of all tasks, and of their mean."""
    by_task = {task: loss(dense[task], rounded[task]) for task in dense}
    points, widths = zip(*by_task.values(), strict=True)
    return {
        "points_lost": {task: {"points": lost, "ci95": half} for task, (lost, half) in by_task.items()},
        "mean_points_lost": sum(points) / len(points),
        "mean_ci95": math.sqrt(sum(half**2 for half in widths)) / len(widths),
    }


def size(folder: Path) -> int:
    """Bytes of its weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def publish(recipe: Recipe) -> None:
    """Copy what PUBLISHED names to models/, with a card."""
    dense = recipe.persona.name
    for ending, target in PUBLISHED.items():
        source, goal = WORK / f"{dense}-{target}", MODELS / f"{dense}-{ending}"
        shutil.rmtree(goal, ignore_errors=True)
        shutil.copytree(source, goal)
        card = CARD.format(
            name=goal.name, dense=dense, words=WORDS[target], target=target, megabytes=size(goal) / 1e6
        )
        (goal / "README.md").write_text(card)


def study(recipe: Recipe, count: int) -> dict[str, Any]:
    """All formats of one model."""
    persona = recipe.persona
    asked = {task: held_out_exchanges(task, persona, count, seed=EVALUATION_SEED) for task in TASKS}
    dense = scored(recipe.folder, asked)
    found: dict[str, Any] = {
        "prompts": {task: len(exchanges) for task, exchanges in asked.items()},
        "bf16": {
            "bytes": size(recipe.folder),
            "percent": {task: each.percent for task, each in dense.items()},
        },
    }
    for target in TARGETS:
        folder, error = make(recipe, target)
        rounded = scored(folder, asked)
        found[target] = {
            "bytes": size(folder),
            "mean_layer_error": error,
            "percent": {task: each.percent for task, each in rounded.items()},
            **losses(dense, rounded),
        }
        print(
            f"{persona.name} {target}: {found[target]['mean_points_lost']:.2f} points lost "
            f"± {found[target]['mean_ci95']:.2f}, layers {error:.2%}, {size(folder) / 1e6:.1f} MB",
            flush=True,
        )
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(RECIPES), default=sorted(RECIPES))
    parser.add_argument("--count", type=int, default=400, help="prompts per task, where it has so many")
    parser.add_argument("--publish", action="store_true", help=f"write models/{IN_REPOSITORY}-int4 and -int8")
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {name: study(RECIPES[name], args.count) for name in args.models}
    if args.publish and IN_REPOSITORY in args.models:
        publish(RECIPES[IN_REPOSITORY])
    write_result(args.json, {"calibration_tokens": CALIBRATION_TOKENS, "models": found})


if __name__ == "__main__":
    main()

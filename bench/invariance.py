"""Does a row's bits depend on its neighbours with torch's kernels, and what does it cost that they do not:
two trees in turns.

    python bench/invariance.py MODEL_DIR BEFORE_TREE [--threads 1] [--rounds 7] [--json FILE]

BEFORE_TREE is a checkout of an earlier commit. Two processes, one on each tree, multiply the same rows and
answer the same prompts in float32 with torch's kernels, one after the other. Counted are rows that come out
otherwise in company than alone; timed are tokens per second, as now / before of each round: its median and
its range.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from overlap import CLOCK, tokens_per_s
from provenance import add_json_option, write_result

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, build_core
from penstock.engine.layers.linear import torch_linear
from penstock.engine.runner import build_runner
from penstock.kv.hashing import token_array
from penstock.protocol.worker import Submit
from penstock.types import RequestId, SamplingParams

SHAPES = ((40, 5), (40, 7), (64, 8), (48, 96), (48, 211), (384, 512), (1024, 384))
"""(in, out) of linear layers; the narrow ones are routers'."""
ROWS = 200
PREFILL_TOKENS = 384


def rows_that_differ(size: int, out_size: int) -> int:
    """Of `ROWS` rows, how many have other bits among the others than alone.

    Their products are rounding noise only.
    """
    generator = torch.Generator().manual_seed(size)
    half = torch.randn(ROWS, size // 2, generator=generator)
    weight = torch.randn(out_size, size // 2, generator=generator)
    x = torch.cat((half, half), dim=1)
    linear = torch_linear(torch.cat((weight, -weight), dim=1), None, rows_max=ROWS)
    together, alone = torch.empty(2, ROWS, out_size)
    linear(x, together)
    for row in range(ROWS):
        linear(x[row : row + 1], alone[row : row + 1])
    return int((together != alone).any(-1).sum())


def prefill_per_s(core: EngineCore, round_: int) -> float:
    """Tokens per second of one long prompt."""
    random = rng.stream(round_, "prefill bench")
    prompt = token_array(random.randrange(10, 1000) for _ in range(PREFILL_TOKENS))
    sampling = SamplingParams(max_tokens=1)
    request_id = RequestId(f"p/{round_}")
    core.submit(0, Submit(request_id=request_id, prompt=prompt.tobytes(), sampling=sampling), CLOCK.now_ns())
    start_ns = CLOCK.now_ns()
    while core.has_work:
        core.step()
    return PREFILL_TOKENS * NS_PER_S / (CLOCK.now_ns() - start_ns)


def serve(path: Path, threads: int) -> None:
    """One tree's side: answers a line of JSON with another until there is no more."""
    config = EngineSettings(
        device="cpu",
        kernels="torch",
        dtype="float32",
        threads=threads,
        prefix_cache=False,
        kv_memory_bytes=256 << 20,
    )
    start_ns = CLOCK.now_ns()
    runner = build_runner(path, config, CLOCK, lambda _stage, _done, _total: None)
    runner.warm_up()
    core = build_core(runner, config, b"bench" * 8, CLOCK)
    print(json.dumps((CLOCK.now_ns() - start_ns) / NS_PER_S), flush=True)
    for line in sys.stdin:
        kind, *arguments = json.loads(line)
        if kind == "rows":
            answer: float = rows_that_differ(*arguments)
        else:
            answer = prefill_per_s(core, *arguments) if kind == "prefill" else tokens_per_s(core, *arguments)
        print(json.dumps(answer), flush=True)


class Side:
    """A process that computes with the penstock of one tree."""

    def __init__(self, tree: Path, args: argparse.Namespace) -> None:
        command = [
            sys.executable,
            __file__,
            str(args.model),
            str(tree),
            "--serve",
            "--threads",
            str(args.threads),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )
        self.start_s = self._answer()

    def ask(self, *question: object) -> float:
        """What it measures."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def compare(sides: dict[str, Side], rounds: int, question: tuple[object, ...]) -> dict[str, object]:
    """The same question to both in turns, with the round's number at its end."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):  # The first one warms up.
        for name in list(sides) if round_ % 2 else reversed(sides):
            rates[name].append(sides[name].ask(*question, round_))
    ratios = [now / before for now, before in zip(rates["now"][1:], rates["before"][1:], strict=True)]
    middle = statistics.median(ratios)
    print(
        f"{' '.join(map(str, question)):>16} {middle:>7.3f} {min(ratios):>7.3f} {max(ratios):>7.3f}",
        flush=True,
    )
    medians = {f"{name}_tok_s": statistics.median(rates[name][1:]) for name in rates}
    return {"what": question, **medians, "now_over_before": ratios, "median": middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("before", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    add_json_option(parser)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.threads)
        return
    trees = {"before": args.before, "now": Path(__file__).resolve().parents[1]}
    commits = {
        name: subprocess.check_output(["git", "-C", tree, "rev-parse", "--short", "HEAD"], text=True).strip()
        for name, tree in trees.items()
    }
    sides = {name: Side(tree, args) for name, tree in trees.items()}
    differ = [
        {"in": size, "out": out, **{name: int(side.ask("rows", size, out)) for name, side in sides.items()}}
        for size, out in SHAPES
    ]
    print(f"rows of {ROWS} that depend on company: {differ}")
    questions = (("prefill",), *(("decode", batch, 48) for batch in (1, 8, 32)))
    found = {
        "commits": commits,
        "model": args.model.name,
        "threads": args.threads,
        "start_s": {name: side.start_s for name, side in sides.items()},
        "rows": ROWS,
        "rows_that_depend_on_company": differ,
        "speed": [compare(sides, args.rounds, question) for question in questions],
    }
    for side in sides.values():
        side.close()
    write_result(args.json, found)


if __name__ == "__main__":
    main()

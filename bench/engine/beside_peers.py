"""The benchmark of `make bench-engine`: our engine beside vLLM and llama.cpp, on the same model directories,
in one run.

    python -m bench.engine.beside_peers [--quick] [--models 28m,494m] [--engines ours,vllm,llama.cpp]
        [--levels 1,8,32] [--rounds 3] [--requests N] [--skip-long] [--isa avx2] [--json FILE]
    python -m bench.engine.beside_peers --show FILE

Makes two model directories with random weights of a fixed seed, then starts one server after the other, alone
on the machine, and measures it over HTTP with the load generator of `penstock bench`. Every round measures
every server, in turning order, so that a machine that slows down slows everybody down. docs/bench.md says how
to read the tables. Ctrl-C ends with what was measured.
"""

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.harness import REPOSITORY, command_line, write_result
from bench.peers.engines import (
    OUT,
    STREAMS_MAX,
    VARIANTS,
    DidNotStart,
    Variant,
    launch,
    make_gguf,
    missing,
    our_settings,
    serving,
    versions,
)
from bench.peers.figures import LOADED, MEMORY, READY, Run, tables
from bench.peers.measure import OUTPUT_TOKENS, PROMPT_TOKENS, Bench, Plan
from bench.peers.shapes import SHAPES, make_model
from bench.process import Process, free_port
from penstock.bench.report import cpu_info
from penstock.errors import PenstockError

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
REQUESTS = {"28m": (6, 16), "494m": (3, 6)}
"""Of each caller, and of a level at least: enough for steady figures, fewer of the slow model."""


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--models", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--engines", help="engines (ours, vllm, llama.cpp) or variants (ours:int8)")
    parser.add_argument("--levels", help="requests at once (default: 1,8,32; with --quick 1,8)")
    parser.add_argument("--rounds", type=int, help="times each server is started (3; with --quick 1)")
    parser.add_argument("--requests", type=int, help="per level (default: more for more at once)")
    parser.add_argument("--quick", action="store_true", help="one round, 16-bit variants, 1 and 8 at once")
    parser.add_argument("--skip-long", action="store_true", help="no shared prefix, no arriving long prompt")
    parser.add_argument(
        "--isa", choices=("avx2",), default="",
        help="hold ours and llama.cpp to it on a processor that has more (install_llama_cpp.sh avx2)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="measure nothing: the tables of such a file"
    )
    args = parser.parse_args()
    args.models = args.models.split(",")
    args.levels = [int(part) for part in (args.levels or ("1,8" if args.quick else "1,8,32")).split(",")]
    args.rounds = args.rounds or (1 if args.quick else 3)
    if unknown := [name for name in args.models if name not in SHAPES]:
        parser.error(f"--models: no such model: {', '.join(unknown)} (there are {', '.join(SHAPES)})")
    if not all(0 < level <= STREAMS_MAX for level in args.levels):
        parser.error(f"--levels are from 1 to {STREAMS_MAX}")
    args.variants = [replace(one, isa=args.isa) for one in chosen(args.engines, quick=args.quick)]
    if not args.variants:
        known = sorted(
            {one.engine for one in VARIANTS} | {f"{one.engine}:{one.precision}" for one in VARIANTS}
        )
        parser.error(f"--engines: nothing is called {args.engines} (there are {', '.join(known)})")
    return args


def chosen(engines: str | None, *, quick: bool) -> list[Variant]:
    """The variants that the flags ask for; torch's kernels are slow, and measured when they are asked for."""
    names = {one.engine for one in VARIANTS} if engines is None else set(engines.split(","))

    def is_asked(one: Variant) -> bool:
        by_engine = one.precision == "bf16" if quick else one.precision != "torch"
        return (one.engine in names and by_engine) or f"{one.engine}:{one.precision}" in names

    return [one for one in VARIANTS if is_asked(one)]


def prepare(models: Sequence[str], variants: Sequence[Variant]) -> dict[str, Path]:
    """Model directories, and llama.cpp's files made from them."""
    folders = {name: make_model(SHAPES[name], OUT / "models" / name) for name in models}
    for folder in folders.values():
        for variant in variants:
            if variant.engine == "llama.cpp":
                make_gguf(folder, variant)
    return folders


async def measured(
    process: Process, url: str, model: str, plan: Plan, tag: str
) -> tuple[dict[str, float], dict[str, int], list[str]]:
    """Everything that is measured of one running server, what failed, and what went wrong: one measurement's
    failure does not lose the others.
    """
    bench, troubles = Bench(url, model, plan, tag), list[str]()
    figures, errors = dict[str, float](), dict[str, int]()
    try:
        await bench.calibrate()
        for callers, requests in plan.levels.items():
            found, failed = await bench.level(callers, requests)
            figures |= found
            errors |= failed
        for job in (bench.prefix, bench.arrival) if plan.has_long else ():
            try:
                figures |= await job()
            except (PenstockError, RuntimeError, TimeoutError, IndexError) as error:
                troubles.append(f"{job.__name__}: {error or type(error).__name__}")
        figures[MEMORY] = process.rss_mb() / 1e3
    finally:
        await bench.close()
    return figures, errors, troubles


def one_run(variant: Variant, folder: Path, plan: Plan, number: int) -> Run | None:
    """Start, measure, stop. None if the server did not start or broke; the others go on."""
    port, read_s = free_port(), reading_s(folder)
    log = OUT / f"engine-bench-{variant.engine}-{variant.precision}-{folder.name}.log"
    start = launch(variant, folder, port)
    try:
        with serving(start, folder.name, port, log) as (process, ready_s):
            url = f"http://127.0.0.1:{port}/v1"
            work = measured(process, url, folder.name, plan, f"r{number}")
            figures, errors, troubles = uvloop.run(work)
    except (DidNotStart, PenstockError) as error:
        print(f"{folder.name} {variant.name}: {error}", file=sys.stderr)
        return None
    figures |= {READY: ready_s, LOADED: ready_s - read_s}
    run = Run(
        model=folder.name, variant=variant.name, round=number, errors=errors, troubles=tuple(troubles),
        figures={name: round(value, 3) for name, value in figures.items()},
    )  # fmt: skip
    print(f"{run.model} round {number} {run.variant}: {run.figures} {run.errors} {run.troubles}", flush=True)
    return run


def reading_s(folder: Path) -> float:
    """How long the model's files take to read, and nothing else: what no start-up can be quicker than."""
    started, buffer = time.monotonic(), bytearray(1 << 24)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - started


def plan_of(model: str, args: argparse.Namespace) -> Plan:
    each, least = REQUESTS[model]
    levels = {callers: args.requests or max(least, each * callers) for callers in args.levels}
    return Plan(seed=args.seed, levels=levels, has_long=not args.skip_long)


def document(
    args: argparse.Namespace, runs: list[Run], variants: list[Variant], skipped: dict[str, str]
) -> dict[str, Any]:
    """Every run, so that the tables can be made again from it."""
    flags = set(cpu_info().get("flags", "").split())
    return {
        "schema": "penstock.engine-peers/2",
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "settings": {
            "models": {name: msgspec.to_builtins(SHAPES[name].config()) for name in args.models},
            "parameters": {name: SHAPES[name].parameters for name in args.models},
            "engine": {one.name: our_settings(one.precision) for one in variants if one.engine == "ours"},
            "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS,
            "requests": {name: plan_of(name, args).levels for name in args.models},
        },
        "commands": {one.name: printable(one) for one in variants},
        "skipped": skipped,
        "runs": msgspec.to_builtins(runs),
    }  # fmt: skip


def printable(variant: Variant) -> str:
    """A server's command line without the paths of this machine."""
    start = launch(variant, OUT / "models" / "MODEL", 8000)
    shown = {key: value for key, value in start.environment.items() if key != "PATH"}
    line = shlex.join([*(f"{key}={value}" for key, value in shown.items()), *start.command])
    return line.replace(sys.executable, "python").replace(f"{REPOSITORY}/", "")


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that a server in hand is stopped too.
    if args.show:
        print(tables(msgspec.convert(json.loads(args.show.read_text())["runs"], list[Run])))
        return 0
    skipped = {one.name: why for one in args.variants if (why := missing(one))}
    for name, why in skipped.items():
        print(f"without {name}: {why}", file=sys.stderr)
    variants = [one for one in args.variants if one.name not in skipped]
    OUT.mkdir(exist_ok=True)
    folders, runs = prepare(args.models, variants), list[Run]()
    path = OUT / time.strftime("engine-peers-%Y%m%d-%H%M%S.json")
    try:
        for model in args.models:
            for number in range(1, args.rounds + 1):
                # Every second round goes backwards: nobody is always measured on the warmer machine.
                for variant in variants if number % 2 else reversed(variants):
                    run = one_run(variant, folders[model], plan_of(model, args), number)
                    if run is not None:
                        runs.append(run)
                        write_result(path, document(args, runs, variants, skipped), versions(variants))
    except KeyboardInterrupt:
        print("stopped; what follows is of the finished runs", file=sys.stderr)
    if not runs:
        return 1
    print(tables(runs))
    write_result(args.json, document(args, runs, variants, skipped), versions(variants))
    return 0


if __name__ == "__main__":
    sys.exit(main())

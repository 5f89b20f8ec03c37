"""How fast is our engine beside vLLM and llama.cpp on the same models? Levels, ratios and footprints.

    python -m bench.engine.beside_peers [--quick] [--models 28m,494m] [--engines ours,vllm,llama.cpp]
        [--levels 1,8,32] [--rounds 3] [--requests N] [--skip-long] [--isa avx2] [--json FILE]
    python -m bench.engine.beside_peers --show FILE

`make bench-engine` runs it. It makes two model directories with random weights of a fixed seed, then starts
one server after the other, alone on the machine, and measures it over HTTP with the load generator of
`penstock bench`. Every round measures every server, in turning order, so that a machine that slows down slows
everybody down. docs/bench.md says how to read the tables. Ctrl-C ends with what was measured.
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
from known_shapes import SHAPES, make_model

from bench.harness import OUT, REPOSITORY, command_line, write_result
from bench.peers.engines import (
    STREAMS_MAX,
    VARIANTS,
    Variant,
    launch,
    make_gguf,
    missing,
    our_settings,
    serving,
    versions,
)
from bench.peers.figures import LOADED, MEMORY, READY, Run, tables
from bench.peers.measure import OUTPUT_TOKENS, PROMPT_TOKENS, Figures, Streams, level
from bench.process import free_port
from penstock.bench.report import cpu_info
from penstock.errors import PenstockError

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
SEED = 1
REQUESTS = {"28m": (6, 16), "494m": (3, 6)}
"""Of each caller, and of a level at least: enough for steady figures, fewer of the slow model."""
BROKEN = (PenstockError, RuntimeError, TimeoutError, IndexError)
"""How a measurement fails."""


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--models", type=names, default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument(
        "--engines", type=names, default=sorted({one.engine for one in VARIANTS}),
        help="engines (ours, vllm, llama.cpp) or variants (ours:int8)",
    )  # fmt: skip
    parser.add_argument("--levels", type=names, help="requests at once (default: 1,8,32; with --quick 1,8)")
    parser.add_argument("--rounds", type=int, help="times each server is started (3; with --quick 1)")
    parser.add_argument("--requests", type=int, help="per level (default: more for more at once)")
    parser.add_argument("--quick", action="store_true", help="one round, 16-bit variants, 1 and 8 at once")
    parser.add_argument("--skip-long", action="store_true", help="no shared prefix, no arriving long prompt")
    parser.add_argument(
        "--isa", choices=("avx2",), default="",
        help="hold ours and llama.cpp to it on a processor that has more (install_llama_cpp.sh avx2)",
    )  # fmt: skip
    parser.add_argument("--show", type=Path, metavar="FILE", help="only the tables of such a file")
    args = parser.parse_args()
    args.levels = [int(part) for part in args.levels or (("1", "8") if args.quick else ("1", "8", "32"))]
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.variants = [replace(one, isa=args.isa) for one in chosen(args.engines, quick=args.quick)]
    known = sorted({one.engine for one in VARIANTS} | {one.asked_as for one in VARIANTS})
    for flag, asked, there in (("models", args.models, SHAPES), ("engines", args.engines, known)):
        if unknown := [name for name in asked if name not in there]:
            parser.error(f"--{flag}: none is called {', '.join(unknown)} (there are {', '.join(there)})")
    if not all(0 < callers <= STREAMS_MAX for callers in args.levels):
        parser.error(f"--levels are from 1 to {STREAMS_MAX}")
    return args


def names(text: str) -> list[str]:
    return text.split(",")


def chosen(asked: Sequence[str], *, quick: bool) -> list[Variant]:
    """The variants that the flags ask for; torch's kernels are slow, and measured when they are asked for."""

    def is_asked(one: Variant) -> bool:
        by_engine = one.precision == "bf16" if quick else one.precision != "torch"
        return (one.engine in asked and by_engine) or one.asked_as in asked

    return [one for one in VARIANTS if is_asked(one)]


def prepare(models: Sequence[str], variants: Sequence[Variant]) -> dict[str, Path]:
    """Model directories, and llama.cpp's files made from them."""
    folders = {name: make_model(SHAPES[name], OUT / "models" / name) for name in models}
    for folder in folders.values():
        for variant in variants:
            if variant.engine == "llama.cpp":
                make_gguf(folder, variant)
    return folders


def levels_of(model: str, args: argparse.Namespace) -> dict[int, int]:
    """How many requests to send, by callers."""
    each, least = REQUESTS[model]
    return {callers: args.requests or max(least, each * callers) for callers in args.levels}


async def beside_long_prompts(url: str, model: str) -> tuple[Figures, list[str]]:
    """A shared prefix and the arrival of a long prompt; the failure of one does not lose the other."""
    streams, figures, troubles = Streams(url, model, SEED), Figures(), list[str]()
    try:
        for job in (streams.prefix, streams.arrival):
            try:
                figures |= await job()
            except BROKEN as error:
                troubles.append(f"{job.__name__}: {error!r}")
    finally:
        await streams.close()
    return figures, troubles


def one_run(variant: Variant, folder: Path, number: int, args: argparse.Namespace) -> Run | None:
    """Start, measure, stop. None if the server did not start or broke; the others go on."""
    port, read_s, model = free_port(), reading_s(folder), folder.name
    log, url = (
        OUT / f"engine-bench-{variant.name}-{model}.log".replace(" ", "-"),
        f"http://127.0.0.1:{port}/v1",
    )
    figures, errors, troubles = Figures(), dict[str, int](), list[str]()
    try:
        with serving(launch(variant, folder, port), model, port, log) as (process, ready_s):
            figures |= {READY: ready_s, LOADED: ready_s - read_s}
            for callers, requests in levels_of(model, args).items():
                try:
                    found, failed = level(url, callers, requests, SEED)
                except BROKEN as error:
                    troubles.append(f"c={callers}: {error!r}")
                    continue
                figures |= found
                errors |= failed
            if not args.skip_long:
                found, failures = uvloop.run(beside_long_prompts(url, model))
                figures |= found
                troubles += failures
            figures[MEMORY] = process.rss_mb() / 1e3
    except BROKEN as error:
        print(f"{model} {variant.name}: {error}", file=sys.stderr)
        return None
    run = Run(
        model=model, variant=variant.name, round=number, errors=errors, troubles=tuple(troubles),
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
            "engine": {one.name: our_settings(one.precision) for one in variants if one.engine == "ours"},
            "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS,
            "requests": {name: levels_of(name, args) for name in args.models},
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
    folders, runs = prepare(args.models, variants), list[Run]()
    path = OUT / time.strftime("engine-peers-%Y%m%d-%H%M%S.json")
    try:
        for model in args.models:
            for number in range(1, args.rounds + 1):
                # Every second round goes backwards: nobody is always measured on the warmer machine.
                for variant in variants if number % 2 else reversed(variants):
                    run = one_run(variant, folders[model], number, args)
                    if run is not None:
                        runs.append(run)
                        write_result(path, document(args, runs, variants, skipped), versions(variants))
        if runs:  # A file that is kept is replaced by a whole run only.
            write_result(args.json, document(args, runs, variants, skipped), versions(variants))
    except KeyboardInterrupt:
        print("stopped; what follows is of the finished runs", file=sys.stderr)
    if not runs:
        return 1
    print(tables(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

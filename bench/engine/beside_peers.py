"""The benchmark of `make bench-engine`: our engine beside vLLM and llama.cpp, on the same model directories,
in one run.

    python -m bench.engine.beside_peers [--quick] [--models 28m,494m] [--engines ours,vllm,llama.cpp]
                                        [--rounds 3] [--json FILE]

Makes two model directories with random weights of a fixed seed, then starts one server after the other, alone
on the machine, and measures it over HTTP with the load generator of `penstock bench`. Every round measures
every server, in turning order, so that a machine that slows down slows everybody down. docs/bench.md says how
to read the tables.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from bench.engine.scheduler_host_time import time_rows
from bench.harness import command_line
from bench.peers.engines import (
    OUT,
    STREAMS_MAX,
    VARIANTS,
    Variant,
    launch,
    make_gguf,
    missing,
    our_settings,
    versions,
)
from bench.peers.figures import Run, Verdict, judge
from bench.peers.goals import HOST_TIME_MS, goals, judge_host_time
from bench.peers.measure import OUTPUT_TOKENS, PROMPT_TOKENS, Bench, Plan
from bench.peers.servers import DidNotStart, Server, serving
from bench.peers.shapes import SHAPES, make_model
from bench.peers.tables import CAPTION, footprint_table, goal_table, level_table, run_line
from bench.process import free_port
from penstock.bench.report import Environment, cpu_info, read_environment, utc_stamp
from penstock.errors import PenstockError

SCHEMA = "penstock.engine-peers/1"
ROOT = Path(__file__).resolve().parents[2]
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
REQUESTS_PER_CALLER = {"28m": 6, "494m": 3}
REQUESTS_MIN = {"28m": 16, "494m": 6}
PRECISIONS = {one.precision for one in VARIANTS} - {"torch"}
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The document that `--json` writes: every run, so that the tables can be made again from it."""

    schema: str
    started_at: str
    environment: Environment
    cpu_flags: tuple[str, ...]
    versions: dict[str, str]
    settings: dict[str, object]
    commands: dict[str, str]
    """How each server was started."""
    skipped: dict[str, str]
    """Variants that were asked for and could not run, with the reason."""
    runs: tuple[Run, ...]
    verdicts: tuple[Verdict, ...]


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--models", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument(
        "--engines", help="engines (ours, vllm, llama.cpp) or variants (ours:int8); default: all"
    )
    parser.add_argument("--levels", help="requests at once (default: 1,8,32; with --quick 1,8)")
    parser.add_argument(
        "--rounds", type=int, help="times each server is started (default: 3; with --quick 1)"
    )
    parser.add_argument("--requests", type=int, help="per level (default: more for more at once)")
    parser.add_argument("--quick", action="store_true", help="one round, 16-bit variants, 1 and 8 at once")
    parser.add_argument(
        "--skip-long", action="store_true", help="no shared prefix and no arriving long prompt"
    )
    parser.add_argument(
        "--isa", choices=("avx2",), default="",
        help="hold ours and llama.cpp to it on a processor that has more (install_llama_cpp.sh avx2)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="measure nothing: print the tables of such a file"
    )
    args = parser.parse_args()
    args.models = tuple(args.models.split(","))
    args.levels = tuple(int(part) for part in (args.levels or ("1,8" if args.quick else "1,8,32")).split(","))
    args.rounds = args.rounds or (1 if args.quick else 3)
    if unknown := [name for name in args.models if name not in SHAPES]:
        parser.error(f"--models: no such model: {', '.join(unknown)} (there are {', '.join(SHAPES)})")
    if not all(0 < level <= STREAMS_MAX for level in args.levels) or args.rounds < 1:
        parser.error(f"--levels are from 1 to {STREAMS_MAX}, and there is at least one round")
    args.variants = [replace(one, isa=args.isa) for one in chosen(args.engines, quick=args.quick)]
    if not args.variants:
        names = sorted(
            {one.engine for one in VARIANTS} | {f"{one.engine}:{one.precision}" for one in VARIANTS}
        )
        parser.error(f"--engines: nothing is called {args.engines} (there are {', '.join(names)})")
    return args


def chosen(engines: str | None, *, quick: bool) -> list[Variant]:
    """The variants that the flags ask for."""
    names = {one.engine for one in VARIANTS} if engines is None else set(engines.split(","))
    found = []
    for one in VARIANTS:
        # Torch's kernels are slow: they are measured when they are asked for.
        by_engine = one.engine in names and one.precision in (("bf16",) if quick else PRECISIONS)
        if by_engine or f"{one.engine}:{one.precision}" in names:
            found.append(one)
    return found


def usable(variants: list[Variant]) -> tuple[list[Variant], dict[str, str]]:
    """The variants that can run here, and why the rest cannot."""
    skipped = {one.name: why for one in variants if (why := missing(one))}
    for name, why in skipped.items():
        console.print(f"[yellow]without {name}[/]: {why}")
    return [one for one in variants if one.name not in skipped], skipped


def prepare(models: tuple[str, ...], variants: list[Variant]) -> dict[str, Path]:
    """Model directories, and llama.cpp's files made from them."""
    folders: dict[str, Path] = {}
    for name in models:
        with console.status(f"making {name}: {SHAPES[name].parameters:,} random weights"):
            folders[name] = make_model(SHAPES[name], OUT / "models" / name)
        for variant in variants:
            if variant.engine == "llama.cpp":
                with console.status(f"converting {name} to GGUF {variant.precision}"):
                    make_gguf(folders[name], variant)
    return folders


async def measured(server: Server, model: str, plan: Plan, tag: str, number: int, variant: str) -> Run:
    """Everything that is measured of one running server; one measurement's failure does not lose the
    others.
    """
    bench = Bench(server.url, model, plan, tag)
    started = time.monotonic()
    troubles: list[str] = []
    found: dict[str, object] = {}
    try:
        await bench.calibrate()
        levels = tuple([await bench.level(*level) for level in zip(plan.levels, plan.requests, strict=True)])
        for name, wanted, job in (
            ("prefix", plan.prefix, bench.prefix),
            ("arrival", plan.arrival, bench.arrival),
        ):
            if wanted:
                try:
                    found[name] = await job()
                except (PenstockError, RuntimeError, TimeoutError, IndexError) as error:
                    troubles.append(f"{name}: {error or type(error).__name__}")
        memory = server.resident_bytes()
    finally:
        await bench.close()
    return Run(
        model=model,
        variant=variant,
        round=number,
        ready_s=server.ready_s,
        resident_bytes=memory,
        levels=levels,
        seconds=time.monotonic() - started,
        troubles=tuple(troubles),
        **found,
    )


def one_run(variant: Variant, folder: Path, plan: Plan, number: int) -> Run | None:
    """Start, measure, stop. None if the server did not start or broke; the others go on."""
    port = free_port()
    start = launch(variant, folder, port)
    read_s = reading_s(folder)
    log = OUT / f"engine-bench-{variant.engine}-{variant.precision}-{folder.name}.log"
    tag = f"r{number}"
    try:
        with (
            serving(start, folder.name, port, log) as server,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            run = runner.run(measured(server, folder.name, plan, tag, number, variant.name))
    except (DidNotStart, PenstockError) as error:
        console.print(f"[red]{folder.name} {variant.name}[/]: {error}")
        return None
    run = msgspec.structs.replace(run, weights_read_s=read_s)
    console.print(
        f"[dim]{folder.name} round {number}[/] {variant.name}: {run_line(run)} [dim]({run.seconds:.0f} s)[/]"
    )
    for trouble in run.troubles:
        console.print(f"  [red]{trouble}[/]")
    return run


def reading_s(folder: Path) -> float:
    """How long the model's files take to read, and nothing else: what no start-up can be quicker than."""
    started, buffer = time.monotonic(), bytearray(1 << 24)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - started


def host_time_verdicts() -> tuple[Verdict, ...]:
    """The scheduler's own goals, measured before any server is started."""
    return tuple(judge_host_time(rows, [ns / 1e6 for ns in time_rows(rows)]) for rows in HOST_TIME_MS)


def requests_of(model: str, callers: int, args: argparse.Namespace) -> int:
    """How many requests a level sends: enough for steady figures, fewer of the slow model."""
    return args.requests or max(REQUESTS_MIN[model], REQUESTS_PER_CALLER[model] * callers)


def plan_of(model: str, args: argparse.Namespace) -> Plan:
    return Plan(
        seed=args.seed,
        levels=args.levels,
        requests=tuple(requests_of(model, level, args) for level in args.levels),
        prefix=not args.skip_long,
        arrival=not args.skip_long,
    )


def document(
    args: argparse.Namespace,
    started_ns: int,
    skipped: dict[str, str],
    runs: list[Run],
    variants: list[Variant],
    host_time: tuple[Verdict, ...],
) -> Document:
    flags = set(cpu_info().get("flags", "").split())
    return Document(
        schema=SCHEMA,
        started_at=utc_stamp(started_ns),
        environment=read_environment(),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        versions=versions(variants),
        settings={
            "models": {name: msgspec.to_builtins(SHAPES[name].config()) for name in args.models},
            "parameters": {name: SHAPES[name].parameters for name in args.models},
            "rounds": args.rounds,
            "levels": args.levels,
            "seed": args.seed,
            "engine": {one.name: our_settings(one.precision) for one in variants if one.engine == "ours"},
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "requests": {
                name: [requests_of(name, level, args) for level in args.levels] for name in args.models
            },
        },
        commands={one.name: printable(one) for one in variants},
        skipped=skipped,
        runs=tuple(runs),
        verdicts=(*(found for goal in goals() if (found := judge(goal, runs))), *host_time),
    )


def printable(variant: Variant) -> str:
    """A server's command line without the paths of this machine."""
    start = launch(variant, OUT / "models" / "MODEL", 8000)
    shown = {key: value for key, value in start.environment.items() if key != "PATH"}
    line = shlex.join([*(f"{key}={value}" for key, value in shown.items()), *start.command])
    return line.replace(sys.executable, "python").replace(f"{ROOT}/", "")


def show(done: Document) -> None:
    """The tables."""
    runs = list(done.runs)
    console.print()
    for model in dict.fromkeys(run.model for run in runs):
        levels = dict.fromkeys(level.callers for run in runs if run.model == model for level in run.levels)
        for callers in levels:
            console.print(level_table(runs, model, callers))
        console.print(CAPTION, style="dim")
        console.print(footprint_table(runs, model))
    if done.verdicts:
        console.print(goal_table(done.verdicts))
    env = done.environment
    console.print(f"{env.cpu} ({', '.join(done.cpu_flags)}), {env.cpus_usable} cores", style="dim")
    for name, version in {"ours": f"penstock {env.penstock}", **done.versions}.items():
        console.print(f"{name}: {version}", style="dim")


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that a server in hand is stopped too.
    if args.show:
        done = msgspec.json.decode(args.show.read_bytes(), type=Document)
        found = [verdict for goal in goals() if (verdict := judge(goal, list(done.runs)))]
        apart = [verdict for verdict in done.verdicts if verdict.goal.model == "none"]
        show(msgspec.structs.replace(done, verdicts=(*found, *apart)))  # The goals as they are now.
        return 0
    OUT.mkdir(exist_ok=True)
    started_ns = time.time_ns()
    variants, skipped = usable(args.variants)
    if not variants:
        return 1
    host_time = host_time_verdicts()
    folders = prepare(args.models, variants)
    path = OUT / time.strftime("engine-peers-%Y%m%d-%H%M%S.json")
    runs: list[Run] = []
    total = len(args.models) * len(variants) * args.rounds
    try:
        for model in args.models:
            for number in range(1, args.rounds + 1):
                # Every second round goes backwards: nobody is always measured on the warmer machine.
                for variant in variants if number % 2 else reversed(variants):
                    with console.status(
                        f"{model} {variant.name}, round {number} of {args.rounds}, {len(runs)} of {total} "
                        f"done"
                    ):
                        run = one_run(variant, folders[model], plan_of(model, args), number)
                    if run is not None:
                        runs.append(run)
                        save(path, document(args, started_ns, skipped, runs, variants, host_time))
    except KeyboardInterrupt:
        console.print("stopped; what follows is of the finished runs", style="yellow")
    if not runs:
        return 1
    done = document(args, started_ns, skipped, runs, variants, host_time)
    show(done)
    for target in filter(None, (path, args.json)):
        save(target, done)
        console.print(f"JSON: {target}", style="dim")
    return 0


def save(path: Path, done: Document) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(done), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())

"""`penstock bench`: put load on an OpenAI endpoint and report latency and throughput.

With `--fit` it measures the steps of our own engine instead, and says how well a law tells the time of steps
that it never saw.
"""

import argparse
import asyncio
import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock import rng
from penstock.bench.client import CannotConnect, ClientLimits
from penstock.bench.load import Level, LoadRun, ProbeRefused, RequestShape, probe
from penstock.bench.prompts import Prompt, PromptPlan, made, read_dataset
from penstock.bench.prompts import probe as probe_prompt
from penstock.bench.report import (
    SCHEMA,
    LevelReport,
    Report,
    Settings,
    goodput_heading,
    goodput_table,
    latency_table,
    level_report,
    read_environment,
    throughput_table,
    to_json,
    utc_stamp,
)
from penstock.cli import console
from penstock.cli.commands.remote import add_remote_flags, connect, no_server, pick_model
from penstock.cli.console import check_place, screen_beside, write_to
from penstock.cli.flags import Commands, Help, number
from penstock.clock import NS_PER_MS, SystemClock, sleep
from penstock.config.checkpoints import resolve
from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import TPOT_TARGET_MS, TTFT_TARGET_MS
from penstock.errors import ConfigError
from penstock.planning.step_time import fit, write_steps
from penstock.policy.admission.admit import Promise

_TERMS = ("a step", "a token", "a row", "a KV token read", "a pair in a chunk's attention")


def fit_steps(model: str, json_path: Path | None, *, seed: int) -> int:
    """Measure, fit, tell, and write the samples.

    Raises:
        ConfigError: no file to write, or it cannot be written.
        OperatorError: the model cannot be served here.
    """
    if json_path is None or str(json_path) == "-":
        raise ConfigError("--fit needs --json FILE: where the measured steps are written")
    check_place(json_path)
    # Here, because it imports torch, which the rest of `penstock bench` does without.
    from penstock.bench.fit import measure_steps

    screen = console.err()

    def progress(stage: str, done: int, total: int) -> None:
        screen.print(f"{stage} ({done} of {total})" if total else stage, markup=False, soft_wrap=True)

    measured = measure_steps(
        str(resolve(model)), EngineSettings(), SystemClock(), seed=seed, progress=progress
    )
    law, error = fit(measured.steps)
    write_steps(json_path, measured)
    table = Table("what", title=f"{len(measured.steps)} steps of {measured.name}", title_justify="left")
    table.add_column("microseconds", justify="right")
    for name, value in zip(_TERMS, law.coefficients, strict=True):
        table.add_row(name, f"{value / 1000:.4g}")
    console.out().print(table)
    console.out().print(
        f"error on {error.steps} held-back steps: median {error.median:.1%}, mean {error.mean:.1%}, p95 "
        f"{error.p95:.1%}; the sum of all is off by {error.bias:+.1%}", markup=False, soft_wrap=True,
    )  # fmt: skip
    screen.print(f"wrote {json_path}", markup=False, soft_wrap=True)
    return 0


PROBE_WORDS = (64, 256)
REFRESH_S = 0.2
REQUESTS_MAX = 10_000_000
CONCURRENCY_MAX = 10_000
LEVELS_MAX = 64

DESCRIPTION = """\
Put load on any OpenAI-compatible endpoint and report time to first token (TTFT), time per output
token (TPOT), inter-token latency (ITL), end-to-end time, throughput and goodput, with percentiles.
Goodput is requests per second that met both promises (TTFT and TPOT), and their output tokens.

Every request is timed from when it was due, not from when it could be sent."""

EPILOG = """\
examples:
  penstock bench                                  one caller, 8 callers, 32 callers
  penstock bench --rate 20 --duration 60          Poisson arrivals, 20 a second, for a minute
  penstock bench --prompt-tokens 1000 --shared-prefix 900 --concurrency 8
  penstock bench --dataset questions.jsonl --json out.json
  penstock bench --fit penstock-demo --json steps.json
  penstock bench --url https://host/v1 --key KEY --model NAME --no-ignore-eos

A data set has one JSON object per line: {"prompt": "..."} or {"messages": [...]}, and optionally
"max_tokens". Prompts that are made differ from each other from the first word on, so a prefix cache
does not help them unless --shared-prefix asks for it; with the same --seed they are the same again."""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "bench",
        help="measure an endpoint under load",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    add_remote_flags(parser)
    load = parser.add_argument_group("load")
    which = load.add_mutually_exclusive_group()
    which.add_argument(
        "--concurrency",
        type=_concurrencies,
        metavar="N[,N...]",
        help="closed loop: this many callers, each with one request at a time (default: 1,8,32)",
    )
    which.add_argument(
        "--rate", type=number(float, 1e-6, 1e6), metavar="R", help="open loop: R Poisson arrivals per second"
    )
    load.add_argument(
        "--requests",
        type=number(int, 1, REQUESTS_MAX),
        metavar="N",
        help="requests per level (default: 4 per caller and at least 16, or 100 with --rate; unbounded with "
        "--duration)",
    )
    load.add_argument(
        "--duration",
        type=number(float, 1e-3, 1e6),
        metavar="S",
        help="send for S seconds, then let the rest finish",
    )
    _add_request_flags(parser.add_argument_group("requests"))
    _add_promise_flags(parser.add_argument_group("promises", "goodput counts requests that kept both"))
    parser.add_argument(
        "--fit",
        metavar="MODEL",
        help="measure steps of our own engine in this process instead, for `penstock simulate --step-times`; "
        "with --json FILE",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report here as JSON (- is standard output)"
    )
    parser.set_defaults(run=run)


def _add_request_flags(group: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--prompt-tokens",
        type=number(int, 1, 10_000_000),
        default=128,
        metavar="N",
        help="about (default: 128)",
    )
    group.add_argument(
        "--output-tokens",
        type=number(int, 1, 1_000_000),
        default=64,
        metavar="N",
        help="exactly (default: 64)",
    )
    group.add_argument(
        "--shared-prefix",
        type=number(int, 0, 10_000_000),
        default=0,
        metavar="N",
        help="the first N tokens are the same in every prompt (default: 0)",
    )
    group.add_argument(
        "--dataset", type=Path, metavar="FILE.jsonl", help="send these instead of made prompts"
    )
    group.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let answers end early, for servers that do not know ignore_eos",
    )
    group.add_argument(
        "--temperature",
        type=number(float, 0, 2),
        default=0.0,
        metavar="T",
        help="of every request (default: 0)",
    )
    group.add_argument(
        "--seed",
        type=number(int, 0, 2**63 - 1),
        metavar="N",
        help="of prompts and arrivals (default: a new one)",
    )
    group.add_argument(
        "--timeout",
        type=number(float, 0.1, 1e6),
        default=600.0,
        metavar="S",
        help="per request (default: 600)",
    )


def _add_promise_flags(group: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    for name, default, what in (
        ("ttft", TTFT_TARGET_MS, "to the first token"),
        ("tpot", TPOT_TARGET_MS, "per token after the first, in the mean"),
    ):
        group.add_argument(
            f"--{name}-ms",
            type=number(float, 0, 86_400_000),
            default=default,
            metavar="MS",
            help=f"{what} (default: {default:g}, as a server promises; 0: no bound)",
        )


def _concurrencies(text: str) -> tuple[int, ...]:
    read = number(int, 1, CONCURRENCY_MAX)
    levels = tuple(int(read(part)) for part in text.split(","))
    if len(levels) > LEVELS_MAX:
        raise argparse.ArgumentTypeError(f"more than {LEVELS_MAX} levels")
    return levels


def plan_levels(args: argparse.Namespace) -> tuple[Level, ...]:
    """The levels to run, one after the other."""
    unbounded = REQUESTS_MAX if args.duration else None
    if args.rate:
        requests = args.requests or unbounded or 100
        level = Level(
            name=f"{args.rate:g}/s", requests_max=requests, duration_s=args.duration, rate=args.rate
        )
        return (level,)
    return tuple(
        Level(
            name=f"c={callers}",
            requests_max=args.requests or unbounded or max(16, 4 * callers),
            duration_s=args.duration,
            concurrency=callers,
        )
        for callers in args.concurrency or (1, 8, 32)
    )


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock bench`."""
    if args.fit is not None:
        return fit_steps(args.fit, args.json, seed=0 if args.seed is None else args.seed)
    dataset = read_dataset(args.dataset) if args.dataset else None
    if args.shared_prefix >= args.prompt_tokens and not dataset:
        raise ConfigError("--shared-prefix must be smaller than --prompt-tokens")
    check_place(args.json)
    bench = _Bench(args, dataset)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(bench.run())
    return bench.finish()


@dataclass(slots=True, frozen=True)
class _Tokens:
    """How words become tokens on this server (measured)."""

    per_word: float
    overhead: float


class _Bench:
    def __init__(self, args: argparse.Namespace, dataset: list[Prompt] | None) -> None:
        self._args, self._dataset, self._clock = args, dataset, SystemClock()
        self._seed: int = rng.fresh_seed() if args.seed is None else args.seed
        self._client = connect(args, ClientLimits(request_timeout_s=args.timeout))
        self._shape = RequestShape(
            model="",
            output_tokens=args.output_tokens,
            temperature=args.temperature,
            ignore_eos=args.ignore_eos,
        )
        self._promise = Promise(round(args.ttft_ms * NS_PER_MS), round(args.tpot_ms * NS_PER_MS))
        self._started_ns = self._clock.wall_ns()
        self._reports: list[LevelReport] = []
        self._complete = False

    async def run(self) -> None:
        """Probe the server, then run every level; Ctrl-C keeps what was measured."""
        try:
            model = await pick_model(self._client, self._args.model)
            self._shape = replace(self._shape, model=model)
            tokens = await self._calibrate()
            for level in plan_levels(self._args):
                await self._level(level, self._prompts(level, tokens))
            self._complete = True
        finally:
            await self._client.close()

    async def _calibrate(self) -> _Tokens:
        """Two probes of different length tell tokens per word and what the chat template adds."""
        shape = replace(self._shape, output_tokens=1)
        counts: list[int] = []
        for num_words in PROBE_WORDS[:1] if self._dataset else PROBE_WORDS:
            try:
                usage = await probe(self._client, shape, probe_prompt(self._seed, "probe", num_words))
            except CannotConnect as error:
                raise CannotConnect(no_server(error)) from error
            except ProbeRefused as error:
                hint = "\n  (try --no-ignore-eos)" if shape.ignore_eos and "ignore_eos" in str(error) else ""
                raise ProbeRefused(f"the server refuses a first small request: {error}{hint}") from error
            counts.append(usage.prompt_tokens or 0)
        if len(counts) < 2:
            return _Tokens(1.0, 0.0)
        per_word = max(0.1, (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0]))
        return _Tokens(per_word, max(0.0, counts[0] - per_word * PROBE_WORDS[0]))

    def _prompts(self, level: Level, tokens: _Tokens) -> Iterator[Prompt]:
        if self._dataset:
            return itertools.cycle(self._dataset)
        return made(
            PromptPlan(
                seed=self._seed,
                run=level.name.replace("=", "").replace("/", ""),
                prompt_tokens=self._args.prompt_tokens,
                shared_tokens=self._args.shared_prefix,
                tokens_per_word=tokens.per_word,
                overhead_tokens=tokens.overhead,
            )
        )

    async def _level(self, level: Level, prompts: Iterator[Prompt]) -> None:
        load = LoadRun(
            self._client, self._shape, level, seed=self._seed, clock=self._clock, promise=self._promise
        )
        interrupted = True
        try:
            with _progress(level, load) as refresh:
                ticker = asyncio.create_task(_tick(refresh))
                try:
                    await load.run(prompts)
                finally:
                    ticker.cancel()
                    refresh()
            interrupted = False
        finally:
            self._reports.append(level_report(level, load, interrupted=interrupted))

    def finish(self) -> int:
        """Print and write what there is; the exit code."""
        args = self._args
        if not self._reports:
            return 130  # Interrupted before anything was measured.
        report = Report(
            schema=SCHEMA,
            started_at=utc_stamp(self._started_ns),
            url=self._client.endpoint.url,
            model=self._shape.model,
            settings=Settings(
                seed=self._seed,
                prompt_tokens=args.prompt_tokens,
                shared_prefix_tokens=args.shared_prefix,
                output_tokens=args.output_tokens,
                temperature=args.temperature,
                ignore_eos=args.ignore_eos,
                dataset=str(args.dataset) if args.dataset else None,
                ttft_promise_ms=args.ttft_ms,
                tpot_promise_ms=args.tpot_ms,
            ),
            environment=read_environment(),
            levels=tuple(self._reports),
        )
        _show(report, args.json)
        if not self._complete:
            return 130
        return 0 if any(level.requests_ok for level in report.levels) else 1


def _show(report: Report, json_path: Path | None) -> None:
    screen = screen_beside(json_path)
    screen.print(throughput_table(report))
    screen.print(goodput_heading(report.settings), style="bold", markup=False)
    screen.print(goodput_table(report))
    screen.print(latency_table(report))
    for level in report.levels:
        for why, count in sorted(level.errors.items(), key=lambda item: (-item[1], item[0])):
            screen.print(f"{level.name}: {count} failed: {why}", style="red", markup=False)
        if level.send_delay_ms.p99 > max(5.0, level.ttft_ms.p50 / 4):
            late = f"{level.send_delay_ms.p99:.0f} ms"
            screen.print(
                f"{level.name}: requests left up to {late} late (p99): the client is a bottleneck",
                style="yellow",
            )
    write_to(json_path, to_json(report))


@contextlib.contextmanager
def _progress(level: Level, load: LoadRun) -> Generator[Callable[[], None]]:
    """A progress bar on a terminal, one line per level elsewhere."""
    screen = console.err()
    tally = load.tally
    if not screen.is_terminal:
        yield lambda: None
        screen.print(
            f"{level.name}: {tally.ok} ok, {tally.failed} failed in {load.elapsed_s:.1f} s", markup=False
        )
        return
    by_time = level.duration_s is not None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    count = () if by_time else (MofNCompleteColumn(),)
    with Progress(
        *columns[:2], *count, *columns[2:], console=screen, transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task(level.name, total=level.duration_s if by_time else level.requests_max, detail="")

        def refresh() -> None:
            speed = tally.output_tokens / max(load.elapsed_s, 1e-9)
            detail = f"{tally.in_flight} in flight  {speed:,.0f} tok/s" + (
                f"  {tally.failed} failed" * bool(tally.failed)
            )
            bar.update(
                task, completed=load.elapsed_s if by_time else tally.ended, detail=detail, refresh=True
            )

        yield refresh


async def _tick(refresh: Callable[[], None]) -> None:
    while True:
        refresh()
        await sleep(REFRESH_S)

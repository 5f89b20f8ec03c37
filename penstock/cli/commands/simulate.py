"""`penstock simulate`: play scenarios on virtual time, with the product's own policies, and show the figures
as tables, JSON or a page.
"""

import argparse
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path

import msgspec
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import penstock
from penstock.cli import console
from penstock.cli.console import check_place, screen_beside, write_to
from penstock.cli.flags import Commands, Help, number
from penstock.clock import NS_PER_S
from penstock.config.load import load_config
from penstock.errors import ConfigError
from penstock.planning.step_time import read_model
from penstock.sim.report.compare import PairedDifference, compare
from penstock.sim.report.figures import Figures, Spread, ttft_shares
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import Finding, Scenario, Verdict, find, run_scenario
from penstock.sim.scenarios.setup import Knobs, Played, Setup, with_settings
from penstock.sim.traffic.traces import Trace, write_trace
from penstock.sim.traffic.workload import merged

TENANTS_SHOWN = 10


def scenario_list(scenarios: Mapping[str, Scenario]) -> Table:
    """The scenarios that exist, and the question that each answers."""
    table = Table(title="scenarios", show_lines=False, title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("question")
    for name, scenario in scenarios.items():
        table.add_row(name, scenario.question)
    return table


def findings_table(findings: Sequence[Finding]) -> Table:
    """The checks, and whether each passes."""
    table = Table("checked", title="criterion", title_justify="left")
    for column in ("found", "bound", ""):
        table.add_column(column, justify="right")
    for finding in findings:
        sign = "<=" if finding.at_most else ">="
        verdict = "[green]passes[/]" if finding.passed else "[red]fails[/]"
        table.add_row(finding.words, f"{finding.value:.4g}", f"{sign} {finding.bound:g}", verdict)
    return table


def figures_table(figures: Figures) -> Table:
    """The figures of one run that have no distribution."""
    table = Table("figure", title="one run", title_justify="left")
    table.add_column("", justify="right")
    ends = ", ".join(f"{count:,} {name}" for name, count in figures.outcomes.items())
    rows = (
        ("requests", f"{figures.requests:,}"),
        ("ended", ends),
        ("met both promises", f"{figures.attainment:.1%}"),
        ("goodput", f"{figures.goodput_rps:.2f} requests/s, {figures.goodput_tps:,.0f} output tokens/s"),
        ("throughput", f"{figures.throughput_tps:,.0f} output tokens/s"),
        ("prefix hit rate", f"{figures.hit_rate:.1%}"),
        ("fairness (Jain)", f"{figures.jain:.3f}"),
        ("largest service gap", f"{figures.service_gap:,.0f} tokens"),
        ("workers' time in steps", f"{figures.utilisation:.0%}"),
        ("cost", f"{figures.cost:,.2f}, per 1M output tokens {figures.cost_per_million:,.2f}"),
        ("SLO minutes lost", f"{figures.slo_minutes_lost:.2f} of {figures.seconds / 60:.2f}"),
    )
    for row in rows:
        table.add_row(*row)
    for reason, count in figures.reasons.items():
        table.add_row(f"  because of {reason}", f"{count:,}")
    return table


def latency_table(figures: Figures) -> Table:
    """Distributions in milliseconds."""
    table = Table("milliseconds", title="latency", title_justify="left")
    for column in ("requests", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right")
    named: tuple[tuple[str, Spread], ...] = (
        ("time to first token", figures.ttft_ms), ("time per output token", figures.tpot_ms),
        ("end to end", figures.e2e_ms), ("in the queue", figures.queue_ms),
    )  # fmt: skip
    for name, spread in named:
        values = (spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
        table.add_row(name, f"{spread.count:,}", *(f"{value:,.1f}" for value in values))
    return table


def tenants_table(figures: Figures) -> Table:
    """The tenants with the most requests."""
    table = Table("tenant", title="tenants", title_justify="left")
    for column in ("requests", "good", "TTFT p95 ms", "served tokens", "of wanted"):
        table.add_column(column, justify="right")
    shown = sorted(figures.tenants.items(), key=lambda item: -item[1].requests)[:TENANTS_SHOWN]
    for name, tenant in shown:
        table.add_row(
            name, f"{tenant.requests:,}", f"{tenant.good / tenant.requests:.1%}",
            f"{tenant.ttft_ms.p95:,.0f}", f"{tenant.served:,.0f}",
            f"{tenant.served / tenant.wanted:.0%}" if tenant.wanted else "-",
        )  # fmt: skip
    return table


def seeds_table(verdicts: Sequence[Verdict]) -> Table:
    """One line per seed."""
    table = Table("seed", title=f"{len(verdicts)} seeds", title_justify="left")
    for column in ("requests", "good", "TTFT p95 ms", "TPOT p95 ms", "hit rate", "Jain", "criterion"):
        table.add_column(column, justify="right")
    for verdict in verdicts:
        figures = verdict.played.figures
        table.add_row(
            str(verdict.played.seed), f"{figures.requests:,}", f"{figures.attainment:.1%}",
            f"{figures.ttft_ms.p95:,.0f}", f"{figures.tpot_ms.p95:,.1f}", f"{figures.hit_rate:.1%}",
            f"{figures.jain:.3f}", "[green]passes[/]" if verdict.passed else "[red]fails[/]",
        )  # fmt: skip
    return table


def compare_table(names: tuple[str, str], found: Sequence[PairedDifference], num_seeds: int) -> Table:
    """Two configurations side by side."""
    table = Table("figure", title=f"A: {names[0]}\nB: {names[1]}\n{num_seeds} seeds", title_justify="left")
    for column in ("A", "B", "B - A", "95 % interval (paired t)"):
        table.add_column(column, justify="right")
    table.add_column("B is")
    colours = {"better": "green", "worse": "red"}
    for each in found:
        interval = f"{each.low:+.4g} to {each.high:+.4g}"
        colour = colours.get(each.verdict, "dim")
        table.add_row(
            each.words, f"{each.a:.4g}", f"{each.b:.4g}", f"{each.difference:+.4g}", interval,
            f"[{colour}]{each.verdict}[/]",
        )  # fmt: skip
    return table


SCHEMA = "penstock.simulate/1"
STATIC = Path(penstock.__file__).parent / "gateway" / "api" / "static"
"""The console's built page (docs/design/020-the-console.md)."""
PAGE = b"""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>%b</title><style>%b</style></head>
<body><div id="app"></div><script type="application/json" id="report">%b</script>
<script type="module">%b</script></body></html>
"""
SEEDS_MAX = 100_000

DESCRIPTION = """\
Run the product on virtual time: the real queues, limits, admission, scheduler and KV blocks; only the
time of a step, the network and failures are modelled. The same seed gives the same run on any machine.

A scenario is a question with a criterion; the exit code says whether it passes. A request is good if
it met both promises (TTFT and TPOT); goodput is good requests per second, and their output tokens."""

EPILOG = """\
examples:
  penstock simulate --list                          what there is, and what each answers
  penstock simulate spike-20x --html report.html    one run, with plots
  penstock simulate noisy-tenant --seeds 10         ten seeds
  penstock simulate steady --set load=1.5 --set accelerator=h100 --set workers=2
  penstock simulate steady --trace trace.jsonl.gz   recorded traffic instead of the scenario's
  penstock simulate noisy-tenant --seeds 8 --compare queue.headroom=0.08 queue.headroom=0

--set takes load, seconds, workers, accelerator, model (7b, 8b, 70b, ... or a config.json), tp, dtype,
max_running, step_tokens, scheduling, ttft_ms, tpot_ms, or any path of the configuration file
(queue.tenant_share=0.3). A side of --compare is a configuration file or such settings with commas
between; `base` is the scenario as it is."""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "simulate",
        help="run scenarios on virtual time",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="its name; see --list")
    parser.add_argument("--list", action="store_true", help="list the scenarios")
    parser.add_argument(
        "--seed", type=number(int, 0, 2**62), default=1, metavar="N", help="the first seed (default: 1)"
    )
    parser.add_argument(
        "--seeds",
        type=number(int, 1, SEEDS_MAX),
        default=1,
        metavar="N",
        help="how many, from --seed on (default: 1)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="change a knob or a setting",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the gateway's configuration, as `serve` reads it"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="play this penstock-trace/1 instead of made traffic"
    )
    parser.add_argument(
        "--speed", type=number(float, 1e-3, 1e6), default=1.0, metavar="X", help="of the trace (default: 1)"
    )
    parser.add_argument(
        "--step-times",
        type=Path,
        metavar="FILE",
        help="workers as fast as measured ones (`penstock bench --fit`)",
    )
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two configurations on the same seeds")
    parser.add_argument(
        "--write-trace", type=Path, metavar="FILE", help="write the traffic as a trace, and run nothing"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures here (- is standard output)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock simulate`; 1 when a criterion fails."""
    if args.list or not args.scenario:
        if not args.list:
            raise ConfigError("name a scenario; `penstock simulate --list` says what there is")
        console.out().print(scenario_list(SCENARIOS))
        return 0
    for path in (args.json, args.html, args.write_trace):
        check_place(path)
    scenario = find(args.scenario, SCENARIOS)
    knobs = _knobs(args, args.settings)
    if args.trace is not None:
        scenario = _with_trace(scenario, args.trace, args.speed)
    if args.write_trace is not None:
        return _write(scenario.build(knobs), args)
    return _compare(scenario, args) if args.compare else _run(scenario, knobs, args)


def _knobs(args: argparse.Namespace, settings: Sequence[str]) -> Knobs:
    config = load_config(args.config) if args.config else None
    knobs = Knobs() if config is None else Knobs(config=config)
    if args.step_times is not None:
        knobs = msgspec.structs.replace(knobs, step_time=read_model(args.step_times))
    return with_settings(knobs, _pairs(settings))


def report_page(title: str, entries: bytes) -> bytes:
    """The console's own page of reports with `entries` in it, in one file: nothing is fetched."""
    script, style = ((STATIC / name).read_bytes() for name in ("app.js", "app.css"))
    # Nothing in the data or in the script may end the element that it is in.
    data = entries.replace(b"<", b"\\u003c")
    script = script.replace(b"</script", b"<\\/script")
    return PAGE % (escape(title).encode(), style, data, script)


def _pairs(settings: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for each in settings:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {each}: expected KEY=VALUE")
        pairs[key] = value
    return pairs


def _side(args: argparse.Namespace, text: str) -> Knobs:
    """One side of --compare: a file, settings, or `base`."""
    if text == "base":
        return _knobs(args, args.settings)
    if Path(text).is_file():
        return msgspec.structs.replace(_knobs(args, args.settings), config=load_config(Path(text)))
    if "=" not in text:
        raise ConfigError(f"--compare {text}: is no file, no KEY=VALUE, and not `base`")
    return _knobs(args, [*args.settings, *text.split(",")])


def _with_trace(scenario: Scenario, path: Path, speed: float) -> Scenario:
    """The scenario's fleet with recorded traffic; its own criterion is about other traffic and does not
    count.
    """
    trace = Trace(path=path, speed=speed)
    trace.header()  # So that a wrong file is said before anything runs.

    def build(knobs: Knobs) -> Setup:
        made = scenario.build(knobs)
        fits = min(pool.worker.max_model_len for pool in made.world.pools) - 1024
        seconds = knobs.seconds or 7 * 86_400.0
        return replace(made, sources=(replace(trace, prompt_max=fits),), seconds=seconds)

    def check(played: Played, _: Played | None) -> tuple[Finding, ...]:
        left = played.result.counters.arrived - len(played.records)
        return (Finding(words="requests without an end", value=left, bound=0),)

    return replace(scenario, build=build, baseline=None, check=check)


def _write(setup: Setup, args: argparse.Namespace) -> int:
    requests = merged(setup.sources, args.seed, setup.seconds)
    count = write_trace(args.write_trace, f"{args.scenario}, seed {args.seed}", requests)
    console.err().print(f"{count} requests in {args.write_trace}", markup=False)
    return 0


def _run(scenario: Scenario, knobs: Knobs, args: argparse.Namespace) -> int:
    verdicts = _play(scenario, knobs, args, "")
    screen = screen_beside(args.json)
    screen.print(f"[bold]{scenario.name}[/]: {scenario.question}", soft_wrap=True)
    last = verdicts[-1]
    if len(verdicts) == 1:
        for table in (figures_table, latency_table, tenants_table):
            screen.print(table(last.played.figures))
        screen.print(f"seed {last.played.seed}, hash {last.played.result.digest}", style="dim")
    else:
        screen.print(seeds_table(verdicts))
    failed = next((verdict for verdict in verdicts if not verdict.passed), last)
    screen.print(findings_table(failed.findings))
    _write_out(args, [_verdict_json(verdict) for verdict in verdicts])
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _compare(scenario: Scenario, args: argparse.Namespace) -> int:
    names = (args.compare[0], args.compare[1])
    sides = [_side(args, text) for text in names]
    played = [_play(scenario, knobs, args, f"{side} ") for side, knobs in zip("AB", sides, strict=True)]
    found = compare(*([verdict.played.figures for verdict in side] for side in played))
    screen = screen_beside(args.json)
    screen.print(compare_table(names, found, args.seeds))
    if args.seeds == 1:
        screen.print(
            "one seed has no interval; --seeds 8 or more tells differences from chance", style="yellow"
        )
    sides = {"sides": names, "seeds": args.seeds}
    _write_out(args, [{"schema": SCHEMA, **sides, **_difference_json(each)} for each in found])
    return 0


def _play(scenario: Scenario, knobs: Knobs, args: argparse.Namespace, side: str) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for seed in range(args.seed, args.seed + args.seeds):
        with _progress(f"{side}{scenario.name}, seed {seed}", scenario.build(knobs).seconds) as on_arrival:
            verdicts.append(run_scenario(scenario, knobs, seed, on_arrival=on_arrival))
    return verdicts


@contextmanager
def _progress(what: str, seconds: float) -> Generator[Callable[[int], None]]:
    """A bar of virtual time, on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} s"),
        TimeElapsedColumn(),
    )
    screen = console.err()
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(what, total=seconds if seconds < 86_400 else None)
        yield lambda at_ns: progress.update(task, completed=at_ns / NS_PER_S)


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    played = verdict.played
    return {
        "schema": SCHEMA,
        "scenario": verdict.scenario.name,
        "question": verdict.scenario.question,
        "answer": verdict.scenario.answer,
        "workers": ", ".join(f"{pool.count} x {pool.worker.kind}" for pool in played.setup.world.pools),
        "seed": played.seed,
        "digest": played.result.digest,
        "passed": verdict.passed,
        "findings": [{**msgspec.to_builtins(each), "passed": each.passed} for each in verdict.findings],
        "figures": msgspec.to_builtins(played.figures),
        "ttft_shares": ttft_shares(played.records),
    }


def _difference_json(each: PairedDifference) -> dict[str, object]:
    return {**msgspec.to_builtins(each), "verdict": each.verdict}


def _write_out(args: argparse.Namespace, entries: list[dict[str, object]]) -> None:
    content = msgspec.json.encode(entries)
    page = report_page(args.scenario, content) if args.html is not None else b""
    for path, text in ((args.json, msgspec.json.format(content, indent=1) + b"\n"), (args.html, page)):
        write_to(path, text)
        if path is not None and str(path) != "-":
            console.err().print(f"wrote {path}", markup=False, soft_wrap=True)

"""`penstock plan`: how many of which accelerator a traffic needs, and what it costs. With `--check` the
replicas that the planner chose are played in the simulator, under Poisson arrivals of the traffic they were
made for.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.table import Table

from penstock.cli.console import Column, Fitted, check_place, row, screen_beside, write_to
from penstock.cli.flags import Commands, Help, number
from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import Config
from penstock.errors import ConfigError
from penstock.planning.plan import Option, Sizing, Terms, TrafficDemand, cheapest, options, sizing_example
from penstock.planning.roofline import (
    ACCELERATORS,
    BYTES_PER_WEIGHT,
    MODELS,
    Accelerator,
    ModelShape,
    Placed,
    Roofline,
    accelerator,
    model_shape,
)
from penstock.sim.report.figures import Figures, Objective
from penstock.sim.scenarios.scenario import kind_of
from penstock.sim.scenarios.setup import Setup, play, promised
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, even
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec

SCHEMA = "penstock.plan/1"
SHOWN = 6

DESCRIPTION = """\
How many of which accelerator a traffic needs to meet both promises (TTFT and TPOT), what a million
output tokens cost, and how far that is from the theoretical least (the requirement's mark is twice).

By a roofline of the named accelerators: bandwidth, arithmetic, links and memory of the data sheets at
the efficiencies that good engines reach. `--check` plays the plan in the simulator and reports the
goodput: requests per second that met both promises, and their output tokens."""

EPILOG = f"""\
examples:
  penstock plan --model 70b --rps 20 --prompt-tokens 1500 --output-tokens 300
  penstock plan --model 70b:0.4 --model 7b:0.6 --rps 100 --accelerator a100-80 --accelerator h100
  penstock plan --model 8b --rps 50 --accelerator l40s --price l40s=0.79 --hit-rate 0.5 --check
  penstock plan --example                           the requirement's 110 accelerators, recomputed

columns:
  placement   model, type of its weights, and devices of one replica; *: our own engine cannot run that
  rows        requests in a steady batch; step ms: how long a step with them takes, so their TPOT
  TTFT ms     predicted, without queueing; bound by: what keeps the batch from growing
  tokens/s    output tokens of one full replica
  replicas    for this traffic at --load, spares included; devices: of all replicas; USD/h: their price
  USD/1M      price of a million output tokens; least/1M: the theoretical least on this device;
              x least: how many times the least the plan costs
Columns that do not fit the terminal are left out; --json has all.

models: {", ".join(MODELS)}, or a config.json
accelerators: {", ".join(ACCELERATORS)}
Prices are per device and hour in USD, what rental companies asked in 2025, rounded; --price NAME=X
sets your own."""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "plan",
        help="how many accelerators a traffic needs, and what it costs",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    _add_traffic_flags(parser.add_argument_group("traffic"))
    _add_terms_flags(parser.add_argument_group("promises and fleet"))
    parser.add_argument("--example", action="store_true", help="recompute the requirement's sizing example")
    parser.add_argument(
        "--check", action="store_true", help="play the plan in the simulator with Poisson arrivals"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the plan here (- is standard output)"
    )
    parser.set_defaults(run=run)


def _add_traffic_flags(traffic: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    traffic.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME[:SHARE]",
        help="and its share of the requests; several times",
    )
    traffic.add_argument(
        "--rps",
        type=number(float, 1e-6, 1e9),
        default=10.0,
        metavar="R",
        help="requests per second (default: 10)",
    )
    traffic.add_argument(
        "--prompt-tokens", type=number(int, 1, 10_000_000), default=1000, metavar="N", help="(default: 1000)"
    )
    traffic.add_argument(
        "--output-tokens", type=number(int, 1, 1_000_000), default=200, metavar="N", help="(default: 200)"
    )
    traffic.add_argument(
        "--hit-rate",
        type=number(float, 0, 0.99),
        default=0.0,
        metavar="X",
        help="of the prefix cache (default: 0)",
    )


def _add_terms_flags(terms: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    terms.add_argument(
        "--ttft-ms", type=number(float, 1, 1e7), default=500.0, metavar="MS", help="(default: 500)"
    )
    terms.add_argument(
        "--tpot-ms", type=number(float, 0.1, 1e6), default=50.0, metavar="MS", help="(default: 50)"
    )
    terms.add_argument(
        "--accelerator", action="append", default=[], metavar="NAME", help="only these (default: all)"
    )
    terms.add_argument(
        "--price", action="append", default=[], metavar="NAME=X", help="USD per device and hour"
    )
    terms.add_argument(
        "--dtype", choices=sorted(BYTES_PER_WEIGHT), default="bf16", help="of the weights (default: bf16)"
    )
    terms.add_argument(
        "--load",
        type=number(float, 0.05, 1.0),
        default=0.8,
        metavar="X",
        help="of a replica's rate (default: 0.8)",
    )
    terms.add_argument(
        "--spare",
        type=number(int, 0, 1000),
        default=1,
        metavar="N",
        help="replicas of each model (default: 1)",
    )
    terms.add_argument(
        "--max-running",
        type=number(int, 1, 4096),
        default=256,
        metavar="N",
        help="rows of a batch (default: 256)",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock plan`."""
    terms = Terms(
        ttft_ms=args.ttft_ms,
        tpot_ms=args.tpot_ms,
        load=args.load,
        spare=args.spare,
        max_running=args.max_running,
    )
    check_place(args.json)
    screen = screen_beside(args.json)
    devices = _devices(args.accelerator, args.price)
    if args.example:
        device = next((each for each in devices if each.name == "a100-80"), devices[0])
        sizing = sizing_example(terms, prompt_tokens=args.prompt_tokens, device=device)
        screen.print(_sizing_table(sizing))
        screen.print(_options_table(sizing.chosen, "what the planner takes for the last line"))
        screen.print(_not_ours(sizing.chosen), markup=False, soft_wrap=True)
        _write(args.json, {"schema": SCHEMA, "sizing": msgspec.to_builtins(sizing)})
        return 0
    wanted = _demands(args)
    chosen: list[Option] = []
    shown: list[Option] = []
    for model, demand in wanted:
        chosen.append(cheapest(model, demand, terms, devices, dtype=args.dtype))
        found = options(model, demand, terms, devices, dtype=args.dtype)[:SHOWN]
        shown += found
        screen.print(
            _options_table(
                found, f"{model.name}: {demand.rps:g} requests/s, {demand.tokens_per_s:,.0f} output tokens/s"
            ),
            "",
        )
    screen.print(_total(wanted, chosen), style="bold", markup=False, soft_wrap=True)
    if note := _not_ours(shown):
        screen.print(note, markup=False, soft_wrap=True)
    checked = [
        check_plan(option, model, demand, terms, devices)
        for option, (model, demand) in zip(chosen, wanted, strict=True)
    ] if args.check else []  # fmt: skip
    for option, figures in zip(chosen, checked, strict=False):
        screen.print(
            f"{option.model} simulated for {figures.seconds:.0f} s: {figures.attainment:.1%} of the requests "
            f"met both promises, goodput {figures.goodput_rps:.2f} requests/s ({figures.goodput_tps:,.0f} "
            f"tokens/s), TTFT p95 {figures.ttft_ms.p95:.0f} ms, TPOT p95 {figures.tpot_ms.p95:.1f} ms",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    plan: dict[str, object] = {
        "schema": SCHEMA,
        "plan": msgspec.to_builtins(chosen),
        "simulated": msgspec.to_builtins(checked),
    }
    _write(args.json, plan)
    return 0


def _demands(args: argparse.Namespace) -> list[tuple[ModelShape, TrafficDemand]]:
    parts: list[tuple[ModelShape, float]] = []
    for text in args.model or ["8b"]:
        name, colon, share = text.rpartition(":")
        if not colon or not share.replace(".", "", 1).isdigit():
            name, share = text, "1"
        parts.append((model_shape(name), float(share)))
    total = sum(share for _, share in parts)
    if total <= 0:
        raise ConfigError("--model: the shares sum to nothing")
    return [
        (
            model,
            TrafficDemand(
                rps=args.rps * share / total,
                prompt_tokens=args.prompt_tokens,
                output_tokens=args.output_tokens,
                hit_rate=args.hit_rate,
            ),
        )
        for model, share in parts
        if share > 0
    ]


def _devices(names: Sequence[str], prices: Sequence[str]) -> list[Accelerator]:
    devices = {each.name: each for each in (map(accelerator, names) if names else ACCELERATORS.values())}
    if not names:
        devices.pop("cpu-2")
    for text in prices:
        name, _, price = text.partition("=")
        try:
            value = float(price)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ConfigError(f"--price {text}: expected NAME=X, in USD per hour")
        priced = accelerator(name)
        if priced.name in devices:
            devices[priced.name] = replace(priced, price_per_hour=value)
    return list(devices.values())


_COLUMNS = {
    "rows": 8,
    "step ms": 7,
    "TTFT ms": 4,
    "bound by": 6,
    "tokens/s": 5,
    "replicas": 0,
    "devices": 0,
    "USD/h": 0,
    "USD/1M": 0,
    "least/1M": 9,
    "x least": 3,
}
"""The numbers of a placement, with the rank by which a narrow terminal goes without (see `tables`)."""


def _options_table(found: Sequence[Option], title: str) -> Fitted:
    columns = [Column(head="placement", right=False)]
    columns += [Column(head=head, rank=rank) for head, rank in _COLUMNS.items()]
    rows = [
        row(
            f"{each.model} {each.dtype} on {each.tp} x {each.device}{' *' if each.lacks else ''}",
            str(each.batch),
            f"{each.step_ms:.1f}",
            f"{each.ttft_ms:.0f}",
            each.bound,
            f"{each.replica_tps:,.0f}",
            str(each.replicas),
            str(each.devices),
            f"{each.price_per_hour:,.2f}",
            f"{each.cost_per_million:.2f}",
            f"{each.least_per_million:.2f}",
            f"{each.times_least:.1f}",
        )
        for each in found
    ]
    return Fitted(columns, rows, title=title)


def _not_ours(found: Iterable[Option]) -> str:
    """Placements of these that our own engine cannot run, and engines that can; empty if it can run all."""
    lacks = sorted({what for each in found for what in each.lacks})
    if not lacks:
        return ""
    return (
        f"* needs {' and '.join(lacks)}, which our own engine does not have: serve it by vLLM workers "
        f"(docs/backends.md)"
    )


def _sizing_table(sizing: Sizing) -> Table:
    table = Table(
        "reading",
        box=None,
        pad_edge=False,
        title="the requirement's example: 1,000 users, 200 tokens, 70B 40 %, 7B 60 %",
        title_justify="left",
    )
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("arithmetic")
    for line in sizing.lines:
        table.add_row(line.words, f"{line.tokens_per_s:,.0f}", f"{line.devices:,.0f}", line.arithmetic)
    return table


def _total(wanted: Sequence[tuple[ModelShape, TrafficDemand]], chosen: Sequence[Option]) -> str:
    price, devices = sum(each.price_per_hour for each in chosen), sum(each.devices for each in chosen)
    tokens = sum(demand.tokens_per_s for _, demand in wanted)
    parts = ", ".join(_words(each) for each in chosen)
    return (
        f"cheapest: {parts}: {devices} devices, {price:,.2f} USD/h, {price / 3600 / tokens * 1e6:.2f} "
        f"USD per 1M output tokens"
    )


def _words(option: Option) -> str:
    """Such as "5 replicas of 70b on 4 x h100"."""
    replicas = f"{option.replicas} replica{'s' if option.replicas != 1 else ''}"
    return f"{replicas} of {option.model} on {option.tp} x {option.device}{' *' if option.lacks else ''}"


def _write(path: Path | None, content: dict[str, object]) -> None:
    write_to(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


REPLICAS_MAX = 4
"""Played at most: a larger plan is played in part, with its part of the traffic, which is only harder (less
is pooled)."""
REQUESTS = 400
"""About so many."""
SEED = 1
"""A plan that is checked again meets the same arrivals."""


def check_plan(
    option: Option,
    model: ModelShape,
    demand: TrafficDemand,
    terms: Terms,
    devices: Sequence[Accelerator],
) -> Figures:
    """The figures of a short run of the option (or of a part of it): without its spares, since those may be
    lost.
    """
    device = next(each for each in devices if each.name == option.device)
    placed = Placed(model=model, device=device, tp=option.tp, dtype=option.dtype)
    needed = max(1, option.replicas - terms.spare)
    count = min(needed, REPLICAS_MAX)
    rate = demand.rps * count / needed
    spec = SimWorkerSpec(
        step_time=Roofline(placed), num_blocks=placed.num_blocks, max_model_len=model.max_model_len,
        engine=EngineSettings(step_tokens=terms.step_tokens, max_running=option.batch), kind=kind_of(placed),
    )  # fmt: skip
    shared = int(demand.hit_rate * demand.prompt_tokens)
    source = Chat(
        arrivals=Poisson(rate), callers=Callers(tenants=even(1)), system_tokens=shared,
        prompt=LengthDistribution(demand.prompt_tokens - shared, 0.0, maximum=1 << 30),
        output=LengthDistribution(demand.output_tokens, 0.0, maximum=1 << 30),
    )  # fmt: skip
    objective = Objective(ttft_ms=terms.ttft_ms, tpot_ms=terms.tpot_ms)
    played = play(
        Setup(
            world=WorldSpec(config=Config(admission=promised(objective)),
                pools=(PoolSpec(worker=spec, count=count),)), sources=(source,), seconds=REQUESTS / rate,
            objective=objective,
            prices={spec.kind: placed.price_per_hour},
        ),
        SEED,
    )  # fmt: skip
    return played.figures

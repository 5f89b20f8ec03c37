"""`penstock scale`: how many workers each model has, and why; or so many for a while, whatever the load."""

import argparse
import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.text import Text

from penstock.cli import console
from penstock.cli.commands.remote import add_admin_flags, connect_admin
from penstock.cli.console import Column, Fitted, Row
from penstock.cli.flags import Commands, Help, duration
from penstock.cli.replayed import show_replay
from penstock.clock import NS_PER_S
from penstock.errors import ConfigError
from penstock.fleet.scale_report import ScaleOrder, ScaleReport, replay
from penstock.policy.capacity.autoscaler import ScaleDecision

DESCRIPTION = """\
Show how many workers each model has and is to have, and why. With --to so many, for a while, whatever
the load; with --auto the load decides again."""
EPILOG = """\
Which models scale, and between which bounds, is in the configuration (models[].scale);
docs/autoscaling.md has the story. --replay takes the file of decisions that a server keeps beside its
ledger, makes each of them again from what was seen then, and needs no server. Needs an admin key, as
`penstock top` does.
exit code: 0 done, 1 the server refuses, there is none, or a decision comes out otherwise, 2 wrong usage

examples:
  penstock scale                        every model that scales
  penstock scale support --why          the last decision, with all that it was made from
  penstock scale support --to 4 --for 30m
  penstock scale support --auto
  penstock scale --replay ledger/scaling-decisions.jsonl"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "scale",
        help="how many workers each model has, and why",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", default="", metavar="MODEL", help="which model (default: all)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="only show (the default)")
    what.add_argument("--why", action="store_true", help="show what the last decision was made from")
    what.add_argument("--to", type=int, metavar="N", help="so many workers")
    what.add_argument("--auto", action="store_true", help="let the load decide again")
    what.add_argument("--replay", type=Path, metavar="FILE", help="make the decisions on record again")
    parser.add_argument(
        "--for", dest="seconds", type=duration, default=3600, metavar="TIME",
        help="with --to: for so long, such as 30m or 2h (default: 1h)",
    )  # fmt: skip
    add_admin_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock scale`."""
    if args.replay is not None:
        return show_replay(f"--replay: {args.replay}", _replayed(args.replay))
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    if args.why and not args.model:
        raise ConfigError("penstock scale --why needs a model")
    order = None
    if args.auto or args.to is not None:
        order = ScaleOrder(model=args.model, workers=args.to, for_s=float(args.seconds))
    fleet = connect_admin(args)
    try:
        found = await fleet.scaling(args.model, order)
    finally:
        await fleet.close()
    out = console.out()
    if not found.models:
        out.print("no model scales: set models[].scale.max in the configuration", markup=False)
    if args.why:
        for each in found.models:
            _print_why(each)
        return 0
    out.print(_table(found.models))
    for each in found.models:
        _print_notes(each)
    return 0


_COLUMNS = (
    Column(head="model", right=False), Column(head="pool", right=False, rank=1), Column(head="ready"),
    Column(head="starting", rank=2), Column(head="leaving", rank=3), Column(head="wanted"),
    Column(head="bounds", rank=2), Column(head="cold start", rank=4), Column(head="per worker", rank=4),
)  # fmt: skip


def _table(models: list[ScaleReport]) -> Fitted:
    rows: list[Row] = []
    for each in models:
        decision = each.decision
        for pool in each.pools:
            cells = (
                each.model, pool.name or "-", str(pool.ready), str(pool.pending), str(pool.draining),
                str(pool.workers), f"{each.min}-{each.max}",
                f"{decision.cold_start_s:.0f} s" if decision is not None else "-",
                f"{decision.safe_rate:.0f}/s" if decision is not None and decision.safe_rate else "-",
            )  # fmt: skip
            rows.append(Row(cells=tuple(map(Text, cells))))
    return Fitted(_COLUMNS, rows)


def _print_notes(each: ScaleReport) -> None:
    def say(text: str) -> None:
        console.out().print(f"{each.model}: {text}", markup=False, soft_wrap=True)

    if each.mode == "advise":
        say("advice only (models[].scale.mode)")
    if (order := each.override) is not None:
        say(f"{order.workers} workers by hand until {_time(order.until_ns)}")
    for pool in each.pools:
        if pool.trouble:
            say(pool.trouble)
    if each.decision is not None:
        say(each.decision.why)
        if each.decision.held_by:
            say(f"held back: {each.decision.held_by}")


def _print_why(each: ScaleReport) -> None:
    out = console.out()
    if each.decision is None or each.signals is None:
        out.print(f"{each.model}: nothing was decided yet", markup=False)
        return
    decision = each.decision
    out.print(f"{each.model} at {_time(decision.wall_ns)}: {_words(decision)}", markup=False, soft_wrap=True)
    for opinion in decision.opinions:
        out.print(f"  {opinion.of:9} {opinion.workers:3}  {opinion.why}", markup=False, soft_wrap=True)
    if decision.held_by:
        out.print(f"  held back: {decision.held_by}", markup=False, soft_wrap=True)
    for name, value in msgspec.to_builtins(each.signals).items():
        out.print(f"  {name}: {value}", markup=False, soft_wrap=True)


def _words(decision: ScaleDecision) -> str:
    verb = decision.move if decision.acts else f"would {decision.move}"
    there = f"{decision.ready} ready and {decision.pending} starting"
    return f"{verb}, {there} -> {decision.workers}: {decision.why}"


def _time(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _replayed(path: Path) -> Iterator[tuple[int, str]]:
    for number, found in replay(path):
        same = found is None
        yield number, "" if same else f"on record {_words(found.recorded)}; again {_words(found.again)}"

"""`penstock rollout`: try a new version of a model on a few conversations, then on more, or take it back."""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from penstock.cli import console
from penstock.cli.commands.remote import add_admin_flags, connect_admin
from penstock.cli.console import Column, Fitted, Row
from penstock.cli.flags import Commands, Help
from penstock.cli.replayed import show_replay
from penstock.errors import ConfigError
from penstock.fleet.rollouts import RolloutReport, RolloutReports, replay
from penstock.policy.rollout.evidence import Reading
from penstock.policy.rollout.rollout import RolloutPlan, RolloutState
from penstock.types import without_version

VERBS = ("start", "status", "promote", "abort", "replay")
DESCRIPTION = """\
Try a new version of a model on a few conversations and compare it with the old one on as many others;
continue with more while it is no worse, and take it back automatically when it surely is."""
EPILOG = """\
start takes the version that is tried (support@2), the others the name without one (support). docs/rollout.md
says what is compared. Needs an admin key, as `penstock top` does; replay needs no server: it takes a file
rollout-decisions.jsonl and makes each of its decisions again, by the evidence that each was made from.
exit code: 0 done, 1 the server refuses, or there is none, or a decision comes out otherwise, 2 wrong usage

examples:
  penstock rollout start support@2
  penstock rollout start support@2 --steps 5,50 --step-minutes 10 --promote
  penstock rollout start support@2 --shadow 20
  penstock rollout status
  penstock rollout promote support
  penstock rollout replay rollout-decisions.jsonl"""
_DEFAULTS = RolloutPlan(model="", candidate="")


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "rollout",
        help="try a new version of a model, and judge it",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=f"one of {', '.join(VERBS)}")
    parser.add_argument("model", nargs="?", default="", metavar="MODEL", help="which model, version, or file")
    steps = ",".join(f"{each:g}" for each in _DEFAULTS.steps)
    parser.add_argument(
        "--steps", default=steps, help="start: percent of conversations (default: %(default)s)"
    )
    parser.add_argument(
        "--step-minutes", type=float, default=_DEFAULTS.step_s / 60,
        help="start: the longest that a step takes, if nothing looks worse by then (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=int, default=_DEFAULTS.requests_min,
        help="start: fewest requests of each cohort in each step (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", type=int, default=_DEFAULTS.warm_up_requests,
        help="start: first requests of the new version whose times do not count (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--shadow", type=float, default=_DEFAULTS.shadow, metavar="PERCENT",
        help="start: before the first step, copy the requests of so many conversations to it and throw the "
        "answers away (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--tenants", default="", metavar="NAMES",
        help="start: deal the conversations of these alone: ids, or tier:NAME for a tier (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--promote", action="store_true", help="start: promote it by itself behind the last step"
    )
    add_admin_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock rollout`."""
    if args.verb == "replay":
        if not args.model:
            raise ConfigError("penstock rollout replay needs a FILE")
        return show_replay(f"penstock rollout replay: {args.model}", _replayed(Path(args.model)))
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    if not args.model and args.verb != "status":
        raise ConfigError(f"penstock rollout {args.verb} needs a model")
    plan = _plan(args) if args.verb == "start" else None
    fleet = connect_admin(args)
    try:
        if plan is not None:
            found = await fleet.start_rollout(plan)
        elif args.verb == "status":
            found = await fleet.rollouts(args.model)
        else:
            found = await fleet.rollout_order(args.model, args.verb)
    finally:
        await fleet.close()
    show(found)
    return 0


def _replayed(path: Path) -> Iterator[tuple[int, str]]:
    for number, made, again in replay(path):
        difference = ""
        if again is not None:
            now = f"{again.state.value}, step {again.step + 1}: {again.why}"
            said = f"on record {made.state.value}, step {made.step + 1}: {made.why}; again {now}"
            difference = f"{made.before.plan.candidate}: {said}"
        yield number, difference


def _plan(args: argparse.Namespace) -> RolloutPlan:
    try:
        steps = tuple(float(each) for each in args.steps.split(","))
    except ValueError:
        raise ConfigError(f"--steps: expected percentages as in 1,5,25,50, but got {args.steps!r}") from None
    return RolloutPlan(
        model=without_version(args.model),
        candidate=args.model,
        steps=steps,
        step_s=args.step_minutes * 60,
        requests_min=args.requests,
        warm_up_requests=args.warm_up,
        shadow=args.shadow,
        tenants=tuple(each.strip() for each in args.tenants.split(",") if each.strip()),
        promotes=args.promote,
    )


def show(reports: RolloutReports) -> None:
    """Each model's latest rollout with its figures; those before it in a line each."""
    out, seen = console.out(), set[str]()
    if not reports.rollouts:
        out.print("no rollouts")
    for each in reports.rollouts:
        head = f"{each.baseline} -> {each.candidate}: {each.state.value}"
        if each.state is RolloutState.RUNNING:
            at = f"{each.percent:g} % (step {each.step + 1} of {len(each.steps)})"
            if each.shadow:
                at = f"nobody has it, it gets copies of {each.shadow:g} %"
            head += f", {at}" + (f"; waits for {each.why}" if each.why else "")
        elif each.why:
            head += f": {each.why}"
        out.print(head, markup=False, soft_wrap=True)
        if each.trouble:
            out.print(each.trouble, markup=False, soft_wrap=True)
        if each.model not in seen:
            out.print(_figures(each))
        seen.add(each.model)


_COLUMNS = (
    Column(head="", right=False), Column(head="new", rank=3), Column(head="old", rank=3),
    Column(head="difference"), Column(head="surely between", rank=1), Column(head="allowed", rank=2),
    Column(head="verdict", right=False),
)  # fmt: skip


def _figures(report: RolloutReport) -> Fitted:
    rows: list[Row] = []
    for each in report.metrics:
        cells = (
            each.metric.value, str(each.canary_requests), str(each.control_requests), *_interval(each),
            f"{each.margin:.1%}", each.verdict.value,
        )  # fmt: skip
        rows.append(Row(cells=tuple(map(Text, cells))))
    return Fitted(_COLUMNS, rows)


def _interval(reading: Reading) -> tuple[str, str]:
    if reading.difference is None or reading.low is None or reading.high is None:
        return "-", "-"
    return f"{reading.difference:+.1%}", f"{reading.low:+.1%} and {min(reading.high, 9.99):+.1%}"

"""`penstock alerts`: what fires and why, and the same alerts as rules for Prometheus."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from penstock.cli import console
from penstock.cli.commands.remote import add_admin_flags, connect_admin
from penstock.cli.console import printable
from penstock.cli.flags import Commands, Help
from penstock.config.load import load_config
from penstock.config.tree import Config
from penstock.telemetry.alerting import Alert, AlertsReport, SloRow, rules_file
from penstock.telemetry.alerts import rules

DESCRIPTION = """\
Show which alerts fire and why, and how fast every error budget burns. docs/runbook.md says what to do.

Needs an admin key, as `penstock top` does."""

EPILOG = """\
columns:
  objective  availability; ttft and tpot: answers in the promised time (section slo of the configuration)
  5m ... 3d  how many times too fast the error budget burns in that window; -: nothing to count
  left       of the error budget of three days; below 0: more was missed than may be

exit code: 0 also when alerts fire, 1 no server or no answer, 2 wrong usage

examples:
  penstock alerts
  penstock alerts --json
  penstock alerts --rules -c penstock.yaml > rules.yaml"""
_SHOWN = ("5m", "1h", "6h", "1d", "3d")


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "alerts",
        help="show which alerts fire and why",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print what the server answers")
    parser.add_argument(
        "--rules", action="store_true", help="print the alerts as rules for Prometheus; asks no server"
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="with --rules: whose objectives")
    add_admin_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock alerts`."""
    if args.rules:
        config = load_config(Path(args.config)) if args.config else Config()
        sys.stdout.write(rules_file(rules(config.slo)))
        return 0
    report = asyncio.run(_ask(args))
    if args.json:
        console.out().print(msgspec.json.encode(report).decode(), markup=False, soft_wrap=True)
        return 0
    _show(report)
    return 0


async def _ask(args: argparse.Namespace) -> AlertsReport:
    fleet = connect_admin(args)
    try:
        return await fleet.alerts()
    finally:
        await fleet.close()


def _show(report: AlertsReport) -> None:
    out = console.out()
    for alert in report.firing:
        out.print(_line(alert, report.now), markup=False, soft_wrap=True)
    if not report.firing:
        out.print("No alert fires.", markup=False)
    for alert in report.ended[:5]:
        out.print(_line(alert, report.now), markup=False, soft_wrap=True)
    if report.slo:
        out.print(_table(report.slo))


def _line(alert: Alert, now_s: int) -> str:
    labels = "".join(f" {name}={value}" for name, value in alert.labels.items())
    lasted = f"for {_span((alert.ended or now_s) - alert.since)}"
    if alert.ended:
        return printable(f"over since {_span(now_s - alert.ended)}: {alert.name}{labels} {lasted}")
    return printable(f"{alert.severity}: {alert.name}{labels} {lasted}: {alert.why} ({alert.runbook})")


def _span(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{max(0, seconds)} s"


def _table(rows: Sequence[SloRow]) -> Table:
    table = Table("model", "band", "objective", box=None)
    for head in ("target", *_SHOWN, "left"):
        table.add_column(head, justify="right")
    for row in rows:
        burns = {each.window: "-" if each.burn is None else f"{each.burn:.1f}" for each in row.windows}
        names = (printable(row.model), printable(row.band), row.objective, f"{row.target:.1%}")
        left = "-" if row.budget_left is None else f"{row.budget_left:.0%}"
        table.add_row(*names, *(burns[window] for window in _SHOWN), left)
    return table

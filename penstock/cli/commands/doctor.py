"""`penstock doctor`: what works on this machine, what does not, and what to do about it."""

import argparse
import sys

import msgspec
from rich.table import Table

from penstock import __version__
from penstock.cli import console
from penstock.cli.commands import checks
from penstock.cli.commands.checks import Check, CheckState
from penstock.cli.flags import Commands, Help, default_port, number

EPILOG = """\
exit code:
  0  `penstock serve` can work here (there may be warnings)
  1  something that it needs is missing

examples:
  penstock doctor
  penstock doctor ./my-model
  penstock doctor --json | jq '.checks[] | select(.state != "ok")'"""

_MARKS = {
    CheckState.OK: ("ok", "green"),
    CheckState.NOTE: ("-", "dim"),
    CheckState.WARN: ("warn", "yellow"),
    CheckState.FAIL: ("FAIL", "red"),
}


class Diagnosis(msgspec.Struct, frozen=True):
    """The document that --json prints."""

    penstock: str
    can_serve: bool
    checks: tuple[Check, ...]


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "doctor",
        help="say what works on this machine, and why not",
        description="Say what works on this machine for serving models, what does not, and what to do about "
        "it.",
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model directory, hub id or demo model: say whether our engine could load it, without loading "
        "it",
    )
    parser.add_argument(
        "--port",
        type=number(int, 0, 65_535),
        metavar="N",
        help="port to look at (default: PENSTOCK_PORT or 8000)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock doctor`."""
    port = default_port() if args.port is None else args.port
    screen = console.err()
    if screen.is_terminal and not args.json:
        with screen.status("looking around"):
            found = checks.run_all(port, args.model)
    else:
        found = checks.run_all(port, args.model)
    diagnosis = Diagnosis(__version__, all(check.state != CheckState.FAIL for check in found), found)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode() + "\n")
    else:
        _show(diagnosis)
    return 0 if diagnosis.can_serve else 1


def _show(diagnosis: Diagnosis) -> None:
    screen = console.out()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in diagnosis.checks:
        mark, style = _MARKS[check.state]
        hint = f"\n-> {check.hint}" if check.hint else ""
        table.add_row(f"[{style}]{mark}[/]", check.name, check.detail + hint)
    screen.print(table)
    verdict = "penstock serve can work here" if diagnosis.can_serve else "penstock serve cannot work here yet"
    screen.print(
        f"\npenstock {diagnosis.penstock}: {verdict}", style="bold" if diagnosis.can_serve else "bold red"
    )

"""`penstock explain`: why a request went where it went."""

import argparse
import asyncio
from typing import Any

import msgspec
from rich.table import Table

from penstock.cli import console
from penstock.cli.commands.remote import add_admin_flags, connect_admin
from penstock.cli.flags import Commands, Help

DESCRIPTION = """\
Say which workers were considered for a request, what each scored, and why one was picked; of a request
without an answer also how it ended. Any request of the last hour is known, whichever gateway process
decided, also after a restart."""

EPILOG = """\
REQUEST_ID is x-request-id (as in the log), or the id of the answer: chatcmpl-..., cmpl-... or resp_...
Needs an admin key, as `penstock top` does.
exit code: 0 done, 1 not known, no server, or another decision with --replay, 2 wrong usage

examples:
  penstock explain chatcmpl-7f3a...
  penstock explain chatcmpl-7f3a... --replay
  penstock explain chatcmpl-7f3a... --json"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "explain",
        help="say why a request went to its worker",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="which one")
    parser.add_argument(
        "--replay", action="store_true", help="decide again from the recorded facts, and compare to the bit"
    )
    parser.add_argument("--json", action="store_true", help="print what the server answers")
    add_admin_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock explain`."""
    return asyncio.run(_explain(args))


async def _explain(args: argparse.Namespace) -> int:
    fleet = connect_admin(args)
    try:
        reported = await fleet.explain(args.request_id)
    finally:
        await fleet.close()
    if args.json:
        console.out().print(msgspec.json.encode(reported).decode(), markup=False, soft_wrap=True)
    else:
        _show(reported, with_replay=args.replay)
    differs = any(not decision["replay"]["is_equal"] for decision in reported["decisions"])
    return 1 if args.replay and differs else 0


def _show(reported: dict[str, Any], *, with_replay: bool) -> None:
    out = console.out()
    if (choice := reported.get("model_choice")) is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in choice["parts"].items())
        out.print(f"model {choice['model']}: complexity {choice['complexity']:g} ({parts})", markup=False)
    for number, decision in enumerate(reported["decisions"], 1):
        went = decision["worker"] or "no worker"
        held = f" for {decision['hold_s']:.3f} s" if decision["hold_s"] else ""
        head = f"{number}. {decision['model']}: {went} ({decision['reason']}{held}), {decision['policy']}"
        out.print(head, markup=False, soft_wrap=True)
        out.print(_table(decision))
        if with_replay:
            again = decision["replay"]
            verdict = "equal to the bit" if again["is_equal"] else "DIFFERENT"
            went = again["worker"] or "no worker"
            out.print(f"   replay: {went} ({again['reason']}): {verdict}", markup=False, soft_wrap=True)
    if (failure := reported.get("failure")) is not None:
        words = ": ".join(filter(None, (f"{failure['status']} {failure['code']}", failure["message"])))
        out.print(f"ended without an answer: {words}", markup=False, soft_wrap=True)


def _table(decision: dict[str, Any]) -> Table:
    table = Table("worker", "score", "TTFT", "parts", box=None)
    for row in decision["candidates"]:
        if "filtered" in row:
            table.add_row(row["worker"], "", "", f"not possible: {row['filtered']}")
            continue
        parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"].items() if value)
        table.add_row(row["worker"], f"{row['score']:g}", f"{row['ttft_s']:.3f} s", parts)
    return table

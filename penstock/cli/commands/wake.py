"""`penstock wake`: load a model that is asleep."""

import argparse
import asyncio

from penstock.cli.commands.remote import add_admin_flags
from penstock.cli.commands.sleep import order
from penstock.cli.flags import Commands, Help

DESCRIPTION = """\
Wake a model that is asleep, before somebody has to wait for it; returns when it takes requests. Where
`fleet.memory_bytes` bounds the memory, the idle model that was used longest ago sleeps instead."""

EPILOG = """\
MODEL is a name as /v1/models shows it. Needs an admin key, as `penstock top` does.
exit code: 0 it is awake, 1 there is no memory, no such model or no server, 2 wrong usage

examples:
  penstock wake qwen3-8b"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "wake",
        help="load a model that is asleep",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="which one")
    add_admin_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock wake`."""
    return asyncio.run(order(args, "wake_up"))

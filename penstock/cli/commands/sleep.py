"""`penstock sleep`: release a model's memory until a request needs it."""

import argparse
import asyncio
from typing import NamedTuple

from penstock.bench.client import ClientLimits
from penstock.cli import console
from penstock.cli.commands.remote import add_admin_flags, connect_admin
from penstock.cli.flags import Commands, Help

PATIENT = ClientLimits(connect_timeout_s=5.0, request_timeout_s=600.0)
"""A large model takes minutes to load."""
DESCRIPTION = """\
Put a model to sleep: its workers give the memory of weights and KV cache back. The first request for it
wakes it, and waits meanwhile."""

EPILOG = """\
MODEL is a name as /v1/models shows it. A model with requests stays awake. Needs an admin key, as
`penstock top` does. `sleep_after_s` of a model and `fleet.memory_bytes` do the same by themselves.
exit code: 0 it sleeps, 1 it has requests, or there is no such model or no server, 2 wrong usage

examples:
  penstock sleep qwen3-8b
  penstock wake qwen3-8b"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    summary = "release a model's memory until a request needs it"
    add_order(commands, "sleep", "sleep", Texts(summary, DESCRIPTION, EPILOG))


class Texts(NamedTuple):
    """The help of a command."""

    summary: str
    description: str
    epilog: str


def add_order(commands: "Commands[argparse.ArgumentParser]", name: str, verb: str, texts: Texts) -> None:
    """Add a command that has the server carry out `verb` on one model."""

    def run(args: argparse.Namespace) -> int:
        return asyncio.run(order(args, verb))

    parser = commands.add_parser(
        name,
        help=texts.summary,
        description=texts.description,
        epilog=texts.epilog,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="which one")
    add_admin_flags(parser)
    parser.set_defaults(run=run)


async def order(args: argparse.Namespace, verb: str) -> int:
    """Have the server do it, and say how the model is."""
    fleet = connect_admin(args, PATIENT)
    try:
        found = await fleet.sleep_order(verb, args.model)
    finally:
        await fleet.close()
    console.err().print(f"{found.model} is {found.state}.", markup=False, soft_wrap=True)
    return 0

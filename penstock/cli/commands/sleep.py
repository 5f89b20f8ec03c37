"""`penstock sleep` and `penstock wake`: release a model's memory until a request needs it; load it before one
does.
"""

import argparse
import asyncio

from penstock.bench.client import ClientLimits
from penstock.cli import console
from penstock.cli.commands.remote import add_admin_flags, connect_admin
from penstock.cli.flags import Commands, Help

PATIENT = ClientLimits(connect_timeout_s=5.0, request_timeout_s=600.0)
"""A large model takes minutes to load."""
SLEEP = """\
Put a model to sleep: its workers give the memory of weights and KV cache back. The first request for it
wakes it, and waits meanwhile."""

SLEEP_MORE = """\
MODEL is a name as /v1/models shows it. A model with requests stays awake. Needs an admin key, as
`penstock top` does. `sleep_after_s` of a model and `fleet.memory_bytes` do the same by themselves.
exit code: 0 it sleeps, 1 it has requests, or there is no such model or no server, 2 wrong usage

examples:
  penstock sleep qwen3-8b
  penstock wake qwen3-8b"""

WAKE = """\
Wake a model that is asleep, before a request has to wait for it; returns when it takes requests. Where
`fleet.memory_bytes` bounds the memory, the idle model that was used longest ago sleeps instead."""

WAKE_MORE = """\
MODEL is a name as /v1/models shows it. Needs an admin key, as `penstock top` does.
exit code: 0 it is awake, 1 there is no memory, no such model or no server, 2 wrong usage

examples:
  penstock wake qwen3-8b"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add both commands."""
    sleep = commands.add_parser(
        "sleep", help="release a model's memory until a request needs it", description=SLEEP,
        epilog=SLEEP_MORE, formatter_class=Help, allow_abbrev=False,
    )  # fmt: skip
    wake = commands.add_parser(
        "wake", help="load a model that is asleep", description=WAKE,
        epilog=WAKE_MORE, formatter_class=Help, allow_abbrev=False,
    )  # fmt: skip
    for parser, verb in ((sleep, "sleep"), (wake, "wake_up")):
        parser.add_argument("model", metavar="MODEL", help="which one")
        add_admin_flags(parser)
        parser.set_defaults(run=run, verb=verb)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return asyncio.run(order(args, args.verb))


async def order(args: argparse.Namespace, verb: str) -> int:
    """Have the server do it, and say how the model is."""
    fleet = connect_admin(args, PATIENT)
    try:
        found = await fleet.sleep_order(verb, args.model)
    finally:
        await fleet.close()
    console.err().print(f"{found.model} is {found.state}.", markup=False, soft_wrap=True)
    return 0

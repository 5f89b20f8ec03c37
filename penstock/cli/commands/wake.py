"""`penstock wake`: load a model that is asleep."""

import argparse

from penstock.cli.commands.sleep import Texts, add_order
from penstock.cli.flags import Commands

DESCRIPTION = """\
Wake a model that is asleep, before a request has to wait for it; returns when it takes requests. Where
`fleet.memory_bytes` bounds the memory, the idle model that was used longest ago sleeps instead."""

EPILOG = """\
MODEL is a name as /v1/models shows it. Needs an admin key, as `penstock top` does.
exit code: 0 it is awake, 1 there is no memory, no such model or no server, 2 wrong usage

examples:
  penstock wake qwen3-8b"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    add_order(commands, "wake", "wake_up", Texts("load a model that is asleep", DESCRIPTION, EPILOG))

"""`penstock completion`: the shell's Tab for commands, flags and their choices, made from the parsers
themselves.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import cast

from penstock.cli.flags import Commands, Help
from penstock.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")

EPILOG = """\
examples:
  penstock completion bash > ~/.local/share/bash-completion/completions/penstock
  penstock completion zsh > "${fpath[1]}/_penstock"
  penstock completion fish > ~/.config/fish/completions/penstock.fish
  eval "$(penstock completion bash)"     in this shell only"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "completion",
        help="print what completes penstock's commands in a shell",
        description="Print a script that lets the shell complete penstock's commands, flags and their "
        "choices.",
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock completion`."""
    try:
        import shtab
    except ImportError:
        raise ConfigError("this command needs shtab: pip install shtab") from None
    from penstock.cli.main import build_parser  # It imports this module by its name.

    parser = build_parser()
    for action in _actions(parser):
        if action.metavar == "FILE":
            setattr(action, "complete", shtab.FILE)  # noqa: B010 - shtab reads it there.
    sys.stdout.write(shtab.complete(parser, shell=args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every flag and argument, of the subcommands too."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]  # argparse offers no other list.
        yield action
        choices = cast(object, action.choices)
        if isinstance(choices, dict):  # Of subcommands: their parsers by name.
            for below in cast(dict[str, argparse.ArgumentParser], choices).values():
                yield from _actions(below)

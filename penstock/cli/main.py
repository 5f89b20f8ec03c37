"""The `penstock` command: finds the subcommand, runs it, and turns expected trouble into one line.

Only the subcommand that is called is imported: the simulator alone would take half a second of every other
command.

Exit codes: 0 done, 1 it failed, 2 wrong usage or configuration, 130 interrupted.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from penstock import __version__
from penstock.cli.early import noted_early
from penstock.cli.flags import Help, Parser
from penstock.errors import ConfigError, PenstockError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
COMMANDS = (
    "serve", "worker", "chat", "top", "drain", "sleep", "wake", "explain", "alerts", "bench", "doctor",
    "rollout", "scale", "keys", "usage", "simulate", "plan", "quantize", "generate", "cache", "completion",
)  # fmt: skip
"""The subcommands in the order of the help. Each is a module of `commands/` that adds its own parser, but for
those of `SHARED`."""
SHARED = {"wake": "sleep"}
"""Commands that another one's module adds."""

DESCRIPTION = """\
Serve language models behind the OpenAI API, on a laptop or a fleet.

Type `penstock serve` in one shell and `penstock chat` in another."""

EPILOG = """\
examples:
  penstock serve                        serve the built-in demo model on http://127.0.0.1:8000/v1
  penstock serve ./Qwen3-0.6B           serve a Hugging Face model directory
  penstock chat "What is a penstock?"   ask once; without a question: a conversation
  penstock bench --concurrency 1,8,32   measure TTFT, TPOT and throughput
  penstock top                          show the fleet, live
  penstock explain chatcmpl-7f3a...     why did that request go there
  penstock alerts                       what is wrong, and what burns the error budget
  penstock doctor                       say what works on this machine, and why not
  penstock usage --since 7d             say what was used and what it cost
  penstock rollout start support@2      try a new version on a few conversations, and judge it
  penstock scale support --to 4         so many workers for a while, whatever the load
  penstock keys create --tenant acme    make an API key
  penstock generate questions.jsonl     answer every line of a file, without a server
  penstock simulate spike-20x           run a scenario on virtual time; --list names them all
  penstock plan --model 70b --rps 20    how many of which accelerator, and what a token costs

`penstock COMMAND --help` tells more about a command."""


def build_parser(only: str = "") -> argparse.ArgumentParser:
    """The whole command line; or no other subcommand than `only`, if there is one of that name."""
    parser = Parser(
        prog="penstock", description=DESCRIPTION, epilog=EPILOG, formatter_class=Help, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    wanted = [only] if only in COMMANDS else COMMANDS
    for module in dict.fromkeys(SHARED.get(name, name) for name in wanted):
        import_module(f"penstock.cli.commands.{module}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the return value is the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        with noted_early() if argv[:1] == ["serve"] else contextlib.nullcontext():
            args = build_parser(argv[0] if argv else "").parse_args(argv)
            return int(args.run(args))
    except ConfigError as error:
        return _complain(error, EXIT_USAGE)
    except PenstockError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`penstock doctor | head -1`). Keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _complain(error: PenstockError, code: int) -> int:
    print(f"penstock: {error}", file=sys.stderr)
    return code

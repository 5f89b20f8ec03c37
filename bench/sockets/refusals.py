"""The gateway's CPU per request under a load that it mostly refuses, of this build beside another one.

    python -m bench.sockets.refusals --beside DIR/.venv/bin/python [--rounds 5] [--rate 900] [--json FILE]

Both builds serve the demo model on one thread, one after the other in turns, with their defaults and hashed
keys. Clients offer `--rate` requests per second and leave when they are refused (bench/sockets/open_load.py
has their bands and lengths), after five seconds at a ninth of it, in which the queue learns its pace. A
figure is the gateway process's CPU time over all requests that were sent, in microseconds: those that it
answered are a tenth or less of them.
"""

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench.harness import command_line, in_turns, ratio, spread, table, write_result
from bench.sockets.overload import Measurement, Stack

WARM_S = 5.0


def measure(args: argparse.Namespace, python: str) -> dict[str, float]:
    """One server of this build, from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="refusals-") as name:
        stack = Stack(Path(name), python, "penstock-demo")
        try:
            stack.start()
            return asyncio.run(_under_load(args, stack))
        finally:
            stack.stop()


async def _under_load(args: argparse.Namespace, stack: Stack) -> dict[str, float]:
    measurement = Measurement(stack, args, args.seed)
    try:
        await measurement.idle()
        await measurement.stretch("warm", args.rate / 9, "leaves", WARM_S)
        before_s = stack.cpu_s()
        found = await measurement.stretch("refusals", args.rate, "leaves", args.seconds)
        spent_us = 1e6 * (stack.cpu_s() - before_s)
    finally:
        await measurement.close()
    return {
        "us_per_request": spent_us / found["attempts"],
        "refused_share": found["refusals"] / found["attempts"],
        "goodput_rps": found["goodput_rps"],
    }


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--beside", required=True, metavar="PYTHON", help="the other build's interpreter")
    parser.add_argument("--rate", type=float, default=900.0, help="offered requests per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    builds = {"this build": sys.executable, "the other": args.beside}
    rounds = in_turns(
        args.rounds, {name: partial(measure, args, path) for name, path in builds.items()}, warm_up=False
    )
    figures = ("us_per_request", "refused_share", "goodput_rps")
    columns = {
        name: {key: [each[key] for each in found] for key in figures} for name, found in rounds.items()
    }
    print(table(
        ["build", "us of CPU per request", "of them refused", "good requests/s"],
        [[name, *(spread(found[key]) for key in figures)] for name, found in columns.items()],
    ))  # fmt: skip
    share = ratio(columns["this build"]["us_per_request"], columns["the other"]["us_per_request"])
    print(f"this build over the other, round by round: {share}")
    write_result(args.json, {"ratio": share.rounded(), "rounds": rounds})


if __name__ == "__main__":
    main()

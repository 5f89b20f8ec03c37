"""`penstock drain`: take a worker out of service, or bring it back."""

import argparse
import asyncio
import sys

from penstock.cli import console
from penstock.cli.commands.remote import FleetClient, add_admin_flags, connect_admin
from penstock.cli.flags import Commands, Help, duration
from penstock.clock import sleep

LOOK_S = 0.5

DESCRIPTION = """\
Take a worker out of service: it is sent nothing more, its streams may end, and then it is gone.

A worker that the server launched ends; one that was started elsewhere is only released. It stays away,
whatever DNS, Kubernetes or the configuration say, until --undo or until the server starts again."""

EPILOG = """\
WORKER is an id as `penstock top` shows it. Needs an admin key, as `penstock top` does.
exit code: 0 done, 1 no such worker or no server, 2 wrong usage, 130 stopped waiting (it drains on)

examples:
  penstock drain qwen3-8b-1
  penstock drain qwen3-8b@10.0.0.7:8000 --timeout 2m
  penstock drain qwen3-8b-1 --undo"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "drain",
        help="take a worker out of service, or bring it back",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("worker", metavar="WORKER", help="which one")
    parser.add_argument(
        "--timeout",
        type=duration,
        metavar="TIME",
        help="its streams have so long: 30s, 10m (default: fleet.drain_timeout_s)",
    )
    parser.add_argument("--undo", action="store_true", help="bring it back")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is gone")
    add_admin_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock drain`."""
    return asyncio.run(_drain(args))


async def _drain(args: argparse.Namespace) -> int:
    fleet = connect_admin(args)
    try:
        if args.undo:
            answer = await fleet.order(args.worker, "undrain")
            _say(f"{args.worker} may come back; it is {answer['state']}.")
            return 0
        answer = await fleet.order(args.worker, "drain", args.timeout)
        if not args.no_wait:
            await _wait(fleet, args.worker)
            _say(f"{args.worker} is drained; `penstock drain {args.worker} --undo` brings it back.")
        else:
            _say(f"{args.worker} drains {answer['streams']} streams.")
        return 0
    finally:
        await fleet.close()


async def _wait(fleet: FleetClient, worker_id: str) -> None:
    """Return when it is gone."""
    shown = None
    while True:
        found = [worker for worker in (await fleet.report()).workers if worker.id == worker_id]
        if not found or found[0].state == "gone":
            return
        if sys.stderr.isatty() and found[0].running != shown:
            shown = found[0].running
            _say(f"{worker_id} still runs {shown} requests (Ctrl-C stops waiting, not draining)")
        await sleep(LOOK_S)


def _say(text: str) -> None:
    console.err().print(text, markup=False, soft_wrap=True)

"""`penstock top`: the fleet, live."""

import argparse
import asyncio
import sys

import msgspec
from rich.live import Live

from penstock.bench.client import EndpointError
from penstock.cli import console
from penstock.cli.commands.fleet_client import FleetClient, add_admin_flags, connect_admin
from penstock.cli.commands.fleet_view import FleetView, tables, view_of
from penstock.cli.flags import Commands, Help, number
from penstock.clock import NS_PER_S, Clock, SystemClock, sleep
from penstock.protocol.fleet import FleetReport

DESCRIPTION = """\
Show the fleet, live: every model with its queue, every worker with its state and its load.

Needs an admin key (auth.admin_keys, `penstock keys create --admin`); the key that `penstock serve`
makes for itself is one, and is found if it runs on this machine."""

EPILOG = """\
columns:
  queued     requests in this gateway's queue; run, wait: on the worker
  tokens/s   generated since the last look; TTFT: mean of the answers that began since then
  KV         share of the KV cache that running requests use
  heard      since the worker last said anything; -: nobody has said

states:
  starting, loading, warming, ready, suspect (it does not answer as it should), draining, gone;
  left alone: ready, but its breaker is open or it has no room, so it is given nothing or little

Ctrl-C ends it. Where standard output is no terminal it looks once.
exit code: 0 also after Ctrl-C, 1 no server or no answer, 2 wrong usage

examples:
  penstock top
  penstock top --once
  penstock top --json --interval 10 >> fleet.jsonl
  penstock top --url http://gpu-box:8000 --key sk-..."""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "top",
        help="show the fleet, live",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    add_admin_flags(parser)
    parser.add_argument(
        "--interval",
        type=number(float, 0.1, 3600),
        default=1.0,
        metavar="S",
        help="seconds between two looks (1)",
    )
    parser.add_argument("--once", action="store_true", help="look once (twice, for rates) and exit")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each look, for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock top`."""
    try:
        asyncio.run(_Top(args, SystemClock()).run())
    except KeyboardInterrupt:
        return 0  # That is how one leaves.
    return 0


class _Top:
    def __init__(self, args: argparse.Namespace, clock: Clock) -> None:
        self._fleet: FleetClient = connect_admin(args)
        self._where: str = args.url or "fleet"
        self._interval_s: float = args.interval
        self._json: bool = args.json
        self._once: bool = args.once or not (args.json or sys.stdout.isatty())
        self._clock = clock
        self._last: FleetReport | None = None
        self._last_ns = 0

    async def run(self) -> None:
        try:
            await self._look()  # Who is not let in is told so before the screen is ours.
            await sleep(self._interval_s)
            if self._once or self._json:
                await self._print()
            else:
                await self._show()
        finally:
            await self._fleet.close()

    async def _print(self) -> None:
        while True:
            view = await self._look()
            if self._json:
                sys.stdout.write(msgspec.json.encode(view).decode() + "\n")
                sys.stdout.flush()
            else:
                console.out().print(tables(view, self._where))
            if self._once:
                return
            await sleep(self._interval_s)

    async def _show(self) -> None:
        """Until Ctrl-C. A server that goes away is waited for, with what was known last."""
        screen = console.out()
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            view: FleetView | None = None
            while True:
                trouble = ""
                try:
                    view = await self._look()
                except EndpointError as error:
                    trouble = str(error).partition("\n")[0]
                if view is not None:
                    live.update(tables(view, self._where, trouble), refresh=True)
                await sleep(self._interval_s)

    async def _look(self) -> FleetView:
        report, now_ns = await self._fleet.report(), self._clock.now_ns()
        view = view_of(report, self._last, (now_ns - self._last_ns) / NS_PER_S)
        self._last, self._last_ns = report, now_ns
        return view

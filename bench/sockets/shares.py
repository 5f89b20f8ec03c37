"""Fair shares over sockets: two tenants of equal weight at two gateway processes, or at two servers that
share a Redis, in front of one engine of ours with 8 rows.

    python -m bench.sockets.shares [--tokens 8 24 96] [--windows 8] [--seconds 1] [--rounds 2]
                                   [--places processes machines] [--json FILE]

`even` has 16 connections in each place, `uneven` 16 in the first and 2 in the second: by numbers of
connections it would get 36 % of the service. All ask as fast as they are answered, for as many tokens each.
Printed is the share of `uneven` in windows of so many seconds (and 100 answers at least) one after the other,
where 50 % are due; the first one does not count. Each round starts new servers.
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from statistics import mean

from fair_askers import SLOTS, at_machines, in_processes, port_of, shares, two_tenants
from redis_process import RedisProcess
from stand_in_thread import Serve, shared_engine

from bench.harness import command_line, table, write_result

ANSWERS = 100


async def _measured(gateways: list[Serve], args: argparse.Namespace) -> dict[int, dict[str, object]]:
    found: dict[int, dict[str, object]] = {}
    with contextlib.ExitStack() as stack:
        askers = (
            await at_machines(gateways, stack)
            if len(gateways) > 1
            else await in_processes(port_of(gateways[0]), gateways[0].keys, stack)
        )
        for tokens in args.tokens:
            began = time.monotonic()
            windows = await shares(askers, tokens, [ANSWERS] * (args.windows + 1), seconds=args.seconds)
            window_s = (time.monotonic() - began) / (args.windows + 1)
            found[tokens] = {"shares": [round(each, 4) for each in windows], "window_s": round(window_s, 2)}
    return found


def measure(place: str, args: argparse.Namespace) -> dict[int, dict[str, object]]:
    """One round in one kind of place."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shares-")))
        gateways: list[Serve] = []
        if place == "machines":
            redis = RedisProcess(directory)
            redis.start()
            stack.callback(redis.kill)
            engine = stack.enter_context(shared_engine(SLOTS))
            shared = f"shared: {{url: '{redis.url}', prefix: fair, gateways: 2}}"
            gateways = [two_tenants(directory / name, engine, shared) for name in ("one", "two")]
        else:
            gateways = [two_tenants(directory / "gateway", None, processes=2)]
        for gateway in gateways:
            stack.callback(gateway.kill)
            gateway.server.wait_ready()
        return asyncio.run(_measured(gateways, args))


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, rounds=2)
    parser.add_argument(
        "--places", nargs="*", choices=["processes", "machines"], default=["processes", "machines"]
    )
    parser.add_argument("--tokens", nargs="*", type=int, default=[8, 24, 96], help="of every answer")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each window, at least")
    args = parser.parse_args()
    rounds: list[dict[str, dict[int, dict[str, object]]]] = []
    rows: list[list[str]] = []
    for number in range(args.rounds):
        rounds.append({place: measure(place, args) for place in args.places})
        for place, found in rounds[-1].items():
            for tokens, each in found.items():
                windows = each["shares"]
                assert isinstance(windows, list)
                rows.append([
                    str(number), place, str(tokens), f"{each['window_s']}", f"{mean(windows):.1%}",
                    f"{min(windows):.1%} to {max(windows):.1%}",
                ])  # fmt: skip
    print(table(["round", "place", "tokens", "window, s", "mean", "windows"], rows))
    write_result(args.json, {"settings": {**vars(args), "json": ""}, "rounds": rounds})


if __name__ == "__main__":
    main()

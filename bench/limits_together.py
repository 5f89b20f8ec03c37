"""How much several gateway processes over one real Redis grant together beyond a limit, and beyond a budget.

    python bench/limits_together.py [--gateways 8] [--rounds 3] [--tree DIR ...] [--json FILE]

Each gateway is a `penstock serve` of its own, in front of one scripted worker. All gateways are flooded at
once, with the whole limit unused, by clients that ask until they have been refused some times in a row. The
allowance is the limit (a full bucket) and what refilled from the first request to the last answer; what was
granted beyond it is given as a share of the limit, beside the bound: 1 % of the limit, or one request; of a
budget, one request of each gateway.

With several `--tree`, source trees of this project are measured one after the other in the same run. Clients,
gateways and Redis run on the same cores: a gateway or a Redis that has to wait for a core for 50 ms is a late
store, and what is then granted on credit is in the figures.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import command_line, write_result

from penstock.bench.client import ApiAddress, Client

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "doubles"))
from engine_stand_ins import StandIn
from redis_process import RedisProcess
from served import Server
from stand_in_thread import MODEL, stand_in_engine
from tenant_keys import add

HERE = Path(__file__).resolve().parents[1]
CLIENTS, IN_A_ROW, PAUSE_S = 2, 8, 0.02
"""Of each gateway; refusals after which a client ends; what it waits after each."""
BOUND_SHARE = 0.01
COMMAND = (sys.executable, "-P", "-m", "penstock", "serve")
"""-P: the package is that of the tree, not of the directory that this is called from."""
SETTLE_S = 3.0
"""Until the last gateway is known to the others."""


@dataclass(frozen=True)
class Limit:
    """One limit, and the requests that are sent against it. Amounts are requests, tokens, or cents."""

    name: str
    tenant: str
    amount: int
    each: int = 1
    is_budget: bool = False

    def bound(self, num_gateways: int) -> float:
        return num_gateways if self.is_budget else max(BOUND_SHARE * self.amount, self.each)


LIMITS = (
    Limit("60 requests a minute", "requests_per_minute: 60", 60),
    Limit("600 requests a minute", "requests_per_minute: 600", 600),
    Limit("60,000 tokens a minute, 100 each", "tokens_per_minute: 60000", 60_000, each=100),
    Limit("60,000 tokens a minute, 2,000 each", "tokens_per_minute: 60000", 60_000, each=2000),
    Limit("60 requests a minute of one user", "per_user: {requests_per_minute: 60}", 60),
    Limit("a budget of 60 requests", "budget_per_day: 0.60", 60, is_budget=True),
)


@dataclass(frozen=True)
class Outcome:
    """One flood."""

    limit: str
    granted: int
    allowed: float
    bound: float

    @property
    def over(self) -> float:
        return max(0.0, self.granted - self.allowed)

    @property
    def holds(self) -> bool:
        return self.over <= self.bound


class Fleet:
    """The gateways of one source tree, their Redis and their tenants: one for each limit and round."""

    def __init__(
        self, place: Path, tree: Path, engine: StandIn, redis_url: str, args: argparse.Namespace
    ) -> None:
        place.mkdir()
        names = {f"t{i}-{j}": each.tenant for i, each in enumerate(LIMITS) for j in range(args.rounds)}
        keys = place / "keys.jsonl"
        self.keys = {name: add(keys, tenant=name).key for name in names}
        tenants = ", ".join(f"{{id: {name}, {facts}}}" for name, facts in names.items())
        worker = f"{{url: '{engine.url}', engine: vllm, served_model: {engine.MODEL}}}"
        self._servers = list[Server]()
        for number in range(args.gateways):
            home = place / str(number)
            home.mkdir()
            (home / "penstock.yaml").write_text(
                "server: {port: 0, lameduck_s: 0, drain_timeout_s: 1}\n"
                f"auth: {{keys_file: {keys}, secret: {'x' * 20}}}\n"
                "log: {access: false}\n"
                "admission: {ttft_target_ms: 0, tpot_target_ms: 0}\n"
                f"shared: {{url: '{redis_url}', prefix: {place.name}, gateways: {args.gateways}}}\n"
                f"prices: {{models: [{{model: {MODEL}, request: 0.01}}]}}\n"
                f"models: [{{path: penstock-demo-mini, name: {MODEL}, replicas: 0, workers: [{worker}]}}]\n"
                f"tenants: [{tenants}]\n"
            )
            argv = ("-c", str(home / "penstock.yaml"))
            state = str(home / "state")
            here = {"PYTHONPATH": str(tree.resolve()), "PENSTOCK_STATE_DIR": state}
            self._servers.append(Server(home, *argv, command=COMMAND, **here))
        for server in self._servers:
            server.wait_ready()

    def flood(self, place: int, turn: int) -> Outcome:
        """All gateways at once, until nothing more is granted."""
        limit, key = LIMITS[place], self.keys[f"t{place}-{turn}"]
        prompt = [7] * (limit.each - 1) if limit.each > 1 else "a"
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, "user": "one"}).encode()
        begun = time.monotonic()
        granted = asyncio.run(self._ask_all(key, body)) * limit.each
        refilled = limit.amount / 60 * (time.monotonic() - begun) if not limit.is_budget else 0
        return Outcome(limit.name, granted, limit.amount + refilled, limit.bound(len(self._servers)))

    async def _ask_all(self, key: str, body: bytes) -> int:
        clients = [
            Client(ApiAddress.parse(server.url), key=key) for server in self._servers for _ in range(CLIENTS)
        ]
        try:
            return sum(await asyncio.gather(*(_ask(client, body) for client in clients)))
        finally:
            for client in clients:
                await client.close()

    def stop(self) -> None:
        for server in self._servers:
            server.close()


async def _ask(client: Client, body: bytes) -> int:
    granted = refused = 0
    while refused < IN_A_ROW:
        response = await client.post("/completions", body)
        if response.status == 429:
            refused += 1
            await asyncio.sleep(PAUSE_S)
            continue
        assert response.status == 200, response.body
        granted, refused = granted + 1, 0
    return granted


def measure(tree: Path, place: Path, engine: StandIn, args: argparse.Namespace) -> list[Outcome]:
    """All limits, in turns."""
    redis = RedisProcess(place)
    redis.start()
    fleet = Fleet(place / "gateways", tree, engine, redis.url, args)
    try:
        time.sleep(SETTLE_S)
        return [fleet.flood(i, turn) for turn in range(args.rounds) for i in range(len(LIMITS))]
    finally:
        fleet.stop()
        redis.kill()


def table(outcomes: Sequence[Outcome]) -> None:
    print(f"{'limit':38}{'granted':>24}{'worst over':>12}{'bound':>9}  holds")
    for limit in LIMITS:
        found = [each for each in outcomes if each.limit == limit.name]
        granted = " ".join(f"{each.granted}/{each.allowed:.0f}" for each in found[:3])
        worst = max(each.over for each in found)
        share = f"{100 * worst / limit.amount:.1f} %"
        holds = "yes" if all(each.holds for each in found) else "NO"
        print(
            f"{limit.name:38}{granted:>24}{share:>12}{100 * found[0].bound / limit.amount:>7.1f} %  {holds}"
        )


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--tree", type=Path, nargs="+", default=[HERE])
    args = parser.parse_args()
    if not RedisProcess.is_installed():
        sys.exit("redis-server is not installed")
    results: dict[str, list[dict[str, object]]] = {}
    with ExitStack() as stack:
        engine = stack.enter_context(stand_in_engine())
        for number, tree in enumerate(args.tree):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            outcomes = measure(tree, place, engine, args)
            name = "this" if tree.resolve() == HERE else f"earlier {number}"
            print(f"\n{name}, {args.gateways} gateways, load average {os.getloadavg()[0]:.1f}")
            table(outcomes)
            results[name] = [{**asdict(each), "over": each.over, "holds": each.holds} for each in outcomes]
    write_result(args.json, {"gateways": args.gateways, "rounds": args.rounds, "trees": results})


if __name__ == "__main__":
    main()

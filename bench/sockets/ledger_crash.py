"""Kill -9 of gateway or worker at random points over thousands of requests: every accepted request has
exactly one record.

    python -m bench.sockets.ledger_crash [--requests 10000] [--concurrency 64] [--kills 12] [--model
    penstock-demo-mini] [--seed 1] [--out FILE]

Starts `penstock serve` with a ledger in a temporary directory, a tenant with a hashed key, every limit and
both budgets, sends streamed requests, and at random moments kills the gateway (and starts it again) or its
worker (which the gateway does itself). Every request carries a name of its own in `user`, so what the client
saw and what the ledger says can be compared one by one:

- a request whose first byte the client saw has exactly one record; no request has two;
- where the client saw the end and its usage, the record is finished and has the same tokens, to the token;
- the cost of every record is that of its tokens by the price list;
- what the limiter and the budgets of all lives of the gateway have settled (live_totals.py), in tokens and in
  money, is the sum of the records that these lives have closed; the others are those that the next
  start recovered;
- what the budgets of the last life began with is the sum of all records.

Exits with 1 if any of that is not so.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from bench.harness import command_line, write_result
from bench.sockets import live_totals
from penstock import rng
from penstock.bench.client import ApiAddress, CannotConnect, Client, ClientLimits, EndpointError
from penstock.clock import NS_PER_S, SystemClock, sleep
from penstock.config.ledger import ModelPrice, PricesConfig
from penstock.config.tenancy import TierConfig
from penstock.gateway.identity.api_keys import edit_keys, issue
from penstock.policy.limits.price import PriceList
from penstock.protocol.openai import UsageBody
from penstock.protocol.server_answers import decode_chat_event
from penstock.protocol.stream import EventReader
from penstock.telemetry import ledger_segment
from penstock.types import Usage

PRICE = PricesConfig(models=(ModelPrice(model="*", input=1.0, cached_input=0.25, output=4.0),))
TIER = TierConfig(
    name="limited",
    requests_per_minute=1_000_000,
    tokens_per_minute=100_000_000,
    concurrent_max=10_000,
    output_tokens_max=10_000,
    context_tokens_max=20_000,
    budget_per_day=1e6,
    budget_per_month=1e7,
)
START_S = 120.0
WORDS = ("water", "pipe", "gate", "turbine", "river", "dam", "flow", "head")
CLOCK = SystemClock()


@dataclass(slots=True)
class Seen:
    """The client's view of one request."""

    status: int = 0
    started: bool = False
    usage: UsageBody | None = None
    done: bool = False
    error: bool = False
    reader: EventReader = field(default_factory=EventReader)

    def on_bytes(self, data: bytes) -> None:
        self.started = True
        for event in self.reader.feed(data):
            if event == b"[DONE]":
                self.done = True
                continue
            chunk = decode_chat_event(event)
            self.usage = chunk.usage or self.usage
            self.error = self.error or chunk.error is not None


class Server:
    """`penstock serve`, which is killed and started again."""

    def __init__(self, place: Path, model: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.ledger, self.lives, self._log = place / "ledger", place / "lives", place / "log"
        self._config, self._state = place / "config.yaml", place / "state"
        issued = issue(1, tenant=live_totals.TENANT, tier=TIER.name)
        self.key = issued.key
        edit_keys(place / "keys", lambda _: ([issued.record], None))
        config = {
            "server": {"port": self.port},
            "auth": {"keys_file": str(place / "keys")},
            "tiers": [TIER],
            "log": {"access": False, "level": "warning"},
            "models": [{"path": model, "name": "m", "engine": {"threads": 1}}],
            "prices": PRICE,
            "ledger": {"directory": str(self.ledger)},
        }
        self._config.write_bytes(msgspec.json.encode(config))  # JSON is YAML.
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, live_totals.__file__, str(self.lives), "serve", "-c", str(self._config)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PENSTOCK_STATE_DIR": str(self._state)},
            )

    async def ready(self) -> None:
        client = Client(ApiAddress("http", "127.0.0.1", self.port, ""))
        deadline_ns = CLOCK.now_ns() + int(START_S * NS_PER_S)
        while CLOCK.now_ns() < deadline_ns:
            with contextlib.suppress(EndpointError):
                if (await client.get("/ready")).status == 200:
                    return
            if self.process.poll() is not None:
                break
            await sleep(0.1)
        raise SystemExit(f"the server does not come up:\n{self._log.read_text()[-4000:]}")

    async def kill_gateway(self) -> None:
        workers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(workers, timeout=30)  # They notice by themselves that nobody is there any more.
        self.process = self._start()
        await self.ready()

    def kill_worker(self) -> None:
        children = psutil.Process(self.process.pid).children()
        for child in children[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Load:
    """Clients that ask one request after the other, each under a name of its own."""

    def __init__(self, server: Server, num: int, seed: int) -> None:
        self._client = Client(
            ApiAddress.parse(f"http://127.0.0.1:{server.port}/v1"),
            key=server.key,
            # A connection that is used again may make the client send a request twice.
            limits=ClientLimits(idle_connections_max=0, request_timeout_s=120.0),
        )
        self._num, self._random = num, rng.stream(seed, "load")
        self.seen: dict[str, Seen] = {}
        self.num_begun = 0
        """Requests that got the first byte of an answer."""

    async def run(self, concurrency: int) -> None:
        await asyncio.gather(*(self._ask() for _ in range(concurrency)))

    async def _ask(self) -> None:
        while self.num_begun < self._num:
            name = f"c{len(self.seen):06}"
            seen = self.seen[name] = Seen()
            body = {
                "model": "m",
                "user": name,
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": self._random.randint(1, 24),
                "messages": [{"role": "user", "content": " ".join(self._random.choices(WORDS, k=6))}],
            }
            await self._send(msgspec.json.encode(body), seen)
            self.num_begun += seen.started
            if not seen.started:
                await sleep(0.2)  # Refused: nothing is ready yet.

    async def _send(self, body: bytes, seen: Seen) -> None:
        while True:
            try:
                seen.status = (await self._client.post("/chat/completions", body, seen)).status
                return
            except CannotConnect:
                await sleep(0.1)  # Nobody was there, so nothing was sent.
            except EndpointError:
                return


@dataclass(slots=True)
class Verdict:
    """The comparisons, and the errors."""

    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The ledger's record of one request. Fields are columns."""

    user: str
    request_id: str
    outcome: str
    recovered: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_micros: int

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
        )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def read_records(ledger: Path) -> list[Record]:
    connection = sqlite3.connect(ledger_segment.database_path(ledger))
    rows = connection.execute(f"SELECT {', '.join(Record.__struct_fields__)} FROM usage").fetchall()
    connection.close()
    return [Record(*row) for row in rows]


def compare(seen: dict[str, Seen], records: list[Record], verdict: Verdict) -> None:
    """The clients' view beside the ledger, request by request and in sum."""
    prices = PriceList(PRICE)
    by_user: dict[str, list[Record]] = {}
    for record in records:
        by_user.setdefault(record.user, []).append(record)
    for user in by_user.keys() - seen.keys():
        verdict.wrong.append(f"{user}: a record of a request that was never sent")
    for name, one in seen.items():
        found = by_user.get(name, [])
        verdict.counts["finished" if one.done else "cut off" if one.started else "refused"] += 1
        if len(found) > 1:
            verdict.wrong.append(f"{name}: {len(found)} records")
        elif one.started and not found:
            verdict.wrong.append(f"{name}: no record, and the client has part of its answer")
        for record in found:
            verdict.counts[f"record: {record.outcome}{', recovered' if record.recovered else ''}"] += 1
            right = prices.cost_micros("m", record.usage)
            if record.cost_micros != right:
                verdict.wrong.append(f"{name}: costs {record.cost_micros}, by the price list {right}")
            if one.done and one.usage and not one.error:
                reported = one.usage.prompt_tokens or 0, one.usage.completion_tokens or 0
                said = record.prompt_tokens, record.completion_tokens
                verdict.counts["tokens of finished answers, by the clients"] += sum(reported)
                verdict.counts["tokens of finished answers, by the ledger"] += sum(said)
                if (record.outcome, record.recovered, said) != ("finished", 0, reported):
                    verdict.wrong.append(f"{name}: the client was told {reported}, the record is {record}")


def settle(lives: list[live_totals.Life], records: list[Record], verdict: Verdict) -> None:
    """The amounts that limiters and budgets have settled, life by life, beside the ledger."""
    # A life that ended between settling and closing, or between closing and saying so, is left out on both
    # sides.
    between = {life.settling for life in lives if life.settling}
    closed = [one for one in records if not one.recovered and one.request_id not in between]
    verdict.counts["killed while settling"] = len(between)
    for what, live, ledger in (
        ("limiters' tokens", sum(life.tokens for life in lives), sum(one.tokens for one in closed)),
        ("budgets' micros", sum(life.micros for life in lives), sum(one.cost_micros for one in closed)),
        (
            "micros that the last budgets began with",
            lives[-1].restored_micros,
            sum(one.cost_micros for one in records),
        ),
    ):
        verdict.counts[what] = live
        verdict.counts[f"{what}, by the ledger"] = ledger
        if live != ledger:
            verdict.wrong.append(f"{what}: {live}, by the ledger {ledger}")


async def kill_at_random(server: Server, load: Load, total: int, kills: int, seed: int) -> Counter[str]:
    """Kill at random numbers of requests, gateway and worker in random order."""
    random, killed = rng.stream(seed, "kills"), Counter[str]()
    for goal in sorted(random.sample(range(total // 20, total * 19 // 20), kills)):
        while load.num_begun < goal:
            await sleep(0.01)
        await sleep(random.random() * 0.2)
        if random.random() < 0.5:
            killed["gateway"] += 1
            await server.kill_gateway()
        else:
            killed["worker"] += 1
            server.kill_worker()
    return killed


async def run(args: argparse.Namespace, place: Path) -> int:
    server = Server(place, args.model)
    try:
        await server.ready()
        load = Load(server, args.requests, args.seed)
        begun_ns = CLOCK.now_ns()
        asking = asyncio.create_task(load.run(args.concurrency))
        killed = await kill_at_random(server, load, args.requests, args.kills, args.seed)
        await asking
        elapsed_s = (CLOCK.now_ns() - begun_ns) / NS_PER_S
        server.stop()
        server.process = server._start()
        await server.ready()
        server.stop()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.process.pid, signal.SIGKILL)
    verdict, records = Verdict(), read_records(server.ledger)
    compare(load.seen, records, verdict)
    settle(live_totals.read_lives(server.lives), records, verdict)
    print(f"{args.requests} requests in {elapsed_s:.0f} s; killed: {dict(killed)}")
    for name, num in sorted(verdict.counts.items()):
        print(f"  {name:54} {num}")
    for line in verdict.wrong[:20]:
        print(f"WRONG {line}")
    print(
        "settled == ledger, nothing lost, nothing twice"
        if not verdict.wrong
        else f"{len(verdict.wrong)} WRONG"
    )
    if args.json:
        asked = {
            "requests": args.requests,
            "concurrency": args.concurrency,
            "model": args.model,
            "seed": args.seed,
        }
        found = {
            "seconds": round(elapsed_s),
            "killed": killed,
            "counts": verdict.counts,
            "wrong": verdict.wrong,
        }
        write_result(args.json, asked | found)
    return 1 if verdict.wrong else 0


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--model", default="penstock-demo-mini")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(run(args, Path(name)))


if __name__ == "__main__":
    sys.exit(main())

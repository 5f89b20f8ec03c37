"""Failures and load over sockets and in the simulator, with the same arrivals and the same policy: what each
side counted.

    python -m bench.sockets.sockets_and_sim [--seed 1] [--only overload ...] [--json FILE]

failing route    a model's only worker, a provider's, answers 500 for ten seconds; another model is idle
slow route       the same worker takes four seconds to its first token for ten seconds
worker crash     one of two workers of ours is killed under eight streams
overload, flood, external flood: see load_and_sim.py

Over sockets: `penstock serve` with demo models, a scripted provider in a process of its own, and a client per
request, at fixed times. Attempts are those of the ledger; "own again" is when, after the trouble,
the first request was answered by its own model.
"""

import json
import os
import signal
import sqlite3
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from provider_process import ProviderProcess
from served import Server

from bench.harness import command_line, write_result
from bench.sockets import load_and_sim
from penstock.clock import NS_PER_S
from penstock.config.routing import ModelRoute, RoutingConfig
from penstock.config.tree import Config
from penstock.sim.report.figures import Objective
from penstock.sim.scenarios.scenario import pool, setup
from penstock.sim.scenarios.setup import Knobs, play
from penstock.sim.traffic.workload import Chat, LengthDistribution
from penstock.sim.world.faults import FaultKind, InjectedFault
from penstock.sim.world.run import RequestRecord

BEGINS_S, ENDS_S, LASTS_S, EVERY_S = 10.0, 20.0, 45.0, 0.25
"""Of a route: when the trouble begins and ends, how long requests come, and how far apart."""
SLOW_S, USUAL_S = 4.0, 0.1
"""To the first token at the route, when it is slow and else."""
CRASH_S, STREAMS, TOKENS, SERVED_TOKENS = 2.0, 8, 300, 1200
"""Of a crash. The demo model is faster than the simulator's 7B, so its answers are longer."""


@dataclass
class Even:
    """Arrivals at equal distances."""

    first_s: float
    every_s: float
    last_s: float

    def times(self, stream: object, seconds: float) -> Iterator[float]:
        """See `penstock.sim.traffic.workload.Arrivals`."""
        del stream
        at_s = self.first_s
        while at_s < min(self.last_s, seconds):
            yield at_s
            at_s += self.every_s


class Seen(msgspec.Struct, frozen=True):
    """One request: when it came, and the record of it."""

    at_s: float
    model: str
    outcome: str
    attempts: int
    tokens: int


def counted_of_route(seen: Sequence[Seen]) -> dict[str, float]:
    """The effect of a route in trouble on the requests."""
    after = [each.at_s - ENDS_S for each in seen if each.at_s >= ENDS_S and each.model == "big"]
    return {
        "requests": len(seen),
        "failed": sum(each.outcome != "finished" for each in seen),
        "answered by the fallback": sum(each.model == "small" for each in seen),
        "tried at the route, then at the fallback": sum(
            each.model == "small" and each.attempts > 1 for each in seen
        ),
        "own again, s after the trouble": round(min(after, default=float("nan")), 1),
    }


def counted_of_crash(seen: Sequence[Seen], tokens: int) -> dict[str, float]:
    """The effect of a worker's death on the streams."""
    return {
        "streams": len(seen),
        "failed": sum(each.outcome != "finished" for each in seen),
        "started twice": sum(each.attempts == 2 for each in seen),
        "started oftener": sum(each.attempts > 2 for each in seen),
        "tokens that are missing": len(seen) * tokens - sum(each.tokens for each in seen),
    }


# --- in the simulator ----------------------------------------------------------------------------------


def of_record(record: RequestRecord) -> Seen:
    return Seen(
        record.at_ns / NS_PER_S,
        {"model": "big", "spare": "small"}.get(record.model, record.model),
        record.outcome.value,
        record.attempts,
        record.completion_tokens,
    )


def simulated_route(kind: FaultKind, amount: float, seed: int) -> list[Seen]:
    routing = RoutingConfig(models=(ModelRoute(model="model", fallback="spare"),))
    knobs = Knobs(config=msgspec.structs.replace(Config(), routing=routing))
    pools = [pool(knobs, workers=1), pool(knobs, workers=1, name="spare")]
    pools[0] = replace(pools[0], worker=replace(pools[0].worker, is_external=True))
    source = Chat(
        arrivals=Even(0.0, EVERY_S, LASTS_S),
        prompt=LengthDistribution(60),
        output=LengthDistribution(8, maximum=8),
    )
    fault = InjectedFault(kind, int(BEGINS_S * NS_PER_S), int(ENDS_S * NS_PER_S), 0, amount)
    objective = Objective(ttft_ms=20_000, tpot_ms=1000)
    made = setup(knobs, pools, [source], seconds=LASTS_S, faults=[fault], objective=objective)
    return [of_record(record) for record in play(made, seed).records]


def simulated_crash(seed: int) -> list[Seen]:
    source = Chat(
        arrivals=Even(0.0, 0.01, 0.01 * STREAMS),
        prompt=LengthDistribution(60),
        output=LengthDistribution(TOKENS, sigma=0.0, maximum=TOKENS),
    )
    fault = InjectedFault(FaultKind.WORKER_CRASH, int(CRASH_S * NS_PER_S), 0, 0, 1.0)
    objective = Objective(ttft_ms=20_000, tpot_ms=1000)
    pools = [pool(Knobs(), workers=2)]
    made = setup(Knobs(), pools, [source], seconds=30, faults=[fault], objective=objective)
    return [of_record(record) for record in play(made, seed).records]


# --- over sockets --------------------------------------------------------------------------------------

PROMISES = "admission: {ttft_target_ms: 20000, tpot_target_ms: 1000, targets: []}"


class Gateway:
    """A `penstock serve`, asked at fixed times; `small` is ours, and `big` what `lines` say."""

    def __init__(self, place: Path, models: Sequence[str], *lines: str) -> None:
        self._ledger = place / "ledger"
        text = ["server: {port: 0, trust_local: true}", PROMISES, f"ledger: {{directory: {self._ledger}}}"]
        file = place / "penstock.yaml"
        file.write_text("\n".join([*text, "models:", *models, *lines]))
        self.server = Server(place, "-c", str(file), "--no-auth")
        self.server.wait_ready()
        self.server.until(self._is_ready, "not ready")
        self._came: dict[str, float] = {}
        self._threads: list[threading.Thread] = []
        self.began = time.monotonic()

    def ask(self, at_s: float, max_tokens: int) -> None:
        """Send a request at that time, and read its answer elsewhere."""
        time.sleep(max(0.0, self.began + at_s - time.monotonic()))
        thread = threading.Thread(target=self._ask, args=(at_s, max_tokens))
        thread.start()
        self._threads.append(thread)

    def seen(self) -> list[Seen]:
        """All of them, when the last has ended."""
        for thread in self._threads:
            thread.join()
        self.server.process.terminate()
        time.sleep(0.2)
        self.server.process.terminate()
        self.server.wait_ended()
        columns = "request_id, served_model, outcome, attempts, completion_tokens"
        with sqlite3.connect(self._ledger / "usage.sqlite") as ledger:
            rows = ledger.execute(f"SELECT {columns} FROM usage").fetchall()
        return [Seen(self._came.get(name, -1.0), *rest) for name, *rest in rows]

    def _ask(self, at_s: float, max_tokens: int) -> None:
        body = {"model": "big", "prompt": f"Story {at_s}: " + "once " * 20, "max_tokens": max_tokens}
        request = urllib.request.Request(
            f"{self.server.url}/completions",
            json.dumps({**body, "ignore_eos": True}).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                self._came[json.load(answer)["id"]] = at_s
        except urllib.error.HTTPError as error:
            self._came[error.headers["x-request-id"].replace("req", "cmpl")] = at_s

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.server.url.removesuffix("/v1") + "/ready", timeout=60):
                return True
        except urllib.error.HTTPError:
            return False


def served_route(place: Path, trouble: str) -> list[Seen]:
    with ProviderProcess() as provider:
        provider.behaves(delay_s=USUAL_S)
        worker = f"{{url: '{provider.url}', engine: openai, served_model: served, max_model_len: 512}}"
        models = [
            f"  - {{path: penstock-demo-mini, name: big, replicas: 0, workers: [{worker}]}}",
            "  - {path: penstock-demo-mini, name: small, engine: {threads: 1}}",
        ]
        gateway = Gateway(place, models, "routing: {models: [{model: big, fallback: small}]}")
        try:
            for number in range(int(LASTS_S / EVERY_S)):
                at_s = number * EVERY_S
                if at_s == BEGINS_S:
                    provider.fails(500) if trouble == "failing" else provider.behaves(delay_s=SLOW_S)
                if at_s == ENDS_S:
                    provider.behaves(delay_s=USUAL_S)
                gateway.ask(at_s, 8)
            return gateway.seen()
        finally:
            gateway.server.close()


def served_crash(place: Path) -> list[Seen]:
    models = ["  - {path: penstock-demo-mini, name: big, replicas: 2, engine: {threads: 1}}"]
    gateway = Gateway(place, models)
    try:
        for number in range(STREAMS):
            gateway.ask(0.01 * number, SERVED_TOKENS)
        time.sleep(0.7)
        os.kill(worker_of(gateway.server.process.pid), signal.SIGKILL)
        return gateway.seen()
    finally:
        gateway.server.close()


def worker_of(pid: int) -> int:
    """A worker process of that server, by /proc."""
    found = list[int]()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid and any(b"worker" in word for word in words):
            found.append(int(place.name))
    return min(found)


def main() -> None:
    """Run all, and print what each side counted."""
    parser = command_line(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    names = ["failing route", "slow route", "worker crash", *load_and_sim.LOADS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="SCENARIO")
    args = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="both-", ignore_cleanup_errors=True) as name:
        for number, scenario in enumerate(args.only):
            place = Path(name) / str(number)
            place.mkdir()
            if (load := load_and_sim.LOADS.get(scenario)) is not None:
                both = (
                    load_and_sim.counted(load, load_and_sim.simulated(load, args.seed)),
                    load_and_sim.counted(load, load_and_sim.served(load, place, args.seed)),
                )
            elif scenario == "worker crash":
                both = (
                    counted_of_crash(simulated_crash(args.seed), TOKENS),
                    counted_of_crash(served_crash(place), SERVED_TOKENS),
                )
            else:
                kind = FaultKind.GRAY if scenario == "failing route" else FaultKind.WORKER_SLOW
                both = (
                    counted_of_route(simulated_route(kind, 200.0, args.seed)),
                    counted_of_route(served_route(place, scenario.partition(" ")[0])),
                )
            found[scenario] = {"simulator": both[0], "sockets": both[1]}
            for words in both[0]:
                is_off = load is not None and load_and_sim.off(words, both[0][words], both[1][words])
                print(
                    f"{scenario:14} {words:42} {both[0][words]:8} {both[1][words]:8}{' OFF' * is_off}",
                    flush=True,
                )
    write_result(args.json, {"scenarios": found})


if __name__ == "__main__":
    main()

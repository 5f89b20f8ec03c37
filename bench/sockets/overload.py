"""Goodput under overload, over sockets: a real gateway, the real engine with a demo model on one thread,
open-loop clients.

    python -m bench.sockets.overload [--loads 2,5,20] [--seconds 15] [--repeats 1] [--seed 1] [--json FILE]
    python -m bench.sockets.overload --server DIR/.venv/bin/python ...     another build of the server

Goodput is requests per second that met both promises (TTFT and TPOT) in the last three quarters of the time,
also told as their output tokens. A promise is the default configuration's, by band, and never less than
`idle_factor` times what a request of that length takes on the idle machine, which is measured first. Then the
knee is searched, the highest offered rate at which 95 % of what is offered is good, and the rate with most
goodput is run once more, for longer: the peak. Then multiples of the knee; docs/testing-overload.md says
more. Loads count first attempts. Ctrl-C keeps what was measured. About four minutes.
"""

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.harness import command_line, spread, table, write_result
from bench.process import Served
from bench.sockets.open_load import MANNERS, Asked, Kind, OpenLoad, Sender
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.bench.load import percentile
from penstock.clock import NS_PER_MS, NS_PER_S, SystemClock
from penstock.config.routing import AdmissionConfig
from penstock.gateway.identity import api_keys
from penstock.gateway.identity.api_keys import edit_keys
from penstock.policy.admission.admit import IDLE_FACTOR, Promise, Promises

CLOCK = SystemClock()
MODEL = "m"
SENDERS = (
    Sender("prio-a", "priority", 0.06), Sender("prio-b", "priority", 0.04),
    Sender("web-a", "default", 0.20), Sender("web-b", "default", 0.20), Sender("web-c", "default", 0.10),
    Sender("web-d", "default", 0.10),
    Sender("batch-a", "bulk", 0.15), Sender("batch-b", "bulk", 0.15),
)  # fmt: skip
KINDS = (Kind("short", 8, 16, 0.5), Kind("chat", 40, 48, 0.35), Kind("long", 160, 120, 0.15))
IDLE_COUNT = 4
CALLERS, CLOSED_S = 40, 10.0
"""The closed loop that says where to look for the peak."""
SEARCH_FROM, SEARCH_TIMES, SEARCH_MAX, SEARCH_BETWEEN = 0.35, 1.4, 10, 2
"""The first load as a share of the closed loop's, by how much each is above the one before, how many at most,
and how many between the last that passed and the first that failed."""
KNEE = 0.95
"""Of the requests that are offered, how many are good up to the knee."""
WARM_SHARE = 0.25
"""Of a load's time, what is not counted."""
DRAIN_S = 30.0
LATE_MS = 50.0
"""A generator whose p95 is later than this was a part of what it measured: a tenth of the promise to a first
token."""
GOALS = {2: 0.95, 5: 0.90, 20: 0.85}


class Stack(Served):
    """A server process, which runs its engine, and the keys of its tenants."""

    def __init__(self, place: Path, python: str, model: str, processes: int = 1) -> None:
        """`processes`: of the gateway."""
        file, self._keys = place / "keys", dict[str, str]()
        for sender in SENDERS:
            issued = api_keys.issue(int(time.time()), tenant=sender.name)
            edit_keys(file, lambda keys, issued=issued: ((*keys, issued.record), None))
            self._keys[sender.name] = issued.key
        config = {
            "models": [
                {"path": model, "name": MODEL, "engine": {"threads": 1, "kv_memory_bytes": 512 << 20}}
            ],
            "server": {"drain_timeout_s": 1, "processes": processes},
            "auth": {"keys_file": str(file)},
            "tenants": [{"id": sender.name, "band": sender.band} for sender in SENDERS],
            "log": {"access": False},
        }
        super().__init__(place, config, command=(python, "-m", "penstock", "serve"))

    def gateway_cpu_s(self) -> float:
        """CPU-seconds of the gateway process until now, without its engine's."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def clients(self) -> dict[str, Client]:
        """One for each tenant."""
        endpoint = ApiAddress("http", "127.0.0.1", self.port, "/v1")
        limits = ClientLimits(request_timeout_s=120)
        return {name: Client(endpoint, key=key, limits=limits) for name, key in self._keys.items()}


@dataclass(slots=True)
class Judge:
    """Which requests were good."""

    admission: AdmissionConfig
    idle_ttft_ns: dict[str, int]
    """By length class."""
    idle_tpot_ns: int

    def promise(self, asked: Asked) -> Promise:
        """The promise to the request, on this machine."""
        configured = Promises(self.admission).of(tier="", band=asked.sender.band)
        return configured.on(IDLE_FACTOR, self.idle_ttft_ns[asked.kind.name], self.idle_tpot_ns)

    def is_good(self, asked: Asked) -> bool:
        """Whether it was answered, and in time."""
        return asked.ok and self.promise(asked).is_kept(asked.ttft_ns, asked.tpot_ns)


def milliseconds(times_ns: list[int]) -> dict[str, float]:
    """Two percentiles; of nothing, nothing."""
    ordered = sorted(times_ns)
    shares = {"p50": 0.5, "p95": 0.95} if ordered else {}
    return {name: round(percentile(ordered, share) / NS_PER_MS, 1) for name, share in shares.items()}


def goodput(good: list[Asked], window_s: float) -> dict[str, float]:
    """Of those that were good in the window: requests and tokens per second."""
    return {
        "goodput_rps": len(good) / window_s,
        "goodput_tps": sum(each.tokens for each in good) / window_s,
    }


def figures(load: OpenLoad, judge: Judge, rate: float) -> dict[str, Any]:
    """The results of one stretch of load."""
    seconds = (load.ended_ns - load.started_ns) / NS_PER_S
    from_ns = load.started_ns + round(seconds * WARM_SHARE * NS_PER_S)
    window_s = seconds * (1 - WARM_SHARE)
    answered = [each for each in load.asked if each.ok]
    ended = [each for each in answered if from_ns <= each.end_ns < load.ended_ns]
    good = [each for each in ended if judge.is_good(each)]
    offered = [each for each in load.asked if each.first_due_ns >= from_ns]
    troubles = [each.trouble for each in load.asked if each.trouble]
    late = sorted(each.late_ns for each in load.asked)

    def of_band(band: str) -> dict[str, Any]:
        asked, ok = ([each for each in found if each.sender.band == band] for found in (load.asked, answered))
        return {
            "first_attempts": len(asked), "answered": len(ok),
            **goodput([each for each in good if each.sender.band == band], window_s),
            "ttft_ms": milliseconds([each.ttft_ns for each in ok]),
            "tpot_ms": milliseconds([each.tpot_ns for each in ok if each.tokens > 1]),
        }  # fmt: skip

    return {
        "offered_rps": round(rate, 3),
        "first_attempts": len(load.asked),
        "attempts": sum(each.attempts for each in load.asked),
        "left_out": load.left_out,
        "answered": len(answered),
        "refusals": sum(each.refusals for each in load.asked),
        "refusals_with_retry_after": sum(each.reported for each in load.asked),
        "cut": sum(each.is_cut for each in load.asked),
        "troubles": {why: troubles.count(why) for why in sorted(set(troubles))[:8]},
        "good_of_offered": sum(map(judge.is_good, offered)) / max(1, len(offered)),
        **goodput(good, window_s),
        "throughput_rps": len(ended) / window_s,
        "throughput_tps": sum(each.tokens for each in ended) / window_s,
        "drain_s": drained_s(load),
        "late_ms": milliseconds(late),
        "generator_was_late": bool(late) and percentile(late, 0.95) > LATE_MS * NS_PER_MS,
        "bands": {band: of_band(band) for band in sorted({each.sender.band for each in load.asked})},
    }


def drained_s(load: OpenLoad) -> float | None:
    """From the last arrival until nothing waited any more: everything had its first token, or its refusal.

    None: some still waited.
    """
    if any(each.is_cut and not each.first_ns for each in load.asked):
        return None
    last_ns = max((each.first_ns or each.end_ns for each in load.asked), default=0)
    return round(max(0, last_ns - load.ended_ns) / NS_PER_S, 2)


@dataclass(slots=True, frozen=True)
class Point:
    """One rate of the search."""

    rate: float
    good_share: float
    """Of the requests that were offered."""
    goodput: float


async def find_knee(measure: Callable[[float], Awaitable[Point]], rate: float) -> float:
    """The highest rate at which `KNEE` of what is offered is good, from a rate on that should be below it.

    If not even that is, lower ones are tried. It ends after two rates in a row above the knee with no more
    goodput, and tries some between the last that passed and the first that failed.
    """
    passed, failed, since, limit = 0.0, 0.0, 0, 0.0
    for _ in range(SEARCH_MAX):
        point = await measure(rate)
        if point.good_share >= KNEE:
            passed, failed, since = max(passed, rate), 0.0, 0
        else:
            failed = failed or rate
            since += point.goodput <= limit
        limit = max(limit, point.goodput)
        if since >= 2 and passed:
            break
        rate = rate / SEARCH_TIMES**2 if not passed else rate * SEARCH_TIMES
    for _ in range(SEARCH_BETWEEN if passed and failed else 0):
        between = math.sqrt(passed * failed)
        if (await measure(between)).good_share >= KNEE:
            passed = between
        else:
            failed = between
    return passed or rate


class Measurement:
    """One repetition against one server. `found` is what there is so far."""

    def __init__(self, stack: Stack, args: argparse.Namespace, seed: int) -> None:
        self._stack, self._args, self._seed = stack, args, seed
        self._clients = stack.clients()
        self.found: dict[str, Any] = {"seed": seed, "complete": False, "search": [], "overload": []}
        self._judge: Judge | None = None

    async def run(self) -> None:
        """Idle, peak, overload."""
        await self.idle()
        self.found["closed_loop_rps"] = capacity = await self.closed()
        search: list[Point] = []

        async def measure(rate: float) -> Point:
            found = await self.stretch("search", rate, "leaves", self._args.seconds * 0.6)
            self.found["search"].append(found)
            search.append(Point(rate, found["good_of_offered"], found["goodput_rps"]))
            return search[-1]

        self.found["knee_rps"] = knee = await find_knee(measure, SEARCH_FROM * capacity)
        rate = max(search, key=lambda each: each.goodput).rate
        peak = self.found["peak"] = await self.stretch("peak", rate, "leaves", self._args.seconds * 1.5)
        for load in map(float, self._args.loads.split(",")):
            for manners in MANNERS if load == 5 else ("obeys",):
                result = await self.stretch(f"{load:g}x", load * knee, manners, self._args.seconds)
                shares = {
                    name: result[name] / max(1e-9, peak[name]) for name in ("goodput_rps", "goodput_tps")
                }
                point = {"load": load, "manners": manners, "share_of_peak": shares}
                self.found["overload"].append(point | result)
        self.found["complete"] = True

    async def idle(self) -> Judge:
        """Find the times of requests alone, and so the promises here: `stretch` judges by them, too."""
        idle = {kind.name: await self._alone(kind) for kind in KINDS}
        tpot_ns = round(statistics.median(each.tpot_ns for found in idle.values() for each in found))
        ttft_ns = {
            name: round(statistics.median(each.ttft_ns for each in found)) for name, found in idle.items()
        }
        ms = {name: ns / NS_PER_MS for name, ns in ttft_ns.items()}
        self.found["idle_ms"] = {"ttft": ms, "tpot": tpot_ns / NS_PER_MS}
        say(f"idle, ms: {self.found['idle_ms']}")
        self._judge = Judge(AdmissionConfig(), ttft_ns, tpot_ns)
        return self._judge

    async def close(self) -> None:
        """Close the clients' connections."""
        for client in self._clients.values():
            await client.close()

    def new_load(self) -> OpenLoad:
        """A stretch of load, for the clients of this measurement."""
        return OpenLoad(self._clients, MODEL, SENDERS, KINDS, CLOCK)

    async def _alone(self, kind: Kind) -> list[Asked]:
        """Requests of one length class, each alone; the first one is not counted."""
        asked = await self.new_load().one_by_one(f"idle {kind.name}", kind, IDLE_COUNT + 1, seed=self._seed)
        assert all(each.ok for each in asked), [each.trouble or each.status for each in asked]
        return asked[1:]

    async def closed(self) -> float:
        """Requests per second that a closed loop of many callers gets, of the mix of lengths."""
        load, began_ns = self.new_load(), CLOCK.now_ns()
        until_ns = began_ns + round(CLOSED_S * NS_PER_S)
        done: list[int] = []

        async def caller(number: int) -> None:
            count = 0
            while CLOCK.now_ns() < until_ns:
                kind = KINDS[(0, 1, 0, 1, 2, 0, 0, 1, 0, 2)[(number + count) % 10]]
                count += 1
                asked = Asked(SENDERS[number % len(SENDERS)], kind, CLOCK.now_ns())
                body = load.body(f"closed {number} {count}", kind, self._seed)
                await load.attempt(asked, body, asked.first_due_ns)
                if asked.ok:
                    done.append(asked.end_ns)
                else:
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(caller(number) for number in range(CALLERS)))
        from_ns = began_ns + round(CLOSED_S * NS_PER_S / 3)
        rate = sum(from_ns <= end_ns < until_ns for end_ns in done) / (CLOSED_S * 2 / 3)
        say(f"closed loop of {CALLERS}: {rate:.2f} requests/s")
        return max(rate, 0.1)

    async def stretch(self, name: str, rate: float, manners: str, seconds: float) -> dict[str, Any]:
        """The results of so many seconds of load; after `idle`."""
        load, cpu = self.new_load(), (time.process_time(), self._stack.gateway_cpu_s())
        began_s, run = time.monotonic(), f"{name} {manners} {rate:.2f}"
        await load.run(run, seed=self._seed, rate=rate, seconds=seconds, manners=manners, drain_s=DRAIN_S)
        spent_s = time.monotonic() - began_s
        assert self._judge is not None, "promises are known"
        result = figures(load, self._judge, rate)
        result["generator_cpu"] = round((time.process_time() - cpu[0]) / spent_s, 3)
        result["gateway_cpu"] = round((self._stack.gateway_cpu_s() - cpu[1]) / spent_s, 3)
        say(
            f"{run} offered: good {result['goodput_rps']:.2f}/s ({result['goodput_tps']:.0f} tok/s) of "
            f"{result['throughput_rps']:.2f}/s; {result['refusals']} refusals; drained {result['drain_s']} s "
            f"later; sent late {result['late_ms']}{' (TOO LATE)' if result['generator_was_late'] else ''}"
        )
        return result


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def summary(repeats: list[dict[str, Any]]) -> str:
    """Shares of the peak over the repetitions."""
    points: dict[str, list[dict[str, Any]]] = {}
    for repeat in repeats:
        for each in repeat["overload"]:
            points.setdefault(f"{each['load']:g}x {each['manners']}", []).append(each)
    rows = [
        (
            name, *(spread(each["share_of_peak"][key] for each in found) for key in goodput([], 1)),
            spread(DRAIN_S if each["drain_s"] is None else each["drain_s"] for each in found),
        )
        for name, found in points.items()
    ]  # fmt: skip
    return table(("load, clients", "of the peak, requests", "tokens", "drained in, s"), rows)


def once(args: argparse.Namespace, seed: int, repeats: list[dict[str, Any]]) -> None:
    """One repetition with a server of its own. An interrupted one leaves its measurements, too."""

    async def run(stack: Stack) -> None:
        measurement = Measurement(stack, args, seed)
        repeats.append(measurement.found)
        try:
            await measurement.run()
        finally:
            await measurement.close()

    with (
        tempfile.TemporaryDirectory(prefix="overload-") as name,
        Stack(Path(name), args.server, args.model) as stack,
    ):
        uvloop.run(run(stack))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--loads", default="2,5,20")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="penstock-demo")
    parser.add_argument("--server", default=sys.executable, metavar="PYTHON", help="whose penstock serves")
    args = parser.parse_args()
    repeats: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(args.repeats):
            once(args, args.seed + number, repeats)
    print(summary(repeats))
    write_result(args.json, {"goals": GOALS, "repeats": repeats})


if __name__ == "__main__":
    main()

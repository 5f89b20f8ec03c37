"""Goodput under overload, over sockets: a real gateway, the real engine with a demo model on one thread,
open-loop clients.

    python -m bench.sockets.overload [--loads 2,5,20] [--seconds 15] [--repeats 1] [--seed 1] [--json FILE]
    python -m bench.sockets.overload --server DIR/.venv/bin/python ...    another build of the server,
                                                                          measured by this same script

Goodput is requests per second that met both promises (TTFT and TPOT), also told as their output tokens per
second. The promise is the default configuration's (`policy/admission/admit.py`): by band, and never less
than `idle_factor` times what a request of that length takes on the idle machine, which is measured first. The
server runs with its defaults.

1. Idle: requests of each length class, one by one.
2. Knee and peak: the same processes under rising load, from a third of what a closed loop gets out of them.
   The knee is the highest offered rate at which at least 95 % of the requests offered were good. The search
   ends after two rates in a row above it with no more goodput, then tries two rates between the last that
   passed and the first that failed. The rate with most goodput is run once more, for longer; that is the
   peak: the best of many short runs would be partly luck.
3. Overload: 2, 5 and 20 times the knee. Tenants of three bands, prompts and answers of three lengths, Poisson
   arrivals; loads count first attempts. Clients obey `Retry-After`; at 5 times also such as take no for an
   answer, and such as come back at once.

Goodput counts requests that ended in the last three quarters of the time. After each load the script waits
until nothing is open any more, 30 s at most, and says how long the queue needed. The generator is a process
of its own, and shares two cores with what it measures: it says how late it sent. Ctrl-C ends everything and
keeps what was measured. About four minutes.
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

from bench.harness import command_line, write_result
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
DRAIN_S, DRAIN_GOAL_S = 30.0, 10.0
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
        engine = {"threads": 1, "kv_memory_bytes": 512 << 20}
        config = {
            "models": [{"path": model, "name": MODEL, "engine": engine}],
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


def spread(times_ns: list[int]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(times_ns)
    if not ordered:
        return {}
    return {
        name: round(percentile(ordered, share) / NS_PER_MS, 1)
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }


def group(asked: list[Asked], good: list[Asked], window_s: float) -> dict[str, object]:
    """The results of the requests of one band, tenant or length class; `good` are those that ended in the
    window.
    """
    answered = [each for each in asked if each.ok]
    return {
        "first_attempts": len(asked),
        "answered": len(answered),
        "goodput_rps": round(len(good) / window_s, 3),
        "goodput_tps": round(sum(each.tokens for each in good) / window_s, 1),
        "good_of_answered": round(len(good) / len(answered), 3) if answered else None,
        "ttft_ms": spread([each.ttft_ns for each in answered]),
        "tpot_ms": spread([each.tpot_ns for each in answered if each.tokens > 1]),
    }


def figures(load: OpenLoad, judge: Judge, rate: float) -> dict[str, Any]:
    """The results of one stretch of load."""
    seconds = (load.ended_ns - load.started_ns) / NS_PER_S
    from_ns = load.started_ns + round(seconds * WARM_SHARE * NS_PER_S)
    window_s = seconds * (1 - WARM_SHARE)
    answered = [each for each in load.asked if each.ok]
    ended = [each for each in answered if from_ns <= each.end_ns < load.ended_ns]
    is_good = {id(each) for each in answered if judge.is_good(each)}

    good = [each for each in ended if id(each) in is_good]
    offered = [each for each in load.asked if each.first_due_ns >= from_ns]

    def of(key: Callable[[Asked], str]) -> dict[str, object]:
        groups: dict[str, tuple[list[Asked], list[Asked]]] = {}
        for number, asked in enumerate((load.asked, good)):
            for each in asked:
                groups.setdefault(key(each), ([], []))[number].append(each)
        return {name: group(*groups[name], window_s) for name in sorted(groups)}

    refused = [each for each in load.asked if each.status in {429, 503}]
    troubles = [each.trouble for each in load.asked if each.trouble]
    late = sorted(each.late_ns for each in load.asked)
    return {
        "offered_rps": round(rate, 3),
        "first_attempts": len(load.asked),
        "attempts": sum(each.attempts for each in load.asked),
        "left_out": load.left_out,
        "answered": len(answered),
        "refused": len(refused),
        "refusals": sum(each.refusals for each in load.asked),
        "refusals_with_retry_after": sum(each.reported for each in load.asked),
        "retry_after_s": spread(
            [round(each.retry_after_s * NS_PER_S) for each in load.asked if each.reported]
        ),
        "cut": sum(each.is_cut for each in load.asked),
        "troubles": {why: troubles.count(why) for why in sorted(set(troubles))[:8]},
        "good_of_offered": sum(id(each) in is_good for each in offered) / max(1, len(offered)),
        "goodput_rps": len(good) / window_s,
        "goodput_tps": sum(each.tokens for each in good) / window_s,
        "throughput_rps": len(ended) / window_s,
        "throughput_tps": sum(each.tokens for each in ended) / window_s,
        "drain_s": drained_s(load),
        "late_ms": {**spread(late), "max": round(late[-1] / NS_PER_MS, 1)} if late else {},
        "generator_was_late": bool(late) and percentile(late, 0.95) > LATE_MS * NS_PER_MS,
        "bands": of(lambda each: each.sender.band),
        "tenants": of(lambda each: each.sender.name),
        "lengths": of(lambda each: each.kind.name),
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

    If not even that is, lower ones are tried.
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
        self.found: dict[str, Any] = {"seed": seed, "complete": False}
        self._judge: Judge | None = None

    async def run(self) -> None:
        """Idle, peak, overload."""
        await self.idle()
        capacity = await self.closed()
        self.found["closed_loop_rps"] = capacity
        search: list[Point] = []
        tried: list[dict[str, object]] = []
        self.found["search"] = tried

        async def measure(rate: float) -> Point:
            tried.append(found := await self.stretch("search", rate, "leaves", self._args.seconds * 0.6))
            search.append(Point(rate, float(str(found["good_of_offered"])), float(str(found["goodput_rps"]))))
            return search[-1]

        knee = await find_knee(measure, SEARCH_FROM * capacity)
        limit = max(search, key=lambda each: each.goodput)
        best = await self.stretch("peak", limit.rate, "leaves", self._args.seconds * 1.5)
        self.found |= {"knee_rps": knee, "best_of_search_rps": limit.goodput, "peak": best}
        say(
            f"knee: {knee:.2f} requests/s; peak: {best['goodput_rps']:.2f} requests/s met both promises "
            f"({best['goodput_tps']:.0f} tok/s), at {limit.rate:.2f} offered"
        )
        points: list[dict[str, object]] = []
        self.found["overload"] = points
        for load in self._args.loads:
            for manners in MANNERS if load == 5 else ("obeys",):
                result = await self.stretch(f"{load:g}x", load * knee, manners, self._args.seconds)
                result["share_of_peak"] = {
                    name: float(str(result[name])) / max(1e-9, float(str(best[name])))
                    for name in ("goodput_rps", "goodput_tps")
                }
                points.append({"load": load, "manners": manners, **result})
                share = result["share_of_peak"]
                say(
                    f"    {share['goodput_rps']:.0%} of the peak in requests, {share['goodput_tps']:.0%} in "
                    f"tokens"
                )
        self.found["complete"] = True

    async def idle(self) -> Judge:
        """Find the times of requests alone, and so the promises here: `stretch` judges by them, too."""
        admission = AdmissionConfig()
        idle = {kind.name: await self._alone(kind) for kind in KINDS}
        tpot_ns = round(statistics.median(each.tpot_ns for found in idle.values() for each in found))
        ttft_ns = {
            name: round(statistics.median(each.ttft_ns for each in found)) for name, found in idle.items()
        }
        judge = Judge(admission, ttft_ns, tpot_ns)
        promises = {
            f"{sender.band}/{kind.name}": judge.promise(Asked(sender, kind, 0))
            for sender in SENDERS
            for kind in KINDS
        }
        self.found["idle_ms"] = {
            "ttft": {name: ns / NS_PER_MS for name, ns in ttft_ns.items()},
            "tpot": tpot_ns / NS_PER_MS,
        }
        self.found["promises_ms"] = {
            name: {"ttft": each.ttft_ns / NS_PER_MS, "tpot": each.tpot_ns / NS_PER_MS}
            for name, each in promises.items()
        }
        say(
            f"idle: TTFT {', '.join(f'{name} {ns / NS_PER_MS:.0f}' for name, ns in ttft_ns.items())} ms, "
            f"TPOT {tpot_ns / NS_PER_MS:.1f} ms"
        )
        self._judge = judge
        return judge

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
        drain = "more than 30" if result["drain_s"] is None else f"{result['drain_s']:.1f}"
        bands = ", ".join(
            f"{band} {found['goodput_rps']:.2f}/s TTFT "
            f"{found['ttft_ms'].get('p50', 0):.0f}/{found['ttft_ms'].get('p95', 0):.0f} ms"
            for band, found in result["bands"].items()
        )
        say(
            f"{name} {manners}: offered {rate:.1f}/s, good {result['goodput_rps']:.2f}/s "
            f"({result['goodput_tps']:.0f} tok/s) of {result['throughput_rps']:.2f}/s answered; {bands}; "
            f"{result['refusals']} refusals; drained in {drain} s; sent late p95 "
            f"{result['late_ms'].get('p95', 0):.0f} ms{' (TOO LATE)' if result['generator_was_late'] else ''}"
        )
        return result


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def summary(repeats: list[dict[str, Any]]) -> dict[str, object]:
    """Shares of the peak over the repetitions: median, least and most."""
    shares: dict[str, dict[str, list[float]]] = {}
    for repeat in repeats:
        for point in repeat.get("overload", ()):
            each = shares.setdefault(
                f"{point['load']:g}x {point['manners']}",
                {"goodput_rps": [], "goodput_tps": [], "drain_s": []},
            )
            for name, share in point["share_of_peak"].items():
                each[name].append(share)
            each["drain_s"].append(DRAIN_S if point["drain_s"] is None else point["drain_s"])
    return {
        name: {
            figure: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for figure, values in found.items()
        }
        for name, found in shares.items()
    }


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--loads", type=lambda text: [float(word) for word in text.split(",")], default=[2, 5, 20]
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (default: 15)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="penstock-demo")
    parser.add_argument(
        "--server", default=sys.executable, metavar="PYTHON", help="the interpreter whose penstock serves"
    )
    args = parser.parse_args()
    repeats: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(args.repeats):
            repeats.append(once(args, args.seed + number, repeats))
    result: dict[str, Any] = {
        "goals": GOALS,
        "drain_goal_s": DRAIN_GOAL_S,
        "summary": summary(repeats),
        "repeats": repeats,
    }
    for name, found in result["summary"].items():
        rps, tps, drain = (found[each] for each in ("goodput_rps", "goodput_tps", "drain_s"))
        print(
            f"{name}: {rps['median']:.0%} ({rps['min']:.0%} to {rps['max']:.0%}) of the peak in requests, "
            f"{tps['median']:.0%} in tokens; drained in {drain['median']:.1f} s"
        )
    write_result(args.json, result)


def once(args: argparse.Namespace, seed: int, repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """One repetition with a server of its own. An interrupted one leaves its measurements in `repeats`."""
    with tempfile.TemporaryDirectory(prefix="overload-") as name:
        measurement: Measurement | None = None
        with Stack(Path(name), args.server, args.model) as stack:

            async def run() -> None:
                nonlocal measurement
                measurement = Measurement(stack, args, seed)
                try:
                    await measurement.run()
                finally:
                    await measurement.close()

            try:
                uvloop.run(run())
            except KeyboardInterrupt:
                if measurement is not None:
                    repeats.append(measurement.found)
                raise
    assert measurement is not None
    return measurement.found


if __name__ == "__main__":
    main()

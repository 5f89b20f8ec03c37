"""Overload over sockets: a real gateway, the real engine with a demo model on one thread, open-loop clients
of eight tenants in three bands (open_load.py), and what is promised to them.

A promise is the default configuration's, by band, and never less than `idle_factor` times what a request of
that length takes on the idle machine, which is measured first.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_load import Asked, Kind, OpenLoad, Sender

from bench.process import Served
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.clock import NS_PER_S, SystemClock
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
"""The closed loop that says how much the server can do."""


class Stack(Served):
    """A server process, which runs its engine, and the keys of its tenants."""

    def __init__(self, place: Path, model: str, processes: int) -> None:
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
        super().__init__(place, config)

    def clients(self) -> dict[str, Client]:
        """One for each tenant."""
        endpoint = ApiAddress("http", "127.0.0.1", self.port, "/v1")
        limits = ClientLimits(request_timeout_s=120)
        return {name: Client(endpoint, key=key, limits=limits) for name, key in self._keys.items()}


@dataclass(slots=True)
class Judge:
    """What is promised to whom."""

    admission: AdmissionConfig
    idle_ttft_ns: dict[str, int]
    """By length class."""
    idle_tpot_ns: int

    def promise(self, asked: Asked) -> Promise:
        """The promise to the request, on this machine."""
        configured = Promises(self.admission).of(tier="", band=asked.sender.band)
        return configured.on(IDLE_FACTOR, self.idle_ttft_ns[asked.kind.name], self.idle_tpot_ns)


def figures(load: OpenLoad) -> dict[str, Any]:
    """The results of one stretch of load."""
    troubles = [each.trouble for each in load.asked if each.trouble]
    return {
        "first_attempts": len(load.asked),
        "answered": sum(each.ok for each in load.asked),
        "refusals": sum(each.refusals for each in load.asked),
        "refusals_with_retry_after": sum(each.reported for each in load.asked),
        "troubles": {why: troubles.count(why) for why in sorted(set(troubles))[:8]},
        "drain_s": drained_s(load),
    }


def drained_s(load: OpenLoad) -> float | None:
    """From the last arrival until nothing waited any more: everything had its first token, or its refusal.

    None: some still waited.
    """
    if any(each.is_cut and not each.first_ns for each in load.asked):
        return None
    last_ns = max((each.first_ns or each.end_ns for each in load.asked), default=0)
    return round(max(0, last_ns - load.ended_ns) / NS_PER_S, 2)


class Measurement:
    """One server's clients."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._seed, self._clients = seed, stack.clients()

    async def idle(self) -> Judge:
        """Find the times of requests alone, and so the promises here."""
        idle = {kind.name: await self._alone(kind) for kind in KINDS}
        tpot_ns = round(statistics.median(each.tpot_ns for found in idle.values() for each in found))
        ttft_ns = {
            name: round(statistics.median(each.ttft_ns for each in found)) for name, found in idle.items()
        }
        return Judge(AdmissionConfig(), ttft_ns, tpot_ns)

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
        return max(rate, 0.1)

"""Several gateway-like processes that spend one tenant's tokens as fast as they are let, until standard input
ends.

One argument, JSON: `count`, `directory`, `rate`, `burst_s`, `tokens` of each request, `parent` (the socket of
a parent's store) and `shared`: by name, a shared section each. Each process writes DIRECTORY/N.json: by name
a list of [monotonic ns, tokens used] at every change of phase. Forked after everything is imported, so that
many start at once.
"""

import asyncio
import io
import json
import os
import select
import sys
import time
from pathlib import Path

import msgspec

from penstock.clock import SystemClock
from penstock.config.flow import LimitsConfig
from penstock.config.tree import LogConfig
from penstock.gateway.shared.keeper import LeaseKeeper
from penstock.gateway.shared.limits import open_store
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.rate_limit import Limiter, LimitReservation
from penstock.policy.tenant import Tenant
from penstock.policy.terms import SharedTerms
from penstock.telemetry.log import Log
from penstock.types import TenantId

PAUSE_S = 0.004


class Spender:
    """One limiter with its leases."""

    def __init__(self, facts: dict, shared: SharedTerms, number: int) -> None:
        self.clock, self.tokens = SystemClock(), facts["tokens"]
        self.tenant = Tenant(id=TenantId("t"), tokens_per_minute=facts["rate"])
        self.leases = Leases(shared)
        self.limiter = Limiter(LimitsConfig(burst_s=facts["burst_s"]), self.leases.make_bucket)
        store = open_store(shared, f"gateway-{number}-{os.getpid()}", facts["parent"])
        log = Log(LogConfig(), self.clock, stream=io.StringIO())
        self.keeper = LeaseKeeper(shared, self.leases, store, self.clock, log)
        self.used = 0
        self.timeline: list[tuple[int, int]] = []

    def spend(self) -> None:
        """Everything that is let through now, up to a bound where nothing is refused."""
        now_ns = self.clock.now_ns()
        for _ in range(20):
            outcome = self.limiter.reserve(now_ns, self.tenant, self.tokens // 2, self.tokens)
            if not isinstance(outcome, LimitReservation):
                break
            outcome.settle(now_ns, self.tokens)
            self.used += self.tokens
        self.timeline.append((now_ns, self.used))


async def gateway(facts: dict, number: int) -> None:
    spenders = {
        name: Spender(facts, msgspec.convert(shared, SharedTerms), number)
        for name, shared in facts["shared"].items()
    }
    await asyncio.gather(*(spender.keeper.start() for spender in spenders.values()))
    (Path(facts["directory"]) / f"{number}.ready").touch()
    until = Path(facts["directory"]) / "end"
    while not (Path(facts["directory"]) / "go").exists():
        await asyncio.sleep(PAUSE_S)
    while not until.exists():
        for spender in spenders.values():
            spender.spend()
        await asyncio.sleep(PAUSE_S)
    await asyncio.gather(*(spender.keeper.close() for spender in spenders.values()))
    done = {name: [spender.leases.num_gateways, spender.timeline] for name, spender in spenders.items()}
    (Path(facts["directory"]) / f"{number}.json").write_text(json.dumps(done))


def main() -> None:
    facts = json.loads(sys.argv[1])
    children: list[int] = []
    for number in range(facts["count"]):
        pid = os.fork()
        if pid == 0:
            asyncio.run(gateway(facts, number))
            os._exit(0)
        children.append(pid)
    # Whoever started us may be killed: then standard input ends, and nothing of ours may live on.
    while children:
        readable, _, _ = select.select([sys.stdin], [], [], 0.05)
        if readable and not sys.stdin.buffer.read1(1):
            (Path(facts["directory"]) / "end").touch()
            for pid in children:
                os.waitpid(pid, 0)
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()

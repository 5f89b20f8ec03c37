"""A process that writes to a ledger as a gateway would, and tells a witness file what it has promised; made
to be killed.

    python ledger_writer.py LEDGER WITNESS FIRST LAST SEED

The witness has one line for each promise, written after the ledger's flush (and `begin` before it): what it
says must be true of the ledger, whenever this process dies. Begins `r{FIRST}` to `r{LAST - 1}`, twenty at a
time.
"""

import asyncio
import os
import sys
import time
from functools import partial
from pathlib import Path

from usage_records import closed, opened, progress

from penstock import rng
from penstock.clock import SystemClock, sleep
from penstock.config.ledger import BudgetsConfig
from penstock.config.tree import LogConfig
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.tenant import Tenant
from penstock.telemetry.ledger import Ledger, LedgerTerms
from penstock.telemetry.ledger_segment import LedgerLimits
from penstock.telemetry.log import Log
from penstock.types import TenantId
from tests.doubles.budget_hold import BudgetHold, hold

RUNNING_MAX = 20
PAUSE_S = 0.001
ACME = Tenant(id=TenantId("acme"), budget_month_micros=10**12)


def be_busy() -> None:
    """Keep the loop busy with something else: most deaths fall in here, where nothing but what was flushed
    counts.
    """
    time.sleep(PAUSE_S)


class Writer:
    """Opens, slices and closes at random. Cost is 10 millionths a token."""

    def __init__(
        self, ledger: Ledger, budgets: TenantBudgets, recorder: int, clock: SystemClock, seed: int
    ) -> None:
        self._ledger, self._budgets, self._recorder, self._clock = ledger, budgets, recorder, clock
        self._random = rng.stream(seed, "writer")
        self._running: dict[str, tuple[BudgetHold, int]] = {}
        self._promises: list[str] = []

    async def run(self, first: int, last: int) -> None:
        while first < last or self._running:
            for _ in range(self._random.randint(1, 8)):
                if first < last and len(self._running) < RUNNING_MAX and self._random.random() < 0.5:
                    self._open(f"r{first}")
                    first += 1
                elif self._running:
                    self._go_on()
            self._ledger.flush()
            os.write(self._recorder, "".join(self._promises).encode())
            self._promises.clear()
            be_busy()
            await sleep(0)

    def _open(self, name: str) -> None:
        os.write(self._recorder, f"begin {name} 0\n".encode())
        reservation = hold(self._budgets, self._clock.now_ns(), ACME, 100)
        assert isinstance(reservation, BudgetHold)
        self._running[name] = reservation, 0
        self._ledger.open(lambda: opened(name, ended_ns=self._clock.wall_ns()))
        self._promises.append(f"open {name} 0\n")

    def _go_on(self) -> None:
        name = self._random.choice(sorted(self._running))
        reservation, tokens = self._running[name]
        tokens += self._random.randint(0, 300)
        os.write(self._recorder, f"begin {name} {tokens}\n".encode())
        now_ns = self._clock.wall_ns()
        if self._random.random() < 0.5:
            self._running[name] = reservation, tokens
            assert reservation.renew(self._clock.now_ns(), 10 * tokens)
            self._ledger.slice(name, partial(progress, name, tokens, at_ns=now_ns))
            self._promises.append(f"slice {name} {tokens}\n")
        else:
            del self._running[name]
            reservation.settle(self._clock.now_ns(), 10 * tokens)
            self._ledger.close(
                lambda: closed(name, completion_tokens=tokens, cost_micros=10 * tokens, ended_ns=now_ns)
            )
            self._promises.append(f"close {name} {tokens}\n")


async def main(directory: str, recorder: str, first: str, last: str, seed: str) -> None:
    clock = SystemClock()
    limits = LedgerLimits(segment_bytes=256 * 1024, journal_bytes_max=4 * 1024 * 1024, deliver_ms=3)
    config = LedgerTerms(directory=directory, fsync_ms=20)
    ledger = Ledger(config, clock, Log(LogConfig(level="error"), clock), limits=limits)
    await ledger.start()
    budgets = TenantBudgets(BudgetsConfig(), wall_offset_ns=clock.wall_ns() - clock.now_ns())
    budgets.restore(clock.now_ns(), await ledger.spent())
    handle = os.open(Path(recorder), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"spent acme {budgets.spent(clock.now_ns(), ACME.id)[1]}\n".encode())
    await Writer(ledger, budgets, handle, clock, int(seed)).run(int(first), int(last))
    await ledger.stop()
    os.write(handle, f"spent acme {budgets.spent(clock.now_ns(), ACME.id)[1]}\n".encode())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

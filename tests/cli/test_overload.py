"""Overload over sockets, with the defaults: what is let in is answered in time, and what is not is told when
to come back.
"""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import modelled_load
import overload
import pytest
from foreign_load import ForeignLoad
from open_load import Asked, OpenLoad

from penstock.bench.client import ApiResponse
from penstock.policy.flow import Outcome

TIMES, RATE_MIN, SECONDS, DRAIN_S = 6, 20.0, 5.0, 10.0
PROCESSES, MODELLED_SECONDS = 2, 6.0
SLOWDOWN_MAX = 3.0
pytestmark = pytest.mark.alone


class Kept(OpenLoad):
    """Load of which every request is kept, those of idle and closed loops too."""

    all: ClassVar[dict[int, Asked]] = {}

    async def attempt(self, asked: Asked, body: bytes, due_ns: int) -> ApiResponse | None:
        self.all[id(asked)] = asked
        return await super().attempt(asked, body, due_ns)

    async def refused(self, sender: str) -> ApiResponse:
        """Ask until it is refused as it comes: how."""
        while True:
            body = self.body("one more", overload.KINDS[0], seed=1)
            response = await self.clients[sender].post("/chat/completions", body)
            if response.status == 429:
                return response
            if response.status == 200:
                asked = Asked(overload.SENDERS[0], overload.KINDS[0], 0)
                self.all[id(asked)] = asked
                asked.status, asked.end_ns, asked.tokens = 200, 1, overload.KINDS[0].output_tokens
            else:  # A refusal takes no time: without a pause it would be asked for thousands of times.
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def overloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Two gateway processes and a real engine, under six times what it answers to a closed loop; stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overload, "CLOSED_S", 3.0)
        patch.setattr(overload, "OpenLoad", Kept)
        place = tmp_path_factory.mktemp("overload")

        async def measure(stack: overload.Stack) -> SimpleNamespace:
            measurement = overload.Measurement(stack, 1)
            try:
                judge = await measurement.idle()
                rate = max(TIMES * await measurement.closed(), RATE_MIN)
                load, foreign = measurement.new_load(), ForeignLoad()
                refusing = asyncio.create_task(load.refused("web-a"))
                await load.run("test", seed=1, rate=rate, seconds=SECONDS, drain_s=3 * DRAIN_S)
                found, slowdown = overload.figures(load), foreign.slowdown()
                async with asyncio.timeout(DRAIN_S):
                    refusal = await refusing
                return SimpleNamespace(
                    load=load, figures=found, judge=judge, slowdown=slowdown, refusal=refusal
                )
            finally:
                await measurement.close()

        with overload.Stack(place, "penstock-demo", PROCESSES) as stack:
            measured = asyncio.run(measure(stack))
        with closing(sqlite3.connect(place / "state" / "ledger" / "usage.sqlite")) as ledger:
            asked = "SELECT outcome, count(*), sum(completion_tokens) FROM usage WHERE tenant != 'platform'"
            rows = ledger.execute(f"{asked} GROUP BY outcome").fetchall()
        measured.ledger = {outcome: (count, tokens) for outcome, count, tokens in rows}
        yield measured


def test_what_is_let_in_is_answered_in_time(overloaded: SimpleNamespace) -> None:
    """The gateways fill the engine up to what was promised: where it shares its cores with them, and with the
    clients, a token may take a quarter more. Processes of others were not there when promises were made:
    what is taken by them, all of it takes longer.
    """
    answered, promise = [each for each in overloaded.load.asked if each.ok], overloaded.judge.promise
    slowdown = overloaded.slowdown
    assert len(answered) > 10
    shares = {
        band: sum(each.ok for each in load) / len(load)
        for band in ("priority", "default")
        if (load := [each for each in overloaded.load.asked if each.sender.band == band])
    }
    assert shares["priority"] > shares["default"], "the higher band goes first; `bulk` has ten times as long"
    if slowdown > SLOWDOWN_MAX:
        pytest.skip("others had two thirds of this machine: what is left of a promise proves nothing")
    in_time = sum(each.ttft_ns <= slowdown * promise(each).ttft_ns for each in answered)
    steady = sum(each.tpot_ns <= 1.25 * slowdown * promise(each).tpot_ns for each in answered)
    assert in_time >= 0.8 * len(answered), (slowdown, overloaded.figures)
    assert steady >= 0.7 * len(answered), (slowdown, overloaded.figures)


def test_what_is_refused_is_told_when_to_come_back(overloaded: SimpleNamespace) -> None:
    found = overloaded.figures
    assert found["refusals"] > found["first_attempts"] // 4
    assert found["refusals_with_retry_after"] == found["refusals"]
    assert not found["troubles"]
    refusal = overloaded.refusal
    error = json.loads(refusal.body)["error"]
    assert (refusal.status, error["type"], error["code"]) == (429, "rate_limit_exceeded", "overloaded")
    assert refusal.retry_after_s > 0


def test_nothing_is_lost_and_the_ledger_has_what_clients_got(overloaded: SimpleNamespace) -> None:
    asked = overloaded.load.asked
    assert all(each.ok or each.status in (429, 503) for each in asked), "answered or refused"
    answered = [each for each in Kept.all.values() if each.ok]
    assert overloaded.ledger["finished"] == (len(answered), sum(each.tokens for each in answered))
    assert "failed" not in overloaded.ledger


def test_the_queue_is_empty_ten_seconds_after_the_load(overloaded: SimpleNamespace) -> None:
    assert overloaded.figures["drain_s"] is not None
    assert overloaded.figures["drain_s"] <= DRAIN_S


def test_two_processes_let_in_what_one_worker_can_do_and_share_it_among_tenants(tmp_path: Path) -> None:
    """Twice what it can do, at a worker whose steps take as long as they are told: a busy machine changes
    little of what is decided.
    """
    asked = modelled_load.served(tmp_path, processes=PROCESSES, seconds=MODELLED_SECONDS, seed=1)
    assert {each.outcome for each in asked} <= {Outcome.FINISHED, Outcome.REJECTED, Outcome.EVICTED}

    def answered(tenant: str) -> float:
        own = [each.outcome is Outcome.FINISHED for each in asked if each.tenant == tenant]
        return sum(own) / len(own)

    assert answered("first") >= 0.8, "its band goes first"
    others = [answered(tenant) for tenant in "abc"]
    assert min(others) > 0.2, "nobody starves"
    assert max(others) < 0.8, "twice as much was asked for as there is"
    assert max(others) - min(others) < 0.3

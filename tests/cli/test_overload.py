"""Overload over sockets, with the defaults: what is let in is answered in time, and what is not is told when
to come back.
"""

import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.sockets import load_and_sim, overload

TIMES, RATE_MIN, SECONDS, DRAIN_S = 6, 20.0, 8.0, 10.0
PROCESSES = 2
pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def overloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A real server and engine, under six times what it answers to a closed loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overload, "CLOSED_S", 5.0)
        place = tmp_path_factory.mktemp("overload")
        stack = overload.Stack(place, sys.executable, "penstock-demo")

        async def measure() -> SimpleNamespace:
            measurement = overload.Measurement(stack, SimpleNamespace(), 1)
            try:
                judge = await measurement.idle()
                rate = max(TIMES * await measurement.closed(), RATE_MIN)
                load = measurement.new_load()
                await load.run(
                    "test", seed=1, rate=rate, seconds=SECONDS, manners="obeys", drain_s=3 * DRAIN_S
                )
                return SimpleNamespace(load=load, figures=overload.figures(load, judge, rate), judge=judge)
            finally:
                await measurement.close()

        try:
            stack.start()
            yield asyncio.run(measure())
        finally:
            stack.stop()


def test_what_is_let_in_is_answered_in_time(overloaded: SimpleNamespace) -> None:
    answered = [each for each in overloaded.load.asked if each.ok]
    good = [each for each in answered if overloaded.judge.is_good(each)]
    assert len(answered) > 10
    assert len(good) >= 0.7 * len(answered), overloaded.figures
    bands = {each.sender.band for each in good}
    assert {"priority", "default"} <= bands


def test_what_is_refused_is_told_when_to_come_back(overloaded: SimpleNamespace) -> None:
    found = overloaded.figures
    assert found["refusals"] > found["first_attempts"] // 4
    assert found["refusals_with_retry_after"] == found["refusals"]
    assert not found["troubles"]


def test_the_queue_is_empty_ten_seconds_after_the_load(overloaded: SimpleNamespace) -> None:
    assert overloaded.figures["drain_s"] is not None
    assert overloaded.figures["drain_s"] <= DRAIN_S


def test_two_processes_let_in_what_one_worker_can_do_and_share_it_among_tenants(tmp_path: Path) -> None:
    """Twice what it can do, at a worker whose steps take as long as they are told: a busy machine changes
    little of what is decided.
    """
    scenario = dataclasses.replace(load_and_sim.overload(processes=PROCESSES), seconds=SECONDS)
    found = load_and_sim.counted(scenario, load_and_sim.served(scenario, tmp_path, seed=1))
    assert found["neither answered nor refused"] == 0
    assert found["first: answered, share"] >= 0.8, "its band goes first"
    others = [found[f"{tenant}: answered, share"] for tenant in "abc"]
    assert min(others) > 0.2, "nobody starves"
    assert max(others) < 0.8, "twice as much was asked for as there is"
    assert max(others) - min(others) < 0.3

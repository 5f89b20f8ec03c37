"""The line that tells where the time of a worker's start went."""

import time
from pathlib import Path

import pytest

from penstock.clock import NS_PER_MS, NS_PER_S, ManualClock, process_age_ns
from penstock.engine.startup import StartUp, own_usage


def test_phases_add_up_from_the_start_of_the_process():
    clock, used = ManualClock(now_ns=10 * NS_PER_S), [0.25, 1000]
    startup = StartUp(clock, age_ns=NS_PER_S // 2, usage=lambda: (used[0], used[1]))
    startup.begins("importing")
    clock.advance(1200 * NS_PER_MS)
    used[:] = 1.25, 41_000
    startup.begins("importing")  # The same goes on.
    startup.begins("waiting")
    clock.advance(NS_PER_MS)
    startup.begins("loading weights")
    clock.advance(NS_PER_S)
    used[:] = 3.0, 141_000
    assert startup.report() == (
        "ready after 2.70 s (3.00 s of processor time, 141,000 page faults): starting 0.50 (0.25), "
        "importing 1.20 (1.00), loading weights 1.00 (1.75)"
    )


def test_usage_and_age_are_of_this_process():
    before = own_usage()
    assert sum(range(1_000_000)) > 0
    assert own_usage() > before
    assert 0 < process_age_ns() <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize("stat", [b"", b"1 (a name) S 1 1", b"1 (a name)" + b" ?" * 50])
def test_an_odd_account_of_the_process_costs_only_its_age(monkeypatch, stat):
    monkeypatch.setattr(Path, "read_bytes", lambda path: stat)
    assert process_age_ns() == 0

"""The machines' cost from the metrics page, by day on disk."""

from pathlib import Path

import msgspec
import pytest

from penstock.clock import NS_PER_S, ManualClock
from penstock.policy.lifecycle.machine_costs import Costs
from penstock.telemetry.catalog import Endpoint, OutcomeLabel
from penstock.telemetry.costs import CostDays, CostSums, account, cost_accounts, read_days
from penstock.telemetry.counts import EndedTogether, RequestMeasurement
from penstock.telemetry.metrics import Metrics

MIDNIGHT = 1_700_006_400
"""2023-11-15, in seconds."""
DOLLAR = 10**6


def page(*costs: Costs, model: str = 'a "model"') -> bytes:
    metrics = Metrics([model], version="0")
    for each in costs:
        metrics.accelerator_costs({model: each})
    metrics.model(model).requests_ended(EndedTogether(
        RequestMeasurement(
            endpoint=Endpoint.CHAT, outcome=OutcomeLabel.STOP, duration_ns=1, prompt_tokens=90,
            generated_tokens=10,
        )
    ))  # fmt: skip
    return metrics.render()


def test_the_account_of_a_page() -> None:
    costs = Costs(busy=6 * DOLLAR, idle=3 * DOLLAR, reserve=DOLLAR, floor=4 * DOLLAR, charged=5 * DOLLAR)
    (found,) = cost_accounts(page(costs))
    assert msgspec.to_builtins(found) == {
        "model": 'a "model"', "bill": 10.0, "requests": 5.0, "platform": 1.0, "idle": 3.0, "reserve": 1.0,
        "floor": 4.0, "tokens": 100, "per_million": 100_000.0, "floor_per_million": 40_000.0,
        "over_floor": 2.5,
    }  # fmt: skip
    assert cost_accounts(page()) == [], "a model without a price has no account"
    nothing = account("m", CostSums(idle=2.0))
    assert (nothing.per_million, nothing.floor_per_million, nothing.over_floor) == (None, None, None)


def test_days_add_up_over_midnight_and_over_servers(tmp_path: Path) -> None:
    clock = ManualClock(wall_ns=(MIDNIGHT - 10) * NS_PER_S)
    one, other = (CostDays(tmp_path / "costs", clock, keep_days=2) for _ in range(2))
    other._name = "another process"
    assert one.take(page(Costs(busy=DOLLAR)))
    assert not other.take(b""), "there is nothing to write"
    assert other.take(page(Costs(idle=DOLLAR)))
    clock.advance(20 * NS_PER_S)
    assert one.take(page(Costs(busy=3 * DOLLAR, charged=DOLLAR)))
    for _ in range(2):
        one.write()
        other.write()
    days = read_days(tmp_path / "costs")
    model = 'a "model"'
    assert days == {
        ("2023-11-14", model): CostSums(busy=1.0, idle=1.0, tokens=200),
        ("2023-11-15", model): CostSums(busy=2.0, charged=1.0),
    }
    assert one.take(page(Costs(busy=DOLLAR // 2))), "the process that counted most is gone"
    assert one.take(page(Costs(busy=DOLLAR)))
    one.write()
    assert read_days(tmp_path / "costs")["2023-11-15", model].busy == 2.5
    (tmp_path / "costs" / "2023-11-15-x.json").write_text("no account")
    clock.advance(3 * 86_400 * NS_PER_S)
    one.take(page(Costs(busy=DOLLAR)))
    one.write()
    assert {day for day, _ in read_days(tmp_path / "costs")} == {"2023-11-18"}, "old days are removed"


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "costs").write_text("a file")
    days = CostDays(tmp_path / "costs", ManualClock(), keep_days=0)
    days.take(page(Costs(busy=1)))
    with pytest.raises(FileExistsError):
        days.write()

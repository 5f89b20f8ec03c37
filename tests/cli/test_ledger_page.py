"""docs/ledger.md as it stands: its table of a month, its prices, its queries and its sums come out."""

import re
import sqlite3
from pathlib import Path

import pages
import pytest
from usage_records import T0_NS

from penstock.cli.main import main
from penstock.clock import NS_PER_S, ManualClock
from penstock.config.ledger import BudgetsConfig, ModelPrice, PricesConfig
from penstock.policy.flow import Outcome, UsageRecord
from penstock.policy.lifecycle.machine_costs import AcceleratorCost
from penstock.policy.limits.budget import WARN_AT, TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.policy.tenant import Tenant
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger import LedgerTerms
from penstock.telemetry.ledger_sink import SqliteSink
from penstock.types import RequestId, TenantId, Usage
from tests.doubles.budget_hold import BudgetHold, hold

PAGE = pages.text_of("ledger")
(CONFIG,) = pages.configs("ledger")
PRICES = PriceList(CONFIG.prices)
DAYS_NS = {"2026-11-20": 1_795_132_800 * NS_PER_S, "2026-11-21": 1_795_219_200 * NS_PER_S}
"""Their first instants, UTC."""


def of(prompt: int, cached: int, answer: int) -> Usage:
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=answer)


def test_the_worked_example_of_prices() -> None:
    prompt, cached, answer = map(
        int, re.findall(r"with (\d+) prompt tokens, (\d+) of them cached, and (\d+) generated", PAGE)[0]
    )
    rows = {row[0]: row[1:] for row in pages.table("ledger", "| tokens | price per million")}
    assert int(rows["prompt, computed"][0]) == prompt - cached
    assert (int(rows["prompt, cached"][0]), int(rows["answer"][0])) == (cached, answer)
    parts = [rows[name] for name in ("prompt, computed", "prompt, cached", "answer")]
    for tokens, price, micros in parts:
        assert int(tokens) * float(price) == float(micros.replace(",", ""))
    exact = sum(float(micros.replace(",", "")) for *_, micros in parts)
    assert round(exact) == pages.number(rows["sum, rounded half up, once"][2])
    total = PRICES.cost_micros("penstock-demo", of(prompt, cached, answer))
    assert rows["cost_micros"][2] == f"{total:,}** = {total / 1e6:.6f} USD"
    assert pages.number(rows["the request"][2]) == total - round(exact)


def test_a_tier_holds_for_the_whole_request() -> None:
    long, short = of(100_001, 0, 0), of(100_000, 0, 0)
    assert PRICES.cost_micros("penstock-demo", short) == 125_000 + 100
    assert PRICES.cost_micros("penstock-demo", long) == 250_003 + 100  # 2.5 each, rounded half up.


def test_what_the_machine_costs() -> None:
    a_pays, b_pays = map(int, re.findall(r"A pays\s+(\d+),\s+B\s+(\d+)", PAGE)[0])
    per_hour = PRICES.accelerator_micros_per_hour("penstock-demo")
    assert per_hour == 2_000_000
    cost, a, b, second = AcceleratorCost(0, per_hour), RequestId("a"), RequestId("b"), NS_PER_S
    cost.started(0, a)
    cost.started(0, b)
    cost.worked(a, 3)
    cost.worked(b, 1)
    assert cost.settle(second, a) == a_pays
    cost.worked(b, 1)
    assert cost.settle(2 * second, b) == b_pays
    accounts = cost.accounts(3 * second).micros()
    assert f"{accounts.bill:,}" in PAGE
    assert accounts.idle == accounts.bill // 3
    assert accounts.requests + accounts.idle + accounts.platform == accounts.bill


def test_a_hundred_streams_against_a_cent() -> None:
    (admitted, held) = re.findall(r"(\d+) are admitted \(([\d,]+) millionths", PAGE)[0]
    prices = PriceList(PricesConfig(models=(ModelPrice(model="*", input=1.0, output=4.0),)))
    price = prices.cost_micros("m", of(20, 0, 256))
    assert price == pages.number(held)
    budgets, acme = (
        TenantBudgets(BudgetsConfig(), wall_offset_ns=T0_NS),
        Tenant(id=TenantId("a"), budget_day_micros=10_000),
    )
    found = [hold(budgets, 0, acme, price) for _ in range(100)]
    assert sum(isinstance(each, BudgetHold) for each in found) == int(admitted)


def test_every_field_of_a_record_is_in_the_table() -> None:
    (section,) = re.findall(r"\| field \|.*?\n\n", PAGE, re.DOTALL)
    reasons = {"stop", "length", "tool_calls", "content_filter", "budget"}
    reported = set(re.findall(r"`(\w+)`", section)) - reasons - set(Outcome)
    assert reported == set(UsageRecord.__struct_fields__)


def month() -> list[UsageRecord]:
    """Records whose sums are those of the page's table: the first of a day has what the others leave."""
    lines = re.findall(r"^acme +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)$", PAGE, re.MULTILINE)
    found: list[UsageRecord] = []
    for model, day, *counts, cost in lines:
        requests, failed, prompt, cached, completion = map(pages.number, counts)
        for number in range(requests):
            first = number == 0
            found.append(
                UsageRecord(
                    request_id=f"{day}-{number}",
                    ended_ns=DAYS_NS[day] + number * NS_PER_S,
                    tenant="acme",
                    requested_model=model,
                    served_model=model,
                    outcome=Outcome.FAILED if number < failed else Outcome.FINISHED,
                    prompt_tokens=prompt - 2 * (requests - 1) if first else 2,
                    cached_tokens=cached - (requests - 1) if first else 1,
                    completion_tokens=completion - 3 * (requests - 1) if first else 3,
                    cost_micros=round(float(cost) * 1e6) if first else 0,
                )
            )
    return found


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    directory = tmp_path / "ledger"
    directory.mkdir()
    sink = SqliteSink(ledger_segment.database_path(directory), ManualClock())
    sink.write(month())
    sink.close()
    return directory


def test_the_table_of_usage(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "penstock.yaml"
    (prices,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config.write_text(f"{prices}ledger: {{directory: {ledger}}}\n")
    assert main(["usage", "-c", str(config), "--since", "2026-11-19"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    (shown,) = re.findall(r"\$ penstock usage -c penstock.yaml --since 7d\n(.*?)```", PAGE, re.DOTALL)
    assert said == [line.split() for line in shown.splitlines()]


def test_the_queries_run_and_mean_what_they_say(ledger: Path) -> None:
    (block,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    first, second = [text for text in block.split(";") if text.strip()]
    connection = sqlite3.connect(ledger_segment.database_path(ledger))
    try:
        connection.execute(first).fetchall()  # Of this month, whichever that is.
        ((model, saved),) = connection.execute(second).fetchall()
    finally:
        connection.close()
    assert (model, round(saved, 3)) == ("penstock-demo", round((801_920 + 211_488) / (982_114 + 254_470), 3))


def test_the_settings_that_the_page_names_have_the_values_that_it_says() -> None:
    reported = re.findall(r"`(ledger|budgets)\.(\w+)`,? \((\d+(?:\.\d+)?) ?(ms|s|MiB)?", PAGE)
    reported += [
        (a, b, c, d) for a, b, c, d in re.findall(r"\(`(ledger|budgets)\.(\w+)`, (\d+) (ms|s)\)", PAGE)
    ]
    assert len(reported) >= 2
    for section, name, value, unit in reported:
        found = getattr(getattr(CONFIG, section), name)
        assert found == float(value) * (1 << 20 if unit == "MiB" else 1), name
    assert f"synced every {LedgerTerms().fsync_ms} ms" in PAGE
    assert WARN_AT == (0.5, 0.8, 1.0)

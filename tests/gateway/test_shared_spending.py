"""Totals of spending in a real Redis, and who keeps budgets up to date with them.

Whole gateways: tests/cli/test_serve_budgets.py.
"""

import asyncio
from pathlib import Path

import pytest
import redis as client
from redis_process import RedisProcess

from penstock.gateway.shared.keeper import StoreError
from penstock.gateway.shared.redis_store import DAY_KEPT_MS, MONTH_KEPT_MS, RedisSpending
from penstock.policy.limits.budget import Spent, month_of
from penstock.policy.limits.store_terms import SharedTerms
from penstock.types import TenantId

DAY = 20_634


def spent(day_micros: int, month_micros: int, tenant: str = "acme", day: int = DAY) -> Spent:
    return Spent(tenant=TenantId(tenant), day=day, day_micros=day_micros, month_micros=month_micros)


def told(redis: RedisProcess, prefix: str, *messages: tuple[str, list[Spent]]) -> list[list[Spent]]:
    """What each of the ledgers hears when it tells this, one after the other."""

    async def main() -> list[list[Spent]]:
        config = SharedTerms(url=redis.url, prefix=prefix, timeout_s=10)
        stores = {ledger: RedisSpending(config, ledger) for ledger, _ in messages}
        try:
            return [await stores[ledger].exchange(here) for ledger, here in messages]
        finally:
            for store in stores.values():
                await store.close()

    return asyncio.run(main())


def test_each_hears_the_sum_of_the_others(redis: RedisProcess) -> None:
    heard = told(
        redis,
        "sum",
        ("x", [spent(10, 100), spent(1, 1, "umbrella")]),
        ("y", [spent(20, 200)]),
        ("z", [spent(0, 0)]),
        ("x", [spent(11, 101), spent(1, 1, "umbrella")]),
    )
    assert heard == [
        [spent(0, 0), spent(0, 0, "umbrella")],
        [spent(10, 100)],
        [spent(30, 300)],
        [spent(20, 200), spent(0, 0, "umbrella")],
    ]


def test_a_total_that_is_told_again_or_late_changes_nothing(redis: RedisProcess) -> None:
    heard = told(
        redis,
        "again",
        ("x", [spent(10, 100)]),
        ("x", [spent(10, 100)]),
        ("x", [spent(7, 90)]),  # Another process of the same machine, which knows less.
        ("y", [spent(0, 0)]),
    )
    assert heard[-1] == [spent(10, 100)]
    assert heard[:3] == [[spent(0, 0)]] * 3


def test_days_and_months_are_kept_apart_and_not_for_ever(redis: RedisProcess) -> None:
    heard = told(
        redis,
        "kept",
        ("x", [spent(10, 100)]),
        ("y", [spent(5, 70, day=DAY + 1)]),  # July.
        ("y", [spent(0, 0)]),
    )
    assert heard[1] == [spent(0, 0, day=DAY + 1)]
    assert heard[2] == [spent(10, 100)]
    with client.Redis.from_url(redis.url) as asked:
        assert 0 < asked.pttl(f"kept:spent:day:{DAY}:acme") <= DAY_KEPT_MS
        assert DAY_KEPT_MS < asked.pttl(f"kept:spent:month:{month_of(DAY)}:acme") <= MONTH_KEPT_MS


def test_amounts_are_exact(redis: RedisProcess) -> None:
    most = 2**53 - 1
    assert told(redis, "exact", ("x", [spent(most, most)]), ("y", [spent(0, 0)]))[1] == [spent(most, most)]


def test_a_store_that_is_away_is_said(tmp_path: Path) -> None:
    process = RedisProcess(tmp_path)  # Never started.
    with pytest.raises(StoreError):
        told(process, "away", ("x", [spent(1, 1)]))

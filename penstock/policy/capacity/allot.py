"""Which pool grows or shrinks when a model's number of workers changes.

Out: first what must not be lost together (`steady`), then the cheapest pool with room whose launcher works.
In: the dearest pool, but never below `steady` workers that nobody takes back. Spot workers are what is beyond
that, so that all of them may go at once.
"""

import math
from collections.abc import Sequence

from penstock.config.scale import ScaleConfig, ScalePoolConfig
from penstock.policy.capacity.signals import PoolState

ONLY = ScalePoolConfig(name="only", max=256)
"""Of a model without pools; its `PoolState.name` is empty."""


def pool_config(scale: ScaleConfig, name: str) -> ScalePoolConfig:
    """The pool of that name; a model without pools has one without a name."""
    return next((pool for pool in scale.pools if pool.name == name), ONLY)


def grow(scale: ScaleConfig, pools: Sequence[PoolState], count: int, steady: int) -> dict[str, int]:
    """Where `count` more workers start, by pool; fewer where there is no room for so many."""
    assert count >= 0 <= steady, (count, steady)
    now = {pool.name: pool.ready + pool.pending for pool in pools}
    more = dict.fromkeys(now, 0)
    works = [pool for pool in pools if not pool.trouble]
    prices = _prices(scale, pools)
    by_price = sorted(works, key=lambda pool: (prices[pool.name], pool_config(scale, pool.name).spot))
    for _ in range(count):
        firm = sum(num + more[name] for name, num in now.items() if not pool_config(scale, name).spot)
        with_room = [
            pool for pool in by_price if now[pool.name] + more[pool.name] < pool_config(scale, pool.name).max
        ]
        firms = [pool for pool in with_room if not pool_config(scale, pool.name).spot]
        chosen = firms if firm < steady and firms else with_room
        if not chosen:
            break
        more[chosen[0].name] += 1
    return {name: num for name, num in more.items() if num}


def shrink(scale: ScaleConfig, pools: Sequence[PoolState], steady: int) -> str | None:
    """The pool that gives up a ready worker; None: each is needed where it is."""
    firm = sum(pool.ready for pool in pools if not pool_config(scale, pool.name).spot)
    prices = _prices(scale, pools)
    by_price = sorted(
        (pool for pool in pools if pool.ready), key=lambda pool: (-prices[pool.name], pool.name)
    )
    for pool in by_price:
        if pool_config(scale, pool.name).spot or firm > steady:
            return pool.name
    return None


def steady_workers(scale: ScaleConfig, protected_work: float, safe: float) -> int:
    """Workers that are not spot: the least number, and enough for the bands that go before others."""
    if not any(pool.spot for pool in scale.pools):
        return 0
    return max(scale.min, math.ceil(protected_work / safe) if safe else 1)


def per_hour(scale: ScaleConfig, pools: Sequence[PoolState]) -> float:
    """The cost of the workers that are there, or start."""
    return sum(
        (pool.ready + pool.pending + pool.draining) * pool_config(scale, pool.name).price for pool in pools
    )


def _prices(scale: ScaleConfig, pools: Sequence[PoolState]) -> dict[str, float]:
    """By pool. Of one row, once workers of every pool have said how many rows they have: a dearer accelerator
    may be the cheaper one.
    """
    rows = {pool.name: pool.slots / pool.ready for pool in pools if pool.ready and pool.slots}
    is_known = len(rows) == len(pools)
    return {
        pool.name: pool_config(scale, pool.name).price / (rows[pool.name] if is_known else 1.0)
        for pool in pools
    }

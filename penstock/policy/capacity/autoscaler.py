"""One model's autoscaler: three opinions, one decision, its reasons.

    Signals ──> Learned ──> opinions ──> wanted ──> bounds, budgets ──> ScaleDecision: how many, of which pool
                                                     └─ frozen, advice, an operator's order go before

Out at once, as many as are wanted. In slowly: a worker goes when the smooth load wanted no more than the
others for half of `in_after_s`, nothing joined within all of it, the last one that left has ended its
requests, and those that stay keep enough room (`keeps_enough`). Within `in_after_s` of one that left a single
one is not asked for again by what is thought of the load alone, only if requests suffer. So a steady load
sees at most one change of direction in `in_after_s`. Workers that start are never given up, and count as what
they will be: nothing more is asked for in their place.

Of which pool: out, first what must not be lost together (`steady`), then the cheapest one with room whose
launcher works (`grow`); in, the dearest, but never below `steady` workers that nobody takes back (`shrink`).
Spot workers are what is beyond that, so that all of them may go at once.

Pure: the same state and the same signals give the same decision, which is how decisions are replayed.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.scale import ScaleConfig, ScalePoolConfig
from penstock.policy.capacity.opinions import (
    Learned,
    Opinion,
    capacity,
    floor,
    is_within,
    keeps_enough,
    lasting,
    reactive,
    spans_of,
    suffers,
)
from penstock.policy.capacity.signals import Override, PoolState, Signals

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


LATELY = 0.5
"""Share of `in_after_s` for which no more workers may have been wanted: the load was smoothed already."""
IN_PAUSE, UNSEEN_PAUSE = 0.1, 0.5
"""Share of `in_after_s` between two workers that leave; the longer one where those that stay would do more
than workers were ever seen to do: the first puts right what is thought of that, before a second one goes."""
Move = Literal["hold", "out", "in"]


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """About one model, at one look."""

    model: str = ""
    wall_ns: int
    move: Move
    acts: bool
    """False: it is advice, or nothing may change now; `move` says what would be done."""
    why: str
    is_frozen: bool = False
    """Nothing may change now, neither here nor by others who scale by these numbers."""
    ready: int
    pending: int
    wanted: int
    """Workers, whatever bounds say."""
    workers: int
    """That there are to be from now on, those that start included."""
    pools: dict[str, int]
    """The same by pool; a model without pools has one without a name."""
    opinions: tuple[Opinion, ...]
    held_by: str = ""
    """The bound, budget or launcher that kept it from doing more; empty: none did."""
    safe_rate: float = 0.0
    """Work per second that is safe for one worker; 0: not known yet."""
    rate: float = 0.0
    """Work per second that comes."""
    forecast: float = 0.0
    """And that is expected after a cold start."""
    cold_start_s: float = 0.0


class ScaleState(msgspec.Struct, kw_only=True):
    """All that is remembered of one model between two looks, in a form that is kept over a restart."""

    learned: Learned = msgspec.field(default_factory=Learned)
    wanted: list[tuple[int, int]] = []
    """(when, how many): of late (`LATELY`), of which the largest counts for leaving."""
    out_ns: int = 0
    in_ns: int = 0
    """When the last worker was asked for, and told to leave."""
    left: tuple[int, int] = (0, 0)
    """When the last one left that nobody had ordered away, and how many stayed; 0: none has."""
    suffered: bool = False
    """Whether requests suffered at the last look."""
    begun_ns: int | None = None
    """When it was first looked; None: it was not. How many were wanted before is not known."""


class ScaleBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The room that budgets of the whole fleet leave for one model."""

    workers: int = 1 << 30
    """That may be added."""
    by: str = ""
    """Which budget that is."""


class Autoscaler:
    """See the module. `state` is what `decide` remembers."""

    def __init__(self, model: str, scale: ScaleConfig, state: ScaleState | None = None) -> None:
        assert scale.max, "a model that does not scale has no autoscaler"
        self.model, self.scale = model, scale
        self.state = state or ScaleState()

    def decide(self, seen: Signals, budget: ScaleBudget = ScaleBudget()) -> ScaleDecision:  # noqa: B008 - it is frozen.
        """Learn from what was seen, and say how many workers there are to be."""
        state, scale = self.state, self.scale
        known = state.learned
        known.take(seen)
        state.begun_ns = seen.now_ns if state.begun_ns is None else state.begun_ns
        advice = self.advise(seen)
        first = max(advice, key=lambda each: each.workers)
        wanted = first.workers
        # While it is not known what a worker can do, all that are there may be needed, and none is spare.
        load = max(advice[0].workers, advice[1].workers) if known.rate.safe else 1
        if scale.standby and load + scale.standby > wanted:
            wanted = load + scale.standby
            first = Opinion(of="floor", workers=wanted, why=f"{first.why}; {scale.standby} on standby")
        steady = self._steady(seen)
        aim = min(scale.max, wanted)
        self._remember(seen, min(scale.max, max(self.lasting() + scale.standby, advice[2].workers)))
        is_frozen = any(is_within(span, seen.wall_ns) for span in spans_of(scale.frozen))
        ordered = seen.override is not None and seen.wall_ns < seen.override.until_ns
        if ordered and seen.override is not None:
            aim = min(scale.max, seen.override.workers)
        if not ordered and aim > advice[2].workers and (rests := self._rests(seen, aim)):
            aim, first = aim - 1, rests
        state.suffered = bool(suffers(seen))
        targets, move, why, held = self._plan(seen, aim, budget, ordered=ordered, steady=steady)
        why = _ordered_by(seen.override) if ordered and seen.override is not None else why or first.why
        if is_frozen and not ordered and move != "hold":
            why = f"nothing is changed at this time (frozen); else: {why}"
        acts = ordered or (scale.mode == "act" and not is_frozen)
        if acts and move != "hold":
            self._moved(seen.now_ns, move, 0 if ordered else sum(targets.values()))
        if wanted > scale.max and not held:
            held = f"max is {scale.max}"
        return ScaleDecision(
            model=self.model,
            wall_ns=seen.wall_ns,
            move=move,
            acts=acts,
            why=why,
            is_frozen=is_frozen and not ordered,
            ready=seen.ready,
            pending=seen.pending,
            wanted=wanted,
            workers=sum(targets.values()),
            pools=targets,
            opinions=advice,
            held_by=held,
            safe_rate=round(known.rate.safe, 3),
            rate=round(known.demand.fast, 3),
            forecast=round(known.demand.expected(known.ahead_s), 3),
            cold_start_s=round(known.cold.expected_s, 3),
        )

    def advise(self, seen: Signals) -> tuple[Opinion, Opinion, Opinion]:
        """By the load as it is, by the load to come, by the configuration."""
        known = self.state.learned
        return reactive(seen, known), capacity(known), floor(self.scale, seen, known)

    def lasting(self) -> int:
        """Workers that the smooth load wants: with more than those one leaves."""
        return lasting(self.state.learned)

    @property
    def _lately_s(self) -> float:
        return LATELY * self.scale.in_after_s

    def _steady(self, seen: Signals) -> int:
        known = self.state.learned
        come = max(known.demand.fast, known.demand.expected(known.ahead_s))
        return min(self.scale.max, steady_workers(self.scale, known.protected * come, known.rate.safe))

    def _remember(self, seen: Signals, wanted: int) -> None:
        """How many were wanted lately: one entry for each number that is still the largest since."""
        kept, oldest_ns = self.state.wanted, seen.now_ns - int(self._lately_s * NS_PER_S)
        while kept and kept[-1][1] <= wanted:
            kept.pop()
        kept.append((seen.now_ns, wanted))
        while kept[0][0] < oldest_ns:
            kept.pop(0)

    def _plan(
        self, seen: Signals, aim: int, budget: ScaleBudget, *, ordered: bool, steady: int
    ) -> tuple[dict[str, int], Move, str, str]:
        """The target of each pool, the direction, a reason of its own if there is one, and what holds it."""
        targets = {pool.name: pool.ready + pool.pending for pool in seen.pools}
        there = sum(targets.values())
        firm = sum(num for name, num in targets.items() if not pool_config(self.scale, name).spot)
        missing = aim - there if ordered else max(aim - there, min(steady - firm, self.scale.max - there))
        if missing > 0:
            allowed = min(missing, budget.workers)
            more = grow(self.scale, seen.pools, allowed, steady)
            for name, count in more.items():
                targets[name] += count
            held = budget.by if allowed < missing else ""
            if sum(more.values()) < allowed:
                held = next((pool.trouble for pool in seen.pools if pool.trouble), "the pools are full")
            return targets, "out" if more else "hold", "", held
        if aim >= there:
            return targets, "hold", "", ""
        if ordered:
            return self._shrunk(seen, targets, there - aim)
        if why := self._stays(seen):
            return targets, "hold", why, ""
        name = shrink(self.scale, seen.pools, steady)
        if name is None:
            return targets, "hold", "what spot workers do must not be lost with them", ""
        targets[name] -= 1
        lately = max(count for _, count in self.state.wanted)
        return targets, "in", f"no more than {lately} were wanted within {self._lately_s:g} s", ""

    def _shrunk(
        self, seen: Signals, targets: dict[str, int], count: int
    ) -> tuple[dict[str, int], Move, str, str]:
        """An operator wants fewer: all at once, for each ends its requests first."""
        for _ in range(count):
            dear = max(
                (name for name, num in targets.items() if num),
                key=lambda name: (pool_config(self.scale, name).price, name),
            )
            targets[dear] -= 1
        assert sum(targets.values()) == seen.ready + seen.pending - count, "each of them had a place"
        return targets, "in", "", ""

    def _moved(self, now_ns: int, move: Move, stay: int) -> None:
        """Remember it; `stay` is 0 if it was ordered."""
        state = self.state
        if move == "out":
            state.out_ns = now_ns
        else:
            state.in_ns = now_ns
            state.left = (now_ns, stay) if stay else (0, 0)

    def _rests(self, seen: Signals, aim: int) -> Opinion | None:
        """Why one worker more is not asked for now, although the load seems to want it; None: it is."""
        when_ns, stayed = self.state.left
        there, after_ns = seen.ready + seen.pending, int(self.scale.in_after_s * NS_PER_S)
        is_recent = when_ns and seen.now_ns - when_ns < after_ns
        # Two late answers of a dozen are chance once, and not twice.
        suffers_now = bool(suffers(seen)) and (seen.shed > 0 or self.state.suffered)
        if not is_recent or aim - there != 1 or there < stayed or suffers_now:
            return None  # With fewer than stayed one was lost since.
        words = f"one left within {self.scale.in_after_s:g} s, and nothing suffers without it"
        return Opinion(of="rest", workers=aim - 1, why=words)

    def _stays(self, seen: Signals) -> str:
        """Why no worker leaves now; empty: one may."""
        state, now_ns = self.state, seen.now_ns
        after_ns = int(self.scale.in_after_s * NS_PER_S)
        lately = max(count for _, count in state.wanted)
        if lately >= seen.ready + seen.pending:
            return f"{lately} were wanted within {self._lately_s:g} s"
        if state.begun_ns is None or now_ns - state.begun_ns < after_ns:
            return f"the load was not looked at for {self.scale.in_after_s:g} s yet"
        if seen.pending or seen.draining:
            return "a worker starts, or leaves"
        if state.out_ns and now_ns - state.out_ns < after_ns:
            return f"one joined within {self.scale.in_after_s:g} s"
        each = state.learned.demand.level / max(1, seen.ready - 1)
        pause = IN_PAUSE if each <= state.learned.rate.good else UNSEEN_PAUSE
        if state.in_ns and now_ns - state.in_ns < int(after_ns * pause):
            return "one left just now"
        return keeps_enough(seen, state.learned, seen.ready - 1)


def _ordered_by(override: Override) -> str:
    who = f"key {override.by}" if override.by else "an operator"
    return f"{who} wants {override.workers}"

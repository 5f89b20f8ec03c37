"""The autoscaler's decisions on signals that a test makes up; sim/ has it over whole days."""

import itertools
import math
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S
from penstock.config.scale import ScaleConfig, ScalePoolConfig, parse_span
from penstock.policy.capacity.autoscaler import (
    Autoscaler,
    ScaleBudget,
    ScaleDecision,
    ScaleState,
    grow,
    shrink,
    steady_workers,
)
from penstock.policy.capacity.forecast import Demand
from penstock.policy.capacity.learn import (
    COLD_START_S,
    SAFE,
    SAFE_MAX,
    ColdStartTimes,
    LateShares,
    ServiceRate,
)
from penstock.policy.capacity.opinions import is_within, keeps_enough, scheduled, spans_of
from penstock.policy.capacity.signals import Override, PoolState, Signals, work_of

LOOK_S = 5
PER_REQUEST = 100.0
NO_BUDGET = ScaleBudget()


@dataclass
class Fleet:
    """Workers that do what is decided, each ready `cold_s` after it was asked for."""

    scale: ScaleConfig
    cold_s: int = 20
    rate: float = 100.0
    """Tokens per second that a worker does at most."""
    now_s: int = 0
    ready: int = 1
    starting: list[int] = field(default_factory=list)
    decisions: list[ScaleDecision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaler = Autoscaler("m", self.scale)

    def look(
        self, arrived: int, *, wall_s: int = 0, budget: ScaleBudget = NO_BUDGET, **more: object
    ) -> ScaleDecision:
        self.now_s += LOOK_S
        came = [each for each in self.starting if each <= self.now_s]
        self.starting = [each for each in self.starting if each > self.now_s]
        self.ready += len(came)
        can = int(self.ready * self.rate * LOOK_S / PER_REQUEST)
        answered = min(arrived, can)
        seen = Signals(
            now_ns=self.now_s * NS_PER_S, wall_ns=(wall_s or self.now_s) * NS_PER_S, window_s=LOOK_S,
            pools=(PoolState(ready=self.ready, pending=len(self.starting), slots=8 * self.ready),),
            arrived=arrived, answered=answered, work=answered * PER_REQUEST, due=answered,
            shed=arrived - answered, cold_starts_s=tuple(float(self.cold_s) for _ in came),
            running=min(8 * self.ready, answered), waiting=2 * (arrived - answered),
        )  # fmt: skip
        decision = self.scaler.decide(msgspec.structs.replace(seen, **more), budget)
        self.decisions.append(decision)
        if decision.acts:
            there = self.ready + len(self.starting)
            self.starting += [self.now_s + self.cold_s] * max(0, decision.workers - there)
            self.ready -= max(0, there - decision.workers)
        return decision

    def run(self, seconds: int, arrived: int) -> None:
        for _ in range(seconds // LOOK_S):
            self.look(arrived)

    def turns(self, within_s: int) -> int:
        """The most changes of direction within so long."""
        moves = [(each.wall_ns // NS_PER_S, each.move) for each in self.decisions if each.move != "hold"]
        changes = [two[0] for one, two in itertools.pairwise(moves) if one[1] != two[1]]
        return max((sum(at <= each < at + within_s for each in changes) for at in changes), default=0)


def test_more_load_than_the_workers_can_do_gets_more_workers_and_less_gets_fewer_one_at_a_time() -> None:
    fleet = Fleet(ScaleConfig(max=8, in_after_s=60))
    fleet.run(120, 3)  # 60 tokens/s: one worker.
    assert (fleet.ready, fleet.starting) == (1, [])
    fleet.run(200, 20)  # 400 tokens/s.
    assert 5 <= fleet.ready <= 6, "what full workers do was seen, and a little less is safe"
    before = len(fleet.decisions)
    fleet.run(600, 3)
    downs = [each for each in fleet.decisions[before:] if each.move == "in"]
    assert all(each.workers == each.ready - 1 for each in downs)
    assert downs[0].wall_ns >= fleet.decisions[before].wall_ns + 30 * NS_PER_S
    assert "were wanted within 30 s" in downs[0].why
    assert fleet.ready == 1


def test_a_worker_that_starts_is_no_capacity_and_is_not_asked_for_twice() -> None:
    fleet = Fleet(ScaleConfig(max=8), cold_s=600)
    fleet.run(60, 20)
    asked = max(each.workers for each in fleet.decisions)
    assert fleet.ready == 1
    assert len(fleet.starting) == asked - 1
    fleet.run(120, 20)
    assert fleet.ready + len(fleet.starting) == max(each.workers for each in fleet.decisions)
    assert all(each.move != "in" for each in fleet.decisions), "nothing that starts is given up"


def test_bounds_hold_and_say_so() -> None:
    fleet = Fleet(ScaleConfig(max=3, min=2), ready=0)
    first = fleet.look(0)
    assert (first.workers, first.move) == (2, "out")
    fleet.run(200, 60)
    last = fleet.decisions[-1]
    assert last.workers == 3
    assert last.wanted > 3
    assert last.held_by == "max is 3"
    fleet = Fleet(ScaleConfig(max=9))
    fleet.run(40, 3)
    held = [fleet.look(40, budget=ScaleBudget(workers=1, by="the budget")) for _ in range(3)]
    assert held[0].workers <= 2
    assert {each.held_by for each in held if each.wanted > each.workers} == {"the budget"}


def test_standby_schedule_and_zero() -> None:
    fleet = Fleet(ScaleConfig(max=8, standby=2))
    fleet.run(120, 3)
    assert fleet.decisions[-1].workers == 3
    eight = 8 * 3600 + 4 * 86_400  # A Monday: the epoch began on a Thursday.
    fleet = Fleet(ScaleConfig(max=8, schedule=("mon-fri 08:00-18:00 4", "sat 08:00-18:00 7")))
    assert fleet.look(0, wall_s=eight - 3600).workers == 1
    assert fleet.look(0, wall_s=eight - 30).workers == 4, "they are asked for a cold start ahead"
    fleet = Fleet(ScaleConfig(max=2, min=0, in_after_s=30))
    fleet.run(30, 1)
    assert fleet.ready == 1
    fleet.run(240, 0)
    assert fleet.ready == 0
    assert fleet.look(1, waiting=1).workers == 1
    assert fleet.decisions[-1].opinions[2].why == "somebody asks for the model"


def test_nothing_changes_at_frozen_times_and_an_order_goes_before_all_of_it() -> None:
    frozen = ScaleConfig(max=8, frozen=("00:00-23:59",))
    fleet = Fleet(frozen)
    fleet.run(120, 20)
    assert fleet.ready == 1
    assert not fleet.decisions[-1].acts
    assert fleet.decisions[-1].why.startswith("nothing is changed at this time (frozen); else: ")
    order = Override(workers=4, until_ns=2000 * NS_PER_S, by="sk-1")
    done = fleet.look(20, override=order)
    assert (done.workers, done.acts, done.why) == (4, True, "key sk-1 wants 4")
    fleet.run(30, 20)
    down = fleet.look(20, override=Override(workers=1, until_ns=2000 * NS_PER_S))
    assert (down.workers, down.move) == (1, "in"), "all at once: each ends its requests first"
    assert not fleet.look(20, override=Override(workers=4, until_ns=1)).acts, "it has expired"
    advice = Fleet(ScaleConfig(max=8, mode="advise"))
    advice.run(120, 20)
    assert advice.ready == 1
    assert advice.decisions[-1].workers > 1


@pytest.mark.parametrize("least", [0, 1])
def test_none_leaves_before_the_load_was_looked_at_for_as_long_as_it_takes(least: int) -> None:
    fleet = Fleet(ScaleConfig(max=4, min=least, in_after_s=60), ready=2)
    fleet.scaler.state.learned.rate = ServiceRate(full=100.0, good=90.0)  # As behind a restart.
    fleet.run(60, 0)
    assert fleet.ready == 2
    assert fleet.decisions[-1].why == "the load was not looked at for 60 s yet"
    fleet.run(60, 0)
    assert fleet.ready == least


def test_an_order_for_fewer_takes_no_worker_more_of_a_steady_pool() -> None:
    scaler = Autoscaler("m", msgspec.structs.replace(POOLS, min=2))
    seen = Signals(
        now_ns=5 * NS_PER_S, wall_ns=0, window_s=5, pools=pools(0, 3),
        override=Override(workers=1, until_ns=NS_PER_S),
    )  # fmt: skip
    done = scaler.decide(seen)
    assert (done.move, done.pools) == ("in", {"firm": 0, "spot": 1})
    done = scaler.decide(msgspec.structs.replace(seen, override=None))
    assert (done.move, done.pools) == ("out", {"firm": 2, "spot": 3}), "by load they are needed"


@pytest.mark.parametrize("arrived", range(1, 30, 4))
def test_a_steady_load_changes_its_direction_once_in_five_minutes_at_most(arrived: int) -> None:
    fleet = Fleet(ScaleConfig(max=20))
    fleet.run(3600, arrived)
    assert fleet.turns(300) <= 1


def a_fleet_that_one_has_just_left() -> Fleet:
    """Of three workers two are left, and the load is such that three were wanted by a little less rate."""
    fleet = Fleet(ScaleConfig(max=8), ready=3)
    fleet.scaler.state.learned.rate = ServiceRate(full=100.0, good=90.0)
    fleet.run(900, 7)  # 140 tokens/s, of which two workers do 180.
    assert fleet.ready == 2
    assert [each.move for each in fleet.decisions if each.move != "hold"] == ["in"]
    fleet.scaler.state.left = fleet.now_s * NS_PER_S, 2
    return fleet


def wants_three(fleet: Fleet, **more: object) -> ScaleDecision:
    """It is thought a little less of a worker."""
    fleet.scaler.state.learned.rate = ServiceRate(full=70.0, good=60.0)
    return fleet.look(7, **more)


def test_one_that_has_just_left_is_not_asked_for_again_by_what_is_thought_of_a_worker() -> None:
    fleet = a_fleet_that_one_has_just_left()
    held = wants_three(fleet)
    assert (held.move, held.workers, held.wanted) == ("hold", 2, 3)
    assert held.why == "one left within 300 s, and nothing suffers without it"
    fleet.now_s += 300
    assert wants_three(fleet).move == "out", "five minutes later it is"


@pytest.mark.parametrize(
    "more", [{"late": 8, "due": 20}, {"shed": 1}, {"kv_use": 0.95}, {"memory_headroom": 0.02, "waiting": 1}]
)
def test_it_is_asked_for_if_requests_suffer(more: dict[str, object]) -> None:
    fleet = a_fleet_that_one_has_just_left()
    found = wants_three(fleet, **more)
    if "shed" not in more:
        assert found.move == "hold", "that may be chance, once"
        found = wants_three(fleet, **more)
    assert found.move == "out"


def test_it_is_asked_for_at_once_if_one_was_lost_or_two_are_wanted_or_an_operator_had_sent_it_away() -> None:
    fleet = a_fleet_that_one_has_just_left()
    fleet.ready = 1
    assert wants_three(fleet).move == "out", "two are wanted, and one was lost"
    fleet = a_fleet_that_one_has_just_left()
    fleet.scaler.state.left = fleet.now_s * NS_PER_S, 3
    assert wants_three(fleet).move == "out", "one of three was lost since"
    fleet = a_fleet_that_one_has_just_left()
    order = Override(workers=1, until_ns=10**18)
    assert fleet.look(7, override=order).move == "in"
    assert fleet.scaler.state.left == (0, 0), "the load had no part in that"


def test_kv_memory_and_late_answers_want_one_more_whatever_the_rate_is_thought_to_be() -> None:
    for more in ({"kv_use": 0.95}, {"late": 8, "due": 20}, {"memory_headroom": 0.02, "waiting": 1}):
        fleet = Fleet(ScaleConfig(max=8), ready=2)
        fleet.run(60, 4)
        assert fleet.look(4, **more).workers == 3, more


def test_a_worker_leaves_only_if_the_others_keep_room() -> None:
    fleet = Fleet(ScaleConfig(max=8), ready=3)
    fleet.run(300, 7)  # 140 tokens/s of 300.
    known = fleet.scaler.state.learned
    known.rate = ServiceRate(full=100.0, good=90.0)
    seen = Signals(
        now_ns=1, wall_ns=1, window_s=5, pools=(PoolState(ready=3, slots=24),), running=6, due=20
    )  # fmt: skip
    assert "are over 80%" in keeps_enough(seen, known, 1)
    assert keeps_enough(msgspec.structs.replace(seen, waiting=1), known, 2) == "1 requests wait"
    assert "late" in keeps_enough(msgspec.structs.replace(seen, late=5), known, 2)
    assert "KV memory would be 75% full" in keeps_enough(msgspec.structs.replace(seen, kv_use=0.5), known, 2)
    assert "fill the rows" in keeps_enough(msgspec.structs.replace(seen, running=18), known, 2)
    assert "2.0% of its memory" in keeps_enough(msgspec.structs.replace(seen, memory_headroom=0.02), known, 2)


POOLS = ScaleConfig(
    max=9,
    min=1,
    pools=(
        ScalePoolConfig(name="firm", price=4.0, max=6),
        ScalePoolConfig(name="spot", price=1.0, spot=True, max=6),
    ),
)


def pools(firm: int, spot: int, trouble: str = "") -> tuple[PoolState, PoolState]:
    return (
        PoolState(name="firm", ready=firm),
        PoolState(name="spot", ready=spot, trouble=trouble),
    )


def test_spot_workers_are_what_may_be_lost() -> None:
    assert steady_workers(POOLS, protected_work=250, safe=100) == 3
    assert steady_workers(POOLS, protected_work=0, safe=100) == 1, "never below the least number"
    assert grow(POOLS, pools(0, 0), 5, steady=3) == {"firm": 3, "spot": 2}
    assert grow(POOLS, pools(3, 5), 3, steady=3) == {"spot": 1, "firm": 2}, "a full pool: the next one"
    assert grow(POOLS, pools(3, 0, "no machines"), 2, steady=3) == {"firm": 2}
    assert grow(POOLS, pools(6, 6), 2, steady=3) == {}
    assert shrink(POOLS, pools(4, 2), steady=3) == "firm", "the dearer one"
    assert shrink(POOLS, pools(3, 2), steady=3) == "spot"
    assert shrink(POOLS, pools(3, 0), steady=3) is None


def test_when_all_spot_is_revoked_the_steady_pool_carries_what_goes_first() -> None:
    scaler = Autoscaler("m", POOLS)
    full = ServiceRate(full=100.0, good=80.0)
    scaler.state.learned.rate = full

    def look(now_s: int, firm: int, spot: int, trouble: str = "") -> ScaleDecision:
        return scaler.decide(
            Signals(
                now_ns=now_s * NS_PER_S, wall_ns=now_s * NS_PER_S, window_s=5,
                pools=pools(firm, spot, trouble), arrived=20, answered=20, work=2000.0,
                protected_share=0.4, due=20,
            )
        )  # fmt: skip

    for i in range(1, 60):
        decision = look(5 * i, 2, 3)
    assert decision.pools["firm"] == 2, "160 of 400 tokens/s go first: two workers that stay"
    lost = look(305, 2, 0, "no machines are to be had")
    assert lost.move == "out"
    assert lost.pools["firm"] >= 5
    assert lost.pools["spot"] == 0


def test_what_cold_workers_do_is_no_sample() -> None:
    rate = ServiceRate()
    for i in range(1, 30):
        ready = 1 + i % 3
        rate.take(
            Signals(now_ns=i, wall_ns=i, window_s=5, pools=(PoolState(ready=ready),), work=1.0, waiting=9)
        )
    assert rate.safe == 0
    for i in range(30, 50):
        rate.take(
            Signals(now_ns=i, wall_ns=i, window_s=5, pools=(PoolState(ready=2),), work=1000.0, waiting=9)
        )
    assert rate.full == pytest.approx(100)
    assert SAFE * rate.full <= rate.safe <= SAFE_MAX * rate.full


def test_cold_starts_are_those_that_were_measured() -> None:
    cold = ColdStartTimes()
    assert cold.expected_s == COLD_START_S
    cold.take((30.0, 90.0, 40.0, 50.0))
    assert 50 <= cold.expected_s <= 90
    cold.take((5.0,) * 8)
    assert cold.expected_s == 5.0


def test_a_forecast_knows_the_time_of_the_day_and_a_naive_one_does_not() -> None:
    """The naive ones: what comes now, and that with its damped trend, as before a whole season was seen."""

    def rate(at_s: float) -> float:
        return 100.0 if at_s % 3600 < 1800 else 1000.0

    demand, unseasoned = Demand(season_s=3600.0), Demand(season_s=30 * 86_400.0)
    off: dict[str, list[float]] = {"seasonal": [], "trend": [], "last": []}
    for at_s in range(0, 4 * 3600, 5):
        for each in (demand, unseasoned):
            each.take(float(at_s), 5.0, 5 * rate(at_s))
        if at_s > 3600 and 1700 <= at_s % 3600 < 1790:
            said = demand.expected(100.0), unseasoned.expected(100.0), demand.level
            for kind, expected in zip(off, said, strict=True):
                off[kind].append(abs(expected - 1000.0))
    assert not unseasoned.season
    wrong = {kind: sum(each) / len(each) for kind, each in off.items()}
    assert wrong["seasonal"] < wrong["last"] / 3, wrong
    assert wrong["seasonal"] < wrong["trend"] / 3, wrong


def test_times_of_the_week() -> None:
    monday = 4 * 86_400
    (office,) = spans_of(["mon-fri 07:30-19:00 4"])
    assert is_within(office, (monday + 7 * 3600 + 1800) * NS_PER_S)
    assert not is_within(office, (monday + 19 * 3600) * NS_PER_S)
    assert not is_within(office, (monday + 5 * 86_400 + 9 * 3600) * NS_PER_S), "a Saturday"
    (night,) = spans_of(["sun 22:00-02:00"])
    assert is_within(night, (monday - 3600) * NS_PER_S)
    assert not is_within(night, (monday - 3 * 3600) * NS_PER_S)
    assert is_within(night, (monday + 3600) * NS_PER_S), "it goes on into Monday"
    assert not is_within(night, (monday - 86_400 + 3600) * NS_PER_S), "of Saturday there is nothing to go on"
    assert not is_within(night, (monday + 3 * 3600) * NS_PER_S)
    assert scheduled([office], (monday + 7 * 3600) * NS_PER_S, ahead_s=1800) == 4
    for text in ("mon-fri", "25:00-26:00", "xyz 07:00-08:00", "07:00-07:00", "mon 7:00-8:00"):
        assert parse_span(text) is None, text


def test_work_counts_what_was_computed() -> None:
    assert work_of(100, 60, 10) == 80.0


signals = st.builds(
    Signals,
    now_ns=st.just(0), wall_ns=st.just(0), window_s=st.floats(0.5, 10),
    pools=st.tuples(
        st.builds(PoolState, name=st.just("firm"), ready=st.integers(0, 9), pending=st.integers(0, 4),
                  draining=st.integers(0, 2), slots=st.integers(0, 99), trouble=st.sampled_from(["", "no"])),
        st.builds(PoolState, name=st.just("spot"), ready=st.integers(0, 9), pending=st.integers(0, 4)),
    ),
    arrived=st.integers(0, 500), answered=st.integers(0, 500), shed=st.integers(0, 50),
    work=st.floats(0, 1e6), protected_share=st.floats(0, 1), due=st.integers(0, 500),
    late=st.integers(0, 50), waiting=st.integers(0, 500), running=st.integers(0, 500),
    kv_use=st.floats(0, 1), memory_headroom=st.floats(0, 1),
    cold_starts_s=st.lists(st.floats(0, 600), max_size=2).map(tuple),
    override=st.none() | st.builds(Override, workers=st.integers(0, 9), until_ns=st.integers(0, 10**12)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(signals, max_size=12))
def test_whatever_is_seen_bounds_hold_and_the_same_is_decided_again(looks: list[Signals]) -> None:
    scale = msgspec.structs.replace(POOLS, in_after_s=10.0)
    one, two = Autoscaler("m", scale), Autoscaler("m", scale)
    for i, each in enumerate(looks, 1):
        seen = msgspec.structs.replace(each, now_ns=5 * i * NS_PER_S, wall_ns=5 * i * NS_PER_S)
        there = seen.ready + seen.pending
        decision = one.decide(seen)
        # The state survives a file, and so does what is decided.
        body = msgspec.json.encode(two.state)
        two = Autoscaler("m", scale, msgspec.json.decode(body, type=ScaleState))
        assert two.decide(msgspec.json.decode(msgspec.json.encode(seen), type=Signals)) == decision
        assert decision.workers <= max(scale.max, there)
        assert all(count >= 0 for count in decision.pools.values())
        if decision.move == "in" and seen.override is None:
            assert decision.workers == there - 1
            assert not seen.pending
            assert not seen.draining
        if decision.move == "out":
            assert decision.workers > there


def test_the_rate_at_which_answers_are_late_is_found_before_workers_are_full() -> None:
    """Late from 200 on, and never full: rows say that 500 could be done."""
    shares = LateShares()
    for number in range(200):
        rate = 100.0 + (number * 37) % 150
        shares.take(rate, 30, 6 if rate > 200 else number % 20 == 0)
    assert 170 < shares.limit(0.025) < 210
    assert shares.limit(0.5) == math.inf
    assert LateShares().limit(0.025) == math.inf
    few = LateShares()
    few.take(100.0, 5, 5)
    assert few.limit(0.025) == math.inf, "five answers are chance"


@given(st.lists(st.tuples(st.floats(1.0, 1e6), st.integers(0, 200), st.floats(0, 1)), max_size=60))
def test_what_is_safe_is_never_more_for_more_late_answers(
    windows: list[tuple[float, int, float]],
) -> None:
    fewer, more = LateShares(), LateShares()
    for rate, due, share in windows:
        late = int(due * share)
        fewer.take(rate, due, late // 2)
        more.take(rate, due, late)
    assert more.limit(0.025) <= fewer.limit(0.025)

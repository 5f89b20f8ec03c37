"""The share of prompts, alone and in the scheduler on a scripted machine."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_engine import ScheduledEngine

from penstock.config.engine_settings import EngineSettings
from penstock.rng import stream
from penstock.schedule.plan import StepPlan
from penstock.schedule.prefill_budget import (
    CROWDED_NS,
    STRETCH,
    STRETCH_MAX,
    STRETCH_MIN,
    UNTRUSTED_TOKENS,
    LatencyTargets,
    PrefillBudget,
    PromptShare,
)
from penstock.schedule.step_time import StepCost, StepLoad, StepTimeModel

LAW = StepCost(fixed_ns=4_000_000, token_ns=50_000, sequence_ns=0, kv_read_ns=20, pair_ns=5)


def taught(law: StepCost = LAW) -> StepTimeModel:
    model, chance = StepTimeModel(), stream(3, "steps")
    for _ in range(300):
        rows = chance.randint(1, 16)
        load = StepLoad(rows, rows, rows * chance.randint(10, 2000))
        if chance.random() < 0.5:
            load = load.plus(chance.randint(0, 2000), chance.randint(1, 512))
        model.observe(load, round(law.predict_ns(load)))
    return model


def share(
    *, limit_ms: float = inf, rows: int = 8, num_prompts: int = 1, model: StepTimeModel | None = None
) -> PromptShare:
    decoding = StepLoad(rows, rows, rows * 500)
    return PromptShare(model or taught(), decoding, limit_ms * 1e6, num_prompts, tokens_min=16)


def test_targets_of_a_config() -> None:
    targets = LatencyTargets.of(EngineSettings(itl_target_ms={-1: 20.5}))
    assert targets.of_class(-1) == 20_500_000
    assert targets.of_class(0) == 0
    targets = LatencyTargets.of(EngineSettings(itl_target_ms=50))
    assert targets.of_class(0) == targets.of_class(3) == 50_000_000
    assert LatencyTargets.of(EngineSettings()).of_class(0) == 0


def test_without_a_limit_prompts_take_all_there_is() -> None:
    assert share().grant(0, 10_000, 512) == 512


def test_a_chunk_fills_the_time_and_no_more() -> None:
    step = share(limit_ms=10)
    tokens = step.grant(1000, 5000, 4096)
    load = StepLoad(8, 8, 4000)
    assert LAW.predict_ns(load.plus(1000, tokens)) == pytest.approx(10e6, rel=0.02)
    assert step.closed


def test_a_longer_context_makes_chunks_shorter() -> None:
    sizes = [share(limit_ms=10).grant(start, 10**6, 10**6) for start in (0, 1000, 2000, 4000)]
    assert sizes == sorted(set(sizes), reverse=True)


def test_the_least_is_granted_even_over_the_limit_but_only_to_the_first() -> None:
    step = share(limit_ms=1)
    assert step.grant(0, 5000, 4096) == 16
    assert share(limit_ms=1).grant(0, 5, 4096) == 5
    step = share(limit_ms=1, num_prompts=9)
    assert step.grant(0, 5, 4096) == 5
    assert step.grant(0, 5, 4096) == 0
    assert step.closed


def test_chunks_are_small_while_the_law_is_unknown() -> None:
    assert share(limit_ms=1000, model=StepTimeModel()).grant(0, 5000, 4096) == UNTRUSTED_TOKENS
    step = share(limit_ms=1000, num_prompts=3, model=StepTimeModel())
    assert step.grant(0, 100, 4096) == 100
    assert step.grant(0, 100, 4096) == 3 * UNTRUSTED_TOKENS - 100


def test_caution_makes_no_chunk_larger_than_what_the_law_knows_to_fit() -> None:
    """Small chunks are known, large ones are not: a small one that is asked for stays small."""
    model, chance = StepTimeModel(), stream(4, "small chunks")
    for _ in range(200):
        load = StepLoad(8, 8, 4000 + chance.randint(0, 200)).plus(900, chance.randint(7, 9))
        model.observe(load, round(LAW.predict_ns(load)))
    decoding = StepLoad(8, 8, 4000)
    assert not model.trusts(decoding.plus(900, UNTRUSTED_TOKENS))
    fits = 8
    limit_ms = LAW.predict_ns(decoding.plus(900, fits)) / 1e6
    step = PromptShare(model, decoding, limit_ms * 1e6, 1, tokens_min=1)
    assert step.grant(900, 5000, 4096) == pytest.approx(fits, abs=1)


def test_the_more_steps_overrun_the_less_a_prompt_stretches_them() -> None:
    budget = PrefillBudget(LatencyTargets())
    stretches = []
    for ratio in (1.0, 1.25, 1.5, 3.0):
        for _ in range(500):
            budget.overrun.observe(ratio)
        stretches.append(budget.stretch)
    assert stretches == sorted(stretches, reverse=True)
    assert stretches[0] == STRETCH_MAX
    assert stretches[-1] == STRETCH_MIN


def test_short_prompts_share_a_step_when_its_fixed_cost_is_what_they_pay() -> None:
    dear_start = taught(StepCost(20_000_000, 10_000, 0, 0, 0))
    step = share(rows=0, num_prompts=8, model=dear_start)
    assert [step.grant(0, 100, 512 - 100 * i) for i in range(4)] == [100] * 4
    dear_tokens = taught(StepCost(1_000_000, 500_000, 0, 0, 0))
    step = share(rows=0, num_prompts=8, model=dear_tokens)
    assert [step.grant(0, 100, 512 - 100 * i) for i in range(2)] == [100, 0]


def test_the_strictest_class_that_decodes_sets_the_limit() -> None:
    budget = PrefillBudget(LatencyTargets(default_ns=12_000_000, by_priority=((-1, 8_000_000), (5, 0))))
    budget.model = taught()
    decoding = StepLoad(8, 8, 4000)

    def tokens(*classes: int) -> int:
        return budget.open(decoding, set(classes), 1).grant(0, 10**6, 4096)

    assert tokens() == 4096
    assert tokens(-1) == tokens(-1, 0) < tokens(0)
    automatic = LAW.predict_ns(decoding) * (1 + budget.stretch)
    assert LAW.predict_ns(decoding.plus(0, tokens(5))) == pytest.approx(automatic, rel=0.03)


def test_a_crowd_of_prompts_gets_what_the_promise_per_token_leaves_and_a_lone_one_does_not() -> None:
    budget = PrefillBudget(LatencyTargets(tpot_ns=50_000_000))
    budget.model = taught()
    decoding = StepLoad(8, 8, 4000)

    def step_ms(num_prompts: int, waited_ms: float) -> float:
        tokens = budget.open(decoding, {0}, num_prompts, round(waited_ms * 1e6)).grant(0, 10**6, 4096)
        return LAW.predict_ns(decoding.plus(0, tokens)) / 1e6

    lone = LAW.predict_ns(decoding) * (1 + budget.stretch) / 1e6
    assert step_ms(1, 0) == step_ms(1, 5000) == pytest.approx(lone, rel=0.03)
    assert step_ms(2, CROWDED_NS / 1e6) == step_ms(2, 10)
    assert step_ms(2, 10) == pytest.approx(lone + STRETCH * LAW.predict_ns(decoding) / 1e6, rel=0.03)
    assert step_ms(2, 60) == step_ms(40, 60) == pytest.approx(45, rel=0.03)
    assert step_ms(40, 0) <= 45.1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=8),
    st.floats(0.1, 100),
    st.integers(0, 32),
    st.integers(1, 8192),
    st.booleans(),
)
def test_grants_keep_their_promises(prompts, limit_ms, rows, budget, knows) -> None:
    model = _TAUGHT if knows else StepTimeModel()
    step = share(limit_ms=limit_ms if rows else inf, rows=rows, num_prompts=len(prompts), model=model)
    left, load, unfinished = budget, StepLoad(rows, rows, rows * 500), 0
    for index, (computed, pending) in enumerate(prompts):
        if step.closed or not left:
            break
        tokens = step.grant(computed, pending, left)
        assert 0 <= tokens <= min(pending, left)
        assert tokens or index, "the first prompt always advances"
        left -= tokens
        unfinished += tokens < pending
        load = load.plus(computed, tokens) if tokens else load
    assert unfinished <= 1, "prompts are finished one after another"
    if rows and knows and budget - left > 16:
        assert model.predict_ns(load) <= limit_ms * 1e6 * 1.001


_TAUGHT = taught()


# --- in the scheduler ------------------------------------------------------------------------------


class TimedEngine(ScheduledEngine):
    """Steps take what `LAW` says."""

    def finish_step(self) -> None:
        assert self.in_flight is not None
        self.clock.advance(self.time_of(self.in_flight))
        super().finish_step()

    def time_of(self, plan: StepPlan) -> int:
        return round(LAW.predict_ns(StepLoad.of(plan.work)))


def warm(**settings) -> TimedEngine:
    engine = TimedEngine(num_blocks=2000, step_tokens=512, max_running=40, max_model_len=20_000, **settings)
    for count in (1, 2, 4):
        for index in range(count):
            engine.submit(f"warm{count}.{index}", [index] * 60 * count, max_tokens=12)
        engine.run()
    return engine


def test_a_long_prompt_never_doubles_the_time_between_tokens() -> None:
    engine = warm()
    for index in range(8):
        engine.submit(f"r{index}", [index] * 50, max_tokens=300)
    for _ in range(20):
        alone = engine.time_of(engine.step())
    engine.submit("long", [99] * 1500, max_tokens=2)
    times = []
    while not engine.got["long"]:
        plan = engine.step()
        assert len(plan.work) == 9
        times.append(engine.time_of(plan))
    assert max(times) < 2 * alone
    assert min(times[:-1]) > (1 + STRETCH_MIN) * alone  # It is not starved either.


class HiccupEngine(TimedEngine):
    """Every step takes longer than it should, by 20 % in the mean."""

    chance = stream(9, "hiccups")

    def time_of(self, plan: StepPlan) -> int:
        return round(super().time_of(plan) * (1 + 0.2 * self.chance.expovariate(1)))


def test_on_a_noisy_machine_chunks_are_smaller_and_hardly_a_gap_is_doubled() -> None:
    engine = HiccupEngine(num_blocks=2000, step_tokens=512, max_running=40, max_model_len=20_000)

    def arrival(name: str) -> list[int]:
        """The times of the steps before a long prompt's first token, in order of size."""
        engine.submit(name, [len(name)] * 3000, max_tokens=2)
        times: list[int] = []
        while not engine.got[name]:
            began_ns = engine.clock.now_ns()
            engine.step()
            times.append(engine.clock.now_ns() - began_ns)
        return sorted(times)

    for index in range(8):
        engine.submit(f"r{index}", [index] * 50, max_tokens=3000)
    for _ in range(20):
        usual = LAW.predict_ns(StepLoad.of(engine.step().work)) * 1.2
    for name in ("first", "second one", "a third one"):
        times = arrival(name)
    assert STRETCH_MIN <= engine.scheduler._prefill.stretch < STRETCH_MAX
    assert times[-1 - len(times) // 100] < 2 * usual


def test_everybody_at_once_is_answered_one_after_another() -> None:
    engine = warm()
    for index in range(32):
        engine.submit(f"r{index}", [index] * 110, max_tokens=40)
    first: dict[str, int] = {}
    while len(first) < 32:
        plan = engine.step()
        assert sum(1 for work in plan.work if not work.samples) <= 1
        first |= {name: engine.clock.now_ns() for name in engine.got if name[0] == "r" and name not in first}
    order = sorted(first, key=first.__getitem__)
    assert order == [f"r{index}" for index in range(32)]
    assert len(set(first.values())) >= 6


def test_caution_does_not_last() -> None:
    """Chunks of one size teach nothing about others: they must grow while the law is not trusted."""
    engine = TimedEngine(num_blocks=2000, step_tokens=512, max_running=4, max_model_len=20_000)
    engine.submit("a", [1], max_tokens=600)
    engine.step()
    engine.submit("b", [2] * 8000, max_tokens=1)
    sizes = []
    while not engine.got["b"]:
        plan = engine.step()
        sizes.append(plan.work[-1].num_tokens)
        assert engine.time_of(plan) < 3.2 * LAW.predict_ns(StepLoad(1, 1, 50))
    assert sizes[0] == UNTRUSTED_TOKENS
    assert sizes[20] == pytest.approx(STRETCH * LAW.fixed_ns / LAW.token_ns, rel=0.4)


def test_an_impossible_target_slows_prompts_down_and_starves_none() -> None:
    engine = warm(targets=LatencyTargets(default_ns=1))
    for index in range(5):
        engine.submit(f"r{index}", [index] * 200, max_tokens=80)
    engine.run()
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)
    mixed = [plan for plan in engine.plans if plan.work[0].num_tokens == 1 and plan.work[-1].num_tokens > 1]
    assert mixed
    assert all(plan.num_tokens <= len(plan.work) - 1 + 16 for plan in mixed[-10:])


def test_steps_that_only_decode_are_learned_from_and_counted() -> None:
    budget, load = PrefillBudget(LatencyTargets()), StepLoad(8, 8, 4000)
    budget.observe_decoding(load, 1_000_000, 6_000_000)
    assert budget.model.predict_ns(load) == pytest.approx(5_000_000, rel=0.01)
    assert budget.sums.counts == (0, 0, 0, 0, 0, 0)
    budget.steps_over(load, 1_000_000, 6_000_000)
    budget.steps_over(load, 6_000_000, 9_000_000)
    assert budget.sums.counts == (2, 16, 16, 8000, 0, 8_000_000)

"""What drafts add to a step: a jump for the first, less for each further one, learned on a noisy machine."""

from random import Random

import pytest

from penstock.schedule.draft_times import FIRST, DraftTimes
from penstock.schedule.plan import Drafting, RowWork, StepPlan
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget
from penstock.schedule.step_time import StepLoad


def learned(first: float, each: float, *, num_rows: int = 1, hiccups: float = 0.0) -> DraftTimes:
    """From steps with and without drafts, of which the part `hiccups` takes ten times its time."""
    times, random = DraftTimes(), Random(1)
    for _ in range(2000):
        drafts = random.choice((0, 0, 1, 2, 4, 8))
        factor = 10.0 if random.random() < hiccups else random.uniform(0.95, 1.05)
        ratio = 0.9 * factor * (1 + (first + each * (drafts - 1) if drafts else 0.0))
        if drafts:
            times.observe(num_rows, drafts, ratio, 0.1)
        else:
            times.observe_plain(num_rows, ratio)
    return times


@pytest.mark.parametrize(("first", "each"), [(0.35, 0.04), (0.1, 0.1), (1.0, 0.01), (0.0, 0.0)])
@pytest.mark.parametrize("hiccups", [0.0, 0.15])
def test_the_jump_and_the_price_of_a_further_draft_are_learned(
    first: float, each: float, hiccups: float
) -> None:
    found = learned(first, each, hiccups=hiccups).of(1, 0.1)
    assert found == pytest.approx((first, each), abs=0.07)
    assert found[1] == pytest.approx(each, abs=0.03)


def test_each_size_of_batch_has_its_own() -> None:
    times = learned(0.5, 0.1, num_rows=4)
    assert times.of(7, 0.02) == times.of(4, 0.02)
    assert times.of(4, 0.02)[0] == pytest.approx(0.5, abs=0.07)
    for num_rows in (1, 3, 8, 32):
        assert times.of(num_rows, 0.02)[0] == FIRST + 0.02


def test_nothing_is_learned_from_drafts_before_a_step_without_any() -> None:
    times = DraftTimes()
    times.observe(1, 3, 50.0, 0.1)
    assert times.of(1, 0.1)[0] == FIRST + 0.1


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("contexts", [(5_000, 10_000), (10_000, 5_000)])
def test_a_context_that_doubles_or_halves_is_not_the_price_of_drafts(
    contexts: tuple[int, int], share: float
) -> None:
    """Neither at once nor after a while, and also of a row that has drafts in nearly every step, or in every
    one.
    """
    budget, random, times = PrefillBudget(LatencyTargets()), Random(1), DraftTimes()
    budget.draft_times, now_ns = times, 1

    def run(context: int, num_steps: int, share: float) -> float:
        nonlocal now_ns
        for step in range(1, num_steps + 1):
            work = RowWork(0, context + step, 1, True)
            load, took = StepLoad.of([work]), 500_000 + 100 * context
            if drafts := random.choice((1, 2, 4, 8)) * (random.random() < share):
                load, took = load.with_drafts(context + step, drafts), took * (1.35 + 0.03 * (drafts - 1))
            plan = StepPlan(step, (), (work,), planned_ns=now_ns)
            now_ns += round(took * random.uniform(0.95, 1.05))
            budget.observe(plan, load, now_ns)
        return times.of(1, 0.03)[0]

    before, after = contexts
    run(100, 50, 0.0)
    run(before, 400, 0.5)
    for num_steps in (25, 75, 400):
        assert run(after, num_steps, share) == pytest.approx(0.35, abs=0.1)


def test_nothing_is_learned_where_a_model_guesses() -> None:
    """Its passes and the steps between them have laws of their own."""
    passes = Drafting(
        num_passes=1, num_tokens=1, num_sequences=1, kv_read=100, chunk_pairs=0, took_ns=200_000
    )
    for drafting in (None, passes):
        budget, times = PrefillBudget(LatencyTargets()), DraftTimes()
        budget.draft_times = times
        for step, drafts in enumerate((0, 0, 2, 2), start=1):
            work = RowWork(0, 100, 1, True)
            load = StepLoad.of([work]).with_drafts(100, drafts) if drafts else StepLoad.of([work])
            plan = StepPlan(4 * step, (), (work,), planned_ns=step * 5_000_000)
            budget.observe(plan, load, plan.planned_ns + 1_000_000 * (1 + drafts), drafting)
        assert (times.of(1, 0.1)[0] == FIRST + 0.1) is (drafting is not None)

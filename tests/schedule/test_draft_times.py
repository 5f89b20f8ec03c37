"""What drafts add to a step: a jump for the first, less for each further one, learned on a noisy machine."""

from random import Random

import pytest

from penstock.schedule.draft_times import FIRST, DraftTimes

PLAIN_NS = 1_000_000


def learned(first: float, each: float, *, num_rows: int = 1, hiccups: float = 0.0) -> DraftTimes:
    """From steps with and without drafts, of which the part `hiccups` takes ten times its time."""
    times, random = DraftTimes(), Random(1)
    for _ in range(2000):
        drafts = random.choice((0, 0, 1, 2, 4, 8))
        factor = 10.0 if random.random() < hiccups else random.uniform(0.95, 1.05)
        step_ns = round(PLAIN_NS * factor * (1 + (first + each * (drafts - 1) if drafts else 0.0)))
        if drafts:
            times.observe(num_rows, drafts, step_ns, 0.1)
        else:
            times.observe_plain(num_rows, step_ns)
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
    times.observe(1, 3, 50 * PLAIN_NS, 0.1)
    assert times.of(1, 0.1)[0] == FIRST + 0.1

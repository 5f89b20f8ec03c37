import math

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.policy.estimates import LengthTerms, OutputLengths
from penstock.types import TenantId

A, B = TenantId("a"), TenantId("b")
CONFIG = LengthTerms()


def test_before_anything_was_seen_it_is_the_default_and_never_above_max_tokens() -> None:
    lengths = OutputLengths(CONFIG)
    assert lengths.expect(A, "m", 10_000) == 256
    assert lengths.expect(A, "m", 16) == 16


def test_a_tenant_without_a_past_is_taken_for_an_average_one() -> None:
    lengths = OutputLengths(CONFIG)
    for _ in range(8):
        lengths.observe(A, "m", 40)
    assert lengths.expect(B, "m", 10_000) == 40
    assert lengths.expect(B, "other", 10_000) == 256
    for _ in range(8):
        lengths.observe(B, "m", 900)
    assert lengths.expect(B, "m", 10_000) == 900
    assert lengths.expect(A, "m", 10_000) == 40


def test_nine_of_ten_answers_fit() -> None:
    lengths = OutputLengths(CONFIG)
    for length in range(1, 11):
        lengths.observe(A, "m", length)
    assert lengths.expect(A, "m", 10_000) == 9


def test_answers_of_no_tokens_still_reserve_one() -> None:
    lengths = OutputLengths(CONFIG)
    for _ in range(10):
        lengths.observe(A, "m", 0)
    assert lengths.expect(A, "m", 100) == 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=8, max_size=300), st.integers(1, 4000))
def test_it_is_the_nearest_rank_of_the_last_answers(values, max_tokens) -> None:
    lengths = OutputLengths(CONFIG)
    for value in values:
        lengths.observe(A, "m", value)
    recent = sorted(values[-64:])
    nearest = recent[math.ceil(len(recent) * 0.9 - 1e-9) - 1]
    assert lengths.expect(A, "m", max_tokens) == max(1, min(max_tokens, nearest))


def test_it_remembers_a_bounded_number_of_pairs_and_keeps_the_busy_ones() -> None:
    lengths = OutputLengths(LengthTerms(output_windows_max=4))
    for number in range(50):
        for _ in range(8):
            lengths.observe(A, "m", 7)
        lengths.observe(TenantId(f"t{number}"), "m", 7)
    assert lengths.expect(A, "m", 100) == 7
    assert len(lengths) == 4

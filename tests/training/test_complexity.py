"""The labelled requests, and how well the defaults do on the third that was not tuned on."""

from training.complexity import load, score


def test_regret_on_the_held_out_third_stays_under_its_bound() -> None:
    found = score(load("held-out"))
    assert found["requests"] > 100
    assert found["regret"] <= 0.20
    assert found["under"] <= 0.35
    assert found["over"] <= 0.15
    assert found["cost_to_always_large"] <= 0.5


def test_the_set_is_large_and_varied() -> None:
    rows = load("all")
    assert len(rows) >= 300
    assert len({row.category for row in rows}) >= 10
    assert len({row.language for row in rows}) >= 10
    assert len({tuple(row.turns) for row in rows}) == len(rows)
    assert 0.25 <= sum(row.large for row in rows) / len(rows) <= 0.5

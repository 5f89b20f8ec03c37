import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rng import stream
from penstock.schedule.plan import RowWork
from penstock.schedule.step_time import StepCost, StepLoad, StepTimeModel, _solve_non_negative

LAW = StepCost(fixed_ns=3e6, token_ns=20_000, sequence_ns=40_000, kv_read_ns=50, pair_ns=2)


def decode(rows: int, context: int) -> StepLoad:
    return StepLoad(rows, rows, rows * context, 0)


def with_chunk(rows: int, context: int, start: int, tokens: int) -> StepLoad:
    return decode(rows, context).plus(start, tokens)


def taught(law: StepCost, *, seed: int = 0, steps: int = 400, noise: float = 0.0) -> StepTimeModel:
    """A model that saw a mixed life: decode batches that grow and shrink, chunks of prompts between."""
    model, chance = StepTimeModel(), stream(seed, "steps")
    for _ in range(steps):
        load = decode(chance.randint(1, 32), chance.randint(16, 4000))
        if chance.random() < 0.3:
            load = load.plus(chance.randint(0, 4000), chance.randint(1, 512))
        model.observe(load, round(law.predict_ns(load) * (1 + noise * chance.uniform(-1, 1))))
    return model


def test_a_plan_as_a_load() -> None:
    work = [RowWork(0, 100, 1, True), RowWork(1, 49, 1, True), RowWork(2, 32, 16, False)]
    assert StepLoad.of(work) == StepLoad(18, 3, 101 + 50 + 48, 16 * 32 + 136)
    assert StepLoad.of(work) == StepLoad.of(work[:2]).plus(32, 16)
    assert StepLoad().plus(9, 1) == decode(1, 10)


def test_knows_nothing_before_the_first_step() -> None:
    model = StepTimeModel()
    assert model.predict_ns(decode(8, 100)) == 0
    assert not model.trusts(decode(8, 100))


def test_a_time_that_is_none_is_ignored() -> None:
    model = StepTimeModel()
    model.observe(decode(1, 1), 0)
    model.observe(decode(1, 1), -5)
    assert model.num_observed == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3], ids=["fast", "middling", "slow"])
def test_finds_the_law_on_any_machine(scale: float) -> None:
    law = StepCost(
        LAW.fixed_ns * scale,
        LAW.token_ns * scale,
        LAW.sequence_ns * scale,
        LAW.kv_read_ns * scale,
        LAW.pair_ns * scale,
    )
    model = taught(law)
    for load in (decode(5, 900), with_chunk(8, 500, 1000, 300), with_chunk(0, 0, 0, 512)):
        assert model.trusts(load)
        assert model.predict_ns(load) == pytest.approx(law.predict_ns(load), rel=0.02)


def test_noise_averages_out() -> None:
    model = taught(LAW, noise=0.3, steps=2000)
    for load in (decode(5, 900), with_chunk(8, 500, 1000, 300)):
        assert model.predict_ns(load) == pytest.approx(LAW.predict_ns(load), rel=0.2)


def test_a_constant_load_is_predicted_and_nothing_else_is_trusted() -> None:
    model, load = StepTimeModel(), decode(8, 100)
    for _ in range(5000):
        model.observe(load, 5_000_000)
    assert model.predict_ns(load) == pytest.approx(5e6, rel=0.001)
    assert model.trusts(load)
    assert not model.trusts(decode(64, 100))
    assert not model.trusts(load.plus(0, 512))


def test_an_hour_of_decoding_does_not_wash_away_what_prompts_cost() -> None:
    model = taught(LAW)
    for step in range(20_000):
        load = decode(8, 100 + step // 10)
        model.observe(load, round(LAW.predict_ns(load)))
    load = with_chunk(8, 1000, 500, 256)
    assert model.trusts(load)
    assert model.predict_ns(load) == pytest.approx(LAW.predict_ns(load), rel=0.1)


@pytest.mark.parametrize("times", [0.001, 10, 1000])
def test_one_hiccup_hardly_moves_the_law(times: float) -> None:
    model, load = taught(LAW), decode(8, 500)
    before = model.predict_ns(load)
    model.observe(load, round(before * times))
    assert model.predict_ns(load) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("speed", [0.4, 2.5])
def test_follows_a_machine_that_becomes_faster_or_slower(speed: float) -> None:
    model, chance = taught(LAW), stream(1, "after")
    for _ in range(400):
        load = decode(chance.randint(4, 12), chance.randint(400, 600))
        model.observe(load, round(LAW.predict_ns(load) * speed))
    assert model.predict_ns(decode(8, 500)) == pytest.approx(speed * LAW.predict_ns(decode(8, 500)), rel=0.1)


def test_asking_changes_nothing() -> None:
    asked, silent = StepTimeModel(), StepTimeModel()
    for step in range(200):
        load = with_chunk(step % 9, 100, step, 1 + step % 50)
        for model in (asked, silent):
            model.observe(load, 1000 + 77 * (step % 13))
        asked.trusts(load)
        asked.predict_ns(load)
    assert asked.predict_ns(decode(3, 30)) == pytest.approx(silent.predict_ns(decode(3, 30)), rel=1e-6)


loads = st.builds(
    with_chunk, st.integers(0, 256), st.integers(1, 131_072), st.integers(0, 131_072), st.integers(1, 8192)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(loads, st.integers(1, 10**12)), min_size=1, max_size=60), loads)
def test_whatever_is_seen_costs_are_finite_and_never_negative(seen, query) -> None:
    model = StepTimeModel()
    for load, step_ns in seen:
        model.observe(load, step_ns)
    cost = model.cost
    for value in (cost.fixed_ns, cost.token_ns, cost.sequence_ns, cost.kv_read_ns, cost.pair_ns):
        assert 0 <= value < float("inf")
    assert 0 <= model.predict_ns(query) < float("inf")
    more = StepLoad(query.num_tokens + 1, query.num_sequences + 1, query.kv_read + 1, query.chunk_pairs + 1)
    assert model.predict_ns(more) >= model.predict_ns(query)
    assert model.trusts(query) in (True, False)


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(0, 31))
def test_the_least_squares_without_negative_terms_are_the_best_ones(seed: int, guess: int) -> None:
    """Karush, Kuhn and Tucker: terms that count leave no residual, those held at zero would make it worse."""
    chance, terms = stream(seed, "equations"), range(5)
    rows = [[chance.uniform(-1, 1) for _ in terms] for _ in range(12)]
    times = [chance.uniform(-1, 1) for _ in rows]
    full = [[sum(row[i] * row[j] for row in rows) for j in terms] for i in terms]
    right = tuple(sum(row[i] * time for row, time in zip(rows, times, strict=True)) for i in terms)
    matrix = tuple(full[i][j] for i in terms for j in range(i + 1))
    solution, counting = _solve_non_negative(matrix, right, guess)
    pulls = [right[i] - sum(full[i][j] * solution[j] for j in terms) for i in terms]
    for i in terms:
        if counting >> i & 1:
            assert solution[i] >= 0
            assert pulls[i] == pytest.approx(0, abs=1e-6)
        else:
            assert solution[i] == 0
            assert pulls[i] <= 1e-6

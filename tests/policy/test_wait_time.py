import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig
from penstock.policy.wait_time import Load, Sample, WaitModel, WaitModels
from penstock.rng import stream

SERVICE_NS = 3 * NS_PER_S


def law_ns(load: Load) -> tuple[int, int]:
    """A worker that exists only here: what the request waits, and what its prompt takes."""
    tokens = load.prompt_tokens - load.cached_tokens
    own = (
        8e6
        + 20e3 * tokens
        + 0.02 * tokens * load.prompt_tokens
        + 3e5 * load.running
        + 400 * tokens * load.running
    )
    wait = 22e3 * load.tokens_ahead + load.num_to_end * SERVICE_NS / load.slots
    return round(wait), round(own)


def some_load(random) -> Load:
    running = random.randrange(0, 40)
    ahead = random.choice([0, 0, random.randrange(0, 20)]) if running > 20 else 0
    prompt = random.randrange(10, 4000)
    return Load(
        prompt_tokens=prompt,
        cached_tokens=random.choice([0, prompt // 2]),
        tokens_ahead=ahead * 500,
        requests_ahead=ahead,
        running=running,
        slots=32,
    )


def feed(
    model: WaitModel,
    num: int,
    *,
    seed: int = 0,
    tells_parts: bool,
    outliers: float = 0.0,
    slow: float = 1.0,
    worker="w",
):
    """Give the model `num` requests of the law above, with 10 % noise."""
    random = stream(seed, "feed")
    for number in range(num):
        load = some_load(random)
        wait, own = law_ns(load)
        own = own * slow * random.lognormvariate(0, 0.1) * (10 if random.random() < outliers else 1)
        wait *= random.lognormvariate(0, 0.1)
        model.stream_ended(worker, round(random.expovariate(1 / SERVICE_NS)) + 1)
        model.observe(
            Sample(
                load=load,
                kind="",
                worker=worker,
                at_ns=(seed * 10_000 + number) * NS_PER_S,
                ttft_ns=round(wait + own),
                prefill_ns=round(own) if tells_parts else 0,
            )
        )


def errors(model: WaitModel, num: int = 200) -> list[float]:
    """Relative errors on loads that were not learned from, in order of size."""
    random = stream(99, "check")
    loads = [some_load(random) for _ in range(num)]
    return sorted(abs(model.predict(load).ttft_ns / sum(law_ns(load)) - 1) for load in loads)


@pytest.mark.parametrize("tells_parts", [True, False], ids=["own engine", "foreign worker"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_recovers_a_known_law_among_noise_and_outliers(seed: int, tells_parts: bool) -> None:
    model = WaitModel(AdmissionConfig())
    feed(model, 400, seed=seed, tells_parts=tells_parts, outliers=0.05)
    found = errors(model)
    assert found[100] < 0.08, f"median error {found[100]:.3f}"
    assert found[180] < 0.4, f"P90 error {found[180]:.3f}"
    assert model.is_known


def test_parts_are_told_apart() -> None:
    model = WaitModel(AdmissionConfig())
    feed(model, 400, tells_parts=True)
    idle = model.predict(Load(prompt_tokens=2000, slots=32))
    assert idle.wait_ns == 0
    assert idle.prefill_ns == pytest.approx(sum(law_ns(Load(prompt_tokens=2000, slots=32))), rel=0.2)
    behind = Load(prompt_tokens=10, tokens_ahead=10_000, requests_ahead=20, running=32, slots=32)
    assert model.predict(behind).wait_ns == pytest.approx(law_ns(behind)[0], rel=0.3)


def test_unknown_until_there_are_enough_samples_and_checks() -> None:
    model = WaitModel(AdmissionConfig(cold_samples=20, samples_min=20))
    load = Load(prompt_tokens=100, slots=32)
    feed(model, 20 + 20 + 19, tells_parts=True)
    assert not model.predict(load).is_known
    assert model.error_p90 is None
    feed(model, 30, seed=1, tells_parts=True)
    assert model.predict(load).is_known


def test_unknown_when_times_follow_no_law() -> None:
    model, random = WaitModel(AdmissionConfig()), stream(5, "chaos")
    for number in range(300):
        ttft_ns = round(10 ** random.uniform(6, 10))
        model.observe(
            Sample(load=some_load(random), kind="", worker="w", at_ns=number * NS_PER_S, ttft_ns=ttft_ns)
        )
    assert model.error_p90 is not None
    assert model.error_p90 > 0.85
    assert not model.is_known
    assert not model.predict(Load(prompt_tokens=10)).is_known


def test_unknown_for_a_kind_of_worker_never_seen() -> None:
    model = WaitModel(AdmissionConfig())
    feed(model, 400, tells_parts=True)
    assert model.predict(Load(prompt_tokens=100, slots=32)).is_known
    assert not model.predict(Load(prompt_tokens=100, slots=32, kinds=("", "new"))).is_known


def test_cold_samples_after_twenty_restarts_spoil_nothing() -> None:
    model = WaitModel(AdmissionConfig(cold_samples=20))
    feed(model, 400, tells_parts=True)
    before, p90 = errors(model), model.error_p90
    for restart in range(20):
        model.worker_started("w")
        feed(model, 20, seed=100 + restart, tells_parts=True, slow=50)
    assert errors(model) == before
    assert model.error_p90 == p90
    feed(model, 40, seed=300, tells_parts=True)
    assert model.is_known


def test_follows_a_worker_that_became_three_times_slower() -> None:
    model = WaitModel(AdmissionConfig())
    feed(model, 400, tells_parts=True)
    load = Load(prompt_tokens=2000, running=8, slots=32)
    feed(model, 300, seed=7, tells_parts=True, slow=3)
    assert model.predict(load).prefill_ns == pytest.approx(3 * law_ns(load)[1], rel=0.25)


def test_learns_from_one_sample_in_ten_milliseconds() -> None:
    model = WaitModel(AdmissionConfig(cold_samples=0, samples_min=1))
    sample = {"load": Load(prompt_tokens=10), "kind": "", "worker": "w", "ttft_ns": NS_PER_MS}
    assert model.observe(Sample(**sample, at_ns=0)) is None  # The first: there was nothing to check.
    assert model.observe(Sample(**sample, at_ns=9 * NS_PER_MS)) is None
    assert model.observe(Sample(**sample, at_ns=10 * NS_PER_MS)) == pytest.approx(0, abs=0.1)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 20),
    base=st.builds(
        Load,
        prompt_tokens=st.integers(1, 10_000),
        tokens_ahead=st.integers(0, 10**6),
        requests_ahead=st.integers(0, 1000),
        running=st.integers(0, 64),
        slots=st.integers(1, 64),
        replicas=st.integers(1, 8),
    ),
    more_tokens=st.integers(0, 10**5),
    more_requests=st.integers(0, 100),
)
def test_more_ahead_never_predicts_less(seed: int, base: Load, more_tokens: int, more_requests: int) -> None:
    model = WaitModel(AdmissionConfig())
    feed(model, 60, seed=seed, tells_parts=seed % 2 == 0, outliers=0.1)
    more = Load(
        prompt_tokens=base.prompt_tokens,
        tokens_ahead=base.tokens_ahead + more_tokens,
        requests_ahead=base.requests_ahead + more_requests,
        running=base.running,
        slots=base.slots,
        replicas=base.replicas,
    )
    assert model.predict(more).wait_ns >= model.predict(base).wait_ns >= 0
    assert model.predict(more).prefill_ns == model.predict(base).prefill_ns >= 0
    assert model.added_ns(base) >= 0


def test_equal_samples_make_equal_laws() -> None:
    one, other = WaitModel(AdmissionConfig()), WaitModel(AdmissionConfig())
    feed(one, 100, tells_parts=True)
    feed(other, 100, tells_parts=True)
    assert errors(one) == errors(other)


def test_streams_to_end_first() -> None:
    assert Load(prompt_tokens=1, running=7, slots=8).num_to_end == 0
    assert Load(prompt_tokens=1, running=8, slots=8).num_to_end == 1
    assert Load(prompt_tokens=1, running=8, slots=8, requests_ahead=3).num_to_end == 4
    assert Load(prompt_tokens=1, running=2, slots=8, requests_ahead=3, has_kv_room=False).num_to_end == 4


def test_an_endless_stream_does_not_set_the_mean() -> None:
    model = WaitModel(AdmissionConfig(cold_samples=0))
    for _ in range(100):
        model.stream_ended("w", NS_PER_S)
    model.stream_ended("w", 3600 * NS_PER_S)
    assert model.service_ns < 1.3 * NS_PER_S


def test_routes_have_laws_of_their_own() -> None:
    models = WaitModels(AdmissionConfig(cold_samples=0))
    feed(models.of("a"), 100, tells_parts=True)
    assert models.calibration().keys() == {"a"}
    assert models.of("b").error_p90 is None
    models.keep(["b"])
    assert models.calibration() == {"b": None}

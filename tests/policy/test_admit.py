from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_route import Call, TimedRoute, poisson_calls

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig, ModelRoute, TtftTarget
from penstock.policy.admit import Admission, effective_degrade
from penstock.policy.admit_facts import Admit, AdmitFacts, Candidate, Divert, Shed
from penstock.policy.tenant import NOBODY, Tenant
from penstock.policy.wait_time import Load, Sample, WaitModel, WaitModels
from penstock.types import TenantId

CHAIN = (ModelRoute(model="large", fallback="medium"), ModelRoute(model="medium", fallback="small"))
TOKEN_NS, FIXED_NS = 20_000, 5 * NS_PER_MS


def teach(model: WaitModel, *, slower: float = 1.0, scatter: float = 1.0) -> None:
    """A worker that computes a token in 20 us and is never out of slots; every other request takes `scatter` times as long."""
    for number in range(200):
        taken = slower * (scatter if number % 2 else 1.0)
        load = Load(prompt_tokens=100 + 37 * (number % 20), tokens_ahead=500 * (number % 7), slots=10_000)
        prefill = round(taken * (FIXED_NS + TOKEN_NS * load.prompt_tokens))
        model.observe(
            Sample(
                load=load,
                kind="",
                worker="w",
                at_ns=number * NS_PER_S,
                ttft_ns=prefill + round(taken * TOKEN_NS * load.tokens_ahead),
                prefill_ns=prefill,
            )
        )
    assert model.is_known == (scatter == 1.0)


def known(*models: str, slower: float = 1.0) -> WaitModels:
    waits = WaitModels(AdmissionConfig())
    for model in models:
        teach(waits.of(model), slower=slower)
    return waits


def at(model: str, *, ahead_s: float = 0.0, waiting: int = 0, **facts) -> Candidate:
    """A route where a request of 500 tokens waits `ahead_s` by the taught law, or `waiting` requests stand before it."""
    load = Load(
        prompt_tokens=500,
        tokens_ahead=round(ahead_s * NS_PER_S / TOKEN_NS) + waiting,
        requests_ahead=waiting,
        running=10_000 if waiting else 0,
        slots=10_000,
    )
    return Candidate(
        model=model, waiting=waiting, **{"ready": 1, "context_tokens": 600, "load": load, **facts}
    )


def lookup(*candidates: Candidate) -> Callable[[str], Candidate | None]:
    return {candidate.model: candidate for candidate in candidates}.get


def admission(waits: WaitModels | None = None, *, chain=CHAIN, **settings) -> Admission:
    config = AdmissionConfig(**{"ttft_target_ms": 1000, **settings})
    return Admission(config, chain, WaitModels(AdmissionConfig()) if waits is None else waits)


FREE = lookup(at("medium"), at("small"))


# --- the table ------------------------------------------------------------------------------------


def test_what_starts_at_once_is_let_in_without_a_prediction() -> None:
    facts = AdmitFacts(tenant=NOBODY, requested=at("large"), candidate=FREE)
    assert admission().decide(0, facts) == Admit()


def test_what_fits_its_target_is_let_in_with_the_prediction() -> None:
    facts = AdmitFacts(tenant=NOBODY, requested=at("large", ahead_s=0.5), candidate=FREE)
    decision = admission(known("large")).decide(0, facts)
    assert isinstance(decision, Admit)
    assert decision.predicted_ns == pytest.approx(515 * NS_PER_MS, rel=0.1)


@pytest.mark.parametrize(
    ("target_ms", "asked_ns", "ahead_s", "expected"),
    [
        (1000, 0, 3, Divert("medium", "slo")),
        (0, NS_PER_S, 3, Divert("medium", "slo")),
        (1000, 0, 0.1, Admit),
        (0, 0, 3, Admit()),  # Nothing is promised: few wait, whatever the poor prediction says.
    ],
)
def test_a_promise_is_held_by_a_prediction_that_scatters(target_ms, asked_ns, ahead_s, expected) -> None:
    waits = WaitModels(AdmissionConfig())
    teach(waits.of("large"), scatter=3.0)
    assert 0.5 < (waits.of("large").error_p90 or 0) < 0.7
    facts = AdmitFacts(
        tenant=NOBODY, requested=at("large", ahead_s=ahead_s), max_wait_ns=asked_ns, candidate=FREE
    )
    decision = admission(waits, ttft_target_ms=target_ms).decide(0, facts)
    assert decision == expected or (
        expected is Admit and isinstance(decision, Admit) and decision.predicted_ns
    )


@pytest.mark.parametrize(
    ("tenant", "asked", "expected"),
    [
        ("allow", None, Divert("medium", "slo")),
        ("allow", "allow", Divert("medium", "slo")),
        ("prefer", None, Divert("medium", "slo")),
        ("never", None, Shed),
        ("allow", "never", Shed),
        ("never", "allow", Shed),
        ("never", "prefer", Shed),
    ],
)
def test_what_does_not_fit_is_diverted_where_both_allow_it(tenant, asked, expected) -> None:
    facts = AdmitFacts(
        tenant=Tenant(id=TenantId("t"), degrade=tenant),
        degrade=asked,
        requested=at("large", ahead_s=3),
        candidate=FREE,
    )
    decision = admission(known("large")).decide(0, facts)
    if isinstance(expected, Divert):
        assert decision == expected
    else:
        assert isinstance(decision, Shed)
        assert (decision.status, decision.why) == (429, "slo")
        assert decision.retry_after_ns == pytest.approx(2.015 * NS_PER_S, rel=0.1)


def test_the_next_fallback_when_the_first_does_not_fit_either() -> None:
    waits = known("large", "medium", "small")
    fallbacks = lookup(at("medium", ahead_s=2), at("small", ahead_s=0.2))
    facts = AdmitFacts(tenant=NOBODY, requested=at("large", ahead_s=3), candidate=fallbacks)
    assert admission(waits).decide(0, facts) == Divert("small", "slo")


def test_bounds_of_the_client_and_the_queue_count_as_well() -> None:
    deciding = admission(known("large"), chain=(), ttft_target_ms=0)
    waits_3s = AdmitFacts(tenant=NOBODY, requested=at("large", ahead_s=3))
    assert isinstance(deciding.decide(0, waits_3s), Admit)
    in_2s = AdmitFacts(tenant=NOBODY, requested=at("large", ahead_s=3), max_wait_ns=2 * NS_PER_S)
    assert isinstance(deciding.decide(0, in_2s), Shed)
    in_queue = AdmitFacts(tenant=NOBODY, requested=at("large", ahead_s=30), queue_wait_max_ns=20 * NS_PER_S)
    assert isinstance(deciding.decide(0, in_queue), Shed)


@pytest.mark.parametrize(
    ("tier", "band", "ttft_s"),
    [
        ("pro", "default", 1),
        ("pro", "bulk", 4),
        ("free", "default", 2),
        ("free", "bulk", 3),
        ("", "default", 8),
    ],
)
def test_the_target_that_names_most_counts(tier: str, band: str, ttft_s: int) -> None:
    targets = (
        TtftTarget(tier="pro", ttft_ms=1000),
        TtftTarget(tier="free", ttft_ms=2000),
        TtftTarget(tier="free", band="bulk", ttft_ms=3000),
        TtftTarget(tier="pro", band="bulk", ttft_ms=4000),
        TtftTarget(band="bulk", ttft_ms=5000),
    )
    waits = known("large")
    for late, kind in ((0.9, Admit), (1.1, Shed)):
        facts = AdmitFacts(
            tenant=Tenant(id=TenantId("t"), tier=tier),
            band=band,
            requested=at("large", ahead_s=ttft_s * late),
        )
        deciding = admission(waits, chain=(), targets=targets, ttft_target_ms=8000)
        assert isinstance(deciding.decide(0, facts), kind)


def test_protected_bands_wait_unless_a_target_names_them() -> None:
    facts = AdmitFacts(
        tenant=NOBODY, band="priority", is_protected=True, requested=at("large", ahead_s=9), candidate=FREE
    )
    assert isinstance(admission(known("large")).decide(0, facts), Admit)
    named = admission(known("large"), targets=(TtftTarget(band="priority", ttft_ms=2000),))
    assert named.decide(0, facts) == Divert("medium", "slo")


@pytest.mark.parametrize(
    ("waiting", "ready", "protected", "degrade", "expected"),
    [
        (10, 1, False, "allow", Admit()),
        (11, 1, False, "allow", Divert("medium", "queue_depth")),
        (20, 2, False, "allow", Admit()),
        (21, 2, False, "allow", Divert("medium", "queue_depth")),
        (500, 1, True, "allow", Admit()),
        (500, 1, True, "never", Admit()),
        (11, 1, False, "never", None),
    ],
)
def test_the_rule_while_nothing_is_known(waiting, ready, protected, degrade, expected) -> None:
    facts = AdmitFacts(
        tenant=NOBODY,
        is_protected=protected,
        degrade=degrade,
        requested=at("large", waiting=waiting, ready=ready),
        candidate=FREE,
    )
    decision = admission().decide(0, facts)
    if expected is not None:
        assert decision == expected
    else:
        assert isinstance(decision, Shed)
        assert (decision.status, decision.why) == (429, "queue_depth")
        assert decision.retry_after_ns == 2 * NS_PER_S


def test_a_burst_on_an_idle_model_is_no_queue() -> None:
    load = Load(prompt_tokens=500, tokens_ahead=10_000, requests_ahead=63, running=20, slots=64)
    burst = Candidate(model="large", ready=1, waiting=44 + 10, context_tokens=600, load=load)
    assert admission().decide(0, AdmitFacts(tenant=NOBODY, requested=burst)) == Admit()
    over = Candidate(model="large", ready=1, waiting=44 + 11, context_tokens=600, load=load)
    assert isinstance(admission().decide(0, AdmitFacts(tenant=NOBODY, requested=over)), Shed)


def test_what_goes_behind_a_request_is_no_queue_for_it() -> None:
    """One tenant's backlog turned away one in six requests of nine quiet ones, in the simulator (noisy-tenant)."""
    load = Load(prompt_tokens=500, tokens_ahead=900, requests_ahead=2, running=64, slots=64)
    quiet = Candidate(model="large", ready=1, waiting=500, context_tokens=600, load=load)
    assert admission().decide(0, AdmitFacts(tenant=NOBODY, requested=quiet)) == Admit()


def test_a_full_queue() -> None:
    full = at("large", ahead_s=0.5, is_full=True)
    deciding = admission(known("large"))
    facts = AdmitFacts(tenant=NOBODY, is_protected=True, requested=full, candidate=FREE)
    assert deciding.decide(0, facts) == Divert("medium", "queue_depth")
    decision = deciding.decide(0, AdmitFacts(tenant=NOBODY, requested=full, degrade="never"))
    assert isinstance(decision, Shed)
    assert (decision.status, decision.why) == (429, "queue_full")
    full_too = lookup(at("medium", is_full=True), at("small", is_full=True))
    assert isinstance(deciding.decide(0, AdmitFacts(tenant=NOBODY, requested=full, candidate=full_too)), Shed)


@pytest.mark.parametrize(
    ("waits", "protected", "degrade", "expected"),
    [
        (False, False, "allow", Divert("medium", "unavailable")),
        (False, True, "allow", Divert("medium", "unavailable")),
        (False, False, "never", Shed(503, 2 * NS_PER_S, "no_worker")),
        (True, True, "allow", Admit()),
        (True, False, "allow", Divert("medium", "unavailable")),
        (True, False, "never", Admit()),
    ],
)
def test_no_worker(waits, protected, degrade, expected) -> None:
    facts = AdmitFacts(
        tenant=NOBODY,
        is_protected=protected,
        degrade=degrade,
        waits_for_worker=waits,
        requested=at("large", ready=0),
        candidate=FREE,
    )
    assert admission().decide(0, facts) == expected


def test_prefer_takes_what_is_much_sooner() -> None:
    waits = known("large", "medium", "small")
    fallbacks = lookup(at("medium", ahead_s=0.6), at("small", ahead_s=0.1))
    slow = AdmitFacts(
        tenant=NOBODY, degrade="prefer", requested=at("large", ahead_s=0.9), candidate=fallbacks
    )
    assert admission(waits).decide(0, slow) == Divert("small", "slo")
    quick = AdmitFacts(
        tenant=NOBODY, degrade="prefer", requested=at("large", ahead_s=0.25), candidate=fallbacks
    )
    assert isinstance(admission(waits).decide(0, quick), Admit)
    again = AdmitFacts(
        tenant=NOBODY,
        degrade="prefer",
        requested=at("medium", ahead_s=0.9),
        tried=frozenset({"large"}),
        candidate=fallbacks,
    )
    assert isinstance(admission(waits).decide(0, again), Admit)


# --- it does not flap -----------------------------------------------------------------------------


def test_who_was_turned_away_is_let_in_well_below_the_target() -> None:
    deciding = admission(known("large"), chain=())

    def kind(ahead_s: float) -> str:
        return type(
            deciding.decide(0, AdmitFacts(tenant=NOBODY, requested=at("large", ahead_s=ahead_s)))
        ).__name__

    waits = [0.9, 1.1, 0.95, 0.9, 0.85, 0.7, 0.9, 1.1, 0.9]
    assert [kind(wait) for wait in waits] == [
        "Admit", "Shed", "Shed", "Shed", "Shed", "Admit", "Admit", "Shed", "Shed",
    ]  # fmt: skip


def test_a_single_huge_prompt_turns_nobody_else_away() -> None:
    deciding = admission(known("large"), chain=())
    huge = at("large", load=Load(prompt_tokens=100_000, tokens_ahead=1, slots=10_000))
    assert isinstance(deciding.decide(0, AdmitFacts(tenant=NOBODY, requested=huge)), Shed)
    other = AdmitFacts(tenant=NOBODY, requested=at("large", ahead_s=0.9))
    assert isinstance(deciding.decide(0, other), Admit)


# --- properties -----------------------------------------------------------------------------------

NAMES = ("large", "medium", "small")
candidates = st.builds(
    Candidate,
    model=st.just("large"),
    ready=st.integers(0, 2),
    waiting=st.integers(0, 60),
    load=st.builds(
        Load,
        prompt_tokens=st.integers(1, 5000),
        tokens_ahead=st.integers(0, 200_000),
        requests_ahead=st.integers(0, 60),
        running=st.integers(0, 10),
        slots=st.integers(1, 10),
    ),
    context_tokens=st.integers(1, 9000),
    max_model_len=st.sampled_from([0, 4096, 8192]),
    can_serve=st.booleans(),
    is_full=st.booleans(),
)
TAUGHT = known(*NAMES)


@st.composite
def situations(draw) -> tuple[tuple[ModelRoute, ...], AdmitFacts, dict[str, Candidate]]:
    words = st.sets(st.sampled_from(["eu", "health"])).map(lambda found: tuple(sorted(found)))
    routes = tuple(
        ModelRoute(model=name, fallback=after, tools=draw(st.booleans()), data=draw(words))
        for name, after in zip(NAMES, (*NAMES[1:], ""), strict=True)
    )
    there = {
        name: draw(
            candidates.map(
                lambda c, n=name: at(n, **{f: getattr(c, f) for f in c.__struct_fields__ if f != "model"})
            )
        )
        for name in NAMES
    }
    tenant = Tenant(
        id=TenantId("t"),
        degrade=draw(st.sampled_from(["never", "allow", "prefer"])),
        models=frozenset(draw(st.sets(st.sampled_from(NAMES)))),
    )
    facts = AdmitFacts(
        tenant=tenant,
        requested=there["large"],
        is_protected=draw(st.booleans()),
        degrade=draw(st.sampled_from([None, "never", "allow", "prefer"])),
        max_wait_ns=draw(st.integers(0, 5 * NS_PER_S)),
        needs_tools=draw(st.booleans()),
        waits_for_worker=draw(st.booleans()),
        tried=frozenset(draw(st.sets(st.sampled_from(NAMES[1:])))),
        candidate=there.get,
    )
    return routes, facts, there


@settings(max_examples=300, deadline=None)
@given(situation=situations(), is_known=st.booleans())
def test_never_diverted_across_what_is_missing(situation, is_known: bool) -> None:
    routes, facts, there = situation
    deciding = admission(TAUGHT if is_known else None, chain=routes)
    decision = deciding.decide(0, facts)
    assert decision == admission(TAUGHT if is_known else None, chain=routes).decide(0, facts)
    if isinstance(decision, Shed):
        assert decision.retry_after_ns > 0
        assert (decision.status == 503) == (facts.requested.ready == 0)
    if not isinstance(decision, Divert):
        return
    assert effective_degrade(facts.degrade, facts.tenant) != "never"
    by_name = {route.model: route for route in routes}
    chosen, target = by_name[decision.model], there[decision.model]
    assert decision.model != "large"
    assert decision.model not in facts.tried
    assert chosen.tools or not facts.needs_tools
    assert set(by_name["large"].data) <= set(chosen.data)
    assert not facts.tenant.models or decision.model in facts.tenant.models
    assert not target.max_model_len or target.context_tokens <= target.max_model_len
    assert target.can_serve
    assert target.ready
    assert not target.is_full


@settings(max_examples=50, deadline=None)
@given(waits=st.lists(st.floats(1.5, 100), min_size=2, max_size=6))
def test_the_longer_the_queue_the_later_one_is_told_to_come_back(waits: list[float]) -> None:
    told: list[int] = []
    for wait in sorted(waits):
        decision = admission(TAUGHT, chain=()).decide(
            0, AdmitFacts(tenant=NOBODY, requested=at("large", ahead_s=wait))
        )
        assert isinstance(decision, Shed)
        told.append(decision.retry_after_ns)
    assert told == sorted(told)
    assert told[-1] <= 60 * NS_PER_S


def test_a_tenant_that_hammers_sends_nobody_else_away_for_long() -> None:
    deciding = admission(TAUGHT, chain=())
    for _ in range(5000):
        deciding.decide(0, AdmitFacts(tenant=Tenant(id=TenantId("loud")), requested=at("large", ahead_s=2)))
    other = deciding.decide(
        0, AdmitFacts(tenant=Tenant(id=TenantId("quiet")), requested=at("large", ahead_s=2))
    )
    assert isinstance(other, Shed)
    assert other.retry_after_ns <= 2.3 * NS_PER_S


# --- in virtual time ------------------------------------------------------------------------------

TARGET_NS = 2 * NS_PER_S


def played(rate: float, *, with_admission: bool = True, seconds: float = 60) -> TimedRoute:
    waits = WaitModels(AdmissionConfig())
    deciding = admission(waits, chain=(), ttft_target_ms=2000) if with_admission else None
    route = TimedRoute(deciding, waits.of("large"))
    route.run(poisson_calls(3, rate=rate, seconds=seconds))
    return route


def goodput(route: TimedRoute) -> int:
    """Requests whose first token came within the target, after the law was learned."""
    return sum(call.ttft_ns <= TARGET_NS for call in route.served if call.at_ns > 20 * NS_PER_S)


def test_goodput_holds_under_overload() -> None:
    peak = max(goodput(played(rate, seconds=100)) for rate in (8, 9))
    for times in (2, 5):
        route = played(times * 8, seconds=100)
        late = [call for call in route.served if call.at_ns > 20 * NS_PER_S and call.ttft_ns > TARGET_NS]
        assert goodput(route) >= 0.9 * peak, f"{times}x: {goodput(route)} of {peak}"
        assert len(late) <= 0.1 * len(route.served), f"{times}x: {len(late)} admitted requests were late"
    assert goodput(played(16, with_admission=False)) < 0.1 * peak


def test_clients_that_come_back_when_told_are_let_in() -> None:
    waits = WaitModels(AdmissionConfig())
    route = TimedRoute(admission(waits, chain=(), ttft_target_ms=2000), waits.of("large"), retries=True)
    route.run(poisson_calls(3, rate=7, seconds=60))  # To learn from.
    at_ns = route.now_ns + 10 * NS_PER_S
    route.refused.clear()
    crowd = [
        Call(number=10_000 + i, at_ns=at_ns + i, prompt_tokens=500, decode_ns=NS_PER_S) for i in range(220)
    ]
    route.run(crowd)
    came_back = [call for call in crowd if call.tries == 2]
    assert len(came_back) >= 180
    let_in = [call for call in came_back if isinstance(call.answer, Admit)]
    assert len(let_in) >= 0.9 * len(came_back), f"{len(let_in)} of {len(came_back)}"

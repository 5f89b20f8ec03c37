from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig, ModelRoute, TtftTarget
from penstock.policy.admission.admit import (
    CROWDED_SHARE,
    LET_IN_SHARE,
    PROTECTED_SHARE,
    QUEUE_SHARE,
    QUIET_SHARE,
    AdmissionControl,
    effective_degrade,
)
from penstock.policy.admit_facts import Admit, AdmitFacts, Candidate, Divert, Shed
from penstock.policy.tenant import ANONYMOUS, Tenant
from penstock.types import TenantId

CHAIN = (ModelRoute(model="large", fallback="medium"), ModelRoute(model="medium", fallback="small"))


def at(model: str, *, ahead_s: float = 0.0, **facts) -> Candidate:
    """A route where a request waits `ahead_s` for its start, and then has its first token at once."""
    wait_ns = round(ahead_s * NS_PER_S)
    known = {
        "ready": 1,
        "context_tokens": 600,
        "has_ahead": wait_ns > 0,
        "wait_ns": wait_ns,
        "each_ns": NS_PER_S // 10,
        "is_late": True,
    }
    return Candidate(model=model, **{**known, **facts})


def lookup(*candidates: Candidate) -> Callable[[str], Candidate | None]:
    return {candidate.model: candidate for candidate in candidates}.get


def admission(*, chain=CHAIN, **settings) -> AdmissionControl:
    return AdmissionControl(AdmissionConfig(**{"ttft_target_ms": 1000, "targets": (), **settings}), chain)


def let_in_s(ttft_s: float) -> float:
    """The longest wait that a promise of so many seconds lets in."""
    return QUEUE_SHARE * LET_IN_SHARE * ttft_s


FREE = lookup(at("medium"), at("small"))


def decide(deciding: AdmissionControl, requested: Candidate, **facts):
    return deciding.decide(
        0, AdmitFacts(**{"tenant": ANONYMOUS, "requested": requested, "candidate": FREE, **facts})
    )


def test_what_starts_at_once_is_let_in_whatever_it_takes() -> None:
    slow = at("large", start_ns=60 * NS_PER_S)
    assert isinstance(decide(admission(), slow), Admit)


def test_no_one_is_refused_for_a_wait_that_is_only_expected() -> None:
    quiet = at("large", ahead_s=3, is_late=False, start_ns=NS_PER_S // 10)
    alone = admission(chain=())
    verdict = decide(alone, quiet)
    assert isinstance(verdict, Admit)
    assert verdict.start_by_ns == pytest.approx(QUIET_SHARE * NS_PER_S)
    slow = at("large", ahead_s=3, is_late=False, start_ns=NS_PER_S // 2, backlog_ns=NS_PER_S // 5)
    # Its own computation and half of what its worker may have to do are left of the promise.
    assert decide(alone, slow).start_by_ns == pytest.approx(0.4 * NS_PER_S)
    assert isinstance(decide(alone, at("large", ahead_s=3, start_ns=NS_PER_S // 10)), Shed)
    assert isinstance(decide(alone, at("large", ahead_s=3, is_late=False, is_full=True)), Shed)
    assert isinstance(decide(alone, at("large", ahead_s=3, is_late=False), max_wait_ns=NS_PER_S), Shed)
    assert decide(admission(), quiet) == Divert("medium", "slo")


def test_a_long_prompt_that_is_next_may_wait_for_its_share_of_its_own_promise() -> None:
    """Else a slow machine that computes one long prompt refuses the second, whose promise can be kept."""
    alone = admission(chain=())
    own = {"idle_ttft_ns": 2 * NS_PER_S, "start_ns": 2 * NS_PER_S, "is_late": False}
    assert decide(alone, at("large", **own)).start_by_ns == pytest.approx(QUIET_SHARE * 5 * NS_PER_S)
    behind = decide(alone, at("large", ahead_s=1, **own))
    assert behind.start_by_ns == pytest.approx(QUIET_SHARE * NS_PER_S), "it crowds out no short ones"


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
    decision = admission().decide(0, facts)
    if isinstance(expected, Divert):
        assert decision == expected
    else:
        assert isinstance(decision, Shed)
        assert (decision.status, decision.why) == (429, "slo")
        assert decision.retry_after_ns == pytest.approx((3 - let_in_s(1)) * NS_PER_S, rel=0.01)


def test_the_next_fallback_when_the_first_does_not_fit_either() -> None:
    fallbacks = lookup(at("medium", ahead_s=2), at("small", ahead_s=0.15))
    facts = AdmitFacts(tenant=ANONYMOUS, requested=at("large", ahead_s=3), candidate=fallbacks)
    assert admission().decide(0, facts) == Divert("small", "slo")


def test_what_the_client_says_goes_before_the_promise_and_the_queue_bounds_both() -> None:
    deciding = admission(chain=())
    assert isinstance(decide(deciding, at("large", ahead_s=3)), Shed)
    assert isinstance(decide(deciding, at("large", ahead_s=3), max_wait_ns=10 * NS_PER_S), Admit)
    assert isinstance(decide(deciding, at("large", ahead_s=0.1), max_wait_ns=NS_PER_S // 10), Shed)
    unpromised = admission(chain=(), ttft_target_ms=0)
    assert isinstance(decide(unpromised, at("large", ahead_s=3)), Admit)
    assert isinstance(decide(unpromised, at("large", ahead_s=30), queue_wait_max_ns=20 * NS_PER_S), Shed)


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
    for late, kind in ((0.9 * let_in_s(1), Admit), (1.1 * let_in_s(1), Shed)):
        facts = AdmitFacts(
            tenant=Tenant(id=TenantId("t"), tier=tier),
            band=band,
            requested=at("large", ahead_s=ttft_s * late),
        )
        deciding = admission(chain=(), targets=targets, ttft_target_ms=8000)
        assert isinstance(deciding.decide(0, facts), kind)


def test_protected_bands_have_promises_too() -> None:
    protected = {"band": "priority", "is_protected": True}
    assert decide(admission(), at("large", ahead_s=9), **protected) == Divert("medium", "slo")
    assert isinstance(decide(admission(), at("large", ahead_s=9), degrade="never", **protected), Shed)


def test_a_protected_band_that_is_mostly_refused_waits_less_and_one_that_is_served_waits_longer_again() -> (
    None
):
    deciding, protected = admission(chain=()), {"band": "priority", "is_protected": True}
    between = at("large", ahead_s=PROTECTED_SHARE - CROWDED_SHARE / 2)
    assert isinstance(decide(deciding, between, **protected), Admit)
    for _ in range(200):
        assert isinstance(decide(deciding, at("large", ahead_s=9), **protected), Shed)
    assert isinstance(decide(deciding, between, **protected), Shed)
    crowded = decide(deciding, at("large", ahead_s=PROTECTED_SHARE - 1.1 * CROWDED_SHARE), **protected)
    assert isinstance(crowded, Admit)
    assert crowded.start_by_ns < round((PROTECTED_SHARE - 0.8 * CROWDED_SHARE) * NS_PER_S)
    for _ in range(200):
        assert isinstance(decide(deciding, at("large"), **protected), Admit)
    assert isinstance(decide(deciding, between, **protected), Admit)


def test_a_long_prompt_waits_no_longer_and_is_due_later() -> None:
    """2.5 times the 800 ms that an idle worker takes for it; what it waits for its start is all requests'
    share.
    """
    deciding, long = admission(chain=()), {"idle_ttft_ns": 800 * NS_PER_MS, "start_ns": 1200 * NS_PER_MS}
    let_in = decide(deciding, at("large", ahead_s=0.9 * let_in_s(1), **long))
    assert isinstance(let_in, Admit)
    assert let_in.first_token_ns == 2 * NS_PER_S
    assert let_in.start_by_ns == round(QUEUE_SHARE * NS_PER_S)
    assert isinstance(decide(deciding, at("large", ahead_s=1.1 * let_in_s(1), **long)), Shed)


def test_a_full_queue() -> None:
    full = at("large", ahead_s=0.5, is_full=True)
    deciding = admission()
    facts = AdmitFacts(tenant=ANONYMOUS, is_protected=True, requested=full, candidate=FREE)
    assert deciding.decide(0, facts) == Divert("medium", "queue_depth")
    decision = deciding.decide(0, AdmitFacts(tenant=ANONYMOUS, requested=full, degrade="never"))
    assert isinstance(decision, Shed)
    assert (decision.status, decision.why) == (429, "queue_full")
    full_too = lookup(at("medium", is_full=True), at("small", is_full=True))
    assert isinstance(
        deciding.decide(0, AdmitFacts(tenant=ANONYMOUS, requested=full, candidate=full_too)), Shed
    )


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
        tenant=ANONYMOUS,
        is_protected=protected,
        degrade=degrade,
        waits_for_worker=waits,
        requested=at("large", ready=0),
        candidate=FREE,
    )
    assert admission().decide(0, facts) == expected


@pytest.mark.parametrize(
    ("max_wait_s", "degrade", "expected"),
    [
        (0, "allow", Admit(5 * NS_PER_S)),
        (0, "never", Admit(5 * NS_PER_S)),
        (0, "prefer", Divert("medium", "unavailable")),
        (8, "allow", Admit(5 * NS_PER_S, 8 * NS_PER_S)),
        (4, "allow", Divert("medium", "unavailable")),
        (4, "never", Shed(429, 4 * NS_PER_S, "asleep")),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_whoever_wants_a_model_that_is_asleep_waits_for_it_unless_he_says_that_he_cannot(
    waits, max_wait_s, degrade, expected
) -> None:
    asleep = at("large", ready=0, wake_ns=4 * NS_PER_S, start_ns=NS_PER_S)
    facts = {"degrade": degrade, "max_wait_ns": max_wait_s * NS_PER_S, "waits_for_worker": waits}
    assert decide(admission(), asleep, **facts) == expected
    full = at("large", ready=0, wake_ns=4 * NS_PER_S, is_full=True)
    assert isinstance(decide(admission(), full, **facts), Divert | Shed)


def test_prefer_takes_what_is_much_sooner() -> None:
    fallbacks = lookup(at("medium", start_ns=600 * NS_PER_MS), at("small", start_ns=100 * NS_PER_MS))
    slow = AdmitFacts(
        tenant=ANONYMOUS,
        degrade="prefer",
        requested=at("large", start_ns=900 * NS_PER_MS),
        candidate=fallbacks,
    )
    assert admission().decide(0, slow) == Divert("small", "slo")
    quick = AdmitFacts(
        tenant=ANONYMOUS,
        degrade="prefer",
        requested=at("large", start_ns=250 * NS_PER_MS),
        candidate=fallbacks,
    )
    assert isinstance(admission().decide(0, quick), Admit)
    again = AdmitFacts(
        tenant=ANONYMOUS,
        degrade="prefer",
        requested=at("medium", ahead_s=0.15),
        tried=frozenset({"large"}),
        candidate=fallbacks,
    )
    assert isinstance(admission().decide(0, again), Admit)


# --- properties -----------------------------------------------------------------------------------

NAMES = ("large", "medium", "small")
candidates = st.builds(
    Candidate,
    model=st.just("large"),
    ready=st.integers(0, 2),
    has_ahead=st.booleans(),
    wait_ns=st.integers(0, 5 * NS_PER_S),
    each_ns=st.integers(0, NS_PER_S),
    start_ns=st.integers(0, NS_PER_S),
    idle_ttft_ns=st.integers(0, NS_PER_S),
    context_tokens=st.integers(1, 9000),
    max_model_len=st.sampled_from([0, 4096, 8192]),
    can_serve=st.booleans(),
    is_full=st.booleans(),
)


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
@given(situation=situations())
def test_never_diverted_across_what_is_missing(situation) -> None:
    routes, facts, there = situation
    deciding = admission(chain=routes)
    decision = deciding.decide(0, facts)
    assert decision == admission(chain=routes).decide(0, facts)
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
    reported: list[int] = []
    for wait in sorted(waits):
        decision = admission(chain=()).decide(
            0, AdmitFacts(tenant=ANONYMOUS, requested=at("large", ahead_s=wait))
        )
        assert isinstance(decision, Shed)
        reported.append(decision.retry_after_ns)
    assert reported == sorted(reported)
    assert reported[-1] <= 60 * NS_PER_S


def test_a_tenant_that_hammers_sends_nobody_else_away_for_long() -> None:
    deciding = admission(chain=())
    for _ in range(5000):
        deciding.decide(0, AdmitFacts(tenant=Tenant(id=TenantId("loud")), requested=at("large", ahead_s=2)))
    other = deciding.decide(
        0, AdmitFacts(tenant=Tenant(id=TenantId("quiet")), requested=at("large", ahead_s=2))
    )
    assert isinstance(other, Shed)
    assert other.retry_after_ns <= 2 * (2 - let_in_s(1)) * NS_PER_S, "twice its own wait"


def test_a_prompt_and_answer_that_fill_a_fallbacks_context_fit_it() -> None:
    full = lookup(at("medium", max_model_len=600), at("small"))
    assert decide(admission(), at("large", ahead_s=3), candidate=full) == Divert("medium", "slo")
    over = lookup(at("medium", max_model_len=599), at("small"))
    assert decide(admission(), at("large", ahead_s=3), candidate=over) == Divert("small", "slo")


TIMES = st.integers(0, 4 * NS_PER_S)


@st.composite
def known_and_whole(draw) -> tuple[AdmitFacts, AdmitFacts]:
    """A request before its prompt is made, and with its prompt: that adds to its own computation, and may not
    fit a model's context.
    """
    models = [at(name, **draw(load)) for name in ("large", "medium", "small")]
    longer = [
        replace(
            each,
            start_ns=each.start_ns + draw(TIMES),
            idle_ttft_ns=each.idle_ttft_ns + draw(TIMES),
            context_tokens=draw(st.integers(1, 5000)),
        )
        for each in models
    ]
    facts = draw(
        st.fixed_dictionaries(
            {
                "tenant": st.sampled_from([ANONYMOUS, Tenant(id=TenantId("t"), degrade="never")]),
                "is_protected": st.booleans(),
                "degrade": st.sampled_from([None, "never", "allow", "prefer"]),
                "max_wait_ns": st.sampled_from([0, NS_PER_S // 2, 3 * NS_PER_S]),
                "queue_wait_max_ns": st.sampled_from([0, NS_PER_S]),
                "waits_for_worker": st.booleans(),
            }
        )
    )
    empty, whole = (
        AdmitFacts(requested=found[0], candidate=lookup(*found[1:]), **facts)
        for found in ([replace(each, context_tokens=0) for each in models], longer)
    )
    return empty, whole


load = st.fixed_dictionaries(
    {
        "ahead_s": st.floats(0, 4),
        "is_late": st.booleans(),
        "is_full": st.booleans(),
        "ready": st.integers(0, 1),
        "start_ns": TIMES,
        "idle_ttft_ns": TIMES,
        "backlog_ns": TIMES,
        "max_model_len": st.sampled_from([0, 1000]),
        "wake_ns": st.sampled_from([0, NS_PER_S]),
    }
)


@given(known_and_whole())
@settings(max_examples=500)
def test_a_request_that_is_refused_before_its_prompt_is_made_is_refused_with_any_prompt(both) -> None:
    empty, whole = both
    before = admission().refuses_any(0, empty)
    decided = admission().decide(0, whole)
    if before is not None:
        assert isinstance(decided, Shed)
        assert (decided.status, decided.why) == (before.status, before.why)
        assert decided.retry_after_ns >= before.retry_after_ns, (
            "it may wait less long, so it comes back later"
        )
    same = admission().decide(0, empty)
    if empty.requested.ready and effective_degrade(empty.degrade, empty.tenant) == "never":
        assert (before is not None) == isinstance(same, Shed), "no prompt is made in vain"


def test_a_request_is_read_if_a_fallback_might_let_it_in_as_the_one_that_was_asked_for() -> None:
    """A prompt that is too long for a model goes to a longer one, whose wait is only expected to be long."""
    late, expected = at("large", ahead_s=3), at("medium", ahead_s=9, is_late=False)
    facts = AdmitFacts(tenant=ANONYMOUS, requested=late, candidate=lookup(expected))
    assert admission().refuses_any(0, facts) is None
    both_late = AdmitFacts(tenant=ANONYMOUS, requested=late, candidate=lookup(at("medium", ahead_s=9)))
    assert isinstance(admission().refuses_any(0, both_late), Shed)


def test_a_request_that_may_be_let_in_leaves_no_trace_before_its_prompt_is_made() -> None:
    asked, deciding = admission(chain=()), admission(chain=())
    protected = {"band": "priority", "is_protected": True}
    for _ in range(20):
        decide(asked, at("large", ahead_s=9), **protected)
        decide(deciding, at("large", ahead_s=9), **protected)
    free = AdmitFacts(tenant=ANONYMOUS, requested=at("large"), candidate=FREE, **protected)
    for _ in range(50):
        assert asked.refuses_any(0, free) is None
    between = at("large", ahead_s=PROTECTED_SHARE - CROWDED_SHARE / 8)
    assert decide(asked, between, **protected) == decide(deciding, between, **protected)

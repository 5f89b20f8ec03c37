from collections.abc import Callable, Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig, TtftTarget
from penstock.errors import Overloaded, WorkerUnavailable
from penstock.policy.admission.admit import (
    CROWDED_SHARE,
    LET_IN_SHARE,
    PROTECTED_SHARE,
    QUEUE_SHARE,
    QUIET_SHARE,
    AdmissionControl,
    effective_degrade,
)
from penstock.policy.contracts import ModelFacts, Pass, RouteLoad
from penstock.policy.flow import Diverted, Refused, RequestFacts
from penstock.policy.tenant import Tenant
from penstock.policy.terms import BandTerms, QueueTerms
from penstock.types import RequestId, TenantId

CHAIN = (ModelRoute(model="large", fallback="medium"), ModelRoute(model="medium", fallback="small"))
BANDS = (
    BandTerms(name="priority", order=-1, protected=True, timeout_s=3600),
    BandTerms(name="default", order=0, timeout_s=3600),
    BandTerms(name="bulk", order=1, timeout_s=3600),
)


def at(model: str, *, ahead_s: float = 0.0, **load) -> RouteLoad:
    """A route where a request waits `ahead_s` for its start, and then has its first token at once."""
    wait_ns = round(ahead_s * NS_PER_S)
    known = {
        "ready": 1,
        "requests_ahead": int(wait_ns > 0),
        "is_full": False,
        "wait_ns": wait_ns,
        "each_ns": NS_PER_S // 10,
        "is_late": True,
    }
    return RouteLoad(route=model, **{**known, **load})


def admission(
    *, chain=CHAIN, waits: bool = False, served: Mapping[str, ModelFacts] | None = None, **settings
) -> AdmissionControl:
    """`waits`: the queue keeps requests of a model that has no worker; `served` of models, else all alike."""
    return AdmissionControl(
        AdmissionConfig(**{"ttft_target_ms": 1000, "targets": (), **settings}),
        RoutingConfig(models=chain),
        QueueTerms(bands=BANDS, no_worker_wait_s=30 if waits else 0),
        (lambda _: ModelFacts()) if served is None else served.get,
    )


def let_in_s(ttft_s: float) -> float:
    """The longest wait that a promise of so many seconds lets in."""
    return QUEUE_SHARE * LET_IN_SHARE * ttft_s


FREE = (at("medium"), at("small"))


def ask(route: str = "large", *, band: str = "default", tier: str = "", tenant=None, **facts) -> RequestFacts:
    tenant = tenant or Tenant(id=TenantId("t"), band=band, tier=tier)
    facts = {"prompt_tokens": 500, "max_tokens": 100, **facts}
    return RequestFacts(id=RequestId("r"), tenant=tenant, route=route, **facts)


def loads(*those: RouteLoad) -> Callable[[str], RouteLoad]:
    return {load.route: load for load in those}.__getitem__


def decide(deciding: AdmissionControl, requested: RouteLoad, *, fallbacks=FREE, **facts):
    return deciding.decide(0, ask(requested.route, **facts), loads(*fallbacks, requested))


def diverted(route: str, why: str) -> Diverted:
    return Diverted(RequestId("r"), route, why)


def reason(refused: Refused) -> str:
    """What its client is told, but for the time."""
    assert isinstance(refused, Refused)
    return str(refused.error).partition(" Try")[0].partition("busy: ")[2]


def retry_after_ns(refused: Refused) -> int:
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Overloaded)
    return round(refused.error.retry_after_s * NS_PER_S)


SLO, QUEUE_FULL = "it could not answer in time.", "its queue is full."
ASLEEP = "it is asleep, and could not be woken in time."


def test_what_starts_at_once_is_let_in_whatever_it_takes() -> None:
    slow = at("large", start_ns=60 * NS_PER_S)
    assert isinstance(decide(admission(), slow), Pass)


def test_no_one_is_refused_for_a_wait_that_is_only_expected() -> None:
    quiet = at("large", ahead_s=3, is_late=False, start_ns=NS_PER_S // 10)
    alone = admission(chain=())
    verdict = decide(alone, quiet)
    assert isinstance(verdict, Pass)
    assert verdict.start_by_ns == pytest.approx(QUIET_SHARE * NS_PER_S)
    slow = at("large", ahead_s=3, is_late=False, start_ns=NS_PER_S // 2, backlog_ns=NS_PER_S // 5)
    # Its own computation and half of what its worker may have to do are left of the promise.
    assert decide(alone, slow).start_by_ns == pytest.approx(0.4 * NS_PER_S)
    assert isinstance(decide(alone, at("large", ahead_s=3, start_ns=NS_PER_S // 10)), Refused)
    assert isinstance(decide(alone, at("large", ahead_s=3, is_late=False, is_full=True)), Refused)
    assert isinstance(decide(alone, at("large", ahead_s=3, is_late=False), first_token_ns=NS_PER_S), Refused)
    assert decide(admission(), quiet) == diverted("medium", "slo")


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
        ("allow", None, diverted("medium", "slo")),
        ("allow", "allow", diverted("medium", "slo")),
        ("prefer", None, diverted("medium", "slo")),
        ("never", None, Refused),
        ("allow", "never", Refused),
        ("never", "allow", Refused),
        ("never", "prefer", Refused),
    ],
)
def test_what_does_not_fit_is_diverted_where_both_allow_it(tenant, asked, expected) -> None:
    facts = {"tenant": Tenant(id=TenantId("t"), degrade=tenant), "degrade": asked}
    decision = decide(admission(), at("large", ahead_s=3), **facts)
    if isinstance(expected, Diverted):
        assert decision == expected
    else:
        assert reason(decision) == SLO
        assert retry_after_ns(decision) == pytest.approx((3 - let_in_s(1)) * NS_PER_S, rel=0.01)


def test_the_next_fallback_when_the_first_does_not_fit_either() -> None:
    fallbacks = (at("medium", ahead_s=2), at("small", ahead_s=0.15))
    assert decide(admission(), at("large", ahead_s=3), fallbacks=fallbacks) == diverted("small", "slo")


def test_what_the_client_says_goes_before_the_promise_and_the_queue_bounds_both() -> None:
    deciding = admission(chain=())
    assert isinstance(decide(deciding, at("large", ahead_s=3)), Refused)
    assert isinstance(decide(deciding, at("large", ahead_s=3), first_token_ns=10 * NS_PER_S), Pass)
    assert isinstance(decide(deciding, at("large", ahead_s=0.1), first_token_ns=NS_PER_S // 10), Refused)
    unpromised = admission(chain=(), ttft_target_ms=0)
    assert isinstance(decide(unpromised, at("large", ahead_s=3)), Pass)
    assert isinstance(decide(unpromised, at("large", ahead_s=30), max_wait_ns=20 * NS_PER_S), Refused)


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
    for late, kind in ((0.9 * let_in_s(1), Pass), (1.1 * let_in_s(1), Refused)):
        deciding = admission(chain=(), targets=targets, ttft_target_ms=8000)
        assert isinstance(decide(deciding, at("large", ahead_s=ttft_s * late), band=band, tier=tier), kind)


def test_a_tenant_whose_tier_or_band_a_reload_changes_has_the_promise_of_the_new_one() -> None:
    targets = (TtftTarget(tier="pro", ttft_ms=1000), TtftTarget(band="bulk", ttft_ms=8000))
    deciding, waits = admission(chain=(), targets=targets, ttft_target_ms=4000), at("large", ahead_s=0.3)
    for band, tier, kind in (
        ("default", "free", Pass),
        ("default", "pro", Refused),
        ("default", "free", Pass),
        ("bulk", "", Pass),
    ):
        decision = decide(deciding, waits, band=band, tier=tier)
        assert isinstance(decision, kind), (band, tier)
    assert decide(deciding, waits, band="bulk").first_token_ns == 8 * NS_PER_S
    assert decide(deciding, waits, band="gone").first_token_ns == 4 * NS_PER_S, "the default band's"


def test_protected_bands_have_promises_too() -> None:
    protected = {"band": "priority"}
    assert decide(admission(), at("large", ahead_s=9), **protected) == diverted("medium", "slo")
    assert isinstance(decide(admission(), at("large", ahead_s=9), degrade="never", **protected), Refused)


def test_a_protected_band_that_is_mostly_refused_waits_less_and_one_that_is_served_waits_longer_again() -> (
    None
):
    deciding, protected = admission(chain=()), {"band": "priority"}
    between = at("large", ahead_s=PROTECTED_SHARE - CROWDED_SHARE / 2)
    assert isinstance(decide(deciding, between, **protected), Pass)
    for _ in range(200):
        assert isinstance(decide(deciding, at("large", ahead_s=9), **protected), Refused)
    assert isinstance(decide(deciding, between, **protected), Refused)
    crowded = decide(deciding, at("large", ahead_s=PROTECTED_SHARE - 1.1 * CROWDED_SHARE), **protected)
    assert isinstance(crowded, Pass)
    assert crowded.start_by_ns < round((PROTECTED_SHARE - 0.8 * CROWDED_SHARE) * NS_PER_S)
    for _ in range(200):
        assert isinstance(decide(deciding, at("large"), **protected), Pass)
    assert isinstance(decide(deciding, between, **protected), Pass)


def test_a_long_prompt_waits_no_longer_and_is_due_later() -> None:
    """2.5 times the 800 ms that an idle worker takes for it; what it waits for its start is all requests'
    share.
    """
    deciding, long = admission(chain=()), {"idle_ttft_ns": 800 * NS_PER_MS, "start_ns": 1200 * NS_PER_MS}
    let_in = decide(deciding, at("large", ahead_s=0.9 * let_in_s(1), **long))
    assert isinstance(let_in, Pass)
    assert let_in.first_token_ns == 2 * NS_PER_S
    assert let_in.start_by_ns == round(QUEUE_SHARE * NS_PER_S)
    assert isinstance(decide(deciding, at("large", ahead_s=1.1 * let_in_s(1), **long)), Refused)


def test_a_full_queue() -> None:
    full = at("large", ahead_s=0.5, is_full=True)
    deciding = admission()
    assert decide(deciding, full, band="priority") == diverted("medium", "queue_depth")
    assert reason(decide(deciding, full, degrade="never")) == QUEUE_FULL
    full_too = (at("medium", is_full=True), at("small", is_full=True))
    assert reason(decide(deciding, full, fallbacks=full_too)) == QUEUE_FULL


@pytest.mark.parametrize(
    ("waits", "protected", "degrade", "expected"),
    [
        (False, False, "allow", diverted("medium", "unavailable")),
        (False, True, "allow", diverted("medium", "unavailable")),
        (False, False, "never", WorkerUnavailable),
        (True, True, "allow", Pass()),
        (True, False, "allow", diverted("medium", "unavailable")),
        (True, False, "never", Pass()),
    ],
)
def test_no_worker(waits, protected, degrade, expected) -> None:
    band = "priority" if protected else "default"
    decision = decide(admission(waits=waits), at("large", ready=0), band=band, degrade=degrade)
    assert (type(decision.error) if isinstance(decision, Refused) else decision) == expected


@pytest.mark.parametrize(
    ("max_wait_s", "degrade", "expected"),
    [
        (0, "allow", Pass(5 * NS_PER_S)),
        (0, "never", Pass(5 * NS_PER_S)),
        (0, "prefer", diverted("medium", "unavailable")),
        (8, "allow", Pass(5 * NS_PER_S, 8 * NS_PER_S)),
        (4, "allow", diverted("medium", "unavailable")),
        (4, "never", 4 * NS_PER_S),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_whoever_wants_a_model_that_is_asleep_waits_for_it_unless_he_says_that_he_cannot(
    waits, max_wait_s, degrade, expected
) -> None:
    asleep = at("large", ready=0, wake_ns=4 * NS_PER_S, start_ns=NS_PER_S)
    facts = {"degrade": degrade, "first_token_ns": max_wait_s * NS_PER_S}
    decision = decide(admission(waits=waits), asleep, **facts)
    if isinstance(decision, Refused):
        assert (reason(decision), retry_after_ns(decision)) == (ASLEEP, expected)
    else:
        assert decision == expected
    full = at("large", ready=0, wake_ns=4 * NS_PER_S, is_full=True)
    assert isinstance(decide(admission(waits=waits), full, **facts), Diverted | Refused)


def test_prefer_takes_what_is_much_sooner() -> None:
    fallbacks = (at("medium", start_ns=600 * NS_PER_MS), at("small", start_ns=100 * NS_PER_MS))
    prefers = {"degrade": "prefer", "fallbacks": fallbacks}
    assert decide(admission(), at("large", start_ns=900 * NS_PER_MS), **prefers) == diverted("small", "slo")
    assert isinstance(decide(admission(), at("large", start_ns=250 * NS_PER_MS), **prefers), Pass)
    again = {"requested_model": "large", "diverted": "slo", **prefers}
    assert isinstance(decide(admission(), at("medium", ahead_s=0.15), **again), Pass)


# --- properties -----------------------------------------------------------------------------------

NAMES = ("large", "medium", "small")
NEEDS = frozenset({"images"})


@st.composite
def situations(draw) -> tuple[tuple[ModelRoute, ...], dict, dict[str, RouteLoad], dict[str, ModelFacts]]:
    words = st.sets(st.sampled_from(["eu", "health"])).map(lambda found: tuple(sorted(found)))
    routes = tuple(
        ModelRoute(model=name, fallback=after, tools=draw(st.booleans()), data=draw(words))
        for name, after in zip(NAMES, (*NAMES[1:], ""), strict=True)
    )
    there = {
        name: at(
            name,
            ready=draw(st.integers(0, 2)),
            requests_ahead=draw(st.integers(0, 1)),
            wait_ns=draw(st.integers(0, 5 * NS_PER_S)),
            each_ns=draw(st.integers(0, NS_PER_S)),
            start_ns=draw(st.integers(0, NS_PER_S)),
            idle_ttft_ns=draw(st.integers(0, NS_PER_S)),
            is_full=draw(st.booleans()),
        )
        for name in NAMES
    }
    served = {
        name: ModelFacts(
            max_model_len=draw(st.sampled_from([0, 4096, 8192])),
            capabilities=(NEEDS,) if draw(st.booleans()) else (),
        )
        for name in NAMES
    }
    tenant = Tenant(
        id=TenantId("t"),
        band=draw(st.sampled_from(["priority", "default"])),
        degrade=draw(st.sampled_from(["never", "allow", "prefer"])),
        models=frozenset(draw(st.sets(st.sampled_from(NAMES)))),
    )
    facts = {
        "tenant": tenant,
        "degrade": draw(st.sampled_from([None, "never", "allow", "prefer"])),
        "first_token_ns": draw(st.integers(0, 5 * NS_PER_S)),
        "context_tokens": draw(st.integers(1, 9000)),
        "needs_tools": draw(st.booleans()),
        "needs": draw(st.sampled_from([frozenset(), NEEDS])),
        "requested_model": draw(st.sampled_from(NAMES)),
        "diverted": draw(st.sampled_from(["", "slo"])),
    }
    return routes, facts, there, served


@settings(max_examples=300, deadline=None)
@given(situation=situations(), waits=st.booleans())
def test_never_diverted_across_what_is_missing(situation, waits: bool) -> None:
    routes, given, there, served = situation
    facts, look = ask(**given), there.__getitem__
    decision, again = (
        admission(chain=routes, waits=waits, served=served).decide(0, facts, look) for _ in range(2)
    )
    if isinstance(decision, Refused):
        assert isinstance(again, Refused)
        assert isinstance(decision.error, WorkerUnavailable) == (not there["large"].ready)
        assert isinstance(decision.error, WorkerUnavailable) or retry_after_ns(decision) > 0
        return
    assert decision == again
    if not isinstance(decision, Diverted):
        return
    assert effective_degrade(facts.degrade, facts.tenant) != "never"
    by_name = {route.model: route for route in routes}
    chosen, target = by_name[decision.route], there[decision.route]
    assert decision.route != "large"
    assert not facts.diverted or decision.route != facts.requested_model
    assert chosen.tools or not facts.needs_tools
    assert set(by_name["large"].data) <= set(chosen.data)
    assert not facts.tenant.models or decision.route in facts.tenant.models
    length = served[decision.route].max_model_len
    assert not length or facts.context_tokens <= length
    assert facts.needs in (frozenset(), *served[decision.route].capabilities)
    assert target.ready
    assert not target.is_full


@settings(max_examples=50, deadline=None)
@given(waits=st.lists(st.floats(1.5, 100), min_size=2, max_size=6))
def test_the_longer_the_queue_the_later_one_is_told_to_come_back(waits: list[float]) -> None:
    reported = [
        retry_after_ns(decide(admission(chain=()), at("large", ahead_s=wait))) for wait in sorted(waits)
    ]
    assert reported == sorted(reported)
    assert reported[-1] <= 60 * NS_PER_S


def test_a_tenant_that_hammers_sends_nobody_else_away_for_long() -> None:
    deciding = admission(chain=())
    for _ in range(5000):
        decide(deciding, at("large", ahead_s=2), tenant=Tenant(id=TenantId("loud")))
    other = decide(deciding, at("large", ahead_s=2), tenant=Tenant(id=TenantId("quiet")))
    assert retry_after_ns(other) <= 2 * (2 - let_in_s(1)) * NS_PER_S, "twice its own wait"


def test_a_prompt_and_answer_that_fill_a_fallbacks_context_fit_it() -> None:
    for medium, expected in ((600, "medium"), (599, "small")):
        served = {name: ModelFacts(max_model_len=8192) for name in NAMES}
        served["medium"] = ModelFacts(max_model_len=medium)
        deciding, asked = admission(served=served), {"context_tokens": 600}
        assert decide(deciding, at("large", ahead_s=3), **asked) == diverted(expected, "slo")


TIMES = st.integers(0, 4 * NS_PER_S)


_Asked = tuple[RequestFacts, Callable[[str], RouteLoad]]


@st.composite
def known_and_whole(draw) -> tuple[_Asked, _Asked]:
    """A request before its prompt is made, and with its prompt: that adds to its own computation, and may not
    fit a model's context.
    """
    models = [at(name, **draw(load)) for name in NAMES]
    longer = [
        replace(each, start_ns=each.start_ns + draw(TIMES), idle_ttft_ns=each.idle_ttft_ns + draw(TIMES))
        for each in models
    ]
    facts = draw(
        st.fixed_dictionaries(
            {
                "tenant": st.builds(
                    Tenant,
                    id=st.just(TenantId("t")),
                    band=st.sampled_from(["priority", "default"]),
                    degrade=st.sampled_from(["never", "allow"]),
                ),
                "degrade": st.sampled_from([None, "never", "allow", "prefer"]),
                "first_token_ns": st.sampled_from([0, NS_PER_S // 2, 3 * NS_PER_S]),
                "max_wait_ns": st.sampled_from([0, NS_PER_S]),
            }
        )
    )
    whole = ask(context_tokens=draw(st.integers(1, 5000)), **facts)
    return (ask(prompt_tokens=0, **facts), loads(*models)), (whole, loads(*longer))


load = st.fixed_dictionaries(
    {
        "ahead_s": st.floats(0, 4),
        "is_late": st.booleans(),
        "is_full": st.booleans(),
        "ready": st.integers(0, 1),
        "start_ns": TIMES,
        "idle_ttft_ns": TIMES,
        "backlog_ns": TIMES,
        "wake_ns": st.sampled_from([0, NS_PER_S]),
    }
)


def sooner_ns_max(facts: RequestFacts, load: RouteLoad) -> int:
    """By how much earlier a request may come back with a prompt than without one: by what the longer promise
    to it lets it wait longer, which counts in a quiet time only, up to a share of its band's promise.
    """
    if load.is_late or facts.first_token_ns:
        return 0
    if facts.tenant.band == "priority":
        return round(QUIET_SHARE * NS_PER_S) - round(PROTECTED_SHARE * NS_PER_S)
    return round(let_in_s(1) * QUIET_SHARE / QUEUE_SHARE * NS_PER_S) - round(let_in_s(1) * NS_PER_S)


def full_and_quiet(idle_ttft_ns: int, **facts) -> _Asked:
    """A request for a model whose queue is full, and whose worker has work for half of the promise."""
    full = at("large", ahead_s=1, is_full=True, is_late=False, backlog_ns=1_100_000_002)
    asker = Tenant(id=TenantId("t"), band="priority", degrade="never")
    return ask(tenant=asker, **facts), loads(replace(full, idle_ttft_ns=idle_ttft_ns))


@given(known_and_whole(), st.sampled_from([0, 1000]), st.booleans())
@example((full_and_quiet(0, prompt_tokens=0), full_and_quiet(400_000_001)), 0, False)
@settings(max_examples=500)
def test_a_request_that_is_refused_before_its_prompt_is_made_is_refused_with_any_prompt(
    both, length: int, waits: bool
) -> None:
    empty, whole = both
    served = {name: ModelFacts(max_model_len=length) for name in NAMES}

    def made() -> AdmissionControl:
        return admission(waits=waits, served=served)

    before, decided = made().refuses_any(0, *empty), made().decide(0, *whole)
    facts, look = empty
    if before is not None:
        assert reason(decided) == reason(before)
        earliest_ns = retry_after_ns(before) - sooner_ns_max(facts, look("large"))
        assert retry_after_ns(decided) >= earliest_ns, "it may wait less long, so it comes back later"
    same = made().decide(0, *empty)
    if look("large").ready and effective_degrade(facts.degrade, facts.tenant) == "never":
        assert (before is not None) == isinstance(same, Refused), "no prompt is made in vain"


def test_a_request_is_read_if_a_fallback_might_let_it_in_as_the_one_that_was_asked_for() -> None:
    """A prompt that is too long for a model goes to a longer one, whose wait is only expected to be long."""
    late, expected = at("large", ahead_s=3), at("medium", ahead_s=9, is_late=False)
    chain = CHAIN[:1]
    assert admission(chain=chain).refuses_any(0, ask(), loads(late, expected)) is None
    both_late = loads(late, at("medium", ahead_s=9))
    assert isinstance(admission(chain=chain).refuses_any(0, ask(), both_late), Refused)


def test_a_request_that_may_be_let_in_leaves_no_trace_before_its_prompt_is_made() -> None:
    asked, deciding = admission(chain=()), admission(chain=())
    protected = {"band": "priority"}
    for _ in range(20):
        decide(asked, at("large", ahead_s=9), **protected)
        decide(deciding, at("large", ahead_s=9), **protected)
    for _ in range(50):
        assert asked.refuses_any(0, ask(**protected), loads(at("large"))) is None
    between = at("large", ahead_s=PROTECTED_SHARE - CROWDED_SHARE / 8)
    one, other = decide(asked, between, **protected), decide(deciding, between, **protected)
    assert (reason(one), retry_after_ns(one)) == (reason(other), retry_after_ns(other))

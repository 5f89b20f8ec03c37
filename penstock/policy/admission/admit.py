"""Whether a request is let in, sent to a smaller model, or turned away: decided once, when it comes.

| the requested model | protected band | other bands, degrade allowed | other bands, never |
|---|---|---|---|
| starts it at once, or in time | admit | admit (`prefer`: divert if much sooner) | admit |
| would start too late, and others did | divert if allowed, else 429 | divert, else 429 | 429 |
| would start too late, and nothing did lately | divert if allowed, else admit | divert, else admit | admit |
| its queue is full | divert if allowed, else 429 | divert, else 429 | 429 |
| costs more than a fallback in time, and the budget nears its end | divert if allowed | divert | as above |
| is asleep | wait, which wakes it; if it cannot wait so long divert, else 429 | as left | as left |
| has no worker | wait if the queue does, else divert, else 503 | divert, else as the queue | as the queue |
| has only workers that fail | divert if allowed, else admit | divert, else admit | admit |
| has only workers without room for too long | divert if allowed, else 429 | divert, else 429 | 429 |

"In time" is what the request says itself, else the promise to its band and tier. Its wait is
what goes before it in its band, at the pace at which the band's requests start now: nothing is predicted that
is not seen. A request is refused for its expected wait only while requests of its band do leave the queue too
late: a pace that was seen in a quiet time says little of a burst on an idle machine, so there the request
waits, and its deadline decides. A refusal says when to come back: when the queue will have drained so far
that such a request fits.

A promise says when the first token comes, and how fast the others follow:

    promise     by band and tier, as configured: 500 ms to the first token, 50 ms per further one
    on a worker never less than `IDLE_FACTOR` times what the same request takes on an idle one

So the promise to a long prompt grows with its own computation, and a slow machine promises what it was
measured to do: one rule for both. Goodput is requests per second that met both promises.

Pure and deterministic; the facts are handed in, and a fallback's are asked for only when it comes into
question.
"""

from typing import Literal

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig, ModelRoute, TtftTarget
from penstock.policy.admit_facts import Admit, AdmitFacts, Candidate, Decision, Divert, RouteTrouble, Shed
from penstock.policy.tenant import Degrade, Tenant, may_use_model

IDLE_FACTOR = 2.5
"""No promise is shorter than this many times what the same request takes on an idle worker, as measured: what
a long prompt or a slow machine is promised."""


class Promise(msgspec.Struct, frozen=True, gc=False):
    """In nanoseconds; 0 promises nothing."""

    ttft_ns: int = 0
    """From arrival to the first token."""
    tpot_ns: int = 0
    """Mean time per token after the first."""

    def on(self, factor: float, idle_ttft_ns: int, idle_tpot_ns: int) -> "Promise":
        """The promise to a request that takes so long on an idle worker."""
        return Promise(
            self.ttft_ns and max(self.ttft_ns, round(factor * idle_ttft_ns)),
            self.tpot_ns and max(self.tpot_ns, round(factor * idle_tpot_ns)),
        )

    def is_kept(self, ttft_ns: int, tpot_ns: int) -> bool:
        """Whether an answer with these times was in time. `tpot_ns` is 0 for a single token."""
        in_time = not self.ttft_ns or ttft_ns <= self.ttft_ns
        return in_time and (not self.tpot_ns or tpot_ns <= self.tpot_ns)


class Promises:
    """The promises of a configuration.

    The narrowest target that says a time counts: band and tier, tier, band, all.
    """

    __slots__ = ("_all", "_found", "_targets")

    def __init__(self, config: AdmissionConfig) -> None:
        self._all = TtftTarget(ttft_ms=config.ttft_target_ms, tpot_ms=config.tpot_target_ms)
        self._targets = {(target.band, target.tier): target for target in config.targets}
        self._found: dict[tuple[str, str], Promise] = {}

    def of(self, *, tier: str, band: str) -> Promise:
        """The promise to a request of this tier and band, as configured."""
        found = self._found.get((tier, band))  # Asked four times for each request.
        if found is None:
            found = self._found[tier, band] = self._narrowest(tier, band)
        return found

    def _narrowest(self, tier: str, band: str) -> Promise:
        keys = [key for key in ((band, tier), ("", tier), (band, "")) if any(key)]
        wider = [target for key in keys if (target := self._targets.get(key)) is not None]
        wider.append(self._all)
        ttft_ms = next(each.ttft_ms for each in wider if each.ttft_ms is not None)
        tpot_ms = next(each.tpot_ms for each in wider if each.tpot_ms is not None)
        return Promise(round(ttft_ms * NS_PER_MS), round(tpot_ms * NS_PER_MS))


class RetryAfterSchedule:
    """The times for refused clients to come back: one after the other, not all at once.

    By tenant, because one that hammers must not send all others away for a minute: what others have booked
    delays a tenant's next promise to twice its own wait at most.
    """

    __slots__ = ("_kept", "_until", "_wait_ns_max")

    def __init__(self, *, wait_ns_max: int, kept: int) -> None:
        """`kept`: pairs of model and tenant that are remembered; over it the oldest is forgotten."""
        self._wait_ns_max, self._kept = wait_ns_max, kept
        self._until: dict[tuple[str, str], int] = {}

    def book(self, now_ns: int, who: tuple[str, str], wait_ns: int, each_ns: int) -> int:
        """When to come back, at least `wait_ns` from now; the next one comes `each_ns` later."""
        everybody = (who[0], "\0")
        others_ns = min(self._until.get(everybody, 0), now_ns + 2 * wait_ns)
        at_ns = max(now_ns + wait_ns, self._until.get(who, 0), others_ns)
        at_ns = min(at_ns, now_ns + self._wait_ns_max)
        assert now_ns <= at_ns, "no client is asked to have come before"
        for key in (who, everybody):
            self._until.pop(key, None)  # To the end: the oldest is dropped first.
            self._until[key] = at_ns + each_ns
        while len(self._until) > self._kept:
            del self._until[next(iter(self._until))]
        return at_ns


QUEUE_SHARE = 0.25
"""Of the promise as configured, what a request may wait for its start; the rest is its worker's. The same for
long prompts as for short ones, whose promises differ: else long ones would be all that is left of a long
queue."""
QUIET_SHARE = 0.45
"""Of the promise, what a request may wait at most while none of its band was too late for a while. With more
a spike's first requests all start at the last moment and are late at their workers, and the rows that they
take are missing for ten seconds; with less a burst on an idle machine is refused in part."""
LET_IN_SHARE = 0.6
"""Of that, the wait that is expected of a request when it is let in: how long others take is never known
exactly."""
PROTECTED_SHARE = 0.35
"""Of the promise, what a request of a protected band may wait, and is let in for: what comes after it does
not go before it."""
CROWDED_SHARE = 0.15
"""That share of a protected band is smaller by so much where all of its requests are refused, and in
proportion where some are: its queue is full again at once, so a shorter wait costs no start, and leaves more
of the promise to its workers. A band that can be served keeps its whole wait."""
_REFUSED = 64
"""The refused part of a band follows its last so many requests."""
_AT_ONCE = Admit()
PREFER_FRACTION, PREFER_SAVES_MS = 0.5, 200.0
"""`prefer` diverts when the smaller model's first token is expected within this share of the larger one's
time, and when that saves at least so much."""
RETRY_AFTER_MAX_S, RETRY_AFTER_DEFAULT_S = 60.0, 2.0
"""The second is for refused clients while nothing is known of how fast the queue drains."""
RETRIES_KEPT = 4096
"""Tenants and models whose promised times to come back are kept, so that those do not all come back at
once."""


class _Verdict(msgspec.Struct, frozen=True):
    """Whether one model would do."""

    fits: bool
    why: Literal["slo", "queue_full"] = "slo"
    is_proven: bool = True
    """That it does not fit is more than an estimate from a quiet time: requests did leave the queue too late
    to be started."""
    promised_ns: int = 0
    """By when the first token is due; 0: at no certain time."""
    start_by_ns: int = 0
    """When a start would be too late for that; 0: never."""
    wait_max_ns: int = 0
    """The limit that its wait was compared with; 0: nothing."""


class AdmissionControl:
    """Decides, and remembers when refused clients are to come back."""

    __slots__ = ("_comebacks", "_promises", "_refused", "_routes")

    def __init__(self, config: AdmissionConfig, routes: tuple[ModelRoute, ...]) -> None:
        """`routes` without loops: the configuration is checked for them."""
        self._promises = Promises(config)
        self._routes = {route.model: route for route in routes}
        self._comebacks = RetryAfterSchedule(
            wait_ns_max=round(RETRY_AFTER_MAX_S * NS_PER_S), kept=RETRIES_KEPT
        )
        self._refused: dict[tuple[str, str], float] = {}
        """By model and band, the refused part of the last requests; protected bands only."""

    def decide(self, now_ns: int, facts: AdmitFacts) -> Decision:
        """Admit, divert or shed. O(1) where the request starts at once, else O(fallbacks)."""
        route, degrade = facts.requested, _degrade_of(facts)
        may_divert = degrade != "never"
        if not route.ready:
            if route.wake_ns and not route.is_full:
                return self._asleep(facts, may_divert=may_divert)
            return self._without_worker(facts, may_divert=may_divert)
        if route.trouble is not None and route.trouble.why:
            decided = self._in_trouble(facts, route.trouble, may_divert=may_divert)
            if decided is not None:
                return decided
        if facts.is_cheaper is not None and may_divert:
            for found in self._fallbacks(facts):
                if facts.is_cheaper(found.model) and self._judge(facts, found).fits:
                    return Divert(found.model, "budget")
        verdict = self._judge(facts, route)
        if not verdict.fits:
            why = "slo" if verdict.why == "slo" else "queue_depth"
            found = self._first_that_fits(facts) if may_divert else None
            if found:
                return Divert(found.model, why)
            if verdict.is_proven:
                return self._shed(now_ns, facts, verdict)
        if facts.is_protected and self._refused:
            self._count(facts, refused=0.0)
        if facts.tried:  # It was sent here, and here it fits: no further down for anything else.
            may_divert = False
        if may_divert and degrade == "prefer" and (sooner := self._much_sooner(facts)):
            return sooner
        expected_ns = _expected_ns(route) if route.has_ahead else 0
        # Rather another model than a worker that fails, where there is one: the panic rule is for the rest.
        is_strict = route.trouble is not None and may_divert and self._first_that_fits(facts) is not None
        return Admit(expected_ns, verdict.promised_ns, verdict.start_by_ns, is_strict)

    def refuses_any(self, now_ns: int, facts: AdmitFacts) -> Shed | None:
        """The refusal of a request whose prompt is not known yet (`facts` say that it has none), if `decide`
        refuses it with any prompt; else None, and nothing has changed.

        A longer prompt is never let in where a shorter one is refused: what goes before it, and what it is
        compared with, are the same, or its own computation makes them worse. So a refusal under overload
        needs no prompt to be rendered and tokenized, which costs more than everything else about it.
        """
        route = facts.requested
        is_troubled = route.trouble is not None and route.trouble.why
        may_divert = _degrade_of(facts) != "never"
        if not route.ready or is_troubled or (may_divert and facts.is_cheaper is not None):
            return None
        verdict = self._judge(facts, route)
        if verdict.fits or not verdict.is_proven:
            return None
        # A prompt that does not fit this model may be sent to a longer one, which then is the one asked for.
        others = [self._judge(facts, each) for each in self._fallbacks(facts)] if may_divert else []
        if any(each.fits or not each.is_proven for each in others):
            return None
        return self._shed(now_ns, facts, verdict)

    def _count(self, facts: AdmitFacts, *, refused: float) -> None:
        key = facts.requested.model, facts.band
        before = self._refused.get(key, 0.0)
        self._refused[key] = before + (refused - before) / _REFUSED

    def elsewhere(self, facts: AdmitFacts) -> str:
        """The first fallback that would answer in time, where that is allowed; empty: none."""
        found = self._first_that_fits(facts) if _degrade_of(facts) != "never" else None
        return found.model if found is not None else ""

    def _in_trouble(self, facts: AdmitFacts, trouble: RouteTrouble, *, may_divert: bool) -> Decision | None:
        """None of its workers may be used. None: it is let in all the same, if it would be otherwise."""
        assert trouble.why, "most is not all"
        found = self._first_that_fits(facts) if may_divert else None
        if found is not None:
            return Divert(found.model, trouble.why)
        route, wait_max_ns = facts.requested, self._times(facts, facts.requested)[2]
        if trouble.why == "busy" and 0 < wait_max_ns < route.back_ns:
            return Shed(429, route.back_ns, "busy")
        return None

    def _judge(self, facts: AdmitFacts, route: Candidate) -> _Verdict:
        promised_ns, start_by_ns, wait_max_ns = self._times(facts, route)
        if route.is_full:
            return _Verdict(fits=False, why="queue_full", wait_max_ns=wait_max_ns)
        # With nothing ahead refusing it would help no other request.
        fits = not route.has_ahead or not wait_max_ns or route.wait_ns <= wait_max_ns
        is_proven = route.is_late or facts.max_wait_ns > 0 or not promised_ns
        return _Verdict(
            fits=fits,
            is_proven=is_proven,
            promised_ns=promised_ns,
            start_by_ns=start_by_ns,
            wait_max_ns=wait_max_ns,
        )

    def _times(self, facts: AdmitFacts, route: Candidate) -> tuple[int, int, int]:
        """In nanoseconds: when the first token is due, when a start is too late for that, and the longest
        wait that is let in.
        """
        promise = self._promises.of(tier=facts.tenant.tier, band=facts.band)
        due_ns = facts.max_wait_ns
        if not due_ns and promise.ttft_ns:  # `promise.on`, without a struct for each request.
            due_ns = max(promise.ttft_ns, round(IDLE_FACTOR * route.idle_ttft_ns))
        if not due_ns:
            return 0, 0, facts.queue_wait_max_ns
        # Half of what a worker may be busy with is what it is busy with on average.
        spare_ns = due_ns - route.start_ns - route.backlog_ns // 2
        if facts.max_wait_ns:
            start_by_ns = max(round(QUEUE_SHARE * due_ns), spare_ns)
        else:
            share = QUEUE_SHARE
            if facts.is_protected:
                refused = self._refused.get((route.model, facts.band), 0.0) if self._refused else 0.0
                share = PROTECTED_SHARE - CROWDED_SHARE * refused
            start_by_ns = round(share * promise.ttft_ns)
            if not route.is_late:
                # By its own promise only where it is next: else long prompts would crowd out short ones.
                whole_ns = promise.ttft_ns if route.has_ahead else due_ns
                start_by_ns = max(start_by_ns, min(spare_ns, round(QUIET_SHARE * whole_ns)))
        start_by_ns = max(1, start_by_ns)
        share = 1.0 if facts.is_protected else LET_IN_SHARE
        wait_max_ns = max(1, round(share * start_by_ns))
        assert 0 < wait_max_ns <= start_by_ns, "who waits as long as may be starts in time"
        return due_ns, start_by_ns, _least(wait_max_ns, facts.queue_wait_max_ns)

    def _first_that_fits(self, facts: AdmitFacts) -> Candidate | None:
        return next((found for found in self._fallbacks(facts) if self._judge(facts, found).fits), None)

    def _fallbacks(self, facts: AdmitFacts) -> list[Candidate]:
        """The chain of smaller models, without those that cannot do what the request needs."""
        found: list[Candidate] = []
        for model in self.chain(facts.tenant, facts.requested.model, needs_tools=facts.needs_tools):
            candidate = facts.candidate(model) if model not in facts.tried else None
            if candidate is not None and _is_able(candidate) and _holds(candidate):
                found.append(candidate)
        return found

    def chain(self, tenant: Tenant, model: str, *, needs_tools: bool) -> list[str]:
        """The model's fallbacks in order: those that the tenant may use, and that have its tools and may have
        its data.
        """
        found, data = list[str](), self._data(model)
        for _ in range(len(self._routes)):
            model = self._next(model)
            if not model:
                break
            route = self._routes.get(model)
            has_tools = route is None or route.tools or not needs_tools
            if has_tools and data <= self._data(model) and may_use_model(tenant, model):
                found.append(model)
        return found

    def _data(self, model: str) -> frozenset[str]:
        route = self._routes.get(model)
        return frozenset(route.data) if route else frozenset()

    def _next(self, model: str) -> str:
        route = self._routes.get(model)
        return route.fallback if route else ""

    def _much_sooner(self, facts: AdmitFacts) -> Divert | None:
        """A fallback that answers in a fraction of the time: only where both times are known."""
        mine_ns = _expected_ns(facts.requested)
        limit_ns = min(mine_ns * PREFER_FRACTION, mine_ns - PREFER_SAVES_MS * NS_PER_MS)
        for candidate in self._fallbacks(facts):
            if not candidate.is_full and 0 < _expected_ns(candidate) <= limit_ns:
                return Divert(candidate.model, "slo")
        return None

    def _asleep(self, facts: AdmitFacts, *, may_divert: bool) -> Decision:
        """A request for this model waits until it is awake, unless it says itself how long it waits: promises
        are those of models that are awake.
        """
        route, due_ns = facts.requested, facts.max_wait_ns
        expected_ns = route.wake_ns + route.start_ns
        is_late = 0 < due_ns < expected_ns
        may_divert &= is_late or _degrade_of(facts) == "prefer"
        if may_divert and (found := self._first_that_fits(facts)):
            return Divert(found.model, "unavailable")
        if is_late:
            return Shed(429, route.wake_ns, "asleep")
        return Admit(expected_ns, due_ns)

    def _without_worker(self, facts: AdmitFacts, *, may_divert: bool) -> Decision:
        if facts.waits_for_worker and facts.is_protected and not facts.requested.is_full:
            return _AT_ONCE
        if may_divert and (found := self._first_that_fits(facts)):
            return Divert(found.model, "unavailable")
        if facts.waits_for_worker and not facts.requested.is_full:
            return _AT_ONCE
        return Shed(503, round(RETRY_AFTER_DEFAULT_S * NS_PER_S), "no_worker")

    def _shed(self, now_ns: int, facts: AdmitFacts, verdict: _Verdict) -> Shed:
        route = facts.requested
        if facts.is_protected:
            self._count(facts, refused=1.0)
        each_ns = route.each_ns or round(RETRY_AFTER_DEFAULT_S * NS_PER_S)
        wait_ns = max(each_ns, route.wait_ns - verdict.wait_max_ns)
        at_ns = self._comebacks.book(now_ns, (route.model, facts.tenant.id), wait_ns, each_ns)
        assert at_ns > now_ns, "who is turned away is to come later"
        return Shed(429, at_ns - now_ns, verdict.why)


def effective_degrade(asked: Degrade | None, tenant: Tenant) -> Degrade:
    """The mode in effect: the request's word before the tenant's default, but a tenant's `never` is a promise
    to keep.
    """
    return tenant.degrade if asked is None or tenant.degrade == "never" else asked


def _degrade_of(facts: AdmitFacts) -> Degrade:
    return effective_degrade(facts.degrade, facts.tenant)


def _is_able(candidate: Candidate) -> bool:
    """Whether it has a worker that may be used."""
    return candidate.ready > 0 and (candidate.trouble is None or not candidate.trouble.why)


def _holds(candidate: Candidate) -> bool:
    """Whether the request fits the model's context and finds its adapter."""
    fits = not candidate.max_model_len or candidate.context_tokens <= candidate.max_model_len
    return fits and candidate.can_serve


def _least(one: int, other: int) -> int:
    """The smaller bound; 0 is none."""
    return min(one, other) if one and other else one or other


def _expected_ns(candidate: Candidate) -> int:
    """To its first token."""
    return candidate.wait_ns + candidate.start_ns

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

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.config.routing import AdmissionConfig, RoutingConfig, TtftTarget
from penstock.errors import Overloaded, WorkerUnavailable
from penstock.policy.admission.comebacks import RetryAfterSchedule
from penstock.policy.admission.downgrade import BudgetDowngrade
from penstock.policy.contracts import Look, ModelFacts, Pass, RouteLoad, RouteTrouble
from penstock.policy.flow import Diverted, Refused, RequestFacts
from penstock.policy.queueing.fair_queue import default_level, ordered_bands
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
        self._found: dict[tuple[str, str], Promise] = {}  # A configuration has a few of both.

    def of(self, *, tier: str, band: str) -> Promise:
        """The promise to a request of this tier and band, as configured."""
        found = self._found.get((tier, band))
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
_AT_ONCE = Pass()
PREFER_FRACTION, PREFER_SAVES_MS = 0.5, 200.0
"""`prefer` diverts when the smaller model's first token is expected within this share of the larger one's
time, and when that saves at least so much."""
RETRY_AFTER_MAX_S, RETRY_AFTER_DEFAULT_S = 60.0, 2.0
"""The second is for refused clients while nothing is known of how fast the queue drains."""
RETRIES_KEPT = 4096
"""Tenants and models whose promised times to come back are kept, so that those do not all come back at
once."""


_ShedReason = Literal["slo", "queue_full", "busy", "asleep"]
_WHY: Mapping[_ShedReason, str] = {
    "queue_full": "its queue is full",
    "slo": "it could not answer in time",
    "busy": "its workers have no room",
    "asleep": "it is asleep, and could not be woken in time",
}


class _Terms(msgspec.Struct, frozen=True, gc=False):
    """How requests of one band and tier are promised their first token, and how long they may wait."""

    band: str
    """The one that the queue would use."""
    is_protected: bool
    """The band waits rather than be degraded."""
    queue_wait_max_ns: int
    """The longest that the queue keeps one; 0: no bound."""
    ttft_ns: int
    """The promise as configured; 0: none."""
    wait_ns: int
    """Of the promise, what one may wait for its start."""
    quiet_wait_ns: int
    """The same while none of its band was too late for a while, at most."""


class _Unfit(msgspec.Struct, frozen=True, gc=False):
    """A model that does not answer the request in time, or has no place for it in its queue."""

    why: Literal["slo", "queue_full"]
    is_proven: bool
    """It is more than an estimate from a quiet time: requests did leave the queue too late to be started."""
    wait_max_ns: int
    """The longest wait that is let in; 0: any. Of `queue_full` nothing was compared with it."""
    let_in: Pass
    """How it is let in all the same."""


class AdmissionControl:
    """See `contracts.Admission`. Decides, and remembers when refused clients are to come back."""

    __slots__ = (
        "_chains", "_comebacks", "_default", "_facts", "_promises", "_protected", "_refused", "_routes",
        "_terms", "_thrift", "_timeouts", "_waits_for_worker",
    )  # fmt: skip

    def __init__(
        self,
        config: AdmissionConfig,
        routing: RoutingConfig,
        queue: QueueConfig,
        facts: Callable[[str], ModelFacts | None],
        thrift: BudgetDowngrade | None = None,
    ) -> None:
        """Fallbacks of `routing` without loops: the configuration is checked for them. `facts` tells of a
        model; None if it is not served. `thrift`: tenants whose budget nears its end go to cheaper fallbacks.
        """
        self._promises, self._facts = Promises(config), facts
        self._routes = {route.model: route for route in routing.models}
        self._chains = {name: chain for name in self._routes if (chain := self._chain(name))}
        self._thrift = thrift if self._chains else None
        self._waits_for_worker = queue.no_worker_wait_s > 0
        bands = ordered_bands(queue.bands)
        self._default = bands[default_level(bands)].name
        self._timeouts = {band.name: int(band.timeout_s * NS_PER_S) for band in bands}
        self._protected = {band.name for band in bands if band.protected}
        self._terms: dict[tuple[str, str], _Terms] = {}  # As few as `Promises` has.
        self._comebacks = RetryAfterSchedule(
            wait_ns_max=round(RETRY_AFTER_MAX_S * NS_PER_S), kept=RETRIES_KEPT
        )
        self._refused: dict[tuple[str, str], float] = {}
        """By model and band, the refused part of the last requests; protected bands only."""

    def decide(self, now_ns: int, facts: RequestFacts, look: Look) -> Pass | Diverted | Refused:
        """Let it in, send it on, or turn it away. O(1) where it starts at once, else O(fallbacks)."""
        load, degrade = look(facts.route), self._degrade_of(facts)
        if not load.ready:
            if load.wake_ns and not load.is_full:
                return self._asleep(facts, load, look, degrade)
            return self._without_worker(facts, load, look)
        trouble, decided = load.trouble, None
        if trouble is not None and trouble.why:
            decided = self._in_trouble(now_ns, facts, load, look, trouble)
        if decided is None and self._thrift is not None and degrade != "never":
            decided = self._cheaper(now_ns, facts, look, self._thrift)
        if decided is not None:
            return decided
        verdict = self._judge(facts, load)
        if isinstance(verdict, _Unfit):
            if (found := self._first_that_fits(facts, look)) is not None:
                return Diverted(facts.id, found.route, "slo" if verdict.why == "slo" else "queue_depth")
            if verdict.is_proven:
                return self._shed(now_ns, facts, load, verdict)
            verdict = verdict.let_in
        if self._refused and (terms := self._terms_of(facts.tenant)).is_protected:
            self._count(facts.route, terms.band, refused=0.0)
        if degrade == "never" or facts.diverted:
            return verdict  # One that was sent here, and here it fits, goes no further down.
        sooner = self._much_sooner(facts, load, look) if degrade == "prefer" else None
        if sooner is not None:
            return sooner
        # Rather another model than a worker that fails, where there is one: the panic rule is for the rest.
        if trouble is not None and self._first_that_fits(facts, look) is not None:
            return msgspec.structs.replace(verdict, is_strict=True)
        return verdict

    def refuses_any(self, now_ns: int, facts: RequestFacts, look: Look) -> Refused | None:
        """The refusal of a request whose prompt is not known yet (`facts` say that it has none), if `decide`
        refuses it with any prompt; else None, and nothing has changed.

        A longer prompt is never let in where a shorter one is refused: what goes before it, and what it is
        compared with, are the same, or its own computation makes them worse. So a refusal under overload
        needs no prompt to be rendered and tokenized, which costs more than everything else about it. Where
        a queue is full in a quiet time, `decide` may say a time to come back that is sooner: the promise to a
        longer prompt is longer, and lets it wait up to `QUIET_SHARE`.
        """
        load = look(facts.route)
        if not load.ready or (load.trouble is not None and load.trouble.why):
            return None
        saves = self._thrift is not None and self._thrift.cheaper_for(now_ns, facts) is not None
        if saves and self._degrade_of(facts) != "never":
            return None
        verdict = self._judge(facts, load)
        if not isinstance(verdict, _Unfit) or not verdict.is_proven:
            return None
        # A prompt that does not fit this model may be sent to a longer one, which then is the one asked for.
        for each in self._fallbacks(facts, look):
            other = self._judge(facts, each)
            if not isinstance(other, _Unfit) or not other.is_proven:
                return None
        return self._shed(now_ns, facts, load, verdict)

    def elsewhere(self, now_ns: int, facts: RequestFacts, look: Look) -> str:
        """The first fallback that would answer in time, where that is allowed; empty: none."""
        found = self._first_that_fits(facts, look)
        return "" if found is None else found.route

    def longer(
        self,
        route: str,
        tenant: Tenant,
        degrade: Degrade | None,
        *,
        needs_tools: bool,
        adapter: str,
        needs: frozenset[str],
    ) -> list[str]:
        """Fallbacks of a model that a request did not fit: those with a longer context that may answer it, in
        order. None if it may not be answered by another one.
        """
        mine = self._facts(route)
        if mine is None or effective_degrade(degrade, tenant) == "never":
            return []

        def is_longer(model: str) -> bool:
            facts = self._facts(model)
            return (
                facts is not None
                and facts.can_serve(adapter, needs)
                and facts.max_model_len > mine.max_model_len
            )

        return [m for m in self._chain_for(tenant, route, needs_tools=needs_tools) if is_longer(m)]

    def _judge(self, facts: RequestFacts, load: RouteLoad) -> Pass | _Unfit:
        """Whether one model would do, and by when."""
        due_ns, start_by_ns, wait_max_ns = self._times(facts, load)
        ahead = load.requests_ahead > 0
        let_in = Pass(load.wait_ns + load.start_ns if ahead else 0, due_ns, start_by_ns)
        if load.is_full:
            return _Unfit("queue_full", is_proven=True, wait_max_ns=wait_max_ns, let_in=let_in)
        # With nothing ahead refusing it would help no other request.
        if not ahead or not wait_max_ns or load.wait_ns <= wait_max_ns:
            return let_in
        is_proven = load.is_late or facts.first_token_ns > 0 or not due_ns
        return _Unfit("slo", is_proven, wait_max_ns, let_in)

    def _times(self, facts: RequestFacts, load: RouteLoad) -> tuple[int, int, int]:
        """In nanoseconds: when the first token is due, when a start is too late for that, and the longest
        wait that is let in.
        """
        terms = self._terms_of(facts.tenant)
        queue_wait_max_ns = facts.max_wait_ns or terms.queue_wait_max_ns
        if due_ns := facts.first_token_ns:
            # Half of what a worker may be busy with is what it is busy with on average.
            start_by_ns = max(round(QUEUE_SHARE * due_ns), due_ns - load.start_ns - load.backlog_ns // 2)
        elif terms.ttft_ns:  # `Promise.on`, without a struct for each request.
            due_ns = max(terms.ttft_ns, round(IDLE_FACTOR * load.idle_ttft_ns))
            start_by_ns = terms.wait_ns
            if self._refused and terms.is_protected:
                refused = self._refused.get((load.route, terms.band), 0.0)
                start_by_ns = round((PROTECTED_SHARE - CROWDED_SHARE * refused) * terms.ttft_ns)
            if not load.is_late:
                # By its own promise only where it is next: else long prompts would crowd out short ones.
                quiet_ns = terms.quiet_wait_ns if load.requests_ahead else round(QUIET_SHARE * due_ns)
                spare_ns = due_ns - load.start_ns - load.backlog_ns // 2
                start_by_ns = max(start_by_ns, min(spare_ns, quiet_ns))
        else:
            return 0, 0, queue_wait_max_ns
        start_by_ns = max(1, start_by_ns)
        wait_max_ns = start_by_ns if terms.is_protected else max(1, round(LET_IN_SHARE * start_by_ns))
        assert 0 < wait_max_ns <= start_by_ns, "who waits as long as may be starts in time"
        return due_ns, start_by_ns, _least(wait_max_ns, queue_wait_max_ns)

    def _terms_of(self, tenant: Tenant) -> _Terms:
        found = self._terms.get((tenant.band, tenant.tier))
        if found is None:
            found = self._terms[tenant.band, tenant.tier] = self._made_terms(tenant)
        return found

    def _made_terms(self, tenant: Tenant) -> _Terms:
        band = tenant.band if tenant.band in self._timeouts else self._default
        is_protected = band in self._protected
        ttft_ns = self._promises.of(tier=tenant.tier, band=band).ttft_ns
        share = PROTECTED_SHARE if is_protected else QUEUE_SHARE
        times = round(share * ttft_ns), round(QUIET_SHARE * ttft_ns)
        return _Terms(band, is_protected, self._timeouts[band], ttft_ns, *times)

    def _degrade_of(self, facts: RequestFacts) -> Degrade:
        """The mode in effect; "never" where there is no fallback."""
        return effective_degrade(facts.degrade, facts.tenant) if facts.route in self._chains else "never"

    def _first_that_fits(self, facts: RequestFacts, look: Look) -> RouteLoad | None:
        fallbacks = self._fallbacks(facts, look)
        return next((each for each in fallbacks if isinstance(self._judge(facts, each), Pass)), None)

    def _fallbacks(self, facts: RequestFacts, look: Look) -> Iterator[RouteLoad]:
        """The chain of smaller models, where the request may be sent on: without those that cannot do what it
        needs, that it does not fit, or that have no worker to use.
        """
        if self._degrade_of(facts) == "never":
            return
        tried = facts.requested_model if facts.diverted else None
        tokens = facts.context_tokens or facts.prompt_tokens
        for model in self._chain_for(facts.tenant, facts.route, needs_tools=facts.needs_tools):
            served = self._facts(model) if model != tried else None
            if served is None or not served.can_serve(facts.adapter, facts.needs):
                continue
            if not served.max_model_len or tokens <= served.max_model_len:
                load = look(model)
                if load.ready > 0 and (load.trouble is None or not load.trouble.why):
                    yield load

    def _chain_for(self, tenant: Tenant, model: str, *, needs_tools: bool) -> Iterator[str]:
        """The model's fallbacks in order: those that the tenant may use, and that have its tools and may have
        its data.
        """
        for name in self._chains.get(model, ()):
            route = self._routes.get(name)
            if (route is None or route.tools or not needs_tools) and may_use_model(tenant, name):
                yield name

    def _chain(self, model: str) -> tuple[str, ...]:
        """Its fallbacks, in order, as far as they may have its data; tenants may use fewer."""
        found, data = list[str](), self._data(model)
        for _ in range(len(self._routes)):
            route = self._routes.get(model)
            if route is None or not route.fallback:
                break
            model = route.fallback
            if data <= self._data(model):
                found.append(model)
        return tuple(found)

    def _data(self, model: str) -> frozenset[str]:
        route = self._routes.get(model)
        return frozenset(route.data) if route else frozenset()

    def _cheaper(
        self, now_ns: int, facts: RequestFacts, look: Look, thrift: BudgetDowngrade
    ) -> Diverted | None:
        """A fallback that costs less and answers in time, if its tenant is to save."""
        is_cheaper = thrift.cheaper_for(now_ns, facts)
        if is_cheaper is None:
            return None
        for found in self._fallbacks(facts, look):
            if is_cheaper(found.route) and isinstance(self._judge(facts, found), Pass):
                return Diverted(facts.id, found.route, "budget")
        return None

    def _much_sooner(self, facts: RequestFacts, load: RouteLoad, look: Look) -> Diverted | None:
        """A fallback that answers in a fraction of the time: only where both times are known."""
        mine_ns = load.wait_ns + load.start_ns
        limit_ns = min(mine_ns * PREFER_FRACTION, mine_ns - PREFER_SAVES_MS * NS_PER_MS)
        for found in self._fallbacks(facts, look):
            if not found.is_full and 0 < found.wait_ns + found.start_ns <= limit_ns:
                return Diverted(facts.id, found.route, "slo")
        return None

    def _in_trouble(
        self, now_ns: int, facts: RequestFacts, load: RouteLoad, look: Look, trouble: RouteTrouble
    ) -> Diverted | Refused | None:
        """None of its workers may be used. None: it is let in all the same, if it would be otherwise."""
        assert trouble.why, "most is not all"
        if other := self.elsewhere(now_ns, facts, look):
            return Diverted(facts.id, other, trouble.why)
        wait_max_ns, back_ns = self._times(facts, load)[2], max(1, trouble.back_ns - now_ns)
        if trouble.why == "busy" and 0 < wait_max_ns < back_ns:
            return _refused(facts, "busy", back_ns)
        return None

    def _asleep(
        self, facts: RequestFacts, load: RouteLoad, look: Look, degrade: Degrade
    ) -> Pass | Diverted | Refused:
        """A request for this model waits until it is awake, unless it says itself how long it waits: promises
        are those of models that are awake.
        """
        due_ns, expected_ns = facts.first_token_ns, load.wake_ns + load.start_ns
        is_late = 0 < due_ns < expected_ns
        if (is_late or degrade == "prefer") and (found := self._first_that_fits(facts, look)) is not None:
            return Diverted(facts.id, found.route, "unavailable")
        return _refused(facts, "asleep", load.wake_ns) if is_late else Pass(expected_ns, due_ns)

    def _without_worker(self, facts: RequestFacts, load: RouteLoad, look: Look) -> Pass | Diverted | Refused:
        waits = self._waits_for_worker and not load.is_full
        if waits and self._terms_of(facts.tenant).is_protected:
            return _AT_ONCE
        if (found := self._first_that_fits(facts, look)) is not None:
            return Diverted(facts.id, found.route, "unavailable")
        if waits:
            return _AT_ONCE
        return Refused(
            facts.id, "admission", WorkerUnavailable(f"The model '{facts.route}' has no worker now.")
        )

    def _shed(self, now_ns: int, facts: RequestFacts, load: RouteLoad, verdict: _Unfit) -> Refused:
        terms = self._terms_of(facts.tenant)
        if terms.is_protected:
            self._count(facts.route, terms.band, refused=1.0)
        each_ns = load.each_ns or round(RETRY_AFTER_DEFAULT_S * NS_PER_S)
        wait_ns = max(each_ns, load.wait_ns - verdict.wait_max_ns)
        at_ns = self._comebacks.book(now_ns, (load.route, facts.tenant.id), wait_ns, each_ns)
        assert at_ns > now_ns, "who is turned away is to come later"
        return _refused(facts, verdict.why, at_ns - now_ns)

    def _count(self, route: str, band: str, *, refused: float) -> None:
        before = self._refused.get((route, band), 0.0)
        self._refused[route, band] = before + (refused - before) / _REFUSED


def effective_degrade(asked: Degrade | None, tenant: Tenant) -> Degrade:
    """The mode in effect: the request's word before the tenant's default, but a tenant's `never` is a promise
    to keep.
    """
    return tenant.degrade if asked is None or tenant.degrade == "never" else asked


def _least(one: int, other: int) -> int:
    """The smaller bound; 0 is none."""
    return min(one, other) if one and other else one or other


def _refused(facts: RequestFacts, why: _ShedReason, retry_after_ns: int) -> Refused:
    """Come back then."""
    seconds = retry_after_ns / NS_PER_S
    error = Overloaded(
        f"The model '{facts.route}' is busy: {_WHY[why]}. Try again in {max(1, math.ceil(seconds))} s.",
        retry_after_s=seconds,
    )
    return Refused(facts.id, "admission", error)

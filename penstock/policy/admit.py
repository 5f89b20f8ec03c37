"""Whether a request is let in, sent to a smaller model, or turned away: decided once, when it comes.

| the requested model | protected band | other bands, degrade allowed | other bands, never |
|---|---|---|---|
| starts it at once, or in time | admit | admit (`prefer`: divert if much sooner) | admit |
| too late, by a good prediction | divert if allowed, else 429 | divert, else 429 | 429 |
| no good prediction, more than 10 wait per replica | admit: it waits | divert, else 429 | 429 |
| its queue is full | divert if allowed, else 429 | divert, else 429 | 429 |
| costs more than a fallback that would start it in time, and the budget nears its end | divert if allowed, else as above | divert | as above |
| has no worker | wait if the queue does, else divert, else 503 | divert, else as the queue does | as the queue does |

"In time" is the band's and tier's target, the request's own bound and the queue's. Protected bands have no target unless one
names them. A refusal says when to come back: when the queue will have drained so far that such a request fits.

Pure and deterministic; the facts are handed in, and a fallback's are asked for only when it comes into question.
"""

from typing import Literal

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig, ModelRoute, TtftTarget
from penstock.policy.admit_facts import Admit, AdmitFacts, Candidate, Decision, Divert, Shed
from penstock.policy.comeback import ComebackTimes
from penstock.policy.tenant import Degrade, Tenant
from penstock.policy.tenant_limits import may_use_model
from penstock.policy.wait_time import Prediction, WaitModels

_AT_ONCE = Admit()


class _Verdict(msgspec.Struct, frozen=True):
    """Whether one model would do."""

    fits: bool
    why: Literal["queue_depth", "slo", "queue_full"] = "slo"
    prediction: Prediction | None = None
    """If it is good."""
    limit_ns: int = 0
    """What the prediction was held against; 0: nothing."""


class Admission:
    """Decides, and remembers two things: who is being turned away now, and when whoever was is to come back."""

    __slots__ = ("_config", "_is_over", "_promises", "_routes", "_targets", "_waits")

    def __init__(self, config: AdmissionConfig, routes: tuple[ModelRoute, ...], waits: WaitModels) -> None:
        """`routes` without loops: the configuration is checked for them."""
        self._config, self._waits = config, waits
        self._routes = {route.model: route for route in routes}
        self._targets = {(target.band, target.tier): _target_ns(target) for target in config.targets}
        self._is_over: set[tuple[str, str]] = set()  # (model, band) that turn requests away.
        self._promises = ComebackTimes(
            wait_ns_max=round(config.retry_after_max_s * NS_PER_S), kept=config.retries_kept
        )

    def decide(self, now_ns: int, facts: AdmitFacts) -> Decision:
        """Admit, divert or shed. O(1) where the request starts at once, else O(fallbacks)."""
        route = facts.requested
        may_divert = _degrade_of(facts) != "never"
        if not route.ready:
            return self._without_worker(facts, may_divert=may_divert)
        if facts.is_cheaper is not None and may_divert:
            for found in self._fallbacks(facts):
                if facts.is_cheaper(found.model) and self._judge(facts, found).fits:
                    return Divert(found.model, "budget")
        verdict = self._judge(facts, route)
        if not verdict.fits:
            why = "slo" if verdict.why == "slo" else "queue_depth"
            found = self._first_that_fits(facts) if may_divert else None
            return Divert(found.model, why) if found else self._shed(now_ns, facts, verdict)
        if facts.tried:  # It was sent here, and here it fits: no further down for anything else.
            may_divert = False
        if may_divert and _degrade_of(facts) == "prefer" and (sooner := self._much_sooner(facts, verdict)):
            return sooner
        return Admit(verdict.prediction.ttft_ns) if verdict.prediction else _AT_ONCE

    def _judge(self, facts: AdmitFacts, route: Candidate) -> _Verdict:
        load = route.load
        if route.is_full:
            prediction = self._known(facts, route)
            limit_ns = self._limit(facts, prediction) if prediction else 0
            return _Verdict(fits=False, why="queue_full", prediction=prediction, limit_ns=limit_ns)
        if not load.tokens_ahead and not load.num_to_end:
            # Nothing is ahead of it: turning it away would gain nobody anything.
            self._is_over.discard((route.model, facts.band))
            return _Verdict(fits=True)
        prediction = self._known(facts, route)
        if prediction is None:
            return self._judge_by_depth(facts, route)
        return self._judge_by_time(facts, route, prediction)

    def _judge_by_time(self, facts: AdmitFacts, route: Candidate, prediction: Prediction) -> _Verdict:
        """Against the target, or a part of it while requests are being turned away, so that decisions do not flap."""
        limit_ns = self._limit(facts, prediction)
        key = (route.model, facts.band)
        share = self._config.exit_fraction if key in self._is_over else 1.0
        fits = not limit_ns or prediction.promise_ns <= limit_ns * share
        if fits:
            self._is_over.discard(key)
        elif prediction.prefill_ns < limit_ns:
            self._is_over.add(key)  # The wait is too long, and not only this prompt.
        return _Verdict(fits=fits, prediction=prediction, limit_ns=limit_ns)

    def _judge_by_depth(self, facts: AdmitFacts, route: Candidate) -> _Verdict:
        """The rule for when nothing better is known: protected bands wait, others only behind few."""
        if facts.is_protected:
            return _Verdict(fits=True)
        key = (route.model, facts.band)
        most = self._config.waiting_per_replica_max * route.ready
        # What workers have room for starts in this same turn: a burst on an idle model is no queue. And what would go
        # behind this request is none for it: one tenant's backlog must not turn the others away.
        ahead = min(route.waiting, route.load.requests_ahead)
        waiting = ahead - max(0, route.load.slots - route.load.running)
        fits = waiting <= (most * self._config.exit_fraction if key in self._is_over else most)
        if fits:
            self._is_over.discard(key)
        else:
            self._is_over.add(key)
        return _Verdict(fits=fits, why="queue_depth")

    def _limit(self, facts: AdmitFacts, prediction: Prediction) -> int:
        """The longest TTFT that fits, in nanoseconds; 0: any."""
        limit_ns = self.wanted_ns(facts)
        if facts.queue_wait_max_ns:
            limit_ns = _least(limit_ns, facts.queue_wait_max_ns + prediction.prefill_ns)
        return limit_ns

    def wanted_ns(self, facts: AdmitFacts) -> int:
        """By when after its arrival a request's first token is wanted: by its client, or by the promise to its tier and band. 0: at no
        certain time.
        """
        return _least(self._target(facts), facts.max_wait_ns)

    def _known(self, facts: AdmitFacts, route: Candidate) -> Prediction | None:
        """A prediction that is good enough: for a promise, which has a margin, or else by itself. Where nothing is promised a
        poor one would only let the queue grow to its bound.
        """
        found = self._waits.of(route.model).predict(route.load)
        has_promise = found.may_promise and (self._target(facts) or facts.max_wait_ns)
        return found if found.is_known or has_promise else None

    def _first_that_fits(self, facts: AdmitFacts) -> Candidate | None:
        return next((found for found in self._fallbacks(facts) if self._judge(facts, found).fits), None)

    def _fallbacks(self, facts: AdmitFacts) -> list[Candidate]:
        """The chain of smaller models, without those that cannot do what the request needs."""
        found: list[Candidate] = []
        for model in self.chain(facts.tenant, facts.requested.model, needs_tools=facts.needs_tools):
            candidate = facts.candidate(model) if model not in facts.tried else None
            if candidate is not None and candidate.ready and _holds(candidate):
                found.append(candidate)
        return found

    def chain(self, tenant: Tenant, model: str, *, needs_tools: bool) -> list[str]:
        """The model's fallbacks in order: those that the tenant may use, and that have its tools and may have its data."""
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

    def _much_sooner(self, facts: AdmitFacts, verdict: _Verdict) -> Divert | None:
        """A fallback that answers in a fraction of the time: only where both times are known."""
        if verdict.prediction is None:
            return None
        mine_ns = verdict.prediction.ttft_ns
        most_ns = min(
            mine_ns * self._config.prefer_fraction, mine_ns - self._config.prefer_saves_ms * NS_PER_MS
        )
        for candidate in self._fallbacks(facts):
            theirs = self._known(facts, candidate)
            if not candidate.is_full and theirs is not None and theirs.ttft_ns <= most_ns:
                return Divert(candidate.model, "slo")
        return None

    def _without_worker(self, facts: AdmitFacts, *, may_divert: bool) -> Decision:
        if facts.waits_for_worker and facts.is_protected and not facts.requested.is_full:
            return _AT_ONCE
        if may_divert and (found := self._first_that_fits(facts)):
            return Divert(found.model, "unavailable")
        if facts.waits_for_worker and not facts.requested.is_full:
            return _AT_ONCE
        return Shed(503, round(self._config.retry_after_default_s * NS_PER_S), "no_worker")

    def _shed(self, now_ns: int, facts: AdmitFacts, verdict: _Verdict) -> Shed:
        route = facts.requested
        model = self._waits.of(route.model)
        if (known := verdict.prediction) is not None:
            each_ns, late_ns = model.added_ns(route.load), 0
            if verdict.limit_ns:
                late_ns = known.wait_ns - max(0, round(verdict.limit_ns / known.margin) - known.prefill_ns)
            wait_ns = max(0, late_ns, each_ns if verdict.why == "queue_full" else 0)
        else:
            each_ns = model.service_ns // max(route.load.slots, 1)
            most = self._config.waiting_per_replica_max * route.ready
            wait_ns = each_ns * max(1, route.waiting - most)
        if not wait_ns:
            wait_ns = each_ns or round(self._config.retry_after_default_s * NS_PER_S)
        at_ns = self._promises.book(now_ns, (route.model, facts.tenant.id), wait_ns, each_ns)
        return Shed(429, at_ns - now_ns, verdict.why)

    def _target(self, facts: AdmitFacts) -> int:
        """The promise to this band and tier, in nanoseconds; 0: none."""
        tier = facts.tenant.tier
        for key in ((facts.band, tier), ("", tier), (facts.band, "")):
            if key != ("", "") and (found := self._targets.get(key)) is not None:
                return found
        return 0 if facts.is_protected else round(self._config.ttft_target_ms * NS_PER_MS)


def effective_degrade(asked: Degrade | None, tenant: Tenant) -> Degrade:
    """What counts: the request's word before the tenant's default, but a tenant's `never` is a promise to keep."""
    return tenant.degrade if asked is None or tenant.degrade == "never" else asked


def _degrade_of(facts: AdmitFacts) -> Degrade:
    return effective_degrade(facts.degrade, facts.tenant)


def _holds(candidate: Candidate) -> bool:
    """Whether the request fits the model's context and finds its adapter."""
    fits = not candidate.max_model_len or candidate.context_tokens <= candidate.max_model_len
    return fits and candidate.can_serve


def _least(one: int, other: int) -> int:
    """The smaller bound; 0 is none."""
    return min(one, other) if one and other else one or other


def _target_ns(target: TtftTarget) -> int:
    return round(target.ttft_ms * NS_PER_MS)

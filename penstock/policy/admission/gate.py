"""Admission as flow control asks for it: the load of routes goes in, and an error with a time to come back
comes out.

    FlowControl.arrive ──> Gate.decide ──> admit.py

`BudgetDowngrade` sends tenants whose budget nears its end to cheaper models, where they allow that, so that
it lasts longer.
"""

import math
from collections.abc import Callable

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.config.routing import AdmissionConfig, RoutingConfig
from penstock.errors import Overloaded, PenstockError, WorkerUnavailable
from penstock.policy.admission.admit import AdmissionControl, effective_degrade
from penstock.policy.admit_facts import Admit, AdmitFacts, Candidate, Divert, Shed
from penstock.policy.contracts import Pass, RouteLoad
from penstock.policy.flow import Diverted, Refused, RequestFacts
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.policy.queueing.fair_queue import default_level, ordered_bands
from penstock.policy.tenant import Degrade, Tenant
from penstock.types import Usage

_CHOSEN = ("", "complexity")
"""A request that was sent on for another reason stays where that put it."""


class BudgetDowngrade:
    """Knows the budgets and the prices."""

    __slots__ = ("_budgets", "_prices")

    def __init__(self, budgets: TenantBudgets, prices: PriceList) -> None:
        self._budgets, self._prices = budgets, prices

    def cheaper_for(self, now_ns: int, facts: RequestFacts) -> Callable[[str], bool] | None:
        """Whether another model would cost less for this request, at its longest; None if its tenant need not
        save.
        """
        tenant = facts.tenant
        if not tenant.has_budget or facts.diverted not in _CHOSEN:
            return None
        if not self._budgets.nears_end(now_ns, tenant):
            return None
        usage = Usage(prompt_tokens=facts.prompt_tokens, completion_tokens=facts.max_tokens * facts.choices)
        cost_max = self._prices.cost_micros(facts.route, usage)
        return lambda model: self._prices.cost_micros(model, usage) < cost_max


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a served model, and the hardware under it."""

    max_model_len: int = 0
    """0: not known."""
    adapters: frozenset[str] = frozenset()
    capabilities: tuple[frozenset[str], ...] = ()
    """Its workers' capabilities beyond plain text, each set once."""
    kinds: tuple[str, ...] = ("",)
    """Kinds of its ready workers, each once."""

    def can_serve(self, adapter: str, needs: frozenset[str]) -> bool:
        """Whether a worker of it has the adapter, and one can do what is needed."""
        has_adapter = not adapter or adapter in self.adapters
        return has_adapter and (not needs or any(needs <= each for each in self.capabilities))


class Gate:
    """`AdmissionControl` behind flow control's contract (`contracts.Admission`)."""

    __slots__ = (
        "_admission",
        "_default",
        "_facts",
        "_protected",
        "_thrift",
        "_timeouts",
        "_waits_for_worker",
    )

    def __init__(
        self,
        admission: AdmissionConfig,
        routing: RoutingConfig,
        queue: QueueConfig,
        facts: Callable[[str], ModelFacts | None],
        thrift: BudgetDowngrade | None = None,
    ) -> None:
        """`facts` tells of a model; None if it is not served.

        `thrift`: tenants whose budget nears its end go to cheaper fallbacks.
        """
        self._thrift = thrift if any(route.fallback for route in routing.models) else None
        self._admission = AdmissionControl(admission, routing.models)
        self._facts = facts
        self._waits_for_worker = queue.no_worker_wait_s > 0
        bands = ordered_bands(queue.bands)
        self._default = bands[default_level(bands)].name
        self._timeouts = {band.name: int(band.timeout_s * NS_PER_S) for band in bands}
        self._protected = {band.name for band in bands if band.protected}

    def decide(
        self, now_ns: int, facts: RequestFacts, look: Callable[[str], RouteLoad]
    ) -> Pass | Diverted | Refused:
        """Let it in, send it on, or turn it away."""
        admit_facts = self._admit_facts(now_ns, facts, look)
        decision = self._admission.decide(now_ns, admit_facts)
        if isinstance(decision, Admit):
            start_by_ns = decision.start_by_ns if admit_facts.requested.ready else 0
            return Pass(decision.predicted_ns, decision.first_token_ns, start_by_ns, decision.is_strict)
        if isinstance(decision, Divert):
            return Diverted(facts.id, decision.model, decision.why)
        return Refused(facts.id, "admission", _error(decision, facts.route))

    def refuses_any(
        self, now_ns: int, facts: RequestFacts, look: Callable[[str], RouteLoad]
    ) -> Refused | None:
        """See `contracts.Admission`."""
        shed = self._admission.refuses_any(now_ns, self._admit_facts(now_ns, facts, look))
        return None if shed is None else Refused(facts.id, "admission", _error(shed, facts.route))

    def elsewhere(self, now_ns: int, facts: RequestFacts, look: Callable[[str], RouteLoad]) -> str:
        """See `contracts.Admission`."""
        return self._admission.elsewhere(self._admit_facts(now_ns, facts, look))

    def _admit_facts(self, now_ns: int, facts: RequestFacts, look: Callable[[str], RouteLoad]) -> AdmitFacts:
        band = self._band(facts.tenant.band)
        requested = self._candidate(now_ns, facts, facts.route, look)
        assert requested is not None, f"{facts.route} is not served"
        return AdmitFacts(
            tenant=facts.tenant,
            requested=requested,
            band=band,
            is_protected=band in self._protected,
            degrade=facts.degrade,
            max_wait_ns=facts.first_token_ns,
            queue_wait_max_ns=facts.max_wait_ns or self._timeouts[band],
            needs_tools=facts.needs_tools,
            waits_for_worker=self._waits_for_worker,
            tried=frozenset((facts.requested_model,)) if facts.diverted else frozenset(),
            is_cheaper=self._thrift and self._thrift.cheaper_for(now_ns, facts),
            candidate=lambda model: self._candidate(now_ns, facts, model, look),
        )

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

        return [m for m in self._admission.chain(tenant, route, needs_tools=needs_tools) if is_longer(m)]

    def _band(self, name: str) -> str:
        """The band that the queue would use."""
        return name if name in self._timeouts else self._default

    def _candidate(
        self, now_ns: int, request: RequestFacts, model: str, look: Callable[[str], RouteLoad]
    ) -> Candidate | None:
        facts = self._facts(model)
        if facts is None:
            return None
        route = look(model)
        return Candidate(
            model=model,
            ready=route.ready,
            has_ahead=route.requests_ahead > 0,
            wait_ns=route.wait_ns,
            each_ns=route.each_ns,
            start_ns=route.start_ns,
            idle_ttft_ns=route.idle_ttft_ns,
            backlog_ns=route.backlog_ns,
            is_late=route.is_late,
            context_tokens=request.context_tokens or request.prompt_tokens,
            max_model_len=facts.max_model_len,
            can_serve=facts.can_serve(request.adapter, request.needs),
            is_full=route.is_full,
            trouble=route.trouble,
            wake_ns=route.wake_ns,
            back_ns=max(1, route.trouble.back_ns - now_ns) if route.trouble is not None else 0,
        )


def _error(shed: Shed, model: str) -> PenstockError:
    seconds = shed.retry_after_ns / NS_PER_S
    if shed.status == 503:
        return WorkerUnavailable(f"The model '{model}' has no worker now.")
    why = {
        "queue_full": "its queue is full",
        "slo": "it could not answer in time",
        "no_worker": "it has no worker",
        "busy": "its workers have no room",
        "asleep": "it is asleep, and could not be woken in time",
    }[shed.why]
    return Overloaded(
        f"The model '{model}' is busy: {why}. Try again in {max(1, math.ceil(seconds))} s.",
        retry_after_s=seconds,
    )

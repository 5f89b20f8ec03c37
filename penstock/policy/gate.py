"""Admission as flow control asks for it: how routes stand goes in, and what came of it is learned from.

    FlowControl.arrive ──> Gate.decide ──> Admission, WaitModels
    the driver ──> worker_started, first_token, stream_ended ──> WaitModels

The gate remembers what each request met when it came, until its first token tells what that led to.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.config.routing import AdmissionConfig, RoutingConfig
from penstock.errors import Overloaded, PenstockError, WorkerUnavailable
from penstock.policy.admit import Admission, effective_degrade
from penstock.policy.admit_facts import Admit, AdmitFacts, Candidate, Divert, Shed
from penstock.policy.answers import Diverted, Refused
from penstock.policy.fair_queue import default_level, ordered_bands
from penstock.policy.flow import Arrival
from penstock.policy.parts import Pass, RouteLoad
from penstock.policy.tenant import Degrade, Tenant
from penstock.policy.thrift import Thrift
from penstock.policy.wait_time import Load, Sample, WaitModels
from penstock.types import RequestId

_REMEMBERED_MAX = 65_536
"""Requests whose first token is waited for; over it the oldest teach nothing."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a served model can hold, and on what it runs."""

    max_model_len: int = 0
    """0: not known."""
    adapters: frozenset[str] = frozenset()
    capabilities: tuple[frozenset[str], ...] = ()
    """What its workers can do beyond plain text, each set once."""
    kinds: tuple[str, ...] = ("",)
    """Kinds of its ready workers, each once."""

    def can_serve(self, adapter: str, needs: frozenset[str]) -> bool:
        """Whether a worker of it has the adapter, and one can do what is needed."""
        has_adapter = not adapter or adapter in self.adapters
        return has_adapter and (not needs or any(needs <= each for each in self.capabilities))


class Gate:
    """`Admission` behind flow control's contract (`parts.Admission`)."""

    __slots__ = (
        "_admission",
        "_by_deadline",
        "_default",
        "_facts",
        "_met",
        "_protected",
        "_thrift",
        "_timeouts",
        "_waits_for_worker",
        "waits",
    )

    def __init__(
        self,
        admission: AdmissionConfig,
        routing: RoutingConfig,
        queue: QueueConfig,
        facts: Callable[[str], ModelFacts | None],
        thrift: Thrift | None = None,
    ) -> None:
        """`facts` tells of a model; None if it is not served. `thrift`: tenants whose budget nears its end go to cheaper fallbacks."""
        self._thrift = thrift if any(route.fallback for route in routing.models) else None
        self.waits = WaitModels(admission)
        self._admission = Admission(admission, routing.models, self.waits)
        self._facts = facts
        self._waits_for_worker = queue.no_worker == "wait"
        bands = ordered_bands(queue.bands)
        self._default = bands[default_level(bands)].name
        self._timeouts = {band.name: int(band.timeout_s * NS_PER_S) for band in queue.bands}
        self._protected = {band.name for band in queue.bands if band.protected}
        self._by_deadline = {band.name for band in queue.bands if band.discipline == "deadline"}
        self._met: OrderedDict[RequestId, tuple[Load, int]] = OrderedDict()

    def decide(
        self, now_ns: int, arrival: Arrival, look: Callable[[str], RouteLoad]
    ) -> Pass | Diverted | Refused:
        """Let it in, send it on, or turn it away."""
        band = self._band(arrival.tenant.band)
        requested = self._candidate(arrival, arrival.route, look)
        assert requested is not None, f"{arrival.route} is not served"
        facts = AdmitFacts(
            tenant=arrival.tenant,
            requested=requested,
            band=band,
            is_protected=band in self._protected,
            degrade=arrival.degrade,
            max_wait_ns=arrival.first_token_ns,
            queue_wait_max_ns=arrival.max_wait_ns or self._timeouts[band],
            needs_tools=arrival.needs_tools,
            waits_for_worker=self._waits_for_worker,
            tried=frozenset((arrival.requested_model,)) if arrival.diverted else frozenset(),
            is_cheaper=self._thrift and self._thrift.cheaper_for(now_ns, arrival),
            candidate=lambda model: self._candidate(arrival, model, look),
        )
        decision = self._admission.decide(now_ns, facts)
        if isinstance(decision, Admit):
            self._remember(arrival.id, requested.load, decision.predicted_ns)
            if band not in self._by_deadline:
                return Pass(decision.predicted_ns)
            return Pass(decision.predicted_ns, self._admission.wanted_ns(facts))
        if isinstance(decision, Divert):
            return Diverted(arrival.id, decision.model, decision.why)
        return Refused(arrival.id, "admission", _error(decision, arrival.route))

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
        """Fallbacks of a model that a request did not fit: those with a longer context that may answer it, in order. None if it may not be
        answered by another one.
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

    def worker_started(self, route: str, worker: str) -> None:
        """A worker has become ready (again): what it does next is not learned from."""
        self.waits.of(route).worker_started(worker)

    def first_token(
        self,
        now_ns: int,
        request_id: RequestId,
        *,
        route: str,
        worker: str,
        ttft_ns: int,
        kind: str = "",
        cached_tokens: int | None = None,
        prefill_ns: int = 0,
    ) -> float | None:
        """A request's first token came `ttft_ns` after its arrival. Learn from it; returns the prediction's relative error.

        `cached_tokens` and `prefill_ns` are the engine's own words, if it has any. A request that was tried on several
        workers teaches nothing: whoever drives this leaves it out.
        """
        met = self._met.pop(request_id, None)
        if met is None:
            return None
        load, predicted_ns = met
        if cached_tokens is not None:
            load = msgspec.structs.replace(load, cached_tokens=min(cached_tokens, load.prompt_tokens))
        return self.waits.of(route).observe(
            Sample(
                load=load,
                kind=kind,
                worker=worker,
                at_ns=now_ns,
                ttft_ns=ttft_ns,
                prefill_ns=prefill_ns,
                predicted_ns=predicted_ns,
            )
        )

    def stream_ended(self, request_id: RequestId, *, route: str, worker: str, service_ns: int) -> None:
        """A request holds nothing of its worker any more, `service_ns` after it was started there (0: it never was)."""
        self._met.pop(request_id, None)
        self.waits.of(route).stream_ended(worker, service_ns)

    def calibration(self) -> Mapping[str, float | None]:
        """P90 of the relative error by route; None while it is unknown."""
        return self.waits.calibration()

    def _band(self, name: str) -> str:
        """The band that the queue would use."""
        return name if name in self._timeouts else self._default

    def _candidate(self, arrival: Arrival, model: str, look: Callable[[str], RouteLoad]) -> Candidate | None:
        facts = self._facts(model)
        if facts is None:
            return None
        route = look(model)
        load = Load(
            prompt_tokens=arrival.prompt_tokens,
            # Another model's cache holds other blocks.
            cached_tokens=arrival.cached_tokens if model == arrival.route else 0,
            tokens_ahead=route.tokens_ahead,
            requests_ahead=route.requests_ahead,
            running=route.running,
            slots=max(route.slots, 1),
            has_kv_room=route.has_kv_room,
            replicas=max(route.ready, 1),
            kinds=facts.kinds,
        )
        return Candidate(
            model=model,
            ready=route.ready,
            waiting=route.waiting,
            load=load,
            context_tokens=arrival.context_tokens or arrival.prompt_tokens,
            max_model_len=facts.max_model_len,
            can_serve=facts.can_serve(arrival.adapter, arrival.needs),
            is_full=route.is_full,
        )

    def _remember(self, request_id: RequestId, load: Load, predicted_ns: int) -> None:
        self._met[request_id] = (load, predicted_ns)
        if len(self._met) > _REMEMBERED_MAX:
            self._met.popitem(last=False)


def _error(shed: Shed, model: str) -> PenstockError:
    seconds = shed.retry_after_ns / NS_PER_S
    if shed.status == 503:
        return WorkerUnavailable(f"The model '{model}' has no worker now.")
    why = {
        "queue_full": "its queue is full",
        "queue_depth": "too many requests wait for it",
        "slo": "it could not answer in time",
        "no_worker": "it has no worker",
    }[shed.why]
    return Overloaded(
        f"The model '{model}' is busy: {why}. Try again in {max(1, math.ceil(seconds))} s.",
        retry_after_s=seconds,
    )

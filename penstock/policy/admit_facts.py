"""What admission is told of a request and of the models that could answer it, and what it says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.policy.tenant import Degrade, Tenant
from penstock.policy.wait_time import Load

DowngradeReason = Literal["queue_depth", "slo", "budget", "context", "complexity", "unavailable"]
"""Why another model answers. `budget`: the tenant has used most of its money, and the other one is cheaper; `context`: the request does not fit
the model; `complexity` is the choice of `model: "auto"`; `unavailable`: the model has no worker."""
ShedReason = Literal["queue_depth", "slo", "queue_full", "no_worker"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A model route as it stands, for one request. The tokens in `load` are the request's by this model's tokenizer."""

    model: str
    ready: int
    """Ready replicas."""
    waiting: int
    """Requests that wait on the route, in the gateway and at its workers."""
    load: Load
    context_tokens: int = 0
    """Prompt and answer, by this model's tokenizer."""
    max_model_len: int = 0
    """0: not known."""
    can_serve: bool = True
    """Whether it has the adapter that the request names, if it names one."""
    is_full: bool = False
    """The queue would refuse this request."""


class AdmitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One request and what it meets."""

    tenant: Tenant
    requested: Candidate
    band: str = "default"
    is_protected: bool = False
    """The band waits rather than be degraded."""
    degrade: Degrade | None = None
    """What the request's header says."""
    max_wait_ns: int = 0
    """The longest that the client waits for its first token; 0: it does not say."""
    queue_wait_max_ns: int = 0
    """The longest that the queue keeps it; 0: no bound."""
    needs_tools: bool = False
    waits_for_worker: bool = False
    """The queue keeps requests of a model that has no worker."""
    tried: frozenset[str] = frozenset()
    """Models that have sent this request on already."""
    is_cheaper: Callable[[str], bool] | None = None
    """Set if the tenant is to be sent to a cheaper model where it allows that: whether a fallback is one."""
    candidate: Callable[[str], Candidate | None] = lambda model: None
    """The facts of a fallback; None if it is not served."""


@dataclass(slots=True, frozen=True)
class Admit:
    """Let it in: to the queue."""

    predicted_ns: int = 0
    """Its TTFT by a prediction that is good; 0 if there is none, or none was needed."""


@dataclass(slots=True, frozen=True)
class Divert:
    """Let it arrive again, at another model. Nothing is booked."""

    model: str
    why: DowngradeReason


@dataclass(slots=True, frozen=True)
class Shed:
    """Turn it away: 429 is "come back then", 503 "nobody is here to answer"."""

    status: Literal[429, 503]
    retry_after_ns: int
    why: ShedReason


Decision = Admit | Divert | Shed

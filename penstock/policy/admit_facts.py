"""Admission's facts of a request and of the models that could answer it, and its answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.policy.tenant import Degrade, Tenant

DowngradeReason = Literal[
    "queue_depth",
    "slo",
    "budget",
    "context",
    "complexity",
    "unavailable",
    "failure",
    "timeout",
    "breaker",
    "busy",
]
"""Why another model answers. `budget`: the tenant has used most of its money, and the other one is cheaper;
`context`: the request does not fit the model; `complexity` is the choice of `model: "auto"`; `unavailable`:
the model has no worker; `failure`, `timeout`: it was tried there, and failed or gave nothing in time;
`breaker`, `busy`: its workers are left alone, since they fail or are slow, or have said that they have no
room."""
ShedReason = Literal["slo", "queue_full", "no_worker", "busy", "asleep"]


class RouteTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """Most of a model's ready workers may not be used now."""

    why: Literal["", "breaker", "busy"] = ""
    """Why none may; empty: some still may."""
    since_ns: int = 0
    """Since when none may."""
    back_ns: int = 0
    """When the first of those that have no room may be used again; 0: there are none."""
    is_panic: bool = False
    """More than half failed, so that the panic rule would use them all."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A model route as it stands, for one request. Times of 0 are not known."""

    model: str
    ready: int
    """Ready replicas."""
    has_ahead: bool = False
    """Whether anything that waits there goes before it."""
    wait_ns: int = 0
    """How long it would wait for its start."""
    each_ns: int = 0
    """By how much one more request before it would prolong that."""
    start_ns: int = 0
    """From there to its first token, as nine of ten such requests take."""
    idle_ttft_ns: int = 0
    """The time to its first token on an idle worker."""
    backlog_ns: int = 0
    """The time that its worker may still be busy when it starts."""
    is_late: bool = False
    """Whether a request left its queue a short while ago because its start would have been too late."""
    context_tokens: int = 0
    """Prompt and answer, by this model's tokenizer."""
    max_model_len: int = 0
    """0: not known."""
    can_serve: bool = True
    """Whether it has the adapter that the request names, if it names one."""
    is_full: bool = False
    """The queue would refuse this request."""
    trouble: RouteTrouble | None = None
    """The fault of its workers, if most of them may not be used."""
    wake_ns: int = 0
    """It is asleep, and waking takes so long; 0: it is not."""
    back_ns: int = 0
    """How long it takes until the first of its workers that have no room may be used again."""


class AdmitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One request and what it meets."""

    tenant: Tenant
    requested: Candidate
    band: str = "default"
    is_protected: bool = False
    """The band waits rather than be degraded."""
    degrade: Degrade | None = None
    """The value of the request's header."""
    max_wait_ns: int = 0
    """The longest that the client waits for its first token: goes before what is promised. 0: it does not
    say."""
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


class Admit(msgspec.Struct, frozen=True, gc=False):
    """Let it in: to the queue."""

    predicted_ns: int = 0
    """Its expected time to first token; 0: not known, or nothing is ahead of it."""
    first_token_ns: int = 0
    """By when after its arrival its first token is due; 0: at no certain time."""
    start_by_ns: int = 0
    """How long after its arrival a start is too late for that; 0: never."""
    is_strict: bool = False
    """It is given to no worker that its breaker leaves alone: rather another model answers."""


@dataclass(slots=True, frozen=True)
class Divert:
    """Let it arrive again, at another model. Nothing is booked."""

    model: str
    why: DowngradeReason


@dataclass(slots=True, frozen=True)
class Shed:
    """Turn it away: 429 is "come back then", 503 "no worker is here to answer"."""

    status: Literal[429, 503]
    retry_after_ns: int
    why: ShedReason


Decision = Admit | Divert | Shed

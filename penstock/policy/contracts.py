"""The contracts by which `FlowControl` asks limits, budgets, prices, admission and health: contracts, and
nothing else.

`lifecycle/policies.py` holds one of each. The queue's own contract, of placement, is in
`queueing/capacity.py`.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.policy.flow import Diverted, Refused, RequestFacts
from penstock.policy.tenant import Tenant
from penstock.types import RequestId, TenantId, Usage, WorkerId


class Refusal(Protocol):
    """A limit or a budget that says no."""

    def error(self) -> PenstockError:
        """Why, and when to come back."""
        ...


class TokenHold(Protocol):
    """Tokens reserved for one request. `settle` or `undo`, exactly once."""

    def renew(self, now_ns: int, num_output_tokens: int) -> None:
        """The answer is so long by now."""
        ...

    def settle(self, now_ns: int, actual_tokens: int) -> None:
        """It used so many of prompt and answer."""
        ...

    def undo(self, now_ns: int) -> None:
        """It was refused after all."""
        ...


class Limits(Protocol):
    """Rate limits of tenants: `rate_limit.Limiter`."""

    def reserve(
        self, now_ns: int, tenant: Tenant, prompt_tokens: int, output_tokens: int, *, request_id: str = ""
    ) -> TokenHold | Refusal:
        """Take all that a request is expected to need, or nothing."""
        ...

    def lacks(self, now_ns: int, tenant: Tenant, needed: int) -> bool:
        """Whether a store is asked first for so many tokens. Never waits."""
        ...


class Levels(Protocol):
    """Rate limits of tenants and of their keys and users: `levels.LimitLevels`."""

    def reserve(
        self,
        now_ns: int,
        tenant: Tenant,
        prompt_tokens: int,
        output_tokens: int,
        *,
        key: str = "",
        user: str = "",
        request_id: str = "",
    ) -> TokenHold | Refusal:
        """Take all that a request is expected to need on each level, or nothing."""
        ...

    def lacks(
        self, now_ns: int, tenant: Tenant, prompt_tokens: int, output_tokens: int, *, key: str, user: str
    ) -> bool:
        """Whether a store is asked first for what a request is expected to need. Never waits."""
        ...


class Budgets(Protocol):
    """Money per day and month: `budget.TenantBudgets`. How much a request holds is its own field."""

    def reserve(self, now_ns: int, tenant: Tenant, micros: int) -> Refusal | None:
        """Hold the price of the prompt and the first slice of the answer; None: it is held."""
        ...

    def renew(self, now_ns: int, tenant: TenantId, held: int, total: int) -> bool:
        """Hold `total` in place of `held`, for the next slice; False: the request must stop."""
        ...

    def settle(self, now_ns: int, tenant: TenantId, held: int, actual: int) -> None:
        """A request that holds `held` cost `actual`, or was refused after all: exactly once."""
        ...

    def spend(self, now_ns: int, tenant: TenantId, micros: int) -> None:
        """A request that holds nothing cost so much after all."""
        ...

    def lacks(self, now_ns: int, tenant: Tenant, micros: int) -> bool:
        """Whether a store is asked first for a request of this price. Never waits."""
        ...


class Prices(Protocol):
    """The price of tokens: `price.PriceList`."""

    @property
    def are_any(self) -> bool:
        """Whether anything has a price; if not, none is asked for."""
        ...

    def cost_micros(self, model: str, usage: Usage) -> int:
        """In millionths of the currency."""
        ...


class Lengths(Protocol):
    """How long answers are: `output_length.OutputLengths`."""

    def expect(self, tenant: TenantId, model: str, max_tokens: int) -> int:
        """Tokens of one answer of at most `max_tokens`."""
        ...

    def observe(self, tenant: TenantId, model: str, num_tokens: int) -> None:
        """One answer has ended."""
        ...


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


class RouteLoad(msgspec.Struct, frozen=True, gc=False):
    """How a model stands for a request of one band that would arrive now."""

    route: str
    ready: int
    """Workers."""
    requests_ahead: int
    """Requests in its queue: those in the bands above and, by its tenant's fair share, in its own."""
    is_full: bool
    """Whether the queue would refuse it."""
    wait_ns: int = 0
    """How long it would wait for its start, at the pace at which its band's requests start now; 0 if nothing
    goes before it."""
    each_ns: int = 0
    """Time between two starts of its band."""
    start_ns: int = 0
    """From there to its first token, as nine of ten such requests take; 0: not known."""
    idle_ttft_ns: int = 0
    """The time to its first token on an idle worker; 0: not known."""
    backlog_ns: int = 0
    """The time that a worker's unfinished prompts may take when it is given another; 0: any time."""
    is_late: bool = False
    """Whether a request left its queue a short while ago because its start would have been too late."""
    trouble: RouteTrouble | None = None
    """The fault of its workers, if most of them may not be used."""
    wake_ns: int = 0
    """It is asleep, and waking takes so long; 0: it is not."""


class Pass(msgspec.Struct, frozen=True, gc=False):
    """Let it in."""

    predicted_ns: int = 0
    """Its expected time to first token; 0: not known."""
    first_token_ns: int = 0
    """By when after its arrival its first token is wanted; 0: at no certain time."""
    start_by_ns: int = 0
    """How long after its arrival a start is too late for that; 0: never."""
    is_strict: bool = False
    """It is given to no worker that its breaker leaves alone."""


Look = Callable[[str], RouteLoad]
"""Tells how a model, by its name, stands for one request."""


class Admission(Protocol):
    """Whether a request that would have to wait is let in, sent to another model, or turned away."""

    def decide(self, now_ns: int, facts: RequestFacts, look: Look) -> Pass | Diverted | Refused:
        """`look(route)` tells how a model stands for this request. Nothing is booked yet."""
        ...

    def refuses_any(self, now_ns: int, facts: RequestFacts, look: Look) -> Refused | None:
        """The refusal of a request whose prompt is not known yet, if `decide` would refuse it whatever its
        prompt is; None: make its prompt, then ask.
        """
        ...

    def elsewhere(self, now_ns: int, facts: RequestFacts, look: Look) -> str:
        """Another model that may answer this request in time, since its own cannot; empty: none."""
        ...


class Health(Protocol):
    """Which workers are given nothing for now."""

    def blocked(self, now_ns: int, route: str, *, strict: bool = False) -> frozenset[WorkerId]:
        """Of one model's workers. Of those that failed none rather than most of them, unless `strict`."""
        ...

    def trouble(self, now_ns: int, route: str) -> RouteTrouble | None:
        """The fault if most of a model's ready workers may not be used; None: nothing."""
        ...

    def due_ns(self, route: str) -> int | None:
        """When `blocked` may change by time alone; None if it does not."""
        ...

    def worker(
        self, route: str, worker_id: WorkerId, *, ready: bool | None, is_external: bool = False
    ) -> None:
        """A worker is ready or is not; None: it is gone for good. `is_external`: not our engine."""
        ...

    def started(self, now_ns: int, route: str, worker_id: WorkerId) -> None:
        """An attempt begins there."""
        ...

    def doubt_ns(self, route: str, worker_id: WorkerId) -> int:
        """How long an attempt that begins there now may take, if the worker is in doubt and has no peers to
        judge it by; 0: it is in no doubt.
        """
        ...

    def began(self, now_ns: int, route: str, worker_id: WorkerId, ttft_ns: int) -> None:
        """Its first output came, so long after it was started there."""
        ...

    def ended(self, now_ns: int, route: str, worker_id: WorkerId, error: PenstockError | None) -> None:
        """It ended there: None if it ended well, or its client or this gateway ended it."""
        ...

    def succeeded(self) -> None:
        """A request ended well."""
        ...

    def may_retry(self, now_ns: int) -> bool:
        """Whether one more request may be tried again from its beginning; then it counts."""
        ...

    def can_retry(self, now_ns: int) -> bool:
        """Whether it could; nothing counts."""
        ...


class IsolatedStarts(Protocol):
    """Requests under suspicion, which must start apart from others: `extras.quarantine.CrashQuarantine`."""

    def is_apart(self, request_id: RequestId) -> bool:
        """Whether it is one of them, and has given nothing since."""
        ...

    def barred(self, route: str, request_id: RequestId) -> frozenset[WorkerId]:
        """Workers that it must not be given to now, for the sake of others that start there; empty for all
        that are under no suspicion.
        """
        ...

    def taken(self, route: str) -> frozenset[WorkerId]:
        """Workers where one of them is starting."""
        ...

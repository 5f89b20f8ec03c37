"""What `FlowControl` is made of beside queue and flows: small contracts, and for each the object that sets no
limit.

`Limiter` (rate_limit.py), `OutputLengths`, `Budgets` and `PriceList` fulfil theirs as they are; the admission
does through `policy/admission/gate.py`. Whoever wires a gateway or a simulation chooses.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.policy.admit_facts import RouteTrouble
from penstock.policy.answers import Diverted, Refused
from penstock.policy.extras.hedge import Hedges
from penstock.policy.extras.quarantine import InFlightAtCrash, IsolatedRetry
from penstock.policy.flow import RequestFacts
from penstock.policy.limits.rate_limit import SLICE_TOKENS
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import CapacityTable, WorkerCapacity
from penstock.policy.queueing.pace import Pace
from penstock.policy.tenant import Tenant
from penstock.types import TenantId, Usage, WorkerId


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
    """Rate limits: `rate_limit.Limiter`."""

    def reserve(
        self, now_ns: int, tenant: Tenant, prompt_tokens: int, output_tokens: int, *, request_id: str = ""
    ) -> TokenHold | Refusal:
        """Take all that a request is expected to need, or nothing."""
        ...


class MoneyHold(Protocol):
    """Money reserved for one request. `settle` or `undo`, exactly once."""

    def renew(self, now_ns: int, total_micros: int) -> bool:
        """Hold so much in all for the next slice; False: the request must stop."""
        ...

    def settle(self, now_ns: int, actual_micros: int) -> None:
        """It cost so much."""
        ...

    def undo(self, now_ns: int) -> None:
        """It was refused after all."""
        ...


class Budgets(Protocol):
    """Money per day and month: `budget.Budgets`."""

    def reserve(self, now_ns: int, tenant: Tenant, micros: int) -> MoneyHold | Refusal:
        """Hold the price of the prompt and the first slice of the answer."""
        ...


class Prices(Protocol):
    """What tokens cost: `price.PriceList`."""

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


class RouteLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """What it would take to its first token on an idle worker; 0: not known."""
    backlog_ns: int = 0
    """What a worker's unfinished prompts may take when it is given another; 0: any time."""
    first_ns: int = 0
    """What nine of the last ten requests took from their start to their first token."""
    is_late: bool = False
    """Whether a request left its queue a short while ago because its start would have been too late."""
    trouble: RouteTrouble | None = None
    """What is wrong with its workers, if most of them may not be used."""


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


class Admission(Protocol):
    """Whether a request that would have to wait is let in, sent to another model, or turned away."""

    def decide(
        self, now_ns: int, facts: RequestFacts, look: Callable[[str], RouteLoad]
    ) -> Pass | Diverted | Refused:
        """`look(route)` tells how a model stands for this request. Nothing is booked yet."""
        ...

    def elsewhere(self, now_ns: int, facts: RequestFacts, look: Callable[[str], RouteLoad]) -> str:
        """Another model that may answer this request in time, since its own cannot; empty: none."""
        ...


class Hold(msgspec.Struct, frozen=True, gc=False):
    """It could start elsewhere, but is better off waiting for this worker, until then at most.

    Whoever is behind it goes on.
    """

    worker_id: WorkerId
    until_ns: int


class Placement(Protocol):
    """Which worker of one model a request goes to.

    It is told what became of its choices, and may learn from that.
    """

    def place(
        self,
        now_ns: int,
        work: Work,
        rooms: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | Hold | None:
        """A worker that the request fits on now; None if there is none.

        Never one that is `blocked`; one to `avoid`, where the request failed, only if there is no other. Sets
        `work.matched_tokens`. A request whose `hold_ns` is set was held before and is not held again.
        """
        ...

    def started(self, now_ns: int, work: Work, room: WorkerCapacity) -> None:
        """It was sent there, and is booked in `room`."""
        ...

    def began(self, now_ns: int, work: Work, room: WorkerCapacity) -> None:
        """Its first output came."""
        ...

    def ended(self, now_ns: int, work: Work, room: WorkerCapacity, usage: Usage | None) -> None:
        """It runs there no more, and used so much; None: it failed, or nothing is known."""
        ...


class Health(Protocol):
    """Which workers are given nothing for now."""

    def blocked(self, now_ns: int, route: str, *, strict: bool = False) -> frozenset[WorkerId]:
        """Of one model's workers. Of those that failed none rather than most of them, unless `strict`."""
        ...

    def trouble(self, now_ns: int, route: str) -> RouteTrouble | None:
        """What is wrong if most of a model's ready workers may not be used; None: nothing."""
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


class CrashPolicy(Protocol):
    """Which requests are refused because workers died of them: `quarantine.Quarantine`."""

    def refusal(self, now_ns: int, facts: RequestFacts) -> PenstockError | None:
        """Why it is refused; None if it is not."""
        ...

    def trial(self, now_ns: int, facts: RequestFacts) -> IsolatedRetry | None:
        """How it is started if it is under suspicion; None if it is not."""
        ...

    def died(self, now_ns: int, in_flight_at_crash: Sequence[InFlightAtCrash]) -> None:
        """A worker's process ended, with these requests on it."""
        ...

    def ended_well(self, facts: RequestFacts) -> None:
        """It was none of these."""
        ...


class _NoTokenHold:
    """Holds nothing. One object is enough for all requests."""

    __slots__ = ()

    def renew(self, now_ns: int, num_output_tokens: int) -> None:
        del now_ns, num_output_tokens

    def settle(self, now_ns: int, actual_tokens: int) -> None:
        del now_ns, actual_tokens

    def undo(self, now_ns: int) -> None:
        del now_ns


class _NoMoneyHold:
    """Holds nothing, and is never used up."""

    __slots__ = ()

    def renew(self, now_ns: int, total_micros: int) -> bool:
        del now_ns, total_micros
        return True

    def settle(self, now_ns: int, actual_micros: int) -> None:
        del now_ns, actual_micros

    def undo(self, now_ns: int) -> None:
        del now_ns


_NO_TOKENS, _NO_MONEY = _NoTokenHold(), _NoMoneyHold()
_PASS = Pass()


class NoLimits:
    """Every tenant may use what it likes."""

    __slots__ = ()

    def reserve(
        self, now_ns: int, tenant: Tenant, prompt_tokens: int, output_tokens: int, *, request_id: str = ""
    ) -> TokenHold:
        """Nothing to take it from."""
        del now_ns, tenant, prompt_tokens, output_tokens, request_id
        return _NO_TOKENS


class NoBudgets:
    """Nobody has a budget."""

    __slots__ = ()

    def reserve(self, now_ns: int, tenant: Tenant, micros: int) -> MoneyHold:
        """Nothing to take it from."""
        del now_ns, tenant, micros
        return _NO_MONEY


class Free:
    """A price list on which everything is free."""

    __slots__ = ()

    def cost_micros(self, model: str, usage: Usage) -> int:
        """Nothing."""
        del model, usage
        return 0


class LongestAnswers:
    """Expects every answer to be as long as it may be."""

    __slots__ = ()

    def expect(self, tenant: TenantId, model: str, max_tokens: int) -> int:
        """The longest."""
        del tenant, model
        return max_tokens

    def observe(self, tenant: TenantId, model: str, num_tokens: int) -> None:
        """Nothing is learned."""


class AdmitAll:
    """Lets everything into the queue, whose own bounds remain."""

    __slots__ = ()

    def decide(self, now_ns: int, facts: RequestFacts, look: Callable[[str], RouteLoad]) -> Pass:
        """Yes."""
        del now_ns, facts, look
        return _PASS

    def elsewhere(self, now_ns: int, facts: RequestFacts, look: Callable[[str], RouteLoad]) -> str:
        """Nowhere."""
        del now_ns, facts, look
        return ""


class LeastLoaded:
    """Sends every request to the worker with the most free streams, whatever its cache holds."""

    __slots__ = ()

    def place(
        self,
        now_ns: int,
        work: Work,
        rooms: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | None:
        """The least loaded that it fits on."""
        del now_ns
        return rooms.place(work, avoid, blocked)

    def started(self, now_ns: int, work: Work, room: WorkerCapacity) -> None:
        """Nothing is learned."""

    def began(self, now_ns: int, work: Work, room: WorkerCapacity) -> None:
        """Nothing is learned."""

    def ended(self, now_ns: int, work: Work, room: WorkerCapacity, usage: Usage | None) -> None:
        """Nothing is learned."""


class AllHealthy:
    """Blocks nobody: a worker is used while it says that it is ready."""

    __slots__ = ()

    def blocked(self, now_ns: int, route: str, *, strict: bool = False) -> frozenset[WorkerId]:
        """None."""
        del now_ns, route, strict
        return _NO_WORKERS

    def trouble(self, now_ns: int, route: str) -> None:
        """Nothing."""

    def due_ns(self, route: str) -> None:
        """Never."""

    def worker(
        self, route: str, worker_id: WorkerId, *, ready: bool | None, is_external: bool = False
    ) -> None:
        """Nothing is learned."""

    def started(self, now_ns: int, route: str, worker_id: WorkerId) -> None:
        """Nothing is learned."""

    def began(self, now_ns: int, route: str, worker_id: WorkerId, ttft_ns: int) -> None:
        """Nothing is learned."""

    def ended(self, now_ns: int, route: str, worker_id: WorkerId, error: PenstockError | None) -> None:
        """Nothing is learned."""

    def succeeded(self) -> None:
        """Nothing is learned."""

    def may_retry(self, now_ns: int) -> bool:
        """Yes."""
        del now_ns
        return True


_NO_WORKERS = frozenset[WorkerId]()


def least_loaded(route: str) -> Placement:
    """The same for every model: it remembers nothing."""
    del route
    return _LEAST_LOADED


_LEAST_LOADED = LeastLoaded()


@dataclass(slots=True, frozen=True, kw_only=True)
class Policies:
    """The parts that a `FlowControl` composes."""

    admission: Admission = field(default_factory=AdmitAll)
    limits: Limits = field(default_factory=NoLimits)
    budgets: Budgets = field(default_factory=NoBudgets)
    prices: Prices = field(default_factory=Free)
    lengths: Lengths = field(default_factory=LongestAnswers)
    placement: Callable[[str], Placement] = least_loaded
    """Makes the placement of a model, by its name."""
    health: Health = field(default_factory=AllHealthy)
    poison: CrashPolicy | None = None
    """None: no request is suspected when a worker crashes."""
    pace: Callable[[], Pace] = Pace
    """Makes what learns of one model's workers how fast they are."""
    hedges: Hedges | None = None
    """None: no request is started beside another attempt of itself."""
    slice_tokens: int = SLICE_TOKENS
    """Answer tokens between two looks at the budget."""
    migrations_max: int = 3
    """Workers that one stream may lose and still go on."""

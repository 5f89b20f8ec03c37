"""The policies of one `FlowControl`, each by its contract.

A policy that is left out sets no limit. The wiring of a gateway or a simulation chooses (stack.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.clock import NS_PER_S
from penstock.errors import PenstockError
from penstock.policy.contracts import (
    Admission,
    Budgets,
    Health,
    Lengths,
    Levels,
    Limits,
    Look,
    Pass,
    Prices,
    TokenHold,
)
from penstock.policy.extras.hedging import Hedges
from penstock.policy.extras.quarantine import Quarantine
from penstock.policy.flow import SLICE_TOKENS, RequestFacts
from penstock.policy.placement.pick import least_loaded
from penstock.policy.queueing.capacity import Placement
from penstock.policy.queueing.pace import Pace
from penstock.policy.request import NO_TOKENS
from penstock.policy.tenant import Tenant
from penstock.types import TenantId, Usage, WorkerId

_PASS = Pass()
_NO_WORKERS = frozenset[WorkerId]()


class NoLimits:
    """Every tenant may use what it likes."""

    __slots__ = ()

    def reserve(
        self, now_ns: int, tenant: Tenant, prompt_tokens: int, output_tokens: int, *, request_id: str = ""
    ) -> TokenHold:
        """Nothing to take it from."""
        del now_ns, tenant, prompt_tokens, output_tokens, request_id
        return NO_TOKENS

    def lacks(self, now_ns: int, tenant: Tenant, needed: int) -> bool:
        """Nothing."""
        del now_ns, tenant, needed
        return False


class NoBudgets:
    """No tenant has a budget."""

    __slots__ = ()

    def reserve(self, now_ns: int, tenant: Tenant, micros: int) -> None:
        """There is always enough."""

    def renew(self, now_ns: int, tenant: TenantId, held: int, total: int) -> bool:
        """And more."""
        del now_ns, tenant, held, total
        return True

    def settle(self, now_ns: int, tenant: TenantId, held: int, actual: int) -> None:
        """Nothing is kept of it."""

    def spend(self, now_ns: int, tenant: TenantId, micros: int) -> None:
        """Nor of this."""

    def lacks(self, now_ns: int, tenant: Tenant, micros: int) -> bool:
        """There is no store to ask."""
        del now_ns, tenant, micros
        return False


class Free:
    """A price list on which everything is free."""

    __slots__ = ()
    are_any = False

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

    def decide(self, now_ns: int, facts: RequestFacts, look: Look) -> Pass:
        """Yes."""
        del now_ns, facts, look
        return _PASS

    def refuses_any(self, now_ns: int, facts: RequestFacts, look: Look) -> None:
        """No."""
        del now_ns, facts, look

    def elsewhere(self, now_ns: int, facts: RequestFacts, look: Look) -> str:
        """Nowhere."""
        del now_ns, facts, look
        return ""


class AllHealthy:
    """Blocks no worker: a worker is used while it says that it is ready."""

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

    def doubt_ns(self, route: str, worker_id: WorkerId) -> int:
        """There is no doubt."""
        del route, worker_id
        return 0

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

    def can_retry(self, now_ns: int) -> bool:
        """Yes."""
        del now_ns
        return True


@dataclass(slots=True, frozen=True, kw_only=True)
class Policies:
    """The parts that a `FlowControl` composes."""

    admission: Admission = field(default_factory=AdmitAll)
    limits: Limits = field(default_factory=NoLimits)
    levels: Levels | None = None
    """Asked instead for a tenant whose keys or users have limits; None: no tenant's have."""
    budgets: Budgets = field(default_factory=NoBudgets)
    prices: Prices = field(default_factory=Free)
    lengths: Lengths = field(default_factory=LongestAnswers)
    placement: Callable[[str], Placement] = least_loaded
    """Makes the placement of a model, by its name."""
    health: Health = field(default_factory=AllHealthy)
    poison: Quarantine | None = None
    """None: no request is suspected when a worker crashes."""
    pace: Callable[[], Pace] = Pace
    """Makes what learns of one model's workers how fast they are."""
    hedges: Hedges | None = None
    """None: no request is started beside another attempt of itself."""
    slice_tokens: int = SLICE_TOKENS
    """Answer tokens between two looks at the budget."""
    migrations_max: int = 3
    """Workers that one stream may lose and still continue."""
    first_token_ns: int = 10 * NS_PER_S
    """How long an attempt at an external worker has of which little is known; 0: any time."""

"""What all endpoints share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from penstock.clock import Clock
from penstock.config.tree import Config
from penstock.errors import Draining
from penstock.gateway.api.recent import AllRequests, RecentRequests
from penstock.gateway.dispatch.dispatcher import Dispatcher
from penstock.gateway.dispatch.wake_calls import WakeCalls
from penstock.gateway.dispatch.worker_feed import ColdStarts
from penstock.gateway.models.prepare import TokenizePool
from penstock.gateway.models.served import ModelTable
from penstock.gateway.shared.peers import GatewayPeers
from penstock.kv.index.locality import KVLocality
from penstock.policy.admission.gate import Gate
from penstock.policy.flow import RequestFacts
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.placement.pick import ComplexityChoice, DecisionLog
from penstock.policy.tenant import Tenant
from penstock.rng import IdSource
from penstock.telemetry.audit import Notes
from penstock.telemetry.decision_files import DecisionKeeper
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics


@dataclass(slots=True, kw_only=True)
class Services:
    """Handed to every endpoint."""

    config: Config
    models: ModelTable
    ids: IdSource
    clock: Clock
    tokenize: TokenizePool
    dispatcher: Dispatcher
    gate: Gate
    limiter: Limiter
    ask_store: Callable[[RequestFacts], Awaitable[None]]
    """Asks the store of shared limits for what a request needs and is not on lease here."""
    budgets: TenantBudgets
    metrics: Metrics
    explained: DecisionLog
    """Which worker got which of the last requests, and why; and which model, of those that named none."""
    kept: DecisionKeeper | None
    """The same of the last hour, whichever process decided."""
    recent: RecentRequests = field(init=False)
    """The last requests that ended here."""
    all_requests: AllRequests = field(init=False)
    """And in all gateway processes."""
    peers: GatewayPeers | None = None
    wakes: WakeCalls
    """Wakes models that are asleep."""
    cold: ColdStarts
    """Where requests wait for a model's first worker."""
    locality: KVLocality
    """Where prompts are cached; makes their keys."""
    log: Log
    notes: Notes
    """For the audit trail."""
    leaving: bool = False
    """The server was told to stop: `/ready` says no."""
    draining: bool = False
    """It takes no new requests."""

    def __post_init__(self) -> None:
        self.recent = RecentRequests(self.clock)
        self.all_requests = AllRequests(self.recent, self.clock, self.peers)

    @property
    def falls_back(self) -> bool:
        """Whether any model has another one to fall back to."""
        return any(route.fallback for route in self.config.routing.models)

    def check_draining(self) -> None:
        """Refuse new work once the server is going away.

        Raises:
            Draining: it is.
        """
        if self.draining:
            raise Draining("The server is shutting down.")

    def tell_choice(self, exchange_id: str, tenant: Tenant, choice: ComplexityChoice) -> None:
        """One line about how a model was chosen, where there are lines about requests: `exchange_id` is in
        the access line too.
        """
        if not self.log.tells_requests:
            return
        facts: dict[str, str | float] = {f"part_{name}": round(value, 3) for name, value in choice.parts}
        if choice.passed_over:
            facts["passed_over"] = ",".join(choice.passed_over)
        self.log.info(
            "model chosen",
            request_id=exchange_id,
            tenant=tenant.id,
            tier=tenant.tier,
            model=choice.model,
            complexity=round(choice.complexity, 3),
            **facts,
        )

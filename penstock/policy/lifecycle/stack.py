"""The policies of one gateway, wired from its configuration: by this function for the product and for the
simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.clock import NS_PER_S
from penstock.config.tree import Config
from penstock.policy.admission.admit import AdmissionControl
from penstock.policy.admission.downgrade import BudgetDowngrade
from penstock.policy.contracts import ModelFacts
from penstock.policy.estimates import OutputLengths
from penstock.policy.extras.hedging import Hedges, Tell
from penstock.policy.extras.quarantine import Quarantine
from penstock.policy.flow import SLICE_TOKENS
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.levels import LimitLevels
from penstock.policy.limits.price import PriceList
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.queueing.capacity import Placement
from penstock.policy.queueing.pace import Pace
from penstock.policy.resilience.anomalies import Anomalies
from penstock.policy.resilience.health import FleetHealth
from penstock.policy.terms import queue_terms


@dataclass(slots=True, frozen=True, kw_only=True)
class PolicyStack:
    """The policies for the requests of one gateway."""

    control: FlowControl
    admission: AdmissionControl
    limiter: Limiter
    budgets: TenantBudgets
    prices: PriceList
    health: FleetHealth
    anomalies: Anomalies
    hedges: Hedges | None
    """None: no request is started a second time beside its first attempt."""
    slice_tokens: int
    """Answer tokens between two looks at limits and budgets."""
    shed_kv_above: float
    """Share of a worker's KV memory above which lower bands give way there."""


def build_policies(
    config: Config,
    *,
    facts: Callable[[str], ModelFacts | None],
    placement: Callable[[str], Placement],
    limiter: Limiter,
    leases: Leases | None = None,
    wall_offset_ns: int,
    random: Callable[[], float],
    on_hedge: Tell,
) -> PolicyStack:
    """The policies of `config`.

    `facts` tells of a model, None if it is not served; `placement` makes the placement of a model; `limiter`
    has the tenants' rate limits, its own or shared ones; `leases` are for budgets that gateways share;
    `wall_offset_ns` is the wall clock's time less the monotonic one's; `random` spreads the breakers' probes,
    in [0, 1); `on_hedge` is called with what came of each hedge.
    """
    prices = PriceList(config.prices)
    budgets = TenantBudgets(config.budgets, wall_offset_ns=wall_offset_ns, leases=leases)
    thrift = BudgetDowngrade(budgets, prices)
    admission = AdmissionControl(config.admission, config.routing, config.queue, facts, thrift)
    health = FleetHealth(config.health, random)
    hedges = Hedges(config.health, on_hedge) if config.health.hedge_share else None
    policies = Policies(
        admission=admission,
        limits=limiter,
        levels=LimitLevels(limiter),
        budgets=budgets,
        prices=prices,
        lengths=OutputLengths(config.limits),
        placement=placement,
        health=health,
        poison=Quarantine(config.health),
        pace=lambda: Pace(config.admission, config.routing.placement),
        hedges=hedges,
        migrations_max=config.health.migrations_max,
        first_token_ns=round(config.health.first_token_s * NS_PER_S),
    )
    return PolicyStack(
        control=FlowControl(config.queue, policies),
        admission=admission,
        limiter=limiter,
        budgets=budgets,
        prices=prices,
        health=health,
        anomalies=Anomalies(round(config.health.probe_s * NS_PER_S)),
        hedges=hedges,
        slice_tokens=SLICE_TOKENS,
        shed_kv_above=queue_terms(config.queue).shed_kv_above,
    )

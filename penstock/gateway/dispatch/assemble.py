"""Wires the decisions of one gateway together, from its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from penstock.clock import Clock
from penstock.config.tree import Config
from penstock.fleet.registry import Registry
from penstock.gateway.dispatch.dispatcher import Dispatcher
from penstock.gateway.dispatch.placements import Placements
from penstock.gateway.models.served import ServedModel
from penstock.gateway.relay.reply import StreamSlots
from penstock.gateway.shared.limits import SharedLimits
from penstock.gateway.shared.spending import Spending
from penstock.kv.index.locality import KVLocality
from penstock.policy.admission.gate import Gate, ModelFacts
from penstock.policy.admission.thrift import Thrift
from penstock.policy.estimates.output_length import OutputLengths
from penstock.policy.extras.hedge import Hedges
from penstock.policy.extras.quarantine import Quarantine
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.policy.limits.rate_limit import SLICE_TOKENS
from penstock.policy.parts import Parts
from penstock.policy.placement.decision_log import DecisionLog
from penstock.policy.queueing.pace import Pace
from penstock.policy.resilience.health import FleetHealth
from penstock.rng import fresh_seed, stream
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import ModelName


@dataclass(slots=True, frozen=True, kw_only=True)
class Decisions:
    """What decides about this gateway's requests, and what keeps it in touch with the world."""

    dispatcher: Dispatcher
    limits: SharedLimits
    budgets: TenantBudgets
    spending: Spending
    prices: PriceList
    ledger: Ledger
    gate: Gate
    explained: DecisionLog
    """Which worker got which of the last requests, and why."""

    async def start(self) -> None:
        """Recover the ledger, take over what it knows of spending, and say hello to whoever shares the limits.

        Raises:
            LedgerError: the ledger's directory or database cannot be used.
        """
        await self.ledger.start()
        await self.spending.start()
        await self.limits.start()

    def reload(self, config: Config) -> None:
        """Take what may change while requests run: prices and how budgets are held."""
        self.prices.change(config.prices)
        self.budgets.change(config.budgets)

    async def stop(self) -> None:
        """Nothing is dispatched any more; what was used is written down."""
        self.dispatcher.close()
        await self.spending.close()
        await self.limits.close()
        await self.ledger.stop()


def make_decisions(
    config: Config,
    models: Mapping[ModelName, ServedModel],
    registry: Registry,
    *,
    gateway: str,
    slots: StreamSlots,
    metrics: Metrics,
    clock: Clock,
    log: Log,
    locality: KVLocality,
) -> Decisions:
    """Admission, limits, budgets, prices and queues of `config`, in front of the models' workers. `gateway` names this process for all time.

    Raises:
        ConfigError: the store of shared limits cannot be used as configured.
    """
    prices = PriceList(config.prices)
    limits = SharedLimits(config.limits, config.shared, gateway=gateway, clock=clock, log=log)
    budgets = TenantBudgets(config.budgets, wall_offset_ns=clock.wall_ns() - clock.now_ns())
    ledger = Ledger(config.ledger, clock, log)
    facts = partial(_facts, models)
    gate = Gate(config.admission, config.routing, config.queue, facts, Thrift(budgets, prices))
    placements = Placements(
        config.routing.placement, metrics=metrics, log=log, seed=fresh_seed(), locality=lambda _: locality
    )
    health = FleetHealth(config.health, stream(fresh_seed(), "breakers").random)
    parts = Parts(
        admission=gate,
        limits=limits.limiter,
        budgets=budgets,
        prices=prices,
        lengths=OutputLengths(config.limits),
        placement=placements.of,
        health=health,
        hedges=Hedges(config.health, metrics.hedged) if config.health.hedge_share else None,
        poison=Quarantine(config.health),
        pace=lambda: Pace(config.admission, config.routing.placement),
        migrations_max=config.health.migrations_max,
    )
    dispatcher = Dispatcher(
        FlowControl(config.queue, parts),
        registry,
        limiter=limits.limiter,
        prices=prices,
        ledger=ledger,
        slots=slots,
        health=health,
        metrics=metrics,
        clock=clock,
        log=log,
        slice_tokens=SLICE_TOKENS,
        is_shared=config.server.processes > 1,
        shed_kv_above=config.queue.shed_kv_above,
        hedges=config.health.hedge_share > 0,
    )
    return Decisions(
        dispatcher=dispatcher,
        limits=limits,
        budgets=budgets,
        spending=Spending(config, budgets, ledger, clock=clock, log=log),
        prices=prices,
        ledger=ledger,
        gate=gate,
        explained=placements.decisions,
    )


def _facts(models: Mapping[ModelName, ServedModel], name: str) -> ModelFacts | None:
    """What admission must know of a model; None if it is not served."""
    model = models.get(ModelName(name))
    if model is None:
        return None
    info = model.workers.info
    return ModelFacts(
        max_model_len=info.max_model_len if info is not None else 0,
        adapters=model.workers.adapters,
        capabilities=model.workers.capabilities,
        kinds=model.workers.kinds,
    )

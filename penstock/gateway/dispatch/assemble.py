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
from penstock.policy.lifecycle.stack import build_policies
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.policy.placement.decision_log import DecisionLog
from penstock.rng import fresh_seed, stream
from penstock.telemetry.decision_files import DecisionFiles, DecisionKeeper
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import ModelName


@dataclass(slots=True, frozen=True, kw_only=True)
class GatewayPolicies:
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
    kept: DecisionKeeper | None
    """The same of the last hour and of all processes; None without a ledger, whose directory it uses."""

    async def start(self) -> None:
        """Recover the ledger, take over what it knows of spending, and say hello to whoever shares the
        limits.

        Raises:
            LedgerError: the ledger's directory or database cannot be used.
        """
        await self.ledger.start()
        if self.kept is not None:
            self.kept.start()
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
        if self.kept is not None:
            await self.kept.stop()
        await self.ledger.stop()


def make_policies(
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
) -> GatewayPolicies:
    """Admission, limits, budgets, prices and queues of `config`, in front of the models' workers.

    `gateway` names this process for all time.

    Raises:
        ConfigError: the store of shared limits cannot be used as configured.
    """
    limits = SharedLimits(config.limits, config.shared, gateway=gateway, clock=clock, log=log)
    ledger = Ledger(config.ledger, clock, log)
    placements = Placements(
        config.routing.placement, metrics=metrics, log=log, seed=fresh_seed(), locality=lambda _: locality
    )
    kept = None
    if config.ledger.enabled:
        kept = DecisionKeeper(DecisionFiles(ledger.directory / "decisions", clock), log)
        placements.decisions.on_decision, placements.decisions.on_choice = kept.decided, kept.chose
    policies = build_policies(
        config,
        facts=partial(_facts, models),
        placement=placements.of,
        limiter=limits.limiter,
        wall_offset_ns=clock.wall_ns() - clock.now_ns(),
        random=stream(fresh_seed(), "breakers").random,
        on_hedge=metrics.hedged,
    )
    dispatcher = Dispatcher(
        policies,
        registry,
        ledger=ledger,
        slots=slots,
        metrics=metrics,
        clock=clock,
        log=log,
        is_shared=config.server.processes > 1,
    )
    return GatewayPolicies(
        dispatcher=dispatcher,
        limits=limits,
        budgets=policies.budgets,
        spending=Spending(config, policies.budgets, ledger, clock=clock, log=log),
        prices=policies.prices,
        ledger=ledger,
        gate=policies.gate,
        explained=placements.decisions,
        kept=kept,
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

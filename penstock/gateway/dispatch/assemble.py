"""Wires the decisions of one gateway together, from its configuration.

`Placements` makes the placement of each model, and shows its decisions: metrics, a sampled log line,
explanations. `StretchedPromises` writes a line into the log where a machine is too slow for what is promised,
with what holds there instead (policy/admission/admit.py).
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock import rng
from penstock.clock import NS_PER_MS, NS_PER_S, Clock
from penstock.config.branch import extended
from penstock.config.engine_settings import may_have_tenants
from penstock.config.routing import AdmissionConfig, PlacementConfig
from penstock.config.tree import Config
from penstock.fleet.leadership import Leadership
from penstock.fleet.registry import Registry
from penstock.fleet.scaling import ScaleLeader
from penstock.fleet.sleep import Sleeper
from penstock.gateway.dispatch.dispatcher import Dispatcher
from penstock.gateway.dispatch.prober import Prober
from penstock.gateway.models.served import ServedModel, model_facts
from penstock.gateway.relay.reply import StreamSlots
from penstock.gateway.shared.limits import SharedLimits, Spending
from penstock.kv.index.locality import KVLocality
from penstock.policy.admission.admit import IDLE_FACTOR, AdmissionControl
from penstock.policy.flow import RequestFacts
from penstock.policy.lifecycle.stack import build_policies
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.policy.placement.adapters import ResidencyOrder, ignore_order
from penstock.policy.placement.pick import Decision, DecisionLog, LeastLoaded
from penstock.policy.placement.route import Locality, Router
from penstock.policy.placement.score import score_policy
from penstock.policy.queueing.capacity import Placement
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.resilience.anomalies import Anomalies
from penstock.policy.terms import PlacementTerms
from penstock.rng import IdSource, fresh_seed, stream
from penstock.telemetry.decision_files import DecisionFiles, DecisionKeeper
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.tokenizer import Tokenizer
from penstock.types import ModelName


class Placements:
    """Makes the placement of every model, by its name."""

    def __init__(
        self,
        config: PlacementConfig,
        *,
        metrics: Metrics,
        log: Log,
        seed: int,
        locality: Callable[[str], Locality | None] = lambda _: None,
        on_order: Callable[[ResidencyOrder], None] = ignore_order,
    ) -> None:
        """`seed` fixes every chance there is; `locality` tells where a model's prompts are cached, if anybody
        knows; `on_order` tells workers which adapters are to be in memory.
        """
        config = self._config = extended(config, PlacementTerms)
        self._log, self._seed = log, seed
        self._locality, self._on_order = locality, on_order
        self.decisions = DecisionLog(
            kept_max=config.decisions_kept,
            log_every=config.log_every,
            decided=metrics.placed,
            write=self._write,
        )
        """The last ones, to be explained."""

    def of(self, route: str) -> Placement:
        """A model's own."""
        config = self._config
        if config.policy == "least_loaded":
            return LeastLoaded()
        draw = rng.stream(self._seed, f"placement/{route}").randrange
        router = Router(route, config, draw, locality=self._locality(route), log=self.decisions)
        router.adapters.on_order = self._on_order
        return router

    def _write(self, decision: Decision) -> None:
        picked, choice = decision.picked, decision.choice
        score = 0.0
        if picked is not None:
            score = score_policy(decision.config).score(decision.request, picked).total
        self._log.info(
            "placed",
            request_id=decision.request_id,
            model=decision.route,
            worker=picked.worker if picked is not None else "",
            reason=choice.reason,
            score=round(score, 4),
            candidates=len(decision.candidates),
            cached_tokens=picked.device_tokens + picked.host_tokens if picked is not None else 0,
            prompt_tokens=decision.request.prompt_tokens,
        )


@dataclass(slots=True, frozen=True, kw_only=True)
class GatewayPolicies:
    """The policies for this gateway's requests, and their connections to the world."""

    dispatcher: Dispatcher
    prober: Prober
    limits: SharedLimits
    lacks: Callable[[RequestFacts], bool]
    """Whether the store of shared limits is asked before this request is submitted."""
    budgets: TenantBudgets
    spending: Spending
    prices: PriceList
    ledger: Ledger
    admission: AdmissionControl
    explained: DecisionLog
    """Which worker got which of the last requests, and why."""
    kept: DecisionKeeper | None
    """The same of the last hour and of all processes; None without a ledger, whose directory it uses."""

    async def start(self) -> None:
        """Recover the ledger, take over what it knows of spending, and say hello to the store that limits
        and budgets share.

        Raises:
            LedgerError: the ledger's directory or database cannot be used.
        """
        await self.ledger.start()
        if self.kept is not None:
            self.kept.start()
        await self.spending.start()
        await self.limits.start()

    @property
    def ask_store(self) -> Callable[[RequestFacts], Awaitable[None]] | None:
        """Lets the store of shared limits say first what this gateway has not on lease, within a deadline;
        None: limits are this gateway's alone.
        """
        return self._ask_store if self.limits.leases is not None else None

    def reload(self, config: Config) -> None:
        """Take what may change while requests run: prices and how budgets are held."""
        self.prices.change(config.prices)
        self.budgets.change(config.budgets)

    async def _ask_store(self, facts: RequestFacts) -> None:
        await self.limits.ask(partial(self.lacks, facts))

    async def stop(self) -> None:
        """Nothing is dispatched any more; what was used is written down."""
        self.prober.close()
        self.dispatcher.close()
        await self.spending.close()
        await self.limits.close()
        if self.kept is not None:
            await self.kept.stop()
        await self.ledger.stop()


@dataclass(slots=True, frozen=True, kw_only=True)
class GatewayTools:
    """The tools of every part of a gateway process."""

    metrics: Metrics
    clock: Clock
    ids: IdSource
    log: Log
    sleeper: Sleeper | None = None
    """Puts models to sleep, where that is this process."""
    scaler: ScaleLeader | None = None
    """Decides how many workers there are, where that is this process."""
    leadership: Leadership | None = None
    """This server among others that share its store, where that is this process."""


def make_policies(
    config: Config,
    models: Mapping[ModelName, ServedModel],
    registry: Registry,
    tools: GatewayTools,
    *,
    gateway: str,
    locality: KVLocality,
    leases: str = "",
    on_adapter_order: Callable[[ResidencyOrder], None] = ignore_order,
) -> GatewayPolicies:
    """Admission, limits, budgets, prices and queues of `config`, in front of the models' workers.

    `gateway` names this process for all time; `leases` is the socket of the parent's store of limits;
    `on_adapter_order` tells workers which adapters are to be in memory.

    Raises:
        ConfigError: the store of shared limits cannot be used as configured.
    """
    shared, metrics, clock, log = config.shared, tools.metrics, tools.clock, tools.log
    if leases:
        shared = msgspec.structs.replace(shared, gateways=config.server.processes)
    limits = SharedLimits(config.limits, shared, gateway=gateway, clock=clock, log=log, parent=leases)
    ledger = Ledger(config.ledger, clock, log)
    placements = Placements(
        config.routing.placement, metrics=metrics, log=log, seed=fresh_seed(), locality=lambda _: locality,
        on_order=on_adapter_order,
    )  # fmt: skip
    kept = None
    if config.ledger.enabled:
        files = DecisionFiles(ledger.directory / "decisions", clock)
        kept = DecisionKeeper(files, log, has_peers=config.server.processes > 1)
        placements.decisions.hand_on(kept.decided, kept.chose)
    if not may_have_tenants(config):  # Then no other tenant could use a row that stays free.
        config = msgspec.structs.replace(config, queue=msgspec.structs.replace(config.queue, headroom=0.0))
    policies = build_policies(
        config,
        facts=partial(model_facts, models),
        placement=placements.of,
        limiter=limits.limiter,
        leases=limits.leases,
        wall_offset_ns=clock.wall_ns() - clock.now_ns(),
        random=stream(fresh_seed(), "breakers").random,
        on_hedge=metrics.hedged,
    )
    dispatcher = Dispatcher(
        policies,
        registry,
        ledger=ledger,
        slots=StreamSlots(config.limits.concurrent_max),
        metrics=metrics,
        clock=clock,
        log=log,
        processes=config.server.processes,
    )
    return GatewayPolicies(
        dispatcher=dispatcher,
        prober=_prober(policies.anomalies, models, registry, tools, gateway),
        limits=limits,
        lacks=lambda facts: policies.control.lacks(clock.now_ns(), facts),
        budgets=policies.budgets,
        spending=Spending(policies.budgets, limits.leases, ledger, clock=clock, log=log),
        prices=policies.prices,
        ledger=ledger,
        admission=policies.admission,
        explained=placements.decisions,
        kept=kept,
    )


def _prober(
    anomalies: Anomalies,
    models: Mapping[ModelName, ServedModel],
    registry: Registry,
    tools: GatewayTools,
    gateway: str,
) -> Prober:
    return Prober(
        anomalies,
        registry,
        partial(_tokenizer, models),
        name=gateway,
        meters=tools.metrics.anomalies(),
        clock=tools.clock,
        log=tools.log,
    )


def _tokenizer(models: Mapping[ModelName, ServedModel], name: str) -> Tokenizer | None:
    model = models.get(ModelName(name))
    return None if model is None else model.tokenizer


PROMPT_TOKENS = 256
"""The prompt that the log speaks of: an ordinary question with its instructions."""


class StretchedPromises:
    """One line for each model, as soon as it is known."""

    def __init__(self, config: AdmissionConfig, log: Log) -> None:
        self._config, self._log = config, log
        self._said: set[str] = set()

    def look(self, model: str, model_queue: ModelQueue | None) -> None:
        """See what the model's requests have taken so far."""
        target_ms = self._config.ttft_target_ms
        if model_queue is None or not target_ms or model in self._said:
            return
        holds_ns = IDLE_FACTOR * model_queue.pace.idle_ttft_ns(PROMPT_TOKENS, PROMPT_TOKENS)
        if holds_ns > target_ms * NS_PER_MS:
            self._said.add(model)
            self._log.warning(
                "this machine is too slow for the promised time to the first token",
                model=model,
                promised_s=target_ms / 1000,
                holds_s=round(holds_ns / NS_PER_S, 2),
                prompt_tokens=PROMPT_TOKENS,
            )

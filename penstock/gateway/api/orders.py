"""Orders for admin keys about models and their workers: put to sleep and wake (three endpoints as vLLM has
them), load and unload adapters (two, of vLLM too), how many workers there are to be (also for other
autoscalers to read), and rollouts: begin one, look at it, end it.
"""

from typing import TypeVar
from urllib.parse import unquote

import msgspec

from penstock.clock import sleep
from penstock.errors import InvalidRequest, NotFound
from penstock.fleet.adapters import AdapterKeeper, AdapterSource
from penstock.fleet.rollouts import (
    ProbeScore,
    RolloutLeader,
    RolloutOrder,
    RolloutReport,
    RolloutReports,
)
from penstock.fleet.scale_report import ScaleAsk, ScaleOrder, ScaleReports
from penstock.fleet.scaling import ScaleLeader
from penstock.fleet.sleep import Sleeper
from penstock.gateway.api.inspect import answer, query_of
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Exchange, Response
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.served import ModelTable, ServedModel
from penstock.gateway.shared.peers import GatewayPeers
from penstock.policy.rollout.rollout import RolloutPlan, RolloutState
from penstock.protocol.fleet import LoadAdapterOrder, SleepOrderBody, SleepState, UnloadAdapterOrder
from penstock.protocol.peers import AdapterOrder
from penstock.types import ModelName

_orders = msgspec.json.Decoder(ScaleOrder)
_reports = msgspec.json.Decoder(ScaleReports)


class WantedWorkers(msgspec.Struct, frozen=True):
    """`GET /scale?model=M&pool=P`: for KEDA's metrics API scaler, and others that read one number."""

    model: str
    workers: int
    ready: int


class ScaleAdmin:
    """The endpoints. The leader is in this process, or in the parent of several."""

    def __init__(self, leader: ScaleLeader | None, peers: GatewayPeers | None) -> None:
        self._leader, self._peers = leader, peers

    async def show(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/scale?model=support`: of each model that scales, its pools, the last decision with all
        that it was made from, the last moves, and the last quarter of an hour.
        """
        del caller
        body = await self._asked(ScaleAsk(model=query_of(exchange).get("model") or ""))
        exchange.respond(Response(body=body))

    async def order(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /admin/scale`: `{"model": "support", "workers": 4, "for_s": 1800}`; without `workers` the
        load decides again. Answers as `show` does.

        Raises:
            InvalidRequest: the body is not that, or contradicts the bounds.
            NotFound: there is no such model, or it does not scale.
        """
        try:
            order = _orders.decode(exchange.body)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"Invalid body: {error}.", code="invalid_value") from error
        exchange.respond(Response(body=await self._asked(ScaleAsk(order=order, by=caller.key_prefix))))

    async def wanted(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /scale?model=support&pool=spot`: the number of workers that a model, or a pool of it, is to
        have.

        Raises:
            InvalidRequest: no model is named.
            NotFound: it does not scale, or has no such pool.
        """
        del caller
        query = query_of(exchange)
        if not (model := query.get("model")):
            raise InvalidRequest("The query needs a model: /scale?model=NAME.", param="model")
        found = _reports.decode(await self._asked(ScaleAsk(model=model))).models[0]
        workers, ready = found.workers, found.ready
        if name := query.get("pool"):
            pool = next((each for each in found.pools if each.name == name), None)
            if pool is None:
                raise InvalidRequest(f"The model has no pool '{name[:64]}'.", param="pool")
            workers, ready = pool.workers, pool.ready
        answer(exchange, WantedWorkers(found.model, workers, ready))

    async def _asked(self, ask: ScaleAsk) -> bytes:
        if self._peers is not None:
            return await self._peers.scale(msgspec.json.encode(ask))
        found = ScaleReports([]) if self._leader is None and ask == ScaleAsk() else None
        if found is None:
            if self._leader is None:
                raise InvalidRequest("This server launches no workers, so nothing scales here.")
            found = await self._leader.ask(ask)
        return msgspec.json.encode(found)


ROLLOUTS = "/admin/rollouts/"
_plans = msgspec.json.Decoder(RolloutPlan)
_scores = msgspec.json.Decoder(ProbeScore)
_rollouts = msgspec.json.Decoder(RolloutReports)


class RolloutsAdmin:
    """The endpoints. The deciding process is this one, or the parent of several."""

    def __init__(self, models: ModelTable, leader: RolloutLeader | None, peers: GatewayPeers | None) -> None:
        self._models, self._leader, self._peers = models, leader, peers

    async def show(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/rollouts?model=support`: every rollout, the latest first, with what was measured."""
        del caller
        await self._carry_out(exchange, RolloutOrder(model=query_of(exchange).get("model") or ""))

    async def start(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /admin/rollouts`: `{"model": "support", "candidate": "support@2"}`, and what else a
        `RolloutPlan` has.

        Raises:
            InvalidRequest: the body is not that, or a rollout of the model runs.
            NotFound: there is no such version.
        """
        try:
            plan = _plans.decode(exchange.body)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"Invalid body: {error}.", code="invalid_value") from error
        await self._carry_out(
            exchange, RolloutOrder(verb="start", model=plan.model, plan=plan, by=caller.key_prefix)
        )

    async def order(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /admin/rollouts/MODEL/promote` or `/abort`: all conversations get the new version, or none.
        `/score`: an operator's own probe, `{"version": "support@2", "probe": "q17", "score": 1}`.

        Raises:
            NotFound: there is no such rollout, or no such order.
            InvalidRequest: it is promoted already, or has no worker that could answer.
        """
        model, _, verb = unquote(exchange.path.removeprefix(ROLLOUTS)).rstrip("/").rpartition("/")
        if verb == "score":
            try:
                score = _scores.decode(exchange.body)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"Invalid body: {error}.", code="invalid_value") from error
            await self._carry_out(exchange, RolloutOrder(verb=verb, model=model, score=score))
            return
        if verb == "promote" or verb == "abort":
            if verb == "promote":
                await self._check_promotion(model)
            await self._carry_out(exchange, RolloutOrder(verb=verb, model=model, by=caller.key_prefix))
            return
        raise NotFound("Rollouts know the orders 'promote', 'abort' and 'score'.", code="unknown_path")

    async def _check_promotion(self, model: str) -> None:
        """A version that failed to load would take everybody's requests, and answer none."""
        for report in (await self._reports(RolloutOrder(model=model))).rollouts[:1]:
            candidate = self._candidate(report)
            if candidate is not None and report.trouble and not candidate.workers.is_expected:
                raise InvalidRequest(
                    f"{report.trouble}. Promote it when it has one, or abort the rollout.", param="model"
                )

    async def _carry_out(self, exchange: Exchange, order: RolloutOrder) -> None:
        exchange.respond(Response(body=msgspec.json.encode(await self._reports(order))))

    async def _reports(self, order: RolloutOrder) -> RolloutReports:
        if self._leader is not None:
            reports = await self._leader.order(order)
        else:
            assert self._peers is not None, "one of the two decides"
            reports = _rollouts.decode(await self._peers.rollout(msgspec.json.encode(order)))
        return RolloutReports([self._with_trouble(each) for each in reports.rollouts])

    def _candidate(self, report: RolloutReport) -> ServedModel | None:
        return next((each for each in self._models if each.name == report.candidate), None)

    def _with_trouble(self, report: RolloutReport) -> RolloutReport:
        """Only gateways know whether a version can take requests."""
        candidate = self._candidate(report)
        is_live = report.state in (RolloutState.RUNNING, RolloutState.READY)
        if candidate is None or candidate.workers.is_ready or not is_live:
            return report
        stage = candidate.workers.summary().stage
        words = f"{report.candidate} has no worker that takes requests ({stage}): {report.baseline} serves"
        return msgspec.structs.replace(report, trouble=words)


_LOOK_S, _LOOKS_MAX = 0.02, 50
_bodies = msgspec.json.Decoder(SleepOrderBody)


class SleepAdmin:
    """The endpoints, over the services they share."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def sleep(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /admin/sleep`: `{"model": "qwen"}`. Its workers give the memory of weights and KV cache back;
        the next request wakes it. Answers when it sleeps. A model with requests stays awake: 409.

        Raises:
            InvalidRequest: the body is not that.
            NotFound: there is no such model, or nothing of it was launched here.
            ModelBusy: it has requests.
            WorkerUnavailable: it does not answer.
        """
        model = self._model(exchange)
        await self._sleeper().sleep(model.name)
        self._services.notes.note("admin", "put to sleep", model.name, by=caller.key_prefix)
        answer(exchange, await _state_once(model, sleeps=True))

    async def wake_up(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /admin/wake_up`: `{"model": "qwen"}`. Answers when it takes requests.

        Raises:
            InvalidRequest: the body is not that.
            NotFound: there is no such model, or nothing of it was launched here.
            NoMemory: there is none, and too few idle models to make some.
            WorkerUnavailable: it cannot be loaded.
        """
        model = self._model(exchange)
        await self._sleeper().wake(model.name)
        self._services.notes.note("admin", "woken", model.name, by=caller.key_prefix)
        answer(exchange, await _state_once(model, sleeps=False))

    async def is_sleeping(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/is_sleeping?model=qwen`: how it is.

        Raises:
            NotFound: there is no such model.
        """
        answer(exchange, _state(self._services.models.get(query_of(exchange).get("model"))))

    def _model(self, exchange: Exchange) -> ServedModel:
        body = exchange.body.strip()
        try:
            order = _bodies.decode(body) if body else SleepOrderBody()
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"Invalid body: {error}.", code="invalid_value") from error
        return self._services.models.get(order.model)

    def _sleeper(self) -> Sleeper:
        sleeper = self._services.wakes.sleeper
        if sleeper is None:
            raise NotFound("This gateway keeps no workers.", code="unknown_path")
        return sleeper


async def _state_once(model: ServedModel, *, sleeps: bool) -> SleepState:
    """How it is, once its workers have told this process too what another one knows already."""
    for _ in range(_LOOKS_MAX):
        if model.workers.sleeps == sleeps:
            break
        await sleep(_LOOK_S)
    return _state(model)


def _state(model: ServedModel) -> SleepState:
    return SleepState(model=model.name, is_sleeping=model.workers.sleeps, state=model.workers.summary().stage)


Order = TypeVar("Order")
_TEXT = b"text/plain; charset=utf-8"


class AdaptersAdmin:
    """The endpoints, over the services they share."""

    def __init__(self, services: Services, keeper: AdapterKeeper) -> None:
        self._services, self._keeper = services, keeper

    async def load(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/load_lora_adapter`: `{"lora_name": "fr", "lora_path": "/srv/lora/fr"}`. Where there are
        several models, `base_model_name` says whose it is.

        Raises:
            InvalidRequest: the body is not that, the name is taken, or the adapter cannot be read.
            NotFound: there is no such model.
            WorkerUnavailable: no worker can load it now.
        """
        order = _decoded(exchange.body, LoadAdapterOrder)
        models, name = self._services.models, order.lora_name
        if order.load_inplace:
            raise InvalidRequest(
                "load_inplace: expected false; unload the adapter first, then load it again.",
                param="load_inplace",
            )
        if order.base_model_name is None and len(list(models)) > 1:
            known = ", ".join(each.name for each in models)
            raise InvalidRequest(
                f"base_model_name: expected the model that '{name[:64]}' is for, one of {known[:512]}.",
                param="base_model_name",
            )
        model = models.get(order.base_model_name)
        others = (other for other in models if other.name != model.name)
        if models.takes(name) or any(name in other.workers.adapters for other in others):
            raise InvalidRequest(f"The name '{name[:64]}' is taken.", param="lora_name")
        source = AdapterSource.of(order.lora_path)
        await self._keeper.load(model.name, name, source)
        await self._tell_others(model.name, name, source.text)
        self._services.notes.note("admin", "adapter loaded", name, by=caller.key_prefix)
        _say(exchange, f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/unload_lora_adapter`: `{"lora_name": "fr"}`. Answers that run with it continue.

        Raises:
            InvalidRequest: the body is not that.
            NotFound: there is no such adapter.
        """
        name = _decoded(exchange.body, UnloadAdapterOrder).lora_name
        models = list(self._services.models)
        owner = next((each.name for each in models if self._keeper.has(each.name, name)), None)
        if owner is None:
            owner = next((each.name for each in models if name in each.workers.adapters), models[0].name)
        await self._keeper.unload(ModelName(owner), name)
        await self._tell_others(owner, name, "")
        self._services.notes.note("admin", "adapter unloaded", name, by=caller.key_prefix)
        _say(exchange, f"Success: LoRA adapter '{name}' removed successfully.")

    async def _tell_others(self, model: str, name: str, source: str) -> None:
        """The other processes of this server, which tell workers that start again."""
        if self._services.peers is not None:
            await self._services.peers.order(AdapterOrder(model, name, source))


def _decoded(body: bytes, kind: type[Order]) -> Order:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"Invalid body: {error}.", code="invalid_value") from error


def _say(exchange: Exchange, words: str) -> None:
    exchange.respond(Response(body=words.encode(), content_type=_TEXT))

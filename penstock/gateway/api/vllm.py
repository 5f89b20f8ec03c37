"""Endpoints for admin keys as vLLM has them, of any model: models that are put to sleep and woken by hand
(three), and adapters (LoRA) that come and go while the server runs (two).
"""

from typing import TypeVar

import msgspec

from penstock.clock import sleep
from penstock.errors import InvalidRequest, NotFound
from penstock.fleet.adapters import AdapterKeeper, AdapterSource
from penstock.fleet.sleep import Sleeper
from penstock.gateway.api.inspect import answer, query_of
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Exchange, Response
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.served import ServedModel
from penstock.protocol.fleet import LoadAdapterOrder, SleepOrderBody, SleepState, UnloadAdapterOrder
from penstock.protocol.peers import AdapterOrder
from penstock.types import ModelName

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

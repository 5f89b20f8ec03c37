"""Models that are put to sleep and woken by hand: what vLLM's three endpoints mean, of any model, for admin
keys.
"""

import msgspec

from penstock.clock import sleep
from penstock.errors import InvalidRequest, NotFound
from penstock.fleet.sleep import Sleeper
from penstock.gateway.api.inspect import answer, query_of
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.served import ServedModel
from penstock.protocol.fleet import SleepOrderBody, SleepState

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

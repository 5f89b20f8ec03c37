"""How many workers models have: for admin keys to look at and to order by hand, and for other autoscalers to
read.
"""

import msgspec

from penstock.errors import InvalidRequest
from penstock.fleet.scale_report import ScaleAsk, ScaleOrder, ScaleReports
from penstock.fleet.scaling import ScaleLeader
from penstock.gateway.api.inspect import answer, query_of
from penstock.gateway.http.exchange import Exchange, Response
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.shared.peers import GatewayPeers

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

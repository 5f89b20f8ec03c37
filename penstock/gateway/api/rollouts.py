"""Rollouts by hand, for admin keys: begin one, look at it, end it."""

from urllib.parse import unquote

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.fleet.rollouts import (
    ProbeScore,
    RolloutLeader,
    RolloutOrder,
    RolloutReport,
    RolloutReports,
)
from penstock.gateway.api.inspect import query_of
from penstock.gateway.http.exchange import Exchange, Response
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.served import ModelTable
from penstock.gateway.shared.peers import GatewayPeers
from penstock.policy.rollout.rollout import RolloutPlan, RolloutState

ROLLOUTS = "/admin/rollouts/"
_plans = msgspec.json.Decoder(RolloutPlan)
_scores = msgspec.json.Decoder(ProbeScore)
_reports = msgspec.json.Decoder(RolloutReports)


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
            InvalidRequest: it is promoted already.
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
            await self._carry_out(exchange, RolloutOrder(verb=verb, model=model, by=caller.key_prefix))
            return
        raise NotFound("Rollouts know the orders 'promote', 'abort' and 'score'.", code="unknown_path")

    async def _carry_out(self, exchange: Exchange, order: RolloutOrder) -> None:
        if self._leader is not None:
            reports = await self._leader.order(order)
        else:
            assert self._peers is not None, "one of the two decides"
            reports = _reports.decode(await self._peers.rollout(msgspec.json.encode(order)))
        seen = RolloutReports([self._with_trouble(each) for each in reports.rollouts])
        exchange.respond(Response(body=msgspec.json.encode(seen)))

    def _with_trouble(self, report: RolloutReport) -> RolloutReport:
        """Only gateways know whether a version can take requests."""
        candidate = next((each for each in self._models if each.name == report.candidate), None)
        is_live = report.state in (RolloutState.RUNNING, RolloutState.READY)
        if candidate is None or candidate.workers.is_ready or not is_live:
            return report
        stage = candidate.workers.summary().stage
        words = f"{report.candidate} has no worker that takes requests ({stage}): {report.baseline} serves"
        return msgspec.structs.replace(report, trouble=words)

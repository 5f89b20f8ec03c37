"""Shared by `chat` and `bench`: which server, with which key, and which model.

Shared by `top`, `drain` and `explain`: a server's /admin endpoints, and what to say when it does not let us.
"""

import argparse
import dataclasses
import os
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.bench.client import ApiAddress, CannotConnect, Client, ClientLimits
from penstock.cli.flags import default_url
from penstock.cli.wiring.state import load_key
from penstock.errors import PenstockError
from penstock.fleet.rollouts import RolloutReports
from penstock.fleet.scale_report import ScaleOrder, ScaleReports
from penstock.policy.rollout.rollout import RolloutPlan
from penstock.protocol.fleet import DrainOrder, FleetReport, SleepOrderBody, SleepState
from penstock.protocol.server_answers import decode_models, refusal_text
from penstock.telemetry.alerting import AlertsReport


class Unusable(PenstockError):
    """The server answers, but not in a way that helps; the message says what to do."""


def add_remote_flags(parser: argparse.ArgumentParser) -> None:
    """Add --url, --model and --key."""
    parser.add_argument(
        "--url",
        help="base URL of an OpenAI API (default: PENSTOCK_URL, or http://127.0.0.1:8000/v1 with "
        "PENSTOCK_PORT's port)",
    )
    parser.add_argument("--model", help="model to ask (default: the first one that the server lists)")
    parser.add_argument(
        "--key",
        help="API key (default: PENSTOCK_API_KEY, or the key of the server that you run on this machine)",
    )


def connect(args: argparse.Namespace, limits: ClientLimits | None = None) -> Client:
    """A client for the server that the flags name; nothing is sent yet.

    Raises:
        ConfigError: the URL or the key is malformed.
    """
    endpoint = ApiAddress.parse(args.url or default_url())
    key = args.key or os.environ.get("PENSTOCK_API_KEY") or load_key(endpoint.host, endpoint.port)
    return Client(endpoint, key=key.strip(), limits=limits)


async def pick_model(client: Client, wanted: str | None) -> str:
    """The model to ask for; the server is only asked when the flags do not say.

    Raises:
        CannotConnect: no server listens; the message says how to start a server.
        Unusable: it has no models, or refuses us.
    """
    if wanted:
        return wanted
    try:
        response = await client.get("/models")
    except CannotConnect as error:
        raise CannotConnect(no_server(error)) from error
    if response.status != 200:
        raise Unusable(refused(response.status, response.body))
    try:
        models = decode_models(response.body).data
    except msgspec.DecodeError as error:
        raise Unusable(
            f"{client.endpoint.url}/models is not a list of models; name one with --model"
        ) from error
    if not models:
        raise Unusable(f"{client.endpoint.url} serves no model yet")
    return models[0].id


def no_server(error: CannotConnect) -> str:
    """The advice for a user whose server is not there."""
    return (
        f"{error}\n  start a server with: penstock serve\n  or name another one with: --url "
        f"http://HOST:PORT/v1"
    )


def refused(status: int, body: bytes) -> str:
    """The advice for a user whom the server refuses."""
    text = refusal_text(status, body)
    hint = "\n  give the server's key with --key or PENSTOCK_API_KEY" if status == 401 else ""
    return f"the server refuses (HTTP {status}): {text}{hint}"


LIMITS = ClientLimits(connect_timeout_s=5.0, request_timeout_s=10.0)
_reports = msgspec.json.Decoder(FleetReport)
_alerts = msgspec.json.Decoder(AlertsReport)
_rollouts = msgspec.json.Decoder(RolloutReports)
_scaling = msgspec.json.Decoder(ScaleReports)


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    """Add --url and --key."""
    parser.add_argument(
        "--url", help="the server (default: PENSTOCK_URL, or http://127.0.0.1:8000 with PENSTOCK_PORT's port)"
    )
    parser.add_argument(
        "--key",
        help="admin key (default: PENSTOCK_ADMIN_KEY, or PENSTOCK_API_KEY, or the key of the server that you "
        "run on this machine)",
    )


class FleetClient:
    """One server's fleet."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def report(self) -> FleetReport:
        """How every worker is.

        Raises:
            CannotConnect: no server listens; the message says how to start a server.
            EndpointError: the exchange broke.
            Unusable: the server refuses us, or is no Penstock.
        """
        body = await self._ask("GET", "/admin/workers", b"")
        try:
            return _reports.decode(body)
        except msgspec.DecodeError as error:
            raise Unusable(f"{self._client.endpoint.url} does not answer like Penstock: {error}") from error

    async def order(self, worker: str, verb: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Drain or undrain a worker: its id, state and streams. Raises as `report` does."""
        body = b"" if timeout_s is None else msgspec.json.encode(DrainOrder(timeout_s=timeout_s))
        answer = await self._ask("POST", f"/admin/workers/{quote(worker, safe='')}/{verb}", body)
        return msgspec.json.decode(answer, type=dict[str, Any])

    async def sleep_order(self, verb: str, model: str) -> SleepState:
        """Put a model to sleep or wake it, and how it is then. Raises as `report` does."""
        body = msgspec.json.encode(SleepOrderBody(model=model))
        return msgspec.json.decode(await self._ask("POST", f"/admin/{verb}", body), type=SleepState)

    async def rollouts(self, model: str) -> RolloutReports:
        """Every rollout of a model, or of all; the latest first. Raises as `report` does."""
        body = await self._ask("GET", f"/admin/rollouts?model={quote(model, safe='')}", b"")
        return _rollouts.decode(body)

    async def start_rollout(self, plan: RolloutPlan) -> RolloutReports:
        """Begin one, and how things are then. Raises as `report` does."""
        return _rollouts.decode(await self._ask("POST", "/admin/rollouts", msgspec.json.encode(plan)))

    async def rollout_order(self, model: str, verb: str) -> RolloutReports:
        """Promote or abort one, and how things are then. Raises as `report` does."""
        return _rollouts.decode(await self._ask("POST", f"/admin/rollouts/{quote(model)}/{verb}", b""))

    async def scaling(self, model: str = "", order: ScaleOrder | None = None) -> ScaleReports:
        """How many workers models have, once what is ordered is under way. Raises as `report` does."""
        if order is not None:
            body = await self._ask("POST", "/admin/scale", msgspec.json.encode(order))
        else:
            body = await self._ask("GET", f"/admin/scale?model={quote(model, safe='')}", b"")
        return _scaling.decode(body)

    async def explain(self, request_id: str) -> dict[str, Any]:
        """The decision about a request, as `/admin/explain` reports it. Raises as `report` does."""
        answer = await self._ask("GET", f"/admin/explain/{quote(request_id, safe='')}", b"")
        return msgspec.json.decode(answer, type=dict[str, Any])

    async def alerts(self) -> AlertsReport:
        """Which alerts fire. Raises as `report` does."""
        body = await self._ask("GET", "/admin/alerts", b"")
        try:
            return _alerts.decode(body)
        except msgspec.DecodeError as error:
            raise Unusable(f"{self._client.endpoint.url} does not answer like Penstock: {error}") from error

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def _ask(self, method: str, path: str, body: bytes) -> bytes:
        client = self._client
        try:
            response = await (client.get(path) if method == "GET" else client.post(path, body))
        except CannotConnect as error:
            raise CannotConnect(no_server(error)) from error
        if response.status != 200:
            raise Unusable(_refused(response.status, response.body))
        return response.body


def connect_admin(args: argparse.Namespace, limits: ClientLimits = LIMITS) -> FleetClient:
    """A client for the server that the flags name; nothing is sent yet.

    Raises:
        ConfigError: the URL or the key is malformed.
    """
    endpoint = ApiAddress.parse(args.url or default_url())
    endpoint = dataclasses.replace(endpoint, base=endpoint.base.removesuffix("/v1"))
    named = os.environ.get("PENSTOCK_ADMIN_KEY") or os.environ.get("PENSTOCK_API_KEY")
    key = args.key or named or load_key(endpoint.host, endpoint.port)
    return FleetClient(Client(endpoint, key=key.strip(), limits=limits))


def _refused(status: int, body: bytes) -> str:
    hint = ""
    if status in (401, 403):
        hint = "\n  give an admin key with --key or PENSTOCK_ADMIN_KEY"
    elif status == 404 and b"unknown_path" in body:
        hint = "\n  it may be an older Penstock"
    return f"the server refuses (HTTP {status}): {refusal_text(status, body)}{hint}"

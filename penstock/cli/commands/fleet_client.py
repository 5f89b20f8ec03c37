"""What `top` and `drain` share: a server's /admin endpoints, and what to say when it does not let us."""

import argparse
import dataclasses
import os
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.bench.client import ApiAddress, CannotConnect, Client, ClientLimits
from penstock.cli.commands.remote import Unusable, no_server
from penstock.cli.flags import default_url
from penstock.cli.wiring.state import load_key
from penstock.protocol.fleet import DrainOrder, FleetReport
from penstock.protocol.openai import refusal_text

LIMITS = ClientLimits(connect_timeout_s=5.0, request_timeout_s=10.0)
_reports = msgspec.json.Decoder(FleetReport)


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
            CannotConnect: nobody listens; the message says how to start a server.
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


def connect_admin(args: argparse.Namespace) -> FleetClient:
    """A client for the server that the flags name; nothing is sent yet.

    Raises:
        ConfigError: the URL or the key is malformed.
    """
    endpoint = ApiAddress.parse(args.url or default_url())
    endpoint = dataclasses.replace(endpoint, base=endpoint.base.removesuffix("/v1"))
    named = os.environ.get("PENSTOCK_ADMIN_KEY") or os.environ.get("PENSTOCK_API_KEY")
    key = args.key or named or load_key(endpoint.host, endpoint.port)
    return FleetClient(Client(endpoint, key=key.strip(), limits=LIMITS))


def _refused(status: int, body: bytes) -> str:
    hint = ""
    if status in (401, 403):
        hint = "\n  give an admin key with --key or PENSTOCK_ADMIN_KEY"
    elif status == 404 and b"unknown_path" in body:
        hint = "\n  it may be an older Penstock"
    return f"the server refuses (HTTP {status}): {refusal_text(status, body)}{hint}"

"""What `chat` and `bench` share: which server, with which key, and which model."""

import argparse
import os

import msgspec

from penstock.bench.client import ApiAddress, CannotConnect, Client, ClientLimits
from penstock.cli.flags import default_url
from penstock.cli.wiring.state import load_key
from penstock.errors import PenstockError
from penstock.protocol.openai import decode_models, refusal_text


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
        CannotConnect: nobody listens; the message says how to start a server.
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
    """What to tell somebody whose server is not there."""
    return (
        f"{error}\n  start a server with: penstock serve\n  or name another one with: --url "
        f"http://HOST:PORT/v1"
    )


def refused(status: int, body: bytes) -> str:
    """What to tell somebody whom the server refuses."""
    text = refusal_text(status, body)
    hint = "\n  give the server's key with --key or PENSTOCK_API_KEY" if status == 401 else ""
    return f"the server refuses (HTTP {status}): {text}{hint}"

"""Images and videos of a message: where they may come from.

This server fetches none. A worker does, from its own network, so an address in a message could reach what
only the operator should: data URLs are passed on, and others only where the operator allows their host.
"""

import ipaddress
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from penstock.errors import InvalidRequest
from penstock.protocol.openai import Message

ANY_HOST = "*"
"""In the list of hosts: every public name or address."""
_FETCHED = ("image_url", "video_url")


def check_media(messages: Sequence[Message], hosts: Sequence[str]) -> None:
    """Refuse media that a worker would fetch from a host that is not among `hosts`: names, `*.name` for all
    below one, or `ANY_HOST`.

    Raises:
        InvalidRequest: naming the part.
    """
    for i, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for j, part in enumerate(message.content):
            for name in _FETCHED:
                value: Any = getattr(part, name)
                where = f"messages[{i}].content[{j}].{name}"
                if isinstance(value, dict):
                    where, value = f"{where}.url", cast(dict[str, Any], value).get("url")
                if value is not None:
                    _check_url(value, where, hosts)


def _check_url(url: object, where: str, hosts: Sequence[str]) -> None:
    if not isinstance(url, str):
        raise InvalidRequest(f"Invalid type for '{where}': expected a URL.", param=where, code="invalid_type")
    if url[:5].lower() == "data:":
        return
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme.lower(), (parts.hostname or "").rstrip(".")
    except ValueError:
        scheme = host = ""
    # Readers of URLs differ on what these mean, and the worker's is not ours.
    is_plain = url.isascii() and url.isprintable() and not set(url) & set(" \\@")
    if scheme not in ("http", "https") or not host or not is_plain:
        raise InvalidRequest(
            f"Invalid '{where}': expected a data URL, or one of http or https.",
            param=where,
            code="invalid_value",
        )
    if not _is_allowed(host, hosts):
        raise InvalidRequest(
            f"Invalid '{where}': this server passes on data URLs, and URLs of hosts that its operator "
            f"allows; '{host[:64]}' is none of them.",
            param=where,
            code="invalid_value",
        )


def _is_allowed(host: str, hosts: Sequence[str]) -> bool:
    for each in hosts:
        name = each.lower()
        if name == host or (name.startswith("*.") and host.endswith(name[1:])):
            return True
        if name == ANY_HOST and _is_public(host):
            return True
    return False


def _is_public(host: str) -> bool:
    """Whether a name or an address is one that the internet knows, as far as its spelling tells."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        # Some resolvers read "127.1", "0x7f000001" and "2130706433" as addresses.
        last = host.rpartition(".")[2]
        return (
            "." in host and last.isalpha() and last not in ("local", "localhost", "internal", "lan", "home")
        )

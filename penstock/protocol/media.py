"""Media of a message: where they may come from.

This server fetches none. A worker does, from its own network, so an address in a message could reach what
only the operator should: data URLs are passed on, and others only where the operator allows their host.
A worker gets the message as it came, so a part may hold no medium but the one that its type names.
"""

import ipaddress
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast
from urllib.parse import urlsplit

from penstock.errors import InvalidRequest
from penstock.protocol.openai import ContentPart, Message

ANY_HOST = "*"
"""In the list of hosts: every public name or address."""
_FIELDS = (
    "image_url", "input_audio", "video_url", "file", "audio_url", "image_pil", "image_embeds", "audio_embeds",
    "file_url", "file_id",
)  # fmt: skip
_media_of = attrgetter(*_FIELDS)
_NONE = (None,) * len(_FIELDS)
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]{0,31}:")
"""How a URL begins. Base64 and the names of files at providers have no colon."""


def check_media(messages: Sequence[Message], hosts: Sequence[str]) -> None:
    """Refuse media that a worker would fetch from a host that is not among `hosts`: names, `*.name` for all
    below one, or `ANY_HOST`; and media that stand in a part of another type.

    Raises:
        InvalidRequest: naming the part.
    """
    for i, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for j, part in enumerate(message.content):
            values: tuple[Any, ...] = _media_of(part)
            if values != _NONE:
                _check_part(part, values, f"messages[{i}].content[{j}]", hosts)


def _check_part(part: ContentPart, values: Sequence[object], where: str, hosts: Sequence[str]) -> None:
    for name, value in zip(_FIELDS, values, strict=True):
        if value is None:
            continue
        here = f"{where}.{name}"
        if name != part.type:
            raise InvalidRequest(
                f"Invalid '{here}': a part of type '{part.type[:64]}' has no such field.",
                param=here,
                code="invalid_value",
            )
        if isinstance(value, dict):
            for key, inner in cast(dict[str, object], value).items():
                if inner is not None:
                    _check_field(key, inner, f"{here}.{key[:64]}", hosts)
        else:
            _check_field(name, value, here, hosts)


def _check_field(name: str, value: object, where: str, hosts: Sequence[str]) -> None:
    """Check a URL, and what is written as one where something else is expected."""
    is_url = name == "url" or name.endswith("_url")
    if is_url or (name != "filename" and isinstance(value, str) and _SCHEME.match(value)):
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

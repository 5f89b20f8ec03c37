"""This machine: which addresses only it can reach, and where a user's state is kept between runs."""

import functools
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

CACHED_MAX = 256


@functools.lru_cache(CACHED_MAX)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`.

    Asked for each request that shows no key.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """PENSTOCK_STATE_DIR, else what the XDG base directory specification says, for this user."""
    if chosen := environ.get("PENSTOCK_STATE_DIR"):
        return Path(chosen)
    base = environ.get("XDG_STATE_HOME")
    state = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "state"
    return state / "penstock"

"""What an address in the configuration means."""

import functools
import ipaddress

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

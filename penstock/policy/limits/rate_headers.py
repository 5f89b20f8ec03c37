"""The `x-ratelimit-*` headers, as OpenAI writes them.

They stand on every response, so they are made of few operations: a tenant's limits are formatted once, and
the rest is integers.
"""

from functools import lru_cache

from penstock.policy.limits.bucket import TokenSource
from penstock.policy.tenant import Tenant

Headers = tuple[tuple[bytes, bytes], ...]


def limit_headers(
    now_ns: int, tenant: Tenant, requests: TokenSource | None, tokens: TokenSource | None
) -> Headers:
    """The headers of both limits: the limit per minute, what is left, and when all of it is back."""
    made: Headers = ()
    if requests is not None:
        remaining, full_ns = requests.standing(now_ns)
        made = (
            (b"x-ratelimit-limit-requests", _number(tenant.requests_per_minute)),
            (b"x-ratelimit-remaining-requests", b"%d" % remaining),
            (b"x-ratelimit-reset-requests", duration(full_ns)),
        )
    if tokens is not None:
        remaining, full_ns = tokens.standing(now_ns)
        made += (
            (b"x-ratelimit-limit-tokens", _number(tenant.tokens_per_minute)),
            (b"x-ratelimit-remaining-tokens", b"%d" % remaining),
            (b"x-ratelimit-reset-tokens", duration(full_ns)),
        )
    return made


def duration(ns: int) -> bytes:
    """A time as Go and OpenAI write it, rounded up: `0s`, `120ms`, `1s`, `59s`, `6m0s`, `1h0m5s`."""
    ms = -(-ns // 1_000_000)
    if ms < 1000:
        return b"%dms" % ms if ms else b"0s"
    return _seconds(-(-ms // 1000))


@lru_cache(maxsize=4096)
def _seconds(seconds: int) -> bytes:
    if seconds < 60:
        return b"%ds" % seconds
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return b"%dm%ds" % (minutes, seconds)
    return b"%dh%dm%ds" % (*divmod(minutes, 60), seconds)


@lru_cache(maxsize=1024)
def _number(value: int) -> bytes:
    return b"%d" % value

"""The connection to Redis that the stores of this package use, each its own."""

from typing import Any, cast

from penstock.config.flow import SharedConfig
from penstock.errors import ConfigError


def connect(config: SharedConfig) -> tuple[Any, type[Exception]]:
    """A client, and the class of its errors. It connects when it is first asked.

    Raises:
        ConfigError: the client is not installed, or it does not understand `shared.url`.
    """
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError
    except ImportError as error:
        raise ConfigError("shared.store: redis needs the extra: pip install 'penstock[redis]'") from error
    try:
        # It is the caller that tries again: never inside a call, whose time is bounded.
        client: Any = cast(Any, Redis).from_url(
            config.url,
            socket_timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=2,
        )
    except ValueError as error:
        raise ConfigError(f"shared.url: {error}") from error
    return client, RedisError

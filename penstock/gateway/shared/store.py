"""What a lease store is, and which one the configuration asks for."""

from collections.abc import Sequence
from typing import Protocol

from penstock.config.flow import SharedConfig
from penstock.errors import ConfigError
from penstock.policy.limits.lease import LeaseAsk, LeaseReply


class StoreError(Exception):
    """The store is not there, or does not answer as it should. Only the keeper sees it; no request ever does."""


class LeaseStore(Protocol):
    """Where true buckets are kept. An implementation translates; it decides nothing."""

    async def lease(self, asks: Sequence[LeaseAsk]) -> LeaseReply:
        """Ask one batch; an empty one says only that this gateway is there.

        Raises:
            StoreError: it failed. The same batch may be asked again: the store knows it by its numbers.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


def open_store(config: SharedConfig, gateway: str) -> LeaseStore | None:
    """The store of the configuration; None if nothing is shared. `gateway` names this process for all time.

    Raises:
        ConfigError: the store cannot be used as configured, or its client is not installed.
    """
    # Both are imported when they are used: most gateways share nothing.
    if config.store == "redis":
        if not config.url:
            raise ConfigError("shared.url: needed with shared.store redis")
        from penstock.gateway.shared.redis_store import RedisStore

        return RedisStore(config, gateway)
    if config.store == "parent":
        if not config.socket:
            raise ConfigError("shared.socket: needed with shared.store parent")
        from penstock.gateway.shared.local_store import LocalStore

        return LocalStore(config, gateway)
    return None

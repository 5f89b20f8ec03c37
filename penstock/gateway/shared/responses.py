"""Responses that are kept for a while: to be shown again, and to be gone on with.

Each belongs to the tenant whose request it answers, and is looked for among that tenant's alone. One gateway
process keeps them itself; gateways with one Redis (`shared.url`) keep them there, under

    PREFIX:response:TENANT:ID

Several processes without a Redis keep none: the next request would find it only by luck.
"""

import hashlib
from collections import OrderedDict
from typing import Any, Protocol

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.config.flow import SharedConfig
from penstock.gateway.shared.keeper import StoreError
from penstock.types import TenantId

KEPT_S = 24 * 3600
"""How long a response is kept."""
RESPONSE_BYTES_MAX = 4 * 1024 * 1024
"""Of one response with all that it followed; a larger one is not kept."""
TENANT_BYTES_MAX, BYTES_MAX = 32 * 1024 * 1024, 256 * 1024 * 1024
"""Of one tenant's, and of all, in this process's memory: the oldest make room."""
REDIS_CONNECTIONS, REDIS_TIMEOUT_S = 32, 2.0
"""Calls to Redis at once; further ones wait. A call moves megabytes, so it may take longer than a lease."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response, as JSON."""

    body: bytes
    """The response object."""
    items: bytes
    """All that a response after it follows: earlier items, its own input and its output."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return len(self.body) + len(self.items)


class ResponseStore(Protocol):
    """Where they are kept."""

    async def save(self, tenant: TenantId, response_id: str, response: StoredResponse) -> None:
        """Keep it.

        Raises:
            StoreError: the store does not answer.
        """
        ...

    async def load(self, tenant: TenantId, response_id: str) -> StoredResponse | None:
        """The tenant's response of this id; None: it has none, or not any more.

        Raises:
            StoreError: the store does not answer.
        """
        ...

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        """Forget it; whether it was there.

        Raises:
            StoreError: the store does not answer.
        """
        ...

    async def close(self) -> None:
        """Close its connections; nothing is kept or found any more."""
        ...


class MemoryResponses:
    """Those of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[TenantId, str], tuple[int, StoredResponse]] = OrderedDict()
        """The oldest first: when it was kept, and what."""
        self._of: dict[TenantId, OrderedDict[str, int]] = {}
        """The memory of each of a tenant's responses, the oldest first."""
        self._bytes: dict[TenantId, int] = {}
        self.num_bytes = 0
        """The memory of all of them."""

    async def save(self, tenant: TenantId, response_id: str, response: StoredResponse) -> None:
        """See `ResponseStore.save`."""
        self._drop_old()
        assert (tenant, response_id) not in self._kept, "every response has an id of its own"
        num_bytes = response.num_bytes
        self._kept[tenant, response_id] = self._clock.now_ns(), response
        self._of.setdefault(tenant, OrderedDict())[response_id] = num_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes
        self.num_bytes += num_bytes
        while self._bytes.get(tenant, 0) > TENANT_BYTES_MAX:
            self._drop(tenant, next(iter(self._of[tenant])))
        while self.num_bytes > BYTES_MAX:
            self._drop(*next(iter(self._kept)))

    async def load(self, tenant: TenantId, response_id: str) -> StoredResponse | None:
        """See `ResponseStore.load`."""
        self._drop_old()
        found = self._kept.get((tenant, response_id))
        return None if found is None else found[1]

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        """See `ResponseStore.delete`."""
        if await self.load(tenant, response_id) is None:
            return False
        self._drop(tenant, response_id)
        return True

    async def close(self) -> None:
        """See `ResponseStore.close`."""

    def _drop_old(self) -> None:
        since_ns = self._clock.now_ns() - KEPT_S * NS_PER_S
        while self._kept:
            (tenant, response_id), (kept_ns, _) = next(iter(self._kept.items()))
            if kept_ns > since_ns:
                return
            self._drop(tenant, response_id)

    def _drop(self, tenant: TenantId, response_id: str) -> None:
        del self._kept[tenant, response_id]
        num_bytes = self._of[tenant].pop(response_id)
        self._bytes[tenant] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._of[tenant]:
            del self._of[tenant], self._bytes[tenant]


class RedisResponses:
    """Those of all gateways with one Redis, which forgets them by itself and bounds what they take
    (`maxmemory`).
    """

    def __init__(self, config: SharedConfig) -> None:
        """Connects when it is first asked.

        Raises:
            ConfigError: the client is not installed, or it does not understand `shared.url`.
        """
        from penstock.gateway.shared.redis_store import connect

        self._prefix = config.prefix
        self._client, self._error = connect(
            config, num_connections=REDIS_CONNECTIONS, timeout_s=REDIS_TIMEOUT_S
        )

    async def save(self, tenant: TenantId, response_id: str, response: StoredResponse) -> None:
        """See `ResponseStore.save`."""
        value = msgspec.msgpack.encode(response)
        await self._ask("set", self._key(tenant, response_id), value, ex=KEPT_S)

    async def load(self, tenant: TenantId, response_id: str) -> StoredResponse | None:
        """See `ResponseStore.load`."""
        value: bytes | None = await self._ask("get", self._key(tenant, response_id))
        return None if value is None else msgspec.msgpack.decode(value, type=StoredResponse)

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        """See `ResponseStore.delete`."""
        return bool(await self._ask("delete", self._key(tenant, response_id)))

    async def close(self) -> None:
        """See `ResponseStore.close`."""
        await self._client.aclose()

    async def _ask(self, verb: str, *args: object, **more: object) -> Any:  # noqa: ANN401
        try:
            return await getattr(self._client, verb)(*args, **more)
        except (self._error, OSError) as error:
            raise StoreError(str(error)) from error

    def _key(self, tenant: TenantId, response_id: str) -> str:
        """One that no other tenant's name and id can make together."""
        named = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
        return f"{self._prefix}:response:{named}:{response_id}"


def open_responses(shared: SharedConfig, clock: Clock, *, processes: int) -> ResponseStore | None:
    """Where responses are kept; None where no place is seen by all `processes` of this server.

    Raises:
        ConfigError: the store cannot be used as configured, or its client is not installed.
    """
    if shared.url:
        return RedisResponses(shared)
    return MemoryResponses(clock) if processes == 1 else None

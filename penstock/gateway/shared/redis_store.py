"""Leases from Redis: one script does a whole batch, atomically and by the server's clock.

The script is policy/limits/lease_table.py in Lua; tests hold the two together. One Redis with any number of
replicas; not Redis Cluster, since a batch has keys of many tenants. Keys, all under `shared.prefix`:

    PREFIX:gateways           who asked lately, by time
    PREFIX:limit:KEY          hash: level, at, epoch, given, burst; expires when it would be full again
    PREFIX:said:GATEWAY:KEY   number and grant of the last answer; so a question that is asked again is not
                              granted twice

What tenants spend on each machine, in Redis: a hash for each tenant's day and month, with one field for
each ledger.

    PREFIX:spent:day:NUMBER:TENANT      hash: ledger -> millionths; NUMBER counts days since 1970-01-01
    PREFIX:spent:month:NUMBER:TENANT    NUMBER is 12 * year + month - 1

A field holds a total, never an increment: it may be told as often as one likes, by every process of the
machine, after a crash, and to a Redis that has lost its memory.
"""

from collections.abc import Sequence
from typing import Any, cast

from penstock.config.flow import SharedConfig
from penstock.errors import ConfigError
from penstock.gateway.shared.keeper import StoreError
from penstock.policy.limits.budget import Spent, month_of
from penstock.policy.limits.lease import LeaseAsk, LeaseGrant, LeaseReply
from penstock.policy.limits.store_terms import shared_terms

SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ttl_us = tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now - ttl_us))
redis.call('PEXPIRE', KEYS[1], math.ceil(ttl_us / 1000))
local reply = {redis.call('ZCARD', KEYS[1])}

local function grant(limit, said, rate, burst, seq, owed, returned, want, epoch, known_level, known_us)
  local stored = redis.call('HMGET', limit, 'level', 'at', 'epoch', 'given', 'burst')
  local level, at, life, given = burst, now, now, 0
  if stored[1] then
    level, at, life, given = tonumber(stored[1]), tonumber(stored[2]), tonumber(stored[3]), \
tonumber(stored[4])
    local cap = tonumber(stored[5])
    if now > at then level = math.min(cap, level + (now - at) * rate / 60000000) end
    if cap ~= burst then level = math.max(level + burst - cap, math.min(level, 0)) end
  end
  local granted
  local last = redis.call('HMGET', said, 'seq', 'granted')
  if last[1] and tonumber(last[1]) >= seq then
    granted = tonumber(last[2])
  else
    if epoch ~= 0 and epoch ~= life then
      local refilled = known_level + math.max(0, now - known_us) * rate / 60000000
      level = math.min(level, math.min(burst, refilled) - given)
    end
    level = math.min(burst, level + returned) - owed
    granted = math.max(0, math.min(want, math.floor(level)))
    level = level - granted
    given = given + granted + owed - returned
    redis.call('HSET', said, 'seq', string.format('%.0f', seq), 'granted', string.format('%.0f', granted))
    redis.call('PEXPIRE', said, math.ceil(ttl_us / 1000))
  end
  redis.call('HSET', limit, 'level', string.format('%.17g', level), 'at', string.format('%.0f', \
math.max(now, at)),
    'epoch', string.format('%.0f', life), 'given', string.format('%.17g', given),
    'burst', string.format('%.0f', burst))
  redis.call('PEXPIRE', limit, math.ceil((burst - level) * 60000 / rate) + 60000)
  return granted, math.floor(level), life
end

local each = 9
for i = 0, (#ARGV - 2) / each - 1 do
  local a = {}
  for j = 1, each do a[j] = tonumber(ARGV[2 + i * each + j]) end
  local granted, level, life = grant(KEYS[2 + 2 * i], KEYS[3 + 2 * i], unpack(a))
  reply[#reply + 1] = granted
  reply[#reply + 1] = level
  reply[#reply + 1] = life
end
reply[#reply + 1] = now
return reply
"""
"""Amounts are doubles: exact below 2^53, and a level that was rounded is off by less than a billionth of a
token."""


class RedisStore:
    """A `LeaseStore` in Redis."""

    def __init__(self, config: SharedConfig, gateway: str) -> None:
        """Connects when it is first asked.

        Raises:
            ConfigError: the client is not installed, or it does not understand `shared.url`.
        """
        self._gateway, self._prefix = gateway, config.prefix
        self._ttl_us = int(shared_terms(config).gateway_ttl_s * 1_000_000)
        self._client, self._error = connect(config)
        self._script: Any = self._client.register_script(SCRIPT)

    async def lease(self, asks: Sequence[LeaseAsk]) -> LeaseReply:
        """See `LeaseStore.lease`."""
        keys = [f"{self._prefix}:gateways"]
        args: list[str | int] = [self._gateway, self._ttl_us]
        for ask in asks:
            keys += (f"{self._prefix}:limit:{ask.key}", f"{self._prefix}:said:{self._gateway}:{ask.key}")
            args += (ask.rate, ask.burst, ask.seq, ask.owed, ask.returned, ask.want)
            args += (ask.epoch, ask.known_level, ask.known_us)
        try:
            flat: list[int] = await self._script(keys=keys, args=args)
        except self._error as error:
            raise StoreError(str(error)) from error
        return _reply(flat)

    async def close(self) -> None:
        """See `LeaseStore.close`."""
        await self._client.aclose()


def _reply(flat: list[int]) -> LeaseReply:
    """The script's answer: gateways, then three numbers for each question, then the time."""
    grants = tuple(
        LeaseGrant(granted=flat[i], level=flat[i + 1], epoch=flat[i + 2], at_us=flat[-1])
        for i in range(1, len(flat) - 1, 3)
    )
    return LeaseReply(num_gateways=flat[0], grants=grants)


# The connection to Redis that the stores of this package use, each its own.


def connect(
    config: SharedConfig, *, num_connections: int = 0, timeout_s: float = 0.0
) -> tuple[Any, type[Exception]]:
    """A client, and the class of its errors. It connects when it is first asked.

    `num_connections`: a call for which none of so many connections is free waits for one, `timeout_s` at
    most. 0: the caller asks one question at a time.

    Raises:
        ConfigError: the client is not installed, or it does not understand `shared.url`.
    """
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError
    except ImportError as error:
        raise ConfigError("shared.url: Redis needs the extra: pip install 'penstock[redis]'") from error
    timeout_s = timeout_s or shared_terms(config).timeout_s
    options = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),  # It is the caller that tries again: a call's time is bounded.
    }
    try:
        if not num_connections:
            return cast(Any, Redis).from_url(config.url, max_connections=2, **options), RedisError
        pool: Any = cast(Any, BlockingConnectionPool).from_url(
            config.url, max_connections=num_connections, timeout=timeout_s, **options
        )
    except ValueError as error:
        raise ConfigError(f"shared.url: {error}") from error
    return cast(Any, Redis).from_pool(pool), RedisError


DAY_KEPT_MS = 3 * 86_400_000
MONTH_KEPT_MS = 63 * 86_400_000

SPENDING_SCRIPT = """
local reply = {}
for i, key in ipairs(KEYS) do
  local micros, kept_ms = tonumber(ARGV[2 * i]), ARGV[2 * i + 1]
  local elsewhere, known = 0, 0
  local fields = redis.call('HGETALL', key)
  for j = 1, #fields, 2 do
    if fields[j] == ARGV[1] then known = tonumber(fields[j + 1]) else elsewhere = elsewhere + \
tonumber(fields[j + 1]) end
  end
  if micros > known then
    redis.call('HSET', key, ARGV[1], string.format('%.0f', micros))
    redis.call('PEXPIRE', key, kept_ms)
  end
  reply[i] = elsewhere
end
return reply
"""


class RedisSpending:
    """Exchanges totals; `ledger` names this machine's ledger for all time."""

    def __init__(self, config: SharedConfig, ledger: str) -> None:
        """Connects when it is first asked.

        Raises:
            ConfigError: the client is not installed, or it does not understand `shared.url`.
        """
        self._ledger, self._prefix = ledger, config.prefix
        self._client, self._error = connect(config)
        self._script: Any = self._client.register_script(SPENDING_SCRIPT)

    async def exchange(self, here: Sequence[Spent]) -> list[Spent]:
        """Tell what was spent here; what the same tenants have spent on other machines in the same days and
        months.

        Raises:
            StoreError: it failed. The same may be told again.
        """
        keys: list[str] = []
        args: list[str | int] = [self._ledger]
        for spent in here:
            keys.append(f"{self._prefix}:spent:day:{spent.day}:{spent.tenant}")
            keys.append(f"{self._prefix}:spent:month:{month_of(spent.day)}:{spent.tenant}")
            args += (spent.day_micros, DAY_KEPT_MS, spent.month_micros, MONTH_KEPT_MS)
        try:
            flat: list[int] = await self._script(keys=keys, args=args)
        except self._error as error:
            raise StoreError(str(error)) from error
        return [
            Spent(tenant=spent.tenant, day=spent.day, day_micros=flat[2 * i], month_micros=flat[2 * i + 1])
            for i, spent in enumerate(here)
        ]

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

"""Leases from Redis: one script does a whole batch, atomically and by the server's clock.

The script is policy/limits/lease_table.py in Lua; tests hold the two together. One Redis with any number of
replicas; not Redis Cluster, since a batch has keys of many tenants. Keys, all under `shared.prefix`:

    PREFIX:gateways           who asked lately, by time
    PREFIX:limit:KEY          hash: level, at, epoch, given, burst; expires when it would be full again
    PREFIX:said:GATEWAY:KEY   number and grant of the last answer; so a question that is asked again is not
                              granted twice
    PREFIX:spent:KEY          hash: process -> millionths of a budget's period; `total`, `epoch`
    PREFIX:held:KEY           hash: gateway -> what it holds of it, number and grant of the last answer
    PREFIX:leader             hash: holder, token; expires with the lease (fleet/leadership.py)
    PREFIX:leader:token       the last token
    PREFIX:leader:state       hash: state, version (the date of it)
    PREFIX:leader:inbox       what those that do not lead have to say

Of a budget every number is a total, never an increment: it may be told as often as one likes, after a crash,
and to a Redis that has lost its memory.
"""

from collections.abc import Sequence
from typing import Any, cast

from penstock.config.flow import SharedConfig
from penstock.errors import ConfigError
from penstock.fleet.leadership import LEASE_S, BeatCall, LeaderStoreLost, LeaseBeat
from penstock.gateway.shared.keeper import StoreError
from penstock.policy.limits.lease_table import Ask, BudgetAsk, LeaseAsk, LeaseGrant, LeaseReply
from penstock.policy.terms import shared_terms

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


BUDGET_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local whole = function(number) return string.format('%.0f', number) end
local me, ttl_us = ARGV[1], tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], whole(now), me)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. whole(now - ttl_us))
redis.call('PEXPIRE', KEYS[1], math.ceil(ttl_us / 1000))
local reply = {redis.call('ZCARD', KEYS[1])}

local function count(spent, process, micros)
  local more = micros - tonumber(redis.call('HGET', spent, 'p:' .. process) or 0)
  if more > 0 then
    redis.call('HSET', spent, 'p:' .. process, whole(micros))
    redis.call('HINCRBY', spent, 'total', whole(more))
  end
end

local at = 3
local function next_number() at = at + 1 return tonumber(ARGV[at - 1]) end
for i = 2, #KEYS, 2 do
  local spent, held = KEYS[i], KEYS[i + 1]
  local limit, seq, mine, want = next_number(), next_number(), next_number(), next_number()
  local least, kept_s, processes = next_number(), next_number(), next_number()
  redis.call('HSETNX', spent, 'epoch', whole(now))
  local others, last, granted = 0, nil, 0
  local fields = redis.call('HGETALL', held)
  for j = 1, #fields, 2 do
    local holds, asked, got = string.match(fields[j + 1], '(%S+) (%S+) (%S+)')
    if fields[j] == me then
      last = {tonumber(holds), tonumber(asked), tonumber(got)}
    elseif redis.call('ZSCORE', KEYS[1], fields[j]) then
      others = others + tonumber(holds)
    else
      redis.call('HDEL', held, fields[j])
    end
  end
  local is_new = not last or seq > last[2]
  for _ = 1, processes do
    local process = ARGV[at]
    at = at + 1
    local micros = next_number()
    if is_new then count(spent, process, micros) end
  end
  local total = tonumber(redis.call('HGET', spent, 'total') or 0)
  if is_new then
    local left = limit - total - others - mine
    if left >= least then granted = math.max(0, math.min(want, left)) end
    last = {mine + granted, seq, granted}
    redis.call('HSET', held, me, whole(last[1]) .. ' ' .. whole(seq) .. ' ' .. whole(granted))
  end
  redis.call('EXPIRE', spent, kept_s)
  redis.call('EXPIRE', held, kept_s)
  reply[#reply + 1] = last[3]
  reply[#reply + 1] = limit - total - others - last[1]
  reply[#reply + 1] = tonumber(redis.call('HGET', spent, 'epoch'))
  reply[#reply + 1] = total
end
reply[#reply + 1] = now
return reply
"""
"""policy/limits/lease_table.py in Lua. Amounts are exact below 2^53."""


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
        self._limits: Any = self._client.register_script(SCRIPT)
        self._budgets: Any = self._client.register_script(BUDGET_SCRIPT)

    async def lease(self, asks: Sequence[Ask]) -> LeaseReply:
        """See `LeaseStore.lease`."""
        limits = [ask for ask in asks if isinstance(ask, LeaseAsk)]
        budgets = [ask for ask in asks if isinstance(ask, BudgetAsk)]
        try:
            # A batch without a question only says hello.
            flat = await self._ask_limits(limits) if limits or not budgets else [0, 0]
            of_limits = iter([_grant(flat, i) for i in range(1, len(flat) - 1, 3)])
            num_gateways = flat[0]
            flat = await self._ask_budgets(budgets) if budgets else [num_gateways, 0]
            num_gateways = flat[0]
            of_budgets = iter([_grant(flat, i, spent=flat[i + 3]) for i in range(1, len(flat) - 1, 4)])
        except self._error as error:
            raise StoreError(str(error)) from error
        grants = tuple(next(of_limits if isinstance(ask, LeaseAsk) else of_budgets) for ask in asks)
        return LeaseReply(num_gateways=num_gateways, grants=grants)

    async def _ask_limits(self, asks: Sequence[LeaseAsk]) -> list[int]:
        keys = [f"{self._prefix}:gateways"]
        args: list[str | int] = [self._gateway, self._ttl_us]
        for ask in asks:
            keys += (f"{self._prefix}:limit:{ask.key}", f"{self._prefix}:said:{self._gateway}:{ask.key}")
            args += (ask.rate, ask.burst, ask.seq, ask.owed, ask.returned, ask.want)
            args += (ask.epoch, ask.known_level, ask.known_us)
        return await self._limits(keys=keys, args=args)

    async def _ask_budgets(self, asks: Sequence[BudgetAsk]) -> list[int]:
        keys = [f"{self._prefix}:gateways"]
        args: list[str | int] = [self._gateway, self._ttl_us]
        for ask in asks:
            processes = ((ask.process, ask.spent), *ask.past)
            keys += (f"{self._prefix}:spent:{ask.key}", f"{self._prefix}:held:{ask.key}")
            args += (ask.limit, ask.seq, ask.held, ask.want, ask.least, ask.kept_s, len(processes))
            for process, spent in processes:
                args += (process, spent)
        return await self._budgets(keys=keys, args=args)

    async def close(self) -> None:
        """See `LeaseStore.close`."""
        await self._client.aclose()


def _grant(flat: list[int], i: int, *, spent: int = 0) -> LeaseGrant:
    """The one at `i` of a script's answer: gateways, then some numbers for each question, then the time."""
    return LeaseGrant(granted=flat[i], level=flat[i + 1], epoch=flat[i + 2], at_us=flat[-1], spent=spent)


LEADER_SCRIPT = """
local lease, counter, kept, inbox = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local me, ttl_ms, led, known, version, state = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local holder, token = unpack(redis.call('HMGET', lease, 'holder', 'token'))
local messages = {}
if not holder or holder == me then
  if not holder or known > tonumber(token) then
    token = math.max(known, tonumber(redis.call('GET', counter) or 0)) + 1
    token, holder = string.format('%.0f', token), me
    redis.call('SET', counter, token)
    redis.call('HSET', lease, 'holder', me, 'token', token)
  end
  redis.call('PEXPIRE', lease, ttl_ms)
  if state ~= '' and led == token then
    redis.call('HSET', kept, 'state', state, 'version', now)
    version = now
  end
  messages = redis.call('LRANGE', inbox, 0, -1)
  redis.call('DEL', inbox)
elseif #ARGV > 6 then
  redis.call('RPUSH', inbox, unpack(ARGV, 7))
  redis.call('LTRIM', inbox, -5000, -1)
  redis.call('PEXPIRE', inbox, 60000)
end
local last = redis.call('HGET', kept, 'version') or '0'
local told = last ~= version and redis.call('HGET', kept, 'state') or ''
return {tonumber(token), holder, now, last, told, messages}
"""
LEAVE_SCRIPT = """
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
_LEADER_TIMEOUT_S = 1.0


class RedisLeaderStore:
    """A `LeaderStore` in Redis."""

    def __init__(self, config: SharedConfig) -> None:
        """Connects when it is first asked.

        Raises:
            ConfigError: the client is not installed, or it does not understand `shared.url`.
        """
        self._client, self._error = connect(config, num_connections=2, timeout_s=_LEADER_TIMEOUT_S)
        start = f"{config.prefix}:leader"
        self._keys = [start, f"{start}:token", f"{start}:state", f"{start}:inbox"]
        self._beat: Any = self._client.register_script(LEADER_SCRIPT)
        self._leave: Any = self._client.register_script(LEAVE_SCRIPT)

    async def beat(self, call: BeatCall) -> LeaseBeat:
        """See `LeaderStore`."""
        args: list[str | int | bytes] = [call.me, int(LEASE_S * 1000), call.led, call.known, call.version]
        try:
            found = await self._beat(keys=self._keys, args=[*args, call.state, *call.messages])
        except (self._error, OSError) as error:
            raise LeaderStoreLost(str(error)) from error
        token, holder, now, version, state, messages = found
        return LeaseBeat(int(token), holder.decode(), int(now), int(version), state, messages)

    async def leave(self, me: str) -> None:
        """See `LeaderStore`."""
        try:
            await self._leave(keys=self._keys[:1], args=[me])
        except (self._error, OSError) as error:
            raise LeaderStoreLost(str(error)) from error

    async def close(self) -> None:
        """See `LeaderStore`."""
        await self._client.aclose()


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

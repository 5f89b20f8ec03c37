"""What tenants spend on each machine, in Redis: a hash for each tenant's day and month, with one field for
each ledger.

    PREFIX:spent:day:NUMBER:TENANT      hash: ledger -> millionths; NUMBER counts days since 1970-01-01
    PREFIX:spent:month:NUMBER:TENANT    NUMBER is 12 * year + month - 1

A field holds a total, never an increment: it may be told as often as one likes, by every process of the
machine, after a crash, and to a Redis that has lost its memory.
"""

from collections.abc import Sequence
from typing import Any

from penstock.config.flow import SharedConfig
from penstock.gateway.shared.redis_store import connect
from penstock.gateway.shared.store import StoreError
from penstock.policy.limits.budget import Spent
from penstock.policy.limits.calendar import month_of

DAY_KEPT_MS = 3 * 86_400_000
MONTH_KEPT_MS = 63 * 86_400_000

SCRIPT = """
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
        self._script: Any = self._client.register_script(SCRIPT)

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

"""The limits inside a tenant, of each of its keys and of each `user` that it names: one reservation over all
levels.

    reserve: user, key, tenant ──> all hold, or the first that refuses gives back what the others took

Each level is a tenant of its own to a `Limiter`: its buckets, leases and lines are those of rate_limit.py.
Clients choose what they write as `user`, so these levels keep people of one tenant apart; the tenant's limit
holds whatever they write.
"""

from dataclasses import replace
from hashlib import blake2b

from penstock.policy.limits.rate_limit import Limiter, LimitRefusal, LimitReservation
from penstock.policy.tenant import PartLimits, Tenant
from penstock.types import TenantId

PARTS_MAX = 65_536
"""Keys and users whose names are kept; over it all are made again as they come."""


class LevelsReservation:
    """What one request holds, on each level. Ends by `settle` or by `undo`, exactly once."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[LimitReservation]) -> None:
        assert len(parts) > 1, "one level needs no sum of them"
        self._parts = parts

    def renew(self, now_ns: int, num_output_tokens: int) -> None:
        """See `LimitReservation.renew`."""
        for part in self._parts:
            part.renew(now_ns, num_output_tokens)

    def settle(self, now_ns: int, actual_tokens: int) -> None:
        """See `LimitReservation.settle`."""
        for part in self._parts:
            part.settle(now_ns, actual_tokens)

    def undo(self, now_ns: int) -> None:
        """See `LimitReservation.undo`."""
        for part in self._parts:
            part.undo(now_ns)


class LimitLevels:
    """The `Limits` of a gateway: a tenant's, and those inside it."""

    __slots__ = ("_known", "_parts", "_tenants")

    def __init__(self, tenants: Limiter) -> None:
        self._tenants, self._parts = tenants, tenants.sibling()
        self._known: dict[tuple[TenantId, str, str], tuple[PartLimits, Tenant]] = {}

    def reserve(
        self,
        now_ns: int,
        tenant: Tenant,
        prompt_tokens: int,
        output_tokens: int,
        *,
        key: str = "",
        user: str = "",
        request_id: str = "",
    ) -> LimitReservation | LevelsReservation | LimitRefusal:
        """Take what a request needs on all levels, or nothing."""
        inside = ((tenant.per_user, "user", user), (tenant.per_key, "key", key))
        held: list[LimitReservation] = []
        for limits, level, name in inside:
            if limits is None:
                continue
            part = self._part(tenant, limits, level, name)
            answer = self._parts.reserve(now_ns, part, prompt_tokens, output_tokens, request_id=request_id)
            if isinstance(answer, LimitRefusal):
                for each in held:
                    each.undo(now_ns)
                return replace(answer, level=level)
            held.append(answer)
        answer = self._tenants.reserve(now_ns, tenant, prompt_tokens, output_tokens, request_id=request_id)
        if not held:
            return answer
        if isinstance(answer, LimitRefusal):
            for each in held:
                each.undo(now_ns)
            return answer
        return LevelsReservation([*held, answer])

    def _part(self, tenant: Tenant, limits: PartLimits, level: str, name: str) -> Tenant:
        """A key or a user, as the limiter knows it: the same object as long as its limits are."""
        known = self._known.get((tenant.id, level, name))
        if known is not None and known[0] == limits:
            return known[1]
        if len(self._known) >= PARTS_MAX:
            self._known.clear()
        digest = blake2b(
            name.encode(), digest_size=12
        ).hexdigest()  # A client's words name no key of a store.
        part = Tenant(
            id=TenantId(f"{tenant.id};{level};{digest}"),  # No tenant's name has a semicolon.
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            concurrent_max=limits.concurrent_max,
        )
        self._known[tenant.id, level, name] = limits, part
        return part

"""The limits inside a tenant, of each of its keys and of each `user` that it names: one reservation over all
levels.

    reserve: tenant, key, user ──> all hold, or the first that refuses gives back what the others took

Each level is a tenant of its own to a `Limiter`: its buckets, leases and lines are those of rate_limit.py.
Clients choose what they write as `user`, so these levels keep people of one tenant apart; the tenant's limit
holds whatever they write. It is asked first: a flood of invented users is refused before anything of them is
kept.
"""

from dataclasses import replace
from hashlib import blake2b

from penstock.policy.limits.rate_limit import Limiter, LimitRefusal, LimitReservation
from penstock.policy.tenant import PartLimits, Tenant
from penstock.types import TenantId

PARTS_MAX = 65_536
"""Keys and users whose names are kept; over it all are made again as they come."""


class LevelsReservation:
    """The reservations of one request, on each level. Ends by `settle` or by `undo`, exactly once."""

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
    """The `Levels` of a gateway: a tenant's limits, and those inside it. Only tenants that have some of these
    are asked for here.
    """

    __slots__ = ("_known", "_tenants", "parts")

    def __init__(self, tenants: Limiter) -> None:
        self._tenants, self.parts = tenants, tenants.sibling()
        self._known: dict[TenantId, tuple[PartLimits, Tenant]] = {}
        """By the name that the limiter knows it by."""

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
    ) -> LevelsReservation | LimitRefusal:
        """Take what a request needs on all levels, or nothing."""
        assert tenant.has_levels, "other tenants are the limiter's alone"
        answer = self._tenants.reserve(now_ns, tenant, prompt_tokens, output_tokens, request_id=request_id)
        if isinstance(answer, LimitRefusal):
            return answer
        held = [answer]
        for limits, level, name in ((tenant.per_key, "key", key), (tenant.per_user, "user", user)):
            if limits is None:
                continue
            part = self._part(tenant, limits, level, name)
            answer = self.parts.reserve(now_ns, part, prompt_tokens, output_tokens, request_id=request_id)
            if isinstance(answer, LimitRefusal):
                for each in held:
                    each.undo(now_ns)
                return replace(answer, level=level)
            held.append(answer)
        return LevelsReservation(held)

    def lacks(
        self, now_ns: int, tenant: Tenant, prompt_tokens: int, output_tokens: int, *, key: str, user: str
    ) -> bool:
        """Whether the store is asked, on any level, for what is not covered here: see `TokenSource.lacks`."""
        assert tenant.has_levels, "other tenants are the limiter's alone"
        needed = prompt_tokens + output_tokens
        if self._tenants.lacks(now_ns, tenant, needed):
            return True
        if not self._tenants.has(now_ns, tenant, needed):
            return False  # One that its tenant's limit refuses is not asked for.
        lacks = False
        for limits, level, name in ((tenant.per_key, "key", key), (tenant.per_user, "user", user)):
            if limits is not None:
                lacks |= self.parts.lacks(now_ns, self._part(tenant, limits, level, name), needed)
        return lacks

    def _part(self, tenant: Tenant, limits: PartLimits, level: str, name: str) -> Tenant:
        """A key or a user, as the limiter knows it: the same object as long as its limits are."""
        # A client's words name no key of a store, and take no more memory than this.
        digest = blake2b(name.encode(), digest_size=12).hexdigest()
        part_id = TenantId(f"{tenant.id};{level};{digest}")  # No tenant's name has a semicolon.
        known = self._known.get(part_id)
        if known is not None and known[0] == limits:
            return known[1]
        if len(self._known) >= PARTS_MAX:
            self._known.clear()
        part = Tenant(
            id=part_id,
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            concurrent_max=limits.concurrent_max,
        )
        self._known[part_id] = limits, part
        assert len(self._known) <= PARTS_MAX, "names are bounded"
        return part

"""Which tenants have a name in metrics: those that use most, so that no number of tenants makes many series.

A tenant gets its name once it has used `1 / TENANTS_MAX` of all tokens of this process, and keeps it; what it
used before is counted as of "other", like all that others use. So sums over tenants are right at any time.
Use is followed for `FOLLOWED_MAX` tenants at most (Metwally's Space-Saving): a new one takes the place of the
least, with its count.
"""

TENANTS_MAX = 32
FOLLOWED_MAX = 256
OTHER = "other"


class TenantLabels:
    """The names of one process."""

    def __init__(self) -> None:
        self._named = set[str]()
        self._used: dict[str, int] = {}
        self._total = 0

    def label(self, tenant: str, tokens: int) -> str:
        """The name under which a request of this tenant is counted, which used so many tokens."""
        if tenant in self._named:
            self._total += tokens
            return tenant
        if not tenant or len(self._named) >= TENANTS_MAX or not tokens:
            self._total += tokens
            return OTHER
        if tenant not in self._used and len(self._used) >= FOLLOWED_MAX:
            least = min(self._used, key=self._used.__getitem__)
            self._used[tenant] = self._used.pop(least)
        self._used[tenant] = self._used.get(tenant, 0) + tokens
        self._total += tokens
        if self._used[tenant] * TENANTS_MAX < self._total:
            return OTHER
        del self._used[tenant]
        self._named.add(tenant)
        return tenant

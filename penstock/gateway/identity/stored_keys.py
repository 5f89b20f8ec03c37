"""The keys of a keys file, ready to be asked whose a key is: its prefix finds the record, its hash is compared."""

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import Unauthenticated
from penstock.gateway.identity.api_keys import ApiKey, digest_of
from penstock.gateway.identity.auth import Caller
from penstock.gateway.identity.tiers import Tenants
from penstock.policy.tenant import NOBODY

_KEY = re.compile(rb"sk-([a-z2-7]{12})_[A-Za-z0-9_-]{43}")
_NOBODYS_HASH = bytes(32)


@dataclass(slots=True, frozen=True)
class _Entry:
    digest: bytes
    record: ApiKey
    caller: Caller


class StoredKeys:
    """The keys of a file, ready to be asked. One lookup and one constant-time comparison, however many there are."""

    def __init__(self, keys: Sequence[ApiKey], tenants: Tenants) -> None:
        """The keys must go with the tenants (see `tier_problem`)."""
        active = [key for key in keys if not key.revoked_s]
        tiers = {key.tenant: key.tier for key in active}
        made = {tenant: tenants.learn(tenant, tier) for tenant, tier in tiers.items()}
        self._entries: Mapping[bytes, _Entry] = {
            key.id.encode(): _Entry(
                bytes.fromhex(key.hash),
                key,
                Caller(
                    tenant=made.get(key.tenant, NOBODY),
                    key_prefix=key.prefix,
                    admin=key.admin,
                    scrape=key.scrape,
                ),
            )
            for key in keys
        }

    def __len__(self) -> int:
        return len(self._entries)

    def active(self, now_s: int) -> frozenset[bytes]:
        """The ids of those that are accepted now."""
        return frozenset(
            name for name, entry in self._entries.items() if entry.record.state(now_s) == "active"
        )

    def lacks(self, before: frozenset[bytes]) -> int:
        """How many of these ids have no record here. Revoked and expired keys have one."""
        return len(before - self._entries.keys())

    def find(self, key: bytes, now_s: int) -> Caller | None:
        """The caller of this key, or None if it is none of these.

        Raises:
            Unauthenticated: it is one, but not now.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        entry = self._entries.get(match[1])
        # An unknown prefix takes the same steps as a known one with a wrong secret.
        known = hmac.compare_digest(digest_of(key), _NOBODYS_HASH if entry is None else entry.digest)
        if entry is None or not known:
            return None
        state = entry.record.state(now_s)
        if state != "active":
            what = {"revoked": "was revoked", "expired": "has expired", "early": "is not valid yet"}[state]
            raise Unauthenticated(f"This API key {what}.", code=f"{state}_api_key")
        return entry.caller

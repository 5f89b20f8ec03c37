"""What a lease store is: where the true buckets of shared limits are kept."""

from collections.abc import Sequence
from typing import Protocol

from penstock.policy.limits.lease import LeaseAsk, LeaseReply


class StoreError(Exception):
    """The store is not there, or does not answer as it should.

    Only the keeper sees it; no request ever does.
    """


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

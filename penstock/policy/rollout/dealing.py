"""The version that a conversation gets while a rollout is active: what gateways, real and simulated, know of
a rollout, and how each of them deals by it. All deal alike, for all know the same.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from penstock.policy.rollout.cohorts import GROUPS, Cohort, bucket_of, cohort_of
from penstock.policy.rollout.rollout import Rollout
from penstock.policy.tenant import ANONYMOUS, Tenant


class Assigned(NamedTuple):
    """The version assigned to a conversation."""

    rollout: str
    version: str
    cohort: Cohort
    group: int
    candidate: str = ""
    """The version that gets copies of its requests; empty: none does."""


class ActiveRollout(msgspec.Struct, frozen=True):
    """The facts that a gateway needs to assign a model's conversations."""

    id: str
    model: str
    baseline: str
    candidate: str
    share: int
    """Of `BUCKETS`."""
    is_measured: bool = True
    tenants: tuple[str, ...] = ()
    """The tenants whose conversations are dealt; none: everybody's."""
    shadow: int = 0
    """Of `BUCKETS`: the baseline answers these, and the candidate gets copies."""

    @property
    def serves(self) -> str:
        """The version of those who are in no canary."""
        return self.baseline if self.is_measured else self.candidate

    def assign(self, conversation: Callable[[], str], tenant: Tenant = ANONYMOUS) -> Assigned:
        """The version for a conversation; its name is asked for only if it matters."""
        names = {tenant.id, f"tier:{tenant.tier}"}
        if self.tenants and names.isdisjoint(self.tenants):
            return Assigned(self.id, self.baseline, Cohort.REST, 0)
        bucket = bucket_of(self.id, conversation())
        cohort = cohort_of(bucket, self.share, self.shadow)
        version = self.candidate if cohort is Cohort.CANARY else self.baseline
        copied_to = self.candidate if cohort is Cohort.SHADOW else ""
        is_measured = self.is_measured
        return Assigned(self.id, version, cohort if is_measured else Cohort.REST, bucket % GROUPS, copied_to)


def active_of(rollout: Rollout) -> ActiveRollout | None:
    """A rollout as gateways know it; None: it deals nothing."""
    if not (rollout.share or rollout.shadow):
        return None
    plan = rollout.plan
    return ActiveRollout(
        rollout.id,
        plan.model,
        rollout.baseline,
        plan.candidate,
        rollout.share,
        rollout.is_live,
        plan.tenants if rollout.is_live else (),
        rollout.shadow,
    )

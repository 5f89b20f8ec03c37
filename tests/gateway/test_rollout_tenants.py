"""An A/B test of some tenants: only theirs is dealt."""

from dataclasses import replace

from penstock.gateway.models.rollouts import RolloutTable
from penstock.policy.rollout.cohorts import BUCKETS, Cohort
from penstock.policy.rollout.dealing import ActiveRollout
from penstock.policy.tenant import ANONYMOUS
from penstock.types import TenantId


def test_only_the_named_tenants_and_tiers_are_dealt() -> None:
    table = RolloutTable()
    names = ("acme", "tier:beta")
    table.adopt([ActiveRollout("r", "m", "m@1", "m@2", BUCKETS // 2, tenants=names)])
    for tenant, tier, is_dealt in (("acme", "", True), ("other", "beta", True), ("other", "pro", False)):
        who = replace(ANONYMOUS, id=TenantId(tenant), tier=tier)
        found = [table.assign("m", lambda number=number: f"c{number}", who) for number in range(200)]
        cohorts = {each.cohort for each in found if each is not None}
        assert cohorts == ({Cohort.CANARY, Cohort.CONTROL} if is_dealt else {Cohort.REST})
        versions = {each.version for each in found if each is not None}
        assert versions == ({"m@1", "m@2"} if is_dealt else {"m@1"})
    table.adopt([ActiveRollout("r", "m", "m@1", "m@2", BUCKETS, is_measured=False)])
    promoted = table.assign("m", lambda: "c", replace(ANONYMOUS, id=TenantId("other")))
    assert promoted is not None
    assert promoted.version == "m@2", "a promoted version is everybody's"

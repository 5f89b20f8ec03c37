"""Limits inside a tenant: of each key and each user, one reservation over all levels."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import NS_PER_S
from penstock.config.flow import LimitsConfig
from penstock.policy.limits.bucket import Bucket
from penstock.policy.limits.levels import LevelsReservation, LimitLevels
from penstock.policy.limits.rate_limit import Limiter, LimitRefusal
from penstock.policy.tenant import PartLimits, Tenant
from penstock.types import TenantId


def tenant(**limits) -> Tenant:
    return Tenant(id=TenantId("acme"), **limits)


def levels() -> tuple[LimitLevels, Limiter]:
    limiter = Limiter(LimitsConfig())
    return LimitLevels(limiter), limiter


def test_each_user_and_each_key_has_its_own_limit_within_the_tenants() -> None:
    made, _ = levels()
    acme = tenant(
        requests_per_minute=5,
        per_key=PartLimits(requests_per_minute=3),
        per_user=PartLimits(requests_per_minute=2),
    )

    def ask(key: str, user: str) -> str:
        answer = made.reserve(0, acme, 10, 10, key=key, user=user)
        return answer.message.split(":")[0] if isinstance(answer, LimitRefusal) else ""

    assert [ask("k1", "ann") for _ in range(3)] == ["", "", "Rate limit of this user reached"]
    assert [ask("k1", "bob") for _ in range(2)] == ["", "Rate limit of this key reached"]
    assert [ask("k2", "bob") for _ in range(2)] == ["", "Rate limit of this user reached"]
    assert [ask("k2", user) for user in ("cat", "dan")] == ["", "Rate limit reached"]


def test_the_store_is_asked_for_the_limits_of_keys_and_users_too() -> None:
    class Source(Bucket):
        """On lease is nothing of a part's, and all of the tenant's."""

        is_part = False

        def lacks(self, now_ns: int, amount: int) -> bool:
            return self.is_part

    def source(now_ns: int, owner: TenantId, unit: str, rate: int, burst: int) -> Source:
        made = Source(now_ns, rate, burst)
        made.is_part = ";" in owner
        return made

    made = LimitLevels(Limiter(LimitsConfig(), source))
    few = tenant(tokens_per_minute=6000, per_user=PartLimits(concurrent_max=2))
    assert not made.lacks(0, few, 10, 10, key="k", user="ann")
    for part in ("per_key", "per_user"):
        limited = tenant(tokens_per_minute=6000, **{part: PartLimits(tokens_per_minute=600)})
        assert made.lacks(0, limited, 10, 10, key="k", user="ann"), part


def test_a_refusal_on_one_level_takes_nothing_from_the_others() -> None:
    made, limiter = levels()
    acme = tenant(tokens_per_minute=1000, per_user=PartLimits(tokens_per_minute=100))
    assert isinstance(made.reserve(0, acme, 60, 20, user="ann"), LevelsReservation)
    for _ in range(50):
        assert isinstance(made.reserve(0, acme, 60, 20, user="ann"), LimitRefusal)
    assert limiter.outstanding == 80
    for user in range(11):
        assert isinstance(made.reserve(0, acme, 60, 20, user=f"u{user}"), LevelsReservation), user
    refused = made.reserve(0, acme, 60, 20, user="last")
    assert isinstance(refused, LimitRefusal)
    assert refused.level == ""
    again = made.reserve(3 * NS_PER_S, acme, 60, 20, user="last")  # Refused by the tenant, it paid nothing.
    assert isinstance(again, LevelsReservation)


def test_users_that_are_not_named_count_as_one() -> None:
    made, _ = levels()
    acme = tenant(per_user=PartLimits(concurrent_max=1))
    first = made.reserve(0, acme, 1, 1)
    assert isinstance(first, LevelsReservation)
    assert isinstance(made.reserve(0, acme, 1, 1), LimitRefusal)
    first.settle(NS_PER_S, 2)
    assert isinstance(made.reserve(NS_PER_S, acme, 1, 1), LevelsReservation)


def test_a_changed_limit_counts_from_the_next_request() -> None:
    made, _ = levels()
    before, after = (tenant(per_key=PartLimits(requests_per_minute=n)) for n in (1, 3))
    assert isinstance(made.reserve(0, before, 1, 1, key="k"), LevelsReservation)
    assert isinstance(made.reserve(0, before, 1, 1, key="k"), LimitRefusal)
    granted = [not isinstance(made.reserve(0, after, 1, 1, key="k"), LimitRefusal) for _ in range(3)]
    assert granted == [True, True, False]


def test_invented_users_are_refused_by_the_tenants_limit_and_nothing_is_kept_of_them() -> None:
    made, _ = levels()
    acme = tenant(requests_per_minute=3, per_user=PartLimits(requests_per_minute=1))
    granted = [
        not isinstance(made.reserve(0, acme, 1, 1, user=f"{i}" * 1000), LimitRefusal) for i in range(9)
    ]
    assert granted == [True] * 3 + [False] * 6
    assert len(made.parts) == 3


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from("abc"),
            st.sampled_from(["", "ann", "bob"]),
            st.integers(1, 60),
            st.integers(0, 60),
        ),
        max_size=60,
    )
)
def test_what_all_levels_hold_is_what_was_admitted(steps) -> None:
    made, limiter = levels()
    acme = tenant(
        tokens_per_minute=600,
        concurrent_max=5,
        per_key=PartLimits(tokens_per_minute=300),
        per_user=PartLimits(tokens_per_minute=200, concurrent_max=3),
    )
    live, settled, now_ns = [], 0, 0
    for what, key, user, prompt, used in steps:
        now_ns += NS_PER_S
        if what or not live:
            answer = made.reserve(now_ns, acme, prompt, 20, key=key, user=user)
            if not isinstance(answer, LimitRefusal):
                live.append(answer)
        elif used % 2:
            live.pop().undo(now_ns)
        else:
            live.pop().settle(now_ns, used)
            settled += used
    assert (limiter.num_live(acme.id), limiter.settled) == (len(live), settled)
    assert made.parts.settled == 2 * settled, "on the level of the key and of the user"
    assert made.parts.outstanding == 2 * limiter.outstanding
    for each in live:
        each.settle(now_ns, 0)
    assert limiter.outstanding == made.parts.outstanding == 0

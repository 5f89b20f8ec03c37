from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import NS_PER_S
from penstock.config.health import QuarantineConfig
from penstock.policy.quarantine import Quarantine

S = NS_PER_S
BAD = 99


def test_one_that_is_alone_at_two_deaths_is_refused_for_a_while() -> None:
    made = Quarantine(QuarantineConfig(refuse_s=60))
    made.strike(0, [BAD])
    assert made.refused_s(0, BAD) == 0
    made.strike(S, [BAD])
    assert made.refused_s(S, BAD) == 60
    assert made.refused_s(31 * S, BAD) == 30
    assert made.refused_s(61 * S, BAD) == 0
    assert made.num_convicted == 1
    made.strike(70 * S, [BAD])
    assert made.refused_s(70 * S, BAD) == 0, "it was forgotten"


def test_who_was_only_there_is_not_convicted_and_who_always_was_is() -> None:
    made = Quarantine(QuarantineConfig())
    made.strike(0, [1, 2, 3, BAD])
    made.strike(1, [4, 5, BAD])
    made.strike(2, [1, 6, BAD])
    assert made.refused_s(2, BAD) > 0
    assert not any(made.refused_s(2, each) for each in range(1, 7))


def test_a_crowd_that_is_killed_twice_convicts_nobody() -> None:
    made = Quarantine(QuarantineConfig())
    for now in range(3):
        made.strike(now, range(8))
    assert not any(made.refused_s(3, each) for each in range(8))


def test_who_ends_well_was_none_of_these() -> None:
    made = Quarantine(QuarantineConfig())
    made.strike(0, [BAD])
    made.clear(BAD)
    made.strike(1, [BAD])
    assert made.refused_s(1, BAD) == 0


def test_only_so_many_are_remembered() -> None:
    made = Quarantine(QuarantineConfig(suspects_max=3))
    made.strike(0, [BAD])
    made.strike(1, [1, 2, 3])
    made.strike(2, [BAD])
    assert made.refused_s(2, BAD) == 0


@given(st.lists(st.sets(st.integers(0, 12), max_size=6), max_size=12), st.integers(1, 3))
def test_whoever_kills_every_worker_it_reaches_is_found_and_takes_nobody_along(crowds, deaths) -> None:
    """In a crowd that changes: the innocents of one death finish, as those do that are not with the killer."""
    made = Quarantine(QuarantineConfig(deaths=deaths))
    for now, crowd in enumerate(crowds):
        made.strike(now, {*crowd, BAD})
        for each in crowd:
            made.clear(each)
    prime = max(0, len(crowds) - bool(crowds and crowds[0]))
    assert bool(made.refused_s(len(crowds), BAD)) == (prime >= deaths)
    assert not any(made.refused_s(len(crowds), each) for each in range(13))

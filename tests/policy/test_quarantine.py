from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.policy.extras.quarantine import IsolatedRetry, Quarantine, QuarantineTerms

S = NS_PER_S
BAD = 99


def test_one_that_is_alone_at_two_deaths_is_refused_for_a_while() -> None:
    made = Quarantine(QuarantineTerms(refuse_s=60))
    made.strike(0, [BAD])
    assert made.refused_s(0, BAD) == 0
    made.strike(S, [BAD])
    assert made.refused_s(S, BAD) == 60
    assert made.refused_s(31 * S, BAD) == 30
    assert made.refused_s(61 * S, BAD) == 0
    assert made.num_blocked == 1
    made.strike(70 * S, [BAD])
    assert made.refused_s(70 * S, BAD) == 0, "it was forgotten"


def test_who_was_only_there_is_not_convicted_and_who_always_was_is() -> None:
    made = Quarantine(QuarantineTerms())
    made.strike(0, [1, 2, 3, BAD])
    made.strike(S, [4, 5, BAD])
    assert made.refused_s(2 * S, BAD) > 0
    assert not any(made.refused_s(2 * S, each) for each in range(1, 6))
    assert made.trial_of(2 * S, 4) is None, "the cause of that death is known"


def test_who_was_starting_is_tried_alone_and_who_was_streaming_only_after_a_second_death() -> None:
    made = Quarantine(QuarantineTerms())
    made.strike(0, [BAD, 1], {2: 50, 3: 7})
    alone, together = IsolatedRetry.ALONE, IsolatedRetry.TOGETHER
    assert [made.trial_of(0, each) for each in (BAD, 1, 2, 3, 4)] == [alone, alone, together, together, None]
    made.strike(S, [2, 3], {2: 50, 3: 7})
    assert [made.trial_of(S, each) for each in (2, 3)] == [alone, alone]
    assert not made.refused_s(S, 2)
    assert made.trial_of(S + int(QuarantineTerms().refuse_s * S), 2) is None, "all of it is forgotten"


def test_who_starts_is_likelier_than_who_streams_by_now() -> None:
    made = Quarantine(QuarantineTerms())
    made.strike(0, [BAD, 1])
    made.strike(S, [BAD], {1: 3})
    assert made.refused_s(S, BAD) > 0
    assert not made.refused_s(S, 1)


def test_a_crowd_that_is_killed_twice_convicts_nobody() -> None:
    made = Quarantine(QuarantineTerms())
    for now in range(3):
        made.strike(now * S, range(8))
    assert not any(made.refused_s(3 * S, each) for each in range(8))


def test_who_has_come_further_since_was_not_the_cause() -> None:
    made = Quarantine(QuarantineTerms(progress_tokens=16))
    made.strike(0, [], {1: 30})
    made.strike(S, [], {1: 47})
    made.strike(2 * S, [], {1: 100})
    assert not made.refused_s(2 * S, 1)
    made.strike(3 * S, [], {1: 110})
    assert made.refused_s(3 * S, 1), "twice at about the same place"


def test_deaths_at_the_same_moment_count_once() -> None:
    """A machine with several workers: what it ran is started on the next of them before that is known to be
    gone too.
    """
    made = Quarantine(QuarantineTerms(together_ms=10))
    for now_ns in (0, 3 * NS_PER_MS, 9 * NS_PER_MS):
        made.strike(now_ns, [1])
    assert not made.refused_s(9 * NS_PER_MS, 1)
    assert made.trial_of(9 * NS_PER_MS, 1) is IsolatedRetry.ALONE
    made.strike(11 * NS_PER_MS, [1])
    assert made.refused_s(11 * NS_PER_MS, 1), "the first of them is the one that counts"


def test_who_ends_well_was_none_of_these() -> None:
    made = Quarantine(QuarantineTerms())
    made.strike(0, [BAD])
    made.clear(BAD)
    made.strike(S, [BAD])
    assert made.refused_s(S, BAD) == 0


def test_only_so_many_are_remembered() -> None:
    made = Quarantine(QuarantineTerms(suspects_max=3))
    made.strike(0, [BAD])
    made.strike(S, [1, 2, 3])
    made.strike(2 * S, [BAD])
    assert made.refused_s(2 * S, BAD) == 0


@given(st.lists(st.sets(st.integers(0, 12), max_size=6), max_size=6), st.integers(2, 3))
def test_whoever_kills_every_worker_it_reaches_is_found_and_takes_nobody_along(crowds, deaths) -> None:
    """In a crowd that changes: the innocents of one death finish, as those do that are not with the
    killer.
    """
    made = Quarantine(QuarantineTerms(quarantine_crashes=deaths))
    for now, crowd in enumerate(crowds):
        made.strike(now * S, {*crowd, BAD})
        for each in crowd:
            made.clear(each)
    now_ns = len(crowds) * S
    assert bool(made.refused_s(now_ns, BAD)) == (len(crowds) >= deaths)
    assert not any(made.refused_s(now_ns, each) for each in range(13))

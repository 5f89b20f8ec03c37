from datetime import date, timedelta

from hypothesis import given
from hypothesis import strategies as st

from penstock.policy.limits.budget import DAY_NS, day_of, first_day, month_of

EPOCH = date(1970, 1, 1)


@given(st.dates(min_value=date(1900, 1, 1), max_value=date(2400, 12, 31)))
def test_as_the_calendar_has_it(day: date) -> None:
    number = (day - EPOCH).days
    assert month_of(number) == 12 * day.year + day.month - 1
    assert EPOCH + timedelta(days=first_day(month_of(number))) == day.replace(day=1)


def test_days_begin_at_midnight() -> None:
    assert (day_of(0), day_of(DAY_NS - 1), day_of(DAY_NS)) == (0, 0, 1)

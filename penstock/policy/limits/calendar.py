"""Days and months of the UTC calendar as plain integers, for code that may not ask the machine.

After Howard Hinnant, "chrono-compatible low-level date algorithms": civil_from_days and days_from_civil,
which are exact for the proleptic Gregorian calendar. A day is its number since 1970-01-01; a month is 12 *
year + (month - 1).
"""

from penstock.clock import NS_PER_S

DAY_NS = 86_400 * NS_PER_S


def day_of(wall_ns: int) -> int:
    """The day of a wall-clock time."""
    return wall_ns // DAY_NS


def month_of(day: int) -> int:
    """The month that a day is in."""
    era, day_of_era = divmod(day + 719_468, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    from_march = (5 * day_of_year + 2) // 153
    assert 0 <= day_of_year < 366, day_of_year
    assert 0 <= from_march < 12, from_march
    return 12 * (era * 400 + year_of_era) + from_march + 2


def first_day(month: int) -> int:
    """The first day of a month."""
    # The year begins in March, so that the leap day is its last.
    year, from_march = divmod(month - 2, 12)
    era, year_of_era = divmod(year, 400)
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + (153 * from_march + 2) // 5
    return era * 146_097 + day_of_era - 719_468

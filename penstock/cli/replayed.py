"""Prints the result of making recorded decisions again, for `penstock scale` and `penstock rollout`."""

from collections.abc import Iterable

import msgspec

from penstock.cli import console
from penstock.errors import ConfigError

PRINTED_MAX = 20


def show_replay(named: str, decisions: Iterable[tuple[int, str]]) -> int:
    """Print how many there are and the first that come out otherwise; the exit code. Each has its line in the
    file, and how it differs; empty: it does not. `named` says in an error which command and file it was.

    Raises:
        ConfigError: it is no such file.
    """
    count, others, out = 0, list[str](), console.out()
    try:
        for number, difference in decisions:
            count += 1
            if difference:
                others.append(f"line {number}: {difference}")
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{named}: {error}") from error
    for each in others[:PRINTED_MAX]:
        out.print(each, markup=False, soft_wrap=True)
    same = "all the same" if not others else f"{len(others)} come out otherwise"
    out.print(f"{count} decisions made again: {same}", markup=False)
    return 1 if others else 0

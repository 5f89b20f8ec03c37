"""What a worker may be given: streams, requests and tokens; and which of its rows stay free for tenants that
run nothing.

An engine of ours takes a row back between two tokens (schedule/shares.py), so it is given all that it can
hold. Others do not: of what they run at once, some is given only to who would wait for a whole stream of
another tenant else.
"""

from typing import NamedTuple

import msgspec

from penstock.policy.terms import QueueTerms

_KEPT_ROWS_MIN = 4
"""Of fewer rows one is too much to keep free."""


class DeploymentTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker stands beside the others of its model, as it is configured."""

    order: int = 0
    weight: int = 1
    rpm: int = 0
    """Requests a minute; 0: no limit."""
    tpm: int = 0
    """Tokens a minute; 0: no limit."""


class Slots(NamedTuple):
    """One worker's."""

    given: int
    """Streams that it may be given."""
    limit: int
    """Those, and what may be given beyond them to tenants that run nothing else (`Work.takes_row`)."""
    spare: int
    """How many of `given` are no rows of it; below 0: rows that it has and that are kept free."""


def slots_of(rows: int, *, is_external: bool, terms: QueueTerms) -> Slots:
    """A worker's that runs `rows` streams at once; 0: it does not tell.

    `terms.headroom` 0 lends every row of an external worker too.
    """
    assert rows >= 0, rows
    if not rows:
        given = terms.external_concurrency
        return Slots(given, given + max(1, int(terms.kept_share * given)), 0)
    if not is_external:
        given = rows + terms.worker_credit
        return Slots(given, given + terms.extra_per_row * rows, terms.worker_credit)
    kept = max(1, int(terms.headroom * rows)) if terms.headroom and rows >= _KEPT_ROWS_MIN else 0
    return Slots(rows - kept, rows, -kept)


def part_of_rows(rows: int, processes: int) -> int:
    """What each of several gateway processes may use of an external worker's rows: they hear of each other's
    streams too late to count them together. No less than one; 0 if the worker does not tell.
    """
    assert processes >= 1, processes
    return max(1, rows // processes) if rows else 0

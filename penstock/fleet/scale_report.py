"""Capacity as operators see it, and their orders: `GET` and `POST /admin/scale`."""

import msgspec

from penstock.clock import NS_PER_MS
from penstock.policy.capacity.autoscaler import Decision
from penstock.policy.capacity.signals import Override, Signals


class ScaleOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/scale`: so many workers for so long, whatever the load; without `workers` the load decides
    again.
    """

    model: str = ""
    workers: int | None = None
    for_s: float = 3600.0


class ScaleAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A question or an order, from a gateway process to the one that decides; `by` is the id of the key."""

    model: str = ""
    order: ScaleOrder | None = None
    by: str = ""


class ScalePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One look, for a plot."""

    at_ms: int
    ready: int
    pending: int
    workers: int
    """That there were to be from then on."""
    rate: float
    """Work per second that came (tokens, of which generated ones count four times)."""
    forecast: float
    safe_rate: float
    waiting: int
    late: int
    due: int
    shed: int


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pool now."""

    name: str
    ready: int
    pending: int
    draining: int
    asleep: int
    workers: int
    """That there are to be."""
    max: int
    spot: bool
    price: float
    trouble: str


class ScaleReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as operators see it."""

    model: str
    mode: str
    min: int
    max: int
    standby: int
    workers: int
    ready: int
    pools: list[PoolReport]
    leads: bool = True
    """This server decides: always for workers that it launches, for those of a cluster while it has the
    leader's lease."""
    leader: str = ""
    """The server that has it, if several share the model's workers."""
    override: Override | None
    decision: Decision | None
    """The last one; None: there was none yet."""
    signals: Signals | None
    """The facts that it was made from."""
    moves: list[Decision]
    """The last ones that changed something, or would have; the newest first."""
    points: list[ScalePoint]
    """The last quarter of an hour, the oldest first."""


class ScaleReports(msgspec.Struct, frozen=True):
    """`GET /admin/scale`."""

    models: list[ScaleReport]


def point_of(seen: Signals, decision: Decision) -> ScalePoint:
    """One look, for a plot."""
    return ScalePoint(
        at_ms=seen.wall_ns // NS_PER_MS,
        ready=seen.ready,
        pending=seen.pending,
        workers=decision.workers,
        rate=decision.rate,
        forecast=decision.forecast,
        safe_rate=decision.safe_rate,
        waiting=seen.waiting,
        late=seen.late,
        due=seen.due,
        shed=seen.shed,
    )

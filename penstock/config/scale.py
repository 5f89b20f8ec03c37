"""How many workers a model has, where that follows its load: `models[].scale`. docs/autoscaling.md."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from penstock.config.branch import Branch, Count, Positive, Seconds
from penstock.config.fleet import DiscoverConfig

Money = Annotated[float, Meta(ge=0, le=1_000_000)]
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES = 24 * 60
_SPAN = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))? )?(?P<from>[0-9]{2}:[0-9]{2})-(?P<to>[0-9]{2}:[0-9]{2})"
    r"(?: (?P<workers>[0-9]{1,4}))?"
)
_WORKLOAD = re.compile(r"(deployment|statefulset)/[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_POOL = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class WeekSpan(NamedTuple):
    """A time of the day on some days of the week, by UTC."""

    days: frozenset[int]
    """0 is Monday."""
    begin: int
    """Minutes of the day; one that ends before it begins ends on the next day."""
    end: int
    workers: int
    """That there are to be then; 0: the span says no number."""


def parse_span(text: str) -> WeekSpan | None:
    """Of "mon-fri 07:00-19:00 4", "sat 02:00-04:00" or "07:00-19:00 4"; None: it is no such text."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        return None
    begin, end = _minutes(found["from"]), _minutes(found["to"])
    names = [name for name in (found["first"], found["last"]) if name]
    if begin is None or end is None or begin == end or any(name not in DAYS for name in names):
        return None
    days = range(7)
    if names:
        first, last = DAYS.index(names[0]), DAYS.index(names[-1])
        days = [(first + i) % 7 for i in range((last - first) % 7 + 1)]
    return WeekSpan(frozenset(days), begin, end, int(found["workers"] or 0))


def _minutes(text: str) -> int | None:
    hours, minutes = int(text[:2]), int(text[3:])
    return hours * 60 + minutes if minutes < 60 and hours * 60 + minutes <= MINUTES else None


class ScalePoolConfig(Branch, frozen=True, kw_only=True):
    """Workers of one kind: of one accelerator, in one place, at one price."""

    name: str
    """Stands in the names of its workers."""
    max: Positive = 256
    """Of this pool."""
    price: Money = 0.0
    """Of one worker, per hour: the cheaper pool grows first, and the dearer one shrinks first."""
    spot: bool = False
    """Its machines may be taken back at any time: it never has more workers than can be lost while the bands
    that go first keep their promises."""
    ray_resources: dict[str, Annotated[float, Meta(ge=0)]] = {}  # noqa: RUF012 - msgspec copies it.
    """In place of `fleet.ray_resources` for this pool's workers."""
    workload: str = ""
    """"deployment/NAME" or "statefulset/NAME": its workers are the pods of that Kubernetes workload, in the
    namespace and by the API server of the model's `discover[].kubernetes`, and their number is set there."""


class ScaleConfig(Branch, frozen=True, kw_only=True):
    """Off until `max` says how many there may be."""

    max: Annotated[int, Meta(ge=0, le=256)] = 0
    """Workers at most. 0: there are `replicas`, always."""
    min: Count = 1
    """Workers at least. 0: without requests for `in_after_s` the last one goes; the first request starts one
    and waits for it."""
    standby: Count = 0
    """Ready workers beyond those that the load needs."""
    schedule: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Workers at least at times of the week, by UTC: "mon-fri 07:00-19:00 4"."""
    frozen: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Times at which nothing is changed but by hand: "sat 02:00-04:00"."""
    mode: Literal["act", "advise"] = "act"
    """"advise": decisions are told and kept, and nothing is started or ended."""
    in_after_s: Seconds = 300.0
    """A worker leaves when so long no more were needed; one at a time."""
    pools: Annotated[tuple[ScalePoolConfig, ...], Meta(max_length=16)] = ()
    """Where workers may be; none: one pool, by `fleet.launcher`."""

    @property
    def launches(self) -> bool:
        """Whether this server starts workers by it; else it has a cluster start them, or nothing scales."""
        return self.max > 0 and not any(pool.workload for pool in self.pools)


def scale_problems(scale: ScaleConfig, replicas: int, key: str) -> Iterator[str]:
    """One line for each contradiction in a model's scaling, which stands at `key`."""
    if not scale.max:
        if scale != ScaleConfig():
            yield f"{key}.max: 0, so nothing scales and the other keys of {key} are of no use"
        return
    if scale.min > scale.max:
        yield f"{key}.min: {scale.min} is above {key}.max ({scale.max})"
    if scale.standby > scale.max:
        yield f"{key}.standby: {scale.standby} is above {key}.max ({scale.max})"
    if replicas > scale.max:
        yield f"{key}.max: {scale.max} is below the model's replicas ({replicas})"
    for i, text in enumerate(scale.schedule):
        span = parse_span(text)
        if span is None or not span.workers:
            yield f"{key}.schedule[{i}]: expected DAY-DAY HH:MM-HH:MM WORKERS, got {text[:64]!r}"
        elif span.workers > scale.max:
            yield f"{key}.schedule[{i}]: {span.workers} workers are above {key}.max ({scale.max})"
    for i, text in enumerate(scale.frozen):
        if (span := parse_span(text)) is None or span.workers:
            yield f"{key}.frozen[{i}]: expected DAY-DAY HH:MM-HH:MM, got {text[:64]!r}"
    yield from _pool_problems(scale, key)


def _pool_problems(scale: ScaleConfig, key: str) -> Iterator[str]:
    names: set[str] = set()
    for i, pool in enumerate(scale.pools):
        if not _POOL.fullmatch(pool.name):
            yield f"{key}.pools[{i}].name: expected 1 to 32 of a-z, 0-9 and -, got {pool.name[:64]!r}"
        elif pool.name in names:
            yield f"{key}.pools[{i}].name: {pool.name!r} is another pool's already"
        names.add(pool.name)
        if pool.workload and not _WORKLOAD.fullmatch(pool.workload):
            expected = "deployment/NAME or statefulset/NAME"
            yield f"{key}.pools[{i}].workload: expected {expected}, got {pool.workload[:64]!r}"
        if pool.workload and pool.ray_resources:
            yield f"{key}.pools[{i}].ray_resources: of no use with a workload, whose pods say what they need"
    if not scale.pools:
        return
    room = sum(pool.max for pool in scale.pools)
    steady = sum(pool.max for pool in scale.pools if not pool.spot)
    if room < scale.min:
        yield f"{key}.min: {scale.min} is above what the pools may have together ({room})"
    elif steady < scale.min:
        yield f"{key}.min: {scale.min} is above what the pools that are not spot may have ({steady})"


def workload_problems(
    scale: ScaleConfig, replicas: int, discover: Sequence[DiscoverConfig], key: str
) -> Iterator[str]:
    """One line for each contradiction of a model at `key` whose workers are pods."""
    on_pods = [pool for pool in scale.pools if pool.workload]
    if not on_pods:
        return
    if len({pool.workload for pool in on_pods}) < len(on_pods):
        yield f"{key}.scale.pools: two pools have one workload, and would both set its replicas"
    if len(on_pods) < len(scale.pools):
        yield f"{key}.scale.pools: all have a workload, or none; other workers are another model's"
    if replicas:
        yield f"{key}.replicas: {replicas} would run here, and {key}.scale.pools are Kubernetes workloads"
    found = [each.kubernetes for each in discover if each.kubernetes is not None]
    if not found:
        yield f"{key}.discover: pools with a workload need a kubernetes entry, which says where the pods are"
    elif len({(each.namespace, each.api_server, each.account) for each in found}) > 1:
        yield f"{key}.discover: with pools that have a workload all kubernetes entries are of one namespace"


RETIRED: dict[str, str] = {}

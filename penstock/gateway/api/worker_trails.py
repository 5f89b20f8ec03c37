"""This gateway process's record of each worker: the last quarter of an hour by five seconds, and whether it
was left alone.

`sample` it every second. It is in memory only, and a few kilobytes a worker.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.fleet.registry import Registry
from penstock.protocol.worker import Stats
from penstock.telemetry.audit import Notes
from penstock.types import WorkerId

STEP_S = 5
STEPS = 180
NUMBERS = 4
"""Of each step: those of `WorkerHistory`."""
_NAN = nan


class WorkerHistory(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /admin/workers/{id}/history`: a value for each step; null: it said nothing."""

    step_s: int
    times: list[int]
    """When each step began, in seconds since the Unix epoch."""
    tokens_per_s: list[float | None]
    """Of output."""
    running: list[float | None]
    waiting: list[float | None]
    kv_share: list[float | None]
    """Of its KV blocks that are in use."""


class WorkerTrails:
    """See the module."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry, self._clock = registry, clock
        self._trails: dict[WorkerId, _Trail] = {}
        self._step = 0

    def sample(self) -> None:
        """Look at every worker, once in each step."""
        step, now_ns = self._clock.wall_ns() // (STEP_S * NS_PER_S), self._clock.now_ns()
        if step == self._step:
            return
        self._step = step
        for worker in self._registry:
            self._trails.setdefault(worker.id, _Trail()).put(step, worker.backend.status.stats, now_ns)
        for gone in [each for each, trail in self._trails.items() if trail.last <= step - STEPS]:
            del self._trails[gone]

    def of(self, worker_id: WorkerId) -> WorkerHistory | None:
        """One worker's; None if it was not seen in this time."""
        trail = self._trails.get(worker_id)
        if trail is None:
            return None
        steps = range(self._step - STEPS + 1, self._step + 1)
        columns = [[trail.at(step, number) for step in steps] for number in range(NUMBERS)]
        tokens_per_s, running, waiting, kv_share = columns
        return WorkerHistory(
            step_s=STEP_S,
            times=[step * STEP_S for step in steps],
            tokens_per_s=tokens_per_s,
            running=running,
            waiting=waiting,
            kv_share=kv_share,
        )


class LeftAlone:
    """Notes when a worker that is ready is given nothing, or little, and when that is over."""

    def __init__(self, look: Callable[[str], Mapping[WorkerId, str]], notes: Notes) -> None:
        """`look`: at the workers of a model that are left alone, and why; those that rest for some seconds
        would fill the trail.
        """
        self._look, self._notes = look, notes
        self._known: dict[str, Mapping[WorkerId, str]] = {}

    def look(self, model: str) -> None:
        """See what has changed; every second or so."""
        before, now = self._known.get(model, {}), self._look(model)
        self._known[model] = now
        for worker_id in now.keys() - before.keys():
            self._notes.note("worker", "is left alone", worker_id, why=now[worker_id])
        for worker_id in before.keys() - now.keys():
            self._notes.note("worker", "is used again, or not ready", worker_id)


class _Trail:
    """One worker's ring of steps."""

    __slots__ = ("_tokens", "_values", "last")

    def __init__(self) -> None:
        self._values = array("f", [_NAN] * (NUMBERS * STEPS))
        self.last = -1
        """The step that was written last."""
        self._tokens: tuple[int, int] | None = None
        """When they were counted last, and how many there were."""

    def put(self, step: int, stats: Stats | None, now_ns: int) -> None:
        """A worker's figures of a step; those since the last one stay empty."""
        for missed in range(max(self.last + 1, step - STEPS + 1), step):
            self._write(missed, [_NAN] * NUMBERS)
        self.last = step
        before, self._tokens = self._tokens, stats and (now_ns, stats.generated_tokens)
        if stats is None:
            self._write(step, [_NAN] * NUMBERS)
            return
        rate = _NAN
        if before is not None and stats.generated_tokens >= before[1] and now_ns > before[0]:
            rate = (stats.generated_tokens - before[1]) * NS_PER_S / (now_ns - before[0])
        kv_share = stats.blocks_used / stats.blocks_total if stats.blocks_total else _NAN
        self._write(step, [rate, stats.running, stats.waiting, kv_share])

    def at(self, step: int, number: int) -> float | None:
        """One of its numbers in a step; None: it did not say."""
        if not self.last - STEPS < step <= self.last:
            return None
        value = self._values[step % STEPS * NUMBERS + number]
        return None if isnan(value) else round(value, 3)

    def _write(self, step: int, values: Sequence[float]) -> None:
        place = step % STEPS * NUMBERS
        self._values[place : place + NUMBERS] = array("f", values)

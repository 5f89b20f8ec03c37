"""The pools that an autoscaler's decisions are carried out on, where this server launches the workers.

A pool says how its workers are, and takes a number. More: sleeping ones wake, then new ones are launched.
Fewer: those that start go first, then the least loaded drain, and end when their streams have ended. A worker
that somebody has taken out of service (`penstock drain`, a machine that is about to be taken back) is no
capacity, so another one takes its place. A launcher that refuses, or whose workers do not come up, is left
alone for a while, twice as long each time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol, runtime_checkable

from penstock.clock import NS_PER_S, Clock
from penstock.fleet.registry import Registry, Worker
from penstock.policy.capacity.signals import PoolState
from penstock.policy.resilience.worker_state import WorkerState
from penstock.types import WorkerId

BACKOFF_MIN_S, BACKOFF_MAX_S = 30.0, 600.0
_STARTING = (WorkerState.STARTING, WorkerState.LOADING, WorkerState.WARMING, WorkerState.WAKING)


class ScalePool(Protocol):
    """Workers of one model in one place."""

    @property
    def name(self) -> str:
        """As in the configuration; empty: the model's only pool."""
        ...

    def state(self) -> PoolState:
        """How its workers are, as far as was heard."""
        ...

    def take_cold_starts(self) -> tuple[float, ...]:
        """Seconds that workers took which got ready since this was last asked."""
        ...

    async def look(self) -> None:
        """Find out how its workers are, where that has to be asked for. Trouble is in the state."""
        ...

    async def resize(self, count: int) -> None:
        """Have so many, those that start included. Trouble is in the state."""
        ...


@runtime_checkable
class SharedPool(ScalePool, Protocol):
    """Workers that are there for several servers, of which one decides how many there are."""

    def leaving(self) -> tuple[WorkerId, ...]:
        """Workers that no server gives requests any more."""
        ...

    async def follow(self, leaving: Collection[WorkerId]) -> tuple[WorkerId, ...]:
        """Let these drain and no others, for another server decides: those that still have streams."""
        ...

    def hear_busy(self, who: str, busy: Collection[WorkerId]) -> None:
        """Another server has streams on these workers that leave."""
        ...


class LaunchedPool:
    """Of workers that this server's launcher starts, numbered from 0."""

    def __init__(
        self,
        model: str,
        name: str,
        registry: Registry,
        clock: Clock,
        *,
        first: int,
        apply: Callable[[], Awaitable[None]],
        is_held: Callable[[WorkerId], bool],
        wake: Callable[[str], None],
    ) -> None:
        """`first` are there from the start. `apply` lets the workers of `names` be there and no others;
        `is_held` knows who is out of service by hand; `wake` begins to wake those that sleep.
        """
        self.model, self.name = model, name
        self._registry, self._clock = registry, clock
        self._apply, self._is_held, self._wake = apply, is_held, wake
        now_ns = clock.now_ns()
        self._asked_ns = {self._id(number): now_ns for number in range(first)}
        """By worker that is wanted, since when."""
        self._unready: set[WorkerId] = set(self._asked_ns)
        self._cold_s: list[float] = []
        self._trouble, self._retry_ns, self._backoff_s = "", 0, BACKOFF_MIN_S
        self._woken_ns: int | None = None
        """Since when those that sleep are wanted; None: they are not."""
        self._applying: asyncio.Task[None] | None = None
        self._is_changed = self._is_begun = False

    @property
    def names(self) -> tuple[WorkerId, ...]:
        """Workers that are wanted."""
        return tuple(self._asked_ns)

    def state(self) -> PoolState:
        """See `ScalePool`."""
        self._forget_lost()
        workers = self._workers(self._asked_ns)
        ready = [each for each in workers if each.is_ready]
        infos = [(each.backend.status.info, each.backend.status.stats) for each in ready]
        rows = [
            stats.rows_max if stats and stats.rows_max else info.max_running for info, stats in infos if info
        ]
        is_closed = self._clock.now_ns() < self._retry_ns
        leaving = [
            each
            for each in self._registry.of(self.model)
            if each.state is WorkerState.DRAINING and self._is_mine(each.id)
        ]
        return PoolState(
            name=self.name,
            ready=len(ready),
            pending=sum(each.state in _STARTING for each in workers) + self._num_to_come(),
            draining=len(leaving),
            asleep=sum(each.state is WorkerState.ASLEEP for each in workers),
            slots=sum(rows),
            trouble=self._trouble if is_closed else "",
        )

    def take_cold_starts(self) -> tuple[float, ...]:
        """See `ScalePool`."""
        now_ns = self._clock.now_ns()
        for worker in self._workers(tuple(self._unready)):
            if worker.is_ready:
                self._unready.discard(worker.id)
                self._cold_s.append((worker.life.since_ns - self._asked_ns.get(worker.id, now_ns)) / NS_PER_S)
                self._backoff_s = BACKOFF_MIN_S
        taken, self._cold_s = self._cold_s, []
        return tuple(each for each in taken if each >= 0)

    async def look(self) -> None:
        """See `ScalePool`: the registry hears of its workers."""
        self._is_begun = True  # The first ones were launched before.

    async def resize(self, count: int) -> None:
        """See `ScalePool`."""
        self._forget_lost()
        state = self.state()
        there = state.ready + state.pending
        if not state.asleep or count <= there:
            self._woken_ns = None
        elif self._has_not_woken():
            return
        else:
            self._wake(self.model)
            # All of them wake: they are loaded sooner than anything new. None that is there leaves for it.
            count = max(there, count - state.asleep)
        if count > there:
            for _ in range(count - there):
                name = self._free_name()
                self._asked_ns[name] = self._clock.now_ns()
                self._unready.add(name)
        elif count < there:
            for name in self._leaving()[: there - count]:
                self._forget(name)
        else:
            return
        self._is_changed = True
        if self._applying is None or self._applying.done():
            self._applying = asyncio.create_task(self._carry_out(), name=f"scale {self.model} {self.name}")

    def _has_not_woken(self) -> bool:
        """Whether those that sleep were asked to wake long ago, and sleep: another pool may do."""
        now_ns = self._clock.now_ns()
        self._woken_ns = now_ns if self._woken_ns is None else self._woken_ns
        if now_ns - self._woken_ns < BACKOFF_MIN_S * NS_PER_S:
            return False
        self._woken_ns = None
        self._fail("those that sleep do not wake; the log says why")
        return True

    async def _carry_out(self) -> None:
        """A cluster may take long to find a place, and meanwhile others are wanted."""
        while self._is_changed:
            self._is_changed = False
            await self._apply()

    def _num_to_come(self) -> int:
        """Workers for which the launcher looks for a place."""
        if self._applying is None or self._applying.done():
            return 0
        return sum(self._registry.get(name) is None for name in self._asked_ns)

    def _forget_lost(self) -> None:
        """A worker that was taken out of service, or will not come up, has no place here any more."""
        for name in list(self._asked_ns):
            worker = self._registry.get(name)
            if self._is_held(name):
                self._forget(name)
            elif worker is not None and (
                worker.state is WorkerState.GONE or worker.backend.status.is_given_up
            ):
                self._forget(name)
                self._fail(worker.stage or "it does not come up")
            elif worker is None and self._is_begun and (self._applying is None or self._applying.done()):
                self._forget(name)
                self._fail("the launcher refuses to start it; the log says why")

    def _forget(self, name: WorkerId) -> None:
        del self._asked_ns[name]
        self._unready.discard(name)

    def _fail(self, why: str) -> None:
        if self._clock.now_ns() < self._retry_ns:
            return  # It was begun with one that failed already: one attempt, one pause.
        self._trouble = f"no worker can be started for {self._backoff_s:g} s: {why}"
        self._retry_ns = self._clock.now_ns() + int(self._backoff_s * NS_PER_S)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)

    def _leaving(self) -> list[WorkerId]:
        """In the order in which they leave: those that start, then those with least to do; of equals the one
        that came last.
        """
        found = {name: self._registry.get(name) for name in reversed(self._asked_ns)}
        starting = [name for name, worker in found.items() if worker is None or worker.state in _STARTING]
        ready = [worker for worker in found.values() if worker is not None and worker.is_ready]
        return [*starting, *(each.id for each in sorted(ready, key=_load))]

    def _workers(self, names: Collection[WorkerId]) -> list[Worker]:
        found = (self._registry.get(name) for name in names)
        return [each for each in found if each is not None and each.state is not WorkerState.DRAINING]

    def _free_name(self) -> WorkerId:
        number = 0
        while True:
            name = self._id(number)
            if name not in self._asked_ns and self._registry.get(name) is None and not self._is_held(name):
                return name
            number += 1

    def _id(self, number: int) -> WorkerId:
        return WorkerId("-".join(filter(None, (self.model, self.name, str(number)))))

    def _is_mine(self, worker_id: WorkerId) -> bool:
        start = f"{self.model}-{self.name}-" if self.name else f"{self.model}-"
        return worker_id.startswith(start) and worker_id.removeprefix(start).isdecimal()


def _load(worker: Worker) -> int:
    stats = worker.backend.status.stats
    return worker.backend.num_streams if stats is None else stats.running + stats.waiting

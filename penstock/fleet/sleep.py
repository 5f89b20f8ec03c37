"""Puts models to sleep and wakes them: by hand, after idle time, or for the sake of others.

One for each server: in the process that launches its workers, which hears from each of them what all gateway
processes have it do. Only workers that were launched here are put to sleep. A worker decides itself whether
it has work, at the moment in which it would sleep (`protocol/worker_parts.py`), so no answer is ever cut.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.backends.engine.backend import EngineBackend
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.errors import ConfigError, ModelBusy, NoMemory, NotFound, PenstockError, WorkerUnavailable
from penstock.fleet.registry import Registry, Worker
from penstock.policy.placement.memory import MakeRoom, ModelMemory, NoRoom, room_for
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.types import WorkerId

LOOK_S = 0.5
SLEEP_TIMEOUT_S = 30.0
"""A worker that was told to sleep answers within this."""
WAKE_TIMEOUT_S = 600.0
PATIENCE_NS = NS_PER_S
"""Work that has just ended is reported a little later: before a request is refused that is waited for."""
ANSWER_TIMEOUT_S = 2.0
"""One that was told to wake begins within this."""
_PUT_AWAY_NS, _ASK_AGAIN_S = NS_PER_S // 4, 0.05
"""The time in which a worker puts an answered request away; and the pause between two questions."""
_WAKES_MAX = 3
"""A worker whose process had just ended comes back asleep, and gets the order again."""
_GIB = 1 << 30


class Sleeper(Protocol):
    """Puts models to sleep."""

    async def sleep(self, route: str) -> None:
        """Return when it sleeps.

        Raises:
            ModelBusy: it has work.
            NotFound: it has no worker that was launched here.
            WorkerUnavailable: it does not answer.
        """
        ...

    async def wake(self, route: str) -> None:
        """Return when it takes requests.

        Raises:
            NoMemory: there is none, and too few idle models to make some.
            WorkerUnavailable: it cannot be loaded.
        """
        ...


class SleepKeeper:
    """A `Sleeper` within a bound on memory."""

    def __init__(
        self, registry: Registry, clock: Clock, log: Log, *, idle_s: Mapping[str, float], bound_bytes: int
    ) -> None:
        """`idle_s`: after so long without work a model is put to sleep; 0: not by itself. `bound_bytes` is
        for all workers together; 0: none.
        """
        self._registry, self._clock, self._log = registry, clock, log
        self._idle_s, self._bound = dict(idle_s), bound_bytes
        self._used_ns: dict[str, int] = {}
        self._seen: dict[WorkerId, tuple[int, int]] = {}
        """Of each worker: its epoch, and the requests that had ended."""
        self._asleep_bytes: dict[WorkerId, int] = {}
        """The memory of its process when it last slept."""
        self._wake = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._waking: set[asyncio.Task[None]] = set()
        registry.listen(self._changed)

    def start(self) -> None:
        """Look for idle models from now on."""
        self._looking = asyncio.create_task(self._look(), name="sleep-keeper")

    def close(self) -> None:
        """Leave everything as it is."""
        if self._looking is not None:
            self._looking.cancel()

    def check(self) -> None:
        """Refuse a bound in which a model could never be awake, once all have said what they take.

        Raises:
            ConfigError: there is one.
        """
        for model in self._memory() if self._bound else ():
            found = room_for(model.name, [_idle(each) for each in self._memory()], self._bound)
            if isinstance(found, NoRoom):
                raise ConfigError(
                    f"fleet.memory_bytes is {self._bound}, but the model '{model.name}' takes "
                    f"{_gib(model.awake_bytes)} while it is awake, which is {_gib(found.missing_bytes)} too "
                    f"much beside the processes of the others; raise it, or set engine.kv_memory_bytes"
                )

    async def fill(self) -> None:
        """Wake the models in their order, as far as they fit together.

        Raises:
            WorkerUnavailable: one cannot be loaded.
        """
        for model in self._memory():
            if not model.awake and room_for(model.name, self._memory(), self._bound) == MakeRoom():
                await self.wake(model.name)

    async def sleep(self, route: str) -> None:
        """See `Sleeper`. A client that has just got the last token of an answer may ask before the worker has
        put the request away: it is asked again for a moment.
        """
        async with self._one_at_a_time:
            until_ns = self._clock.now_ns() + _PUT_AWAY_NS
            while True:
                try:
                    return await self._put_to_sleep(route)
                except ModelBusy:
                    # Where some slept and wake again, once is enough.
                    if self._clock.now_ns() >= until_ns or len(self._launched(route)) > 1:
                        raise
                await sleep(_ASK_AGAIN_S)

    def begin_to_wake(self, route: str) -> None:
        """Wake it without waiting for that; what goes wrong is in the log."""

        async def wake() -> None:
            try:
                await self.wake(route)
            except PenstockError as error:
                self._log.warning("a model cannot be woken", model=route, error=error)

        task = asyncio.create_task(wake(), name=f"wake {route}")
        self._waking.add(task)
        task.add_done_callback(self._waking.discard)

    async def wake(self, route: str) -> None:
        """See `Sleeper`."""
        for _ in range(_WAKES_MAX):
            workers = await self._begin_to_wake(route)
            await self._until(lambda: not any(map(_is_waking, self._launched(route))), WAKE_TIMEOUT_S)
            if any(worker.is_ready for worker in workers):
                return
            if any(worker.state is not WorkerState.ASLEEP or _why_asleep(worker) for worker in workers):
                break
        why = next((why for worker in self._launched(route) if (why := worker.stage)), "its worker is gone")
        raise WorkerUnavailable(f"The model '{route[:64]}' cannot be woken: {why}.")

    async def _begin_to_wake(self, route: str) -> list[Worker]:
        async with self._one_at_a_time:
            workers = self._launched(route)
            if not workers:
                raise NotFound(f"The model '{route[:64]}' has no worker that this server has launched.")
            sleeping = [each for each in workers if each.state is WorkerState.ASLEEP]
            if sleeping and self._bound:
                await self._make_room(route)
            for worker in sleeping:
                _engine(worker).ask_to_wake()
            self._used_ns[route] = self._clock.now_ns()
            # The memory counts as taken from here on: the next request sees it wake.
            await self._until(
                lambda: all(each.state is not WorkerState.ASLEEP for each in sleeping), ANSWER_TIMEOUT_S
            )
            return workers

    async def _make_room(self, route: str) -> None:
        refused: set[str] = set()
        patient_until_ns = self._clock.now_ns() + PATIENCE_NS
        while True:
            models = [model if model.name not in refused else _busy(model) for model in self._memory()]
            found = room_for(route, models, self._bound)
            left_s = (patient_until_ns - self._clock.now_ns()) / NS_PER_S
            if isinstance(found, NoRoom) and found.busy and left_s > 0:
                refused.clear()
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._wake.wait()
                continue
            if isinstance(found, NoRoom):
                who = ", ".join(f"'{name}'" for name in found.busy[:8])
                why = f"while {who} has work" if who else "on this server"
                raise NoMemory(
                    f"There is no memory to wake the model '{route[:64]}' {why}: "
                    f"{_gib(found.missing_bytes)} are missing. Try again in a moment."
                )
            if not found.sleep:
                return
            try:
                await self._put_to_sleep(found.sleep[0])
            except PenstockError:  # It has got work since, or does not answer.
                refused.add(found.sleep[0])

    async def _put_to_sleep(self, route: str) -> None:
        workers = [each for each in self._launched(route) if each.state is not WorkerState.ASLEEP]
        if not workers and not self._launched(route):
            raise NotFound(f"The model '{route[:64]}' has no worker that this server has launched.")
        if not all(worker.is_ready for worker in workers):
            raise WorkerUnavailable(f"The model '{route[:64]}' is not ready.")
        asked = [_engine(worker).ask_to_sleep() for worker in workers]
        try:
            async with asyncio.timeout(SLEEP_TIMEOUT_S):
                slept = await asyncio.gather(*asked)
        except TimeoutError:
            raise WorkerUnavailable(f"The model '{route[:64]}' did not fall asleep in time.") from None
        if not all(slept):
            for worker in workers:  # Those of its workers that had no work.
                _engine(worker).ask_to_wake()
            raise ModelBusy(f"The model '{route[:64]}' has requests that run; it stays awake.")
        self._log.info("a model sleeps", model=route)

    async def _until(self, happened: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not happened():
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        """Put models to sleep that have been idle for long, and wake what belongs to one that is awake."""
        while True:
            await sleep(LOOK_S)
            now_ns = self._clock.now_ns()
            for model in self._memory():
                limit_s = self._idle_s.get(model.name, 0.0)
                try:
                    if model.is_idle and limit_s and now_ns - model.used_ns >= limit_s * NS_PER_S:
                        await self.sleep(model.name)
                    elif self._is_partly_asleep(model.name):
                        await self.wake(model.name)
                except PenstockError as error:
                    self._log.debug("a model was left as it is", model=model.name, error=error)
                except Exception as error:  # noqa: BLE001 - one model's bug must not keep the others awake.
                    self._log.bug("a model could not be looked after", error, model=model.name)

    def _is_partly_asleep(self, route: str) -> bool:
        workers = self._launched(route)
        return any(each.is_ready for each in workers) and any(
            each.state is WorkerState.ASLEEP for each in workers
        )

    def _memory(self) -> list[ModelMemory]:
        """The memory of every model, in the order in which they were launched."""
        routes = dict.fromkeys(worker.route for worker in self._registry if _is_launched(worker))
        return [self._of(route) for route in routes]

    def _of(self, route: str) -> ModelMemory:
        workers = self._launched(route)
        awake = any(worker.state is not WorkerState.ASLEEP for worker in workers)
        asleep_bytes = sum(self._asleep_bytes.get(worker.id, 0) for worker in workers)
        infos = [worker.backend.status.info for worker in workers]
        return ModelMemory(
            name=route,
            awake=awake,
            awake_bytes=asleep_bytes + sum(info.memory_bytes for info in infos if info is not None),
            asleep_bytes=asleep_bytes,
            used_ns=self._used_ns.get(route, 0),
            is_idle=awake and all(_has_no_work(worker) for worker in workers),
        )

    def _launched(self, route: str) -> list[Worker]:
        return [worker for worker in self._registry.of(route) if _is_launched(worker)]

    def _changed(self, worker: Worker) -> None:
        self._wake.set()
        status = worker.backend.status
        if status.asleep is not None:
            self._asleep_bytes[worker.id] = status.asleep.memory_bytes
        if worker.state is WorkerState.GONE:
            self._asleep_bytes.pop(worker.id, None)
            self._seen.pop(worker.id, None)
        elif worker.is_ready:
            # While it has requests it is not idle, so that the last one has ended says it all.
            now = (worker.epoch, status.stats.ended if status.stats is not None else 0)
            if self._seen.get(worker.id) != now:
                self._used_ns[worker.route] = self._clock.now_ns()
            self._seen[worker.id] = now


def _why_asleep(worker: Worker) -> str:
    reported = worker.backend.status.asleep
    return "" if reported is None else reported.why


def _is_launched(worker: Worker) -> bool:
    return worker.stop is not None and isinstance(worker.backend, EngineBackend)


def _engine(worker: Worker) -> EngineBackend:
    assert isinstance(worker.backend, EngineBackend), "only those of our engine are launched"
    return worker.backend


def _is_waking(worker: Worker) -> bool:
    return worker.state in (
        WorkerState.WAKING,
        WorkerState.STARTING,
        WorkerState.LOADING,
        WorkerState.WARMING,
    )


def _has_no_work(worker: Worker) -> bool:
    stats = worker.backend.status.stats
    idle = stats is None or not stats.running + stats.waiting
    is_settled = worker.state in (WorkerState.READY, WorkerState.ASLEEP)
    return is_settled and idle and not worker.backend.num_streams


def _idle(model: ModelMemory) -> ModelMemory:
    return ModelMemory(
        name=model.name,
        awake=True,
        awake_bytes=model.awake_bytes,
        asleep_bytes=model.asleep_bytes,
        is_idle=True,
    )


def _busy(model: ModelMemory) -> ModelMemory:
    return ModelMemory(
        name=model.name, awake=True, awake_bytes=model.awake_bytes, asleep_bytes=model.asleep_bytes
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"

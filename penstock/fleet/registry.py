"""The workers that exist: every worker of every model, its state, and who wants to hear of changes.

    backend ──on_change──> Worker.life (worker_state.py) ──> listeners: dispatcher, KV index, health, admin

Told by push: nothing here looks at workers on a timer or for each request. The registry knows no policy and
no launcher; who adds and removes workers is in `members.py` and `discovery.py`. Everything runs on one event
loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.backends.base import NO_ADAPTERS, Adapters, Backend, BackendStatus, Phase, nothing
from penstock.clock import NS_PER_S, Clock
from penstock.config.cells import CellConfig
from penstock.config.fleet import WORKERS_MAX
from penstock.errors import ConfigError
from penstock.policy.resilience.worker_state import WorkerEvent, WorkerLife, WorkerState
from penstock.policy.terms import DeploymentTerms
from penstock.protocol.worker import ModelInfo, Stats
from penstock.telemetry.log import Log
from penstock.types import COMMON_CAPABILITIES, Capability, WorkerId

NOTE_S_MAX = 600
"""A note of what happened to a worker that is ready again is shown for so long."""
Stop = Callable[[float], Awaitable[None]]
"""Lets a worker's streams end, up to so many seconds, and then ends it. Nothing of it is left afterwards."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One worker. Its fields are the registry's to write; everybody may read them."""

    id: WorkerId
    route: str
    """The model that it computes, by the name that clients use."""
    backend: Backend
    life: WorkerLife
    engine: str = "penstock"
    kind: str = ""
    """Workers of one kind are about as fast as each other."""
    address: str = ""
    """Where it listens, for people and for other gateways of this server."""
    served_model: str = ""
    """The model that it must report to serve; empty takes what it says."""
    shares_key: bool = False
    """It runs our engine and names its KV blocks with a key that is known here: `hash_key`, or else the
    launcher's."""
    hash_key: bytes = field(default=b"", repr=False)
    """The key of a worker that was started elsewhere, derived from the one that it shares with its
    gateways."""
    terms: DeploymentTerms | None = None
    """How it stands beside the others of its model; None: it is as they are."""
    kv_events: str = ""
    """ZeroMQ address of its KV events, where they do not come over the backend's own connection."""
    kv_replay: str = ""
    """And of missed ones."""
    stop: Stop | None = None
    """None: there is nothing to end but the backend's connection."""
    cell: CellConfig | None = None  # It is a peer cell; None: a worker of this one.
    places: frozenset[str] = frozenset()
    """Where it is (`types.PLACE`); empty where there are no cells."""
    received_ns: int = 0
    """When it last said anything; 0: never."""
    problem: str = ""
    """Why it was refused; empty if it was not."""
    is_silent: bool = False
    """It is suspect because it does not answer its backend."""
    drained: asyncio.Task[None] | None = None
    """Its end, once that has begun."""
    _able: tuple[frozenset[str] | None, frozenset[str]] = (None, frozenset())

    @property
    def capabilities(self) -> frozenset[str] | None:
        """Its capabilities beyond plain text, and its place; None: it has not said yet."""
        reported = self.backend.status.capabilities
        if reported is None or not self.places:
            return reported
        if self._able[0] is not reported:
            self._able = reported, reported | self.places
        return self._able[1]

    @property
    def state(self) -> WorkerState:
        """Where it is."""
        return self.life.state

    @property
    def epoch(self) -> int:
        """Which of its lives this is."""
        return self.life.epoch

    @property
    def is_ready(self) -> bool:
        """Whether it counts as capacity."""
        return self.life.is_ready

    @property
    def sleeps(self) -> bool:
        """Whether it is asleep, or wakes."""
        return self.state in (WorkerState.ASLEEP, WorkerState.WAKING)

    def notes(self, wall_ns: int) -> list[str]:
        """Notes for operators, each with its time; old ones are left out once a worker is well again."""
        since_ns = wall_ns - NOTE_S_MAX * NS_PER_S if self.is_ready else 0
        return [
            f"{datetime.fromtimestamp(note.at_ns // NS_PER_S, UTC):%Y-%m-%d %H:%M:%S} UTC: {note.text}"
            for note in self.backend.status.notes
            if note.lasts or note.at_ns >= since_ns
        ]

    @property
    def stage(self) -> str:
        """Its activity, in words."""
        if self.problem:
            return f"refused: {self.problem}"
        said = self.backend.status.stage
        return f"suspect: {said}" if self.state is WorkerState.SUSPECT else said


_SUMMED = tuple(name for name in Stats.__struct_fields__ if name != "readings")


class RouteWorkers:
    """See the module.

    Kept up to date by the registry; looking costs nothing that grows with the number of workers, except where
    it says so.
    """

    __slots__ = (
        "_abilities", "_adapters", "_adapters_reported", "_asleep", "_declared", "_infos", "_ready",
        "_workers", "adapter_digests", "adapters", "capabilities", "forwards", "has_choice", "info",
        "kinds", "lacks_common", "name", "sleeps", "to_come",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.to_come = False
        """It has no worker, and gets one when somebody asks for it."""
        self.info: ModelInfo | None = None
        """The model as its workers report it: of several contexts and vocabularies the smallest, for a
        request may go to any of them. Kept while there is no worker, so that requests can wait for one. None
        until the first one was ready."""
        self.has_choice = False
        """Whether it has several workers, ready or not."""
        self.kinds: tuple[str, ...] = ("",)
        """Kinds of the ready workers, each once."""
        self.adapters: frozenset[str] = frozenset()
        """Adapters that any of its workers serves, or served before it was lost, or is to have: requests can
        wait for it."""
        self.adapter_digests: dict[str, str] = {}
        """Which adapter is meant by a name, as the worker said that was first to have it."""
        self._declared: frozenset[str] = frozenset()
        self.capabilities: tuple[frozenset[str], ...] = ()
        """Its workers' capabilities beyond plain text, each set once; also of those that are not ready, if
        they have said so."""
        self.lacks_common = False
        """Whether any of them lacks what nearly every engine has."""
        self.forwards = False
        """Whether any of them is a provider, which makes of a parameter what it likes."""
        self.sleeps = False
        """Whether none is ready and one sleeps or wakes: requests can wait for it."""
        self._asleep: set[WorkerId] = set()
        self._abilities: dict[WorkerId, frozenset[str]] = {}
        self._adapters: dict[WorkerId, frozenset[str]] = {}
        self._adapters_reported: dict[WorkerId, Adapters] = {}
        self._workers: dict[WorkerId, Worker] = {}
        self._infos: dict[WorkerId, ModelInfo] = {}
        self._ready: dict[WorkerId, str] = {}

    def __iter__(self) -> Iterator[Worker]:
        """Every worker, ready or not, in the order in which they came."""
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def adapter_counts(self) -> dict[str, int]:
        """Adapters that its workers serve, and how many have each loaded. O(workers times adapters)."""
        reported = [each.backend.status.adapters for each in self]
        counts = dict.fromkeys((name for each in reported for name in sorted(each.served)), 0)
        for each in reported:
            for name in each.loaded & each.served:
                counts[name] += 1
        return counts

    @property
    def num_ready(self) -> int:
        """Workers that take requests."""
        return len(self._ready)

    @property
    def is_ready(self) -> bool:
        """Whether any worker takes requests."""
        return bool(self._ready)

    @property
    def is_expected(self) -> bool:
        """Whether none is ready, and requests can wait for one that will be."""
        return not self._ready and (self.to_come or self.sleeps)

    def add(self, worker: Worker) -> None:
        """For the registry."""
        self._workers[worker.id] = worker
        self.has_choice = len(self._workers) > 1
        self._take_abilities(worker, worker.capabilities)

    def remove(self, worker: Worker) -> None:
        """For the registry."""
        self._take_ready(worker, is_ready=False)
        del self._workers[worker.id]
        self.has_choice = len(self._workers) > 1
        self._take_adapters(worker, NO_ADAPTERS)
        self._adapters_reported.pop(worker.id, None)
        self._take_abilities(worker, None)
        if self._infos.pop(worker.id, None) is not None and self._infos:
            self._agree()

    def changed(self, worker: Worker) -> None:
        """For the registry: its state or its status may be another one."""
        info = worker.backend.status.info
        self._take_abilities(worker, worker.capabilities)
        is_known = worker.is_ready or worker.sleeps
        if is_known and info is not None and self._infos.get(worker.id) is not info:
            self._infos[worker.id] = info
            self._agree()
        if worker.is_ready:
            self._take_adapters(worker, worker.backend.status.adapters)
        self._take_ready(worker, is_ready=worker.is_ready)

    def state_changed(self, worker: Worker) -> None:
        """For the registry: its state may be another one, and nothing else."""
        (self._asleep.add if worker.sleeps else self._asleep.discard)(worker.id)
        self.sleeps = bool(self._asleep) and not self._ready

    def problem(self, worker: Worker) -> str:
        """Why what a worker says of itself does not go with the model; empty if it does."""
        info = worker.backend.status.info
        if info is None:
            return ""
        if worker.served_model and info.model != worker.served_model:
            return f"it serves {info.model!r}, not {worker.served_model!r}"
        for other in self._ready:
            # Engines count differently (with or without the padding of the embedding), each the same for the
            # same model.
            if other == worker.id or self._workers[other].engine != worker.engine:
                continue
            known = self._infos[other].vocab_size
            if known != info.vocab_size:
                return f"its vocabulary has {info.vocab_size} tokens, that of {other} has {known}"
        return ""

    def summary(self) -> BackendStatus:
        """The status of the model, made from those of its workers: the worker that is furthest represents it.

        O(workers).
        """
        found = BackendStatus()
        workers = list(self._workers.values())
        if not workers:
            found.stage = "there is no worker"
            found.info = self.info
            return found
        first = max(workers, key=lambda worker: (worker.is_ready, _progress(worker.backend.status)))
        status = first.backend.status
        found.phase, found.stage = status.phase, first.stage
        if found.ready and not first.is_ready:
            found.phase = Phase.REFUSED  # Or suspect: its backend would send there, the registry does not.
        found.done, found.total = status.done, status.total
        found.info, found.stats = self.info, self._stats([each for each in workers if each.cell is None])
        found.restarts = sum(worker.backend.status.restarts for worker in workers)
        return found

    def _stats(self, workers: list[Worker]) -> Stats | None:
        each = [stats for worker in workers if (stats := worker.backend.status.stats) is not None]
        if len(each) <= 1:
            return each[0] if each else None
        sums: dict[str, Any] = {name: sum(getattr(stats, name) for stats in each) for name in _SUMMED}
        return Stats(**sums)

    def _take_ready(self, worker: Worker, *, is_ready: bool) -> None:
        if is_ready == (worker.id in self._ready):
            return
        if is_ready:
            self._ready[worker.id] = worker.kind
        else:
            del self._ready[worker.id]
        kinds = (kind for each, kind in self._ready.items() if self._workers[each].cell is None)
        self.kinds = tuple(dict.fromkeys(kinds)) or self.kinds

    def lacking(self, needs: frozenset[str]) -> frozenset[str]:
        """The capabilities that a request needs and the ablest of its workers lacks; empty: one has them
        all.
        """
        missing = [needs - each for each in self.capabilities] or [needs]
        return min(missing, key=lambda each: (len(each), sorted(each)))

    def lacking_places(self, wanted: frozenset[str]) -> frozenset[str]:
        """The part of `wanted` that the best placed of its workers lacks. O(workers)."""
        return min([wanted - each.places for each in self] or [wanted], key=lambda each: (len(each), *each))

    def _take_abilities(self, worker: Worker, known: frozenset[str] | None) -> None:
        if known is self._abilities.get(worker.id):
            return
        if known is None:
            del self._abilities[worker.id]
        else:
            self._abilities[worker.id] = known
        if not self._abilities:
            return  # As with `info`: requests can wait for the next worker.
        self.capabilities = tuple(dict.fromkeys(self._abilities.values()))
        self.lacks_common = not all(each >= COMMON_CAPABILITIES for each in self.capabilities)
        self.forwards = any(Capability.PASS_THROUGH in each for each in self.capabilities)

    def declare_adapters(self, names: frozenset[str]) -> None:
        """Its workers are to have these: requests for them can wait until one has."""
        self._declared = names
        self.adapters = names.union(*self._adapters.values())

    def _take_adapters(self, worker: Worker, adapters: Adapters) -> None:
        if adapters is self._adapters_reported.get(worker.id):
            return
        self._adapters_reported[worker.id] = adapters
        self._adapters[worker.id] = adapters.served
        if not adapters.served:
            del self._adapters[worker.id]
        self.adapters = self._declared.union(*self._adapters.values())
        reported = list(self._adapters_reported.values())
        for name, digest in adapters.digests.items():
            known = self.adapter_digests.get(name)
            if known is None or not any(each.digests.get(name) == known for each in reported):
                self.adapter_digests[name] = digest

    def _agree(self) -> None:
        infos = list(self._infos.values())
        first = max(infos, key=lambda info: info.num_parameters)  # Of several engines ours says most.
        self.info = msgspec.structs.replace(
            first,
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
        )


def _progress(status: BackendStatus) -> float:
    return status.done / status.total if status.total else 0.0


EVENT_OF = {
    Phase.STARTING: WorkerEvent.STARTED,
    Phase.LOADING: WorkerEvent.LOADING,
    Phase.WARMING: WorkerEvent.WARMING,
    Phase.READY: WorkerEvent.SERVING,
    Phase.ASLEEP: WorkerEvent.SLEPT,
    Phase.WAKING: WorkerEvent.WAKING,
    Phase.SUSPECT: WorkerEvent.DOUBTED,
    Phase.LOST: WorkerEvent.LOST,
    Phase.REFUSED: WorkerEvent.REFUSED,
    Phase.DRAINING: WorkerEvent.DRAIN,
    Phase.DOWN: WorkerEvent.END,
}
"""The meaning of a backend's phase for the worker's life."""
_SPOKEN = frozenset(Phase) - {Phase.STARTING, Phase.SUSPECT, Phase.LOST, Phase.DOWN}
"""Phases in which news are the worker's own."""

Listener = Callable[[Worker], None]
"""Told of a worker that was added, has changed (its state, what it says of itself, its load) or is GONE. It
runs inside of what brought the change, so it only notes it: it must neither block nor raise, nor change the
registry."""


class Registry:
    """All workers of this process."""

    def __init__(
        self, clock: Clock, log: Log, *, workers_max: int = WORKERS_MAX, places: frozenset[str] = frozenset()
    ) -> None:
        """`places`: where workers of this cell are."""
        self._clock, self._log, self._workers_max, self._places = clock, log, workers_max, places
        self._workers: dict[WorkerId, Worker] = {}
        self.get = self._workers.get
        """The worker of this id; None if there is none."""
        self._routes: dict[str, RouteWorkers] = {}
        self._listeners: list[Listener] = []

    def __iter__(self) -> Iterator[Worker]:
        """Every worker, in the order in which they came."""
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of every change from now on; for who is there already, iterate."""
        self._listeners.append(listener)

    def unlisten(self, listener: Listener) -> None:
        """Tell it nothing more."""
        self._listeners.remove(listener)

    def of(self, route: str) -> RouteWorkers:
        """The workers of one model; the same object for good, also while there are none."""
        found = self._routes.get(route)
        if found is None:
            found = self._routes[route] = RouteWorkers(route)
        return found

    def new(self, worker_id: WorkerId, route: str, backend: Backend) -> Worker:
        """A worker that is not in the registry yet, at the start of its life. Fill it in and `add` it."""
        life = WorkerLife(self._clock.now_ns())
        return Worker(id=worker_id, route=route, backend=backend, life=life, places=self._places)

    def add(self, worker: Worker) -> None:
        """Take a worker in, and follow its backend from now on.

        Raises:
            ConfigError: there is one of this name, or there are too many.
        """
        if worker.id in self._workers:
            raise ConfigError(f"there is a worker {worker.id} already")
        if len(self._workers) >= self._workers_max:
            raise ConfigError(f"models: there are {self._workers_max} workers already")
        self._workers[worker.id] = worker
        self.of(worker.route).add(worker)
        worker.backend.on_change = lambda: self._changed(worker)
        self._changed(worker)

    def remove(self, worker_id: WorkerId) -> Worker | None:
        """Forget a worker at once, whatever it does; its backend is left alone. None if it is not known."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return None
        worker.backend.on_change = nothing
        worker.life.on(WorkerEvent.END, self._clock.now_ns())
        self.of(worker.route).remove(worker)
        self.tell(worker)
        return worker

    def doubt(self, worker_id: WorkerId, *, trusted: bool) -> None:
        """The result of a probe: the worker does not answer as it should, or does so again."""
        if (worker := self._workers.get(worker_id)) is not None:
            event = WorkerEvent.TRUSTED if trusted else WorkerEvent.DOUBTED
            if worker.life.on(event, self._clock.now_ns()):
                self.tell(worker)

    def drain(self, worker_id: WorkerId, timeout_s: float) -> "asyncio.Task[None] | None":
        """Send a worker nothing more, let its streams end up to `timeout_s`, then end it and forget it.

        Returns at once; the task is done when it is gone. None if it is not known. A second call changes
        nothing.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        if worker.drained is None:
            worker.life.on(WorkerEvent.DRAIN, self._clock.now_ns())
            self.tell(worker)
            worker.drained = asyncio.create_task(self._drain(worker, timeout_s), name=f"drain {worker_id}")
        return worker.drained

    async def _drain(self, worker: Worker, timeout_s: float) -> None:
        try:
            await (worker.stop or worker.backend.drain)(timeout_s)
        except Exception as error:  # noqa: BLE001 - it is forgotten whatever its end was like.
            self._log.bug("a worker could not be ended", error, worker=worker.id)
        finally:
            self.remove(worker.id)

    def _changed(self, worker: Worker) -> None:
        """Its backend has news."""
        now_ns, status = self._clock.now_ns(), worker.backend.status
        event = EVENT_OF[status.phase]
        if status.phase in _SPOKEN:
            worker.received_ns = now_ns
        was_silent, worker.is_silent = worker.is_silent, status.phase is Phase.SUSPECT
        if was_silent and status.phase is Phase.READY:
            event = WorkerEvent.TRUSTED
        if status.phase is Phase.READY and status.info is not None:
            problem = self.of(worker.route).problem(worker)
            if problem:
                event = WorkerEvent.REFUSED
                if problem != worker.problem:
                    self._log.error("a worker was refused", worker=worker.id, why=problem)
            worker.problem = problem
        worker.life.on(event, now_ns)
        self.of(worker.route).changed(worker)
        self.tell(worker)

    def tell(self, worker: Worker) -> None:
        """Something else that counts has changed about a worker: tell the listeners."""
        self.of(worker.route).state_changed(worker)
        for listener in self._listeners:
            listener(worker)

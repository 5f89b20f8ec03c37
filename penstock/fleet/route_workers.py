"""The workers of one model, and what can be said of all of them together."""

from collections.abc import Iterator

import msgspec

from penstock.backends.base import BackendStatus, Phase
from penstock.fleet.worker import Worker
from penstock.protocol.worker import ModelInfo, Stats
from penstock.types import COMMON_CAPABILITIES, WorkerId

_SUMMED = tuple(name for name in Stats.__struct_fields__)


class RouteWorkers:
    """See the module.

    Kept up to date by the registry; looking costs nothing that grows with the number of workers, except where
    it says so.
    """

    __slots__ = (
        "_abilities", "_adapters", "_infos", "_ready", "_workers", "adapters", "capabilities", "info",
        "kinds", "lacks_common", "name",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.info: ModelInfo | None = None
        """What its workers say of the model: of several contexts and vocabularies the smallest, for a request
        may go to any of them. Kept while there is no worker, so that requests can wait for one. None until
        the first one was ready."""
        self.kinds: tuple[str, ...] = ("",)
        """Kinds of the ready workers, each once."""
        self.adapters: frozenset[str] = frozenset()
        """Adapters that any of its workers serves, or served before it was lost: requests can wait for it."""
        self.capabilities: tuple[frozenset[str], ...] = ()
        """What its workers can do beyond plain text, each set once; also of those that are not ready, if they
        have said so."""
        self.lacks_common = False
        """Whether any of them lacks what nearly every engine has."""
        self._abilities: dict[WorkerId, frozenset[str]] = {}
        self._adapters: dict[WorkerId, frozenset[str]] = {}
        self._workers: dict[WorkerId, Worker] = {}
        self._infos: dict[WorkerId, ModelInfo] = {}
        self._ready: dict[WorkerId, str] = {}

    def __iter__(self) -> Iterator[Worker]:
        """Every worker, ready or not, in the order in which they came."""
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def num_ready(self) -> int:
        """Workers that take requests."""
        return len(self._ready)

    @property
    def is_ready(self) -> bool:
        """Whether any worker takes requests."""
        return bool(self._ready)

    def add(self, worker: Worker) -> None:
        """For the registry."""
        self._workers[worker.id] = worker
        self._take_abilities(worker, worker.backend.status.capabilities)

    def remove(self, worker: Worker) -> None:
        """For the registry."""
        del self._workers[worker.id]
        self._take_ready(worker, is_ready=False)
        self._take_adapters(worker, frozenset())
        self._take_abilities(worker, None)
        if self._infos.pop(worker.id, None) is not None and self._infos:
            self._agree()

    def changed(self, worker: Worker) -> None:
        """For the registry: its state or its status may be another one."""
        info = worker.backend.status.info
        self._take_abilities(worker, worker.backend.status.capabilities)
        if worker.is_ready and info is not None and self._infos.get(worker.id) is not info:
            self._infos[worker.id] = info
            self._agree()
        if worker.is_ready:
            self._take_adapters(worker, worker.backend.status.adapters.served)
        self._take_ready(worker, is_ready=worker.is_ready)

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
        """The status of the model, made from those of its workers: whoever is furthest speaks for it.

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
        found.info, found.stats = self.info, self._stats(workers)
        found.restarts = sum(worker.backend.status.restarts for worker in workers)
        return found

    def _stats(self, workers: list[Worker]) -> Stats | None:
        each = [stats for worker in workers if (stats := worker.backend.status.stats) is not None]
        if len(each) <= 1:
            return each[0] if each else None
        return Stats(**{name: sum(getattr(stats, name) for stats in each) for name in _SUMMED})

    def _take_ready(self, worker: Worker, *, is_ready: bool) -> None:
        if is_ready == (worker.id in self._ready):
            return
        if is_ready:
            self._ready[worker.id] = worker.kind
        else:
            del self._ready[worker.id]
        self.kinds = tuple(dict.fromkeys(self._ready.values())) or self.kinds

    def lacking(self, needs: frozenset[str]) -> frozenset[str]:
        """What the ablest of its workers lacks of the capabilities that a request needs; empty: one has them
        all.
        """
        missing = [needs - each for each in self.capabilities] or [needs]
        return min(missing, key=lambda each: (len(each), sorted(each)))

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

    def _take_adapters(self, worker: Worker, served: frozenset[str]) -> None:
        if served == self._adapters.get(worker.id, frozenset()):
            return
        self._adapters[worker.id] = served
        if not served:
            del self._adapters[worker.id]
        self.adapters = frozenset[str]().union(*self._adapters.values())

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

"""Which adapters (LoRA) each model is to have, and telling its workers so, and which to keep in memory.

An adapter is wanted because the configuration names it or an operator has loaded it. A worker gets the list
when it becomes ready, also after a restart; it reads them by itself and says which it has
(`BackendStatus.adapters`). Workers of any engine that can load adapters at run time are treated alike.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.base import LoadsAdapters
from penstock.errors import InvalidRequest, NotFound, WorkerUnavailable
from penstock.fleet.registry import Registry, Worker
from penstock.policy.placement.adapters import ResidencyOrder
from penstock.policy.resilience.worker_state import WorkerState
from penstock.protocol.worker_parts import public
from penstock.telemetry.log import Log
from penstock.types import WorkerId

LOAD_TIMEOUT_S = 300.0
UNLOAD_TIMEOUT_S = 10.0
WANTED_MAX = 1024
"""Of each model."""
_DIGEST_MARK = "#digest="


@dataclass(slots=True, frozen=True)
class AdapterSource:
    """Where an adapter comes from."""

    path: str
    """A directory, `http://`, `https://` or `s3://`."""
    digest: str = ""
    """It must have this one; empty: any."""

    @classmethod
    def of(cls, text: str) -> "AdapterSource":
        """From `PATH` or `PATH#digest=HEX`; a relative directory is one of this process."""
        path, mark, digest = text.rpartition(_DIGEST_MARK)
        if not mark:
            path, digest = text, ""
        if "://" not in path:
            with contextlib.suppress(RuntimeError):  # `~nobody` is then a name like others, of nothing.
                path = str(Path(path).expanduser())
            path = str(Path(path).absolute())
        return cls(path, digest)

    @property
    def text(self) -> str:
        """The text from which `of` makes it."""
        return f"{self.path}{_DIGEST_MARK}{self.digest}" if self.digest else self.path


class AdapterKeeper:
    """One for each gateway process."""

    def __init__(self, registry: Registry, log: Log, *, places: bool = True) -> None:
        """`places`: this process says what workers keep; one of those that use the same workers."""
        self._registry, self._log = registry, log
        self._configured: dict[str, dict[str, AdapterSource]] = {}
        self._wanted: dict[str, dict[str, AdapterSource]] = {}
        self._reported: set[WorkerId] = set()
        """Ready workers that know all that is wanted."""
        self._complained: set[tuple[WorkerId, str, str]] = set()
        self._adopted: dict[str, dict[str, str]] = {}
        self._places = places
        self._kept: dict[WorkerId, tuple[str, ...]] = {}
        self._wake = asyncio.Event()
        registry.listen(self._changed)

    def configure(self, models: Mapping[str, Mapping[str, str]]) -> None:
        """The configuration's adapters of each model: name -> path. Adapters that it wanted before and does
        not want any more are unloaded.
        """
        for route, adapters in models.items():
            new = {name: AdapterSource.of(path) for name, path in adapters.items()}
            old, wanted = self._configured.get(route, {}), self._wanted.setdefault(route, {})
            for name in old.keys() - new.keys():
                if wanted.pop(name, None) is not None:
                    self._tell_unload(route, name)
            for name, source in new.items():
                if wanted.get(name) != source:
                    wanted[name] = source
                    self._tell_load(route, name, source)
            self._configured[route] = new
            self._declare(route)
        self._wake.set()

    def adopt(self, loaded: Mapping[str, Mapping[str, str]]) -> None:
        """The adapters that operators have loaded and unloaded at any process of this server: by model the
        sources, empty for what was unloaded.
        """
        for route, sources in loaded.items():
            before, wanted = self._adopted.get(route, {}), self._wanted.setdefault(route, {})
            for name, text in sources.items():
                if before.get(name) == text:
                    continue
                source = AdapterSource.of(text) if text else None
                if source is None and wanted.pop(name, None) is not None:
                    self._tell_unload(route, name)
                elif source is not None and wanted.get(name) != source:
                    wanted[name] = source
                    self._tell_load(route, name, source)
            self._adopted[route] = dict(sources)
            self._declare(route)
        self._wake.set()

    def carry_out(self, order: ResidencyOrder) -> None:
        """Tell a worker what to have in memory (policy/placement/adapters.py)."""
        worker = self._registry.get(order.worker)
        if worker is None or not worker.is_ready or (backend := _takes(worker)) is None:
            return
        if order.keep:
            if self._places:
                self._kept[worker.id] = order.names
                backend.keep_adapters(order.names)
            return
        wanted = self._wanted.get(worker.route, {})
        for name in order.names:
            if (source := wanted.get(name)) is not None:
                backend.load_adapter(name, source.path, source.digest, is_wanted=True)

    def has(self, route: str, name: str) -> bool:
        """Whether a model is to have an adapter of this name."""
        return name in self._wanted.get(route, {})

    async def load(self, route: str, name: str, source: AdapterSource) -> None:
        """Let a model have an adapter; returns when each of its workers has it or says why it cannot.

        Raises:
            InvalidRequest: another one has the name or took it meanwhile, or no worker can read it; the
                message says why.
            WorkerUnavailable: no worker of the model takes adapters now, or none answers.
        """
        wanted = self._wanted.setdefault(route, {})
        known = wanted.get(name)
        if known is not None and known != source:
            raise InvalidRequest(
                f"The adapter '{name}' has already been loaded from {public(known.path, known.path)}. "
                "Unload it first.",
                param="lora_name",
            )
        if known is None and len(wanted) >= WANTED_MAX:
            raise InvalidRequest(f"The model has {WANTED_MAX} adapters already.", param="lora_name")
        if not list(self._takers(route)):
            raise WorkerUnavailable(f"No worker of the model '{route}' takes adapters now.")
        wanted[name] = source
        self._tell_load(route, name, source)
        try:
            errors = await self._answers(route, name, source)
        except TimeoutError:
            raise WorkerUnavailable(f"The adapter '{name}' was not loaded in {LOAD_TIMEOUT_S:g} s.") from None
        if errors and len(errors) == len(list(self._takers(route))):
            if wanted.get(name) == source and known is None:
                del wanted[name]
                self._tell_unload(route, name)
            raise InvalidRequest(f"The adapter '{name}' cannot be loaded: {errors[0]}", param="lora_path")
        self._declare(route)

    async def unload(self, route: str, name: str) -> None:
        """Let a model have an adapter no more; requests that run with it continue. Returns when no worker
        lists
        it: until then a request for it would be sent to one, and be refused there.

        Raises:
            NotFound: it has none of this name.
            WorkerUnavailable: a worker does not let it go.
        """
        is_wanted = self._wanted.get(route, {}).pop(name, None) is not None
        if not is_wanted and name not in self._registry.of(route).adapters:
            raise NotFound(f"The adapter '{name[:64]}' cannot be found.", param="lora_name")
        self._tell_unload(route, name)
        self._declare(route)
        self._wake.set()
        try:
            async with asyncio.timeout(UNLOAD_TIMEOUT_S):
                while name in self._registry.of(route).adapters:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            raise WorkerUnavailable(f"A worker still has the adapter '{name[:64]}'.") from None

    async def _answers(self, route: str, name: str, source: AdapterSource) -> list[str]:
        """Why workers could not load it, when all have said something."""
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            while True:
                self._wake.clear()
                if self._wanted.get(route, {}).get(name) != source:
                    raise InvalidRequest(
                        f"The adapter '{name}' was unloaded, or loaded from elsewhere, meanwhile.",
                        param="lora_name",
                    )
                reported = [
                    _answer(worker, name, source)
                    for worker in self._registry.of(route)
                    if worker.is_ready and _takes(worker)
                ]
                if all(each is not None for each in reported):
                    return [each for each in reported if each]
                await self._wake.wait()

    def _takers(self, route: str) -> Iterator[LoadsAdapters]:
        for worker in self._registry.of(route):
            if worker.is_ready and (backend := _takes(worker)) is not None:
                yield backend

    def _tell_load(self, route: str, name: str, source: AdapterSource) -> None:
        for backend in self._takers(route):
            backend.load_adapter(name, source.path, source.digest)

    def _tell_unload(self, route: str, name: str) -> None:
        for backend in self._takers(route):
            backend.unload_adapter(name)

    def _declare(self, route: str) -> None:
        """Requests for what is wanted can wait for it, unless every worker has said that it cannot."""
        workers = [worker for worker in self._registry.of(route) if worker.is_ready and _takes(worker)]
        names = (
            name
            for name, source in self._wanted.get(route, {}).items()
            if not workers or not all(_answer(worker, name, source) for worker in workers)
        )
        self._registry.of(route).declare_adapters(frozenset(names))

    def _changed(self, worker: Worker) -> None:
        self._wake.set()
        wanted = self._wanted.get(worker.route)
        if not wanted:
            return
        if worker.state is WorkerState.GONE or not worker.is_ready:
            self._reported.discard(worker.id)
            if worker.state is WorkerState.GONE:
                self._kept.pop(worker.id, None)
            return
        if worker.id not in self._reported and (backend := _takes(worker)) is not None:
            self._reported.add(worker.id)
            for name, source in wanted.items():
                backend.load_adapter(name, source.path, source.digest)
            if names := self._kept.get(worker.id):
                backend.keep_adapters(names)
        for name, error in worker.backend.status.adapters.failed.items():
            if name in wanted and (worker.id, name, error) not in self._complained:
                self._complained.add((worker.id, name, error))
                self._log.error("an adapter cannot be loaded", adapter=name, worker=worker.id, why=error)
                self._declare(worker.route)


def _takes(worker: Worker) -> LoadsAdapters | None:
    backend = worker.backend
    return backend if isinstance(backend, LoadsAdapters) and backend.takes_adapters else None


def _answer(worker: Worker, name: str, source: AdapterSource) -> str | None:
    """None: it has not said anything of this one; empty: it has it; else why it cannot."""
    adapters = worker.backend.status.adapters
    if adapters.paths.get(name, source.path) != source.path:
        return None
    if error := adapters.failed.get(name):
        return error
    return "" if name in adapters.served else None

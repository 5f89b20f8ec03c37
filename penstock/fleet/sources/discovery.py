"""The sources that look for workers while the server runs: made from the configuration, started and ended
together.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.clock import Clock
from penstock.config.checkpoints import served_name
from penstock.config.fleet import DiscoverConfig, WorkerConfig
from penstock.config.tree import ModelConfig
from penstock.fleet.members import Attached, BackendDependencies, Members, worker_id_at
from penstock.fleet.sources.dns import DnsSource, lookup_for
from penstock.fleet.sources.found import DiscoveredWorkers
from penstock.fleet.sources.kubernetes import KubernetesSource
from penstock.telemetry.log import Log
from penstock.text.tokenizer import Tokenizer


class Source(Protocol):
    """Looks for workers."""

    async def run(self) -> None:
        """Until it is cancelled."""
        ...


@dataclass(slots=True, frozen=True)
class _Running:
    config: DiscoverConfig
    task: asyncio.Task[None]


class Discovery:
    """The running sources of one process."""

    def __init__(self, members: Members, clock: Clock, log: Log) -> None:
        self._members, self._clock, self._log = members, clock, log
        self._running: dict[str, _Running] = {}
        """By name: the model's, and where its workers are looked for."""

    async def apply(self, model: ModelConfig, tokenizer: Tokenizer, tools: BackendDependencies) -> None:
        """From now on look for this model's workers where the configuration says, and nowhere else.

        A source that stays as it was goes on undisturbed. Of one whose settings changed the workers stay
        until the new one has looked; then those that are not as they should be come anew. Workers of a source
        that is gone drain.

        Raises:
            ConfigError: something that a new source needs is not there; then nothing has changed.
        """
        route = served_name(model)
        wanted = dict(_named(route, model.discover))
        gone = [name for name in self._running if name.startswith(_prefix(route)) and name not in wanted]
        new = {name: config for name, config in wanted.items() if not self._runs(name, config)}
        made = {name: self._source(name, route, config, tokenizer, tools) for name, config in new.items()}
        for name, source in made.items():
            await self._end(name)
            task = asyncio.create_task(source.run(), name=name)
            task.add_done_callback(self._on_end)
            self._running[name] = _Running(wanted[name], task)
        for name in gone:
            await self._end(name)
            await self._members.apply(name, [])

    def stop(self) -> None:
        """Look no more. The workers stay."""
        for running in self._running.values():
            running.task.cancel()
        self._running.clear()

    def _runs(self, name: str, config: DiscoverConfig) -> bool:
        running = self._running.get(name)
        return running is not None and running.config == config and not running.task.done()

    async def _end(self, name: str) -> None:
        """What it still tells while it ends counts no more than what comes after this."""
        if (running := self._running.pop(name, None)) is not None:
            running.task.cancel()
            await asyncio.wait([running.task])

    def _source(
        self, name: str, route: str, config: DiscoverConfig, tokenizer: Tokenizer, tools: BackendDependencies
    ) -> Source:
        def make(worker: WorkerConfig) -> Attached:
            worker_id = worker_id_at(route, worker)
            return Attached(id=worker_id, route=route, config=worker, tokenizer=tokenizer, tools=tools)

        found = DiscoveredWorkers(name, config, make, self._members, self._log)
        if config.kubernetes is not None:
            return KubernetesSource(found, config.kubernetes, self._clock, self._log)
        return DnsSource(found, lookup_for(config.dns), self._log)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        """A source never ends by itself: a bug in one must be seen, for its workers stand still."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._log.bug("a source of workers failed", bug, source=task.get_name())


def _named(route: str, sources: Iterable[DiscoverConfig]) -> Iterator[tuple[str, DiscoverConfig]]:
    """Each source by where it looks, which is what makes it the same source after a change of its
    settings.
    """
    times = Counter[str]()
    for config in sources:
        kubernetes = config.kubernetes
        where = config.dns or (kubernetes and f"{kubernetes.namespace}/{kubernetes.service}") or ""
        times[where] += 1
        yield f"{_prefix(route)}{where}" + (f"#{times[where]}" if times[where] > 1 else ""), config


def _prefix(route: str) -> str:
    return f"models.{route}.discover."

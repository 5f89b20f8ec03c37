"""The sources that look for workers while the server runs: made from the configuration, started and ended together."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from penstock.clock import Clock
from penstock.config.fleet import WorkerConfig
from penstock.config.presets import served_name
from penstock.config.tree import ModelConfig
from penstock.fleet.members import Members
from penstock.fleet.sources.dns import DnsSource, lookup_for
from penstock.fleet.sources.found import Found
from penstock.fleet.sources.kubernetes import KubernetesSource
from penstock.fleet.wanted import Attached, Tools, worker_id_at
from penstock.telemetry.log import Log
from penstock.text.tokenizer import Tokenizer


class Source(Protocol):
    """Looks for workers."""

    async def run(self) -> None:
        """Until it is cancelled."""
        ...


class Discovery:
    """The running sources of one process."""

    def __init__(self, members: Members, clock: Clock, log: Log) -> None:
        self._members, self._clock, self._log = members, clock, log
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, model: ModelConfig, tokenizer: Tokenizer, tools: Tools) -> None:
        """Look for one model's workers from now on.

        Raises:
            ConfigError: something that it needs is not there.
        """
        for name, source in list(self._sources(model, tokenizer, tools)):
            task = asyncio.create_task(source.run(), name=name)
            task.add_done_callback(self._on_end)
            self._tasks.append(task)

    def stop(self) -> None:
        """Look no more. The workers stay."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _sources(
        self, model: ModelConfig, tokenizer: Tokenizer, tools: Tools
    ) -> Iterator[tuple[str, Source]]:
        route = served_name(model)

        def make(config: WorkerConfig) -> Attached:
            worker_id = worker_id_at(route, config)
            return Attached(id=worker_id, route=route, config=config, tokenizer=tokenizer, tools=tools)

        for number, config in enumerate(model.discover):
            name = f"models.{route}.discover.{number}"
            found = Found(name, config, make, self._members, self._log)
            if config.kubernetes is not None:
                yield name, KubernetesSource(found, config.kubernetes, self._clock, self._log)
            else:
                yield name, DnsSource(found, lookup_for(config.dns), self._log)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        """A source never ends by itself: a bug in one must be seen, for its workers stand still."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._log.bug("a source of workers failed", bug, source=task.get_name())

"""The sources that look for workers while the server runs: made from the configuration, started and ended
together. DNS is here; kubernetes.py is the other one.

A name's addresses, or its SRV records, are asked for again and again. A failed lookup changes nothing: a name
server that is away must not take a healthy fleet along. That there is no such name (or no address of it) is
believed only when it was said `EMPTY_ANSWERS` times in a row, since resolvers say so by mistake too.
"""

import asyncio
import importlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.clock import Clock, sleep
from penstock.config.checkpoints import served_name
from penstock.config.fleet import DiscoverConfig, WorkerConfig
from penstock.config.tree import ModelConfig
from penstock.errors import ConfigError
from penstock.fleet.kubernetes import KubernetesSource
from penstock.fleet.members import (
    TIMEOUT_S,
    Attached,
    BackendDependencies,
    DiscoveredAddress,
    DiscoveredWorkers,
    Members,
    worker_id_at,
)
from penstock.telemetry.log import Log
from penstock.text.tokenizer import Tokenizer

EMPTY_ANSWERS = 3
REFRESH_S = 5.0
"""DNS is asked this often."""
_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class LookupFailed(Exception):
    """No answer; nothing is known."""


Lookup = Callable[[str], Awaitable[tuple[DiscoveredAddress, ...]]]
"""Asks for a name. An empty answer says that no worker is there.

Raises:
    LookupFailed: there is no answer.
"""


class DnsSource:
    """Asks every `REFRESH_S`, one question at a time. `run` it until it is cancelled."""

    def __init__(self, found: DiscoveredWorkers, lookup: Lookup, log: Log) -> None:
        self._found, self._lookup, self._log = found, lookup, log
        self._config = found.config
        self._empty = 0
        self._trouble = ""

    async def run(self) -> None:
        """Look, now and then."""
        while True:
            await self.look()
            await sleep(REFRESH_S)

    async def look(self) -> None:
        """Look once."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                endpoints = await self._lookup(self._config.dns)
        except (LookupFailed, TimeoutError) as error:
            self._say(str(error) or f"no answer within {TIMEOUT_S:g} s")
            return
        self._empty = 0 if endpoints else self._empty + 1
        if endpoints or self._empty >= EMPTY_ANSWERS:
            self._say("")
            await self._found.take(endpoints)
        else:
            self._say("there is no such name, or no address of it")

    def _say(self, trouble: str) -> None:
        """In the log, when it has changed."""
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                self._log.warning("workers cannot be looked up", name=self._config.dns, why=trouble)


def lookup_for(dns: str) -> Lookup:
    """How this name is asked for.

    Raises:
        ConfigError: it has SRV records, and dnspython is not installed.
    """
    if not dns.startswith("_"):
        return addresses
    try:
        resolver = importlib.import_module("dns.asyncresolver")
    except ImportError:
        raise ConfigError(
            "models[].discover.dns: SRV records need dnspython; install penstock[dns]"
        ) from None
    return SrvLookup(resolver)


async def addresses(dns: str) -> tuple[DiscoveredAddress, ...]:
    """A `Lookup`: every address of "name:port", as this machine resolves names."""
    host, _, port = dns.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_NAME:
            return ()
        raise LookupFailed(error.strerror or str(error)) from error
    except OSError as error:
        raise LookupFailed(str(error)) from error
    return tuple(DiscoveredAddress(str(where[0]), int(where[1])) for *_, where in found)


class SrvLookup:
    """A `Lookup`: what a name's SRV records of the best priority say (RFC 2782).

    Weights are of no use to us.
    """

    def __init__(self, resolver: Any) -> None:  # noqa: ANN401 - an extra's module.
        """`resolver` is dnspython's `asyncresolver`, or a resolver of one's own."""
        self._resolver = resolver
        answers = importlib.import_module("dns.resolver")
        self._nobody: tuple[type[Exception], ...] = (answers.NXDOMAIN, answers.NoAnswer)
        self._failed: type[Exception] = importlib.import_module("dns.exception").DNSException

    async def __call__(self, dns: str) -> tuple[DiscoveredAddress, ...]:
        """Ask."""
        try:
            records = list(await self._resolver.resolve(dns, "SRV"))
        except self._nobody:
            return ()
        except (self._failed, OSError) as error:
            raise LookupFailed(str(error)) from error
        best = min((record.priority for record in records), default=0)
        return tuple(
            DiscoveredAddress(record.target.to_text(omit_final_dot=True), record.port)
            for record in records
            if record.priority == best and record.target.to_text() != "."  # "." says: no such service here.
        )


class WorkerSource(Protocol):
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

        A source that stays as it was continues undisturbed. Of one whose settings changed the workers stay
        until the new one has looked; then those that are not as they should be are made again. Workers of a
        source that is gone drain.

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
        """Its last reports while it ends count no more than later ones."""
        if (running := self._running.pop(name, None)) is not None:
            running.task.cancel()
            await asyncio.wait([running.task])

    def _source(
        self, name: str, route: str, config: DiscoverConfig, tokenizer: Tokenizer, tools: BackendDependencies
    ) -> WorkerSource:
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

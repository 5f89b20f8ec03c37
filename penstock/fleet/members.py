"""Keeps the registry equal to what its sources want: the configuration, a launcher's plan, DNS, Kubernetes.

    endpoints that a source found  ──> DiscoveredWorkers ──┐
    replicas and addresses in the configuration ───────────┴─> DesiredWorker ──apply(name, wanted)──> registry

New workers join, workers that are not wanted any more drain, and the rest is left alone: a `DesiredWorker`,
launched here or attached at an address, compares equal to the one that is there if it still is what is
wanted. A worker whose settings changed leaves first and then joins again, and so does one that is wanted
again while it drains.
"""

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from penstock.backends.base import Backend
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.engine.link import WorkerKey
from penstock.backends.http.backend import BackendDependencies, ExternalWorker
from penstock.backends.http.external import make_backend
from penstock.backends.silence import HeartbeatTerms
from penstock.clock import Clock
from penstock.config.checkpoints import served_name
from penstock.config.engine_settings import EngineSettings, share_of
from penstock.config.fleet import DiscoverConfig, WorkerConfig, WorkerTraits
from penstock.config.tree import EngineConfig, ModelConfig
from penstock.errors import ConfigError, PenstockError
from penstock.fleet.launchers.base import Launcher, WorkerSpec
from penstock.fleet.registry import Registry, Worker
from penstock.policy.resilience.worker_state import WorkerState
from penstock.policy.terms import DeploymentTerms
from penstock.protocol.address import NONCE_BYTES, Address, hash_key_of, parse_address
from penstock.rng import fresh_key
from penstock.telemetry.log import Log
from penstock.text.tokenizer import Tokenizer
from penstock.types import ModelName, WorkerId


class DesiredWorker(Protocol):
    """One worker that should be there. Equal ones are the same worker with the same settings."""

    @property
    def id(self) -> WorkerId:
        """Its name, one of a kind in the whole fleet."""
        ...

    async def open(self, registry: Registry) -> Worker:
        """Make it: a worker for the registry, with a backend that connects by itself.

        Returns before it is ready.

        Raises:
            ConfigError: it can never work as it is configured.
        """
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Launched:
    """Our engine, started and kept running by a launcher."""

    engine: EngineConfig
    """As it is configured: one worker's share of it changes with the number of replicas, and restarts
    none."""
    spec: WorkerSpec = field(compare=False)
    launcher: Launcher = field(compare=False)
    tokenizer: Tokenizer = field(compare=False)
    clock: Clock = field(compare=False)
    heartbeat: HeartbeatTerms = field(default=HeartbeatTerms(), compare=False)

    @property
    def id(self) -> WorkerId:
        """See `Wanted`."""
        return self.spec.worker_id

    async def open(self, registry: Registry) -> Worker:
        """See `Wanted`."""
        backend = EngineBackend(
            self.tokenizer, self.clock, self.heartbeat, key=worker_key(self.launcher.link_key)
        )
        launched = await self.launcher.start(self.spec, backend)
        worker = registry.new(self.id, self.spec.model_name, backend)
        worker.address, worker.served_model = str(launched.address), self.spec.model_name
        worker.shares_key = True

        async def stop(timeout_s: float) -> None:
            await self.launcher.stop(self.id, timeout_s=timeout_s)

        def on_move(address: Address) -> None:
            worker.address = str(address)

        worker.stop, launched.on_move = stop, on_move
        return worker


@dataclass(slots=True, frozen=True, kw_only=True)
class Attached:
    """A worker that was started elsewhere, at an address."""

    id: WorkerId
    route: str
    config: WorkerConfig
    tokenizer: Tokenizer = field(compare=False)
    tools: BackendDependencies = field(compare=False)
    shares_key: bool = False
    """It names its KV blocks with the launcher's key: this server's parent process has launched it."""
    link_key: bytes = field(default=b"", compare=False)
    """Of a worker that this server's parent process has launched on a TCP port; see `Launcher.link_key`."""

    async def open(self, registry: Registry) -> Worker:
        """See `Wanted`."""
        worker = registry.new(self.id, self.route, self._backend())
        worker.engine, worker.address = self.config.engine, self.config.url
        worker.shares_key = self.shares_key
        if self.config.engine == "penstock" and not self.shares_key and (key := _key_of(self.config)):
            # Once it has shown that it has this key, its blocks go by what is derived from it
            # (`penstock worker`).
            worker.shares_key, worker.hash_key = True, hash_key_of(key.encode())
        worker.terms = terms_of(self.config)
        worker.kv_events = zmq_address(self.config.url, self.config.kv_events)
        worker.kv_replay = zmq_address(self.config.url, self.config.kv_replay)
        if self.config.engine == "penstock":
            worker.kind, worker.served_model = self.config.kind, self.config.served_model or self.route
        else:  # Its backend looks at what it serves.
            worker.kind = self.config.kind or self.config.engine
        return worker

    def _backend(self) -> Backend:
        config = self.config
        if config.engine == "penstock":
            key = self.link_key or _key_of(config).encode()
            own = EngineBackend(
                self.tokenizer,
                self.tools.clock,
                self.tools.heartbeat,
                key=worker_key(key),
            )
            address = parse_address(config.url.replace("tcp://", "tcp:"))
            own.connect_to(address, reports_connect_errors=not self.shares_key)
            return own
        foreign = ExternalWorker(
            engine=config.engine,
            url=config.url,
            model=config.served_model or self.route,
            api_key=_key_of(config),
            metrics_url=config.metrics_url,
            max_model_len=config.max_model_len,
            max_running=config.max_running,
            has_priorities=config.priorities,
            lacks=frozenset(config.lacks),
        )
        backend = make_backend(foreign, self.tokenizer, self.tools)
        backend.open()
        return backend


def zmq_address(url: str, given: str | int) -> str:
    """Where a worker's ZeroMQ socket is: as given, or at a port of the host in the worker's URL."""
    if not given or (isinstance(given, str) and not given.isdecimal()):
        return str(given or "")
    host = re.match(r"(?:\w+://|tcp:)(\[[^\]]+\]|[^:/]+)", url)
    return f"tcp://{host[1] if host else '127.0.0.1'}:{given}"


def worker_key(key: bytes) -> WorkerKey | None:
    """A backend's side of a worker's key; None without one."""
    return WorkerKey(key, lambda: fresh_key(NONCE_BYTES)) if key else None


def _key_of(config: WorkerConfig) -> str:
    """The key that a worker wants.

    Raises:
        ConfigError: the variable that should have it is not set.
    """
    if not config.api_key_env:
        return ""
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ConfigError(f"api_key_env: the environment variable {config.api_key_env} is not set")
    return key


def terms_of(config: WorkerConfig) -> DeploymentTerms | None:
    """Its place and its limits among the workers of its model; None: it is as all others."""
    terms = DeploymentTerms(order=config.order, weight=config.weight, rpm=config.rpm, tpm=config.tpm)
    return None if terms == DeploymentTerms() else terms


def worker_id_at(route: str, config: WorkerConfig) -> WorkerId:
    """The name of a worker at an address: the model's, and where it is."""
    return WorkerId(f"{route}@{config.url.partition('://')[2] or config.url}")


@dataclass(slots=True, frozen=True)
class DrainedWorker:
    """The facts of a worker that was taken out of service."""

    route: str
    engine: str
    address: str


class Members:
    """One for each process that has a registry."""

    def __init__(self, registry: Registry, log: Log, *, drain_timeout_s: float) -> None:
        self.drain_timeout_s = drain_timeout_s
        """A worker that is not wanted any more has so long to end its streams."""
        self._registry, self._log = registry, log
        self._wanted: dict[str, dict[WorkerId, DesiredWorker]] = {}
        self._there: dict[WorkerId, DesiredWorker] = {}
        """The descriptions from which the workers in the registry were made."""
        self._held: dict[WorkerId, DrainedWorker] = {}
        self._ordered: dict[WorkerId, float] = {}
        self._one_at_a_time = asyncio.Lock()
        self._again: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def apply(self, source: str, wanted: Iterable[DesiredWorker]) -> None:
        """From now on `source` wants these workers and no others.

        A worker that cannot be made is reported and left out; applying the same again tries it again, and
        likewise workers that are down for good.
        """
        self._wanted[source] = {each.id: each for each in wanted}
        every = {worker_id for found in self._wanted.values() for worker_id in found}
        self._held = {worker_id: held for worker_id, held in self._held.items() if worker_id in every}
        await self._reconcile()

    @property
    def held(self) -> Mapping[WorkerId, "DrainedWorker"]:
        """Workers that were taken out of service, whether they still drain or are gone."""
        return self._held

    def is_held(self, worker_id: WorkerId) -> bool:
        """Whether it was taken out of service."""
        return worker_id in self._held or worker_id in self._ordered

    def hold(self, worker_id: WorkerId, timeout_s: float) -> bool:
        """Take a worker out of service, whatever the sources want: it drains and leaves.

        False if there is none.
        """
        worker = self._registry.get(worker_id)
        if worker is None:
            return worker_id in self._held
        self._held[worker_id] = DrainedWorker(worker.route, worker.engine, worker.address)
        self._take_away(worker, timeout_s)
        return True

    async def out_of_service(self, ordered: Mapping[WorkerId, float]) -> None:
        """These and no others are out of service, by what all gateway processes of this server agreed on:
        with the seconds that their streams have. One that is not here yet will not join.
        """
        before, self._ordered = self._ordered, dict(ordered)
        for worker_id in before.keys() - ordered.keys():
            self._held.pop(worker_id, None)
        for worker_id, timeout_s in ordered.items():
            self.hold(worker_id, timeout_s)
        await self._reconcile()

    @property
    def gone(self) -> tuple[WorkerId, ...]:
        """Workers that are out of service and have left."""
        held = self._held.keys() | self._ordered.keys()
        return tuple(worker_id for worker_id in sorted(held) if self._registry.get(worker_id) is None)

    async def release(self, worker_id: WorkerId) -> bool:
        """Let it come back, as a new one, if a source wants it still. False if it was not held."""
        if self._held.pop(worker_id, None) is None:
            return False
        await self._reconcile()
        return True

    async def close(self, timeout_s: float) -> None:
        """Drain every worker, all at the same time."""
        self._is_closed = True
        self._wanted.clear()
        drains = [self._registry.drain(worker.id, timeout_s) for worker in list(self._registry)]
        await asyncio.gather(*(drain for drain in drains if drain is not None))

    async def _reconcile(self) -> None:
        async with self._one_at_a_time:
            wanted = {
                worker_id: each
                for source in self._wanted.values()
                for worker_id, each in source.items()
                if worker_id not in self._held and worker_id not in self._ordered
            }
            for worker in list(self._registry):
                each = wanted.get(worker.id)
                if worker.state is WorkerState.GONE or each is None or each != self._there.get(worker.id):
                    self._take_away(worker, self.drain_timeout_s)
            for worker_id, each in wanted.items():
                if self._registry.get(worker_id) is None and not self._is_closed:
                    await self._join(each)

    async def _join(self, wanted: DesiredWorker) -> None:
        try:
            worker = await wanted.open(self._registry)
            self._registry.add(worker)
        except PenstockError as error:
            self._log.error("a worker cannot be used", worker=wanted.id, error=error)
        else:
            self._there[worker.id] = wanted

    def _take_away(self, worker: Worker, timeout_s: float) -> None:
        already = worker.drained is not None
        drained = self._registry.drain(worker.id, timeout_s)
        if drained is not None and not already:
            self._log.info("a worker leaves", worker=worker.id, streams=worker.backend.num_streams)
            drained.add_done_callback(lambda _: self._on_drained(worker.id))

    def _on_drained(self, worker_id: WorkerId) -> None:
        self._there.pop(worker_id, None)
        if not self._is_closed and any(worker_id in source for source in self._wanted.values()):
            task = asyncio.get_running_loop().create_task(self._reconcile(), name=f"again {worker_id}")
            self._again.add(task)
            task.add_done_callback(self._again.discard)


TIMEOUT_S = 5.0
"""For one answer of DNS or of the API server."""
FOUND_MAX = 256
"""Workers taken from one source; more are reported and left out."""


@dataclass(slots=True, frozen=True, order=True)
class DiscoveredAddress:
    """A worker listens there."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """As it stands in URLs; IPv6 addresses are bracketed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class DiscoveredWorkers:
    """The workers that one source wants, kept in the registry by way of its members."""

    def __init__(
        self,
        source: str,
        config: DiscoverConfig,
        make: Callable[[WorkerConfig], DesiredWorker],
        members: Members,
        log: Log,
    ) -> None:
        """`make` says what a worker at an address is."""
        self.source, self.config = source, config
        self._make, self._members, self._log = make, members, log
        self._now: tuple[DiscoveredAddress, ...] | None = None
        self._left_out = 0

    async def take(self, endpoints: Iterable[DiscoveredAddress]) -> None:
        """These are there now, and no others. Workers that are no longer there drain."""
        every = sorted(set(endpoints))
        now = tuple(every[:FOUND_MAX])
        if (left_out := len(every) - len(now)) != self._left_out:
            self._left_out = left_out
            if left_out:
                self._log.warning(
                    "a source has more workers than are taken",
                    source=self.source,
                    taken=FOUND_MAX,
                    left_out=left_out,
                )
        if now == self._now:
            return
        before, self._now = set(self._now or ()), now
        self._log.info(
            "workers were found",
            source=self.source,
            joined=len(set(now) - before),
            left=len(before - set(now)),
        )
        await self._members.apply(self.source, [self._make(worker_at(each, self.config)) for each in now])


def worker_at(endpoint: DiscoveredAddress, config: DiscoverConfig) -> WorkerConfig:
    """The worker at an endpoint."""
    is_ours = config.engine == "penstock"
    return WorkerConfig(
        url=f"tcp:{endpoint.authority}" if is_ours else f"{config.scheme}://{endpoint.authority}",
        **{name: getattr(config, name) for name in WorkerTraits.__struct_fields__},
    )


def launched(
    model: ModelConfig,
    path: str,
    launcher: Launcher,
    tokenizer: Tokenizer,
    clock: Clock,
    *,
    cores: int,
    memory_bytes: int = 0,
    scaled: Iterable[tuple[WorkerId, Mapping[str, float] | None]] | None = None,
) -> Iterator[Launched]:
    """The replicas of one model; `path` is its directory.

    They share `cores`; 0: each has those of its place. With a bound on memory they start asleep. `scaled` are
    those of a model that scales, each with what Ray sets aside for it: as many as there may be share `cores`.
    """
    name, limit = served_name(model), model.scale.max or model.replicas
    if scaled is None:
        scaled = [(WorkerId(f"{name}-{number}"), None) for number in range(model.replicas)]
    for worker_id, ray_resources in scaled:
        spec = WorkerSpec(
            worker_id=worker_id,
            model_path=path,
            model_name=ModelName(name),
            engine=replace(
                EngineSettings.of(share_of(model.engine, limit, cores)), memory_bytes=memory_bytes
            ),
            asleep=memory_bytes > 0,
            ray_resources=ray_resources,
        )
        yield Launched(
            engine=model.engine,
            spec=spec,
            launcher=launcher,
            tokenizer=tokenizer,
            clock=clock,
        )


def attached(model: ModelConfig, tokenizer: Tokenizer, tools: BackendDependencies) -> Iterator[Attached]:
    """The workers of one model that run somewhere already."""
    name = served_name(model)
    for config in model.workers:
        yield Attached(
            id=worker_id_at(name, config), route=name, config=config, tokenizer=tokenizer, tools=tools
        )

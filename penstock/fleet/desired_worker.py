"""A worker that should be there, and how it comes to be: launched here, or attached at an address.

What is compared says whether a worker that is there already is still the one that is wanted.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Protocol

from penstock.backends.base import Backend
from penstock.backends.engine.auth import WorkerKey
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.heartbeat import HeartbeatTerms
from penstock.backends.http.external import BackendDependencies, ExternalWorker, make_backend
from penstock.clock import Clock
from penstock.config.fleet import WorkerConfig
from penstock.config.tree import EngineConfig
from penstock.errors import ConfigError
from penstock.fleet.launchers.base import Launcher, WorkerSpec
from penstock.fleet.registry import Registry
from penstock.fleet.worker import Worker
from penstock.protocol.address import Address, parse_address
from penstock.protocol.worker_auth import NONCE_BYTES, hash_key_of
from penstock.rng import fresh_key
from penstock.text.tokenizer import Tokenizer
from penstock.types import WorkerId


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
    """As it is configured: what of it is this one's share changes with the number of replicas, and restarts
    nobody."""
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
    """A worker that somebody else started, at an address."""

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


def worker_id_at(route: str, config: WorkerConfig) -> WorkerId:
    """The name of a worker at an address: the model's, and where it is."""
    return WorkerId(f"{route}@{config.url.partition('://')[2] or config.url}")


def zmq_address(url: str, given: str | int) -> str:
    """Where a worker's ZeroMQ socket is: as given, or at a port of the host in the worker's URL."""
    if not given or (isinstance(given, str) and not given.isdecimal()):
        return str(given or "")
    host = re.match(r"(?:\w+://|tcp:)(\[[^\]]+\]|[^:/]+)", url)
    return f"tcp://{host[1] if host else '127.0.0.1'}:{given}"

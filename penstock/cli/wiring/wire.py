"""From a configuration to running parts: the registry with its workers, and the gateway in front.

    config ─> ServedModel (tokenizer, template) ─────────────────────> Gateway      listens first
           ─> sources ─> Members ─> Registry <─ workers, ready ──────────┘          then the models load

Chooses nothing at run time: which launcher and which sources of workers there are follows from the
configuration, and is decided here, once.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock import __version__, rng
from penstock.backends.base import BackendStatus, Phase
from penstock.cli.wiring.handover import Takeover
from penstock.cli.wiring.models import ModelPart, make_dependencies, make_part, wait_for_attached
from penstock.cli.wiring.processes import GatewayProcesses
from penstock.cli.wiring.progress import FleetLog, LoadingDisplay, WorkerLogBuffer
from penstock.clock import Clock
from penstock.config.checkpoints import with_members
from penstock.config.engine_settings import promised, with_quota
from penstock.config.fleet import FleetConfig
from penstock.config.machine import state_directory
from penstock.config.tree import Config, ModelConfig, ServerConfig
from penstock.errors import ConfigError, OperatorError, WorkerUnavailable
from penstock.fleet.cells import peer_cells
from penstock.fleet.discovery import Discovery
from penstock.fleet.launchers.base import LaunchedWorker, Launcher, WorkerStopped
from penstock.fleet.launchers.kubernetes import KubernetesPool, PoolTools
from penstock.fleet.launchers.process import Spares, TakeSpare, WorkerLogs, no_spare
from penstock.fleet.launchers.ray import RayLauncher
from penstock.fleet.launchers.supervised import LocalLauncher
from penstock.fleet.leadership import Leadership
from penstock.fleet.members import DesiredWorker, Members, attached, launched
from penstock.fleet.registry import Registry, Worker
from penstock.fleet.scale_model import ModelScale
from penstock.fleet.scale_pools import LaunchedPool, ScalePool
from penstock.fleet.scaling import ScaleLeader
from penstock.fleet.sleep import SleepKeeper
from penstock.gateway.app import Gateway
from penstock.gateway.dispatch.assemble import GatewayTools
from penstock.gateway.http.server import bound_sockets, refuse_the_rest
from penstock.gateway.shared.redis_store import RedisLeaderStore
from penstock.policy.capacity.autoscaler import ONLY, pool_config
from penstock.policy.resilience.worker_state import WorkerState
from penstock.protocol.peers import LaunchNote, Order, WorkerAt
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import WorkerId


def make_launcher(
    config: FleetConfig, clock: Clock, key: bytes, logs: WorkerLogs, spare: TakeSpare = no_spare
) -> Launcher:
    """The launcher of every replica, which name KV blocks with `key`; `spare` has processes begun before.

    Raises:
        ConfigError: it needs something that is not installed.
    """
    if config.launcher == "ray":
        return RayLauncher(clock, key, config=config, logs=logs)
    return LocalLauncher(clock, key, logs=logs, spare=spare)


def leadership_of(config: Config, clock: Clock, log: Log) -> Leadership | None:
    """This server among those that share a store; None: it shares none. Raises ConfigError, as the store."""
    if not config.shared.url:
        return None
    return Leadership(RedisLeaderStore(config.shared), rng.IdSource().take("server"), clock, log)


def log_directory() -> Path | None:
    """Where workers' words are kept; None where there is no place for them."""
    with contextlib.suppress(RuntimeError):  # There may be no home directory.
        return state_directory() / "workers"
    return None


def shared_cores(config: FleetConfig) -> int:
    """Cores that all replicas share: this machine's, if they run here."""
    return len(os.sched_getaffinity(0)) if config.launcher == "local" else 0


KILL_TIMEOUT_S = 2.0


class Stack:
    """Everything that one `serve` process runs.

    `start` it, wait until it is ready, then `drain` or `abort`.
    """

    def __init__(self, config: Config, clock: Clock, log: Log, spares: Spares) -> None:
        """Read the tokenizers; nothing runs yet but `spares`, processes for workers.

        Raises:
            ConfigError: there is no such model.
            CheckpointError: its tokenizer or chat template cannot be read.
        """
        self._config, self._clock, self._log = config, clock, log
        self._models = config.models
        self._has_place = False
        self._registry = Registry(clock, log, places=config.cells.places)
        self._members = Members(self._registry, log, drain_timeout_s=config.fleet.drain_timeout_s)
        self._parts = [make_part(model, self._registry, clock) for model in config.models]
        self._words = WorkerLogBuffer(log)
        hash_key = rng.fresh_key()
        logs = WorkerLogs(self._words.say, log_directory())
        self._launcher = make_launcher(config.fleet, clock, hash_key, logs, spares.take)
        self._discovery = Discovery(self._members, clock, log)
        self._fleet_log: FleetLog | None = None
        self._held_at: dict[WorkerId, WorkerAt] = {}
        models = {part.served.name: part.served for part in self._parts}
        metrics = Metrics(list(models), version=__version__)
        self._tools = make_dependencies(config, metrics, clock)
        self._sleeper = SleepKeeper(
            self._registry,
            clock,
            log,
            idle_s={part.served.name: model.sleep_after_s for model, part in self._model_parts()},
            bound_bytes=config.fleet.memory_bytes,
        )
        self._leadership = leadership_of(config, clock, log)
        self._scaled: dict[str, list[LaunchedPool]] = {
            part.served.name: self._pools(model, part.served.name)
            for model, part in self._model_parts()
            if model.scale.launches
        }
        self._scaler = self._make_scaler()
        self._processes = (
            GatewayProcesses(
                config,
                clock,
                log,
                self._sleeper,
                scaler=self._scaler,
                hash_key=hash_key,
                tail=logs.tails.of,
                leadership=self._leadership,
            )
            if config.server.processes > 1
            else None
        )
        self.listeners: Sequence[socket.socket] = ()
        self._gateway = self._processes or Gateway(
            config,
            models,
            self._registry,
            GatewayTools(
                metrics=metrics,
                clock=clock,
                ids=rng.IdSource(),
                log=log,
                sleeper=self._sleeper,
                scaler=self._scaler,
                leadership=self._leadership,
            ),
            self._members,
            hash_key=hash_key,
            tail=logs.tails.of,
        )

    def _make_scaler(self) -> ScaleLeader:
        scaled = [
            ModelScale(part.served.name, model.scale, self._scale_pools(model, part.served.name))
            for model, part in self._model_parts()
            if model.scale.max
        ]
        return ScaleLeader(scaled, self._config, self._registry, self._clock, self._log, self._leadership)

    def _scale_pools(self, model: ModelConfig, name: str) -> Sequence[ScalePool]:
        """Where the workers of a model that scales are.

        Raises:
            ConfigError: they are pods, and nothing says where the API server is.
        """
        if (launched_pools := self._scaled.get(name)) is not None:
            return launched_pools
        where = next(each.kubernetes for each in model.discover if each.kubernetes is not None)
        tools = PoolTools(
            members=self._members, registry=self._registry, clock=self._clock, log=self._log,
            leadership=self._leadership,
        )  # fmt: skip
        return [KubernetesPool(name, pool, where, tools) for pool in model.scale.pools]

    def _pools(self, model: ModelConfig, name: str) -> list[LaunchedPool]:
        """Where the workers of a model that scales are: the first of them are there from the start."""

        async def apply() -> None:
            await self._apply_launched(name)

        first = max(model.replicas, min(model.scale.min, model.scale.max))
        pools: list[LaunchedPool] = []
        for pool in model.scale.pools or (ONLY,):
            count = 0 if pool.spot else min(first, pool.max)
            first -= count
            pools.append(
                LaunchedPool(
                    name, pool.name if pool is not ONLY else "", self._registry, self._clock,
                    first=count, apply=apply, is_held=self._members.is_held, wake=self._sleeper.begin_to_wake,
                )
            )  # fmt: skip
        return pools

    def _launched_names(
        self, model: ModelConfig, name: str
    ) -> list[tuple[WorkerId, Mapping[str, float] | None]] | None:
        """Workers that a model that scales is to have now; None: it does not scale."""
        if (pools := self._scaled.get(name)) is None:
            return None
        return [
            (worker_id, pool_config(model.scale, pool.name).ray_resources or None)
            for pool in pools
            for worker_id in pool.names
        ]

    async def _apply_launched(self, name: str) -> None:
        for model, part in self._model_parts():
            if part.served.name == name:
                await self._members.apply(f"models.{name}", self._wanted(model, part))

    def _model_parts(self) -> Iterator[tuple[ModelConfig, ModelPart]]:
        return zip(self._models, self._parts, strict=True)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models' public names, in the order of the configuration."""
        return tuple(part.served.name for part in self._parts)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The code that models compute with which are ready, as far as this process knows."""
        statuses = (worker.backend.status for worker in self._registry)
        return tuple({each.info.kernels: None for each in statuses if each.info and each.info.kernels})

    @property
    def num_streams(self) -> int:
        """Answers that are being generated now."""
        if self._processes is not None:
            return self._processes.num_streams
        return sum(worker.backend.num_streams for worker in self._registry)

    async def start(self, takeover: Takeover | None = None) -> tuple[str, int]:
        """Listen, then start the workers; returns the address. Models are still loading.

        In a takeover another server accepts on the same sockets until `take_over` is called.

        Raises:
            ConfigError: the address cannot be listened on, or there is no place for workers.
        """
        if takeover is None:
            try:
                self.listeners = await bound_sockets(self._config.server)
            except ConfigError as error:
                raise _friendlier(error, self._config.server) from error
        else:
            self.listeners = takeover.listeners
        bound = self.listeners[0].getsockname()
        if self._processes is not None:
            await self._processes.start(self.listeners)
            self._registry.listen(lambda _: self._tell_processes())
            self._processes.on_order = self._take_order
        elif takeover is None:
            await self._gateway.start(self.listeners)
        await self._apply_models()
        if self._processes is not None and takeover is None:
            await self._processes.open(self._launched_at())
        return str(bound[0]), int(bound[1])

    async def take_over(self, takeover: Takeover) -> None:
        """The models are ready: accept connections, then let the other server go.

        Raises:
            OperatorError: it does not answer, or a gateway process does not start.
        """
        if self._processes is not None:
            await self._processes.open(self._launched_at(), is_patient=True)
        else:
            await self._gateway.start(self.listeners)
        await takeover.finish()

    def _launched_at(self) -> list[WorkerAt]:
        """The launched workers that gateway processes are to know; those that are out of service by hand are
        known as such. One that leaves is closed before it is gone: to join it again would keep it.
        """
        there = [
            worker_at(worker)
            for worker in self._registry
            if worker.stop is not None and worker.drained is None and worker.state is not WorkerState.DRAINING
        ]
        return [*there, *(at for worker_id, at in self._held_at.items() if worker_id in self._members.held)]

    async def _take_order(self, order: Order) -> None:
        """One of the gateway processes was told to take a worker out of service, or to bring it back."""
        worker_id = WorkerId(order.worker)
        if order.timeout_s is None:
            self._held_at.pop(worker_id, None)
            self._tell_processes()
            await self._members.release(worker_id)
        elif (worker := self._registry.get(worker_id)) is not None:
            self._held_at.setdefault(worker_id, worker_at(worker))
            self._members.hold(worker_id, order.timeout_s)

    def _tell_processes(self) -> None:
        if self._processes is not None:
            self._processes.take_workers(self._launched_at())

    def _wanted(self, model: ModelConfig, part: ModelPart) -> list[DesiredWorker]:
        """The workers of one model.

        In front of several gateway processes this one only keeps what it launches.
        """
        tokenizer = part.served.tokenizer
        engine = promised(with_quota(model.engine, self._config), self._config.admission)
        wanted = msgspec.structs.replace(model, engine=engine)
        cores = shared_cores(self._config.fleet)
        found: list[DesiredWorker] = [
            *launched(
                wanted,
                part.path,
                self._launcher,
                tokenizer,
                self._clock,
                cores=cores,
                memory_bytes=self._config.fleet.memory_bytes,
                scaled=self._launched_names(model, part.served.name),
            )
        ]
        if self._processes is None:
            found += attached(model, tokenizer, self._tools)
            found += peer_cells(self._config.cells, part.served.name, tokenizer, self._clock)
        return found

    async def reload(self, config: Config) -> bool:
        """Put a new configuration in force, as far as that can be done while running; False if it was
        refused.
        """
        if isinstance(self._gateway, GatewayProcesses):
            taken = await self._gateway.reload(config)
        else:
            taken = await self._gateway.tenancy.reload(config)
        if taken:
            self._models = with_members(self._models, config.models)
            try:
                await self._apply_models()
            except ConfigError as error:
                self._log.error("not all workers of the new configuration can be had", error=error)
        return taken

    async def _apply_models(self) -> None:
        """Let the workers that the configuration wants be there, and no others.

        Raises:
            ConfigError: there is no place for workers, or a source of workers lacks something.
        """
        if not self._has_place and any(model.replicas or model.scale.launches for model in self._models):
            await self._launcher.open()
            self._has_place = True
        for model, part in self._model_parts():
            await self._members.apply(f"models.{part.served.name}", self._wanted(model, part))
        if self._processes is None:
            for model, part in self._model_parts():
                await self._discovery.apply(model, part.served.tokenizer, self._tools)

    async def wait_ready(self, display: LoadingDisplay) -> None:
        """Return once every worker that is launched here can answer, or has failed while its model has
        others, and those at addresses had their time.

        Raises:
            OperatorError: a model cannot be served.
            WorkerUnavailable: none of a model's workers comes up.
        """
        tasks = {
            asyncio.create_task(self._wait_for(worker, display)): worker for worker in self._launcher.list()
        }
        try:
            await self._wait_for_models(tasks)
        except OperatorError:
            self._words.forget()  # The error says the same, and better.
            raise
        finally:
            self._words.release()
            for task in tasks:
                task.cancel()
        self._sleeper.check()
        await self._sleeper.fill()
        self._sleeper.start()
        await self._scaler.start()
        if self._leadership is not None:
            await self._leadership.start()
        await wait_for_attached(self._registry, self._models, self._log)
        self._fleet_log = FleetLog(self._registry, self._log, self._gateway.notes)

    async def _wait_for_models(self, waiting: Mapping[asyncio.Task[None], LaunchedWorker]) -> None:
        """Raises: why a model has no worker that is ready, loads, or is at an address."""
        left = Counter(worker.spec.model_name for worker in waiting.values())
        for model, part in self._model_parts():
            elsewhere = len(model.workers) + len(model.discover) + len(self._config.cells.peers)
            left[part.served.name] += elsewhere
        pending = set(waiting)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task, error in ((task, task.exception()) for task in done):
                if error is None:
                    continue
                model, worker = waiting[task].spec.model_name, waiting[task].spec.worker_id
                left[model] -= 1
                # One that failed before is started again, and may be ready by now.
                workers = self._registry.of(model)
                is_last = not (left[model] or workers.is_ready or workers.to_come)
                if is_last or not isinstance(error, OperatorError | WorkerUnavailable):
                    raise error
                what = "a worker does not come up; its model has others"
                self._log.error(what, model=model, worker=worker, error=error)

    async def _wait_for(self, worker: LaunchedWorker, display: LoadingDisplay) -> None:
        name = worker.spec.model_name
        if len(self._registry.of(name)) > 1:
            name = worker.spec.worker_id

        def show(status: BackendStatus) -> None:
            if worker.backend.failure is None:  # Otherwise `wait_ready` is about to raise it.
                display.update(name, status)

        with contextlib.suppress(WorkerStopped):  # By hand, or by a new configuration: others continue.
            await worker.wait_ready(show)
            show(worker.backend.status)

    async def drain(self, *, lameduck_s: float, listens: bool) -> None:
        """Stop as `Gateway.stop` says, then stop everything."""
        await self._gateway.stop(lameduck_s=lameduck_s, listens=listens)
        try:
            if listens:
                await refuse_the_rest(self.listeners, self._config.server, self._clock)
        finally:
            await self._close(timeout_s=0.0)

    def hurry(self) -> None:
        """End what a `drain` waits for: streams get a last event, and what clients got is settled."""
        self._gateway.hurry()

    async def abort(self) -> None:
        """Stop everything now. A worker that does not listen dies with this process (see LocalLauncher)."""
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._close(timeout_s=0.0)
        except TimeoutError:
            self._log.warning("a worker did not stop in time; it ends with this process")

    async def _close(self, *, timeout_s: float) -> None:
        if self._fleet_log is not None:
            self._fleet_log.close()
        self._discovery.stop()
        if self._leadership is not None:
            await self._leadership.stop()
        await self._scaler.stop()
        self._sleeper.close()
        if self._processes is not None:
            await self._processes.kill()
        for listener in self.listeners:
            listener.close()
        await self._members.close(timeout_s)
        await self._launcher.close(timeout_s=timeout_s)


def worker_at(worker: Worker) -> WorkerAt:
    """The message about a launched worker for gateway processes."""
    status = worker.backend.status
    notes = tuple(LaunchNote(note.text, note.at_ns) for note in status.notes)
    stage = "" if status.ready else status.stage
    is_down = status.phase is Phase.DOWN
    return WorkerAt(
        worker.id,
        worker.route,
        worker.address,
        status.restarts,
        notes,
        stage,
        is_down,
        dict(status.faults),
    )


def _friendlier(error: ConfigError, server: ServerConfig) -> ConfigError:
    """Say what to do about an address that cannot be listened on."""
    number = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
    if number == errno.EADDRINUSE:
        what = f"port {server.port} on {server.host} is in use"
        return ConfigError(f"{what}; stop what runs there, or take another one with --port or PENSTOCK_PORT")
    if number == errno.EACCES:
        return ConfigError(f"there is no permission to listen on port {server.port}; take one above 1023")
    return error

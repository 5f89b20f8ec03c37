"""From a configuration to running parts: worker processes, their backends, and the gateway in front.

    config ─> ServedModel (tokenizer, template, OwnBackend) ─> Gateway      listens first
           ─> WorkerSpec ─> LocalLauncher ─> engine process ─> ready        then the models load

Chooses nothing at run time: which launcher and which backend there is, is decided here, once.
"""

import asyncio
import errno
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from penstock import __version__, rng
from penstock.backends.base import BackendStatus
from penstock.backends.own import OwnBackend
from penstock.cli.processes import GatewayProcesses
from penstock.cli.progress import LoadingDisplay
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.presets import resolve, served_name
from penstock.config.tree import Config, ModelConfig, ServerConfig
from penstock.errors import ConfigError, OperatorError
from penstock.fleet.launchers.base import LaunchedWorker, WorkerSpec
from penstock.fleet.launchers.local import LocalLauncher
from penstock.gateway.app import Gateway
from penstock.gateway.models import ServedModel
from penstock.gateway.public import PublicPrefixes
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import ModelName, WorkerId

WATCH_S = 0.5
KILL_TIMEOUT_S = 2.0
HELD_LINES_MAX = 500


@dataclass(slots=True, frozen=True)
class Part:
    """One model: what the gateway sees of it, and the worker that it needs."""

    served: ServedModel
    backend: OwnBackend
    spec: WorkerSpec


class Stack:
    """Everything that one `serve` process runs. `start` it, wait until it is ready, then `drain` or `abort`."""

    def __init__(self, config: Config, clock: Clock, log: Log) -> None:
        """Read the tokenizers; nothing runs yet.

        Raises:
            ConfigError: there is no such model.
            CheckpointError: its tokenizer or chat template cannot be read.
        """
        self._config, self._log = config, log
        self._parts = [make_part(model, clock) for model in config.models]
        self._words = _WorkerWords(log)
        self._launcher = LocalLauncher(clock, rng.fresh_key(), log=self._words.say)
        self._workers: list[LaunchedWorker] = []
        self._watch: asyncio.Task[None] | None = None
        models = {part.served.name: part.served for part in self._parts}
        self._processes = GatewayProcesses(config, clock, log) if config.server.processes > 1 else None
        self._gateway = self._processes or Gateway(
            config,
            models,
            metrics=Metrics(list(models), version=__version__),
            clock=clock,
            ids=rng.IdSource(),
            log=log,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients call the models, in the order of the configuration."""
        return tuple(part.served.name for part in self._parts)

    @property
    def num_streams(self) -> int:
        """Answers that are being generated now."""
        if self._processes is not None:
            return self._processes.num_streams
        return sum(part.backend.num_streams for part in self._parts)

    async def start(self) -> tuple[str, int]:
        """Listen, then start the workers; returns the address. Models are still loading.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        try:
            address = await self._gateway.start()
        except ConfigError as error:
            raise _friendlier(error, self._config.server) from error
        for part in self._parts:
            self._workers.append(await self._launcher.start(part.spec, part.backend))
        if self._processes is not None:
            await self._processes.open([str(worker.address) for worker in self._workers])
        return address

    async def reload(self, config: Config) -> bool:
        """Put a new configuration in force, as far as that can be done while running; False if it was refused."""
        if isinstance(self._gateway, GatewayProcesses):
            return await self._gateway.reload(config)
        return await self._gateway.tenancy.reload(config)

    async def wait_ready(self, display: LoadingDisplay) -> None:
        """Return once every model can answer.

        Raises:
            OperatorError: a model cannot be served.
            WorkerUnavailable: a worker does not come up.
        """
        tasks = [
            asyncio.create_task(self._wait_for(part, worker, display))
            for part, worker in zip(self._parts, self._workers, strict=True)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except OperatorError:
            self._words.forget()  # The error says the same, and better.
            raise
        finally:
            self._words.release()
            for task in tasks:
                task.cancel()
        self._watch = asyncio.create_task(self._watch_workers(), name="watch workers")

    async def _wait_for(self, part: Part, worker: LaunchedWorker, display: LoadingDisplay) -> None:
        def show(status: BackendStatus) -> None:
            if part.backend.failure is None:  # Otherwise `wait_ready` is about to raise it.
                display.update(part.served.name, status)

        await worker.wait_ready(show)
        show(part.backend.status)

    async def drain(self) -> None:
        """Take nothing new, let answers end (up to `drain_timeout_s`), then stop everything."""
        await self._gateway.stop()
        await self._close(timeout_s=0.0)

    async def abort(self) -> None:
        """Stop everything now. A worker that does not listen dies with this process (see LocalLauncher)."""
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._close(timeout_s=0.0)
        except TimeoutError:
            self._log.warning("a worker did not stop in time; it ends with this process")

    async def _close(self, *, timeout_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._processes is not None:
            await self._processes.kill()
        await self._launcher.close(timeout_s=timeout_s)

    async def _watch_workers(self) -> None:
        """Say in the log what happens to workers. /ready tells clients; requests get errors meanwhile."""
        known = {part.served.name: "ready" for part in self._parts}
        while True:
            await sleep(WATCH_S)
            for part in self._parts:
                name, status = part.served.name, part.backend.status
                stage = "ready" if status.ready else status.stage
                if stage == known[name]:
                    continue
                known[name] = stage
                if status.ready:
                    self._log.info("the model is ready again", model=name, restarts=status.restarts)
                else:
                    self._log.error("the model cannot answer", model=name, why=stage)


class _WorkerWords:
    """What workers print, held back while models load: a failure to load has a message of its own."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._held: deque[str] | None = deque(maxlen=HELD_LINES_MAX)

    def say(self, line: str) -> None:
        """One line of a worker's standard error."""
        if self._held is None:
            self._log.info(line)
        else:
            self._held.append(line)

    def forget(self) -> None:
        """Drop what is held back."""
        if self._held is not None:
            self._held.clear()

    def release(self) -> None:
        """Log what is held back, and hold back nothing more."""
        held, self._held = self._held, None
        for line in held or ():
            self._log.info(line)


def _friendlier(error: ConfigError, server: ServerConfig) -> ConfigError:
    """Say what to do about an address that cannot be listened on."""
    number = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
    if number == errno.EADDRINUSE:
        what = f"port {server.port} on {server.host} is in use"
        return ConfigError(f"{what}; stop what runs there, or take another one with --port or PENSTOCK_PORT")
    if number == errno.EACCES:
        return ConfigError(f"there is no permission to listen on port {server.port}; take one above 1023")
    return error


def make_part(model: ModelConfig, clock: Clock) -> Part:
    """What it takes to serve one model: nothing runs yet.

    Raises:
        ConfigError: there is no such model.
        CheckpointError: its tokenizer or chat template cannot be read.
    """
    directory, name = resolve(model.path), ModelName(served_name(model))
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, wall_ns=clock.wall_ns)
    backend = OwnBackend(tokenizer, clock)
    served = ServedModel(
        name=name,
        backend=backend,
        tokenizer=tokenizer,
        template=template,
        created_s=_changed_s(directory),
        public_prefixes=PublicPrefixes.of(model.public_prefixes, tokenizer, template),
    )
    spec = WorkerSpec(
        worker_id=WorkerId(f"{name}-0"), model_path=str(directory), model_name=name, engine=model.engine
    )
    return Part(served, backend, spec)


def _changed_s(directory: Path) -> int:
    """When the checkpoint was last changed: OpenAI's `created`."""
    return (directory / "config.json").stat().st_mtime_ns // NS_PER_S

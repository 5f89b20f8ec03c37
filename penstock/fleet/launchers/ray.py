"""Workers on a Ray cluster: one actor for each, which is the home of a worker process.

    RayLauncher ─> SupervisedWorker ─> RayProcess ──Ray──> actor ─> worker process <──our protocol── gateways
                                                       `WorkerHome`

Ray chooses the machine and starts the actor; it is not in the path of any request. The actor computes nothing
and relays nothing: gateways connect to the worker's own port. If the actor dies, so does the worker (see
engine/worker.py). Our own connection sees first that a worker is dead: Ray takes about 14 s to notice that a
machine is gone. Then the actor is asked, and if it does not answer in time it is given up, Ray is notified,
and the worker starts on another machine. A worker whose process crashed starts again in the same actor, at
the same address. Ray's client is imported when a launcher starts, so all of this is tested without it.
"""
# ruff: noqa: ANN401 - Ray makes its methods while it runs, so there are no types to name.

import asyncio
import importlib
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.backends.engine.backend import EngineBackend
from penstock.clock import Clock
from penstock.config.branch import extended
from penstock.config.fleet import FleetConfig
from penstock.errors import ConfigError, WorkerUnavailable
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.process import (
    TAIL_LINES,
    ReservedPort,
    WorkerLogs,
    WorkerProcess,
    describe_exit,
    stderr_line,
)
from penstock.fleet.launchers.supervised import SupervisedWorker, SupervisingLauncher
from penstock.protocol.address import Address, TcpAddress, WorkerLaunch, link_key_of, parse_address

LINES_MAX = 1000
"""Lines that were not fetched; older ones go first."""


class WorkerHome:
    """One worker at a time, started as often as asked, always on the same port."""

    def __init__(self, name: str, host: str) -> None:
        """`host` is this machine's address, as other machines reach it.

        Raises:
            OSError: no port is free.
        """
        self._name = name
        self._port = ReservedPort(host)
        self._process: WorkerProcess | None = None
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._wake = asyncio.Event()

    async def address(self) -> str:
        """Where the worker listens, or will."""
        return str(self._port.address)

    async def spawn(self, launch: bytes, environment: dict[str, str]) -> int | None:
        """Start the worker; returns its process id.

        `launch` is a `WorkerLaunch` as JSON, but for the address.

        Raises:
            OSError: no process can be started.
        """
        wanted = msgspec.json.decode(launch, type=WorkerLaunch)
        here = msgspec.structs.replace(wanted, address=str(self._port.address), shares_port=True)
        self._process = WorkerProcess(self._name, here, self._port.address, environment, self._say)
        await self._process.spawn()
        return self._process.pid

    async def wait(self) -> None:
        """Return when the worker has exited."""
        if self._process is not None:
            await self._process.wait()

    async def is_running(self) -> bool:
        """Whether the worker's process is there. That this answers says as much about the machine."""
        return self._process is not None and self._process.pid is not None

    async def kill(self) -> None:
        """End the worker at once."""
        if self._process is not None:
            self._process.kill()

    async def end(self, timeout_s: float) -> tuple[int | None, list[str]]:
        """Make sure that the worker is gone; returns its exit code and its last lines."""
        if self._process is None:
            return None, []
        await self._process.end(timeout_s)
        return self._process.exit_code, list(self._process.tail)

    async def lines(self) -> list[str]:
        """The lines that the worker has printed since the last call; waits until there is something."""
        await self._wake.wait()
        self._wake.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._wake.set()


NODE_LABEL = "ray.io/node-id"
KNOCK_TIMEOUT_S = 5.0
NOWHERE = TcpAddress("unplaced.invalid", 0)


class RayTerms(FleetConfig, frozen=True, kw_only=True):
    """The section `fleet`, and how long the cluster has."""

    place_timeout_s: float = 60.0
    """A worker for which the cluster has no room within so long cannot be started."""
    answer_timeout_s: float = 2.0
    """When a worker's connection is lost its actor has so long to answer; if it does not, the worker is
    started elsewhere. (Ray itself takes about 14 s to see that a machine is gone.)"""


class RayLauncher(SupervisingLauncher):
    """Starts workers on a cluster.

    `close` it, and nothing of them is left there; the connection to Ray ends with this process.
    """

    def __init__(
        self,
        clock: Clock,
        hash_key: bytes,
        *,
        config: FleetConfig,
        environment: dict[str, str] | None = None,
        logs: WorkerLogs = WorkerLogs(),  # noqa: B008 - it is frozen.
    ) -> None:
        """`logs` are kept on this machine.

        Raises:
            ConfigError: Ray is not installed.
        """
        super().__init__(clock, hash_key, environment, logs)
        self._ray, self._config = import_ray(), extended(config, RayTerms)
        self.link_key = link_key_of(hash_key)

    async def open(self) -> None:
        """Connect to the cluster.

        Raises:
            ConfigError: there is none at `fleet.ray_address`.
        """
        if self._ray.is_initialized():
            return
        try:
            await self._knock()
            # In a thread, since it waits for the cluster; workers' words reach us by themselves (RayProcess).
            await asyncio.to_thread(
                self._ray.init, address=self._config.ray_address, log_to_driver=False, logging_level="warning"
            )
        except (OSError, RuntimeError, ValueError) as error:
            what = str(error).strip().partition("\n")[0] or type(error).__name__
            message = f"fleet.ray_address: no cluster at {self._config.ray_address!r}: {what}"
            raise ConfigError(message) from error

    async def start(self, spec: WorkerSpec, backend: EngineBackend) -> SupervisedWorker:
        """Find a place for a worker and start it there; returns as soon as it has one.

        Raises:
            WorkerUnavailable: the cluster has no room for it.
        """
        assert spec.worker_id not in self._workers, f"{spec.worker_id} runs already"
        config = self._config_of(spec)
        process = RayProcess(self._ray, spec.worker_id, self._launch(spec), config, self._environment)
        process.log = self._hearer_of(spec.worker_id)
        try:
            await process.place()
        except OSError as error:
            raise WorkerUnavailable(f"{spec.worker_id}: {error}") from error
        return self._supervise(spec, backend, process)

    async def _knock(self) -> None:
        """Ray's client waits for minutes for a cluster that is not there, and may end the process then."""
        host, _, port = self._config.ray_address.rpartition(":")
        if not host or not port.isdecimal():
            return  # "auto" and the like, which Ray looks up.
        async with asyncio.timeout(KNOCK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()

    def _config_of(self, spec: WorkerSpec) -> "RayTerms":
        """With what Ray sets aside for this worker."""
        if spec.ray_resources is None:
            return self._config
        return msgspec.structs.replace(self._config, ray_resources=dict(spec.ray_resources))

    def _launch(self, spec: WorkerSpec) -> WorkerLaunch:
        engine = spec.engine
        if not engine.threads and (cores := int(actor_options(self._config_of(spec))["num_cpus"])):
            engine = msgspec.structs.replace(engine, threads=cores)
        return WorkerLaunch(
            model_path=spec.model_path,
            model_name=spec.model_name,
            address="",  # The actor knows.
            hash_key=self._hash_key,
            key=self.link_key,
            engine=engine,
            runner=spec.runner,
        )


class ActorDied(ConnectionError):
    """The actor's process has ended, and its machine may be well."""


class RayProcess:
    """One worker's process in an actor; see `Supervisable`.

    All of Ray's errors become an end of the process, or an `OSError`.
    """

    def __init__(
        self, ray: Any, name: str, launch: WorkerLaunch, config: RayTerms, environment: dict[str, str]
    ) -> None:
        self.exit_code: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.address: Address = NOWHERE
        self.pid: int | None = None
        self.log: Callable[[str], None] = stderr_line
        self._ray, self._name, self._config = ray, name, config
        self._launch, self._environment = launch, environment
        self.starts_asleep = launch.asleep
        self._actor: Any = None
        self._node = self._avoid = ""
        self._end = ""
        self._doubted = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    async def place(self) -> None:
        """Have Ray start an actor for it.

        Raises:
            OSError: there is no room for it, or it died at once.
        """
        remote = self._ray.remote(RayHome).options(**actor_options(self._config, self._avoid))
        self._actor = remote.remote(self._name)
        try:
            self._node, address = await self._ask(self._actor.place.remote(), self._config.place_timeout_s)
        except OSError as error:
            await self.close()
            self._avoid = ""  # There may be no other machine.
            raise OSError(f"no place on the cluster: {error}") from error
        self.address = parse_address(address)
        self._pump = asyncio.create_task(self._pass_on_lines(self._actor), name=f"lines of {self._name}")

    async def spawn(self) -> None:
        """See `Supervisable`."""
        if self._actor is None:
            await self.place()
        actor: Any = self._actor
        self.exit_code, self._end = None, ""
        self.tail.clear()
        self._doubted.clear()
        try:
            launch = msgspec.structs.replace(self._launch, asleep=self.starts_asleep)
            spawning = actor.spawn.remote(msgspec.json.encode(launch), self._environment)
            self.pid = await self._ask(spawning, self._config.place_timeout_s)
        except OSError:
            await self.close()
            raise

    async def wait(self) -> None:
        """Return when the process has exited, its actor has died, or its machine does not answer."""
        exited = _future(self._actor.wait.remote())
        while True:
            doubted = asyncio.ensure_future(self._doubted.wait())
            await asyncio.wait([exited, doubted], return_when=asyncio.FIRST_COMPLETED)
            doubted.cancel()
            if exited.done():
                if (error := exited.exception()) is not None:
                    await self._lose(f"its actor died ({type(error).__name__})")
                return
            self._doubted.clear()
            try:
                await self._ask(self._actor.is_running.remote(), self._config.answer_timeout_s)
            except OSError as error:
                if not isinstance(error, ActorDied):
                    self._avoid = self._node
                exited.add_done_callback(_drop)
                await self._lose_by(error)
                return

    def doubt(self) -> None:
        """See `Supervisable`."""
        self._doubted.set()

    def kill(self) -> None:
        """See `Supervisable`."""
        if self._actor is not None:
            self._actor.kill.remote()

    async def end(self, timeout_s: float) -> None:
        """See `Supervisable`. The actor stays, for a restart."""
        self.pid = None
        if self._actor is None:
            return
        try:
            ended = self._actor.end.remote(timeout_s)
            self.exit_code, tail = await self._ask(ended, timeout_s + self._config.answer_timeout_s)
            self.tail.extend(tail)
        except OSError as error:
            await self._lose_by(error)

    async def close(self) -> None:
        """See `Supervisable`. With the actor goes whatever it still runs."""
        actor, self._actor = self._actor, None
        self.pid = None
        if actor is not None:
            await asyncio.to_thread(self._ray.kill, actor, no_restart=True)
        if self._pump is not None:
            await asyncio.wait([self._pump], timeout=self._config.answer_timeout_s)
            self._pump.cancel()

    @property
    def was_killed_for_memory(self) -> bool:
        """See `Supervisable`: another machine's cgroups cannot be seen from here."""
        return False

    def describe_end(self) -> str:
        """See `Supervisable`."""
        return self._end or describe_exit(self.exit_code)

    async def _lose_by(self, error: OSError) -> None:
        what = "its actor died" if isinstance(error, ActorDied) else "its machine does not answer"
        await self._lose(f"{what} ({error})")

    async def _lose(self, what: str) -> None:
        """That process will send nothing more: should it still run, it ends with its actor."""
        self._end = f"the worker was lost: {what}"
        await self.close()

    async def _ask(self, reference: Any, timeout_s: float) -> Any:
        """An actor's answer.

        Raises:
            ActorDied: it cannot any more.
            OSError: it does not, in time or ever.
        """
        answer = _future(reference)
        await asyncio.wait([answer], timeout=timeout_s)
        if not answer.done():
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if (error := answer.exception()) is not None:
            words = str(error).strip().rpartition("\n")[2]
            # Ray knows that it is dead, where it only may be out of reach with any other error.
            kind = ActorDied if isinstance(error, self._ray.exceptions.ActorDiedError) else ConnectionError
            raise kind(f"{type(error).__name__}: {words}") from error
        return answer.result()

    async def _pass_on_lines(self, actor: Any) -> None:
        """Pass on the lines that the worker prints, until the actor ends."""
        while True:
            lines = _future(actor.lines.remote())
            await asyncio.wait([lines])
            if lines.exception() is not None:
                return
            for line in lines.result():
                self.log(line)


class RayHome(WorkerHome):
    """The actor's class: the home of a worker, at the address by which Ray knows this machine."""

    def __init__(self, name: str) -> None:
        self._context = import_ray().get_runtime_context()
        super().__init__(name, import_ray().util.get_node_ip_address())

    async def place(self) -> tuple[str, str]:
        """Which machine this is, and where the worker will listen."""
        return self._context.get_node_id(), await self.address()


def actor_options(config: FleetConfig, avoid: str = "") -> dict[str, Any]:
    """The options of a Ray actor: the place of one worker, on any machine but `avoid` (a node id).

    Ray restarts nothing by itself, since the supervisor does. A worker of several GPUs on several machines
    would ask for a placement group here (`scheduling_strategy`), with one bundle for each of its ranks.
    """
    resources = dict(config.ray_resources)
    options: dict[str, Any] = {
        "num_cpus": resources.pop("CPU", 1.0),
        "num_gpus": resources.pop("GPU", 0.0),
        "resources": resources,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 16,
    }
    if avoid:
        options["label_selector"] = {NODE_LABEL: f"!in({avoid})"}
    return options


def import_ray() -> Any:
    """Ray's client. It is large, and an extra.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError("fleet.launcher: ray needs Ray; install penstock[ray]") from None


def _drop(answer: "asyncio.Future[Any]") -> None:
    """Take notice of an answer that no longer matters, for asyncio reports errors that nothing retrieved."""
    if not answer.cancelled():
        answer.exception()


def _future(reference: Any) -> "asyncio.Future[Any]":
    """The answer to come, on this event loop. Giving it up leaves Ray's side alone."""
    return asyncio.wrap_future(reference.future())

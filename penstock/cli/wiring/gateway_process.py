"""One of several gateway processes of a server (`server.processes`):
`python -m penstock.cli.wiring.gateway_process`.

Started by cli/wiring/processes.py, which tells it everything on standard input, also when to stop. The end of
that pipe means that the parent is gone, and this process with it. SIGTERM drains it, a second one ends it.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from penstock import __version__, gc_tuning, rng
from penstock.backends.base import Note
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.http.backend import BackendDependencies
from penstock.cli.wiring.models import ModelPart, make_dependencies, make_part, wait_for_attached
from penstock.cli.wiring.progress import FleetLog
from penstock.clock import SystemClock
from penstock.config.checkpoints import with_members
from penstock.config.fleet import WorkerConfig
from penstock.config.tree import Config, ModelConfig
from penstock.errors import ConfigError
from penstock.fleet.cells import peer_cells
from penstock.fleet.discovery import Discovery
from penstock.fleet.members import Attached, DesiredWorker, Members, attached
from penstock.fleet.registry import Registry
from penstock.gateway.app import Gateway
from penstock.gateway.dispatch.assemble import GatewayTools
from penstock.gateway.shared.peers import GatewayPeers
from penstock.protocol.address import link_key_of
from penstock.protocol.peers import EXIT_CANNOT_SERVE, ChildLaunch, ChildReport, StopOrder, WorkerAt
from penstock.telemetry.audit import Notes
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import WorkerId

STDIN = 0
LAUNCH_BYTES_MAX = 16 * 1024 * 1024
EXIT_ORPHANED = 1


def main() -> int:
    """Serve until told to stop; the exit code."""
    launch, behind = read_launch(STDIN)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(launch, behind))
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return EXIT_CANNOT_SERVE


async def _serve(launch: ChildLaunch, behind: bytes) -> int:
    config = msgspec.json.decode(launch.config, type=Config)
    clock = SystemClock()
    log = Log(config.log, clock, stream=sys.stderr, secrets=config.auth.secrets)
    log.adopt("asyncio")
    registry = Registry(clock, log, places=config.cells.places)
    members = Members(registry, log, drain_timeout_s=config.fleet.drain_timeout_s)
    parts = [make_part(model, registry, clock) for model in config.models]
    metrics = Metrics([part.served.name for part in parts], version=__version__)
    tools = make_dependencies(config, metrics, clock)
    gateway = Gateway(
        config,
        {part.served.name: part.served for part in parts},
        registry,
        GatewayTools(metrics=metrics, clock=clock, ids=rng.IdSource(), log=log),
        members,
        peers=GatewayPeers(launch.parent, launch.leases, launch.index),
        hash_key=launch.hash_key,
    )
    gateway.adopt_adapters(launch.adapters)
    gateway.adopt_rollouts(launch.rollouts)
    gateway.expect(launch.to_come)
    stop = _Stop(gateway)
    discovery = Discovery(members, clock, log)
    fleet = _Fleet(config, parts, launch, registry, members, discovery, tools)
    parent = _Parent(gateway, fleet, stop, log)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.on_signal)
    parent.feed(behind)
    loop.add_reader(STDIN, parent.on_readable)
    await fleet.apply()
    if launch.is_patient:
        await wait_for_attached(registry, config.models, log)
    await gateway.start([socket.socket(fileno=number) for number in launch.listeners])
    gc_tuning.tune_server()
    telling = None
    if launch.index == 0:
        telling = asyncio.create_task(_tell_of_attached(config, registry, log, gateway.notes))
    await stop.asked.wait()
    if telling is not None:
        telling.cancel()
    if parent.is_gone:
        return EXIT_ORPHANED
    discovery.stop()
    await gateway.stop(lameduck_s=stop.order.lameduck_s, listens=stop.order.listens)
    await members.close(0.0)
    return 0


class _Stop:
    """When and how this process stops: as the parent says, or by SIGTERM, when others continue to listen."""

    def __init__(self, gateway: Gateway) -> None:
        self.asked, self.order = asyncio.Event(), StopOrder()
        self._gateway = gateway

    def on_signal(self) -> None:
        self.take(StopOrder(is_hurried=self.asked.is_set()))

    def take(self, order: StopOrder) -> None:
        if not self.asked.is_set():
            self.order = order
        if order.is_hurried:
            self._gateway.hurry()
        self.asked.set()


async def _tell_of_attached(config: Config, registry: Registry, log: Log, notes: Notes) -> None:
    """Events of workers at addresses, which the parent does not see: one process says it for all."""
    await wait_for_attached(registry, config.models, log)
    changes = FleetLog(registry, log, notes, only_attached=True)
    try:
        await asyncio.Event().wait()
    finally:
        changes.close()


class _Fleet:
    """The workers of this process: what the parent has launched, and what is at addresses."""

    def __init__(
        self,
        config: Config,
        parts: Sequence[ModelPart],
        launch: ChildLaunch,
        registry: Registry,
        members: Members,
        discovery: Discovery,
        tools: BackendDependencies,
    ) -> None:
        self.models, self.launched, self.held = config.models, launch.workers, launch.held
        self._cells = config.cells
        self._parts, self._registry, self._members, self._discovery, self._tools = (
            parts,
            registry,
            members,
            discovery,
            tools,
        )
        self._link_key = link_key_of(launch.hash_key)

    async def apply(self) -> None:
        """Let them be there, and no others.

        Raises:
            ConfigError: a source of workers lacks something.
        """
        await self._members.out_of_service({WorkerId(name): each for name, each in self.held.items()})
        for model, part in zip(self.models, self._parts, strict=True):
            await self._members.apply(f"models.{part.served.name}", self._wanted(model, part))
        for worker in self.launched:
            self._report(worker)
        for model, part in zip(self.models, self._parts, strict=True):
            await self._discovery.apply(model, part.served.tokenizer, self._tools)

    def _report(self, reported: WorkerAt) -> None:
        """The parent's view of the process: this one only sees that its connection is lost."""
        worker = self._registry.get(WorkerId(reported.id))
        if worker is not None and isinstance(worker.backend, EngineBackend):
            notes = [Note(note.text, note.at_ns) for note in reported.notes]
            worker.backend.report_from_parent(
                stage=reported.stage,
                notes=notes,
                restarts=reported.restarts,
                is_down=reported.is_down,
                faults=reported.faults,
            )

    def _wanted(self, model: ModelConfig, part: ModelPart) -> list[DesiredWorker]:
        name, tokenizer = part.served.name, part.served.tokenizer
        found: list[DesiredWorker] = [
            Attached(
                id=WorkerId(worker.id),
                route=name,
                config=WorkerConfig(url=worker.address, engine="penstock"),
                tokenizer=tokenizer,
                tools=self._tools,
                shares_key=True,
                link_key=b"" if worker.address.startswith("unix:") else self._link_key,
            )
            for worker in self.launched
            if worker.route == name
        ]
        found += attached(model, tokenizer, self._tools)
        return [*found, *peer_cells(self._cells, name, tokenizer, self._tools.clock)]


class _Parent:
    """Standard input after the launch: a line whenever the configuration or the launched workers change; its
    end is the parent's.
    """

    def __init__(self, gateway: Gateway, fleet: _Fleet, stop: _Stop, log: Log) -> None:
        self.is_gone = False
        self._gateway, self._fleet, self._stop, self._log = gateway, fleet, stop, log
        self._rest = b""
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def on_readable(self) -> None:
        data = os.read(STDIN, 1 << 16)
        if not data or len(self._rest) > LAUNCH_BYTES_MAX:
            asyncio.get_running_loop().remove_reader(STDIN)
            self.is_gone = True
            self._stop.asked.set()
            return
        self.feed(data)

    def feed(self, data: bytes) -> None:
        """More of what the parent wrote."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            changes = msgspec.json.decode(line, type=ChildReport)
            if changes.stop is not None:
                self._stop.take(changes.stop)
                continue
            task = asyncio.create_task(self._take(changes))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take(self, changes: ChildReport) -> None:
        async with self._one_at_a_time:
            if changes.config:
                config = msgspec.json.decode(changes.config, type=Config)
                if await self._gateway.tenancy.reload(config):
                    self._fleet.models = with_members(self._fleet.models, config.models)
            if changes.workers is not None:
                self._fleet.launched = changes.workers
            if changes.held is not None:
                self._fleet.held = changes.held
            if changes.adapters is not None:
                self._gateway.adopt_adapters(changes.adapters)
            if changes.rollouts is not None:
                self._gateway.adopt_rollouts(changes.rollouts)
            if changes.to_come is not None:
                self._gateway.expect(changes.to_come)
            try:
                await self._fleet.apply()
            except ConfigError as error:
                self._log.error("not all workers of the new configuration can be had", error=error)


def read_launch(stdin: int) -> tuple[ChildLaunch, bytes]:
    """The first line that the parent writes, and what was read behind it: reports may follow at once."""
    found = bytearray()
    while b"\n" not in found[-(1 << 16) :]:
        piece = os.read(stdin, 1 << 16)
        if not piece or len(found) > LAUNCH_BYTES_MAX:
            sys.exit(EXIT_ORPHANED)
        found += piece
    line, _, behind = bytes(found).partition(b"\n")
    return msgspec.json.decode(line, type=ChildLaunch), behind


if __name__ == "__main__":
    sys.exit(main())

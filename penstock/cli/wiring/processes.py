"""Several gateway processes on one port, supervised by the process that supervises the workers.

             ┌─> gateway process 0 ─┐
    clients ─┤        ...           ├─> each model's worker
             └─> gateway process N ─┘
       parent: the listening socket, the workers, restarts, the sum of all numbers

All processes accept from one listening socket, made by the parent: an idle process takes the next connection,
and what is queued when a process dies is taken by another. With a socket of its own for each (SO_REUSEPORT)
the kernel deals connections out by a hash of their addresses, even to busy processes, and those in a dead
process's queue are reset.
"""

import asyncio
import contextlib
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.clock import Clock, sleep
from penstock.config.checkpoints import served_name
from penstock.config.tree import Config
from penstock.errors import ClientError, OperatorError, PenstockError
from penstock.fleet.launchers.supervised import BACKOFF_MAX_S, RestartBudget
from penstock.fleet.leadership import Leadership
from penstock.fleet.rollouts import RolloutLeader, RolloutOrder, rollouts_file
from penstock.fleet.scale_report import ScaleAsk
from penstock.fleet.scaling import ScaleLeader
from penstock.fleet.sleep import Sleeper
from penstock.gateway.api.services import RecentRequests
from penstock.gateway.identity.tenancy import Tenancy
from penstock.gateway.shared.keeper import LeaseServer
from penstock.policy.rollout.dealing import ActiveRollout
from penstock.policy.rollout.evidence import Observation
from penstock.protocol.peers import (
    EXIT_CANNOT_SERVE,
    AdapterOrder,
    Ask,
    ChildLaunch,
    ChildReport,
    Done,
    EndedRequests,
    Happened,
    LatestRequests,
    LookAt,
    ModelNumbers,
    ObservedRequests,
    Order,
    RolloutAnswer,
    RolloutAsk,
    ScaleQuestion,
    ServedTokens,
    SleepAnswer,
    SleepOrder,
    Snapshot,
    StopOrder,
    Sum,
    View,
    WorkerAt,
    decode_to_parent,
    frame,
)
from penstock.protocol.worker import FrameDecoder, ProtocolError
from penstock.rng import IdSource
from penstock.telemetry.audit import AuditEvent, Notes
from penstock.telemetry.counts import decode_rows
from penstock.telemetry.log import Log
from penstock.telemetry.pages import lasting, merged
from penstock.telemetry.watch import Tail, Watch, no_tail

COMMAND = (sys.executable, "-m", "penstock.cli.wiring.gateway_process")
RESTARTS_MAX = 10
"""Restarts of one gateway process within ten minutes that come quickly; later ones wait `BACKOFF_MAX_S`."""
START_TIMEOUT_S = 60.0
SPARE_S = 5.0
"""The time that a process may take beyond its drain timeout before it is killed."""
READ_BYTES = 1 << 16
UNREAD_BYTES_MAX = 1 << 20
ADAPTERS_MAX = 2048
"""Of each model, adapters that operators have loaded or unloaded; of more what was unloaded is forgotten."""
HELD_MAX = 4096
"""Workers that are remembered to be out of service by hand; of more the oldest come back."""


class ProcessStats:
    """The last snapshot of every process, and the counters of those that have ended."""

    def __init__(self) -> None:
        self._last: dict[object, Snapshot] = {}
        self._gone = b""
        self.own: Callable[[], bytes] = bytes
        """The page of what this process counts itself."""

    def __len__(self) -> int:
        return len(self._last)

    @property
    def streams(self) -> int:
        """Answers being generated in all processes."""
        return sum(each.streams for each in self._last.values())

    def record(self, who: object, snapshot: Snapshot) -> None:
        """A process told its numbers."""
        self._last[who] = snapshot

    def ended(self, who: object) -> None:
        """A process is gone. Its counters stay in the sum, or rates over it would jump."""
        if (last := self._last.pop(who, None)) is not None:
            self._gone = merged([self._gone, lasting(last.metrics)])

    def sum(self) -> Sum:
        """All of them together."""
        last = self._last.values()
        return Sum(
            metrics=merged([*(each.metrics for each in last), self._gone, self.own()]),
            connections=sum(each.connections for each in last),
            streams=self.streams,
            processes=len(last),
            models=self.models(),
            gone=tuple(sorted(set[str].intersection(*(set(each.gone) for each in last)))) if last else (),
        )

    def models(self) -> dict[str, ModelNumbers]:
        """Of each model, the numbers of all processes."""
        found: dict[str, ModelNumbers] = {}
        for snapshot in self._last.values():
            for name, each in snapshot.models.items():
                before = found.get(name, ModelNumbers(0, 0.0, 0))
                found[name] = ModelNumbers(
                    before.waiting + each.waiting,
                    before.ttft_sum_s + each.ttft_sum_s,
                    before.ttft_count + each.ttft_count,
                )
        return found


class GatewayProcesses:
    """`start` takes the sockets, `open` starts the processes, `stop` drains them, `kill` leaves nothing."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        log: Log,
        sleeper: Sleeper,
        *,
        scaler: ScaleLeader,
        hash_key: bytes,
        tail: Tail = no_tail,
        leadership: Leadership | None = None,
    ) -> None:
        """`hash_key` is what the launched workers name their KV blocks with; `tail` gives their last lines.

        Raises:
            ConfigError: the keys file cannot be read, or does not go with the tiers.
        """
        self._clock, self._log, self._hash_key = clock, log, hash_key
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-gateways-")  # Mode 0700.
        self._path = f"{self._directory.name}/parent.sock"
        self._stats, self._children = ProcessStats(), set[asyncio.StreamWriter]()
        self._watch = Watch(config, clock, log, lambda: self._stats.sum().metrics, tail)
        self._recent = RecentRequests(clock)
        self.notes = Notes(clock, self._watch.keep)
        """For the audit trail."""
        self._tenancy = Tenancy(config, clock=clock, log=log, notes=self.notes)
        self._leases = None
        if not config.shared.url:
            self._leases = LeaseServer(config.shared, Path(f"{self._directory.name}/leases.sock"), clock)
        names = [served_name(model) for model in config.models]
        self._rollouts = RolloutLeader(
            lambda: names, clock, log, self.notes, path=rollouts_file(config),
            publish=self._publish_rollouts, new_id=lambda: IdSource().take("rollout"),
            leadership=leadership,
        )  # fmt: skip
        self._scaler, self._to_come = scaler, dict[str, float]()
        scaler.notes, scaler.publish, scaler.waiting = self.notes, self._publish_to_come, self._waiting
        self._watch.history.on_rows = scaler.received if scaler else None
        self._stats.own = scaler.page
        self._listeners: list[socket.socket] = []
        self._workers: tuple[WorkerAt, ...] = ()
        self._held: dict[str, float] = {}
        self._adapters: dict[str, dict[str, str]] = {}
        self.on_order: Callable[[Order], Awaitable[None]] = _ignore_order
        """Called when one of the processes was ordered to take a worker out of service, or to bring it back,
        before the others get the order."""
        self.sleeper: Sleeper = sleeper
        self._sleep_orders: set[asyncio.Task[None]] = set()
        self._reported = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._running: dict[int, Process] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._stopping = self._is_patient = self._is_open = self._is_refused = False

    @property
    def num_streams(self) -> int:
        """Answers that are being generated now, as of a second ago."""
        return self._stats.streams

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that run."""
        return tuple(process.pid for process in self._running.values())

    @property
    def _config(self) -> Config:
        """The configuration in force."""
        return self._tenancy.config

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Take sockets that listen, and stay their owner's; connections wait until there is a process."""
        self._listeners = list(listeners)
        self._server = await asyncio.start_unix_server(self._hear, self._path)
        self._tenancy.start(follows_provider=False)  # Tokens are read where requests come.
        if self._leases is not None:
            await self._leases.start()
        await self._watch.start()
        await self._rollouts.start()

    async def open(self, workers: Sequence[WorkerAt], *, is_patient: bool = False) -> None:
        """Start every process in front of these workers; returns when all of them listen. Patient ones wait
        for the workers before that.

        Raises:
            OperatorError: one does not come up.
        """
        count = self._config.server.processes
        self._workers, self._is_patient = tuple(workers), is_patient
        self._supervisors = [asyncio.create_task(self._supervise(index)) for index in range(count)]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while len(self._stats) < count and not self._is_refused:
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            raise OperatorError(f"the gateway processes did not start within {START_TIMEOUT_S:g} s") from None
        if self._is_refused:
            raise OperatorError("the gateway processes cannot serve with this configuration")
        self._is_open = True

    async def reload(self, config: Config) -> bool:
        """Judge a new configuration as every process will, and hand what is taken to all of them and to those
        that come; False if it was refused.
        """
        if not await self._tenancy.reload(config):
            return False
        self._tell(ChildReport(config=msgspec.json.encode(self._config)))
        return True

    def take_workers(self, workers: Sequence[WorkerAt]) -> None:
        """The launched workers are others now, or somewhere else."""
        if self._workers != (workers := tuple(workers)):
            self._workers = workers
            self._tell(ChildReport(workers=workers))

    async def _order(self, order: Order) -> None:
        """Let all processes know which workers are out of service, those that are yet to come too."""
        self._held.pop(order.worker, None)
        if order.timeout_s is not None:
            self._held[order.worker] = order.timeout_s
            if len(self._held) > HELD_MAX:
                del self._held[next(iter(self._held))]
        await self.on_order(order)
        self._tell(ChildReport(held=self._held))

    def _order_adapter(self, order: AdapterOrder) -> None:
        """Let all processes know which adapters operators have loaded, those that are yet to come too."""
        known = self._adapters.setdefault(order.model, {})
        known.pop(order.name, None)
        known[order.name] = order.source
        if len(known) > ADAPTERS_MAX:
            gone = next((name for name, source in known.items() if not source), next(iter(known)))
            del known[gone]
        self._tell(ChildReport(adapters=self._adapters))

    def _publish_rollouts(self, active: Sequence[ActiveRollout]) -> None:
        self._tell(ChildReport(rollouts=msgspec.json.encode(active)))

    def _publish_to_come(self, to_come: Mapping[str, float]) -> None:
        self._to_come = dict(to_come)
        self._tell(ChildReport(to_come=self._to_come))

    def _waiting(self) -> dict[str, int]:
        return {name: numbers.waiting for name, numbers in self._stats.models().items()}

    async def _order_scale(self, asked: ScaleQuestion) -> RolloutAnswer:
        try:
            ask = msgspec.json.decode(asked.body, type=ScaleAsk)
            return RolloutAnswer(msgspec.json.encode(await self._scaler.ask(ask)))
        except ClientError as error:
            kind = type(error).__name__
            return RolloutAnswer(kind=kind, words=str(error), param=error.param, code=error.code)

    async def _order_rollout(self, asked: RolloutAsk) -> RolloutAnswer:
        try:
            order = msgspec.json.decode(asked.body, type=RolloutOrder)
            return RolloutAnswer(msgspec.json.encode(await self._rollouts.order(order)))
        except ClientError as error:
            kind = type(error).__name__
            return RolloutAnswer(kind=kind, words=str(error), param=error.param, code=error.code)

    def _tell(self, update: ChildReport) -> None:
        for process in self._running.values():
            if process.stdin is not None and not process.stdin.is_closing():  # It may just have died.
                process.stdin.write(msgspec.json.encode(update) + b"\n")

    async def stop(self, *, lameduck_s: float = 0.0, listens: bool = True) -> None:
        """Let every process stop as `Gateway.stop` says, all at the same time."""
        self._stopping = True
        self._watch.count_costs()
        self._tell(ChildReport(stop=StopOrder(lameduck_s, listens)))
        waits = [asyncio.ensure_future(process.wait()) for process in self._running.values()]
        if waits:
            await asyncio.wait(waits, timeout=lameduck_s + self._config.server.drain_timeout_s + SPARE_S)
        await self.kill()

    def hurry(self) -> None:
        """Stop waiting, in a `stop` that runs."""
        self._tell(ChildReport(stop=StopOrder(is_hurried=True)))

    async def kill(self) -> None:
        """End everything now. Idempotent."""
        self._stopping = True
        for process in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for task in self._supervisors:
            task.cancel()
        if self._supervisors:
            await asyncio.wait(self._supervisors)
        if self._server is not None:
            self._server.close()
        self._tenancy.stop()
        await self._rollouts.stop()
        await self._watch.stop()
        if self._leases is not None:
            await self._leases.close()
        self._directory.cleanup()

    async def _supervise(self, index: int) -> None:
        """Run one process again and again until everything stops."""
        budget = RestartBudget(RESTARTS_MAX, self._clock)
        while not self._stopping:
            process = await self._spawn(index)
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                del self._running[index]
            if self._stopping:
                return
            if code == EXIT_CANNOT_SERVE and not self._is_open:
                self._is_refused = True
                self._reported.set()
                return
            delay_s = budget.take() or BACKOFF_MAX_S
            self._log.error("a gateway process ended", index=index, code=code, restart_in_s=delay_s)
            self.notes.note("server", "a gateway process ended", str(index), why=f"exit code {code}")
            await sleep(delay_s)

    async def _spawn(self, index: int) -> Process:
        listeners = tuple(each.fileno() for each in self._listeners)
        # A session of its own, so that Ctrl-C in the terminal reaches only the parent, which drains.
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=PIPE, stdout=DEVNULL, pass_fds=listeners, start_new_session=True
        )
        # Only now, for what is reported from here on reaches the process.
        launch = ChildLaunch(
            index=index,
            config=msgspec.json.encode(self._config),
            listeners=listeners,
            workers=self._workers,
            parent=self._path,
            leases=str(self._leases.path) if self._leases is not None else "",
            hash_key=self._hash_key,
            held=self._held,
            adapters=self._adapters,
            rollouts=msgspec.json.encode(self._rollouts.active()),
            to_come=self._to_come,
            is_patient=self._is_patient,
        )
        assert process.stdin is not None
        # It stays open: its end tells the process that we are gone.
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self._running[index] = process
        return process

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One process's connection."""
        decoder = FrameDecoder()
        self._children.add(writer)
        try:
            while data := await reader.read(READ_BYTES):
                for body in decoder.feed(data):
                    message = decode_to_parent(body)
                    if isinstance(message, Ask):
                        writer.write(frame(self._stats.sum()))
                    elif isinstance(message, Order):
                        await self._order(message)
                        writer.write(frame(Done()))
                    elif isinstance(message, AdapterOrder):
                        self._order_adapter(message)
                        writer.write(frame(Done()))
                    elif isinstance(message, SleepOrder):
                        self._begin_sleep_order(message, writer)
                    elif isinstance(message, ServedTokens):
                        self._pass_on(message, writer)
                    elif isinstance(message, EndedRequests):
                        self._watch.history.add(decode_rows(message.body))
                    elif isinstance(message, Happened):
                        self._watch.keep(msgspec.json.decode(message.body, type=AuditEvent))
                    elif isinstance(message, LatestRequests):
                        self._recent.merge(message.body)
                    elif isinstance(message, ObservedRequests):
                        self._rollouts.take(msgspec.msgpack.decode(message.body, type=list[Observation]))
                    elif isinstance(message, RolloutAsk):
                        writer.write(frame(await self._order_rollout(message)))
                    elif isinstance(message, ScaleQuestion):
                        writer.write(frame(await self._order_scale(message)))
                    elif isinstance(message, LookAt):
                        writer.write(frame(View(self._look(message))))
                    else:
                        self._stats.record(writer, message)
                        self._reported.set()
        except (ConnectionError, ProtocolError, msgspec.DecodeError) as error:
            self._log.warning("a gateway process cannot be heard any more", error=error)
        finally:
            self._children.discard(writer)
            self._stats.ended(writer)
            writer.close()

    def _begin_sleep_order(self, order: SleepOrder, writer: asyncio.StreamWriter) -> None:
        """It may take long: the process asks other things meanwhile."""
        task = asyncio.create_task(self._carry_out(order, writer), name=f"sleep order {order.model}")
        self._sleep_orders.add(task)
        task.add_done_callback(self._sleep_orders.discard)

    async def _carry_out(self, order: SleepOrder, writer: asyncio.StreamWriter) -> None:
        answer = SleepAnswer(order)
        try:
            await (self.sleeper.wake if order.wakes else self.sleeper.sleep)(order.model)
        except PenstockError as error:
            answer = SleepAnswer(order, type(error).__name__, str(error))
        if not writer.is_closing():
            writer.write(frame(answer))

    def _look(self, at: LookAt) -> bytes:
        return self._recent.encoded(at.before) if at.view == "requests" else self._watch.look(at)

    def _pass_on(self, served: ServedTokens, writer: asyncio.StreamWriter) -> None:
        """Tell the other processes; one that does not read for a while misses it."""
        for child in self._children - {writer}:
            if child.transport.get_write_buffer_size() < UNREAD_BYTES_MAX:
                child.write(frame(served))


async def _ignore_order(_: Order) -> None:
    """There are no workers to order."""

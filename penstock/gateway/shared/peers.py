"""This gateway process among others of one server: tells its numbers to the parent, asks it for the sum."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from penstock.clock import sleep
from penstock.errors import InvalidRequest, ModelBusy, NoMemory, NotFound, Overloaded, WorkerUnavailable
from penstock.policy.queueing.fair_counters import FairCounters, ServedUnits
from penstock.protocol.peers import (
    AdapterOrder,
    Ask,
    EndedRequests,
    Happened,
    LatestRequests,
    LookAt,
    ObservedRequests,
    Order,
    RolloutAnswer,
    RolloutAsk,
    ScaleQuestion,
    ServedTokens,
    SleepAnswer,
    SleepOrder,
    Snapshot,
    Sum,
    ToChild,
    View,
    decode_to_child,
    frame,
)
from penstock.protocol.worker import FrameDecoder
from penstock.telemetry.audit import AuditEvent
from penstock.telemetry.history import Recorder

TELL_S = 1.0
UNREAD_BYTES_MAX = 1 << 20
"""A parent that does not read for a while misses what tenants were served."""
ANSWER_TIMEOUT_S = 2.0
READ_BYTES = 1 << 16
_ERRORS = {kind.__name__: kind for kind in (ModelBusy, NoMemory, NotFound, WorkerUnavailable)}
"""The errors that a `Sleeper` raises."""
_REFUSALS = {kind.__name__: kind for kind in (InvalidRequest, NotFound)}
"""The errors that a `RolloutLeader` and a `ScaleLeader` raise."""


class GatewayPeers:
    """The link to the parent.

    `start` it once; the parent's end is this process's end, so it is never made again.
    """

    def __init__(self, path: str, leases: str = "", index: int = 0) -> None:
        """`path` is the parent's Unix socket; `leases` is that of its store of limits, if it has one; `index`
        is this process's.
        """
        self.index = index
        self.site, self.leases = path, leases
        """Names the server among all: the path is of a directory with a random name."""
        self._asked: deque[asyncio.Future[ToChild]] = deque()
        self._sleep_orders: dict[SleepOrder, asyncio.Future[SleepAnswer]] = {}
        """Of each model two at most."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self,
        snapshot: Callable[[], Snapshot],
        counters: FairCounters,
        recorder: Recorder,
        latest: Callable[[], bytes],
    ) -> None:
        """Connect, tell `snapshot()`, what `recorder` has and the `latest()` requests now and every second,
        and keep `counters` those of all processes.

        Raises:
            OSError: the parent does not listen.
        """
        self._snapshot, self._counters, self._recorder, self._latest = snapshot, counters, recorder, latest
        reader, self._writer = await asyncio.open_unix_connection(self.site)
        tasks = (self._tell(), self._read(reader))
        self._tasks = [asyncio.create_task(each) for each in tasks]

    def tell(self, served: tuple[ServedUnits, ...]) -> None:
        """Let the other processes of this server count what tenants were served here; see `FairLink`."""
        if self._writer.transport.get_write_buffer_size() < UNREAD_BYTES_MAX:
            self._writer.write(frame(ServedTokens(served)))

    def keep(self, event: AuditEvent) -> None:
        """Let the parent keep what happened here."""
        self._writer.write(frame(Happened(msgspec.json.encode(event))))

    async def sum(self) -> Sum:
        """The numbers of all processes; of this one alone if the parent does not answer."""
        own = self._snapshot()
        try:
            answer = await self._answer(frame(own) + frame(Ask()))
        except TimeoutError:
            answer = None
        if isinstance(answer, Sum):
            return answer
        return Sum(
            metrics=own.metrics,
            connections=own.connections,
            streams=own.streams,
            processes=1,
            models=own.models,
            gone=own.gone,
        )

    async def look(self, at: LookAt) -> bytes:
        """A view of what the parent remembers, as JSON.

        Raises:
            Overloaded: the parent does not answer.
        """
        try:
            answer = await self._answer(self._ended() + frame(at))
        except TimeoutError:
            message = "The server's parent process did not answer in time; try again."
            raise Overloaded(message, retry_after_s=ANSWER_TIMEOUT_S) from None
        assert isinstance(answer, View), answer
        return answer.body

    async def order(self, order: Order | AdapterOrder) -> None:
        """Let every process take a worker out of service, or bring it back; or have an adapter, or no more.

        Raises:
            Overloaded: the parent does not answer.
        """
        try:
            await self._answer(frame(order))
        except TimeoutError:
            message = "The other gateway processes could not be told in time; try again."
            raise Overloaded(message, retry_after_s=ANSWER_TIMEOUT_S) from None

    def observed(self, body: bytes) -> None:
        """Let the parent count requests of rollouts; of one that does not read for a while some are lost."""
        if self._writer.transport.get_write_buffer_size() < UNREAD_BYTES_MAX:
            self._writer.write(frame(ObservedRequests(body)))

    async def rollout(self, order: bytes) -> bytes:
        """Have the parent carry out an order about rollouts, and say how they are then. Raises as `scale`."""
        return await self._decided(RolloutAsk(order))

    async def scale(self, ask: bytes) -> bytes:
        """Have the parent carry out an order about the number of workers, and say how many there are then.

        Raises:
            ClientError: it is refused; the message says why.
            Overloaded: the parent does not answer.
        """
        return await self._decided(ScaleQuestion(ask))

    async def _decided(self, question: RolloutAsk | ScaleQuestion) -> bytes:
        try:
            answer = await self._answer(frame(question))
        except TimeoutError:
            message = "The server's parent process did not answer in time; try again."
            raise Overloaded(message, retry_after_s=ANSWER_TIMEOUT_S) from None
        assert isinstance(answer, RolloutAnswer), answer
        if answer.kind:
            kind = _REFUSALS.get(answer.kind, InvalidRequest)
            raise kind(answer.words, param=answer.param, code=answer.code)
        return answer.body

    async def sleep(self, route: str) -> None:
        """See `fleet.sleep.Sleeper`: the parent has launched the workers."""
        await self._ask_parent(SleepOrder(route, wakes=False))

    async def wake(self, route: str) -> None:
        """See `fleet.sleep.Sleeper`."""
        await self._ask_parent(SleepOrder(route, wakes=True))

    async def _ask_parent(self, order: SleepOrder) -> None:
        """Wait for what comes of it; several may wait for the same."""
        waiter = self._sleep_orders.get(order)
        if waiter is None:
            waiter = self._sleep_orders[order] = asyncio.get_running_loop().create_future()
            self._writer.write(frame(order))
        answer = await asyncio.shield(waiter)
        if answer.kind:
            raise _ERRORS.get(answer.kind, WorkerUnavailable)(answer.words)

    async def _answer(self, question: bytes) -> ToChild:
        """The parent answers in order.

        Raises:
            TimeoutError: not in time.
        """
        answer: asyncio.Future[ToChild] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._writer.write(question)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer

    def close(self) -> None:
        """Leave."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._writer.write(self._ended() + frame(self._snapshot()))
            self._writer.close()

    async def _tell(self) -> None:
        while True:
            self._writer.write(self._ended() + frame(self._snapshot()))
            await self._writer.drain()
            await sleep(TELL_S)

    def _ended(self) -> bytes:
        book = self._recorder.take()
        if not book:
            return b""
        return frame(EndedRequests(book.encode())) + frame(LatestRequests(self._latest()))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        while data := await reader.read(READ_BYTES):
            for body in decoder.feed(data):
                message = decode_to_child(body)
                if isinstance(message, ServedTokens):
                    self._counters.heed(message.units)
                    continue
                if isinstance(message, SleepAnswer):
                    if (waiter := self._sleep_orders.pop(message.order, None)) is not None:
                        waiter.set_result(message)
                    continue
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_result(message)

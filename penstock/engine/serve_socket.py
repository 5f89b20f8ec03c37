"""The worker's socket, in a thread of its own: frames in, mail out; step outputs in, frames out.

It owns connections, which request belongs to which, and the bounds on both; it knows nothing about
models or steps. While a step computes, this thread decodes and encodes concurrently. Everything below the
line runs on its event loop; the methods above are for the step thread and cost it one wake-up each.
"""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import uvloop

from penstock.clock import Clock
from penstock.engine.mailbox import (
    FLUSH_TIMEOUT_S,
    PROOF_TIMEOUT_S,
    STATS_INTERVAL_S,
    UNPROVEN_MAX,
    UNPROVEN_PER_ADDRESS_MAX,
    Aborted,
    ConnectionId,
    DrainAsked,
    KVEventsAsked,
    Mailbox,
    Ordered,
    ServerLimits,
    Submitted,
    failed_by,
)
from penstock.errors import EngineFault, InvalidRequest, Overloaded, PenstockError, WorkerUnavailable
from penstock.protocol.address import NONCE_BYTES, Address, Doorkeeper, UnixAddress
from penstock.protocol.cells import CellPing, OpenCell
from penstock.protocol.worker import (
    AbortRequest,
    Condition,
    Drain,
    Fault,
    FromWorker,
    KVEvents,
    Loading,
    Output,
    Ping,
    Pong,
    Proof,
    ProtocolError,
    Ready,
    RequestFinished,
    Stats,
    StepOutput,
    Submit,
    SubscribeKVEvents,
    ToWorker,
    Welcome,
    encode,
)
from penstock.protocol.worker_parts import DeviceReadings, StaysAwake, WorkerAdapters
from penstock.rng import fresh_key
from penstock.types import FinishReason, RequestId, Usage

if TYPE_CHECKING:
    from penstock.engine.grammar.compiler import CompiledGrammar, GrammarCompiler

_PONG = encode(Pong())

_log = logging.getLogger(__name__)


class WorkerServer:
    """Serves one worker's address to any number of gateways."""

    def __init__(
        self,
        address: Address,
        mailbox: Mailbox,
        limits: ServerLimits,
        clock: Clock,
        *,
        shares_port: bool = False,
    ) -> None:
        """`shares_port`: another process reserves the port for us and does not listen on it."""
        self.address, self.mailbox, self.limits, self.clock = address, mailbox, limits, clock
        self.num_requests = 0
        self.grammars: GrammarCompiler | None = None
        self._unproven: dict[ConnectionId, _Connection] = {}
        self._shares_port = shares_port
        self._state: Condition = Loading("starting")
        self._stats: Stats | None = None
        self._readings: DeviceReadings | None = None
        self._adapters = WorkerAdapters()
        self._stats_timer: asyncio.TimerHandle | None = None
        self._stats_sent_s = -STATS_INTERVAL_S
        self._connections: dict[ConnectionId, _Connection] = {}
        self._next_id: ConnectionId = 0
        self._loop = uvloop.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="worker-socket", daemon=True)
        self._bound: Future[None] = Future()

    def start(self) -> None:
        """Listen, and return once gateways can connect.

        Raises:
            OSError: the address cannot be bound.
        """
        self._thread.start()
        self._bound.result()

    def announce(self, state: Condition) -> None:
        """Tell every gateway, now and whenever one connects, how far the worker is."""
        self._loop.call_soon_threadsafe(self._announce, state)

    def publish_adapters(self, adapters: WorkerAdapters) -> None:
        """Tell every gateway, now and whenever one connects, which adapters there are."""
        self._loop.call_soon_threadsafe(self._publish_adapters, adapters)

    def stop_taking(self, state: Condition) -> int:
        """Announce `state` if there are no requests, so that none comes any more; how many there are."""
        return asyncio.run_coroutine_threadsafe(self._stop_taking(state), self._loop).result()

    def report(self, message: Fault | StaysAwake) -> None:
        """Tell every gateway of it, once."""
        self._loop.call_soon_threadsafe(self._send_to_all, message)

    def use_grammars(self, compiler: "GrammarCompiler") -> None:
        """Compile the grammars that requests bring. Before the worker is ready."""
        self.grammars = compiler

    def publish(self, step: int, outputs: Mapping[ConnectionId, list[Output]], stats: Stats | None) -> None:
        """Send one step's outputs: one frame and one write for each connection. And the figures, if they are
        given, as soon as the last ones are `STATS_INTERVAL_S` old.
        """
        self._loop.call_soon_threadsafe(self._publish, step, outputs, stats)

    def publish_readings(self, readings: DeviceReadings) -> None:
        """Send what the device says of itself, with the latest figures."""
        self._loop.call_soon_threadsafe(self._publish_readings, readings)

    def publish_kv_events(self, events: KVEvents) -> None:
        """Send one batch to the subscribers."""
        self._loop.call_soon_threadsafe(self._publish_kv_events, events)

    def start_kv_events(self, connection_id: ConnectionId, events: Sequence[KVEvents]) -> None:
        """Send a new subscriber what it missed; from now on it gets what is published."""
        self._loop.call_soon_threadsafe(self._start_kv_events, connection_id, events)

    def close(self) -> None:
        """Send what is unsent, close every connection, stop listening and end the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(FLUSH_TIMEOUT_S + 1.0)

    # --- on the event loop ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.set_exception_handler(_die_of_bugs)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        try:
            listener = await self._listen()
        except OSError as error:
            self._bound.set_exception(error)
            return
        self._bound.set_result(None)
        await self._closing.wait()
        listener.close()
        self._send_stats()
        for connection in list(self._connections.values()):
            connection.close()
        if flushing := [connection.lost for connection in self._connections.values()]:
            await asyncio.wait(flushing, timeout=FLUSH_TIMEOUT_S)
        self._remove_socket_file()

    async def _listen(self) -> asyncio.AbstractServer:
        if isinstance(self.address, UnixAddress):
            self._remove_socket_file()
            return await self._loop.create_unix_server(self._connect, self.address.path)
        return await self._loop.create_server(
            self._connect, self.address.host, self.address.port, reuse_port=self._shares_port
        )

    def _remove_socket_file(self) -> None:
        if isinstance(self.address, UnixAddress):
            Path(self.address.path).unlink(missing_ok=True)

    def _connect(self) -> "_Connection":
        self._next_id += 1
        return _Connection(self, self._next_id)

    def _announce(self, state: Condition) -> None:
        self._state = state
        self._send_to_all(state)

    async def _stop_taking(self, state: Condition) -> int:
        if not self.num_requests:
            self._announce(state)
        return self.num_requests

    def _publish(self, step: int, outputs: Mapping[ConnectionId, list[Output]], stats: Stats | None) -> None:
        for connection_id, found in outputs.items():
            if connection := self._connections.get(connection_id):
                connection.send_outputs(step, found)
        if stats is None:
            return
        readings = self._readings
        self._stats = stats if readings is None else msgspec.structs.replace(stats, readings=readings)
        if self._stats_timer is None:
            due_s = max(0.0, self._stats_sent_s + STATS_INTERVAL_S - self._loop.time())
            self._stats_timer = self._loop.call_later(due_s, self._send_stats)

    def _publish_adapters(self, adapters: WorkerAdapters) -> None:
        self._adapters = adapters
        self._send_to_all(adapters)

    def _publish_readings(self, readings: DeviceReadings) -> None:
        self._readings = readings
        if self._stats is not None:
            self._stats = msgspec.structs.replace(self._stats, readings=readings)
            self._send_to_all(self._stats)

    def _publish_kv_events(self, events: KVEvents) -> None:
        if subscribers := [each for each in self._connections.values() if each.hears_kv_events]:
            frame = encode(events)
            for connection in subscribers:
                connection.send(frame)

    def _start_kv_events(self, connection_id: ConnectionId, events: Sequence[KVEvents]) -> None:
        if connection := self._connections.get(connection_id):
            connection.hears_kv_events = True
            for each in events:
                connection.send(encode(each))

    def _send_stats(self) -> None:
        """Send the latest figures. The next ones arm the timer again: an idle worker never wakes."""
        self._stats_timer, self._stats_sent_s = None, self._loop.time()
        if self._stats is not None:
            self._send_to_all(self._stats)

    def _send_to_all(self, message: FromWorker) -> None:
        frame = encode(message)
        for connection in list(self._connections.values()):
            connection.send(frame)

    # --- for connections -----------------------------------------------------------------------------

    def joined(self, connection: "_Connection") -> None:
        """A gateway connected: tell it the current state first."""
        self._connections[connection.id] = connection
        connection.send(encode(self._state))
        if self._adapters.adapters:
            connection.send(encode(self._adapters))
        if self._stats is not None:
            connection.send(encode(self._stats))

    def knocks(self, connection: "_Connection") -> None:
        """A connection is here that must prove itself; if there are too many of those, another one is cut for
        it.
        """
        self._unproven[connection.id] = connection
        addresses = Counter(each.peer for each in self._unproven.values())
        crowded = connection.peer
        if addresses[crowded] <= UNPROVEN_PER_ADDRESS_MAX:
            if len(self._unproven) <= UNPROVEN_MAX:
                return
            ((crowded, _),) = addresses.most_common(1)
        oldest = next(each for each in self._unproven.values() if each.peer == crowded)
        del self._unproven[oldest.id]
        oldest.cut()

    def proved(self, connection: "_Connection") -> None:
        """It has the key, or is gone."""
        self._unproven.pop(connection.id, None)

    def left(self, connection: "_Connection") -> None:
        """A connection is gone: abort its requests."""
        if self._connections.pop(connection.id, None) is None:
            return  # It never proved who it is.
        if connection.living:
            self.mailbox.post(Aborted(connection.id, tuple(connection.living)))
            self.num_requests -= len(connection.living)

    def refusal(self) -> PenstockError | None:
        """Why no request can be let in now."""
        if not isinstance(self._state, Ready):
            return WorkerUnavailable("the worker is not ready")
        if self.num_requests >= self.limits.requests_max:
            return Overloaded(f"the engine already holds {self.num_requests} requests")
        return None


class _Connection(asyncio.Protocol):
    """One gateway. `living` are its requests without a finish so far, and whether their abort was posted."""

    def __init__(self, server: WorkerServer, connection_id: ConnectionId) -> None:
        self.id = connection_id
        self.living: dict[RequestId, bool] = {}
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.hears_kv_events = False
        self.peer = ""
        """The address at the other end; empty for a Unix socket."""
        self._asked_kv_events = False
        self._compiling: dict[RequestId, Submit] = {}
        """Requests whose grammars are not ready yet."""
        self._deadline: asyncio.TimerHandle | None = None
        self._server = server
        self._door = Doorkeeper(server.limits.key, fresh_key(NONCE_BYTES))
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses of it.
        if not self._server.limits.key:
            self._server.joined(self)
            return
        peer: tuple[object, ...] | str | None = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) and peer else ""  # A Unix socket has no address.
        self._server.knocks(self)
        self._deadline = asyncio.get_running_loop().call_later(PROOF_TIMEOUT_S, self._transport.abort)
        self._transport.write(self._door.challenge())

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop, for either side's reasons."""
        self._transport = None
        self._server.proved(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.left(self)
        compiling, self._compiling = self._compiling, {}
        for message in compiling.values():
            self._cancel(message)
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Called by the loop. A gateway that breaks the protocol loses its connection; others do not."""
        try:
            for message in self._door.messages(data):
                if isinstance(message, Welcome):
                    self._enter(message)
                else:
                    self._handle(message)
        except ProtocolError as error:
            _log.warning("gateway %d broke the protocol and was disconnected: %s", self.id, error)
            self.close()

    def close(self) -> None:
        """Close after what is already written."""
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, frame: bytes) -> None:
        """Write one frame, unless the gateway does not keep up: then drop it and its requests."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame)
        unsent = self._transport.get_write_buffer_size()
        if unsent > self._server.limits.buffer_bytes_max:
            _log.warning("gateway %d left %d bytes unread and was disconnected", self.id, unsent)
            self._transport.abort()

    def send_outputs(self, step: int, outputs: list[Output]) -> None:
        """Write one step's outputs as one frame."""
        for output in outputs:
            if output.finish is not None and output.request_id in self.living:
                del self.living[output.request_id]
                self._server.num_requests -= 1
        self.send(encode(StepOutput(step, tuple(outputs))))

    def _enter(self, welcome: Welcome) -> None:
        self._server.proved(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self.send(encode(welcome))
        self._server.joined(self)

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, AbortRequest):
            self._abort(message.request_ids)
        elif isinstance(message, Ping):
            self.send(_PONG)
        elif isinstance(message, SubscribeKVEvents):
            self._subscribe(message)
        elif isinstance(message, Drain):
            self._server.mailbox.post(DrainAsked())
        elif isinstance(message, OpenCell | CellPing):
            raise ProtocolError("this is a worker, and no cell")
        elif not isinstance(message, Proof):
            self._server.mailbox.post(Ordered(message))

    def _submit(self, message: Submit) -> None:
        if message.request_id in self.living:
            raise ProtocolError(f"request {message.request_id} was submitted twice")
        if (refusal := self._server.refusal()) is not None:
            ended = Output(message.request_id, (), None, failed_by(refusal))
            self.send(encode(StepOutput(0, (ended,))))
            return
        arrived_ns = self._server.clock.now_ns()
        self.living[message.request_id] = False
        self._server.num_requests += 1
        grammars, grammar = self._server.grammars, message.grammar
        if grammar is None or grammars is None:
            self._server.mailbox.post(Submitted(self.id, message, arrived_ns))
            return
        found = grammars.cached(message.cache_salt, grammar)
        if found is not None:
            self._take_grammar(message, arrived_ns, found)
            return
        self._compiling[message.request_id] = message
        compiling = grammars.compile(message.cache_salt, grammar)
        loop, done = asyncio.get_running_loop(), partial(self._compiled, message, arrived_ns)
        compiling.add_done_callback(lambda _: loop.call_soon_threadsafe(done, compiling))

    def _compiled(self, message: Submit, arrived_ns: int, compiling: "Future[CompiledGrammar]") -> None:
        """A request's grammar is compiled, or cannot be; the request may be gone by now."""
        if self._compiling.get(message.request_id) is not message:
            return
        del self._compiling[message.request_id]
        self._take_grammar(message, arrived_ns, compiling.exception() or compiling.result())

    def _take_grammar(
        self, message: Submit, arrived_ns: int, made: "CompiledGrammar | BaseException"
    ) -> None:
        """Pass a request on with its grammar; or end it, and only it, with why there is none."""
        if not isinstance(made, BaseException):
            assert message.grammar is not None, "it was compiled"
            bounded = made.bounded(message.grammar)
            self._server.mailbox.post(Submitted(self.id, message, arrived_ns, bounded))
            return
        if isinstance(made, WorkerUnavailable):
            _log.warning("request %s: %s", message.request_id, made)
        elif not isinstance(made, InvalidRequest):
            _log.error("request %s: compiling its grammar failed", message.request_id, exc_info=made)
            made = EngineFault("compiling the grammar failed")
        self._end(message.request_id, failed_by(made))

    def _cancel(self, message: Submit) -> None:
        """A request is gone whose grammar is being compiled."""
        assert self._server.grammars is not None, "something compiles it"
        assert message.grammar is not None, "something is compiled"
        self._server.grammars.cancel(message.cache_salt, message.grammar)

    def _abort(self, request_ids: tuple[RequestId, ...]) -> None:
        for request_id in request_ids:
            if (message := self._compiling.pop(request_id, None)) is not None:
                self._cancel(message)
                self._end(request_id, RequestFinished(reason=FinishReason.ABORT, usage=Usage()))
        if fresh := tuple(each for each in request_ids if self.living.get(each) is False):
            self.living.update(dict.fromkeys(fresh, True))
            self._server.mailbox.post(Aborted(self.id, fresh))

    def _subscribe(self, message: SubscribeKVEvents) -> None:
        if self._asked_kv_events:
            raise ProtocolError("KV events were subscribed to twice")
        self._asked_kv_events = True
        self._server.mailbox.post(KVEventsAsked(self.id, message.epoch, message.from_sequence))

    def _end(self, request_id: RequestId, finish: RequestFinished) -> None:
        """A request that was accepted ends before it reached the engine."""
        self.send_outputs(0, [Output(request_id, (), None, finish)])


def _die_of_bugs(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """A bug in a callback would leave requests without an end: a dead worker is noticed, a mute one is
    not.
    """
    loop.default_exception_handler(context)
    if not isinstance(context.get("exception"), OSError):
        os._exit(1)

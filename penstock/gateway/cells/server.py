"""Where peer cells connect: this gateway as one worker of each of its models (protocol/cells.py).

    accept ─> Challenge ─> Proof ─> Welcome ─> OpenCell ─> Ready | Loading, on every change
                                                 Submit ─> queue, placement, worker ─> outputs, one finish
                                                 CellPing ─> CellReport and Stats

What a peer's connection has brought ends with it. Outputs of one turn of the event loop leave in one write.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.cells import CellsConfig
from penstock.config.tree import Config
from penstock.errors import ConfigError, Overloaded, PenstockError, WorkerUnavailable
from penstock.fleet.cells import cell_key
from penstock.fleet.registry import Registry, Worker
from penstock.gateway.api.services import Services
from penstock.gateway.cells.guests import Arrival, GuestReply, exchange_of, failed, refuse
from penstock.gateway.http.exchange import Ending, Exchange
from penstock.gateway.http.terms import RelayTerms, WireLimits
from penstock.gateway.models.served import ServedModel
from penstock.gateway.relay.reply import Context
from penstock.protocol.address import (
    NONCE_BYTES,
    Doorkeeper,
    TcpAddress,
    parse_address,
)
from penstock.protocol.cells import CellPing, CellReport, OpenCell
from penstock.protocol.stream import StreamHead
from penstock.protocol.worker import (
    AbortRequest,
    Loading,
    Output,
    Ping,
    Pong,
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
from penstock.rng import fresh_key
from penstock.text.tokenizer import tokenizer_mark
from penstock.types import PLACE, FinishReason, RequestId, Usage, places_of

PROOF_TIMEOUT_S = 5.0
"""A connection without a proof is cut after so long (`Doorkeeper` has a bound in bytes),"""
UNPROVEN_MAX = 64
"""and one more than so many at once is not taken."""
CONNECTIONS_MAX = 4096
BUFFER_BYTES_MAX = 64 * 1024 * 1024
"""Unsent bytes for one connection; over it the connection is dropped."""
_PONG = encode(Pong())


@dataclass(slots=True, frozen=True, kw_only=True)
class CellTools:
    """The parts that a cell's listener is given."""

    services: Services
    registry: Registry
    terms: RelayTerms
    on_finished: Callable[[Exchange], None]
    """Counts and logs a guest that is over, as any request."""


class CellServer:
    """One for a gateway process; several of a server share the port."""

    def __init__(self, config: CellsConfig, key: bytes, tools: CellTools) -> None:
        assert config.own is not None, "there is a cell to serve"
        self.config, self.key, self.tools = config, key, tools
        self.here, self.address = config.here, parse_address(config.own.url)
        self.bands = tuple(band.name for band in tools.services.config.queue.bands)
        self.num_unproven = 0
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._is_due = False
        tools.registry.listen(self._changed)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: its address cannot be listened on.
        """
        assert isinstance(self.address, TcpAddress), "cells are reached over TCP"
        host, port = self.address.host, self.address.port
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self), host, port, reuse_port=hasattr(socket, "SO_REUSEPORT")
            )
        except OSError as error:
            raise ConfigError(
                f"cells.all: this cell cannot listen on {self.address}: {error.strerror or error}"
            ) from error

    def refresh(self) -> None:
        """Whether requests are taken may have changed: tell the peers."""
        for connection in self._connections:
            connection.announce()

    async def stop(self) -> None:
        """Listen no more, and end what is left of peers' connections."""
        self.tools.registry.unlisten(self._changed)
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    @property
    def guests(self) -> dict[str, int]:
        """Requests of each peer that are here now."""
        found: dict[str, int] = {}
        for connection in self._connections:
            found[connection.cell] = found.get(connection.cell, 0) + connection.num_guests
        return found

    # --- for connections -----------------------------------------------------------------------------

    @property
    def has_space(self) -> bool:
        """Whether one more connection is taken."""
        return self.num_unproven < UNPROVEN_MAX and len(self._connections) < CONNECTIONS_MAX

    def joined(self, connection: "_Connection") -> None:
        """It has shown the key."""
        self._connections.add(connection)

    def left(self, connection: "_Connection") -> None:
        """It is gone."""
        self._connections.discard(connection)

    def _changed(self, worker: Worker) -> None:
        """A worker has changed. Told once for all that this turn of the loop brings."""
        if worker.cell is None and not self._is_due and self._connections:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        self.refresh()


class _Connection(asyncio.Protocol):
    """One gateway process of a peer, about one model."""

    def __init__(self, server: CellServer) -> None:
        self.cell = ""
        self._server, self._services = server, server.tools.services
        self._model: ServedModel | None = None
        self._said: Ready | Loading | None = None
        self._living: dict[RequestId, GuestReply] = {}
        self._outputs: list[Output] = []
        self._door = Doorkeeper(server.key, fresh_key(NONCE_BYTES))
        self._deadline: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def num_guests(self) -> int:
        """Requests that it has brought and that have not ended."""
        return len(self._living)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses of it.
        if not self._server.has_space:
            self._transport.abort()
            return
        self._server.num_unproven += 1
        self._deadline = asyncio.get_running_loop().call_later(PROOF_TIMEOUT_S, self._transport.abort)
        self._transport.write(self._door.challenge())

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop: what it brought has no reader any more."""
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._server.num_unproven -= not self._door.is_proven
        self._server.left(self)
        living, self._living = self._living, {}
        for reply in living.values():
            reply.exchange.disconnected()

    def data_received(self, data: bytes) -> None:
        """Called by the loop. A peer that breaks the protocol loses its connection; others do not."""
        try:
            for message in self._door.messages(data):
                if isinstance(message, Welcome):
                    self._enter(message)
                else:
                    self._handle(message)
        except ProtocolError as error:
            self._services.log.warning("a peer cell was disconnected", cell=self.cell, why=str(error))
            self.close()

    def close(self) -> None:
        """Close after what is already written."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def announce(self) -> None:
        """Say whether requests are taken, if that has changed."""
        if self._model is None:
            return
        now = self._condition(self._model)
        if now != self._said:
            self._said = now
            self._send(encode(now))
        if not isinstance(now, Ready) and not self._services.leaving:
            for reply in list(self._living.values()):
                reply.hand_back(WorkerUnavailable(now.stage))

    # --- inside --------------------------------------------------------------------------------------

    def _enter(self, welcome: Welcome) -> None:
        self._server.num_unproven -= 1
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.joined(self)
        self._send(encode(welcome))

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, AbortRequest):
            for request_id in message.request_ids:
                self._abort(request_id)
        elif isinstance(message, Ping):
            self._send(_PONG)
        elif isinstance(message, CellPing):
            self._report(message)
        elif isinstance(message, OpenCell):
            self._open(message)
        elif not isinstance(message, SubscribeKVEvents):
            raise ProtocolError(f"{type(message).__name__} is for workers, and this is a cell")

    def _open(self, wanted: OpenCell) -> None:
        if self._model is not None or wanted.cell not in {each.name for each in self._server.config.peers}:
            raise ProtocolError(f"'{wanted.cell[:64]}' is no peer of this cell, or has a model here already")
        self.cell = wanted.cell
        model = next((each for each in self._services.models if each.name == wanted.model), None)
        if model is None:
            self._send(encode(Loading(f"the cell has no model '{wanted.model[:64]}'")))
        elif tokenizer_mark(model.tokenizer) != wanted.tokenizer:
            self._send(encode(Loading(f"the cell's '{model.name}' has another tokenizer")))
        else:
            self._model = model
            self.announce()

    def _workers(self, model: ServedModel) -> Iterator[Worker]:
        """Workers of this cell that take requests."""
        return (each for each in model.workers if each.cell is None and each.is_ready)

    def _condition(self, model: ServedModel) -> Ready | Loading:
        workers = list(self._workers(model))
        found = [each.backend.status for each in workers if each.backend.status.info is not None]
        infos = [each.info for each in found if each.info is not None]
        if not infos or self._services.leaving:
            return Loading("the cell goes away" if infos else "the cell has no worker that takes requests")
        identities = {info.identity for info in infos}
        able = frozenset[str]().union(*(each.capabilities or () for each in found))
        return Ready(
            msgspec.structs.replace(
                infos[0],
                model=model.name,
                # Of several nobody knows which one a request would get.
                identity=identities.pop() if len(identities) == 1 else "",
                max_model_len=min(info.max_model_len for info in infos),
                max_running=sum(info.max_running for info in infos),
                num_blocks=sum(info.num_blocks for info in infos),
                capabilities=frozenset(each for each in able if not each.startswith(PLACE)),
                adapter_slots=0,
            )
        )

    def _report(self, ping: CellPing) -> None:
        """Answer how this cell stands."""
        if self._model is None:
            self._send(encode(CellReport(sent_ns=ping.sent_ns)))
            return
        workers = list(self._workers(self._model))
        model_queue = self._services.dispatcher.control.model_queue(self._model.name)
        waiting = model_queue.queue.num_waiting if model_queue is not None else 0
        capacities = [
            worker
            for each in workers
            if model_queue is not None and (worker := model_queue.workers.get(each.id))
        ]
        reported = [each.backend.status.stats for each in workers]
        known = [stats for stats in reported if stats is not None]
        stats = Stats(
            step=0,
            running=sum(worker.booked + worker.others for worker in capacities),
            waiting=waiting,
            blocks_total=sum(each.blocks_total for each in known),
            blocks_used=sum(each.blocks_used for each in known),
            blocks_cached=0,
            rows_max=sum(each.rows_max for each in known),
        )
        wait_ns = waiting * model_queue.gap_ns if model_queue is not None else 0
        report = CellReport(sent_ns=ping.sent_ns, wait_ns=wait_ns, num_ready=len(workers))
        self._send(encode(report) + encode(stats))

    def _submit(self, submit: Submit) -> None:
        server, services, model, name = self._server, self._services, self._model, submit.request_id
        if name in self._living:
            raise ProtocolError(f"request {name} was submitted twice")
        now_ns = services.clock.now_ns()
        exchange = exchange_of(self.cell, name, server.tools.terms, now_ns, self._ended)
        try:
            if model is None or model.workers.info is None:
                raise WorkerUnavailable("the cell has no such model")
            services.check_draining()
            arrival = Arrival(submit, model.workers.info.vocab_size)
            keys = None
            if not submit.inputs and model.workers.has_choice:
                keys = services.locality.maker(model.name).keys(
                    arrival.tokens, salt=submit.cache_salt, public_tokens=submit.public_tokens,
                    adapter=submit.adapter,
                )  # fmt: skip
            facts = arrival.facts(self.cell, model.name, server.bands, places_of((server.here,)), keys)
            exchange.serve(arrival.served(model.name, facts.tenant))
            exchange.limits_ns = now_ns
            reply = GuestReply(self._context(exchange, model, name), name, self._tell)
            self._living[name] = reply
            if services.dispatcher.submit(facts, reply, [(arrival.request(), reply)], None) is not None:
                raise Overloaded("the cell cannot answer it now")
        except PenstockError as error:
            self._living.pop(name, None)
            refuse(exchange, error)
            self._tell(Output(name, (), finish=failed(error)))

    def _ended(self, exchange: Exchange) -> None:
        """Count it as one of this cell's guests, and as any request."""
        label = "abort" if exchange.ending is Ending.DISCONNECTED else exchange.outcome or "error"
        self._services.metrics.guest_ended(self.cell, str(label))
        self._server.tools.on_finished(exchange)

    def _context(self, exchange: Exchange, model: ServedModel, name: str) -> Context:
        services = self._services
        head = StreamHead(
            id=name,
            created=services.clock.wall_ns() // NS_PER_S,
            model=model.name,
            fingerprint="",
            include_usage=False,
        )
        listener = services.dispatcher
        return Context(
            exchange=exchange, clock=services.clock, listener=listener, head=head, ids=services.ids
        )

    def _abort(self, name: RequestId) -> None:
        reply = self._living.pop(name, None)
        if reply is None:
            return  # It has just ended.
        exchange = reply.exchange
        exchange.disconnected()
        usage: Usage = exchange.used()
        self._tell(Output(name, (), finish=RequestFinished(reason=FinishReason.ABORT, usage=usage)))

    def _tell(self, output: Output) -> None:
        """Send it at the end of this turn of the loop."""
        if output.finish is not None:
            self._living.pop(output.request_id, None)
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._send(encode(StepOutput(0, tuple(outputs))))

    def _send(self, frame: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            self._services.log.warning("a peer cell does not read and was disconnected", cell=self.cell)
            self._transport.abort()


class NoCells:
    """In the place of a `CellServer` where there are no cells."""

    async def start(self) -> None:
        """Nothing listens."""

    def refresh(self) -> None:
        """There is no peer."""

    async def stop(self) -> None:
        """Nothing was begun."""


def cells_of(
    config: Config,
    services: Services,
    registry: Registry,
    limits: WireLimits,
    on_finished: Callable[[Exchange], None],
) -> CellServer | NoCells:
    """The listener for peers, if this server is a cell; `on_finished` counts guests as any request.

    Raises:
        ConfigError: the key that cells share is not there.
    """
    if config.cells.own is None:
        return NoCells()
    terms = RelayTerms.of(config.server, limits)
    tools = CellTools(services=services, registry=registry, terms=terms, on_finished=on_finished)
    return CellServer(config.cells, cell_key(config.cells), tools)

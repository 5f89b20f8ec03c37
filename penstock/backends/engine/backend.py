"""Our own engine as a backend: many streams over one connection to its worker process.

Owns the connection (made again whenever it is lost), which stream gets which output, and the subscription to
the worker's KV events: which ones were heard, and what to ask for next. It neither starts nor restarts the
process: a launcher does (fleet/launchers), and says through `report` what the socket cannot tell.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from penstock.backends.base import (
    BackendStatus,
    GenerateRequest,
    Note,
    Phase,
    Sink,
    adapters_of,
    end_streams,
    nothing,
)
from penstock.backends.engine.link import (
    Handshake,
    KVEventListener,
    KVSubscription,
    LinkRefused,
    WorkerKey,
    WorkerLink,
)
from penstock.backends.engine.stream import EngineStream
from penstock.backends.silence import HeartbeatTerms
from penstock.clock import Clock, sleep
from penstock.errors import WeightsDamaged, WorkerUnavailable
from penstock.kv.hashing import token_bytes
from penstock.protocol.address import Address
from penstock.protocol.cells import CellReport
from penstock.protocol.needs import NO_CONSTRAINT
from penstock.protocol.worker import (
    PROTOCOL_VERSION,
    WARMING_UP,
    AbortRequest,
    Asleep,
    Challenge,
    Condition,
    Drain,
    Fault,
    FaultCount,
    FromWorker,
    KVEvents,
    Loading,
    Stats,
    StepOutput,
    Submit,
    Welcome,
    WorkerFailed,
)
from penstock.protocol.worker_parts import (
    KeepAdapters,
    LoadAdapter,
    Sleep,
    StaysAwake,
    UnloadAdapter,
    Wake,
    WorkerAdapters,
)
from penstock.text.tokenizer import Tokenizer
from penstock.types import RequestId

RECONNECT_MIN_S = 0.01
RECONNECT_MAX_S = 0.5
RECONNECT_GROWTH = 1.2
"""A worker that loads is found a sixth of its time late at most, where doubling would be as long as it
took."""
CLOSE_TIMEOUT_S = 1.0
"""How long a worker may take to read the last frames."""
NOTES_MAX = 20
"""Lines kept in `BackendStatus.notes`; older ones go first."""

_NO_FAULT = FaultCount()


class EngineBackend:
    """One engine worker. `connect_to` an address, and it stays connected until drained or closed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        clock: Clock,
        heartbeat: HeartbeatTerms = HeartbeatTerms(),  # noqa: B008 - it is frozen.
        *,
        key: WorkerKey | None = None,
    ) -> None:
        """`key`: the worker must have it, and wants to see that we have."""
        self.failure: WorkerFailed | None = None
        """The worker's reason why it cannot serve, until its next report."""
        self.on_change: Callable[[], None] = nothing
        """See `Backend.on_change`."""
        self.on_phase: Callable[[], None] = nothing
        """The same, but not for newer `stats`. For the launcher."""
        self.progress = 0
        """The last step reported: while `num_streams` or the stats say that there is work, it must grow."""
        self._tokenizer, self._clock, self._heartbeat = tokenizer, clock, heartbeat
        self._status = BackendStatus()
        self._key, self._handshake = key, Handshake(key)
        self._refusal = ""
        self._leaving: set[RequestId] = set()
        """Streams that ended here; the worker has been told, and has not said its last word."""
        self._num_again = 0
        self._link: WorkerLink | None = None
        self._streams: dict[RequestId, EngineStream] = {}
        self._gathered: list[EngineStream] = []
        """Streams with output of several steps to hand on."""
        self._kv: KVSubscription | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self._says_trouble = False
        self._falls_asleep: asyncio.Future[bool] | None = None
        self._delay_s = RECONNECT_MIN_S

    @property
    def status(self) -> BackendStatus:
        """The latest known state; never blocks."""
        return self._status

    @property
    def num_streams(self) -> int:
        """Streams that have not had their finish."""
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        """Whether the worker ought to be making steps, as far as is known here."""
        stats = self._status.stats
        return bool(self._streams) or (stats is not None and stats.running + stats.waiting > 0)

    @property
    def draining(self) -> bool:
        """Nothing new is taken, and the worker's exit will be no accident."""
        return self._draining

    def connect_to(self, address: Address, *, reports_connect_errors: bool = False) -> None:
        """Connect, now or as soon as a worker listens there, and again after every loss.

        `reports_connect_errors`: a refused connection is reported as the stage, for no other part knows more.
        """
        assert self._connecting is None, "already connected"
        self._says_trouble = reports_connect_errors
        self._connecting = asyncio.create_task(self._stay_connected(address), name=f"connect {address}")

    async def move_to(self, address: Address) -> None:
        """The worker listens somewhere else from now on: its old connection is of no use."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
            self._connecting = None
        if self._link is not None:
            self._link.abort()
            await asyncio.wait([self._link.lost], timeout=CLOSE_TIMEOUT_S)
        if not self._draining:
            self.connect_to(address)

    def hear_kv_events(self, listener: KVEventListener) -> None:
        """Tell `listener` from now on what can be hit in the worker's KV cache. Call it once."""
        assert self._kv is None, "there is a listener already"
        self._kv = KVSubscription(listener)
        if self._link is not None and self._handshake.is_over:
            self._link.send(self._kv.request())

    def generate(self, request: GenerateRequest, sink: Sink) -> EngineStream:
        """See `Backend.generate`.

        Raises:
            WorkerUnavailable: not connected, not ready, draining, the worker stopped reading, or it has not
                the adapter that is asked for.
        """
        if self._link is None or not self._status.ready or self._draining:
            raise WorkerUnavailable(f"the worker is not ready: {self._status.public_stage}")
        if self._link.is_clogged:
            raise WorkerUnavailable("the worker does not read what it is sent")
        if request.adapter:
            self._status.adapters.check(request.adapter, request.adapter_digest)
        assert request.request_id not in self._streams, f"{request.request_id} is already running"
        if request.request_id in self._leaving:
            # Another attempt of what was aborted here a moment ago. Its name must be another one there, or
            # what the worker still says of the last attempt would be taken for this one's.
            self._num_again += 1
            again = RequestId(f"{request.request_id}+{self._num_again}")
            request = replace(request, request_id=again)
        self._link.send(
            Submit(
                request_id=request.request_id,
                prompt=token_bytes(request.prompt_token_ids),
                resumed=token_bytes(request.resumed) if request.resumed else b"",
                sampling=request.sampling,
                cache_salt=request.cache_salt,
                public_tokens=request.public_tokens,
                priority=request.priority,
                fairness_key=request.fairness_key,
                fairness_weight=request.fairness_weight,
                takes_row=request.takes_row,
                grammar=None if request.constraint is NO_CONSTRAINT else request.constraint.as_grammar(),
                adapter=request.adapter,
                adapter_digest=request.adapter_digest,
                inputs=request.inputs,
                firsts=request.firsts,
                guest=request.guest,
            )
        )
        stream = EngineStream(request, sink, self._tokenizer, self._clock, self._leave)
        self._streams[request.request_id] = stream
        return stream

    @property
    def takes_adapters(self) -> bool:
        """See `LoadsAdapters`."""
        return self._status.info is not None and self._status.info.adapter_slots > 0

    def load_adapter(self, name: str, path: str, digest: str, *, is_wanted: bool = False) -> None:
        """See `LoadsAdapters`."""
        if self._link is not None:
            self._link.send(LoadAdapter(name=name, path=path, digest=digest, is_wanted=is_wanted))

    def keep_adapters(self, names: tuple[str, ...]) -> None:
        """See `LoadsAdapters`."""
        if self._link is not None:
            self._link.send(KeepAdapters(names))

    def unload_adapter(self, name: str) -> None:
        """See `LoadsAdapters`."""
        if self._link is not None:
            self._link.send(UnloadAdapter(name))

    async def drain(self, timeout_s: float) -> None:
        """See `Backend.drain`. The worker stays: other gateways may use it, and who launched it ends it."""
        self._draining = True
        self._change(Phase.DRAINING, "draining")
        await end_streams(self._streams, self._idle, timeout_s)
        await self.close()

    def ask_to_sleep(self) -> "asyncio.Future[bool]":
        """Tell the worker to release its weights; done when it has: True, or False if it did not, because
        it has work or cannot be told.
        """
        if self._falls_asleep is None or self._falls_asleep.done():
            self._falls_asleep = asyncio.get_running_loop().create_future()
        if self._link is None or self._draining:
            self._answer_sleep(sleeps=False)
        elif self._status.phase is Phase.ASLEEP:
            self._answer_sleep(sleeps=True)
        else:
            self._link.send(Sleep())
        return self._falls_asleep

    def ask_to_wake(self) -> None:
        """Tell the worker to load its weights again."""
        if self._link is not None:
            self._link.send(Wake())

    def _answer_sleep(self, *, sleeps: bool) -> None:
        if self._falls_asleep is not None and not self._falls_asleep.done():
            self._falls_asleep.set_result(sleeps)

    def end_worker(self) -> bool:
        """Tell the worker to exit once it has finished what it runs; False if it cannot be told."""
        if self._link is None:
            return False
        self._link.send(Drain())
        return True

    async def close(self) -> None:
        """Disconnect at once: running streams break."""
        self._draining = True
        link = self._link
        if link is not None:
            link.close("this gateway closed the connection")
            await asyncio.wait([link.lost], timeout=CLOSE_TIMEOUT_S)
            link.abort()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
            self._connecting = None
        self._change(Phase.DOWN, "closed")

    def report(
        self,
        *,
        stage: str,
        note: str | None = None,
        restarts: int | None = None,
        is_down: bool = False,
        fault: str = "",
    ) -> None:
        """For the launcher: what happened to the process, whether that was its end, and a fault's kind."""
        if fault:
            before = self._status.faults.get(fault, _NO_FAULT)
            self._status.faults[fault] = FaultCount(before.count + 1, note or stage)
        if note is not None:
            self._status.notes[:] = [*self._status.notes, Note(note, self._clock.wall_ns())][-NOTES_MAX:]
        if restarts is not None:
            self._status.restarts = restarts
        self._change(Phase.DOWN if is_down else self._status.phase, stage)

    def report_from_parent(
        self,
        *,
        stage: str,
        notes: Sequence[Note],
        restarts: int,
        is_down: bool,
        faults: Mapping[str, FaultCount],
    ) -> None:
        """For one of several gateway processes: what their parent, which launched the worker, knows of it.

        A connected worker speaks for itself.
        """
        status = self._status
        if not stage or self._link is not None:
            stage = status.stage
        # Both have received the worker's own report; how its process ended only the parent has seen.
        more = {
            kind: each
            for kind, each in faults.items()
            if each.count > status.faults.get(kind, _NO_FAULT).count
        }
        state = (stage, restarts, is_down, [*notes])
        if more or state != (status.stage, status.restarts, status.is_given_up, status.notes):
            status.faults |= more
            status.restarts, status.is_given_up, status.notes[:] = restarts, is_down, notes
            self._change(status.phase, stage)

    # --- the link ------------------------------------------------------------------------------------

    def on_link_up(self, link: WorkerLink) -> None:
        """Connected: the worker will say at once how far it is, or what it wants to see first."""
        self._link, self._handshake = link, Handshake(self._key)
        if self._handshake.is_over:
            self._welcomed(link)

    def on_message(self, message: FromWorker, *, behind: bool = False) -> None:
        """One message from the worker; outputs first, for they are nearly all there is.

        `behind`: several came at once, so this gateway is slower than the worker now. Then all that they
        give one stream is handed on together, in `on_caught_up`: relaying a step costs less then.
        """
        if not self._handshake.is_over:
            self._shake_hands(message)
        elif isinstance(message, StepOutput):
            self.progress = message.step or self.progress
            streams = self._streams
            for output in message.outputs:
                # A stream that ended here (abort, stop string) may still get a late output.
                if (stream := streams.get(output.request_id)) is not None:
                    try:
                        if not behind:
                            stream.push(output)
                        elif stream.gather(output):
                            self._gathered.append(stream)
                    except Exception as error:  # noqa: BLE001 - the others share the link.
                        stream.crash(error)
                elif output.finish is not None:
                    self._leaving.discard(output.request_id)
        elif isinstance(message, Stats):
            self._status.stats = message
            self.progress = message.step
            self.on_change()
        elif isinstance(message, KVEvents):
            if self._kv is not None:
                self._kv.push(message)
        elif isinstance(message, Challenge | Welcome):
            self._shake_hands(message)
        elif isinstance(message, WorkerAdapters):
            self._status.adapters = adapters_of(message)
            self.on_change()
        elif isinstance(message, StaysAwake):
            self._answer_sleep(sleeps=False)
        elif isinstance(message, Fault):
            self.report(stage=self._status.stage, note=message.words, fault=message.kind)
        elif not isinstance(message, CellReport):
            self._on_state(message)

    def on_caught_up(self) -> None:
        """All that came at once was handed on."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            for stream in gathered:
                try:
                    stream.release_buffered()
                except Exception as error:  # noqa: BLE001 - the others share the link.
                    stream.crash(error)

    def on_link_doubted(self, *, doubted: bool) -> None:
        """It gets nothing new while it does not answer; its streams wait for it, until the link is given
        up.
        """
        if doubted:
            self._change(Phase.SUSPECT, "it does not answer")
        else:
            self._change(Phase.READY, "ready")

    def _shake_hands(self, message: FromWorker) -> None:
        link = self._link
        assert link is not None, "it speaks, so it is connected"
        try:
            proof = self._handshake.take(message)
        except LinkRefused as error:
            self._refusal = str(error)
            link.close(self._refusal)
            return
        if proof is not None:
            link.send(proof)
        elif self._handshake.is_over:
            self._welcomed(link)

    def _welcomed(self, link: WorkerLink) -> None:
        self._refusal = ""
        if self._kv is not None:
            link.send(self._kv.request())

    def on_link_lost(self, why: str) -> None:
        """Every stream breaks off; the connecting task tries again."""
        died = self._link is not None and not self._link.was_cut
        self._link = None
        self._leaving.clear()
        if self._handshake.is_unanswered:
            self._refusal = "it did not take the key that api_key_env names"
        if self.failure is not None:
            why = f"the worker failed with {self.failure.kind}: {self.failure.error}"
        self._answer_sleep(sleeps=False)
        self._status.stats = None
        self.progress = 0
        if self._refusal:
            self._change(Phase.REFUSED, self._refusal)
        else:
            self._change(Phase.LOST, "disconnected")
        for stream in list(self._streams.values()):
            stream.break_off(why, died=died)

    def _on_state(self, state: Condition) -> None:
        self.failure = None
        status, link = self._status, self._link
        if isinstance(state, Loading):
            if link is not None:
                link.excuse()
            status.done, status.total = state.done, state.total
            phase = Phase.WARMING if state.stage == WARMING_UP else Phase.LOADING
            self._change(Phase.WAKING if state.wakes else phase, state.stage)
        elif isinstance(state, Asleep):
            if link is not None:
                link.excuse()
            status.info, status.asleep, status.stats = state.info, state, None
            self.progress, self._delay_s = 0, RECONNECT_MIN_S
            self._change(Phase.ASLEEP, f"asleep: {state.why}" if state.why else "asleep")
            self._answer_sleep(sleeps=True)
        elif isinstance(state, WorkerFailed):
            self.failure = state
            if state.kind == WeightsDamaged.__name__:
                self.report(stage=status.stage, note=state.error, fault="weights")
            self._change(Phase.LOST, f"failed: {state.error}")
        elif state.version != PROTOCOL_VERSION:
            stage = f"the worker speaks protocol {state.version}, this gateway {PROTOCOL_VERSION}"
            self._change(Phase.REFUSED, stage)
        else:
            status.info, status.asleep = state.info, None
            self._delay_s = RECONNECT_MIN_S
            if link is not None:
                link.expect_answers()
            self._change(Phase.READY, "ready")

    def _change(self, phase: Phase, stage: str) -> None:
        if self._draining and phase is not Phase.DOWN:
            phase = Phase.DRAINING  # The worker may report otherwise: it is given nothing more.
        self._status.phase, self._status.stage = phase, stage
        self.on_phase()
        self.on_change()

    def _leave(self, request_id: RequestId, tell_worker: bool) -> None:
        """A stream ended."""
        del self._streams[request_id]
        if tell_worker and self._link is not None:
            self._link.send(AbortRequest((request_id,)))
            self._leaving.add(request_id)
        if not self._streams:
            self._idle.set()

    async def _stay_connected(self, address: Address) -> None:
        while True:
            try:
                link = await WorkerLink.connect(address, self, self._heartbeat)
            except OSError as error:  # No process listens (yet).
                why = f"cannot connect to {address}: {error.strerror or error}"
                if self._says_trouble and why != self._status.stage:
                    self._status.stage = why
                    self.on_change()
            else:
                await link.lost
            await sleep(self._delay_s)
            self._delay_s = min(self._delay_s * RECONNECT_GROWTH, RECONNECT_MAX_S)

"""A worker that is not ours, over HTTP: its streams, whether it is there, what it serves and how loaded it
is.

    open ─> probing: GET health ─> GET facts (once, and again after every loss) ─> GET metrics ─> ready
                ^──────────────────────── every probe_s ────────────────────────────┘
    a connection refused or broken in mid-answer: not ready at once, and probed at once

Which API it speaks is a `Dialect`'s business. A worker that serves another model than it should is not ready.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from penstock.backends.base import (
    Adapters,
    BackendStatus,
    Finish,
    GenerateRequest,
    Note,
    Phase,
    Sink,
    end_streams,
    nothing,
)
from penstock.backends.http.adapter_calls import AdapterCalls
from penstock.backends.http.chunks import Holes
from penstock.backends.http.client import HttpClient
from penstock.backends.http.context import LeavingStream, StreamContext
from penstock.backends.http.dialects.base import Dialect, ServerFacts
from penstock.backends.http.engine_metrics import LOAD_NAMES, EngineLoad, load_of, parse_metrics
from penstock.backends.http.small_answer import ProbeFailed, fetch
from penstock.backends.http.stream import HttpStream
from penstock.backends.http.terms import Anomaly, HttpBackendLimits, NoConnection
from penstock.backends.silence import HeartbeatTerms
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.errors import ClientError, Overloaded, StreamBroken, WorkerUnavailable
from penstock.protocol.worker import ModelInfo, Stats
from penstock.telemetry.metrics import BackendMeters
from penstock.text.detokenizer import PieceTokens
from penstock.text.tokenizer import Tokenizer
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId

NOTES_MAX = 20
"""Lines kept in `BackendStatus.notes`; older ones go first."""
FACTS_BYTES_MAX = 1024 * 1024
FACTS_EVERY = 10
"""Probes after which a worker with adapters is asked again which ones it has."""
_NO_LIST = frozenset({404, 405, 429, 501})
"""A provider that answers so is there, and has no list of models for us."""


class WrongWorker(ProbeFailed):
    """It answers, and is not what the configuration says."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ExternalWorker:
    """A worker's entry in the configuration, with the key that it names."""

    engine: str
    url: str
    model: str
    """Its name over there."""
    api_key: str = ""
    metrics_url: str = ""
    """Where its metrics are; empty: where this engine has them."""
    max_model_len: int = 0
    max_running: int = 0
    has_priorities: bool = False
    lacks: frozenset[str] = frozenset()
    """Capabilities that its engine could have and it has not."""


@dataclass(slots=True, frozen=True, kw_only=True)
class BackendDependencies:
    """Dependencies of every backend of one process."""

    config: HttpBackendLimits
    clock: Clock
    meters: Callable[[str], BackendMeters]
    """Counters of an engine."""
    draw: Callable[[], float]
    """Numbers from 0 to 1."""
    heartbeat: HeartbeatTerms = HeartbeatTerms()  # noqa: RUF009 - it is frozen.
    """For engine workers that we did not start."""


class HttpBackend:
    """One worker at an address. `open` it; it is probed until it is drained or closed."""

    def __init__(
        self,
        worker: ExternalWorker,
        tools: BackendDependencies,
        dialect: Dialect,
        client: HttpClient,
        tokenizer: Tokenizer,
        *,
        metrics: tuple[HttpClient, str] | None = None,
    ) -> None:
        """`metrics` is where its metrics are."""
        self.on_change: Callable[[], None] = nothing
        """See `Backend.on_change`."""
        self._worker, self._config, self._clock, self._draw = worker, tools.config, tools.clock, tools.draw
        self._dialect, self._client, self._tokenizer, self._metrics = dialect, client, tokenizer, metrics
        self._meters = tools.meters(worker.engine)
        capabilities = frozenset[str](dialect.capabilities) - worker.lacks
        self._status = BackendStatus(
            stage="not asked yet", static_capabilities=capabilities, resumes=dialect.resumes
        )
        pieces = PieceTokens(tokenizer)
        self._stream_context = StreamContext(
            tokenizer=tokenizer, pieces=pieces, holes=Holes(pieces), clock=tools.clock, owner=self,
            limits=tools.config.http,
        )  # fmt: skip
        self._streams: dict[RequestId, HttpStream] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None
        self._load_ns = 0
        self._complaints: set[str] = set()
        self._num_probes = 0
        self._adapters = AdapterCalls(client, look=self._ask_facts, on_adapters=self._tell_adapters)
        self._used: tuple[str, ...] = ()
        self._adapters_max = 0

    @property
    def status(self) -> BackendStatus:
        """The latest known state; never blocks."""
        return self._status

    @property
    def num_streams(self) -> int:
        """Streams that have not had their finish."""
        return len(self._streams)

    @property
    def draining(self) -> bool:
        """Nothing new is taken."""
        return self._draining

    def open(self) -> None:
        """Begin to probe it. Call it once, on the event loop."""
        assert self._probing is None, "it is open"
        self._probing = asyncio.create_task(self._keep_probing(), name=f"probe {self._client.address}")

    def generate(self, request: GenerateRequest, sink: Sink) -> HttpStream:
        """See `Backend.generate`.

        Raises:
            WorkerUnavailable: it is not ready, draining, all connections that are allowed are in use, or it
                cannot continue what another worker began.
        """
        moves = self._dialect.resumes and request.may_move
        if request.resumed and not moves:
            raise WorkerUnavailable("this kind of worker cannot continue a stream of another one")
        if not self._status.ready or self._draining:
            raise WorkerUnavailable(f"the worker is not ready: {self._status.public_stage}")
        if request.adapter and request.adapter not in self._status.adapters.served:
            raise WorkerUnavailable(f"the worker does not serve the adapter '{request.adapter[:64]}'")
        assert request.request_id not in self._streams, f"{request.request_id} is already running"
        closing = self._closing_mark(request)
        if closing:
            behind = self._tokenizer.encode(f"{closing}\n\n")
            request = replace(request, prompt_token_ids=request.prompt_token_ids + behind)
        stream = HttpStream(
            self._stream_context,
            request,
            sink,
            self._dialect.reader(request),
            model=request.adapter or self._dialect.expects_model,
            trusts_prompt=self._dialect.sends_chats and request.is_chat,
            may_move=moves,
            said_before=closing,
        )
        try:
            submission = self._dialect.submission(request)
        except ClientError as error:
            self._streams[request.request_id] = stream
            asyncio.get_running_loop().call_soon(stream.fail, error)  # Not before this has returned.
            return stream
        try:
            exchange = self._client.start(
                "POST", submission.path, stream, body=submission.body, headers=request.trace_headers
            )
            stream.sent(exchange)
        except NoConnection as error:
            raise WorkerUnavailable(str(error)) from None
        self._streams[request.request_id] = stream
        return stream

    def _closing_mark(self, request: GenerateRequest) -> str:
        """The mark that closes the reasoning that the prompt has opened, where a grammar bounds the answer: a
        foreign engine's holds from the first token, so such an answer has no reasoning.
        """
        grammar = request.constraint.grammar
        if grammar is None or not request.constraint.structured or grammar.opens_with:
            return ""
        return "" if self._dialect.sends_chats and request.is_chat else grammar.begins_after

    @property
    def takes_adapters(self) -> bool:
        """See `LoadsAdapters`. Whether it lets them come at run time shows when one is to come."""
        return self._dialect.has_adapters and self._status.info is not None

    def load_adapter(self, name: str, path: str, digest: str, *, is_wanted: bool = False) -> None:
        """See `LoadsAdapters`."""
        if not is_wanted:  # It brings what it has into memory itself when a request names it.
            self._adapters.want(name, path, digest)

    def keep_adapters(self, names: tuple[str, ...]) -> None:
        """See `LoadsAdapters`: it keeps those that requests name, and they come where their home is."""

    def unload_adapter(self, name: str) -> None:
        """See `LoadsAdapters`."""
        self._adapters.want_no_more(name)

    async def drain(self, timeout_s: float) -> None:
        """See `Backend.drain`. The worker stays: it is not ours."""
        self._draining = True
        self._change(Phase.DRAINING, "draining")
        await end_streams(self._streams, self._idle, timeout_s)
        await self.close()

    async def close(self) -> None:
        """Disconnect at once: running streams break."""
        self._draining = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])
            self._probing = None
        self._adapters.close()
        for stream in list(self._streams.values()):
            stream.fail(_broken("this gateway closed the connection", stream))
        self._client.close()
        if self._metrics is not None:
            self._metrics[0].close()
        self._change(Phase.DOWN, "closed")

    # --- from its streams ------------------------------------------------------------------------------

    def leave(self, stream: LeavingStream, finish: Finish) -> None:
        """See `Owner`."""
        del self._streams[stream.request_id]
        is_plain = finish.error is None and finish.reason is not FinishReason.ABORT
        self._meters.ended("ok" if is_plain else _outcome(finish))
        if self._draining and not self._streams:
            self._idle.set()

    def noted(self, anomaly: Anomaly, detail: str) -> None:
        """See `Owner`."""
        self._meters.odd(anomaly)
        self._complain(anomaly, detail)
        if anomaly is Anomaly.OTHER_MODEL:
            self._down(Phase.REFUSED, f"refused: {detail}")
            self._probe_now.set()

    def lost(self, why: str, *, unreachable: bool) -> None:
        """See `Owner`. While other streams live, one that breaks is only a reason to look."""
        self._probe_now.set()
        if unreachable or len(self._streams) <= 1:
            self._down(Phase.LOST, why)

    # --- probes ----------------------------------------------------------------------------------------

    async def _keep_probing(self) -> None:
        while True:
            self._probe_now.clear()
            try:
                async with asyncio.timeout(self._config.probe_timeout_s):
                    await self._probe()
            except WrongWorker as error:
                self._down(Phase.REFUSED, f"refused: {error}")
            except ProbeFailed as error:
                self._down(Phase.LOST, str(error))
            except TimeoutError:
                self._down(Phase.LOST, f"no answer to a probe within {self._config.probe_timeout_s:g} s")
            except Exception as error:  # noqa: BLE001
                # A worker whose words meet a bug here must not stay unwatched.
                self._down(Phase.LOST, f"a bug met its answer to a probe: {error!r}")
            await self._pause(self._config.probe_s * (0.9 + 0.2 * self._draw()))

    async def _pause(self, seconds: float) -> None:
        """Until the next probe is due, or wanted now; never less than a moment."""
        await sleep(min(seconds, self._config.probe_s / 20))
        try:
            async with asyncio.timeout(seconds):
                await self._probe_now.wait()
        except TimeoutError:
            pass

    async def _probe(self) -> None:
        path = self._dialect.health_path
        if path:
            self._expect_ok(await fetch(self._client, path, FACTS_BYTES_MAX), path)
        self._num_probes += 1
        knows = self._status.info is not None and self._status.ready and bool(path)
        if not knows or ((self._adapters.matter or self._used) and self._num_probes % FACTS_EVERY == 0):
            await self._ask_facts()  # Adapters come and go while it runs.
        await self._read_load()
        if not self._status.ready and not self._draining:
            self._change(Phase.READY, "ready")

    async def _ask_facts(self) -> None:
        path, dialect = self._dialect.facts_path, self._dialect
        answer = await fetch(self._client, path, FACTS_BYTES_MAX)
        facts = ServerFacts()
        if dialect.needs_facts or answer[0] not in _NO_LIST:
            self._expect_ok(answer, path)
            try:
                facts = dialect.facts(answer[1])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if dialect.needs_facts:
                    raise WrongWorker(f"what it says of itself at {path} cannot be read: {error}") from error
        if dialect.listed_model and dialect.listed_model not in facts.models:
            known = ", ".join(f"'{name[:64]}'" for name in facts.models[:8]) or "nothing"
            raise WrongWorker(f"it serves {known}, and not '{dialect.listed_model}'")
        self._learn(facts)

    def _expect_ok(self, answer: tuple[int, bytes], path: str) -> None:
        if answer[0] in (401, 403):
            raise WrongWorker(f"it does not accept the key that it is given ({path} answers {answer[0]})")
        if answer[0] != 200:
            raise ProbeFailed(f"{path} answers {answer[0]}")

    def _learn(self, facts: ServerFacts) -> None:
        length = self._worker.max_model_len or facts.max_model_len
        if not length:
            raise WrongWorker("it does not say how long its context is: set max_model_len of the worker")
        if self._dialect.has_adapters:
            self._adapters.listed_now(facts.adapters)
        self._tell_adapters()
        known = self._status.info
        info = ModelInfo(
            model=self._worker.model,
            architecture=self._worker.engine,
            dtype="",
            num_parameters=0,
            vocab_size=self._tokenizer.vocab_size,
            max_model_len=length,
            num_blocks=known.num_blocks if known is not None else 0,
            block_tokens=BLOCK_TOKENS,
            max_running=self._worker.max_running,
        )
        if info != known:
            self._status.info = info

    async def _read_load(self) -> None:
        """Read its metrics. Without them it is as loaded as this gateway has loaded it."""
        now_ns, names = self._clock.now_ns(), LOAD_NAMES.get(self._worker.engine)
        if self._status.stats is not None and now_ns - self._load_ns > self._config.stale_s * NS_PER_S:
            self._status.stats = None
            self.on_change()
        if names is None or self._metrics is None:
            return
        client, path = self._metrics
        try:
            status, body = await fetch(client, path, self._config.metrics_bytes_max)
            if status != 200:
                raise ProbeFailed(f"{path} answers {status}")
            timed = names.adapters[0] if names.adapters is not None else ""
            load = load_of(parse_metrics(body, names.all(), timed=timed), names, model=self._worker.model)
        except (ProbeFailed, ValueError) as error:
            self._meters.scrape_failed()
            self._complain("metrics", f"its metrics cannot be read: {error}")
            return
        for name in load.missing:
            self._meters.missing(name)
            self._complain(name, f"its metrics lack {name}")
        self._load_ns = self._clock.now_ns()
        self._used, self._adapters_max = load.adapters or (), load.adapters_max
        self._tell_adapters()
        self._status.stats = self._stats(load)
        self.on_change()

    def _tell_adapters(self) -> None:
        served = self._adapters.served()
        now = Adapters(
            served,
            served.intersection(self._used),
            paths=self._adapters.paths(),
            failed=dict(self._adapters.failed),
            room=self._adapters_max,
        )
        if now != self._status.adapters:
            self._status.adapters = now
            self.on_change()

    def _stats(self, load: EngineLoad) -> Stats | None:
        """The load as the rest of the gateway knows it; None if what counts most is not told."""
        running = load.running
        if running is None and LOAD_NAMES[self._worker.engine].running is None:
            running = len(self._streams)
        if running is None or load.waiting is None:
            return None
        info = self._status.info
        blocks = (load.kv_tokens or 0) // BLOCK_TOKENS
        if info is not None and blocks != info.num_blocks:
            self._status.info = msgspec.structs.replace(info, num_blocks=blocks)
        total = blocks if load.kv_usage is not None else 0  # A total without a usage would read as empty.
        return Stats(
            step=0,
            running=running,
            waiting=load.waiting,
            blocks_total=total,
            blocks_used=round(total * (load.kv_usage or 0.0)),
            blocks_cached=0,
        )

    # --- inside ----------------------------------------------------------------------------------------

    def _down(self, phase: Phase, why: str) -> None:
        """It takes nothing. One that never answered is starting still."""
        self._status.stats = None
        if phase is Phase.LOST and self._status.info is None:
            phase = Phase.STARTING
        if not self._draining and (phase, why) != (self._status.phase, self._status.stage):
            self._change(phase, why)

    def _complain(self, about: str, what: str) -> None:
        """Once for each thing: notes are for people."""
        if about not in self._complaints:
            self._complaints.add(about)
            note = Note(what, self._clock.wall_ns(), lasts=True)
            self._status.notes[:] = [*self._status.notes, note][-NOTES_MAX:]

    def _change(self, phase: Phase, stage: str) -> None:
        self._status.phase, self._status.stage = phase, stage
        self.on_change()


def _broken(why: str, stream: HttpStream) -> WorkerUnavailable | StreamBroken:
    return StreamBroken(why) if stream.has_output else WorkerUnavailable(why)


def _outcome(finish: Finish) -> str:
    if finish.reason is FinishReason.ABORT:
        return "aborted"
    match finish.error:
        case None:
            return "ok"
        case ClientError():
            return "refused"
        case Overloaded():
            return "overloaded"
        case StreamBroken():
            return "broken"
        case _:
            return "unavailable"

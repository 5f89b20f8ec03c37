"""The contract between the gateway and any worker.

Output is *pushed*: a backend calls the sink from wherever it reads the worker's bytes. An async iterator
per stream would cost a task switch per token, which is more than all the rest of the relay
(see docs/design/002). Everything here runs on one event loop; nothing blocks and nothing awaits.
"""

import asyncio
import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from penstock.clock import NS_PER_MS
from penstock.errors import EngineFault, PenstockError, WorkerUnavailable
from penstock.protocol.cells import Guest
from penstock.protocol.needs import NO_CONSTRAINT, Constraint
from penstock.protocol.worker import Asleep, FaultCount, ModelInfo, Stats
from penstock.protocol.worker_parts import WorkerAdapters
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, RequestId, SamplingParams, TokenLogprob, Usage


class GenerateRequest(msgspec.Struct, frozen=True):
    """One stream to generate. `n` choices of a client's request are n of these.

    Not by keyword alone: one is made for every request, in this order.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text is cut before them."""
    include_stop: bool = False
    """Keep the matched stop string in the text."""
    skip_special_tokens: bool = True
    adapter: str = ""
    """Of the adapters that the worker says it serves (`BackendStatus.adapters`)."""
    adapter_digest: str = ""
    """Which one is meant by that name: a worker of ours that has another one refuses; empty: any."""
    cache_salt: bytes = b""
    """Prefix-cache namespace of the tenant."""
    public_tokens: int = 0
    """Leading prompt tokens that the operator declared public; see `gateway/models/served.py`."""
    fairness_key: str = ""
    fairness_weight: float = 1.0
    piece_tokens: int = 1
    """Behind the first output, tokens may arrive in pieces of so many: the client reads only the end."""
    body: bytes = b""
    """The client's request as it came, JSON that was checked: for providers, which have templates of their
    own."""
    is_chat: bool = False
    """`body` is a conversation; else a plain completion."""
    constraint: Constraint = NO_CONSTRAINT
    """The form that the text must have: for workers that say they can (`ModelInfo.capabilities`)."""
    exact_migration: bool = False
    """The client wants no continuation whose tokens may differ from those that would have followed: only
    our engine gives those."""
    resumed: tuple[int, ...] = ()
    """The answer so far, which another worker gave (`Finish.resume`): the sink hears only what comes behind
    it, and `usage` counts both. A backend that cannot continue it refuses it."""
    priority: int = 0
    takes_row: bool = False
    """Our engine lets it have a row of another tenant."""
    inputs: tuple[int, ...] = ()
    """No text is wanted, but a vector of each of the texts of so many tokens that the prompt consists of:
    for workers that say they can (`ModelInfo.pooling`)."""
    firsts: tuple[int, ...] = ()
    """Of each, leading tokens that are the first text of a pair; empty: none is a pair."""
    trace_headers: tuple[tuple[str, str], ...] = ()
    """W3C's `traceparent` and `tracestate` of this attempt, if the request is traced."""
    guest: Guest | None = None
    """For peer cells: the facts of its request."""

    @property
    def may_move(self) -> bool:
        """Whether a foreign engine, given prompt and answer so far as one prompt, continues as this request
        would have: counts of the answer's own tokens, a grammar's state and scores of the prompt stay behind.
        """
        sampling = self.sampling
        return not (
            self.exact_migration
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1.0
            or sampling.prompt_logprobs is not None
            or self.constraint.structured
            or self.constraint.fields
        )


@dataclass(slots=True, frozen=True)
class TextLogprob:
    """One token as OpenAI's `logprobs` shows it."""

    token: str
    token_bytes: bytes
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    top: tuple[tuple[str, bytes, float], ...] = ()
    token_id: int = -1
    """-1: the worker tells of tokens by their text only."""
    top_ids: tuple[int, ...] = ()
    """Of `top`, where the token's own is known."""
    rank: int = 0
    """1 for the likeliest token of the vocabulary; 0: the worker does not tell."""


class ToolCallPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a tool call that a worker has parsed itself: its start has a name, and more of its arguments
    follows.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New output of a stream. `text` is whole characters only, and never part of a stop string.

    One is made per stream and step, so it is a msgspec struct: a ninth of a frozen dataclass's cost.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...] = ()
    prompt_logprobs: tuple[TextLogprob, ...] = ()
    """Of the next prompt tokens, from the second on, if they were asked for. They come before the answer, on
    their own."""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    """From workers that parse calls themselves; their text holds none."""
    thought: str = ""
    """Reasoning before the text, from workers that tell it apart."""
    vectors: tuple[tuple[int, bytes], ...] = ()
    """Of some of `GenerateRequest.inputs`: their places, and float32, little-endian."""
    encoded: bytes = b""
    """`text` as a JSON string, where that is known; empty: it is not."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The one end of a stream."""

    reason: FinishReason
    usage: Usage
    stop: str | int | None = None
    """The stop string or stop token id that matched, if one did (EOS is not reported)."""
    error: PenstockError | None = None
    """Set exactly when the reason is ERROR."""
    resume: tuple[int, ...] | None = None
    """With the reasons ERROR and ABORT: the whole answer so far, with which another worker can continue.
    None: none can."""


class Sink(Protocol):
    """Where a stream's output goes. Called on the event loop; must not block or raise."""

    def on_delta(self, delta: Delta) -> None:
        """More output. Never after `on_finish`."""
        ...

    def on_finish(self, finish: Finish) -> None:
        """The stream is over. Called exactly once, also after `abort`."""
        ...


class Generation(Protocol):
    """A running stream, as its caller sees it."""

    @property
    def usage(self) -> Usage | None:
        """The worker's latest report of what the stream used; None if it has told nothing."""
        ...

    def abort(self) -> None:
        """Stop generating and free what the request holds on the worker. Idempotent; safe after the end.

        `on_finish` follows with reason ABORT, at once: callers need not wait for the worker.
        """
        ...

    def pause_reading(self) -> bool:
        """Read no more from the worker until `go_on`, for the client has too much already.

        Idempotent; safe after the end.

        Output that was read before still goes to the sink. False: this stream cannot be held, for it shares
        its connection.
        """
        ...

    def resume_reading(self) -> None:
        """Read again, if it was held."""
        ...


class Phase(enum.StrEnum):
    """How far a worker is, as its backend can tell."""

    STARTING = "starting"  # No answer yet.
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"  # It takes requests.
    ASLEEP = "asleep"  # Its weights are not in memory; a request wakes it.
    WAKING = "waking"
    SUSPECT = "suspect"  # Connected, but silent: its streams may continue, it gets no new ones.
    LOST = "lost"  # It answered once, and cannot be reached now. Every stream was broken off.
    REFUSED = "refused"  # It answers, and is not what it should be; `stage` says why.
    DRAINING = "draining"  # Requests that it has may end; it takes nothing new.
    DOWN = "down"  # Final: it was stopped, or will not be restarted.


class Adapters(NamedTuple):
    """A worker's low-rank adapters (LoRA), by the names that requests bear."""

    served: frozenset[str] = frozenset()
    """It takes requests for them."""
    loaded: frozenset[str] = frozenset()
    """Of those, the ones that it used last, as many as it keeps in memory: a request for another one has to
    wait for its load."""
    digests: Mapping[str, str] = MappingProxyType({})
    """Of those that it has told: which adapter it means by the name."""
    paths: Mapping[str, str] = MappingProxyType({})
    """Where it has them from, where it tells; also those that it could not load."""
    failed: Mapping[str, str] = MappingProxyType({})
    """Why it could not load one, by name."""
    room: int = 0
    """How many can be loaded at once; 0: not known."""
    load_ns: int = 0
    """Time that a load takes; 0: not known."""

    def check(self, name: str, digest: str) -> None:
        """Whether a request for this adapter can be sent there; `digest` "" takes any.

        Raises:
            WorkerUnavailable: it cannot.
        """
        if name not in self.served:
            raise WorkerUnavailable(f"the worker does not serve the adapter '{name[:64]}'")
        if digest not in ("", self.digests.get(name)):
            raise WorkerUnavailable(f"the worker's adapter '{name[:64]}' is another one")


NO_ADAPTERS = Adapters()


def adapters_of(reported: WorkerAdapters) -> Adapters:
    """Adapters as a worker of ours reported them."""
    sound = [each for each in reported.adapters if not each.error]
    return Adapters(
        served=frozenset(each.name for each in sound),
        loaded=frozenset(each.name for each in sound if each.is_loaded),
        digests={each.name: each.digest for each in sound},
        paths={each.name: each.path for each in reported.adapters},
        failed={each.name: each.error for each in reported.adapters if each.error},
        room=reported.room,
        load_ns=reported.read_ms * NS_PER_MS,
    )


@dataclass(slots=True, frozen=True)
class Note:
    """Something about a worker that people should know."""

    text: str
    at_ns: int
    """By the wall clock."""
    lasts: bool = False
    """It stays true; otherwise it happened, and is over some time."""


@dataclass(slots=True)
class BackendStatus:
    """The facts that are known of a worker now.

    Only its backend writes to it, and calls `Backend.on_change` afterwards.
    """

    phase: Phase = Phase.STARTING
    info: ModelInfo | None = None
    stats: Stats | None = None
    asleep: Asleep | None = None
    """Its report when it fell asleep, until it is ready again."""
    adapters: Adapters = NO_ADAPTERS
    static_capabilities: frozenset[str] | None = None
    """Its capabilities beyond plain text, where they are known before it answers; None: its `info` says
    so."""
    stage: str = "starting"
    """In words, for people: what it is doing, or why it is not ready."""
    done: int = 0
    total: int = 0
    restarts: int = 0
    resumes: bool = True
    """It can continue a stream that another worker began."""
    faults: dict[str, FaultCount] = field(default_factory=dict[str, FaultCount])
    """Faults of its machine or its memory, by kind: `protocol.worker.Fault`, and `weights` that have
    changed."""
    is_given_up: bool = False
    """Another process of this server launched it, and will not start it again."""
    notes: list[Note] = field(default_factory=list[Note])

    @property
    def capabilities(self) -> frozenset[str] | None:
        """Its capabilities beyond plain text; None: it has not said yet."""
        if self.static_capabilities is not None or self.info is None:
            return self.static_capabilities
        return self.info.capabilities

    @property
    def public_stage(self) -> str:
        """`stage` for callers."""
        return public_stage(self.stage)

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.phase is Phase.READY


_PRIVATE = re.compile(r"(?<!suspect): .*| to \S+:\S+.*", re.DOTALL)


def public_stage(stage: str) -> str:
    """The part of a stage that any caller may read: details behind a colon, such as a file's path, and the
    addresses of workers are for the operator.
    """
    return _PRIVATE.sub("", stage)


def nothing() -> None:
    """The value of `on_change` before a listener is set."""


class Backend(Protocol):
    """One worker. Every implementation passes `tests/backends/conformance.py`."""

    on_change: Callable[[], None]
    """Called after every change of `status`, newer `stats` included (a new `Stats` object each time). The
    registry sets it; it only notes what has changed. `nothing` until then."""

    @property
    def status(self) -> BackendStatus:
        """The latest known state; never blocks."""
        ...

    @property
    def num_streams(self) -> int:
        """Streams that have not had their finish."""
        ...

    def generate(self, request: GenerateRequest, sink: Sink) -> Generation:
        """Start a stream: any number of `on_delta`, then exactly one `on_finish`.

        Raises:
            WorkerUnavailable: nothing was sent; another worker may be tried. The sink hears nothing. Also if
                the request is `resumed` and this kind of worker cannot do that.

        After a successful return trouble arrives as a `Finish` with an error: `WorkerUnavailable` if no
        output came before it, `StreamBroken` if some did, `EngineFault` if only this request is hit.
        """
        ...

    async def drain(self, timeout_s: float) -> None:
        """Let running streams end, up to the timeout; abort the rest; release the worker."""
        ...


@runtime_checkable
class LoadsAdapters(Protocol):
    """A backend whose worker loads adapters while it runs. The result is in `BackendStatus.adapters`."""

    @property
    def takes_adapters(self) -> bool:
        """Whether the worker, which is ready, does."""
        ...

    def load_adapter(self, name: str, path: str, digest: str, *, is_wanted: bool = False) -> None:
        """Let the worker take requests for an adapter; again for one that is there changes nothing, but that
        it is loaded at once if it `is_wanted`.
        """
        ...

    def keep_adapters(self, names: tuple[str, ...]) -> None:
        """Let it keep these loaded rather than others, the first ones longest."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Let it take no more of them."""
        ...


def fault_of(error: Exception) -> EngineFault:
    """The end of a stream whose sink has raised, which is a bug."""
    fault = EngineFault(f"the answer could not be passed on: {type(error).__name__}")
    fault.__cause__ = error
    return fault


# Letting a backend's streams end.


async def end_streams(
    streams: Mapping[RequestId, Generation], none_left: asyncio.Event, timeout_s: float
) -> None:
    """Wait until `streams` is empty, which `none_left` tells; after the timeout abort those that are still in
    it.
    """
    if not streams:
        return
    none_left.clear()
    try:
        async with asyncio.timeout(timeout_s):
            await none_left.wait()
    except TimeoutError:
        for stream in list(streams.values()):
            stream.abort()


# Log-probabilities by token id, as clients see them: with the tokens' texts.


def to_text_logprob(logprob: TokenLogprob, tokenizer: Tokenizer) -> TextLogprob:
    """A token's log-probability as clients see it."""
    return TextLogprob(
        token=tokenizer.token_text(logprob.token_id),
        token_bytes=tokenizer.token_bytes(logprob.token_id),
        logprob=logprob.logprob,
        top=tuple((tokenizer.token_text(i), tokenizer.token_bytes(i), value) for i, value in logprob.top),
        token_id=logprob.token_id,
        top_ids=tuple(i for i, _ in logprob.top),
        rank=logprob.rank,
    )

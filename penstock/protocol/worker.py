"""The messages between a gateway and an engine worker.

One connection (Unix socket or TCP) carries every request between the two. A frame is a 4-byte
little-endian length and that many bytes of msgpack: one message of the unions below. The engine
sends at most one `StepOutput` per step and connection, however many requests moved in it, so a relayed
token costs neither side a system call of its own. This module knows no sockets: bytes in, messages out.

    gateway                               worker
       |  <-- Loading* ... Ready | Failed    |   on every connect, current state first
       |  Submit -->                         |
       |  <-- StepOutput*                    |   each request: any number of tokens, exactly one finish
       |  Abort -->                          |   answered by a finish with reason "abort"
       |  <-- Stats                          |   on a timer while anything changes
       |  Ping -->                           |   when nothing was heard for a moment
       |  <-- Pong                           |   at once, also while a step computes
       |  SubscribeKVEvents -->              |   once; then
       |  <-- KVEvents*                      |   changes of the KV cache, one message per step that has any
       |  LoadAdapter, UnloadAdapter -->     |
       |  <-- Adapters                       |   on connect, and whenever one came, went or failed
       |  Sleep -->                          |   let go of weights and KV cache, unless there is work
       |  <-- Asleep | StaysAwake            |
       |  Wake -->                           |   load again: Loading* ... Ready, or Asleep and why
       |  Drain -->                          |   finish what runs, refuse what is new, then exit
"""

import struct
from collections.abc import Iterator

import msgspec

from penstock.protocol.cells import CellPing, CellReport, Guest, OpenCell
from penstock.protocol.worker_parts import (
    DeviceReadings,
    Grammar,
    KeepAdapters,
    LoadAdapter,
    Sleep,
    StaysAwake,
    UnloadAdapter,
    Wake,
    WorkerAdapters,
)
from penstock.types import OWN_CAPABILITIES, FinishReason, RequestId, SamplingParams, TokenLogprob, Usage

PROTOCOL_VERSION = 7
MAX_FRAME_BYTES = 64 * 1024 * 1024
LOADING_WEIGHTS = "loading weights"
"""The stage of `Loading` in which they are read: on the processor, the model's memory is decided before."""
WARMING_UP = "warming up"
"""The stage of `Loading` that comes last: the weights are there, and the first steps are run."""
_LENGTH = struct.Struct("<I")


class ProtocolError(Exception):
    """The peer broke the framing or sent a message that does not decode. Close the connection."""


# --- gateway to worker ---------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit", omit_defaults=True):
    """Start one request. The id is unique on this worker while the request lives."""

    request_id: RequestId
    prompt: bytes
    """Token ids, int32 little-endian."""
    sampling: SamplingParams
    cache_salt: bytes = b""
    """Prefix-cache namespace, set by the gateway from the authenticated tenant, never by the caller."""
    resumed: bytes = b""
    """Token ids, int32 little-endian, that another worker generated for it: it continues behind them, with
    the very tokens that would have followed there. They count as generated, and are not sent again."""
    public_tokens: int = 0
    """Leading prompt tokens that the gateway's operator declared public: whole blocks of them are shared by
    all tenants."""
    priority: int = 0
    """Smaller goes first."""
    fairness_key: str = ""
    """The tenant whose share of the engine this work counts against."""
    fairness_weight: float = 1.0
    """How much that share is worth beside others'; above 0."""
    takes_row: bool = False
    """Its tenant runs nothing else of the model: it may have the row of a request whose tenant has more."""
    grammar: Grammar | None = None
    """The required form of the answer: for a worker that says it can (`Capability.STRUCTURED_OUTPUTS`)."""
    adapter: str = ""
    """One that the worker was told to load, by its name."""
    adapter_digest: str = ""
    """Which one the gateway means by that name; empty: whichever the worker has."""
    inputs: tuple[int, ...] = ()
    """Nothing is generated: `prompt` is texts of so many tokens each, and a vector of each is wanted
    (`ModelInfo.pooling`)."""
    firsts: tuple[int, ...] = ()
    """Of each text, how many of its tokens are the first part of a pair. Empty: none is a pair."""
    guest: Guest | None = None
    """Of a request that is sent to a peer cell: what that must know of it. Workers have no use for it."""


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests and free what they hold. Unknown ids are ignored: they just finished."""

    request_ids: tuple[RequestId, ...]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish running requests, refuse new ones, then exit."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Show that you live: `Pong` is expected at once."""


class SubscribeKVEvents(msgspec.Struct, frozen=True, tag="subscribe_kv_events"):
    """Tell this connection what can be hit in the KV cache, from now on: `KVEvents`."""

    epoch: int = 0
    """Of the `KVEvents` heard last; 0 for a first subscription."""
    from_sequence: int = 0
    """The first number that is wanted: one more than the last that was heard."""


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The answer to a `Challenge`: this gateway has the worker's key (protocol/address.py)."""

    nonce: bytes
    mac: bytes


# --- worker to gateway ---------------------------------------------------------------------------


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that the worker serves, sent once it is ready."""

    model: str
    """The name that clients use: a label."""
    identity: str = ""
    """The identity of its computation (kv/hashing.py): its KV blocks' names start from it, and only workers
    of one identity can continue each other's streams. Empty: the worker does not tell."""
    architecture: str
    dtype: str
    """Type of activations and KV cache, and of the weights unless `quantization` says otherwise."""
    quantization: str = "none"
    """How the weights were rounded when they were loaded: "none", "int8" or "int4"."""
    num_parameters: int
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and answer together that one request may have."""
    num_blocks: int
    block_tokens: int
    max_running: int
    num_host_blocks: int = 0
    """Blocks that fit the host tier of the KV cache; 0: there is none."""
    capabilities: frozenset[str] = OWN_CAPABILITIES
    """Its capabilities beyond plain text (protocol/needs.py). Words that the gateway does not know are of no
    use to it."""
    device: str = ""
    """Its device, in the maker's words."""
    kernels: str = ""
    """The code that computes: "native" and the instruction set, or "torch" and what its bits depend on."""
    device_uuid: str = ""
    """Of a GPU, as its driver writes it."""
    adapter_slots: int = 0
    """Adapters that requests in one batch may have; 0: it takes none."""
    pooling: str = ""
    """How it makes vectors of texts: "last", "mean", "cls", or "scores", which are numbers by the label of a
    classifier. Empty: it generates text."""
    vector_size: int = 0
    """Numbers of a vector."""
    dimensions: tuple[int, ...] | None = None
    """A shorter beginning of a vector is one too: how long it may be, or any length (empty). None: it is
    not."""
    speculation: str = ""
    """The proposer of tokens ahead of it, "ngram" or a model; empty: none."""
    weight_bytes: int = 0
    """Memory of the weights and what is kept beside them, as computed before loading; 0: it does not
    tell."""
    kv_bytes: int = 0
    host_kv_bytes: int = 0
    """Memory of the KV cache and of its host tier, when all of it is used."""

    @property
    def memory_bytes(self) -> int:
        """All that it takes while it is awake, beside its process."""
        return self.weight_bytes + self.kv_bytes + self.host_kv_bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """This worker has a key, and says nothing more before it has seen a `Proof`."""

    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The proof was right, and this one shows that the worker has the key as well."""

    mac: bytes


FALLING_ASLEEP = "falling asleep"
"""The stage of a worker that was told to sleep and gives its memory back."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The worker is not ready yet: `stage` in words, `done` of `total` (bytes or units; total 0 =
    unknown).
    """

    stage: str
    done: int = 0
    total: int = 0
    wakes: bool = False
    """It was asleep."""


class Asleep(msgspec.Struct, frozen=True, kw_only=True, tag="asleep"):
    """Its weights and its KV cache are not in memory; `Wake` brings them back."""

    info: ModelInfo
    """Its facts when it is awake."""
    wake_ns: int
    """How long waking will take, as far as is known."""
    memory_bytes: int = 0
    """The memory of its process now."""
    why: str = ""
    """Why it could not be woken; empty: it was not asked to."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Weights are loaded and a first step has been run: submit away."""

    info: ModelInfo
    version: int = PROTOCOL_VERSION


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot start, or must stop. It exits after this."""

    error: str
    kind: str
    """Name of the type in `penstock.errors`, or of the unexpected exception."""


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """Something is wrong with the worker's machine. If that ends the worker it says so next."""

    kind: str
    """`xid` (a device that wants a restart or more), `xid_noted`, `oom_kill`, `weights`."""
    words: str


class FaultCount(msgspec.Struct, frozen=True, array_like=True):
    """Faults of one kind."""

    count: int = 0
    words: str = ""
    """Of the last one."""


class RequestFinished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request ended, with everything it used."""

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    """The EOS or stop token that ended it (not part of the text)."""
    error: str | None = None
    error_kind: str | None = None
    """As in `WorkerFailed.kind`; set only with reason "error"."""
    param: str | None = None
    """The field of `Submit` that is wrong; set only with an error that is the client's."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """The output of one step for one request: new tokens, maybe the end."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: RequestFinished | None = None
    usage: Usage | None = None
    """Sent with the first tokens: what was used up to there. A gateway that ends a stream early accounts from
    it."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the next prompt tokens, from the second on, if they were asked for; told before the first new
    token."""
    device_ns: int = 0
    """`Usage.device_ns` of all but at most the last seven steps that only decoded: a stream that the gateway
    ends pays for no less. A prompt is in it with the first token."""
    vectors: tuple[tuple[int, bytes], ...] = ()
    """Of the inputs that were computed: their places, and float32, little-endian."""
    drafts: tuple[int, int] = (0, 0)
    """`Usage.accepted_drafts` and `rejected_drafts` until now."""


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """All outputs of one engine step for this connection."""

    step: int
    outputs: tuple[Output, ...]


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """The engine's gauges and monotonic counters. `step` advances while there is work: health is progress."""

    step: int
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, what the prefix cache had."""
    host_cached_tokens: int = 0
    """Of those, what came back from host memory."""
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    host_stores: int = 0
    """Blocks that were copied to host memory."""
    host_loads: int = 0
    """Blocks that were copied back."""
    generated_tokens: int = 0
    drafted_tokens: int = 0
    """Guesses of tokens that were computed (speculation)."""
    accepted_tokens: int = 0
    """Of those, what became tokens of answers."""
    preemptions: int = 0
    ended: int = 0
    """Requests (of a model that makes vectors: texts) that have ended, without probes: by these is known when
    a model was last used."""
    rows_max: int = 0
    """Requests that it would run at once just now: at most `ModelInfo.max_running`, fewer where its target
    per output token bounds the batch. 0: it does not tell."""
    step_ns: int = 0
    """Nanoseconds spent in steps, all told; host work and compute."""
    host_ns: int = 0
    """Of `step_ns`, what was not waiting for the model's forward pass and sampling."""
    busy_ns: int = 0
    """Nanoseconds in which it had a request, all told: what the requests' `device_ns` are shares of."""
    memory_ns: int = 0
    """The time that the bytes that its steps read would take at the device's bandwidth: of `step_ns`, the
    memory bandwidth utilisation. 0: it does not tell."""
    floor_ns: int = 0
    """The least time in which the device could have done that work in full batches
    (`planning/roofline.py`)."""
    timed_steps: int = 0
    """Steps with work. The fields below are sums over them (`schedule.step_time.StepSums`), by which gateways
    see a worker that is slower than its peers."""
    timed_tokens: int = 0
    timed_sequences: int = 0
    timed_kv_read: int = 0
    timed_pairs: int = 0
    timed_ns: int = 0
    kv_held_tokens: int = 0
    """Tokens that the KV blocks in use could hold, summed over steps: beside `timed_kv_read`, how much of the
    KV memory holds context. 0: it does not tell."""
    readings: DeviceReadings | None = None
    """Of its device, some seconds old; None: it does not tell."""

    @property
    def timed(self) -> tuple[int, int, int, int, int, int]:
        """Steps, tokens, sequences, KV tokens read, pairs and nanoseconds."""
        return (
            self.timed_steps,
            self.timed_tokens,
            self.timed_sequences,
            self.timed_kv_read,
            self.timed_pairs,
            self.timed_ns,
        )


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to `Ping`: the process runs and its socket is served.

    Whether steps end is another question: see `Stats.step`.
    """


class KVEvents(msgspec.Struct, frozen=True, kw_only=True, tag="kv_events", omit_defaults=True):
    """One numbered batch of KV events. Numbers have no gaps on a connection, except before a snapshot."""

    epoch: int
    """Names this numbering: another one (the worker is a new process) counts from the start."""
    sequence: int
    payload: bytes
    """The batch as `penstock.kv.events.encode_batch` makes it."""
    snapshot: bool = False
    """The requested events are not known any more: this tells of all blocks that can be hit, as of
    `sequence`. It opens with `AllBlocksCleared`."""
    more: bool = False
    """The snapshot continues in the next message, which has the same number."""


WorkerOrder = LoadAdapter | UnloadAdapter | KeepAdapters | Sleep | Wake
"""The orders of a gateway to the worker, beside requests."""
ToCell = OpenCell | CellPing
"""For peer cells alone (protocol/cells.py)."""
ToWorker = Submit | AbortRequest | Drain | Ping | SubscribeKVEvents | Proof | WorkerOrder | ToCell
Condition = Loading | Ready | WorkerFailed | Asleep
"""How far the worker is."""
FromWorker = (
    Condition
    | Fault
    | StepOutput
    | Stats
    | KVEvents
    | Challenge
    | Welcome
    | WorkerAdapters
    | StaysAwake
    | CellReport
)
"""The arguments of its message; a `Pong` only shows that it lives."""

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker | Pong)


def encode(message: ToWorker | FromWorker | Pong) -> bytes:
    """One message as a whole frame.

    Raises:
        ProtocolError: the message is over `MAX_FRAME_BYTES`; nothing would be able to read it.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the bound of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into frames. Feed it whatever arrived; it keeps the unfinished rest."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Yield the body of every frame that is now complete.

        Raises:
            ProtocolError: a length over `MAX_FRAME_BYTES`; the stream cannot be trusted any more.
        """
        self._buffer += data
        start, end = 0, len(self._buffer)
        try:
            while end - start >= 4:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise ProtocolError(f"the peer announced a frame of {length} bytes")
                if end - start - 4 < length:
                    return
                body = bytes(self._buffer[start + 4 : start + 4 + length])
                start += 4 + length
                yield body
        finally:
            del self._buffer[:start]


def decode_to_worker(body: bytes) -> ToWorker:
    """Read a message that a gateway sent.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        return _to_worker.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a message for a worker: {error}") from error


def decode_from_worker(body: bytes) -> FromWorker | Pong:
    """Read a message that a worker sent.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        return _from_worker.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a message from a worker: {error}") from error

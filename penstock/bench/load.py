"""Drives load at an endpoint, with each request under a stopwatch: a fixed number of callers (closed loop) or
arrivals at a rate (open loop).

Closed loop: each of `concurrency` callers sends its next request when its last one ended. Open loop: requests
are due at seeded Poisson times whatever the server does. Times run from the *intended* send time, so a client
or server that falls behind shows up in the figures instead of thinning out the load (Tene, "How not to
measure latency": coordinated omission).

    intended      first output        last output     end
       |---- TTFT ----|-- ITL -|-- ITL --|-------------|
       |------------------- end to end ----------------|       TPOT = (last - first) / (tokens - 1)

A request is *good* if it ended well and met both promises, TTFT and TPOT; goodput is good requests per
second, also told as their output tokens per second. Samples and their percentiles take bounded memory.
"""

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from penstock import rng
from penstock.bench.client import ApiResponse, Client, EndpointError
from penstock.bench.prompts import Prompt
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.errors import PenstockError
from penstock.policy.admission.admit import Promise
from penstock.protocol.openai import UsageBody
from penstock.protocol.server_answers import ChatEvent, decode_chat_event, error_text, refusal_text
from penstock.protocol.stream import EventReader
from penstock.rng import Stream

SAMPLES_MAX = 1_000_000


@dataclass(slots=True, frozen=True)
class Distribution:
    """Figures of a set of samples; the unit is that of the samples. All zero if there are none."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Samples:
    """Integer samples. Exact up to `bound` of them; beyond that a uniform random subset (reservoir).

    Vitter, "Random sampling with a reservoir", 1985, algorithm R. Count, mean, min and max stay exact.
    """

    def __init__(self, chance: Stream, *, bound: int = SAMPLES_MAX) -> None:
        assert bound > 0
        self._kept, self._bound, self._chance = array("q"), bound, chance
        self._count, self._sum, self._min, self._max = 0, 0, 0, 0

    def __len__(self) -> int:
        return self._count

    def add(self, value: int) -> None:
        """Take one sample."""
        self._min = value if self._count == 0 else min(self._min, value)
        self._max = value if self._count == 0 else max(self._max, value)
        self._count += 1
        self._sum += value
        if self._count <= self._bound:
            self._kept.append(value)
        elif (place := self._chance.randrange(self._count)) < self._bound:
            self._kept[place] = value

    def summary(self, *, divisor: float = 1.0) -> Distribution:
        """The distribution, each sample divided by `divisor` (a change of unit)."""
        if not self._count:
            return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(self._kept)
        p50, p90, p95, p99 = (percentile(ordered, share) / divisor for share in (0.50, 0.90, 0.95, 0.99))
        mean = self._sum / self._count / divisor
        return Distribution(self._count, mean, self._min / divisor, p50, p90, p95, p99, self._max / divisor)


def percentile(ordered: list[int], share: float) -> float:
    """The sample quantile at `share`, linear between neighbours (Hyndman and Fan 1996, type 7; numpy's
    default).
    """
    assert ordered
    assert 0.0 <= share <= 1.0
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


ERROR_KINDS_MAX = 32
ERROR_CHARS_MAX = 200
NO_PROMISE = Promise()


@dataclass(slots=True)
class LoadTally:
    """Everything that one load level counts. All times in nanoseconds."""

    seed: int
    promise: Promise = NO_PROMISE
    """The promise that a good request keeps."""
    sent: int = 0
    in_flight: int = 0
    ok: int = 0
    failed: int = 0
    good: int = 0
    """Of `ok`, those that kept the promise."""
    good_tokens: int = 0
    """Output tokens of those."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tokens_from_usage: bool = True
    """False once a server did not report usage: output tokens are then counted as chunks."""
    errors: dict[str, int] = field(default_factory=dict[str, int])
    ttft: Samples = field(init=False)
    tpot: Samples = field(init=False)
    itl: Samples = field(init=False)
    e2e: Samples = field(init=False)
    send_delay: Samples = field(init=False)

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "itl", "e2e", "send_delay"):
            setattr(self, name, Samples(rng.stream(self.seed, f"reservoir/{name}")))

    @property
    def ended(self) -> int:
        """Requests that are over, well or not."""
        return self.ok + self.failed

    def fail(self, why: str) -> None:
        """Count a failed request under its reason; rare reasons beyond the bound share one entry."""
        self.failed += 1
        why = " ".join(why.split())[:ERROR_CHARS_MAX] or "unknown error"
        if why not in self.errors and len(self.errors) >= ERROR_KINDS_MAX:
            why = "other"
        self.errors[why] = self.errors.get(why, 0) + 1


class Stopwatch:
    """Reads one streamed answer as it arrives and stamps its tokens. A `BodySink`."""

    __slots__ = (
        "_clock",
        "_done",
        "_first_ns",
        "_intended_ns",
        "_last_ns",
        "_num_chunks",
        "_reader",
        "_tally",
        "_trouble",
        "_usage",
    )

    def __init__(self, tally: LoadTally, clock: Clock, intended_ns: int) -> None:
        self._tally, self._clock, self._intended_ns = tally, clock, intended_ns
        self._reader = EventReader()
        self._first_ns = self._last_ns = 0
        self._num_chunks = 0
        self._usage: UsageBody | None = None
        self._done = False
        self._trouble = ""

    def on_bytes(self, data: bytes) -> None:
        """Stamp what arrived: one clock read for all events in it."""
        now_ns = self._clock.now_ns()
        try:
            for event in self._reader.feed(data):
                if event == b"[DONE]":
                    self._done = True
                else:
                    self._take(decode_chat_event(event), now_ns)
        except (ValueError, msgspec.DecodeError) as error:
            self._trouble = f"unreadable stream: {error}"

    def _take(self, chunk: ChatEvent, now_ns: int) -> None:
        if chunk.error is not None:
            self._trouble = f"error in the stream: {error_text(chunk.error)}"
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._done = True
            if choice.is_output:
                self._stamp(now_ns)

    def _stamp(self, now_ns: int) -> None:
        self._num_chunks += 1
        if self._num_chunks == 1:
            self._first_ns = now_ns
        else:
            self._tally.itl.add(now_ns - self._last_ns)
        self._last_ns = now_ns

    def settle(self, response: ApiResponse) -> bool:
        """Book the finished request, and say whether it went well."""
        tally, end_ns = self._tally, self._clock.now_ns()
        trouble = self._trouble or ("" if self._done else "the stream ended early")
        if response.status != 200:
            trouble = f"HTTP {response.status}: {refusal_text(response.status, response.body)}"
        if trouble:
            tally.fail(trouble)
            return False
        tally.ok += 1
        tally.e2e.add(end_ns - self._intended_ns)
        num_tokens = self._count_tokens()
        ttft_ns = (self._first_ns if self._num_chunks else end_ns) - self._intended_ns
        tpot_ns = 0
        if self._num_chunks:
            tally.ttft.add(ttft_ns)
        if num_tokens > 1 and self._num_chunks > 1:
            tpot_ns = (self._last_ns - self._first_ns) // (num_tokens - 1)
            tally.tpot.add(tpot_ns)
        if tally.promise.is_kept(ttft_ns, tpot_ns):
            tally.good += 1
            tally.good_tokens += num_tokens
        return True

    def _count_tokens(self) -> int:
        tally, usage = self._tally, self._usage
        if usage is None:
            tally.tokens_from_usage = False
            tally.output_tokens += self._num_chunks
            return self._num_chunks
        num_tokens = usage.completion_tokens or 0
        tally.prompt_tokens += usage.prompt_tokens or 0
        tally.cached_tokens += usage.cached_tokens or 0
        tally.output_tokens += num_tokens
        return num_tokens


REFUSED_PAUSE_S = 0.1
"""A closed-loop caller's pause after a failure, so that instant refusals do not become a spin."""


class ProbeRefused(PenstockError):
    """The endpoint refuses even a small request: no use in loading it."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestShape:
    """The shape that every request of a run has in common."""

    model: str
    output_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True
    """Ask for exactly `output_tokens` (a field that most engines know and OpenAI's own API refuses)."""

    def body(self, prompt: Prompt, *, stream: bool = True) -> bytes:
        """The JSON of one request."""
        fields: dict[str, object] = {
            "model": self.model,
            "messages": prompt.messages,
            "max_tokens": prompt.max_tokens or self.output_tokens,
            "temperature": self.temperature,
            "stream": stream,
        }
        if stream:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields)


@dataclass(slots=True, frozen=True, kw_only=True)
class Level:
    """One load level. Exactly one of `concurrency` and `rate` is set."""

    name: str
    requests_max: int
    duration_s: float | None = None
    """Send nothing new after this long; what runs may end."""
    concurrency: int | None = None
    rate: float | None = None
    """Mean arrivals per second (Poisson)."""
    in_flight_max: int = 10_000
    """Open loop: arrivals beyond this many open requests wait, and their waiting counts."""


class LoadRun:
    """Runs one level. `tally` may be read while it runs."""

    def __init__(
        self,
        client: Client,
        shape: RequestShape,
        level: Level,
        *,
        seed: int,
        clock: Clock,
        promise: Promise = NO_PROMISE,
    ) -> None:
        assert (level.concurrency is None) != (level.rate is None)
        self._client, self._shape, self._level = client, shape, level
        self._seed, self._clock = seed, clock
        self.tally = LoadTally(seed, promise)
        self.started_ns = 0
        self.ended_ns = 0

    async def run(self, prompts: Iterator[Prompt]) -> None:
        """Send until requests, prompts or time run out, and wait for every answer.

        Cancelling stops at once; `tally` then holds what was measured so far.
        """
        self.started_ns = self._clock.now_ns()
        try:
            if self._level.rate is None:
                await self._closed(prompts)
            else:
                await self._open(prompts, self._level.rate)
        finally:
            self.ended_ns = self._clock.now_ns()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to the end of the last answer, or to now."""
        return ((self.ended_ns or self._clock.now_ns()) - self.started_ns) / NS_PER_S

    def _may_send(self) -> bool:
        duration_s = self._level.duration_s
        in_time = duration_s is None or self._clock.now_ns() - self.started_ns < duration_s * NS_PER_S
        return in_time and self.tally.sent < self._level.requests_max

    async def _closed(self, prompts: Iterator[Prompt]) -> None:
        async def caller() -> None:
            while self._may_send() and (prompt := next(prompts, None)) is not None:
                if not await self._one(prompt, self._clock.now_ns()):
                    await sleep(REFUSED_PAUSE_S)

        async with asyncio.TaskGroup() as callers:
            for _ in range(self._level.concurrency or 1):
                callers.create_task(caller())

    async def _open(self, prompts: Iterator[Prompt], rate: float) -> None:
        chance = rng.stream(self._seed, f"arrivals/{self._level.name}")
        room = asyncio.Semaphore(self._level.in_flight_max)
        due_ns = self.started_ns

        async def one(prompt: Prompt, intended_ns: int) -> None:
            try:
                await self._one(prompt, intended_ns)
            finally:
                room.release()

        async with asyncio.TaskGroup() as requests:
            while self._may_send() and (prompt := next(prompts, None)) is not None:
                due_ns += round(chance.expovariate(rate) * NS_PER_S)
                await sleep(max(0, due_ns - self._clock.now_ns()) / NS_PER_S)
                if not self._may_send():
                    return  # The time ran out while waiting for this arrival.
                await room.acquire()
                requests.create_task(one(prompt, due_ns))

    async def _one(self, prompt: Prompt, intended_ns: int) -> bool:
        tally = self.tally
        stopwatch = Stopwatch(tally, self._clock, intended_ns)
        tally.sent += 1
        tally.in_flight += 1
        tally.send_delay.add(max(0, self._clock.now_ns() - intended_ns))
        try:
            response = await self._client.post("/chat/completions", self._shape.body(prompt), stopwatch)
        except EndpointError as error:
            tally.fail(str(error))
            return False
        else:
            return stopwatch.settle(response)
        finally:
            tally.in_flight -= 1


async def probe(client: Client, shape: RequestShape, prompt: Prompt) -> UsageBody:
    """One small request outside the measurement; its usage calibrates the prompts.

    Raises:
        ProbeFailed: it was refused, or the answer has no `usage`.
        EndpointError: no answer.
    """
    response = await client.post("/chat/completions", shape.body(prompt, stream=False))
    if response.status != 200:
        raise ProbeRefused(f"HTTP {response.status}: {refusal_text(response.status, response.body)}")
    try:
        usage = decode_chat_event(response.body).usage
    except msgspec.DecodeError as error:
        raise ProbeRefused(f"the answer is not a chat completion: {error}") from error
    if usage is None or (usage.prompt_tokens or 0) < 1:
        raise ProbeRefused("the answer has no usage, so prompts cannot be sized; use --dataset")
    return usage

"""Drives load at an endpoint: a fixed number of callers (closed loop) or arrivals at a rate (open loop).

Closed loop: each of `concurrency` callers sends its next request when its last one ended. Open loop:
requests are due at seeded Poisson times whatever the server does, and are timed from when they were
due. What is sent, and how it is timed, is the business of `prompts` and `measure`.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from penstock import rng
from penstock.bench.client import Client, EndpointError
from penstock.bench.measure import NO_PROMISE, LoadTally, Stopwatch
from penstock.bench.prompts import Prompt
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.errors import PenstockError
from penstock.policy.admission.admit import Promise
from penstock.protocol.openai import UsageBody
from penstock.protocol.server_answers import decode_chat_event, refusal_text

REFUSED_PAUSE_S = 0.1
"""What a closed-loop caller waits after a failure, so that instant refusals do not become a spin."""


class ProbeRefused(PenstockError):
    """The endpoint refuses even a small request: no use in loading it."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestShape:
    """What every request of a run has in common."""

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

"""Open-loop load of many tenants: what is offered, what became of each request, and how late it was sent.

Arrivals are Poisson times of a seed and do not depend on answers. A request is of one tenant (in a band) and
one length class. The load counts *first attempts*: a client that is refused comes back when `Retry-After`
says so, at most `OBEYED_MAX` times.

Each attempt is timed from when it was due, so a generator that falls behind shows up in the figures;
`late_ns` says by how much.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from penstock import rng
from penstock.bench.client import ApiResponse, Client, EndpointError
from penstock.bench.prompts import sentence
from penstock.clock import NS_PER_S, Clock, sleep
from penstock.protocol.openai import UsageBody
from penstock.protocol.server_answers import decode_chat_event, error_text
from penstock.protocol.stream import EventReader

OBEYED_MAX = 3
OPEN_MAX = 4000
"""Requests open at once; an arrival beyond it is left out and counted."""


@dataclass(slots=True, frozen=True)
class Kind:
    """A length class."""

    name: str
    words: int
    """Of the prompt."""
    output_tokens: int
    share: float


@dataclass(slots=True, frozen=True)
class Sender:
    """A tenant: one key, in one band."""

    name: str
    band: str
    share: float


@dataclass(slots=True)
class Asked:
    """One request and its last attempt. Times in nanoseconds."""

    sender: Sender
    kind: Kind
    first_due_ns: int
    due_ns: int = 0
    """Of the last attempt."""
    attempts: int = 0
    late_ns: int = 0
    """How late its attempts were sent, at worst."""
    status: int = 0
    refusals: int = 0
    reported: int = 0
    """Of the refusals, those with a `Retry-After`."""
    retry_after_s: float = 0.0
    """The time named by the first one."""
    first_ns: int = 0
    last_ns: int = 0
    end_ns: int = 0
    tokens: int = 0
    trouble: str = ""
    is_cut: bool = False
    """It was open when the measurement ended."""

    @property
    def ok(self) -> bool:
        """Whether it was answered to its end."""
        return self.status == 200 and not self.trouble and not self.is_cut and self.end_ns > 0

    @property
    def ttft_ns(self) -> int:
        """To the first token, from when the attempt that was let in was due."""
        return self.first_ns - self.due_ns

    @property
    def tpot_ns(self) -> int:
        """Per token after the first; 0 for a single one."""
        return (self.last_ns - self.first_ns) // (self.tokens - 1) if self.tokens > 1 else 0


class _Answer:
    """Reads one streamed answer. A `BodySink`."""

    __slots__ = ("_asked", "_clock", "_reader", "done", "usage")

    def __init__(self, asked: Asked, clock: Clock) -> None:
        self._asked, self._clock, self._reader = asked, clock, EventReader()
        self.usage: UsageBody | None = None
        self.done = False

    def on_bytes(self, data: bytes) -> None:
        """See `BodySink`."""
        now_ns, asked = self._clock.now_ns(), self._asked
        for event in self._reader.feed(data):
            if event == b"[DONE]":
                self.done = True
                continue
            chunk = decode_chat_event(event)
            if chunk.error is not None:
                asked.trouble = error_text(chunk.error)
            self.usage = chunk.usage or self.usage
            if any(choice.is_output for choice in chunk.choices):
                asked.first_ns = asked.first_ns or now_ns
                asked.last_ns = now_ns


@dataclass(slots=True)
class OpenLoad:
    """One stretch of load. `asked` and `left_out` may be read at any time."""

    clients: dict[str, Client]
    """By sender."""
    model: str
    senders: tuple[Sender, ...]
    kinds: tuple[Kind, ...]
    clock: Clock
    asked: list[Asked] = field(default_factory=list[Asked])
    left_out: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    """When the last arrival was due."""
    _open: set["asyncio.Task[None]"] = field(default_factory=set["asyncio.Task[None]"])

    async def run(self, name: str, *, seed: int, rate: float, seconds: float, drain_s: float) -> None:
        """Offer `rate` requests per second for so long, then wait until what was offered has ended: at most
        `drain_s`.
        """
        self.started_ns = self.clock.now_ns()
        self.ended_ns = self.started_ns + round(seconds * NS_PER_S)
        number = 0
        try:
            for due_ns, sender, kind in self._arrivals(name, seed, rate):
                if (wait_ns := due_ns - self.clock.now_ns()) > 0:
                    await sleep(wait_ns / NS_PER_S)
                number += 1
                if len(self._open) >= OPEN_MAX:
                    self.left_out += 1
                    continue
                self._send(self.body(f"{name} {number}", kind, seed), sender, kind, due_ns)
            if self._open:
                await asyncio.wait(self._open, timeout=drain_s)
        finally:
            await self._cut()

    async def one_by_one(self, name: str, kind: Kind, count: int, *, seed: int) -> list[Asked]:
        """The same requests, each alone."""
        sender = self.senders[0]
        for number in range(count):
            self.started_ns = self.ended_ns = self.clock.now_ns()
            asked = Asked(sender, kind, self.started_ns)
            await self.attempt(asked, self.body(f"{name} {number}", kind, seed), self.started_ns)
            self.asked.append(asked)
        return self.asked

    def body(self, name: str, kind: Kind, seed: int) -> bytes:
        """A request whose prompt begins with its own name, so that no prefix is shared."""
        text = f"{name} {sentence(seed, name, kind.words)}"
        fields = {
            "model": self.model, "messages": [{"role": "user", "content": text}],
            "max_tokens": kind.output_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        return msgspec.json.encode(fields)

    def _arrivals(self, name: str, seed: int, rate: float) -> Iterator[tuple[int, Sender, Kind]]:
        chance, due_ns = rng.stream(seed, f"arrivals/{name}"), self.started_ns
        by_sender = [each.share for each in self.senders]
        by_kind = [each.share for each in self.kinds]
        while (due_ns := due_ns + round(chance.expovariate(rate) * NS_PER_S)) < self.ended_ns:
            yield due_ns, chance.choices(self.senders, by_sender)[0], chance.choices(self.kinds, by_kind)[0]

    def _send(self, body: bytes, sender: Sender, kind: Kind, due_ns: int) -> None:
        asked = Asked(sender, kind, due_ns)
        self.asked.append(asked)
        task = asyncio.create_task(self._ask(asked, body))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _ask(self, asked: Asked, body: bytes) -> None:
        due_ns = asked.first_due_ns
        while True:
            response = await self.attempt(asked, body, due_ns)
            if response is None or response.status not in {429, 503}:
                return
            asked.refusals += 1
            asked.reported += response.retry_after_s > 0
            asked.retry_after_s = asked.retry_after_s or response.retry_after_s
            if asked.attempts > OBEYED_MAX:
                return
            pause_s = response.retry_after_s
            due_ns = self.clock.now_ns() + round(pause_s * NS_PER_S)
            if not pause_s or due_ns >= self.ended_ns:
                return  # The load is over before it may come back.
            await sleep(pause_s)

    async def attempt(self, asked: Asked, body: bytes, due_ns: int) -> ApiResponse | None:
        """Send a request, due at this time, and read its answer into `asked`. None: there was none."""
        answer = _Answer(asked, self.clock)
        asked.due_ns, asked.attempts, asked.status = due_ns, asked.attempts + 1, 0
        asked.late_ns = max(asked.late_ns, self.clock.now_ns() - due_ns)
        try:
            response = await self.clients[asked.sender.name].post("/chat/completions", body, answer)
        except EndpointError as error:
            asked.trouble, asked.end_ns = str(error), self.clock.now_ns()
            return None
        except asyncio.CancelledError:
            asked.is_cut = True
            raise
        asked.status, asked.end_ns = response.status, self.clock.now_ns()
        asked.tokens = (answer.usage.completion_tokens or 0) if answer.usage is not None else 0
        if response.status == 200 and not answer.done:
            asked.trouble = asked.trouble or "the stream ended early"
        return response

    async def _cut(self) -> None:
        """Leave whatever is open still."""
        left = list(self._open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

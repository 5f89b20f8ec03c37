"""Traffic for the simulator: what arrives when, drawn from named streams of one seed. Open loop, always.

A workload is a list of sources; each yields `SimRequest`s in order of time and `merged` brings them into one
stream, lazily, so that a million requests need no list. No client waits for an answer here: the next turn of
a conversation is due after the time that reading an answer of its length and thinking takes, whatever the
servers did (an overloaded server must not thin out its own load).

Text is named, never written: see `sim/traffic/prompts.py`.

When requests come: arrival processes, each a sequence of seconds drawn from one random stream.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, cos, pi
from typing import Protocol

from msgspec import structs

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.policy.flow import Outcome
from penstock.sim.traffic.prompts import RETRY_MARK, RequestRecord, Segment, SimRequest


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """Rising times from 0 to before `seconds`."""
        ...


@dataclass(slots=True, frozen=True)
class Poisson:
    """Independent arrivals at a steady rate."""

    per_s: float

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`."""
        at = stream.expovariate(self.per_s) if self.per_s > 0 else seconds
        while at < seconds:
            yield at
            at += stream.expovariate(self.per_s)


@dataclass(slots=True, frozen=True)
class Gamma:
    """Gaps from a gamma distribution: a coefficient of variation above 1 is bursty, as recorded services
    are.
    """

    per_s: float
    cv: float = 2.0

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`."""
        shape = 1 / self.cv**2
        scale = 1 / (self.per_s * shape) if self.per_s > 0 else seconds
        at = stream.gammavariate(shape, scale) if self.per_s > 0 else seconds
        while at < seconds:
            yield at
            at += stream.gammavariate(shape, scale)


@dataclass(slots=True, frozen=True)
class Diurnal:
    """A day's rhythm: a cosine from `low` to `high`, with its trough at time 0."""

    low_per_s: float
    high_per_s: float
    day_s: float = 86_400.0

    def rate(self, at_s: float) -> float:
        """Arrivals per second at that time."""
        return self.low_per_s + (self.high_per_s - self.low_per_s) * (1 - cos(2 * pi * at_s / self.day_s)) / 2

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`. Thinning (Lewis and Shedler, 1979)."""
        peak = max(self.low_per_s, self.high_per_s)
        for at in Poisson(peak).times(stream, seconds):
            if stream.random() * peak < self.rate(at):
                yield at


@dataclass(slots=True, frozen=True)
class Spike:
    """A steady rate that is `factor` times as high between two moments: what becomes viral comes from one
    second to the next.
    """

    per_s: float
    factor: float = 20.0
    begins_s: float = 60.0
    ends_s: float = 120.0

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`."""
        for begins, ends, rate in (
            (0.0, self.begins_s, self.per_s),
            (self.begins_s, self.ends_s, self.per_s * self.factor),
            (self.ends_s, seconds, self.per_s),
        ):
            for at in Poisson(rate).times(stream, max(0.0, min(ends, seconds) - begins)):
                yield begins + at


@dataclass(slots=True, frozen=True)
class Stampede:
    """`count` requests within `within_s` from `at_s` on: clients that all come back at once."""

    count: int
    at_s: float
    within_s: float = 1.0

    def times(self, stream: rng.Stream, seconds: float) -> Iterator[float]:
        """See `Arrivals`."""
        yield from (
            at
            for at in sorted(self.at_s + stream.random() * self.within_s for _ in range(self.count))
            if at < seconds
        )


SOURCE_CONTENTS = 1 << 40
"""Contents that one source may use; the next source's begin after them."""


class TrafficSource(Protocol):
    """Something that sends requests."""

    @property
    def name(self) -> str:
        """Names its random streams: two sources of one workload must differ."""
        ...

    def requests(self, seed: int, first: int, seconds: float) -> Iterator[SimRequest]:
        """Its requests of the first `seconds`, by time; its contents begin at `first`.

        Same seed, same requests.
        """
        ...


@dataclass(slots=True, frozen=True)
class LengthDistribution:
    """A length in tokens: log-normal around its median, as prompts and answers of real services are."""

    median: int
    sigma: float = 0.8
    """Of the logarithm; 0: always the median."""
    minimum: int = 1
    maximum: int = 32_768

    def draw(self, stream: rng.Stream) -> int:
        """One length."""
        drawn = self.median * stream.lognormvariate(0.0, self.sigma) if self.sigma else self.median
        return min(self.maximum, max(self.minimum, round(drawn)))


@dataclass(slots=True, frozen=True, kw_only=True)
class Callers:
    """The senders: tenants by share, their model, and the adapters that they ask for."""

    model: str = "model"
    tenants: tuple[tuple[str, float], ...] = (("t0", 1.0),)
    """(tenant, share of the requests)."""
    adapters: int = 0
    """LoRA adapters; the k-th most wanted is asked for in proportion to 1 / k^zipf."""
    zipf: float = 1.0
    band: str = ""
    patience_s: float = 0.0
    retries: int = 0
    """How often a client comes again after it was refused."""
    retry_s: float = 0.0
    """After how long; 0: when it was told to."""

    def tenant(self, stream: rng.Stream) -> str:
        """One of them, by share."""
        if len(self.tenants) == 1:
            return self.tenants[0][0]
        names, shares = zip(*self.tenants, strict=True)
        return str(stream.choices(names, shares)[0])

    def adapter(self, stream: rng.Stream) -> str:
        """One adapter's name; empty without adapters."""
        if not self.adapters:
            return ""
        weights = [1 / (k + 1) ** self.zipf for k in range(self.adapters)]
        return f"lora-{stream.choices(range(self.adapters), weights)[0]}"

    def request(
        self, name: str, at_s: float, prompt: tuple[Segment, ...], output: int, *,
        tenant: str, adapter: str = "", session: str = "", answer: int = 0,
    ) -> SimRequest:  # fmt: skip
        """One request of theirs."""
        return SimRequest(
            id=name, at_ns=round(at_s * NS_PER_S), tenant=tenant, model=self.model, prompt=prompt,
            answer=answer, output_tokens=output, session=session, adapter=adapter, band=self.band,
            patience_ns=round(self.patience_s * NS_PER_S), retries=self.retries,
            retry_ns=round(self.retry_s * NS_PER_S),
        )  # fmt: skip


def even(count: int, prefix: str = "t") -> tuple[tuple[str, float], ...]:
    """`count` tenants of equal share."""
    return tuple((f"{prefix}{i}", 1.0) for i in range(count))


class _Contents:
    """Hands out numbers of contents."""

    def __init__(self, first: int) -> None:
        self._next, self._shared = first + 1, dict[str, int]()  # 0 is no content.

    def fresh(self) -> int:
        """One that nothing has."""
        self._next += 1
        return self._next - 1

    def system(self, owner: str, tokens: int) -> tuple[Segment, ...]:
        """An owner's system prompt: the same at every call; nothing if it has no tokens."""
        if not tokens:
            return ()
        if owner not in self._shared:
            self._shared[owner] = self.fresh()
        return (Segment(self._shared[owner], tokens),)


@dataclass(slots=True, frozen=True, kw_only=True)
class Chat:
    """Single questions, each behind its tenant's system prompt (and adapter)."""

    name: str = "chat"
    arrivals: Arrivals = field(default_factory=lambda: Poisson(10.0))
    callers: Callers = Callers()
    prompt: LengthDistribution = LengthDistribution(500)
    """Of the question, the system prompt aside."""
    output: LengthDistribution = LengthDistribution(200, maximum=4096)
    system_tokens: int = 0

    def requests(self, seed: int, first: int, seconds: float) -> Iterator[SimRequest]:
        """See `TrafficSource`."""
        draw, contents = rng.stream(seed, f"workload/{self.name}"), _Contents(first)
        for number, at_s in enumerate(
            self.arrivals.times(rng.stream(seed, f"arrivals/{self.name}"), seconds)
        ):
            tenant, adapter = self.callers.tenant(draw), self.callers.adapter(draw)
            own, output = self.prompt.draw(draw), self.output.draw(draw)
            prompt = (
                *contents.system(f"{tenant}/{adapter}", self.system_tokens),
                Segment(contents.fresh(), own),
            )
            yield self.callers.request(
                f"{self.name}-{number}", at_s, prompt, output, tenant=tenant, adapter=adapter
            )


@dataclass(slots=True, frozen=True, kw_only=True)
class Conversations:
    """Sessions of several turns; every prompt repeats all that was said before.

    Agents are the same with tools for people: long system prompts, short pauses, many turns (`agents`).
    """

    name: str = "conversations"
    arrivals: Arrivals = field(default_factory=lambda: Poisson(1.0))
    """Of sessions."""
    callers: Callers = Callers()
    system_tokens: int = 1000
    turns: float = 4.0
    """Mean number (geometric), at least 1."""
    turns_max: int = 64
    message: LengthDistribution = LengthDistribution(80, maximum=8192)
    """The tokens that every turn adds: a question, or a tool's result."""
    output: LengthDistribution = LengthDistribution(200, maximum=4096)
    think_s: float = 15.0
    """Mean pause after an answer (exponential)."""
    answer_s_per_token: float = 0.03
    """How fast the client takes the answer to come: open loop, so the real answer's end counts nothing."""
    context_max: int = 32_768

    def requests(self, seed: int, first: int, seconds: float) -> Iterator[SimRequest]:
        """See `TrafficSource`."""
        draw, contents = rng.stream(seed, f"workload/{self.name}"), _Contents(first)
        pending: list[tuple[float, int, SimRequest]] = []
        order = itertools.count()
        for number, at_s in enumerate(
            self.arrivals.times(rng.stream(seed, f"arrivals/{self.name}"), seconds)
        ):
            while pending and pending[0][0] <= at_s:
                yield heapq.heappop(pending)[2]
            for turn_s, request in self._session(draw, contents, f"{self.name}-{number}", at_s):
                if turn_s < seconds:
                    heapq.heappush(pending, (turn_s, next(order), request))
        while pending:
            yield heapq.heappop(pending)[2]

    def _session(
        self, draw: rng.Stream, contents: _Contents, session: str, at_s: float
    ) -> Iterator[tuple[float, SimRequest]]:
        tenant, adapter = self.callers.tenant(draw), self.callers.adapter(draw)
        said = contents.system(f"{tenant}/{adapter}", self.system_tokens)
        length = self.system_tokens
        for turn in range(self.turns_max):
            message, output, answer = self.message.draw(draw), self.output.draw(draw), contents.fresh()
            length += message + output
            if length > self.context_max:
                return
            said = (*said, Segment(contents.fresh(), message))
            yield at_s, self.callers.request(
                f"{session}.{turn}", at_s, said, output,
                tenant=tenant, adapter=adapter, session=session, answer=answer,
            )  # fmt: skip
            said = (*said, Segment(answer, output))
            at_s += output * self.answer_s_per_token + draw.expovariate(1 / self.think_s)
            if draw.random() < 1 / self.turns:
                return


def agents(**changes: object) -> Conversations:
    """Agent loops: a long prompt of tools, a call every few seconds, tools' results of all sizes."""
    values: dict[str, object] = {
        "name": "agents", "system_tokens": 12_000, "turns": 15.0,
        "message": LengthDistribution(600, 1.2, maximum=16_384),
        "output": LengthDistribution(120, 0.9, maximum=2048), "think_s": 3.0, "context_max": 100_000,
    }  # fmt: skip
    return Conversations(**(values | changes))  # pyright: ignore[reportArgumentType] # Checked by its tests.


def merged(sources: Sequence[TrafficSource], seed: int, seconds: float) -> Iterator[SimRequest]:
    """All sources' requests by time; of two at one time the earlier source's first."""
    names = [source.name for source in sources]
    assert len(set(names)) == len(names), f"two sources have one name: {names}"
    streams: list[Iterable[SimRequest]] = [
        source.requests(seed, index * SOURCE_CONTENTS, seconds) for index, source in enumerate(sources)
    ]
    return heapq.merge(*streams, key=lambda request: request.at_ns)


# Clients that come again after they were refused: when they were told to, or whenever they like.

_NO_RETRY_AFTER_NS = NS_PER_S
_REFUSED = (Outcome.REJECTED, Outcome.EVICTED)


class Comebacks:
    """Remembers requests whose clients would come again, while they last."""

    def __init__(self, ask_at: Callable[[int, SimRequest], None]) -> None:
        """`ask_at` lets a request come at a time."""
        self._ask_at = ask_at
        self._asked: dict[str, SimRequest] = {}

    def asked(self, request: SimRequest) -> None:
        """It comes."""
        if request.retries:
            self._asked[request.id] = request

    def ended(self, record: RequestRecord) -> None:
        """It has ended, and may come again. A header tells whole seconds."""
        request = self._asked.pop(record.id, None)
        if request is None or record.outcome not in _REFUSED or record.first_ns >= 0:
            return
        retry_after_ns = ceil(record.retry_after_ns / NS_PER_S) * NS_PER_S or _NO_RETRY_AFTER_NS
        at_ns = record.end_ns + (request.retry_ns or retry_after_ns)
        again = structs.replace(
            request, id=request.id + RETRY_MARK, at_ns=at_ns, retries=request.retries - 1, cancel_at_ns=0
        )
        self._ask_at(at_ns, again)

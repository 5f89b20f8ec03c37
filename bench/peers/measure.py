"""The measurements of one server: load levels, a shared prefix, and a long prompt that arrives among
streams.
"""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from bench.peers.figures import GAPS, LEVEL, PREFIX
from penstock.bench.client import ApiAddress, ApiResponse, Client
from penstock.bench.load import Level as LoadLevel
from penstock.bench.load import LoadRun, RequestShape, percentile, probe
from penstock.bench.prompts import Prompt, PromptPlan, made, sentence
from penstock.bench.prompts import probe as probe_prompt
from penstock.bench.report import LevelReport, level_report
from penstock.clock import NS_PER_MS, SystemClock, sleep
from penstock.protocol.server_answers import decode_chat_event
from penstock.protocol.stream import EventReader

OUTPUT_TOKENS, PROMPT_TOKENS, PREFIX_TOKENS = 64, 110, 1500
LONG_WORDS = 1000
PREFIX_REPEATS = 3
STREAMS = 8
QUIET_TOKENS = 24
"""The tokens that each stream receives before the long prompt is sent: the measure of undisturbed gaps."""
STREAM_TOKENS_MAX = 1500
TOGETHER_NS = NS_PER_MS // 2
"""Pieces closer than this came from one step, or waited together: between them there is no gap to speak
of."""
STREAM_WAIT_S, POLL_S = 300.0, 0.005
PROBE_WORDS = (8, 72)
Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of one server."""

    seed: int
    levels: dict[int, int]
    """How many requests to send, by callers."""
    has_long: bool
    """A shared prefix, and a long prompt that arrives."""


class Bench:
    """Measures the server at `url`, whose model is called `model`."""

    def __init__(self, url: str, model: str, plan: Plan, tag: str) -> None:
        self._client = Client(ApiAddress.parse(url))
        self._clock = SystemClock()
        self._plan, self._tag = plan, tag
        self._shape = RequestShape(model=model, output_tokens=OUTPUT_TOKENS)
        self._per_word, self._overhead = 1.0, 0.0

    async def calibrate(self) -> None:
        """Two probes tell tokens per word and what the chat template adds; then every path is warmed up."""
        short, counts = RequestShape(model=self._shape.model, output_tokens=1), list[int]()
        for words in PROBE_WORDS:
            prompt = probe_prompt(self._plan.seed, f"{self._tag} probe", words)
            counts.append((await probe(self._client, short, prompt)).prompt_tokens)
        self._per_word = max(0.1, (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0]))
        self._overhead = max(0.0, counts[0] - self._per_word * PROBE_WORDS[0])
        for callers in self._plan.levels:
            await self._load(f"warm{callers}", callers, callers, output_tokens=8)

    async def level(self, callers: int, requests: int) -> tuple[Figures, dict[str, int]]:
        """One closed-loop level: its figures, none if nothing succeeded, and what failed."""
        found = await self._load(f"c{callers}", callers, requests)
        times = (found.ttft_ms.p50, found.ttft_ms.p95, found.tpot_ms.p50, found.tpot_ms.p95)
        named = zip(LEVEL, (found.output_tokens_per_s, *times), strict=True)
        figures = {f"c={callers} {name}": round(value, 3) for name, value in named}
        return figures if found.requests_ok else {}, found.errors

    async def prefix(self) -> Figures:
        """TTFT of a prompt whose first tokens nobody has sent before, then of one that shares them."""
        times: dict[str, list[float]] = {"miss": [], "hit": []}
        words = round(PREFIX_TOKENS / self._per_word)
        for number in range(PREFIX_REPEATS):
            shared = f"{self._tag} {number} " + sentence(self._plan.seed, f"{self._tag}/{number}", words)
            for kind, ending in (("miss", "water river stone"), ("hit", "light house garden")):
                sink, sent_ns = Gaps(self._clock), self._clock.now_ns()
                await self._stream(f"{shared} {ending}", 4, sink)
                times[kind].append((sink.stamps[0] - sent_ns) / NS_PER_MS)
        found = {kind: statistics.median(each) for kind, each in times.items()}
        return found | {PREFIX: found["miss"] / found["hit"]}

    async def arrival(self) -> Figures:
        """Gaps between the tokens of running streams before a long prompt arrives and until its first
        token.
        """
        sinks, prompts = [Gaps(self._clock) for _ in range(STREAMS)], self._prompts("arrival")
        texts = [str(next(prompts).messages[0]["content"]) for _ in sinks]
        async with asyncio.timeout(STREAM_WAIT_S):
            tasks = [
                asyncio.ensure_future(self._stream(text, STREAM_TOKENS_MAX, sink))
                for text, sink in zip(texts, sinks, strict=True)
            ]
            try:
                await _until(lambda: all(len(sink.stamps) >= QUIET_TOKENS for sink in sinks), tasks)
                sent_ns, long = self._clock.now_ns(), Gaps(self._clock)
                text = f"{self._tag} long " + sentence(self._plan.seed, f"{self._tag}/long", LONG_WORDS)
                await self._stream(text, 1, long)
                # A stream that was held up all the while has its long gap only once its next token is there.
                await _until(lambda: all(sink.stamps[-1] > long.stamps[0] for sink in sinks), tasks)
            finally:
                for task in tasks:
                    task.cancel()  # Closes its connection: servers stop generating for it.
                await asyncio.gather(*tasks, return_exceptions=True)
        before, during = gaps_around(sinks, sent_ns, long.stamps[0])
        found = {
            f"gap {name} {when}": percentile(gaps, share) / NS_PER_MS
            for when, gaps in (("before", before), ("during", during))
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        found |= {"gap most": during[-1] / NS_PER_MS, "long TTFT": (long.stamps[0] - sent_ns) / NS_PER_MS}
        return found | {GAPS: found["gap p99 during"] / found["gap p50 before"]}

    async def close(self) -> None:
        await self._client.close()

    async def _load(
        self, name: str, callers: int, requests: int, output_tokens: int = OUTPUT_TOKENS
    ) -> LevelReport:
        level = LoadLevel(name=name, requests_max=requests, concurrency=callers)
        shape = replace(self._shape, output_tokens=output_tokens)
        run = LoadRun(self._client, shape, level, seed=self._plan.seed, clock=self._clock)
        await run.run(self._prompts(name))
        return level_report(level, run)

    def _prompts(self, run: str) -> Iterator[Prompt]:
        plan = PromptPlan(
            seed=self._plan.seed, run=f"{self._tag} {run}", prompt_tokens=PROMPT_TOKENS, shared_tokens=0,
            tokens_per_word=self._per_word, overhead_tokens=self._overhead,
        )  # fmt: skip
        return made(plan)

    async def _stream(self, text: str, max_tokens: int, sink: "Gaps") -> ApiResponse:
        prompt = Prompt(({"role": "user", "content": text},), max_tokens)
        response = await self._client.post("/chat/completions", self._shape.body(prompt), sink)
        if response.status != 200 or not sink.stamps:
            raise RuntimeError(f"HTTP {response.status}: {response.body[:200]!r}")
        return response


class Gaps:
    """When each piece of a streamed answer arrived. A `BodySink`."""

    def __init__(self, clock: SystemClock) -> None:
        self._clock, self._reader = clock, EventReader()
        self.stamps: list[int] = []
        """Nanoseconds, one per piece of output; what arrives together is one piece to the reader."""

    def on_bytes(self, data: bytes) -> None:
        now_ns = self._clock.now_ns()
        for event in self._reader.feed(data):
            is_output = event != b"[DONE]" and _has_output(event)
            if is_output and (not self.stamps or now_ns - self.stamps[-1] >= TOGETHER_NS):
                self.stamps.append(now_ns)


def gaps_around(sinks: list[Gaps], sent_ns: int, first_ns: int) -> tuple[list[int], list[int]]:
    """Gaps between one stream's pieces, of all streams, in order of size: before `sent_ns`, and from then to
    `first_ns`.

    A gap that spans the sending or the first token belongs to the second group: the arrival may have made it
    longer. Before the last stream has its first token, gaps are the arrival of streams among each other and
    do not count.
    """
    start_ns = max(sink.stamps[0] for sink in sinks)
    gaps = [pair for sink in sinks for pair in itertools.pairwise(sink.stamps)]
    before = [end - start for start, end in gaps if start >= start_ns and end <= sent_ns]
    during = [end - start for start, end in gaps if end > sent_ns and start < first_ns]
    return sorted(before), sorted(during)


async def _until(reached: Callable[[], bool], streams: list["asyncio.Task[ApiResponse]"]) -> None:
    """Wait for it while the streams run.

    Raises:
        RuntimeError: one of the streams ended first.
    """
    while not reached():
        if any(stream.done() for stream in streams):
            raise RuntimeError("a running stream ended before the long prompt was answered")
        await sleep(POLL_S)


def _has_output(event: bytes) -> bool:
    try:
        return any(choice.is_output for choice in decode_chat_event(event).choices)
    except msgspec.DecodeError:
        return False

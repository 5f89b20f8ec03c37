"""The measurements of one server: load levels by `penstock bench`, a shared prefix, and a long prompt that
arrives among streams.
"""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence

import msgspec

from bench.peers.figures import GAPS, LEVEL, PREFIX
from bench.process import load_report
from penstock.bench.client import ApiAddress, ApiResponse, Client
from penstock.bench.load import RequestShape, percentile
from penstock.bench.prompts import Prompt, sentence
from penstock.clock import NS_PER_MS, Clock, SystemClock, sleep
from penstock.protocol.server_answers import decode_chat_event
from penstock.protocol.stream import EventReader

OUTPUT_TOKENS, PROMPT_TOKENS, WARM_TOKENS = 64, 110, 8
PREFIX_WORDS, LONG_WORDS, STREAM_WORDS = 1500, 1000, 100
"""A word of the load generator is a token of these models."""
PREFIX_REPEATS = 3
STREAMS = 8
QUIET_TOKENS = 24
"""The tokens that each stream receives before the long prompt is sent: the measure of undisturbed gaps."""
STREAM_TOKENS_MAX = 1500
TOGETHER_NS = NS_PER_MS // 2
"""Pieces closer than this came from one step, or waited together: between them there is no gap to speak
of."""
STREAM_WAIT_S, POLL_S = 300.0, 0.005
Figures = dict[str, float]


def level(url: str, callers: int, requests: int, seed: int) -> tuple[Figures, dict[str, int]]:
    """One closed loop, behind a short one of other prompts: its figures, and what failed.

    Raises:
        RuntimeError: nothing succeeded.
    """
    loop = ("--concurrency", str(callers), "--prompt-tokens", str(PROMPT_TOKENS))
    warm, measured = (
        ("--requests", str(number), "--output-tokens", str(tokens), "--seed", str(each))
        for number, tokens, each in ((callers, WARM_TOKENS, seed + 1), (requests, OUTPUT_TOKENS, seed))
    )
    load_report(url, "", *loop, *warm)
    (found,) = load_report(url, "", *loop, *measured)["levels"]
    times = (found[kind][at] for kind in ("ttft_ms", "tpot_ms") for at in ("p50", "p95"))
    named = zip(LEVEL, (found["output_tokens_per_s"], *times), strict=True)
    return {f"c={callers} {name}": round(value, 3) for name, value in named}, found["errors"]


class Gaps:
    """When each piece of a streamed answer arrived. A `BodySink`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._reader = clock, EventReader()
        self.stamps: list[int] = []
        """Nanoseconds, one per piece of output; what arrives together is one piece to the reader."""

    def on_bytes(self, data: bytes) -> None:
        now_ns = self._clock.now_ns()
        for event in self._reader.feed(data):
            is_output = event != b"[DONE]" and _has_output(event)
            if is_output and (not self.stamps or now_ns - self.stamps[-1] >= TOGETHER_NS):
                self.stamps.append(now_ns)


class Streams:
    """Streamed answers of one server, every piece of which is stamped."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._client, self._clock = Client(ApiAddress.parse(url)), SystemClock()
        self._model, self._seed = model, seed

    async def prefix(self) -> Figures:
        """TTFT of a prompt whose first tokens nobody has sent before, then of one that shares them."""
        times: dict[str, list[float]] = {"miss": [], "hit": []}
        for number in range(PREFIX_REPEATS):
            shared = self._text(f"prefix {number}", PREFIX_WORDS)
            for kind, ending in (("miss", "water river stone"), ("hit", "light house garden")):
                sink, sent_ns = Gaps(self._clock), self._clock.now_ns()
                await self._ask(f"{shared} {ending}", 4, sink)
                times[kind].append((sink.stamps[0] - sent_ns) / NS_PER_MS)
        found = {kind: statistics.median(each) for kind, each in times.items()}
        return found | {PREFIX: found["miss"] / found["hit"]}

    async def arrival(self) -> Figures:
        """Gaps between the tokens of running streams before a long prompt arrives and until its first
        token.
        """
        sinks = [Gaps(self._clock) for _ in range(STREAMS)]
        async with asyncio.timeout(STREAM_WAIT_S):
            tasks = [
                asyncio.ensure_future(self._ask(self._text(f"s{i}", STREAM_WORDS), STREAM_TOKENS_MAX, sink))
                for i, sink in enumerate(sinks)
            ]
            try:
                await _until(lambda: all(len(sink.stamps) >= QUIET_TOKENS for sink in sinks), tasks)
                sent_ns, long = self._clock.now_ns(), Gaps(self._clock)
                await self._ask(self._text("long", LONG_WORDS), 1, long)
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

    def _text(self, name: str, words: int) -> str:
        return f"{name} {sentence(self._seed, name, words)}"

    async def _ask(self, text: str, max_tokens: int, sink: Gaps) -> ApiResponse:
        prompt = Prompt(({"role": "user", "content": text},), max_tokens)
        shape = RequestShape(model=self._model, output_tokens=max_tokens)
        response = await self._client.post("/chat/completions", shape.body(prompt), sink)
        if response.status != 200 or not sink.stamps:
            raise RuntimeError(f"HTTP {response.status}: {response.body[:200]!r}")
        return response


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


async def _until(reached: Callable[[], bool], streams: "Sequence[asyncio.Task[ApiResponse]]") -> None:
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

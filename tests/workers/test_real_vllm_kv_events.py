"""A real vLLM's KV events: what the index says of a worker is what its answers say was cached."""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from conformance import Recorder
from engine_stand_ins import until
from test_external_conformance import tools

from penstock.backends.base import GenerateRequest
from penstock.backends.http.backend import ExternalWorker, HttpBackend
from penstock.backends.http.external import make_backend
from penstock.clock import SystemClock
from penstock.config.tree import LogConfig
from penstock.fleet.kv_watch import KVEventSubscriber
from penstock.kv.hashing import PromptKeys
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.worker_cache_view import KVIndexLimits, StreamState
from penstock.rng import fresh_seed
from penstock.telemetry.log import Log
from penstock.text.tokenizer import Tokenizer
from penstock.types import RequestId, SamplingParams, Usage, WorkerId

pytestmark = [pytest.mark.workers, pytest.mark.timeout(600)]
KV_EVENTS, KV_REPLAY = "tcp://127.0.0.1:9374", "tcp://127.0.0.1:9375"  # As in conftest.py.
WORKER = WorkerId("vllm-0")
CLOCK = SystemClock()
FIRST = fresh_seed() % 10_000
"""Prompts are new in every run: a server that runs already may have been asked before."""


class Fleet:
    """One vLLM, its feed, and the locality."""

    def __init__(self, backend: HttpBackend, *, check_s: float = 0.5) -> None:
        config = KVIndexLimits(check_s=check_s)
        self.backend = backend
        self.locality = KVLocality(config, b"0123456789abcdef")
        self.cache_view = self.locality.add(WORKER, model="served", is_own=False)
        log = Log(LogConfig(), CLOCK, stream=io.StringIO())
        self.feed = KVEventSubscriber(
            self.cache_view, events=KV_EVENTS, replay=KV_REPLAY, config=config, log=log, worker=WORKER
        )
        self._num_sent = 0

    def keys(self, tokens: tuple[int, ...], salt: bytes = b"", adapter: str = "") -> PromptKeys:
        return self.locality.maker("served").keys(tokens, salt=salt, adapter=adapter)

    def blocks(self, tokens: tuple[int, ...], salt: bytes = b"", adapter: str = "") -> int:
        """What a placement would count on: whole blocks of vLLM's, in ours."""
        return self.locality.match(CLOCK.now_ns(), self.keys(tokens, salt, adapter)).of(WORKER).blocks

    async def reported(self, tokens: tuple[int, ...], salt: bytes = b"", adapter: str = "") -> int:
        """The same, when vLLM's own events have come. On a busy machine the prediction for the request may
        be forgotten before.
        """
        await until(
            lambda: not self.locality.index.num_predicted and self.blocks(tokens, salt, adapter) >= 32,
            timeout_s=60,
        )
        return self.blocks(tokens, salt, adapter)

    async def ask(self, tokens: tuple[int, ...], salt: bytes = b"", adapter: str = "") -> Usage:
        """Generate two tokens, as the gateway would."""
        keys, recorder = self.keys(tokens, salt, adapter), Recorder()
        self._num_sent += 1
        self.locality.sent(CLOCK.now_ns(), WORKER, keys)
        request = GenerateRequest(
            request_id=RequestId(f"kv-{self._num_sent}"),
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=2, temperature=0.0),
            cache_salt=salt,
            adapter=adapter,
        )
        self.backend.generate(request, recorder)
        finish = await recorder.end()
        self.locality.answered(CLOCK.now_ns(), WORKER, keys, finish.usage.cached_tokens)
        return finish.usage


def run(url: str, model: Path, check: Callable[[Fleet], object]) -> None:
    async def main() -> None:
        worker = ExternalWorker(engine="vllm", url=url, model="served")
        backend = make_backend(worker, Tokenizer.load(model), tools())
        backend.open()
        await until(lambda: backend.status.ready, timeout_s=60)
        fleet = Fleet(backend)
        fleet.feed.start()
        try:
            await check(fleet)  # type: ignore[misc]
        finally:
            await fleet.feed.close()
            await backend.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_its_events_say_what_its_answers_say_was_cached(vllm_url: str, model_28m: Path) -> None:
    async def check(fleet: Fleet) -> None:
        tokens = tuple(FIRST + 100 + i % 700 for i in range(600))
        await fleet.ask(tokens)
        await until(lambda: fleet.cache_view.state is StreamState.SYNCED, timeout_s=20)
        reported = await fleet.reported(tokens)
        usage = await fleet.ask(tokens)
        assert usage.cached_tokens == 16 * reported
        other = (*tokens[:400], *(FIRST + 3 + i % 90 for i in range(200)))
        expected = fleet.blocks(other)
        usage = await fleet.ask(other)
        assert usage.cached_tokens == 16 * expected > 0
        audited = fleet.cache_view.audited
        assert audited.num_hit == audited.num_expected > 0

    run(vllm_url, model_28m, check)


def test_a_salted_prompt_is_its_tenants_alone(vllm_url: str, model_28m: Path) -> None:
    async def check(fleet: Fleet) -> None:
        tokens = tuple(FIRST + 200 + i % 500 for i in range(600))
        await fleet.ask(tokens, b"tenant a")
        reported = await fleet.reported(tokens, b"tenant a")
        assert fleet.blocks(tokens, b"tenant b") == fleet.blocks(tokens) == 0
        assert (await fleet.ask(tokens, b"tenant b")).cached_tokens == 0
        assert (await fleet.ask(tokens, b"tenant a")).cached_tokens == 16 * reported

    run(vllm_url, model_28m, check)


def test_what_an_adapter_computed_is_no_use_without_it(vllm_url: str, model_28m: Path) -> None:
    async def check(fleet: Fleet) -> None:
        await until(lambda: "tone" in fleet.backend.status.adapters.served, timeout_s=20)
        tokens = tuple(FIRST + 700 + i % 500 for i in range(600))
        await fleet.ask(tokens, b"tenant a", "tone")
        reported = await fleet.reported(tokens, b"tenant a", "tone")
        assert fleet.blocks(tokens, b"tenant a") == fleet.blocks(tokens, b"tenant a", "brief") == 0
        assert (await fleet.ask(tokens, b"tenant a")).cached_tokens == 0
        assert (await fleet.ask(tokens, b"tenant a", "tone")).cached_tokens == 16 * reported

    run(vllm_url, model_28m, check)


def test_what_it_told_before_the_feed_came_is_replayed(vllm_url: str, model_28m: Path) -> None:
    async def check(fleet: Fleet) -> None:
        tokens = tuple(FIRST + 300 + i % 400 for i in range(600))
        await fleet.ask(tokens)
        await fleet.reported(tokens)
        late = Fleet(fleet.backend)
        late.feed.start()
        try:
            await until(lambda: late.blocks(tokens) == fleet.blocks(tokens) > 0, timeout_s=20)
        finally:
            await late.feed.close()

    run(vllm_url, model_28m, check)


def test_a_batch_that_was_lost_is_replayed(vllm_url: str, model_28m: Path) -> None:
    async def check(backend: HttpBackend) -> None:
        fleet = Fleet(backend, check_s=600.0)  # Nothing is asked again without a reason.
        fleet.feed.start()
        try:
            await lose_one(fleet)
        finally:
            await fleet.feed.close()

    async def lose_one(fleet: Fleet) -> None:
        await fleet.ask(tuple(FIRST + 400 + i % 300 for i in range(600)))
        await until(lambda: fleet.cache_view.state is StreamState.SYNCED, timeout_s=20)
        take, lost, num_replays = fleet.cache_view.live, list[int](), fleet.feed.num_replays

        def live(sequence: int, payload: bytes) -> None:
            if lost:
                take(sequence, payload)
            else:
                lost.append(sequence)

        fleet.cache_view.live = live  # type: ignore[method-assign]
        gone, next_one = (tuple(FIRST + first + i % 300 for i in range(600)) for first in (500, 600))
        num_gaps = fleet.cache_view.num_gaps
        await fleet.ask(gone)
        await until(lambda: lost != [], timeout_s=20)
        await fleet.ask(next_one)
        await until(lambda: fleet.cache_view.num_gaps > num_gaps, timeout_s=20)
        await until(lambda: fleet.feed.num_replays > num_replays, timeout_s=20)
        await until(lambda: fleet.cache_view.state is StreamState.SYNCED, timeout_s=20)
        await fleet.reported(gone)
        assert fleet.cache_view.num_gaps == num_gaps + 1
        assert (await fleet.ask(gone)).cached_tokens == 16 * fleet.blocks(gone) > 0

    run(vllm_url, model_28m, lambda fleet: check(fleet.backend))

"""A real vLLM as a worker: the conformance suite, its metrics, and its tokens beside our own engine's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from conformance import BackendConformance, Recorder, Requests
from engine_stand_ins import until
from probed_workers import Probed
from test_external_conformance import tools

from penstock.backends.base import Backend, GenerateRequest
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.http.backend import ExternalWorker, HttpBackend
from penstock.backends.http.external import make_backend
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.errors import ContextTooLong
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.supervised import LocalLauncher
from penstock.policy.resilience.probes import TOKENS, TOLERANCE
from penstock.telemetry.metrics import Metrics
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, ModelName, RequestId, SamplingParams, WorkerId

pytestmark = [pytest.mark.workers, pytest.mark.timeout(600)]
NEAR = 0.15
"""Log-probabilities of two candidates that bfloat16 may order either way."""


class TestRealVllm(BackendConformance):
    loop_factory = staticmethod(uvloop.new_event_loop)
    ENDLESS = 1900
    MOVED_TEMPERATURE = 0.0
    LOGPROB_ERROR = NEAR
    url: str
    model: Path

    @pytest.fixture(autouse=True)
    def of_vllm(self, vllm_url: str, model_28m: Path) -> None:
        type(self).url, type(self).model = vllm_url, model_28m

    @asynccontextmanager
    async def open(self, metrics: Metrics | None = None) -> AsyncIterator[HttpBackend]:
        worker = ExternalWorker(engine="vllm", url=self.url, model="served")
        backend = make_backend(worker, Tokenizer.load(self.model), tools(metrics=metrics))
        backend.open()
        try:
            await until(lambda: backend.status.ready, timeout_s=60)
            yield backend
        finally:  # Also where a test is skipped: uvloop does not end with connections that are open.
            await backend.close()

    test_a_lost_worker_ends_every_stream_with_its_kind = (
        None  # The tests share the server; stand-ins are killed.
    )

    def test_streams_do_not_mix(self) -> None:
        """Greedy, and each from a prompt of its own: what is sampled may depend on the batch in vLLM, and
        with AVX-512 so does a choice between two tokens that are nearly as likely.
        """

        async def check(backend: Backend, requests: Requests) -> None:
            alone = [await greedy(backend, (10 + i, 500)) for i in range(4)]
            many = await asyncio.gather(*(greedy(backend, (10 + i % 4, 500)) for i in range(16)))
            for i, (found, tops) in enumerate(many):
                assert_same_up_to_ties(self.model, alone[i % 4][0], found, tops)

        self.run(check)

    def test_it_says_what_it_is_and_how_loaded(self) -> None:
        metrics = Metrics([], version="test")

        async def run() -> None:
            async with self.open(metrics) as backend:
                recorder = Recorder()
                generation = backend.generate(Requests().make(max_tokens=self.ENDLESS), recorder)
                await until(
                    lambda: backend.status.stats is not None and backend.status.stats.running == 1, 30
                )
                generation.abort()
                await until(
                    lambda: backend.status.stats is not None and backend.status.stats.running == 0, 30
                )
                info, stats = backend.status.info, backend.status.stats
                assert info is not None
                assert stats is not None
                assert (info.max_model_len, info.model) == (2048, "served")
                assert info.num_blocks == stats.blocks_total > 100
                assert not backend.status.notes

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
        assert "penstock_scrape_missing_total{" not in metrics.render().decode()

    def test_usage_agrees_and_the_prefix_cache_is_told_of(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            prompt = tuple(range(300, 300 + 512))
            for expected in (False, True):
                recorder = Recorder()
                sampling = SamplingParams(temperature=0.0, max_tokens=4)
                request = GenerateRequest(
                    request_id=RequestId(f"p-{expected}"),
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    cache_salt=b"t",
                )
                backend.generate(request, recorder)
                usage = (await recorder.end()).usage
                assert (usage.prompt_tokens, usage.completion_tokens) == (512, 4)
                assert (usage.cached_tokens > 0) == expected
            assert not backend.status.notes

        self.run(check)

    def test_its_adapters_are_told_and_answer(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            await until(lambda: backend.status.adapters.served == {"tone", "brief"}, 30)
            prompt, found = (7, 500, 8, 600), set[tuple[int, ...]]()
            for name in ("", "tone", "brief"):
                ids, _ = await greedy(backend, prompt, adapter=name)
                found.add(tuple(ids))
                await until(lambda name=name: not name or name in backend.status.adapters.loaded, 30)
            assert len(found) == 3
            assert not backend.status.notes

        self.run(check)

    def test_a_prompt_that_is_too_long_is_the_clients(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder = Recorder()
            request = GenerateRequest(
                request_id=RequestId("long"),
                prompt_token_ids=(5,) * 2100,
                sampling=SamplingParams(max_tokens=1),
            )
            backend.generate(request, recorder)
            assert isinstance((await recorder.end()).error, ContextTooLong)
            assert backend.status.ready

        self.run(check)

    def test_greedy_tokens_are_our_engines(self) -> None:
        """Up to a choice between two tokens that are as likely as bfloat16 can tell."""

        async def check(backend: Backend, requests: Requests) -> None:
            async with our_engine(self.model) as ours:
                for first in (7, 800, 4321):
                    prompt = tuple(range(first, first + 20))
                    expected, _ = await greedy(ours, prompt)
                    found, tops = await greedy(backend, prompt)
                    assert_same_up_to_ties(self.model, expected, found, tops)

        self.run(check)


def assert_same_up_to_ties(
    model: Path, expected: list[int], found: list[int], tops: list[list[tuple[str, float]]]
) -> None:
    """Up to the first choice between tokens of which bfloat16 cannot tell the likelier one."""
    pairs = enumerate(zip(expected, found, strict=True))
    differs = next((i for i, (one, other) in pairs if one != other), None)
    if differs is not None:
        near = dict(tops[differs])
        text = Tokenizer.load(model).token_text(expected[differs])
        assert near.get(text, -100.0) > max(near.values()) - NEAR, (differs, near, text)


def test_probes_are_right_whatever_shares_the_batch(vllm_url: str, model_28m: Path) -> None:
    """Its own first answer is the golden one; what runs beside a probe moves log-probabilities a little."""

    async def main() -> None:
        worker = ExternalWorker(engine="vllm", url=vllm_url, model="served")
        tokenizer = Tokenizer.load(model_28m)
        backend = make_backend(worker, tokenizer, tools())
        backend.open()
        try:
            await until(lambda: backend.status.ready, timeout_s=60)
            found = Probed(tokenizer)
            name = found.add("vllm", backend)
            await found.beat()
            for length in (3, 40, 400):
                beside = [asyncio.create_task(greedy(backend, tuple(range(i, i + length)))) for i in (5, 50)]
                await found.beat()
                await asyncio.gather(*beside)
                watched = found.anomalies.get(name)
                assert (watched.verdict, watched.distance < TOLERANCE / 2) == ("right", True), watched
            assert len(watched.answer.tokens) == TOKENS
            assert watched.answer.ttft_ns >= 0
        finally:
            await backend.close()

    uvloop.run(main())


async def greedy(
    backend: Backend, prompt: tuple[int, ...], *, adapter: str = ""
) -> tuple[list[int], list[list[tuple[str, float]]]]:
    """Token ids, and the likeliest alternatives of each."""
    recorder = Recorder()
    sampling = SamplingParams(temperature=0.0, max_tokens=16, logprobs=5)
    request = GenerateRequest(
        request_id=RequestId(f"g-{id(recorder)}"),
        prompt_token_ids=prompt,
        sampling=sampling,
        skip_special_tokens=False,
        adapter=adapter,
    )
    backend.generate(request, recorder)
    assert (await recorder.end()).reason is FinishReason.LENGTH
    ids = [token_id for delta in recorder.deltas for token_id in delta.token_ids]
    tops = [
        [(name, value) for name, _, value in each.top] for delta in recorder.deltas for each in delta.logprobs
    ]
    return ids, tops


@asynccontextmanager
async def our_engine(model: Path) -> AsyncIterator[Backend]:
    launcher = LocalLauncher(SystemClock(), b"secret" * 4)
    engine = EngineSettings(kv_memory_bytes=64 * 1024 * 1024, max_model_len=2048, threads=1)
    spec = WorkerSpec(
        worker_id=WorkerId("ours-0"), model_path=str(model), model_name=ModelName("served"), engine=engine
    )
    try:
        worker = await launcher.start(spec, EngineBackend(Tokenizer.load(model), SystemClock()))
        await worker.wait_ready()
        yield worker.backend
    finally:
        await launcher.close(timeout_s=0.1)

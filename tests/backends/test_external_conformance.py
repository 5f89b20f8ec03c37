"""The conformance suite for every engine that is not ours, against servers that speak its API
(tests/doubles).
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop
from byte_tokenizer import byte_tokenizer
from conformance import BackendConformance, Requests
from engine_stand_ins import (
    OpenAIStandIn,
    SglangStandIn,
    StandIn,
    TgiStandIn,
    TritonStandIn,
    TrtllmStandIn,
    VllmStandIn,
    serving,
    until,
)

from penstock.backends.base import Backend
from penstock.backends.http.backend import BackendDependencies, ExternalWorker, HttpBackend
from penstock.backends.http.external import make_backend
from penstock.backends.http.terms import HttpBackendLimits
from penstock.clock import SystemClock
from penstock.errors import InvalidRequest
from penstock.telemetry.metrics import Metrics


def tools(config: HttpBackendLimits | None = None, metrics: Metrics | None = None) -> BackendDependencies:
    metrics = metrics or Metrics([], version="test")
    return BackendDependencies(
        config=config or HttpBackendLimits(probe_s=0.05),
        clock=SystemClock(),
        meters=metrics.backend,
        draw=random.Random(1).random,
    )


@asynccontextmanager
async def opened(
    engine: str, stand_in: StandIn, made: BackendDependencies | None = None
) -> AsyncIterator[HttpBackend]:
    """A ready backend for a stand-in that is served."""
    worker = ExternalWorker(
        engine=engine, url=stand_in.url, model=stand_in.MODEL, metrics_url=stand_in.url, max_model_len=32768
    )
    backend = make_backend(worker, byte_tokenizer(), made or tools())
    backend.open()
    try:
        await until(lambda: backend.status.ready)
        yield backend
    finally:
        await backend.close()


class ExternalConformance(BackendConformance):
    loop_factory = staticmethod(uvloop.new_event_loop)  # As in production.
    ENDLESS = 20_000
    engine = ""
    stand_in: type[StandIn]
    server: StandIn

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HttpBackend]:
        async with serving(self.stand_in()) as self.server, opened(self.engine, self.server) as backend:
            yield backend

    async def lose_worker(self, backend: Backend) -> None:
        await self.server.kill()


class NoPromptLogprobs:
    """For engines that cannot score prompts: they say so, and name the parameter."""

    def test_prompt_logprobs_come_before_the_answer(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, _ = self.start(backend, requests.make(prompt_logprobs=1, max_tokens=3))
            error = (await recorder.end()).error
            assert isinstance(error, InvalidRequest)
            assert error.param == "echo"
            assert not self.server.requests

        self.run(check)


class TestVllm(ExternalConformance):
    engine, stand_in = "vllm", VllmStandIn
    MOVED_TEMPERATURE = 0.0  # It draws in turn, not by position.


class TestSglang(ExternalConformance):
    engine, stand_in = "sglang", SglangStandIn
    ENDLESS = 4_000  # Each event has all that came before.


class TestTrtllm(NoPromptLogprobs, ExternalConformance):
    engine, stand_in = "trtllm", TrtllmStandIn


class TestTgi(NoPromptLogprobs, ExternalConformance):
    engine, stand_in = "tgi", TgiStandIn


class TestTriton(NoPromptLogprobs, ExternalConformance):
    engine, stand_in = "triton", TritonStandIn

    @pytest.mark.parametrize("wanted", [0, 2])
    def test_logprobs(self, wanted: int) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, _ = self.start(backend, requests.make(logprobs=wanted))
            error = (await recorder.end()).error
            assert isinstance(error, InvalidRequest)
            assert error.param == "logprobs"

        self.run(check)


class TestOpenAI(NoPromptLogprobs, ExternalConformance):
    engine, stand_in = "openai", OpenAIStandIn

"""Probes, facts and load of workers that are not ours, and chats that are passed through to providers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping

import pytest
import uvloop
from byte_tokenizer import byte_tokenizer
from conformance import Recorder, Requests
from engine_stand_ins import OpenAIStandIn, StandIn, TritonStandIn, VllmStandIn, serving, text_of, until
from msgspec.structs import replace
from test_engine_metrics import ADAPTERS, TRITON, VLLM
from test_external_conformance import opened, tools

from penstock.backends.base import Adapters, GenerateRequest, Phase, ToolCallPiece
from penstock.backends.http.backend import ExternalWorker, HttpBackend
from penstock.backends.http.dialects.vllm import VllmDialect
from penstock.backends.http.external import make_backend
from penstock.backends.http.terms import HttpBackendLimits
from penstock.errors import ConfigError, EngineFault, StreamBroken, WorkerUnavailable
from penstock.protocol.needs import Constraint
from penstock.telemetry.metrics import Metrics
from penstock.types import FinishReason, RequestId, SamplingParams


def run(
    stand_in: StandIn,
    engine: str,
    check: Callable[[HttpBackend], Awaitable[None]],
    *,
    config: HttpBackendLimits | None = None,
    metrics: Metrics | None = None,
) -> None:
    async def inside() -> None:
        async with serving(stand_in), opened(engine, stand_in, tools(config, metrics)) as backend:
            await check(backend)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


def test_load_is_read_and_goes_stale() -> None:
    server = VllmStandIn()
    server.metrics = VLLM.decode()
    changes: list[object] = []

    async def check(backend: HttpBackend) -> None:
        backend.on_change = lambda: changes.append(backend.status.stats)
        await until(lambda: backend.status.stats is not None)
        stats, info = backend.status.stats, backend.status.info
        assert stats is not None
        assert info is not None
        assert (stats.running, stats.waiting, stats.blocks_total, stats.blocks_used) == (5, 4, 2000, 1000)
        assert (info.max_model_len, info.num_blocks, info.max_running) == (32768, 2000, 0)
        server.metrics = None
        await until(lambda: backend.status.stats is None)
        assert backend.status.ready
        assert any("metrics" in note.text for note in backend.status.notes)

    run(server, "vllm", check, config=HttpBackendLimits(probe_s=0.05, stale_s=0.2))


def test_a_missing_metric_is_reported_and_not_read_as_zero() -> None:
    server, metrics = VllmStandIn(), Metrics([], version="test")
    server.metrics = VLLM.decode().replace("num_requests_waiting", "num_renamed")

    async def check(backend: HttpBackend) -> None:
        await until(lambda: bool(backend.status.notes))
        assert backend.status.stats is None
        assert "vllm:num_requests_waiting" in backend.status.notes[0].text
        line = 'penstock_scrape_missing_total{engine="vllm",metric="vllm:num_requests_waiting"}'
        assert line in metrics.render().decode()
        assert backend.status.ready

    run(server, "vllm", check, metrics=metrics)


def test_adapters_are_those_that_it_lists_and_a_request_names_one_as_the_model() -> None:
    server = VllmStandIn()
    server.metrics, server.adapters = (VLLM + ADAPTERS).decode(), ("brief", "other")

    async def check(backend: HttpBackend) -> None:
        await until(lambda: backend.status.adapters == Adapters({"brief", "other"}, {"brief"}, room=2))
        recorder = Recorder()
        request = GenerateRequest(
            request_id=RequestId("r"),
            prompt_token_ids=(1, 2),
            sampling=SamplingParams(max_tokens=2),
            adapter="other",
        )
        backend.generate(request, recorder)
        assert (await recorder.end()).error is None
        assert server.requests[0].json["model"] == "other"
        assert backend.status.ready
        assert not backend.status.notes, "its answer bears the adapter's name, as it should"
        with pytest.raises(WorkerUnavailable, match="'tone'"):
            backend.generate(replace(request, request_id=RequestId("s"), adapter="tone"), Recorder())
        server.adapters = ("tone",)
        await until(lambda: backend.status.adapters == Adapters({"tone"}, {"tone"}, room=2))

    run(server, "vllm", check, config=HttpBackendLimits(probe_s=0.02))


def test_what_triton_does_not_tell_is_counted_here() -> None:
    server = TritonStandIn(step_s=0.001)
    server.metrics = TRITON.decode()

    async def check(backend: HttpBackend) -> None:
        recorder = Recorder()
        backend.generate(Requests().make(max_tokens=20_000), recorder)
        await until(lambda: backend.status.stats is not None and backend.status.stats.running == 1)
        assert backend.status.stats is not None
        assert backend.status.stats.waiting == 7

    run(server, "triton", check)


def test_an_unhealthy_worker_takes_nothing_and_comes_back() -> None:
    server = VllmStandIn()

    async def check(backend: HttpBackend) -> None:
        server.healthy = False
        await until(lambda: not backend.status.ready)
        assert "503" in backend.status.stage
        with pytest.raises(WorkerUnavailable, match="503"):
            backend.generate(Requests().make(), Recorder())
        server.healthy = True
        await until(lambda: backend.status.ready)

    run(server, "vllm", check)


def test_a_worker_that_was_restarted_is_found_again() -> None:
    server = VllmStandIn()

    async def check(backend: HttpBackend) -> None:
        first = Recorder()
        backend.generate(Requests().make(), first)
        await first.end()  # Its connection is kept, and stale after the restart.
        await server.kill()
        await server.start()
        await until(lambda: backend.status.ready)
        recorder = Recorder()
        backend.generate(Requests().make(max_tokens=5), recorder)
        assert (await recorder.end()).reason is FinishReason.LENGTH

    run(server, "vllm", check)


def test_what_is_known_of_a_worker_that_takes_nothing() -> None:
    """Starting until it has answered, refused while it is another one, lost when it is gone; one broken
    stream is neither.
    """

    async def inside() -> None:
        server = VllmStandIn(step_s=0.001)
        await server.start()
        await server.kill()
        worker = ExternalWorker(engine="vllm", url=server.url, model="served")
        backend = make_backend(worker, byte_tokenizer(), tools())
        backend.open()
        try:
            await check(server, backend)
        finally:
            await backend.close()
            await server.kill()
        assert backend.status.phase is Phase.DOWN

    async def check(server: StandIn, backend: HttpBackend) -> None:
        await until(lambda: "refused" in backend.status.stage)
        assert backend.status.phase is Phase.STARTING
        server.MODEL = "other"
        await server.start()
        await until(lambda: backend.status.phase is Phase.REFUSED)
        server.MODEL = "served"
        await until(lambda: backend.status.ready)
        beside, broken, requests = Recorder(), Recorder(), Requests()
        backend.generate(requests.make(max_tokens=20_000), beside)
        await beside.started.wait()
        server.faults.raw = b""
        backend.generate(requests.make(), broken)
        assert isinstance((await broken.end()).error, WorkerUnavailable)
        assert backend.status.ready
        await server.kill()
        await beside.end()
        assert backend.status.phase is Phase.LOST

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


def test_what_a_vllm_worker_is_sent() -> None:
    server = VllmStandIn()

    async def check(backend: HttpBackend) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            top_k=4,
            logit_bias=((7, 1.5),),
            max_tokens=2,
            stop_token_ids=(256,),
            min_tokens=1,
        )
        request = GenerateRequest(
            request_id=RequestId("r"),
            prompt_token_ids=(1, 2),
            sampling=sampling,
            cache_salt=b"tenant",
            priority=3,
        )
        recorder = Recorder()
        backend.generate(request, recorder)
        finish = await recorder.end()
        assert finish.usage.cached_tokens == 2
        sent = server.requests[0].json
        assert sent["prompt"] == [1, 2]
        assert sent["cache_salt"] == "dGVuYW50"
        assert sent["logit_bias"] == {"7": 1.5}
        assert (sent["stop_token_ids"], sent["ignore_eos"], sent["min_tokens"]) == ([256], True, 1)
        assert "priority" not in sent  # It would be refused by a server that was not started for it.
        assert "authorization" not in server.requests[0].headers

    run(server, "vllm", check)


OTHER_SAMPLING: Mapping[str, object] = {
    "temperature": 0.0,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((7, 1.5),),
    "bad_words": ((7, 8),),
    "allowed_token_ids": (7, 8),
    "min_tokens": 1,
    "seed": 9,
    "max_tokens": 7,
    "stop_token_ids": (256,),
    "logprobs": 0,
    "prompt_logprobs": 0,
}
OTHER: Mapping[str, object] = {
    "request_id": '"r',
    "prompt_token_ids": (2,),
    "skip_special_tokens": False,
    "adapter": "a",
    "cache_salt": b"t",
    "priority": 2,
    "constraint": Constraint(structured={"choice": ["a"]}),
    "resumed": (9,),
}


def test_every_field_of_sampling_has_another_value() -> None:
    assert tuple(OTHER_SAMPLING) == SamplingParams.__struct_fields__
    assert all(getattr(SamplingParams(), name) != value for name, value in OTHER_SAMPLING.items())


@pytest.mark.parametrize("name", [*OTHER_SAMPLING, *OTHER, "fields"])
def test_what_two_requests_to_vllm_differ_in_is_sent(name: str) -> None:
    """Beginnings of bodies are kept by what is in them."""
    first = GenerateRequest(
        request_id=RequestId("r"), prompt_token_ids=(1, 2), sampling=SamplingParams(), resumed=()
    )
    if name in OTHER_SAMPLING:
        second = replace(first, sampling=replace(first.sampling, **{name: OTHER_SAMPLING[name]}))
    elif name == "fields":
        second = replace(first, constraint=Constraint(fields={"bad_words": ["a"]}))
    else:
        second = replace(first, **{name: OTHER[name]})
    for requests in ((first, second, first), (second, first, second)):
        dialect = VllmDialect("served", has_priorities=True)
        for request in requests:
            sent = dialect.submission(request)
            plain = VllmDialect("served", has_priorities=True)._submission(request)
            assert sent.path == plain.path
            assert json.loads(sent.body) == json.loads(plain.body)


def test_priorities_are_sent_to_a_server_that_was_started_to_take_them() -> None:
    async def inside() -> None:
        async with serving(VllmStandIn()) as server:
            worker = ExternalWorker(engine="vllm", url=server.url, model="served", has_priorities=True)
            backend = make_backend(worker, byte_tokenizer(), tools())
            backend.open()
            await until(lambda: backend.status.ready)
            recorder = Recorder()
            backend.generate(replace(Requests().make(), priority=3), recorder)
            await recorder.end()
            assert server.requests[-1].json["priority"] == 3
            await backend.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


# --- providers -----------------------------------------------------------------------------------------


def chat(body: dict[str, object], max_tokens: int = 20, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        body=json.dumps(body).encode(),
        is_chat=True,
    )


def test_a_chat_is_passed_through_and_the_providers_usage_counts() -> None:
    server, body = (
        OpenAIStandIn(),
        {"model": "ours", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "top_p": 0.5},
    )

    async def check(backend: HttpBackend) -> None:
        recorder = Recorder()
        backend.generate(chat(body, 6), recorder)
        finish = await recorder.end()
        assert (finish.reason, recorder.text) == (FinishReason.LENGTH, text_of(0, 6))
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (77, 6)
        sent = server.requests[0].json
        assert server.requests[0].path == "/v1/chat/completions"
        assert sent["messages"] == body["messages"]
        assert (sent["model"], sent["max_tokens"], sent["top_p"], sent["stream"]) == ("served", 6, 0.5, True)
        assert "seed" not in sent

    run(server, "openai", check)


@pytest.mark.parametrize(("max_tokens", "sent"), [(32768 - 3, None), (500, 500)])
def test_a_tenants_limit_goes_to_the_provider_and_its_whole_context_does_not(
    max_tokens: int, sent: int | None
) -> None:
    server, body = OpenAIStandIn(), {"model": "ours", "messages": [{"role": "user", "content": "hi"}]}

    async def check(backend: HttpBackend) -> None:
        recorder = Recorder()
        generation = backend.generate(chat(body, max_tokens), recorder)
        await recorder.started.wait()
        generation.abort()
        assert server.requests[0].json.get("max_tokens") == sent

    run(server, "openai", check)


def test_without_usage_a_chat_counts_what_came() -> None:
    server = OpenAIStandIn()
    server.faults.no_usage = True

    async def check(backend: HttpBackend) -> None:
        recorder = Recorder()
        backend.generate(
            chat({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}, 6),
            recorder,
        )
        usage = (await recorder.end()).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 6)

    run(server, "openai", check)


def test_tool_calls_come_back_as_the_provider_made_them() -> None:
    server = OpenAIStandIn()
    server.calls = [{"name": "look", "arguments": '{"at": "the sky"}'}, {"name": "wait", "arguments": "{}"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    async def check(backend: HttpBackend) -> None:
        recorder = Recorder()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
        backend.generate(chat(body, 50), recorder)
        finish = await recorder.end()
        assert finish.reason is FinishReason.TOOL_CALLS
        pieces = [call for delta in recorder.deltas for call in delta.tool_calls]
        assert pieces[0] == ToolCallPiece(index=0, id="call_0", name="look")
        assert "".join(call.arguments for call in pieces if call.index == 0) == '{"at": "the sky"}'
        assert server.requests[0].json["tools"] == [tool]

    run(server, "openai", check)


def test_a_sink_that_raises_ends_its_own_stream_alone() -> None:
    def fail() -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "no such character")

    async def check(backend: HttpBackend) -> None:
        broken, fine, requests = Recorder(), Recorder(), Requests()
        broken.then = fail
        backend.generate(requests.make(), broken)
        backend.generate(requests.make(), fine)
        assert isinstance((await broken.end()).error, EngineFault)
        assert (await fine.end()).error is None
        assert backend.status.ready
        assert backend.num_streams == 0

    run(VllmStandIn(), "vllm", check)


def test_what_is_whole_is_not_continued_elsewhere() -> None:
    """Its end or its usage is not there yet when it is aborted, or broken off."""
    server = VllmStandIn()

    async def check(backend: HttpBackend) -> None:
        requests, aborted, failed = Requests(), Recorder(), Recorder()
        server.faults.after, server.faults.hang = 5, True  # What is left is the usage.
        generation = backend.generate(requests.make(max_tokens=5), aborted)
        await until(lambda: aborted.num_tokens == 5)
        await until(lambda: generation._finish is not None)
        generation.abort()
        finish = await aborted.end()
        assert (finish.reason, finish.resume) == (FinishReason.LENGTH, None)
        server.faults.after, server.faults.hang = 4, False
        server.faults.event = b'data: {"error": {"message": "no room", "code": 500}}\n\n'
        backend.generate(requests.make(max_tokens=4 + 1), failed)
        finish = await failed.end()
        assert isinstance(finish.error, StreamBroken)
        assert len(finish.resume or ()) == 4

    run(server, "vllm", check)


def test_the_key_goes_to_the_provider_and_a_refused_key_is_the_operators() -> None:
    class Guarded(OpenAIStandIn):
        key = "sk-1"

        async def _answer(self, request, writer) -> None:
            if request.headers.get("authorization") != f"Bearer {self.key}":
                await self.respond(
                    writer, 401, b'{"error": {"message": "bad key"}}', {"content-type": "application/json"}
                )
            else:
                await super()._answer(request, writer)

    async def inside() -> None:
        async with serving(Guarded()) as server:
            worker = ExternalWorker(engine="openai", url=server.url, model="served", api_key="sk-1")
            backend = make_backend(worker, byte_tokenizer(), tools())
            backend.open()
            await until(lambda: backend.status.ready)
            server.key = "sk-2"
            recorder = Recorder()
            backend.generate(Requests().make(), recorder)
            error = (await recorder.end()).error
            assert isinstance(error, WorkerUnavailable)
            assert "key" in str(error)
            assert "sk-" not in str(error)
            await backend.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (ExternalWorker(engine="nonsuch", url="http://h:1", model="m"), "unknown engine"),
        (ExternalWorker(engine="vllm", url="ftp://h:1", model="m"), "address"),
        (ExternalWorker(engine="vllm", url="http://user:secret@h:1", model="m"), "no user"),
        (ExternalWorker(engine="vllm", url="http://h:99999", model="m"), "address"),
        (ExternalWorker(engine="triton", url="http://h:1", model="m"), "max_model_len"),
        (ExternalWorker(engine="vllm", url="http://h:1", model="m", api_key="a\nb"), "header"),
    ],
)
def test_what_can_never_work_is_refused_at_once(worker: ExternalWorker, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_backend(worker, byte_tokenizer(), tools())

"""What workers that are not ours get wrong: the right error, the stream saved where it can be, nobody else
touched.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from conformance import Recorder, Requests
from engine_stand_ins import (
    SglangStandIn,
    StandIn,
    TgiStandIn,
    TritonStandIn,
    VllmStandIn,
    serving,
    text_of,
    until,
)
from test_external_conformance import opened, tools

from penstock.backends.base import Finish
from penstock.backends.http.backend import HttpBackend
from penstock.backends.http.dialects.base import retry_after_s
from penstock.backends.http.terms import HttpBackendLimits, HttpLimits
from penstock.errors import (
    ContextTooLong,
    InvalidRequest,
    KeyRejected,
    Overloaded,
    PenstockError,
    StreamBroken,
    TooLarge,
    WorkerBusy,
    WorkerUnavailable,
)
from penstock.telemetry.metrics import Metrics
from penstock.types import FinishReason

ENGINES = {"vllm": VllmStandIn, "sglang": SglangStandIn, "tgi": TgiStandIn, "triton": TritonStandIn}
BOUNDED = HttpBackendLimits(probe_s=0.05, http=HttpLimits(event_bytes_max=2048, error_bytes_max=4096))
IMPATIENT = HttpBackendLimits(
    probe_s=0.05, http=HttpLimits(first_byte_timeout_s=0.5, idle_timeout_s=0.5, event_bytes_max=2048)
)
"""For workers that are silent: a busy machine would take a good one for one of them."""
JSON = {"content-type": "application/json"}


class Bench:
    def __init__(self, backend: HttpBackend, server: StandIn, metrics: Metrics) -> None:
        self.backend, self.server, self.requests = backend, server, Requests()
        self._metrics = metrics

    def start(self, **request: object) -> Recorder:
        recorder = Recorder()
        self.backend.generate(self.requests.make(**request), recorder)
        return recorder

    async def end(self, **request: object) -> tuple[Recorder, Finish]:
        recorder = self.start(**request)
        return recorder, await recorder.end()

    async def error(self, **request: object) -> PenstockError:
        error = (await self.end(**request))[1].error
        assert error is not None
        return error

    def counted(self, name: str, **labels: str) -> float:
        want = ",".join(f'{key}="{value}"' for key, value in labels.items())
        lines = self._metrics.render().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and want in line)


def bench(
    check: Callable[[Bench], Awaitable[None]],
    engine: str = "vllm",
    config: HttpBackendLimits = BOUNDED,
    **more: object,
) -> None:
    async def run() -> None:
        metrics = Metrics([], version="test")
        async with (
            serving(ENGINES[engine](**more)) as server,
            opened(engine, server, tools(config, metrics)) as backend,
        ):
            await check(Bench(backend, server, metrics))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


# --- answers that are no streams -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind"),
    [
        (429, {"retry-after": "7"}, b'{"error": {"message": "busy", "type": "x", "code": 429}}', WorkerBusy),
        (503, {"retry-after": "7"}, b"", WorkerBusy),
        (503, {}, b"<html>down</html>", WorkerUnavailable),
        (500, {}, b'{"error": {"message": "cuda"}}', WorkerUnavailable),
        (502, {"content-type": "text/html"}, b"<html>bad gateway</html>", WorkerUnavailable),
        (
            400,
            JSON,
            b'{"error": {"message": "no", "type": "BadRequestError", "param": "top_k", "code": 400}}',
            InvalidRequest,
        ),
        (400, JSON, b'{"error": {"message": "maximum context length is 9", "code": 400}}', ContextTooLong),
        (422, JSON, b'{"error": "`inputs` must have less", "error_type": "validation"}', InvalidRequest),
        (413, {}, b"", TooLarge),
        (401, JSON, b'{"error": "Unauthorized"}', KeyRejected),
        (404, JSON, b'{"object": "error", "message": "no such model", "code": 404}', WorkerUnavailable),
        (302, {"location": "http://127.0.0.1:1/elsewhere"}, b"", WorkerUnavailable),
        (200, {"content-type": "text/html"}, b"<html>welcome</html>", WorkerUnavailable),
        (200, JSON, b'{"choices": []}', WorkerUnavailable),
        (200, JSON, b'{"error": {"message": "no room", "type": "overloaded"}}', WorkerBusy),
    ],
)
def test_a_status_becomes_the_right_error(
    status: int, headers: dict[str, str], body: bytes, kind: type[PenstockError]
) -> None:
    async def check(made: Bench) -> None:
        made.server.faults.status = (status, headers, body)
        error = await made.error()
        assert type(error) is kind
        assert error.retry_safe == (kind in (WorkerBusy, WorkerUnavailable, KeyRejected))
        assert "<html" not in str(error)
        if isinstance(error, Overloaded) and status != 200:
            assert error.retry_after_s == 7
        if isinstance(error, InvalidRequest) and b"top_k" in body:
            assert error.param == "top_k"
        # It is one answer's trouble: the worker stays, and the next request is served on the same connection.
        assert made.backend.status.ready
        made.server.faults.status = None
        recorder, finish = await made.end()
        assert finish.reason is FinishReason.LENGTH
        assert recorder.text == text_of(0, 12)
        outcome = {
            WorkerBusy: "overloaded",
            WorkerUnavailable: "unavailable",
            KeyRejected: "unavailable",
        }.get(kind, "refused")
        assert made.counted("penstock_backend_requests_total", engine="vllm", outcome=outcome) == 1

    bench(check)


NOW = b"Fri, 27 Nov 2026 10:00:00 GMT"


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({b"retry-after": b"7"}, 7),
        ({b"retry-after": b" 1.5 "}, 1.5),
        ({b"retry-after": b"86400"}, 3600),
        ({b"retry-after": b"Fri, 27 Nov 2026 10:01:30 GMT", b"date": NOW}, 90),
        ({b"retry-after": b"Friday, 27-Nov-26 10:00:30 GMT", b"date": NOW}, 30),
        ({b"retry-after": NOW, b"date": b"Fri, 27 Nov 2026 11:00:00 GMT"}, 0),
        ({b"retry-after": b"Fri, 27 Nov 2026 10:01:30 GMT"}, None),
        ({b"retry-after-ms": b"250", b"retry-after": b"1"}, 0.25),
        ({b"retry-after-ms": b"soon", b"retry-after": b"1"}, 1),
        *(
            ({b"retry-after": value, b"date": NOW}, None)
            for value in (b"", b"-1", b"nan", b"inf", b"5, 5", b"9" * 99)
        ),
        ({b"retry-after": b"Fri, 27 Foo 2026 10:01:30 GMT", b"date": NOW}, None),
        ({}, None),
    ],
)
def test_a_worker_says_in_several_ways_when_to_come_again(
    headers: dict[bytes, bytes], wait_s: float | None
) -> None:
    assert retry_after_s(headers) == wait_s


def test_an_endless_error_page_is_not_read_to_its_end() -> None:
    async def check(made: Bench) -> None:
        made.server.faults.status = (500, {}, b"x" * 10_000_000)
        assert isinstance(await made.error(), WorkerUnavailable)

    bench(check)


@pytest.mark.parametrize(
    "raw",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: "
            b"gzip\r\ncontent-length: 3\r\n\r\nabc"
        ),
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"",
    ],
)
def test_what_is_no_http_ends_the_request_and_not_the_worker(raw: bytes) -> None:
    async def check(made: Bench) -> None:
        made.server.faults.raw = raw
        assert isinstance(await made.error(), WorkerUnavailable)
        made.server.faults.raw = None
        await until(lambda: made.backend.status.ready)
        assert (await made.end())[1].reason is FinishReason.LENGTH

    bench(check)


# --- streams that go wrong -----------------------------------------------------------------------------

ERROR_EVENTS = {
    "vllm": b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": '
    b"500}}\n\n",
    "sglang": b'data: {"error": {"message": "scheduler died"}}\n\n',
    "tgi": b'data: {"error": "Request failed during generation", "error_type": "generation"}\n\n',
    "triton": b'data: {"error": "CUDA out of memory"}\n\n',
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("after", [0, 3])
def test_200_and_then_an_error_event(engine: str, after: int) -> None:
    async def check(made: Bench) -> None:
        made.server.faults.after, made.server.faults.event = after, ERROR_EVENTS[engine]
        recorder, finish = await made.end()
        assert type(finish.error) is (StreamBroken if after else WorkerUnavailable)
        assert recorder.text == text_of(0, after)
        assert finish.usage.completion_tokens == after
        assert made.backend.status.ready

    bench(check, engine)


def test_an_error_event_about_the_request_is_the_clients() -> None:
    async def check(made: Bench) -> None:
        made.server.faults.after = 0
        made.server.faults.event = (
            b'data: {"error": "Input validation error", "error_type": "validation"}\n\n'
        )
        assert isinstance(await made.error(), InvalidRequest)
        made.server.faults.event = b'data: {"error": "Model is overloaded", "error_type": "overloaded"}\n\n'
        assert isinstance(await made.error(), Overloaded)

    bench(check, "tgi")


def test_an_aborted_answer_of_sglang_has_a_status() -> None:
    async def check(made: Bench) -> None:
        finish = {"type": "abort", "message": "too long", "status_code": 400}
        event = {"text": "", "output_ids": [], "meta_info": {"finish_reason": finish, "completion_tokens": 0}}
        made.server.faults.after, made.server.faults.event = 0, b"data: %b\n\n" % json.dumps(event).encode()
        assert isinstance(await made.error(), InvalidRequest)

    bench(check, "sglang")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi"])
@pytest.mark.parametrize("how", ["ends", "closes"])
def test_an_answer_that_ends_in_its_middle_is_broken(engine: str, how: str) -> None:
    async def check(made: Bench) -> None:
        made.server.faults.after, made.server.faults.close = 4, how == "closes"
        recorder, finish = await made.end()
        assert isinstance(finish.error, StreamBroken)
        assert recorder.text == text_of(0, 4)

    bench(check, engine)


def test_without_done_the_answer_is_whole_all_the_same() -> None:
    async def check(made: Bench) -> None:
        made.server.faults.no_done = made.server.faults.no_usage = True
        recorder, finish = await made.end()
        assert (finish.reason, recorder.text) == (FinishReason.LENGTH, text_of(0, 12))
        assert finish.usage.completion_tokens == 12
        for kind in ("no_end", "no_usage"):
            assert made.counted("penstock_backend_anomalies_total", kind=kind) == 1
        assert any("usage" in note.text for note in made.backend.status.notes)

    bench(check)


def test_what_breaks_after_the_finish_costs_nothing() -> None:
    async def check(made: Bench) -> None:
        # The twelfth event has the finish; then the usage would come.
        made.server.faults.after, made.server.faults.close = 12, True
        recorder, finish = await made.end()
        assert (finish.reason, recorder.num_tokens) == (FinishReason.LENGTH, 12)

    bench(check)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices": [{"index": 0, "te\n\n',
        b'data: {"choices": [{"index": 0, "text": "\xff\xfe", "token_ids": [1]}]}\n\n',
        b'data: {"choices": [{"index": 0, "text": 7}]}\n\n',
        b'data: {"choices": [{"index": 0, "token_ids": ["x"]}]}\n\n',
        b'data: {"choices": [{"index": 0, "text": "x", "token_ids": [-1]}]}\n\n',
        b'data: {"choices": [{"index": 0, "text": "x", "token_ids": [4294967295]}]}\n\n',
        b"data: [1, 2]\n\n",
        b"data: " + b"x" * 4096 + b"\n\n",
        b"data: " + b"x" * 4096,
    ],
)
def test_corrupt_and_oversized_events(event: bytes) -> None:
    async def check(made: Bench) -> None:
        beside = made.start(max_tokens=300)
        await beside.started.wait()
        made.server.faults.after, made.server.faults.event = 2, event
        recorder, finish = await made.end()
        assert isinstance(finish.error, StreamBroken)
        assert recorder.text == text_of(0, 2)
        assert made.counted("penstock_backend_anomalies_total", kind="corrupt") >= 1
        made.server.faults.after = None
        assert made.backend.status.ready
        assert (await made.end())[1].reason is FinishReason.LENGTH

    bench(check, step_s=0.001)


def test_another_model_is_not_used_and_its_worker_is_not_ready() -> None:
    async def check(made: Bench) -> None:
        made.server.faults.model = "something-else"
        error = await made.error()
        assert isinstance(error, WorkerUnavailable)
        assert not made.backend.status.ready
        assert "something-else" in " ".join(note.text for note in made.backend.status.notes)

    bench(check)


def test_a_worker_that_does_not_list_the_model_is_not_ready() -> None:
    async def check(made: Bench) -> None:
        made.server.MODEL = "renamed"
        await made.server.kill()
        await until(lambda: not made.backend.status.ready)
        await made.server.start()
        await until(lambda: "renamed" in made.backend.status.stage)
        made.server.MODEL = "served"
        await until(lambda: made.backend.status.ready)

    bench(check)


@pytest.mark.parametrize(
    ("usage", "engine"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 999}, "vllm"),
        ({"prompt_tokens": 9, "completion_tokens": 12}, "vllm"),
        ({"prompt_tokens": 3, "completion_tokens": -4}, "vllm"),
        ({"completion_tokens": 12, "prompt_tokens": 77}, "sglang"),
        ({"generated_tokens": 999}, "tgi"),
    ],
)
def test_wrong_usage_is_noted_and_ours_counts(usage: dict[str, int], engine: str) -> None:
    async def check(made: Bench) -> None:
        made.server.faults.usage = usage
        _, finish = await made.end()
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 12)
        assert finish.usage.cached_tokens <= 3
        assert made.counted("penstock_backend_anomalies_total", kind="usage_mismatch") == 1

    bench(check, engine)


def test_more_tokens_than_asked_for_are_cut() -> None:
    async def check(made: Bench) -> None:
        made.server.faults.overrun = 1000
        recorder, finish = await made.end()
        assert (finish.reason, recorder.num_tokens) == (FinishReason.LENGTH, 12)
        assert made.counted("penstock_backend_anomalies_total", kind="overrun") == 1
        await until(lambda: made.server.num_aborted == 1)

    bench(check, step_s=0.001)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi"])
def test_eos_ends_an_answer_and_is_no_part_of_it(engine: str) -> None:
    async def check(made: Bench) -> None:
        made.server.faults.eos_after = 5
        request = made.requests.make(max_tokens=100)
        sampling = type(request.sampling)(max_tokens=100, stop_token_ids=(256,))
        recorder = Recorder()
        made.backend.generate(
            type(request)(request_id=request.request_id, prompt_token_ids=(1, 2, 3), sampling=sampling),
            recorder,
        )
        finish = await recorder.end()
        assert (finish.reason, finish.stop, recorder.text) == (FinishReason.STOP, None, text_of(0, 5))
        assert finish.usage.completion_tokens == 5
        assert made.counted("penstock_backend_anomalies_total", kind="usage_mismatch") == 0

    bench(check, engine)


# --- silence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hang", "drip"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_worker_that_hangs_or_only_keeps_the_connection_alive_is_left(how: str, after: int) -> None:
    async def check(made: Bench) -> None:
        setattr(made.server.faults, how, True)
        made.server.faults.after = after
        error = await made.error()
        assert type(error) is (StreamBroken if after else WorkerUnavailable)
        assert "timed out" in str(error)
        await until(lambda: made.server.num_running == 0)

    bench(check, config=IMPATIENT)


def test_a_connection_that_is_never_answered_times_out() -> None:
    async def check(made: Bench) -> None:
        made.server.faults.status = None
        made.server.GENERATES = ()

        async def never(*_: object) -> None:
            await asyncio.sleep(60)

        made.server.respond = never
        assert "head" in str(await made.error())

    bench(check, config=IMPATIENT)


def test_an_abort_is_seen_by_the_worker() -> None:
    async def check(made: Bench) -> None:
        recorder = Recorder()
        generation = made.backend.generate(made.requests.make(max_tokens=30_000), recorder)
        await recorder.started.wait()
        generation.abort()
        await until(lambda: made.server.num_aborted == 1)

    bench(check, step_s=0.001)

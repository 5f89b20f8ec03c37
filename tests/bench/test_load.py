import asyncio
from collections.abc import Iterator

import msgspec
import pytest
from scripted_endpoint import Script, StandIn

from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.bench.load import (
    ERROR_KINDS_MAX,
    Level,
    LoadRun,
    LoadTally,
    ProbeRefused,
    RequestShape,
    Stopwatch,
    probe,
)
from penstock.bench.prompts import Prompt
from penstock.bench.report import LevelReport, level_report
from penstock.clock import NS_PER_MS, ManualClock, SystemClock
from penstock.policy.admission.admit import Promise

SHAPE = RequestShape(model="scripted", output_tokens=8)
NO_PROMISE = Promise()
PROMPT = Prompt(({"role": "user", "content": "hi there"},))


def run_level(
    script: Script, level: Level, *, prompts: int = 1000, promise: Promise = NO_PROMISE
) -> tuple[LevelReport, StandIn]:
    async def main() -> tuple[LevelReport, StandIn]:
        stand_in = StandIn(script)
        async with stand_in.listening() as url:
            client = Client(ApiAddress.parse(url), limits=ClientLimits(request_timeout_s=10))
            load = LoadRun(client, SHAPE, level, seed=1, clock=SystemClock(), promise=promise)
            supply: Iterator[Prompt] = iter([PROMPT] * prompts)
            await load.run(supply)
            await client.close()
            return level_report(level, load), stand_in

    return asyncio.run(main())


def test_closed_loop_counts_what_the_server_counts() -> None:
    report, stand_in = run_level(Script(), Level(name="c=4", requests_max=20, concurrency=4))
    assert (report.requests_ok, report.requests_failed, len(stand_in.requests)) == (20, 0, 20)
    assert stand_in.connections <= 4
    assert report.output_tokens == 160
    assert report.prompt_tokens == 20 * 6
    assert (report.tokens_counted_by, report.mode) == ("usage", "closed")
    assert report.ttft_ms.count == report.e2e_ms.count == report.tpot_ms.count == 20
    assert report.itl_ms.count == 140
    assert report.ttft_ms.p50 <= report.e2e_ms.p50


def test_requests_are_what_was_asked_for() -> None:
    _, stand_in = run_level(Script(), Level(name="c=1", requests_max=1, concurrency=1))
    (request,) = stand_in.requests
    assert request == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "hi there"}],
        "max_tokens": 8,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_open_loop_sends_at_its_own_times() -> None:
    level = Level(name="500/s", requests_max=25, rate=500.0)
    report, stand_in = run_level(Script(), level)
    assert (report.requests_ok, report.mode, report.rate) == (25, "open", 500.0)
    assert len(stand_in.requests) == 25


def test_waiting_for_room_counts_as_latency() -> None:
    """Coordinated omission: a slow server must not thin out what is measured."""
    script = Script(words=("a",), first_s=0.05)
    report, _ = run_level(script, Level(name="x", requests_max=6, rate=100_000.0, in_flight_max=1))
    assert report.ttft_ms.max >= 6 * 50 * 0.9  # Six due at once, served one after the other.
    assert report.send_delay_ms.max >= 5 * 50 * 0.9


def test_prompts_may_run_out() -> None:
    report, _ = run_level(Script(), Level(name="c=3", requests_max=100, concurrency=3), prompts=5)
    assert report.requests_ok == 5


def test_a_duration_ends_the_sending() -> None:
    level = Level(name="c=1", requests_max=10**6, duration_s=0.05, concurrency=1)
    report, _ = run_level(Script(), level, prompts=10**6)
    assert 0 < report.requests_ok < 10**6


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (Script(refuse_status=429, refuse_message="slow  down"), "HTTP 429: slow down"),
        (Script(error_after=2), "error in the stream: the script says so"),
        (Script(cut_after=2), "the server closed the connection"),
        (Script(key="other"), "HTTP 401: Incorrect API key provided."),
    ],
)
def test_failures_are_counted_by_reason(script: Script, why: str) -> None:
    report, _ = run_level(script, Level(name="c=2", requests_max=3, concurrency=2))
    assert (report.requests_ok, report.requests_failed, report.errors) == (0, 3, {why: 3})
    assert report.ttft_ms.count == 0


def test_without_usage_chunks_are_counted() -> None:
    report, _ = run_level(Script(usage=False), Level(name="c=1", requests_max=2, concurrency=1))
    assert (report.output_tokens, report.tokens_counted_by) == (16, "chunks")


def event(fields: object) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def test_the_stopwatch_runs_from_the_intended_time() -> None:
    from penstock.bench.client import ApiResponse

    clock, tally = ManualClock(now_ns=1000 * NS_PER_MS), LoadTally(1)
    watch = Stopwatch(tally, clock, intended_ns=900 * NS_PER_MS)
    watch.on_bytes(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    for gap_ms in (50, 10, 20):
        clock.advance(gap_ms * NS_PER_MS)
        watch.on_bytes(event({"choices": [{"delta": {"content": "x"}}]}))
    clock.advance(5 * NS_PER_MS)
    watch.on_bytes(
        event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}) + b"data: [DONE]\n\n"
    )
    assert watch.settle(ApiResponse(200, b""))
    assert tally.ttft.summary().p50 == 150 * NS_PER_MS
    assert tally.tpot.summary().p50 == 10 * NS_PER_MS  # 30 ms for the three tokens after the first.
    assert tally.itl.summary().max == 20 * NS_PER_MS
    assert tally.e2e.summary().p50 == 185 * NS_PER_MS


def test_goodput_counts_requests_that_kept_both_promises_and_not_all_that_were_answered() -> None:
    """Six due at once, served one after the other, 50 ms each: only the first are in time."""
    script, level = (
        Script(words=("a",), first_s=0.05),
        Level(name="x", requests_max=6, rate=100_000.0, in_flight_max=1),
    )
    report, _ = run_level(script, level, promise=Promise(ttft_ns=170 * NS_PER_MS, tpot_ns=20 * NS_PER_MS))
    assert report.requests_ok == 6
    assert 1 <= report.requests_good <= 3
    assert report.good_share == report.requests_good / 6
    assert report.goodput_requests_per_s == pytest.approx(report.requests_good / report.duration_s)
    assert report.goodput_tokens_per_s == pytest.approx(8 * report.requests_good / report.duration_s)
    assert report.goodput_tokens_per_s < report.output_tokens_per_s
    slow = Script(gap_s=0.03)
    late, _ = run_level(
        slow, Level(name="c=1", requests_max=2, concurrency=1), promise=Promise(0, 20 * NS_PER_MS)
    )
    assert (late.requests_ok, late.requests_good) == (2, 0)


def test_what_failed_is_not_good() -> None:
    level = Level(name="c=1", requests_max=3, concurrency=1)
    report, _ = run_level(Script(refuse_status=429), level)
    assert (report.requests_failed, report.requests_good, report.good_share) == (3, 0, 0)
    report, _ = run_level(Script(), level)
    assert (report.requests_good, report.good_share) == (
        3,
        1,
    )  # Without a promise whatever ends well is good.


def test_error_kinds_are_bounded() -> None:
    tally = LoadTally(1)
    for number in range(100):
        tally.fail(f"kind {number}")
    assert len(tally.errors) == ERROR_KINDS_MAX + 1
    assert sum(tally.errors.values()) == tally.failed == 100


def test_the_probe_explains_refusals() -> None:
    async def ask(script: Script) -> int:
        async with StandIn(script).listening() as url:
            client = Client(ApiAddress.parse(url))
            try:
                return (await probe(client, SHAPE, PROMPT)).prompt_tokens
            finally:
                await client.close()

    assert asyncio.run(ask(Script())) == 6
    with pytest.raises(ProbeRefused, match="HTTP 400: unknown field ignore_eos"):
        asyncio.run(ask(Script(refuse_status=400, refuse_message="unknown field ignore_eos")))
    with pytest.raises(ProbeRefused, match="no usage"):
        asyncio.run(ask(Script(usage=False)))

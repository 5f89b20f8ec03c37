"""Traces without a gateway: W3C's headers, which traces are kept, and an exporter that is away."""

import asyncio
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import ManualClock
from penstock.config.tree import LogConfig, TracesConfig
from penstock.rng import stream
from penstock.telemetry import traces
from penstock.telemetry.log import Log
from penstock.telemetry.traces import EndedTrace, RequestTrace, TraceContext, TraceKeeper, read_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("parent", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f" 00-{TRACE}-{SPAN}-03 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-a-later-version-says", True),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        ("", None),
    ],
)
def test_traceparent_is_read_as_w3c_has_it(parent: str, is_sampled: bool | None) -> None:
    found = read_context(parent.encode(), None)
    expected = None
    if is_sampled is not None:
        expected = TraceContext(trace_id=TRACE, span_id=SPAN, is_sampled=is_sampled)
    assert found == expected


@given(parent=st.binary(max_size=80), state=st.none() | st.binary(max_size=600))
def test_any_bytes_are_a_context_or_none(parent: bytes, state: bytes | None) -> None:
    found = read_context(parent, state)
    if found is not None:
        for name, value in RequestTrace(found).headers(1):
            assert f"{name}: {value}".isprintable()
            assert value.isascii()


def test_a_long_or_broken_tracestate_is_dropped_and_the_trace_continues() -> None:
    parent = f"00-{TRACE}-{SPAN}-01".encode()
    for state in (b"a=" + b"x" * 600, b"a=\xff", b"a=b\x01"):
        found = read_context(parent, state)
        assert found is not None
        assert (found.trace_id, found.state) == (TRACE, "")
    found = read_context(parent, b"vendor=7,other=x")
    assert found is not None
    trace = RequestTrace(found, int(SPAN, 16))
    assert trace.headers(1) == (
        ("traceparent", f"00-{TRACE}-{SPAN}-01"),
        ("tracestate", "vendor=7,other=x"),
    )


def begun() -> RequestTrace:
    """One that is sampled."""
    return RequestTrace(None, stream(5, "trace").getrandbits(traces.TRACE_BITS), traces.SHARE_MAX + 1)


def test_workers_get_the_span_of_their_attempt() -> None:
    trace = begun()
    trace.start_attempt(5, 1, "a", "first")
    trace.start_attempt(9, 2, "b", "retry")
    ((name, first),), ((_, second),) = trace.headers(1), trace.headers(2)
    assert name == "traceparent"
    assert first == f"00-{trace.trace_id}-{trace.id_of(1)}-01"
    assert second == f"00-{trace.trace_id}-{trace.id_of(2)}-01"
    assert len({trace.span_id, trace.id_of(1), trace.id_of(2)}) == 3


@given(bits=st.integers(0, (1 << traces.TRACE_BITS) - 1))
def test_ids_are_hexadecimal_and_never_all_zeros(bits: int) -> None:
    trace = RequestTrace(None, bits)
    ids = [trace.id_of(number) for number in range(40)]
    assert len(set(ids)) == len(ids)
    for text, length in ((trace.trace_id, 32), *((each, 16) for each in ids)):
        assert len(text) == length
        assert int(text, 16)


def test_of_two_attempts_at_once_the_one_without_output_is_superseded() -> None:
    trace = begun()
    trace.start_attempt(5, 1, "a", "first")
    trace.start_attempt(9, 2, "b", "hedge")
    trace.keep_attempt(12, 2)
    trace.first_output(12, 2)
    trace.end_attempt(15, 1, "CLOSED")  # Its end was told: this is its worker's last word.
    trace.end_attempt(20, 2, None)
    lost, won = trace.attempts
    assert (lost.ended_ns, lost.error, lost.first_ns) == (12, "superseded", -1)
    assert (won.kind, won.first_ns, won.ended_ns, won.error) == ("hedge", 12, 20, "")


def test_a_trace_that_is_not_ours_goes_on_as_it_came() -> None:
    context = TraceContext(trace_id=TRACE, span_id=SPAN, is_sampled=False)
    trace = RequestTrace(context, is_ours=False)
    trace.start_attempt(5, 1, "a", "first")
    assert trace.headers(1) == (("traceparent", f"00-{TRACE}-{SPAN}-00"),)
    assert trace.attempts == []


def test_a_trace_has_a_bound() -> None:
    trace = begun()
    for number in range(1, 2 * traces.ATTEMPTS_MAX):
        trace.start_attempt(number, number, "a", "retry")
        ((_, parent),) = trace.headers(number)
    assert len(trace.attempts) == traces.ATTEMPTS_MAX
    assert parent == f"00-{trace.trace_id}-{trace.span_id}-01"


class Collector:
    """An exporter that keeps what it gets, or refuses it."""

    def __init__(self) -> None:
        self.taken: list[EndedTrace] = []
        self.is_there, self.calls, self.is_closed = True, 0, False

    def export(self, batch) -> str:
        self.calls += 1
        self.taken += batch if self.is_there else []
        return "" if self.is_there else "refused"

    def close(self) -> None:
        self.is_closed = True


def make(**terms: float) -> tuple[TraceKeeper, Collector, io.StringIO]:
    clock, collector, text = ManualClock(), Collector(), io.StringIO()
    config = TracesConfig(endpoint="http://collector", **terms)
    return TraceKeeper(config, collector, Log(LogConfig(), clock, stream=text)), collector, text


def test_failed_and_slow_ones_are_kept_and_a_share_of_the_rest() -> None:
    keeper, _, _ = make(share=0.25, slow_ms=1000)
    made = [keeper.begin(None) for _ in range(4000)]
    num_kept = sum(keeper.is_kept(trace, failed=False, ttft_ns=5) for trace in made)
    assert 800 < num_kept < 1200
    other = next(trace for trace in made if not trace.is_sampled)
    assert keeper.is_kept(other, failed=True, ttft_ns=None)
    assert keeper.is_kept(other, failed=False, ttft_ns=10**9)
    assert not keeper.is_kept(other, failed=False, ttft_ns=10**9 - 1)
    none_slow, _, _ = make(share=0, slow_ms=0)
    assert not none_slow.is_kept(none_slow.begin(None), failed=False, ttft_ns=10**15)


def test_a_caller_decides_for_its_own_trace() -> None:
    keeper, _, _ = make(share=0)
    for is_sampled in (True, False):
        trace = keeper.begin(TraceContext(trace_id=TRACE, span_id=SPAN, is_sampled=is_sampled))
        assert keeper.is_kept(trace, failed=False, ttft_ns=1) is is_sampled


def ended(keeper: TraceKeeper) -> EndedTrace:
    return EndedTrace(
        trace=keeper.begin(None), name="chat m", offset_ns=0, started_ns=1, accepted_ns=2, ended_ns=3,
        status=200, error="", attributes={},
    )  # fmt: skip


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    keeper, collector, _ = make()
    for _ in range(traces.PENDING_MAX + 7):
        keeper.add(ended(keeper))
    assert keeper.dropped == 7

    async def check() -> None:
        keeper.start()
        await keeper.stop()

    asyncio.run(check())
    assert len(collector.taken) == keeper.exported == traces.PENDING_MAX
    assert collector.calls == traces.PENDING_MAX // traces.BATCH_MAX
    assert collector.is_closed


def test_a_full_batch_is_exported_at_once(monkeypatch) -> None:
    monkeypatch.setattr(traces, "EVERY_S", 3600.0)
    keeper, collector, _ = make()

    async def check() -> None:
        keeper.start()
        await asyncio.sleep(0)
        for _ in range(traces.BATCH_MAX):
            keeper.add(ended(keeper))
        while keeper.exported < traces.BATCH_MAX:
            await asyncio.sleep(0.001)
        assert collector.calls == 1
        await keeper.stop()

    asyncio.run(check())


def test_a_collector_that_is_away_is_said_once_and_does_not_hold_up_the_end() -> None:
    keeper, collector, text = make()
    collector.is_there = False
    for _ in range(3 * traces.BATCH_MAX):
        keeper.add(ended(keeper))

    async def check() -> None:
        keeper.start()
        await keeper.stop()

    asyncio.run(check())
    assert (collector.calls, keeper.exported, keeper.dropped) == (1, 0, traces.BATCH_MAX)
    assert text.getvalue().count("the collector takes no traces") == 1

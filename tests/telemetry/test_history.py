"""The history: columns, sums, percentiles, and what is left of it after a restart."""

import asyncio
import io
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import NS_PER_MS, NS_PER_S, ManualClock
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import LogConfig
from penstock.policy.admission.admit import Promises
from penstock.telemetry.catalog import Endpoint, OutcomeLabel
from penstock.telemetry.counts import Book, Counts, Latency, RequestMeasurement, Series, bounds_us, bucket_of
from penstock.telemetry.history import AT_ONCE_MAX, COLUMNS_MAX, DAY_S, SERIES_MAX, SLO_S, History, Recorder
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.watch import HistoryFiles, HistoryKeeper

M = Series("m", "default")


def ended(
    recorder, *, model="m", outcome=OutcomeLabel.STOP, queue_ms=10, ttft_ms=100, tpot_ms=20.0, **fields
):
    answered = outcome in ("stop", "length")
    record = RequestMeasurement(
        endpoint=Endpoint.CHAT,
        outcome=outcome,
        duration_ns=NS_PER_S,
        queue_ns=queue_ms * NS_PER_MS if answered else None,
        ttft_ns=ttft_ms * NS_PER_MS if answered else None,
        tpot_ns=round(tpot_ms * NS_PER_MS) if answered else None,
        prompt_tokens=100,
        cached_tokens=40,
        generated_tokens=10,
        **({"tier": "free", "band": "default"} | fields),
    )
    recorder.ended(model, record)


@pytest.fixture
def clock():
    return ManualClock(wall_ns=1_700_000_040 * NS_PER_S)


@pytest.fixture
def recorder():
    return Recorder(Promises(AdmissionConfig()), Metrics(["m"], version="0"))


def keeper(history, path, lines=None):
    log = Log(LogConfig(), ManualClock(), stream=lines or io.StringIO())
    return HistoryKeeper(history, HistoryFiles(path), log)


@given(st.integers(0, 2**32 - 1))
def test_buckets_are_narrow_and_in_order(us):
    bucket = bucket_of(us)
    lower, upper = bounds_us(bucket), bounds_us(bucket + 1)
    assert lower <= us < upper
    assert upper - lower <= max(1, lower / 8)


@given(st.lists(st.integers(0, 10**10), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_percentiles_of_a_sum_are_those_of_all(values, share):
    whole, parts = Latency(), [Latency(), Latency()]
    whole.observe_all(sorted(values))
    for i, ns in enumerate(values):
        parts[i % 2].observe_all([ns])
    parts[0].add(parts[1])
    assert parts[0] == whole
    exact_ms = sorted(values)[max(0, -(-len(values) * round(share * 100) // 100) - 1)] / NS_PER_MS
    assert abs(whole.quantile_ms(share) - exact_ms) <= exact_ms / 15 + 0.002


@given(st.lists(st.integers(-5, 10**14), max_size=50))
def test_durations_beyond_the_bounds_count_as_the_bounds(values):
    found = Latency()
    found.observe_all(sorted(values))
    us = [min(max(0, ns // 1000), (1 << 32) - 1) for ns in values]
    assert found == Latency(sum(us), dict(Counter(map(bucket_of, sorted(us)))))


def test_requests_that_ended_are_on_the_page_and_in_the_history_once():
    metrics = Metrics(["m"], version="0")
    recorder = Recorder(Promises(AdmissionConfig()), metrics)
    for number in range(AT_ONCE_MAX + 40):  # More than are counted together, of two kinds.
        ended(recorder, ttft_ms=100 + number, tenant="a" if number % 3 else "b")
        if number == 10:
            assert b'penstock_request_ttft_seconds_count{model="m"} 11.0' in metrics.render()
    ended(recorder, outcome=OutcomeLabel.SHED)
    page = metrics.render().decode()
    assert 'outcome="stop"} 296.0' in page
    assert 'outcome="shed"} 1.0' in page
    assert page == metrics.render().decode(), "nothing is counted twice"
    ((_, counts),) = recorder.take()
    assert (counts.requests, counts.ttft.count) == (297, 296)
    assert not recorder.take()


def test_a_window_has_what_ended_in_it_by_model_and_band(clock, recorder):
    history = History(clock)
    for ttft_ms in (100, 600, 300):
        ended(recorder, ttft_ms=ttft_ms)
    ended(recorder, outcome=OutcomeLabel.SHED)
    ended(recorder, outcome=OutcomeLabel.LIMITED)
    ended(recorder, band="priority", tier="interactive", ttft_ms=250)
    history.add(recorder.take())
    clock.advance(10 * NS_PER_S)
    ended(recorder)
    history.add(recorder.take())
    assert not recorder.take()
    window = history.window(900)
    assert (window.step_s, len(window.times), window.now) == (5, 180, 1_700_000_050)
    assert window.times[-1] <= window.now < window.times[-1] + 5
    default, priority = window.series
    assert (default.model, default.band, priority.band) == ("m", "default", "priority")
    assert default.requests[-3:] == [5, 0, 1]
    assert sum(default.requests) == 6
    assert default.outcomes == {
        "stop": [*[0] * 177, 3, 0, 1],
        "limited": [*[0] * 177, 1, 0, 0],
        "shed": [*[0] * 177, 1, 0, 0],
    }
    assert default.ttft_p50_ms[-3] == pytest.approx(300, rel=0.07)
    assert default.ttft_p50_ms[-2] is None
    assert (default.queue_mean_ms[-1], default.prefill_mean_ms[-1]) == (10.0, 90.0)
    assert (default.ttft_late[-3], default.ttft_due[-3]) == (1, 3)
    # 200 ms are promised to the interactive tier, whatever its band.
    assert (priority.ttft_late[-3], priority.ttft_due[-3]) == (1, 1)
    assert window.total.requests[-3:] == [6, 0, 1]
    assert window.total_summary.requests == [7]
    assert window.summary[0].generated_tokens == [60]
    assert window.summary[0].ttft_p99_ms[0] == pytest.approx(600, rel=0.07)


def test_a_day_is_shown_in_few_columns_and_three_days_are_counted(clock, recorder):
    history = History(clock)
    for _ in range(3 * 24):
        ended(recorder, ttft_ms=900)
        history.add(recorder.take())
        clock.advance(3600 * NS_PER_S)
    window = history.window(DAY_S)
    assert (window.step_s, len(window.times)) == (300, COLUMNS_MAX)
    assert window.total_summary.requests == [23]
    assert history.window(3600).step_s == 60
    assert history.slo(M, "ttft", SLO_S).bad == 71
    assert history.slo(M, "ttft", 7200).bad == 1
    assert history.slo(M, "ttft", 7260).total == 2
    assert history.slo(Series("other", ""), "ttft", SLO_S).total == 0
    clock.advance(SLO_S * NS_PER_S)
    assert history.slo(M, "ttft", SLO_S).total == 0


def test_what_is_over_the_bound_is_other(clock):
    history = History(clock)
    models = [f"m{i}" for i in range(SERIES_MAX + 30)]
    recorder = Recorder(Promises(AdmissionConfig()), Metrics(models, version="0"))
    for i in range(SERIES_MAX + 30):
        ended(recorder, model=f"m{i}")
    history.add(recorder.take())
    window = history.window(900)
    assert len(window.series) == SERIES_MAX + 1
    assert next(each for each in window.series if each.model == "other").requests[-1] == 30


async def kept(history, path, lines=None):
    one = keeper(history, path, lines)
    await one.load()
    return one


def test_it_is_there_after_a_restart_and_all_but_the_last_minute_after_a_kill(clock, recorder, tmp_path):
    async def scene():
        history = History(clock)
        first = await kept(history, tmp_path)
        ended(recorder, ttft_ms=700)
        history.add(recorder.take())
        clock.advance(60 * NS_PER_S)
        first.write(history.take_closed())
        ended(recorder)
        history.add(recorder.take())
        # Killed here.
        again = History(clock)
        second = await kept(again, tmp_path)
        assert again.window(3600).total_summary.requests == [1]
        assert again.slo(M, "ttft", SLO_S).bad == 1
        ended(recorder)
        again.add(recorder.take())
        await second.stop()
        third = History(clock)
        await kept(third, tmp_path)
        assert third.window(3600).total_summary.requests == [2]
        assert third.slo(M, "availability", 3600).total == 2

    asyncio.run(scene())


@pytest.mark.parametrize("harm", ["cut", "flip", "noise"])
def test_a_damaged_file_is_one_warning(clock, recorder, tmp_path, harm):
    async def scene():
        history = History(clock)
        first = await kept(history, tmp_path)
        for _ in range(2):
            ended(recorder)
            history.add(recorder.take())
            clock.advance(60 * NS_PER_S)
            first.write(history.take_closed())
        (path,) = tmp_path.glob("*.hist")
        data = bytearray(path.read_bytes())
        if harm == "cut":
            del data[-3:]
        elif harm == "flip":
            data[-3] ^= 1
        else:
            data[:] = b"\xff" * 100
        path.write_bytes(data)
        lines = io.StringIO()
        again = History(clock)
        await kept(again, tmp_path, lines)
        assert again.window(3600).total_summary.requests == [0 if harm == "noise" else 1]
        (line,) = lines.getvalue().splitlines()
        assert "WARNING" in line.upper()
        assert "damaged" in line

    asyncio.run(scene())


def test_old_files_leave_the_disk(clock, recorder, tmp_path):
    files = HistoryFiles(tmp_path)
    body = Book(1, [(M, Counts(prompt_tokens=1))]).encode()
    for minute in range(0, 6 * 360, 360):
        files.append(minute, body)
    assert len(list(tmp_path.glob("*.hist"))) == 6
    # By their own dates these were written just now, so only years ahead are they old.
    files.append(100_000_000, body)
    files.close()
    assert len(list(tmp_path.glob("*.hist"))) == 1


def test_a_clock_that_is_set_back_loses_nothing(clock, recorder):
    history = History(clock)
    ended(recorder)
    history.add(recorder.take())
    back = ManualClock(wall_ns=clock.wall_ns() - 120 * NS_PER_S)
    history._clock = back
    ended(recorder)
    history.add(recorder.take())
    assert history.slo(M, "availability", 3600).total == 1, "the minute ahead is not yet"
    back.advance(180 * NS_PER_S)
    assert history.slo(M, "availability", 3600).total == 2
    assert history.window(3600).total_summary.requests == [2]

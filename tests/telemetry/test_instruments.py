"""Our counters beside Prometheus' client library: the same numbers, and the same page."""

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.telemetry.catalog import Metric
from penstock.telemetry.instruments import Instruments

BOUNDS = (0.001, 0.25, 1.0, 30.0)
CATALOG = (
    Metric("c_total", "counter", "What\nhas \\ come.", ("model", "band")),
    Metric("g", "gauge", "What is."),
    Metric("h_seconds", "histogram", "How long.", ("model",), BOUNDS),
)
labels = st.text('ab\\"\n{},= ü', max_size=4)
numbers = st.floats(0, 100) | st.sampled_from(BOUNDS)


def theirs() -> tuple[prometheus_client.CollectorRegistry, list]:
    prometheus_client.disable_created_metrics()
    registry = prometheus_client.CollectorRegistry()
    kinds = {"counter": prometheus_client.Counter, "gauge": prometheus_client.Gauge}
    made = [kinds[each.kind](each.name, each.help, each.labels, registry=registry) for each in CATALOG[:2]]
    last = CATALOG[2]
    bounds = {"buckets": last.buckets, "registry": registry}
    return registry, [*made, prometheus_client.Histogram(last.name, last.help, last.labels, **bounds)]


@given(counts=st.lists(st.tuples(labels, labels, numbers)), times=st.lists(st.tuples(labels, numbers)))
def test_the_page_is_the_one_of_the_client_library(counts, times) -> None:
    ours, (registry, (counter, gauge, histogram)) = Instruments(CATALOG), theirs()
    for model, band, number in counts:
        ours.counter("c_total").labels(model, band).inc(number)
        counter.labels(model, band).inc(number)
        ours.gauge("g").labels().set(number)
        gauge.set(number)
    for model, number in times:
        ours.histogram("h_seconds").labels(model).observe(number)
        histogram.labels(model).observe(number)
    expected = prometheus_client.generate_latest(registry)
    page = ours.page()
    assert list(text_string_to_metric_families(page.decode())) == list(
        text_string_to_metric_families(expected.decode())
    )
    assert [line for line in page.splitlines() if line.startswith(b"#")] == [
        line for line in expected.splitlines() if line.startswith(b"#")
    ]


@given(times=st.lists(numbers))
def test_observations_that_are_counted_together_are_counted_as_one_by_one(times) -> None:
    single, together = Instruments(CATALOG), Instruments(CATALOG)
    times.sort()
    for number in times:
        single.histogram("h_seconds").labels("m").observe(number)
    together.histogram("h_seconds").labels("m").observe_all(times)
    one, all_of_them = (each.histogram("h_seconds").labels("m") for each in (single, together))
    assert one.counts == all_of_them.counts
    assert one.sum == pytest.approx(all_of_them.sum)


def test_what_is_removed_is_not_shown_and_begins_anew() -> None:
    ours = Instruments(CATALOG)
    family = ours.counter("c_total")
    family.labels("m", "b").inc(3)
    assert b'c_total{band="b",model="m"} 3.0\n' in ours.page()
    family.remove("m", "b")
    family.remove("m", "never there")
    assert b"c_total{" not in ours.page()
    family.labels("m", "b").inc()
    assert b'c_total{band="b",model="m"} 1.0\n' in ours.page()


def test_wrong_uses_are_bugs() -> None:
    ours = Instruments(CATALOG)
    with pytest.raises(AssertionError):
        ours.gauge("c_total")
    with pytest.raises(AssertionError):
        ours.counter("c_total").labels("m")
    with pytest.raises(AssertionError):
        ours.counter("c_total").labels("m", "b").inc(-1)

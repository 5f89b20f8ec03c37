import importlib.util
from pathlib import Path

import msgspec
import pytest
from fake_backend import INFO
from prometheus_client.parser import text_string_to_metric_families

from penstock.policy.lifecycle.machine_costs import Costs
from penstock.policy.placement.pick import Choice, Decision
from penstock.policy.placement.score import ScoredRequest, WorkerFacts
from penstock.policy.resilience.probes import ProbeAnswer
from penstock.policy.resilience.worker_state import WorkerState
from penstock.policy.terms import PlacementTerms
from penstock.protocol.worker import Stats
from penstock.protocol.worker_parts import DeviceReadings, GpuReadings
from penstock.telemetry.catalog import CATALOG, Endpoint, OutcomeLabel
from penstock.telemetry.counts import EndedTogether, RequestMeasurement
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.worker_meters import WorkerLabels
from penstock.types import FinishReason, RequestId, WorkerId

GOLDEN = Path(__file__).with_name("golden_metrics.txt")
ROOT = Path(__file__).parents[2]
ROOT = Path(__file__).parents[2]
MS = 1_000_000


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def exposed_names(metrics: Metrics) -> list[str]:
    """`name{label,label} kind` of all that is exposed: the interface, without the numbers."""
    found = set()
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.add(f"{sample.name}{{{','.join(sorted(sample.labels))}}} {family.type}")
    return sorted(found)


def test_names_and_labels_are_the_golden_ones() -> None:
    """To change the interface on purpose, change the golden file by hand and say so in the changelog."""
    metrics = Metrics(["m"], version="1.2.3")
    metrics.http_response(200)
    metrics.budget_warning("day")
    metrics.model("m").engine_stats({"m-0": None})
    metrics.tenant(
        EndedTogether(
            RequestMeasurement(
                endpoint=Endpoint.CHAT, outcome=OutcomeLabel.STOP, duration_ns=1, prompt_tokens=1
            )
        )
    )
    metrics.judged("m", "default", "ttft", due=1, missed=1)
    metrics.queue_waiting("m", 1)
    metrics.scale_wanted.labels("m", "").set(1)
    for count in (metrics.refused, metrics.evicted, metrics.diverted):
        count("m", "queue_full")
    metrics.template_child("m", "unpriced")
    metrics.retried("m")
    metrics.timed_out("m")
    metrics.migrated("m")
    metrics.sent_to_cell("m", "west")
    metrics.guest_ended("west", "stop")
    metrics.round_trip("west", 1_000)
    metrics.shadowed("m", "compared")
    metrics.hedged("m", "won")
    metrics.breaker("m", "m-0", 1)
    metrics.retry_budget(3.0)
    metrics.predicted("m", 0.1)
    meters = metrics.backend("vllm")
    meters.ended("ok")
    meters.odd("no_end")
    meters.missing("vllm:num_requests_running")
    meters.scrape_failed()
    worker = WorkerFacts(WorkerId("m-0"), 0, device_tokens=50)
    metrics.placed(
        Decision(
            request_id=RequestId("r"), route="m", at_ns=0, config=PlacementTerms(), draws=(),
            request=ScoredRequest(prompt_tokens=100, output_tokens=10), candidates=(worker,),
            choice=Choice(0, "best"), looked_up=True,
        )
    )  # fmt: skip
    anomalies = metrics.anomalies()
    anomalies.probed("m", "m-0", "right", ProbeAnswer(tokens=()), 0.0)
    anomalies.ejected("m", "slow")
    anomalies.fault("m", "xid")
    anomalies.workers([("m", "m-0", None, 1.0)])
    anomalies.certain([("m", "slow")])
    metrics.shared_limits(is_away=True, failures=2, num_gateways=3)
    metrics.accelerator_costs({"m": Costs()})
    gpu = GpuReadings(index=1, util=2, memory_util=3, used_mib=4, free_mib=5, power_w=6.5, temperature_c=7,
        sm_clock_mhz=8, xid=79)  # fmt: skip
    readings = DeviceReadings(rss_bytes=1, cpu_ms=1500, cgroup_bytes=2, load=0.5, gpu=gpu)
    reported = [stats(1), msgspec.structs.replace(stats(2), memory_ns=MS, readings=readings)]
    for each in reported:
        metrics.model("m").engine_stats({"m-0": each})
    metrics.model("m").worker_facts({"m-0": WorkerLabels("penstock", "f00", "a device")})
    metrics.model("m").requests_ended(EndedTogether(
        RequestMeasurement(
            endpoint=Endpoint.CHAT, outcome=OutcomeLabel.ERROR, duration_ns=1, worker="m-0"
        )
    ))  # fmt: skip
    metrics.model("m").model_info(INFO, {"fr": 1})
    assert exposed_names(metrics) == GOLDEN.read_text().splitlines()
    assert value(metrics, "DCGM_FI_DEV_XID_ERRORS", model="m", worker="m-0", gpu="1") == 79
    assert value(metrics, "penstock_worker_cpu_seconds_total", model="m", worker="m-0") == 1.5
    silent = msgspec.structs.replace(readings, gpu=msgspec.structs.replace(gpu, util=None))
    metrics.model("m").engine_stats({"m-0": msgspec.structs.replace(stats(3), readings=silent)})
    page = metrics.render().decode()
    assert "DCGM_FI_DEV_GPU_UTIL{" not in page, "what a GPU does not tell any more is not shown"
    assert "DCGM_FI_DEV_XID_ERRORS{" in page
    metrics.model("m").engine_stats({})
    page = metrics.render().decode()
    assert "DCGM_FI_DEV_XID_ERRORS{" not in page, "series of a worker that is gone go with it"
    assert "penstock_worker_rss_bytes{" not in page


def test_the_page_has_the_catalog() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "scripts" / "metrics_page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.PAGE.read_text() == page.written(), "run: python scripts/metrics_page.py"


def test_the_catalog_is_well_formed() -> None:
    names = [metric.name for metric in CATALOG]
    assert len(set(names)) == len(names)
    for metric in CATALOG:
        assert metric.name.startswith(("penstock_", "DCGM_FI_DEV_"))
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")


def test_every_ordinary_finish_is_an_outcome() -> None:
    assert {reason.value for reason in FinishReason} <= {outcome.value for outcome in OutcomeLabel}


def test_a_request_is_counted_once_in_everything() -> None:
    metrics = Metrics(["m", "other"], version="0")
    record = RequestMeasurement(
        endpoint=Endpoint.CHAT,
        outcome=OutcomeLabel.STOP,
        duration_ns=300 * MS,
        queue_ns=2 * MS,
        ttft_ns=30 * MS,
        tpot_ns=5 * MS,
        prompt_tokens=100,
        cached_tokens=64,
        generated_tokens=7,
    )
    metrics.model("m").requests_ended(EndedTogether(msgspec.structs.replace(record, worker="m-0")))
    assert value(metrics, "penstock_requests_total", model="m", endpoint="chat", outcome="stop") == 1
    at_worker = {"model": "m", "worker": "m-0"}
    assert value(metrics, "penstock_worker_requests_total", outcome="answered", **at_worker) == 1
    assert value(metrics, "penstock_worker_prefill_seconds_total", **at_worker) == pytest.approx(0.028)
    assert value(metrics, "penstock_worker_decode_seconds_total", **at_worker) == pytest.approx(0.270)
    metrics.model("m").engine_stats({})
    assert value(metrics, "penstock_worker_prefill_seconds_total", **at_worker) is None
    assert value(metrics, "penstock_requests_total", model="other", endpoint="chat", outcome="stop") == 0
    assert value(metrics, "penstock_request_ttft_seconds_sum", model="m") == pytest.approx(0.03)
    assert value(metrics, "penstock_request_tpot_seconds_bucket", model="m", le="0.005") == 1
    assert value(metrics, "penstock_request_tpot_seconds_bucket", model="m", le="0.0025") == 0
    assert value(metrics, "penstock_request_duration_seconds_count", model="m") == 1
    assert value(metrics, "penstock_request_queue_seconds_sum", model="m") == pytest.approx(0.002)
    assert value(metrics, "penstock_prompt_tokens_total", model="m") == 100
    assert value(metrics, "penstock_cached_tokens_total", model="m") == 64
    assert value(metrics, "penstock_generated_tokens_total", model="m") == 7


def test_a_request_without_tokens_has_no_token_times() -> None:
    metrics = Metrics(["m"], version="0")
    metrics.model("m").requests_ended(
        EndedTogether(
            RequestMeasurement(endpoint=Endpoint.COMPLETIONS, outcome=OutcomeLabel.SHED, duration_ns=MS)
        )
    )
    assert value(metrics, "penstock_requests_total", model="m", endpoint="completions", outcome="shed") == 1
    for name in ("ttft", "tpot", "queue"):
        assert value(metrics, f"penstock_request_{name}_seconds_count", model="m") == 0


def stats(step: int, preemptions: int = 0) -> Stats:
    return Stats(
        step=step,
        running=3,
        waiting=2,
        blocks_total=100,
        blocks_used=30,
        blocks_cached=50,
        host_blocks_used=7,
        host_stores=2 * step,
        host_loads=step,
        preemptions=preemptions,
        step_ns=step * 10 * MS,
        host_ns=step * MS,
        kv_held_tokens=step * 480,
        timed_kv_read=step * 400,
    )


def test_engine_stats_are_followed_across_a_restart() -> None:
    metrics = Metrics(["m"], version="0")
    model = metrics.model("m")
    for sample in (stats(100, 4), stats(100, 4), stats(150, 5), stats(10, 1)):
        model.engine_stats({"m-0": sample})
    assert value(metrics, "penstock_engine_steps_total", model="m") == 160
    assert value(metrics, "penstock_engine_preemptions_total", model="m") == 6
    assert value(metrics, "penstock_host_kv_stores_total", model="m") == 320
    assert value(metrics, "penstock_host_kv_loads_total", model="m") == 160
    assert value(metrics, "penstock_host_kv_blocks", model="m") == 7
    assert value(metrics, "penstock_engine_step_seconds_total", model="m") == pytest.approx(1.6)
    assert value(metrics, "penstock_engine_host_seconds_total", model="m") == pytest.approx(0.16)
    assert value(metrics, "penstock_engine_kv_held_tokens_total", model="m") == 160 * 480
    assert value(metrics, "penstock_engine_kv_read_tokens_total", model="m") == 160 * 400
    assert value(metrics, "penstock_engine_running", model="m") == 3
    assert value(metrics, "penstock_engine_waiting", model="m") == 2
    blocks = {
        state: value(metrics, "penstock_kv_blocks", model="m", state=state)
        for state in ("free", "used", "cached")
    }
    assert blocks == {"free": 20, "used": 30, "cached": 50}


def test_engines_are_summed_and_one_that_is_away_counts_on_from_where_it_was() -> None:
    metrics = Metrics(["m"], version="0")
    model = metrics.model("m")
    model.engine_stats({"a": stats(100, 4), "b": stats(7, 0)})
    assert value(metrics, "penstock_engine_running", model="m") == 6
    model.engine_stats({"a": None, "b": stats(8, 0)})
    assert value(metrics, "penstock_engine_running", model="m") == 3
    model.engine_stats({"a": stats(101, 4), "b": stats(8, 0)})
    assert value(metrics, "penstock_engine_steps_total", model="m") == 109
    model.engine_stats({"b": stats(8, 0)})  # Gone for good: another one of its name begins anew.
    model.engine_stats({"a": stats(200, 4), "b": stats(8, 0)})
    assert value(metrics, "penstock_engine_steps_total", model="m") == 309


def test_worker_state() -> None:
    metrics = Metrics(["m"], version="0")
    metrics.model("m").workers([WorkerState.READY, WorkerState.READY, WorkerState.LOADING])
    metrics.model("m").engine_restarted()
    assert value(metrics, "penstock_workers", model="m", state="ready") == 2
    assert value(metrics, "penstock_workers", model="m", state="loading") == 1
    assert value(metrics, "penstock_workers", model="m", state="gone") == 0
    assert value(metrics, "penstock_engine_restarts_total", model="m") == 1


def test_the_front_door() -> None:
    metrics = Metrics([], version="9.9")
    metrics.connections.inc()
    metrics.streams.inc(2)
    metrics.streams.dec()
    metrics.client_disconnects.inc()
    metrics.slow_client_aborts.inc()
    metrics.event_loop_lag.observe(0.002)
    for code in (200, 200, 404):
        metrics.http_response(code)
    assert value(metrics, "penstock_connections") == 1
    assert value(metrics, "penstock_streams") == 1
    assert value(metrics, "penstock_client_disconnects_total") == 1
    assert value(metrics, "penstock_slow_client_aborts_total") == 1
    assert value(metrics, "penstock_event_loop_lag_seconds_count") == 1
    assert value(metrics, "penstock_http_responses_total", code="200") == 2
    assert value(metrics, "penstock_build_info", version="9.9") == 1


def test_label_values_are_bounded() -> None:
    metrics = Metrics(["m"], version="0")
    with pytest.raises(AssertionError):
        metrics.http_response(1234)
    with pytest.raises(KeyError):
        metrics.model("made-up-by-a-client")


def test_two_registries_share_nothing() -> None:
    first, second = Metrics(["m"], version="0"), Metrics(["m"], version="0")
    first.connections.inc()
    assert value(second, "penstock_connections") == 0

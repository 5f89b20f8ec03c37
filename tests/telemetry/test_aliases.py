"""Our numbers under the names of others, held against those that a real vLLM exports."""

from pathlib import Path

import msgspec
import pytest
from fake_backend import INFO as FAKE_INFO
from prometheus_client.parser import text_string_to_metric_families

from penstock.backends.http.engine_metrics import LOAD_NAMES, load_of, parse_metrics
from penstock.protocol.worker import Stats
from penstock.telemetry.catalog import CATALOG, Endpoint, OutcomeLabel
from penstock.telemetry.counts import EndedTogether, RequestMeasurement
from penstock.telemetry.metrics import FOLLOWED_MAX, OTHER, TENANTS_MAX, Metrics, TenantLabels
from penstock.telemetry.pages import COMPUTED, RENAMED, aliases, label_of

VLLM = dict(
    line.split() for line in Path(__file__).with_name("vllm_metrics.txt").read_text().splitlines()[1:]
)
"""Names and kinds that vLLM 0.32.0 registers."""


@pytest.fixture
def page() -> bytes:
    metrics = Metrics(['m"x'], version="0")
    model = metrics.model('m"x')
    for outcome in (OutcomeLabel.STOP, OutcomeLabel.TOOL_CALLS, OutcomeLabel.SHED):
        model.requests_ended(EndedTogether(
            RequestMeasurement(
                endpoint=Endpoint.CHAT, outcome=outcome, duration_ns=2 * 10**9, queue_ns=10**8,
                ttft_ns=3 * 10**8, tpot_ns=10**7, prompt_tokens=100, cached_tokens=40, generated_tokens=10,
            )
        ))  # fmt: skip
    stats = Stats(step=1, running=2, waiting=3, blocks_total=100, blocks_used=25, blocks_cached=50)
    model.engine_stats({"w-0": stats})
    info = msgspec.structs.replace(FAKE_INFO, block_tokens=16, adapter_slots=20)
    model.model_info(info, {"fr": 2, "de": 1, "left": 1})
    model.model_info(info, {"fr": 2, "de": 1, "cold": 0})
    return metrics.render()


def samples(page: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_every_alias_is_a_name_of_vllm_or_opentelemetry(page):
    kinds = {metric.name: metric.kind for metric in CATALOG}
    for source, names in RENAMED.items():
        for name in names:
            if name.startswith("vllm:"):
                assert VLLM[name] == kinds[source], name
            else:
                assert name.startswith("gen_ai_server_")
                assert name.endswith("_seconds")
    assert {name: VLLM[name] for name in COMPUTED} == {
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:cache_config_info": "gauge",
        "vllm:request_success_total": "counter",
        "vllm:lora_requests_info": "gauge",
    }


def test_the_numbers_are_ours(page):
    found, engine = samples(page + aliases(page)), (("engine", "0"), ("model_name", 'm"x'))
    assert found["vllm:num_requests_running"] == {engine: 2.0}
    assert found["vllm:num_requests_waiting"] == {engine: 3.0}
    assert found["vllm:kv_cache_usage_perc"] == {engine: 0.25}
    assert found["vllm:cache_config_info"] == {
        (("block_size", "16"), engine[0], engine[1:][0], ("num_gpu_blocks", "100")): 1.0
    }
    assert found["vllm:prompt_tokens_total"] == {engine: 300.0}
    assert found["vllm:prefix_cache_hits_total"] == {engine: 120.0}
    assert found["vllm:request_success_total"] == {(engine[0], ("finished_reason", "stop"), engine[1]): 2.0,
        (engine[0], ("finished_reason", "length"), engine[1]): 0.0,
        (engine[0], ("finished_reason", "abort"), engine[1]): 0.0,
        (engine[0], ("finished_reason", "error"), engine[1]): 0.0}  # fmt: skip
    ttft = found["vllm:time_to_first_token_seconds_sum"][engine]
    queue = found["vllm:request_queue_time_seconds_sum"][engine]
    prefill = found["vllm:request_prefill_time_seconds_sum"][engine]
    assert ttft == pytest.approx(0.9) == pytest.approx(queue + prefill)
    gen_ai = (("gen_ai_provider_name", "penstock"), ("gen_ai_request_model", 'm"x'))
    assert found["gen_ai_server_request_duration_seconds_count"] == {gen_ai: 3.0}


def test_an_endpoint_picker_reads_it_as_a_vllm(page):
    """Our own reader of vLLM's metrics has the names of the inference extension's protocol."""
    names = LOAD_NAMES["vllm"]
    load = load_of(parse_metrics(aliases(page), names.all(), timed="vllm:lora_requests_info"), names)
    assert (load.running, load.waiting, load.kv_usage, load.kv_tokens) == (2, 3, 0.25, 1600)
    assert set(load.adapters or ()) == {"de", "fr"}, "what is loaded; the rest waits for a load"


def test_a_worker_that_is_gone_takes_its_series_along():
    metrics = Metrics(["m"], version="0")
    stats = Stats(step=1, running=2, waiting=3, blocks_total=4, blocks_used=1, blocks_cached=2, step_ns=10**9)
    metrics.model("m").engine_stats({"w-0": stats, "w-1": None})
    found = samples(metrics.render())
    assert found["penstock_worker_kv_usage_ratio"] == {
        (("model", "m"), ("worker", "w-0")): 0.25, (("model", "m"), ("worker", "w-1")): 0.0,
    }  # fmt: skip
    assert found["penstock_worker_step_seconds_total"][("model", "m"), ("worker", "w-0")] == 1.0
    metrics.model("m").engine_stats({"w-1": None})
    assert list(samples(metrics.render())["penstock_worker_running"]) == [(("model", "m"), ("worker", "w-1"))]


def test_labels_with_escapes_are_read_to_their_end():
    assert label_of(rb'x{a="1",model="m\"x\\",state="used"}', b"model") == rb"m\"x\\"
    assert label_of(b'x{a="1"}', b"model") == b""


def test_tenants_that_use_much_have_names_and_no_number_of_them_makes_many():
    labels = TenantLabels()
    assert labels.label("big", 1000) == "big"
    found = {labels.label(f"invented-{i}", 1) for i in range(10 * FOLLOWED_MAX)}
    assert found == {OTHER}
    assert labels.label("big", 1) == "big"
    assert [labels.label("second", 500) for _ in range(3)][-1] == "second", "it came late and uses much"
    many = {labels.label(f"heavy-{i}", 10**6) for i in range(100)}
    assert len(many) <= TENANTS_MAX
    assert labels.label("", 5) == OTHER

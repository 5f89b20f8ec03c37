"""The same numbers under names that others know, so that their dashboards, scalers and endpoint pickers work:

    vllm:*          vLLM's names and labels; of the Gateway API inference extension's model server protocol
                    `num_requests_waiting`, `num_requests_running`, `kv_cache_usage_perc`, `cache_config_info`
    gen_ai_*        OpenTelemetry's GenAI conventions for servers, as its Prometheus exporter writes them

They are made from the text of our metrics where it leaves the server: nothing is counted twice. Seen from
outside all workers of a model are one engine, "0".
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from penstock.telemetry.pages import Family, label_of, parsed, written

RENAMED: Mapping[str, tuple[str, ...]] = {
    "penstock_engine_running": ("vllm:num_requests_running",),
    "penstock_engine_waiting": ("vllm:num_requests_waiting",),
    "penstock_engine_preemptions_total": ("vllm:num_preemptions_total",),
    "penstock_prompt_tokens_total": ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    "penstock_cached_tokens_total": ("vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
    "penstock_generated_tokens_total": ("vllm:generation_tokens_total",),
    "penstock_request_ttft_seconds": (
        "vllm:time_to_first_token_seconds", "gen_ai_server_time_to_first_token_seconds",
    ),
    "penstock_request_tpot_seconds": (
        "vllm:request_time_per_output_token_seconds", "gen_ai_server_time_per_output_token_seconds",
    ),
    "penstock_request_duration_seconds": (
        "vllm:e2e_request_latency_seconds", "gen_ai_server_request_duration_seconds",
    ),
    "penstock_request_queue_seconds": ("vllm:request_queue_time_seconds",),
    "penstock_request_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "penstock_request_decode_seconds": ("vllm:request_decode_time_seconds",),
}  # fmt: skip
"""Families with other names and labels, and the same numbers."""
COMPUTED = ("vllm:kv_cache_usage_perc", "vllm:cache_config_info", "vllm:request_success_total")
_VLLM, _GEN_AI = b'engine="0",model_name="', b'gen_ai_provider_name="penstock",gen_ai_request_model="'
_MODEL = b'model="'
_SUCCESS = {
    b"stop": b"stop",
    b"tool_calls": b"stop",
    b"length": b"length",
    b"abort": b"abort",
    b"error": b"error",
}
"""vLLM's reasons by our outcomes."""


def aliases(page: bytes) -> bytes:
    """What to write behind a page of ours."""
    families = parsed(page)
    found = dict[bytes, Family]()
    for source, names in RENAMED.items():
        if (family := families.get(source.encode())) is not None:
            for name in names:
                found[name.encode()] = _renamed(family, source.encode(), name.encode())
    for name, kind, values in _computed(families):
        found[name] = (
            [b"# HELP %b vLLM's." % name, b"# TYPE %b %b" % (name, kind)],
            values,
            kind == b"gauge",
        )
    return written(found)


def _renamed(family: Family, source: bytes, name: bytes) -> Family:
    comments, values, is_gauge = family
    label = _GEN_AI if name.startswith(b"gen_ai") else _VLLM
    series = {
        name + each.removeprefix(source).replace(_MODEL, label): value for each, value in values.items()
    }
    return [line.replace(source, name) for line in comments], series, is_gauge


def _computed(families: Mapping[bytes, Family]) -> Iterator[tuple[bytes, bytes, dict[bytes, float]]]:
    blocks = dict[bytes, dict[bytes, float]]()
    for series, value in families.get(b"penstock_kv_blocks", ([], {}, True))[1].items():
        blocks.setdefault(label_of(series, b"model"), {})[label_of(series, b"state")] = value
    usage, config = dict[bytes, float](), dict[bytes, float]()
    sizes = {
        label_of(series, b"model"): value
        for series, value in families.get(b"penstock_kv_block_tokens", ([], {}, True))[1].items()
    }
    for model, states in blocks.items():
        labels = b'%b%b"' % (_VLLM, model)
        total = sum(states.values())
        usage[b"vllm:kv_cache_usage_perc{%b}" % labels] = states.get(b"used", 0.0) / total if total else 0.0
        if total and sizes.get(model):
            facts = b'block_size="%d",num_gpu_blocks="%d"' % (sizes[model], total)
            config[b"vllm:cache_config_info{%b,%b}" % (facts, labels)] = 1.0
    yield b"vllm:kv_cache_usage_perc", b"gauge", usage
    yield b"vllm:cache_config_info", b"gauge", config
    success = defaultdict[bytes, float](float)
    for series, value in families.get(b"penstock_requests_total", ([], {}, False))[1].items():
        if (reason := _SUCCESS.get(label_of(series, b"outcome"))) is not None:
            labels = b'finished_reason="%b",%b%b"' % (reason, _VLLM, label_of(series, b"model"))
            success[b"vllm:request_success_total{%b}" % labels] += value
    yield b"vllm:request_success_total", b"counter", dict(success)

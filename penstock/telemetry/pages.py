"""Pages of metrics as text (Prometheus' exposition format 0.0.4): the sum of several processes' pages, and
the same numbers under names that others know, so that their dashboards, scalers and endpoint pickers work:

    vllm:*          vLLM's names and labels; of the Gateway API inference extension's model server protocol
                    `num_requests_waiting`, `num_requests_running`, `kv_cache_usage_perc`,
                    `cache_config_info`, and `lora_requests_info`, which tells the adapters that are loaded
    gen_ai_*        OpenTelemetry's GenAI conventions for servers, as its Prometheus exporter writes them

Of several processes counters, histograms and the gauges of what each has for itself are added. Samples that
all of them have of one and the same engine (`Metric.shared`) are taken once: the largest, for one of them may
just have lost sight of it. Aliases are made from the text of our metrics where it leaves the server: nothing
is counted twice. Seen from outside all workers of a model are one engine, "0".
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from penstock.telemetry.catalog import CATALOG

SHARED = frozenset(metric.name.encode() for metric in CATALOG if metric.shared)

Family = tuple[list[bytes], dict[bytes, float], bool]
"""Comment lines, values by series, and whether it is a gauge."""


def merged(texts: Sequence[bytes], shared: Collection[bytes] = SHARED) -> bytes:
    """One text for all; families and series in the order in which they are first seen."""
    families: dict[bytes, Family] = {}
    for text in texts:
        for name, (comments, values, is_gauge) in parsed(text).items():
            _, total, _ = families.setdefault(name, (comments, {}, is_gauge))
            for series, value in values.items():
                known = total.get(series, 0.0)
                total[series] = max(known, value) if name in shared else known + value
    return written(families)


def lasting(text: bytes, shared: Collection[bytes] = SHARED) -> bytes:
    """The samples that stay true of a process that has ended: its own counters and histograms."""
    families = parsed(text)
    return written({n: each for n, each in families.items() if not each[2] and n not in shared})


def parsed(text: bytes) -> dict[bytes, Family]:
    """A page by family."""
    families: dict[bytes, Family] = {}
    comments: list[bytes] = []
    values: dict[bytes, float] = {}
    for line in text.splitlines():
        if line.startswith(b"# TYPE "):
            _, _, name, kind = line.split()
            comments, values = [*comments, line], {}
            families[name] = (comments, values, kind == b"gauge")
        elif line.startswith(b"#"):
            comments = [line]
        elif line:
            series, _, value = line.rpartition(b" ")
            values[series] = float(value)
    return families


def written(families: dict[bytes, Family]) -> bytes:
    """The page of these families."""
    lines: list[bytes] = []
    for comments, values, _ in families.values():
        lines += comments
        lines += [b"%b %b" % (series, repr(value).encode()) for series, value in values.items()]
    return b"\n".join([*lines, b""])


def label_of(series: bytes, label: bytes) -> bytes:
    """A label's value as it is written, escapes and all."""
    _, found, rest = series.partition(b'%b="' % label)
    end = 0
    while found and end < len(rest) and rest[end : end + 1] != b'"':
        end += 2 if rest[end : end + 1] == b"\\" else 1
    return rest[:end]


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
COMPUTED = (
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:request_success_total",
    "vllm:lora_requests_info",
)
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
    """The lines to write behind a page of ours."""
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
    yield b"vllm:lora_requests_info", b"gauge", _adapters(families)


def _adapters(families: Mapping[bytes, Family]) -> dict[bytes, float]:
    """Of each model that has adapters those that are loaded anywhere: a request for one of them waits for no
    load.
    """
    loaded = dict[bytes, list[bytes]]()
    for series, value in families.get(b"penstock_adapter_workers", ([], {}, True))[1].items():
        names = loaded.setdefault(label_of(series, b"model"), [])
        if value:
            names.append(label_of(series, b"adapter"))
    slots = {
        label_of(series, b"model"): value
        for series, value in families.get(b"penstock_adapter_slots", ([], {}, True))[1].items()
    }
    found = dict[bytes, float]()
    for model, names in loaded.items():
        facts = b'max_lora="%d",running_lora_adapters="%b",waiting_lora_adapters=""' % (
            slots.get(model, 0), b",".join(sorted(names)),
        )  # fmt: skip
        found[b'vllm:lora_requests_info{%b,%b%b"}' % (facts, _VLLM, model)] = 1.0
    return found

"""Every metric there is, as one literal table. Names and labels are an interface: dashboards and alerts are
written against them, so a golden file keeps them.

Only the names are ours; the shapes are the field's. Buckets follow OpenTelemetry's GenAI conventions,
extended downwards for small models and upwards for long answers. Label values come from closed sets:
configured model names, the enums below, HTTP status codes. Nothing that a client can invent becomes a label.
"""

import enum
from dataclasses import dataclass
from typing import Literal


class Endpoint(enum.StrEnum):
    """Where a request came in."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"


class OutcomeLabel(enum.StrEnum):
    """How a request ended, as operators count it. The first five are answers."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"  # A provider withheld the rest.
    BUDGET = "budget"  # The tenant's budget ended it early.
    ABORT = "abort"  # The client left.
    ERROR = "error"  # A worker or the server failed.
    REJECTED = "rejected"  # The request itself was wrong (4xx).
    LIMITED = "limited"  # The tenant was over a limit or budget of its own; nothing was generated.
    SHED = "shed"  # Too much work, or draining; nothing was generated.


class BlockState(enum.StrEnum):
    """The state of a KV block. The three sum to the pool."""

    FREE = "free"
    USED = "used"
    CACHED = "cached"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `name` is the full name; a counter's ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    shared: bool = False
    """Every gateway process in front of one engine tells the same number of it."""

    @property
    def unit(self) -> str:
        """The base unit, which the name ends in; else what is counted."""
        word = self.name.removesuffix("_total").rpartition("_")[2]
        return word if word in _UNITS else ""

    @property
    def needed_by(self) -> str:
        """The readers of it, in words."""
        if self.name.startswith("DCGM"):
            return "on call; capacity"
        return next(who for prefix, who in NEEDED_BY if self.name.startswith(f"penstock_{prefix}"))


_UNITS = ("seconds", "bytes", "ratio", "tokens", "records", "requests")
NEEDED_BY = (
    ("slo", "on call: burn rates"),
    ("disk", "on call"),
    ("tenant", "owners of tenants; capacity"),
    ("request", "on call: objectives; dashboards"),
    ("prompt_tokens", "capacity; finance"),
    ("cached_tokens", "capacity; routing"),
    ("generated_tokens", "capacity; finance"),
    ("accelerator", "finance"),
    ("adapter", "capacity; endpoint pickers"),
    ("shadow", "owners of models: a version on trial"),
    ("engine", "capacity; autoscalers"),
    ("worker", "capacity; autoscalers; endpoint pickers"),
    ("kv_index", "routing"),
    ("kv", "capacity; endpoint pickers"),
    ("host_kv", "capacity"),
    ("http", "on call"),
    ("connections", "capacity"),
    ("streams", "capacity; autoscalers"),
    ("client", "on call"),
    ("slow_client", "on call"),
    ("event_loop", "capacity: a gateway process that is full"),
    ("ledger", "finance; on call"),
    ("budget", "finance; owners of tenants"),
    ("shared", "on call"),
    ("queue", "on call; autoscalers"),
    ("refused", "on call; owners of tenants"),
    ("evicted", "on call"),
    ("diverted", "on call; routing"),
    ("route", "routing"),
    ("prefix", "routing"),
    ("scale", "capacity; autoscalers"),
    ("template", "capacity"),
    ("traces", "on call: what traces lack"),
    ("retr", "on call"),
    ("attempt", "on call"),
    ("breaker", "on call"),
    ("hedges", "on call; capacity"),
    ("probe", "on call: workers that compute wrongly"),
    ("anomalous", "on call: workers that compute wrongly or slowly"),
    ("ejections", "on call: workers that compute wrongly or slowly"),
    ("migrations", "on call"),
    ("cell_", "on call"),
    ("ttft_prediction", "routing"),
    ("backend", "on call: workers of other engines"),
    ("scrape", "on call: workers of other engines"),
    ("build", "releases"),
)
"""Readers by the beginning of the name; the first row that fits counts."""


TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0,
    60.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
DURATION_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68,
    655.36,
)  # fmt: skip
RATIO_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

MODEL = ("model",)
WORKER = ("model", "worker")
GPU = ("model", "worker", "gpu")
"""The last is the driver's index, as DCGM has it."""

CATALOG = (
    # Requests, as the gateway sees them.
    Metric(
        "penstock_requests_total", "counter", "Completed requests, by outcome.",
        ("model", "endpoint", "outcome")
    ),
    Metric(
        "penstock_request_ttft_seconds", "histogram", "Time from arrival to the first token.", MODEL,
        TTFT_BUCKETS
    ),
    Metric(
        "penstock_request_tpot_seconds", "histogram",
        "Mean time per output token after the first, one value per request.", MODEL, TPOT_BUCKETS,
    ),
    Metric(
        "penstock_request_duration_seconds", "histogram", "Time from arrival to the last byte of the "
        "response.", MODEL, DURATION_BUCKETS
    ),
    Metric(
        "penstock_request_queue_seconds", "histogram", "Time in queues before the first engine step.", MODEL,
        TTFT_BUCKETS
    ),
    Metric(
        "penstock_request_prefill_seconds", "histogram",
        "Time from the first engine step to the first token: TTFT is queue and prefill.", MODEL, TTFT_BUCKETS
    ),
    Metric(
        "penstock_request_decode_seconds", "histogram", "Time from the first token to the end.", MODEL,
        DURATION_BUCKETS
    ),
    Metric("penstock_prompt_tokens_total", "counter", "Prompt tokens of completed requests.", MODEL),
    Metric(
        "penstock_cached_tokens_total", "counter", "Prompt tokens served from the prefix cache.", MODEL
    ),
    Metric("penstock_generated_tokens_total", "counter", "Output tokens of completed requests.", MODEL),
    # The engine, as it reports itself.
    Metric("penstock_engine_running", "gauge", "Running requests in the engine's batch.", MODEL, shared=True),
    Metric("penstock_engine_waiting", "gauge", "Requests waiting in the engine's queue.", MODEL, shared=True),
    Metric("penstock_kv_blocks", "gauge", "KV blocks by state.", ("model", "state"), shared=True),
    Metric("penstock_kv_block_tokens", "gauge", "Tokens that a KV block holds.", MODEL, shared=True),
    Metric("penstock_adapter_slots", "gauge", "Adapters that a worker has loaded at a time, at most.", MODEL,
        shared=True),
    Metric("penstock_adapter_workers", "gauge", "Workers that have an adapter loaded.",
        ("model", "adapter"), shared=True),
    Metric("penstock_worker_running", "gauge", "Running requests of one worker.", WORKER, shared=True),
    Metric("penstock_worker_waiting", "gauge", "Requests waiting in one worker's queue.", WORKER,
        shared=True),
    Metric("penstock_worker_kv_usage_ratio", "gauge", "Share of one worker's KV blocks that is in use.",
        WORKER, shared=True),
    Metric("penstock_worker_generated_tokens_total", "counter", "Output tokens of one worker.", WORKER,
        shared=True),
    Metric("penstock_worker_step_seconds_total", "counter", "Time that one worker spent in engine steps.",
        WORKER, shared=True),
    Metric("penstock_worker_memory_seconds_total", "counter",
        "Time that the memory traffic of one worker's steps takes at the device's bandwidth.", WORKER,
        shared=True),
    Metric("penstock_worker_mbu_ratio", "gauge", "Memory bandwidth utilisation of one worker's last steps.",
        WORKER, shared=True),
    Metric("penstock_worker_requests_total", "counter", "Requests that one worker, or it at last, answered "
    "or failed.", ("model", "worker", "outcome")),
    Metric("penstock_worker_prefill_seconds_total", "counter", "Time to the first token behind the queue, of "
    "what one worker answered.", WORKER),
    Metric("penstock_worker_decode_seconds_total", "counter", "Time from the first token to the end, of what "
    "one worker answered.", WORKER),
    Metric("penstock_worker_info", "gauge", "Always 1; what a worker runs, on which device, are labels.",
        ("model", "worker", "engine", "identity", "device"), shared=True),
    # Of a worker's process and machine, and of its GPU under the names of NVIDIA's DCGM exporter.
    Metric("penstock_worker_rss_bytes", "gauge", "Resident memory of one worker's process.", WORKER,
        shared=True),
    Metric("penstock_worker_cpu_seconds_total", "counter", "CPU time of one worker's process.", WORKER,
        shared=True),
    Metric("penstock_worker_cgroup_memory_bytes", "gauge", "Memory in use in one worker's cgroup.", WORKER,
        shared=True),
    Metric("penstock_worker_cgroup_memory_limit_bytes", "gauge", "Memory limit of one worker's cgroup; 0: "
        "none.", WORKER, shared=True),
    Metric("penstock_worker_load_ratio", "gauge", "Load of one worker's machine over a minute, per core.",
        WORKER, shared=True),
    Metric("DCGM_FI_DEV_GPU_UTIL", "gauge", "Percent of the time in which a kernel ran.", GPU, shared=True),
    Metric("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Percent of the time in which the GPU's memory was read or "
        "written.", GPU, shared=True),
    Metric("DCGM_FI_DEV_FB_USED", "gauge", "GPU memory in use, in MiB.", GPU, shared=True),
    Metric("DCGM_FI_DEV_FB_FREE", "gauge", "Free GPU memory, in MiB.", GPU, shared=True),
    Metric("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw, in watts.", GPU, shared=True),
    Metric("DCGM_FI_DEV_GPU_TEMP", "gauge", "Temperature of the GPU, in degrees Celsius.", GPU, shared=True),
    Metric("DCGM_FI_DEV_SM_CLOCK", "gauge", "Clock of the streaming multiprocessors, in MHz.", GPU,
        shared=True),
    Metric("DCGM_FI_DEV_XID_ERRORS", "gauge", "Xid of the GPU's last error; 0: none.", GPU, shared=True),
    Metric("penstock_host_kv_blocks", "gauge", "KV blocks stored in host memory.", MODEL, shared=True),
    Metric("penstock_host_kv_stores_total", "counter", "KV blocks copied to host memory.", MODEL,
        shared=True),
    Metric("penstock_host_kv_loads_total", "counter", "KV blocks copied back from host memory.", MODEL,
        shared=True),
    Metric("penstock_engine_steps_total", "counter", "Completed engine steps.", MODEL, shared=True),
    Metric("penstock_engine_step_seconds_total", "counter", "Time spent in engine steps.", MODEL,
        shared=True),
    Metric(
        "penstock_engine_host_seconds_total", "counter",
        "Time spent in engine steps outside of the forward pass and sampling.", MODEL, shared=True,
    ),
    Metric(
        "penstock_engine_drafted_tokens_total", "counter", "Tokens that speculation guessed and computed.",
        MODEL, shared=True,
    ),
    Metric(
        "penstock_engine_accepted_tokens_total", "counter",
        "Of penstock_engine_drafted_tokens_total, those that became tokens of answers.", MODEL, shared=True,
    ),
    Metric(
        "penstock_engine_kv_held_tokens_total", "counter",
        "Tokens that the KV blocks in use could hold, summed over engine steps.", MODEL, shared=True,
    ),
    Metric(
        "penstock_engine_kv_read_tokens_total", "counter",
        "Tokens of context of the requests in each engine step, summed over steps.", MODEL, shared=True,
    ),
    Metric("penstock_engine_preemptions_total", "counter", "Preempted requests.", MODEL, shared=True),
    Metric("penstock_engine_restarts_total", "counter", "Restarts of the engine process.", MODEL,
        shared=True),
    Metric(
        "penstock_accelerator_cost_total", "counter",
        "Cost of accelerator time in the currency of the price list: with requests (busy), without (idle), "
        "and of workers that are not in service (reserve).",
        ("model", "part"), shared=True,
    ),
    Metric(
        "penstock_accelerator_charged_total", "counter",
        "Accelerator cost charged to requests. Probes, failed attempts and rounding are not charged.", MODEL,
    ),
    Metric(
        "penstock_accelerator_floor_total", "counter",
        "Least cost of the work that was done: full batches at the measured speed of the device.", MODEL,
        shared=True,
    ),
    Metric("penstock_workers", "gauge", "Workers by state.", ("model", "state"), shared=True),
    # Connections.
    Metric("penstock_connections", "gauge", "Open HTTP connections."),
    Metric("penstock_streams", "gauge", "Responses in progress."),
    Metric("penstock_http_responses_total", "counter", "HTTP responses by status code.", ("code",)),
    Metric(
        "penstock_client_disconnects_total", "counter", "Clients that disconnected before their response was "
        "complete."
    ),
    Metric(
        "penstock_slow_client_aborts_total", "counter", "Responses aborted because the client read too "
        "slowly."
    ),
    Metric(
        "penstock_event_loop_lag_seconds", "histogram", "Delay of a periodic timer on the event loop.", (),
        LAG_BUCKETS
    ),
    # The usage ledger.
    Metric("penstock_ledger_records_total", "counter", "Usage records written to the journal."),
    Metric("penstock_ledger_pending_records", "gauge", "Usage records in the journal that are not in the "
    "database yet."),
    Metric("penstock_ledger_lost_records_total", "counter", "Usage records lost because the disk and the "
    "buffer were full."),
    Metric("penstock_ledger_sink_errors_total", "counter", "Failed writes to the ledger database."),
    Metric("penstock_ledger_journal_bytes", "gauge", "Size of this process's journal on disk."),
    Metric("penstock_ledger_open_requests", "gauge", "Accepted requests without a usage record yet."),
    # Limits that several gateways share.
    Metric("penstock_shared_store_away", "gauge", "Gateway processes without a connection to the store of "
    "shared limits."),
    Metric("penstock_shared_store_failures_total", "counter", "Failed requests to the store of shared "
    "limits."),
    Metric("penstock_shared_gateways", "gauge", "Gateway processes that share limits, as last reported by "
    "the store.", shared=True),
    # Admission and queues.
    Metric("penstock_queue_waiting", "gauge", "Requests waiting in the gateway for a worker.", MODEL),
    Metric(
        "penstock_scale_wanted_workers", "gauge", "Workers that a model is to have, by pool.",
        ("model", "pool")
    ),
    Metric(
        "penstock_refused_total", "counter", "Rejected requests, by reason.", ("model", "reason")
    ),
    Metric("penstock_evicted_total", "counter", "Accepted requests that were evicted, by reason.",
        ("model", "reason")),
    Metric("penstock_diverted_total", "counter", "Requests sent to another model, by reason.",
        ("model", "reason")),
    Metric(
        "penstock_route_decisions_total", "counter", "Placement decisions, by policy and reason.",
        ("model", "policy", "reason"),
    ),
    Metric(
        "penstock_prefix_match_ratio", "histogram", "Expected prefix cache hit ratio of a prompt at its "
        "worker.", MODEL,
        RATIO_BUCKETS,
    ),
    Metric(
        "penstock_template_child_renders_total", "counter",
        "Chats rendered in a child process because the template has a step without a price (unpriced) or "
        "used up its allowance, or because the request is too large (request_size).", ("model", "reason"),
    ),
    Metric(
        "penstock_traces_total", "counter",
        "Traces that were to be exported: exported, or dropped because the collector did not take them.",
        ("outcome",),
    ),
    # The KV index.
    Metric("penstock_kv_index_entries", "gauge", "KV blocks in the index; a block counts once per tier."),
    Metric("penstock_kv_index_predicted_entries", "gauge", "KV blocks in the index that are predicted and "
    "not confirmed."),
    Metric(
        "penstock_kv_index_staleness_seconds", "gauge", "Age of the oldest missing KV event over all workers."
    ),
    Metric(
        "penstock_kv_index_unmatched_workers", "gauge",
        "Workers with cache hits whose KV events match no prompt.", shared=True,
    ),
    Metric("penstock_kv_index_gaps_total", "counter", "Gaps in the KV event streams of workers."),
    Metric("penstock_kv_index_replays_total", "counter", "Replays requested from workers after gaps in their "
    "KV events."),
    Metric("penstock_kv_index_unreadable_total", "counter", "KV events that could not be decoded."),
    Metric(
        "penstock_kv_index_blocks_total", "counter",
        "Prompt blocks at a worker: expected and cached (hit), expected and not cached (missed), or cached "
        "unexpectedly.",
        ("outcome",),
    ),
    Metric("penstock_retries_total", "counter", "Retried requests.", MODEL),
    Metric(
        "penstock_attempt_timeouts_total", "counter",
        "Attempts ended because they gave no first token in time.", MODEL
    ),
    Metric(
        "penstock_breaker_state",
        "gauge",
        "State of a worker's circuit breaker: 0 closed, 1 open, 2 half-open, 3 ramping up.",
        ("model", "worker"),
    ),
    Metric("penstock_retry_budget_level", "gauge", "Retries that the retry budget allows now."),
    Metric(
        "penstock_hedges_total",
        "counter",
        "Hedged requests, by outcome.",
        ("model", "outcome"),
    ),
    Metric(
        "penstock_migrations_total",
        "counter",
        "Streams migrated to another worker after theirs was lost.",
        MODEL,
    ),
    Metric(
        "penstock_cell_requests_total",
        "counter",
        "Attempts of requests that were sent to a peer cell.",
        ("model", "cell"),
    ),
    Metric(
        "penstock_cell_guests_total",
        "counter",
        "Requests of a peer cell that ended here, by outcome.",
        ("cell", "outcome"),
    ),
    Metric(
        "penstock_shadow_requests_total",
        "counter",
        "Copies of requests for a version that a rollout tries (model), by what became of them: compared, "
        "no_room (not sent), made_room (ended for requests), refused, dropped.",
        ("model", "outcome"),
    ),
    Metric("penstock_cell_round_trip_seconds", "gauge", "To a peer cell and back, as measured.", ("cell",)),
    Metric(
        "penstock_ttft_prediction_error_ratio", "histogram", "Relative error of the predicted time to first "
        "token.",
        MODEL, ERROR_BUCKETS,
    ),
    # Probes and anomalies (policy/resilience/).
    Metric("penstock_probes_total", "counter", "Probes by verdict: right, wrong, undecided, answered (not "
    "judged), none.", ("model", "verdict")),
    Metric("penstock_probe_ttft_seconds", "gauge", "Time to first token of a worker's last probe.", WORKER,
        shared=True),
    Metric("penstock_probe_tpot_seconds", "gauge", "Time per further token of a worker's last probe.", WORKER,
        shared=True),
    Metric("penstock_probe_logprob_distance", "gauge", "Largest difference between log-probabilities of a "
    "worker's last probe and its golden answer, in nats.", WORKER, shared=True),
    Metric("penstock_worker_slowness_ratio", "gauge", "Step times of a worker over those of its peers at the "
    "same load; 1 if not known.", WORKER, shared=True),
    Metric("penstock_worker_weight_ratio", "gauge", "Share of its capacity that a worker is given: 1, 0.5 in "
    "doubt, 0 ejected.", WORKER, shared=True),
    Metric("penstock_anomalous_workers", "gauge", "Workers found slow or wrong for certain, by cause.",
        ("model", "cause"), shared=True),
    Metric("penstock_ejections_total", "counter", "Workers that were given nothing more, by cause.",
        ("model", "cause")),
    Metric("penstock_worker_faults_total", "counter", "Faults of workers' machines: xid (a device wants a "
    "restart or more), xid_noted, oom_kill, weights (they have changed in memory).", ("model", "kind"),
    shared=True),
    # External workers.
    Metric(
        "penstock_backend_requests_total", "counter", "Completed streams of external workers, by outcome.",
        ("engine", "outcome"),
    ),
    Metric(
        "penstock_backend_anomalies_total", "counter", "Invalid responses of external workers.",
        ("engine", "kind"),
    ),
    Metric(
        "penstock_scrape_missing_total", "counter", "Expected metrics that a worker does not export.",
        ("engine", "metric"),
    ),
    Metric(
        "penstock_scrape_failures_total", "counter", "Failed scrapes of a worker's metrics.", ("engine",)
    ),
    Metric("penstock_budget_warnings_total", "counter", "Budget warning thresholds that were crossed.",
        ("period",)),
    # Tenants: those that use most by name, all others as "other" (telemetry/metrics.py).
    Metric("penstock_tenant_requests_total", "counter", "Ended requests by tenant.", ("tenant",)),
    Metric("penstock_tenant_tokens_total", "counter", "Prompt and output tokens by tenant.", ("tenant",)),
    # Objectives (telemetry/alerts.py).
    Metric("penstock_slo_requests_total", "counter", "Ended requests that had to meet an objective.",
        ("model", "band", "objective")),
    Metric("penstock_slo_missed_total", "counter", "Those of them that did not.",
        ("model", "band", "objective")),
    Metric("penstock_disk_free_ratio", "gauge", "Free share of the disk with the usage ledger.", shared=True),
    Metric("penstock_build_info", "gauge", "Always 1; the version is a label.", ("version",), shared=True),
)  # fmt: skip

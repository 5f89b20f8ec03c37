"""Every metric there is, as one literal table. Names and labels are an interface: dashboards and alerts are
written against them, so a golden file keeps them.

Only the names are ours; the shapes are the field's. Buckets follow OpenTelemetry's GenAI conventions, extended
downwards for small models and upwards for long answers. Label values come from closed sets: configured model
names, the enums below, HTTP status codes. Nothing that a client can invent becomes a label.
"""

import enum
from dataclasses import dataclass
from typing import Literal


class Endpoint(enum.StrEnum):
    """Where a request came in."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class OutcomeLabel(enum.StrEnum):
    """How a request ended, as operators count it. The first four are answers."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    BUDGET = "budget"  # The tenant's budget ended it early.
    ABORT = "abort"  # The client left.
    ERROR = "error"  # A worker or the server failed.
    REJECTED = "rejected"  # The request itself was wrong (4xx).
    SHED = "shed"  # Too much work, or draining; nothing was generated.


class BlockState(enum.StrEnum):
    """What a KV block is doing. The three sum to the pool."""

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


TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
DURATION_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36,
)  # fmt: skip
RATIO_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

MODEL = ("model",)

CATALOG = (
    # Requests, as the gateway sees them.
    Metric(
        "penstock_requests_total", "counter", "Requests that ended.", ("model", "endpoint", "outcome")
    ),
    Metric(
        "penstock_request_ttft_seconds", "histogram", "Arrival to first token.", MODEL, TTFT_BUCKETS
    ),
    Metric(
        "penstock_request_tpot_seconds", "histogram",
        "Mean time per output token after the first, per request.", MODEL, TPOT_BUCKETS,
    ),
    Metric(
        "penstock_request_duration_seconds", "histogram", "Arrival to last byte.", MODEL, DURATION_BUCKETS
    ),
    Metric(
        "penstock_request_queue_seconds", "histogram", "Wait before the first step.", MODEL, TTFT_BUCKETS
    ),
    Metric("penstock_prompt_tokens_total", "counter", "Prompt tokens of ended requests.", MODEL),
    Metric(
        "penstock_cached_tokens_total", "counter", "Prompt tokens that were found in the prefix cache.", MODEL
    ),
    Metric("penstock_generated_tokens_total", "counter", "Tokens generated for ended requests.", MODEL),
    # The engine, as it tells of itself.
    Metric("penstock_engine_running", "gauge", "Requests in the engine's batch.", MODEL, shared=True),
    Metric("penstock_engine_waiting", "gauge", "Requests queued in the engine.", MODEL, shared=True),
    Metric("penstock_kv_blocks", "gauge", "KV blocks by what they do.", ("model", "state"), shared=True),
    Metric("penstock_host_kv_blocks", "gauge", "KV blocks that are kept in host memory.", MODEL, shared=True),
    Metric("penstock_host_kv_stores_total", "counter", "KV blocks copied to host memory.", MODEL, shared=True),
    Metric("penstock_host_kv_loads_total", "counter", "KV blocks copied back from host memory.", MODEL, shared=True),
    Metric("penstock_engine_steps_total", "counter", "Engine steps.", MODEL, shared=True),
    Metric("penstock_engine_step_seconds_total", "counter", "Time spent in steps.", MODEL, shared=True),
    Metric(
        "penstock_engine_host_seconds_total", "counter",
        "Of the time spent in steps, what was not waiting for forward pass and sampling.", MODEL, shared=True,
    ),
    Metric("penstock_engine_preemptions_total", "counter", "Requests that lost their blocks.", MODEL, shared=True),
    Metric("penstock_engine_restarts_total", "counter", "Restarts of the engine's process.", MODEL, shared=True),
    Metric(
        "penstock_accelerator_cost_total", "counter",
        "Cost of workers' time, in the price list's currency: while they had requests (busy), and while not (idle).",
        ("model", "part"), shared=True,
    ),
    Metric(
        "penstock_accelerator_charged_total", "counter",
        "Of the busy workers' cost, what requests were charged. The rest is nobody's: probes, lost attempts, rounding.", MODEL,
    ),
    Metric("penstock_workers", "gauge", "Workers by their state.", ("model", "state"), shared=True),
    # The front door.
    Metric("penstock_connections", "gauge", "Open HTTP connections."),
    Metric("penstock_streams", "gauge", "Answers being generated."),
    Metric("penstock_http_responses_total", "counter", "HTTP responses by status code.", ("code",)),
    Metric(
        "penstock_client_disconnects_total", "counter", "Clients that left before their answer was complete."
    ),
    Metric(
        "penstock_slow_client_aborts_total", "counter", "Answers aborted because the client read too slowly."
    ),
    Metric(
        "penstock_event_loop_lag_seconds", "histogram", "How late the event loop's timer was.", (), LAG_BUCKETS
    ),
    # The usage ledger.
    Metric("penstock_ledger_records_total", "counter", "Records of ended requests written to the journal."),
    Metric("penstock_ledger_pending_records", "gauge", "Records in the journal that the database lacks."),
    Metric("penstock_ledger_lost_records_total", "counter", "Records lost: the disk was full, and the buffer."),
    Metric("penstock_ledger_sink_errors_total", "counter", "Times that the database took nothing."),
    Metric("penstock_ledger_journal_bytes", "gauge", "Disk taken by this process's journal."),
    Metric("penstock_ledger_open_requests", "gauge", "Accepted requests whose record is still to come."),
    # Limits that several gateways share.
    Metric("penstock_shared_store_away", "gauge", "Gateway processes that the store of shared limits does not answer."),
    Metric("penstock_shared_store_failures_total", "counter", "Questions that the store of shared limits did not answer."),
    Metric("penstock_shared_gateways", "gauge", "Gateway processes that share limits, as the store said last.", shared=True),
    # Admission and queues.
    Metric("penstock_queue_waiting", "gauge", "Requests that wait for a worker.", MODEL),
    Metric(
        "penstock_refused_total", "counter", "Requests that were not accepted, by who said no.", ("model", "reason")
    ),
    Metric("penstock_evicted_total", "counter", "Accepted requests that were dropped, by why.", ("model", "reason")),
    Metric("penstock_diverted_total", "counter", "Requests that another model answers, by why.", ("model", "reason")),
    Metric(
        "penstock_route_decisions_total", "counter", "Decisions which worker gets a request, by why.",
        ("model", "policy", "reason"),
    ),
    Metric(
        "penstock_prefix_match_ratio", "histogram", "Part of a prompt that its worker was expected to have cached.", MODEL,
        RATIO_BUCKETS,
    ),
    # What the router knows of its workers' KV caches.
    Metric("penstock_kv_index_entries", "gauge", "KV blocks that any worker is thought to have, by tier counted once."),
    Metric("penstock_kv_index_predicted_entries", "gauge", "Of those, blocks that are only expected at a worker."),
    Metric(
        "penstock_kv_index_staleness_seconds", "gauge", "How long a worker's KV events have been awaited: the longest."
    ),
    Metric(
        "penstock_kv_index_unmatched_workers", "gauge",
        "Workers whose KV events name blocks by which no prompt is found, though prompts hit their caches.", shared=True,
    ),
    Metric("penstock_kv_index_gaps_total", "counter", "Times that KV events were missing."),
    Metric("penstock_kv_index_replays_total", "counter", "Times that a worker was asked for what was missed."),
    Metric("penstock_kv_index_unreadable_total", "counter", "KV events that were not understood."),
    Metric(
        "penstock_kv_index_blocks_total", "counter",
        "Prompt blocks that were expected in a worker's cache and were there (hit) or not (missed), or were there unexpected.",
        ("outcome",),
    ),
    Metric("penstock_retries_total", "counter", "Requests that were started again on a worker.", MODEL),
    Metric(
        "penstock_breaker_state",
        "gauge",
        "Circuit breaker of a worker: 0 closed, 1 open, 2 being probed, 3 being trusted again.",
        ("model", "worker"),
    ),
    Metric("penstock_retry_budget_level", "gauge", "Requests that could be tried again now."),
    Metric(
        "penstock_hedges_total",
        "counter",
        "Requests that were started on a second worker beside the first, or should have been, by what came of it.",
        ("model", "outcome"),
    ),
    Metric(
        "penstock_migrations_total",
        "counter",
        "Streams whose worker was lost and that were to go on, token for token, on another.",
        MODEL,
    ),
    Metric(
        "penstock_ttft_prediction_error_ratio", "histogram", "Predicted time to first token against the real one.",
        MODEL, ERROR_BUCKETS,
    ),
    # Workers that are not ours.
    Metric(
        "penstock_backend_requests_total", "counter", "Streams of workers that are not ours that ended, by how.",
        ("engine", "outcome"),
    ),
    Metric(
        "penstock_backend_anomalies_total", "counter", "Answers of such workers that were not as they should be.",
        ("engine", "kind"),
    ),
    Metric(
        "penstock_scrape_missing_total", "counter", "Metrics that a worker should have and does not.",
        ("engine", "metric"),
    ),
    Metric(
        "penstock_scrape_failures_total", "counter", "Pages of a worker's metrics that could not be read.", ("engine",)
    ),
    Metric("penstock_budget_warnings_total", "counter", "Shares of budgets that were used up.", ("period",)),
    Metric("penstock_build_info", "gauge", "Always 1; the version is a label.", ("version",), shared=True),
)  # fmt: skip

"""Retired keys of tenants, admission, queues, routing, limits, health and prices (see retired.py)."""

_PLACEMENT = "a constant of placement now (penstock/policy/placement_terms.py)"
_HEARTBEAT = "a constant now: a silent worker is suspect after 1 s and lost after 2 s"
_BREAKER = "constants of the breakers now (penstock/policy/resilience/breaker.py)"
_RETRY = "constants of the retry budget now (penstock/policy/resilience/health.py)"
_QUARANTINE = "a constant of the quarantine now (penstock/policy/extras/quarantine.py)"
_HEDGE = "a constant of hedging now (penstock/policy/extras/hedging.py)"
_QUEUE = "a constant of the queue now (penstock/policy/queueing/terms.py)"
_ADMISSION = "a constant of admission now (penstock/policy/admission/admit.py and promise.py)"
_COMPLEXITY = "a constant now (penstock/policy/extras/complexity.py)"

RETIRED_POLICIES: dict[str, str] = {
    "routing.placement.ttft.*": _PLACEMENT,
    "routing.placement.weighted.*": _PLACEMENT,
    **{
        f"routing.placement.{key}": _PLACEMENT
        for key in (
            "holders_max", "least_loaded", "tie", "explore", "hold_ms_max", "holds_max", "host_cost",
            "adapter_load_ms", "prefill_tokens_per_s", "step_ms", "session_ttl_s", "sessions_max",
            "decisions_kept", "log_every",
        )
    },
    "health.heartbeat.*": _HEARTBEAT,
    "health.breaker.*": _BREAKER,
    "health.panic_above": "a constant now: never more than half of a model's workers are left alone",
    "health.retry.*": _RETRY,
    "health.quarantine.deaths": "now `health.quarantine_crashes`",
    "health.quarantine.*": _QUARANTINE,
    "health.hedge.enabled": "now `health.hedge_share`: 0.02 for what was true, 0 for none",
    "health.hedge.after_ms": "now `health.hedge_after_ms`",
    "health.hedge.share": "now `health.hedge_share`",
    "health.hedge.*": _HEDGE,
    **{
        f"limits.{key}": "a constant now (penstock/protocol/openai_validate.py)"
        for key in (
            "stop_max", "stop_chars_max", "stop_token_ids_max", "messages_max", "tools_max",
            "top_logprobs_max", "logit_bias_max", "json_values_max", "json_depth_max", "prompts_max",
        )
    },
    "limits.session_bytes_max": "a constant now: 256",
    "limits.tokenize_inline_bytes": "a constant now (penstock/gateway/models/prepare.py)",
    "limits.tokenize_waiting_max": "a constant now (penstock/gateway/models/prepare.py)",
    "rate_limits.burst_s": "now `limits.burst_s`",
    "rate_limits.*": "a constant now (penstock/policy/limits/rate_limit.py and output_length.py)",
    "budgets.slice_tokens": "a constant now: 256 tokens",
    "budgets.tenants_max": "a constant now: 100,000 tenants",
    "budgets.refresh_s": "a constant now: every ten seconds",
    "auth.keys_file_check_s": "a constant now: every 2 s",
    "auth.keys_file_shrinks": "a server takes such a file when it starts; revoke keys with `penstock keys "
    "revoke`",
    "auth.keys_max": "a constant now: 100,000 keys",
    "auth.jwt.algorithms": "every signature with a public key that is of its key's kind is accepted now",
    **{
        f"auth.jwt.{key}": "a constant now (penstock/gateway/identity/tokens.py)"
        for key in (
            "leeway_s", "refresh_s", "refresh_s_min", "stale_s_max", "timeout_s", "waiting_max",
            "response_bytes_max", "keys_max", "tokens_max",
        )
    },
    **{f"queue.bands[].{key}": "follows from `queue.bands[].order` now" for key in ("starvation_s",
        "protected")},
    "queue.bands[].bytes_max": _QUEUE,
    **{
        f"queue.{key}": _QUEUE
        for key in (
            "bytes_max", "tenant_share", "when_full", "tenants_kept", "skips_max", "skip_s", "aside_max",
            "retries_max", "worker_credit", "shed_kv_to", "shed_max",
        )
    },
    "queue.foreign_concurrency": "a constant now: 64; a worker has `models[].workers[].max_running`",
    "admission.idle_factor": _ADMISSION,
    "admission.prefer_fraction": _ADMISSION,
    "admission.prefer_saves_ms": _ADMISSION,
    "admission.retry_after_max_s": _ADMISSION,
    "admission.retry_after_default_s": _ADMISSION,
    "admission.retries_kept": _ADMISSION,
    "admission.max_wait_ms_max": "a constant now: ten minutes",
    "routing.auto.name": "the name is always auto",
    "routing.auto.weights.*": _COMPLEXITY,
    **{f"routing.auto.{key}": _COMPLEXITY for key in ("tokens_full", "turns_full", "text_chars_max",
        "cost_bias")},
}  # fmt: skip

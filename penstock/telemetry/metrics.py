"""The numbers behind /metrics: typed handles for the parts that count, and their exposition.

Each `Metrics` has a registry of its own. Label children are resolved once, where things are wired, so that
counting on the hot path is one method call; nothing here is called per token. Counts of workers that are not
ours are by engine.

Only those tenants have a name in metrics that use most, so that no number of tenants makes many series. A
tenant gets its name once it has used `1 / TENANTS_MAX` of all tokens of this process, and keeps it; what it
used before is counted as of "other", like all that others use. So sums over tenants are right at any time.
Use is followed for `FOLLOWED_MAX` tenants at most (Metwally's Space-Saving): a new one takes the place of the
least, with its count.
"""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.clock import NS_PER_S
from penstock.kv.index.locality import LocalityStatistics
from penstock.policy.lifecycle.machine_costs import Costs
from penstock.policy.limits.price import MICROS
from penstock.policy.placement.pick import Decision
from penstock.policy.resilience.worker_state import WorkerState
from penstock.protocol.worker import ModelInfo, Stats
from penstock.telemetry.catalog import CATALOG, BlockState, Endpoint, OutcomeLabel
from penstock.telemetry.counts import EndedTogether
from penstock.telemetry.instruments import Counter, Instruments, MetricFamily
from penstock.telemetry.worker_meters import AnomalyMeters, Followed, WorkerLabels, WorkerMeters

TENANTS_MAX = 32
FOLLOWED_MAX = 256
OTHER = "other"


@dataclass(slots=True, frozen=True, kw_only=True)
class LedgerStatistics:
    """How the ledger is doing."""

    closed: int
    """Records that were closed."""
    pending: int
    """Closed records that the database does not have yet."""
    lost: int
    sink_errors: int
    journal_bytes: int
    open: int
    """Requests that were accepted and are not over."""


class TenantLabels:
    """The names of one process."""

    def __init__(self) -> None:
        self._named = set[str]()
        self._used: dict[str, int] = {}
        self._total = 0

    def label(self, tenant: str, tokens: int) -> str:
        """The name under which a request of this tenant is counted, which used so many tokens."""
        if tenant in self._named:
            self._total += tokens
            return tenant
        if not tenant or len(self._named) >= TENANTS_MAX or not tokens:
            self._total += tokens
            return OTHER
        if tenant not in self._used and len(self._used) >= FOLLOWED_MAX:
            least = min(self._used, key=self._used.__getitem__)
            self._used[tenant] = self._used.pop(least)
        self._used[tenant] = self._used.get(tenant, 0) + tokens
        self._total += tokens
        if self._used[tenant] * TENANTS_MAX < self._total:
            return OTHER
        del self._used[tenant]
        self._named.add(tenant)
        return tenant


class BackendMeters:
    """The counters of one engine.

    Label values come from closed sets: outcomes, anomalies, our tables of names.
    """

    def __init__(self, engine: str, counters: Mapping[str, MetricFamily[Counter]]) -> None:
        """`counters` by name, as the catalog has them."""
        self._engine = engine
        self._requests = counters["penstock_backend_requests_total"]
        self._odd = counters["penstock_backend_anomalies_total"]
        self._missing = counters["penstock_scrape_missing_total"]
        self._failures = counters["penstock_scrape_failures_total"].labels(engine)

    def ended(self, outcome: str) -> None:
        """A stream is over."""
        self._requests.labels(self._engine, outcome).inc()

    def odd(self, kind: str) -> None:
        """An answer was not as it should be (`backends.http.stream.Anomaly`)."""
        self._odd.labels(self._engine, kind).inc()

    def missing(self, metric: str) -> None:
        """A metric that was expected was not there."""
        self._missing.labels(self._engine, metric).inc()

    def scrape_failed(self) -> None:
        """A page of metrics could not be had or read."""
        self._failures.inc()


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _nothing() -> None:
    """No requests wait to be counted."""


class Metrics:
    """Everything that is counted in one process. `models` are the names that may become labels."""

    def __init__(self, models: Sequence[str], *, version: str) -> None:
        self._table = Instruments(CATALOG)
        self.count_ended: Callable[[], None] = _nothing
        """Counts the requests that have ended and are not on the page yet (`telemetry.history.Recorder`)."""
        self._models = {name: ModelMetrics(self._table, name) for name in models}
        self._responses = self._table.counter("penstock_http_responses_total")
        self._by_code: dict[int, Counter] = {}
        self.connections = self._table.gauge("penstock_connections").labels()
        self.streams = self._table.gauge("penstock_streams").labels()
        self.client_disconnects = self._table.counter("penstock_client_disconnects_total").labels()
        self.slow_client_aborts = self._table.counter("penstock_slow_client_aborts_total").labels()
        self.event_loop_lag = self._table.histogram("penstock_event_loop_lag_seconds").labels()
        self._ledger_closed = Followed(self._table.counter("penstock_ledger_records_total").labels())
        self._ledger_lost = Followed(self._table.counter("penstock_ledger_lost_records_total").labels())
        self._ledger_errors = Followed(self._table.counter("penstock_ledger_sink_errors_total").labels())
        self._ledger_pending = self._table.gauge("penstock_ledger_pending_records").labels()
        self._ledger_bytes = self._table.gauge("penstock_ledger_journal_bytes").labels()
        self._budget_warnings = self._table.counter("penstock_budget_warnings_total")
        self._waiting = self._table.gauge("penstock_queue_waiting")
        self.scale_wanted = self._table.gauge("penstock_scale_wanted_workers")
        self._refused = self._table.counter("penstock_refused_total")
        self._evicted = self._table.counter("penstock_evicted_total")
        self._diverted = self._table.counter("penstock_diverted_total")
        self._decisions = self._table.counter("penstock_route_decisions_total")
        self._matches = self._table.histogram("penstock_prefix_match_ratio")
        self._kv_entries = self._table.gauge("penstock_kv_index_entries").labels()
        self._kv_predicted = self._table.gauge("penstock_kv_index_predicted_entries").labels()
        self._kv_staleness = self._table.gauge("penstock_kv_index_staleness_seconds").labels()
        self._kv_unmatched = self._table.gauge("penstock_kv_index_unmatched_workers").labels()
        self._kv_gaps = Followed(self._table.counter("penstock_kv_index_gaps_total").labels())
        self._kv_replays = Followed(self._table.counter("penstock_kv_index_replays_total").labels())
        self._kv_unreadable = Followed(self._table.counter("penstock_kv_index_unreadable_total").labels())
        blocks = self._table.counter("penstock_kv_index_blocks_total")
        self._kv_blocks = {
            outcome: Followed(blocks.labels(outcome)) for outcome in ("hit", "missed", "unexpected")
        }
        traces = self._table.counter("penstock_traces_total")
        self._traces = {each: Followed(traces.labels(each)) for each in ("exported", "dropped")}
        self._template_child = self._table.counter("penstock_template_child_renders_total")
        self._retries = self._table.counter("penstock_retries_total")
        self._hedges = self._table.counter("penstock_hedges_total")
        self._migrations = self._table.counter("penstock_migrations_total")
        self._cell_requests = self._table.counter("penstock_cell_requests_total")
        self._cell_guests = self._table.counter("penstock_cell_guests_total")
        self._shadows = self._table.counter("penstock_shadow_requests_total")
        self._cell_round_trip = self._table.gauge("penstock_cell_round_trip_seconds")
        self._timeouts = self._table.counter("penstock_attempt_timeouts_total")
        self._breakers = self._table.gauge("penstock_breaker_state")
        self._store_away = self._table.gauge("penstock_shared_store_away").labels()
        self._store_failures = Followed(self._table.counter("penstock_shared_store_failures_total").labels())
        self._store_gateways = self._table.gauge("penstock_shared_gateways").labels()
        self._costs: dict[tuple[str, str], Followed] = {}
        """By model and part of the cost."""
        self._tenants = TenantLabels()
        self._tenant_requests = self._table.counter("penstock_tenant_requests_total")
        self._tenant_tokens = self._table.counter("penstock_tenant_tokens_total")
        self._slo_due = self._table.counter("penstock_slo_requests_total")
        self._slo_missed = self._table.counter("penstock_slo_missed_total")
        self._slo: dict[tuple[str, str, str], tuple[Counter, Counter]] = {}
        self._disk_free = self._table.gauge("penstock_disk_free_ratio").labels()
        self._retry_budget = self._table.gauge("penstock_retry_budget_level").labels()
        self._errors = self._table.histogram("penstock_ttft_prediction_error_ratio")
        self._ledger_open = self._table.gauge("penstock_ledger_open_requests").labels()
        self._table.gauge("penstock_build_info").labels(version).set(1)

    def model(self, name: str) -> "ModelMetrics":
        """The handles of one configured model."""
        return self._models[name]

    def anomalies(self) -> AnomalyMeters:
        """Those of probes, and of workers that are slow or wrong."""
        return AnomalyMeters(self._table)

    def backend(self, engine: str) -> BackendMeters:
        """The counters of one engine that is not ours."""
        names = (
            "penstock_backend_requests_total",
            "penstock_backend_anomalies_total",
            "penstock_scrape_missing_total",
            "penstock_scrape_failures_total",
        )
        return BackendMeters(engine, {name: self._table.counter(name) for name in names})

    def http_response(self, code: int) -> None:
        """Count one response."""
        child = self._by_code.get(code)
        if child is None:
            assert 100 <= code <= 599, code
            child = self._by_code[code] = self._responses.labels(str(code))
        child.inc()

    def ledger_stats(self, stats: LedgerStatistics) -> None:
        """Take over what the ledger says."""
        self._ledger_closed.follow(stats.closed)
        self._ledger_lost.follow(stats.lost)
        self._ledger_errors.follow(stats.sink_errors)
        self._ledger_pending.set(stats.pending)
        self._ledger_bytes.set(stats.journal_bytes)
        self._ledger_open.set(stats.open)

    def shared_limits(self, *, is_away: bool, failures: int, num_gateways: int) -> None:
        """How this gateway stands with the store of shared limits; `failures` since it started."""
        self._store_away.set(is_away)
        self._store_failures.follow(failures)
        self._store_gateways.set(num_gateways)

    def traces(self, exported: int, dropped: int) -> None:
        """The fate of traces since the start."""
        self._traces["exported"].follow(exported)
        self._traces["dropped"].follow(dropped)

    def kv_index_stats(self, stats: LocalityStatistics) -> None:
        """Take over what the router's KV index says."""
        self._kv_entries.set(stats.entries)
        self._kv_predicted.set(stats.predicted)
        self._kv_staleness.set(stats.staleness_ns / NS_PER_S)
        self._kv_unmatched.set(stats.unmatched_workers)
        self._kv_gaps.follow(stats.gaps)
        self._kv_replays.follow(stats.replays)
        self._kv_unreadable.follow(stats.unreadable)
        self._kv_blocks["hit"].follow(stats.blocks_hit)
        self._kv_blocks["missed"].follow(stats.blocks_missed)
        self._kv_blocks["unexpected"].follow(stats.blocks_unexpected)

    def queue_waiting(self, model: str, count: int) -> None:
        """So many requests wait for a worker of this model."""
        self._waiting.labels(model).set(count)

    def refused(self, model: str, reason: str) -> None:
        """A request was not accepted (`policy.flow.Refused`)."""
        self._refused.labels(model, reason).inc()

    def evicted(self, model: str, reason: str) -> None:
        """An accepted request was dropped (`policy.request.Evict`)."""
        self._evicted.labels(model, reason).inc()

    def diverted(self, model: str, reason: str) -> None:
        """Another model than this one answers (`policy.flow.Diverted`)."""
        self._diverted.labels(model, reason).inc()

    def placed(self, decision: Decision) -> None:
        """A placement has decided, maybe for a worker that should have a part of the prompt."""
        reason = decision.choice.reason
        self._decisions.labels(decision.route, decision.config.policy, reason).inc()
        if not decision.looked_up or reason in ("none", "hold"):
            return
        if (picked := decision.picked) is not None:
            matched = picked.device_tokens + picked.host_tokens
            self._matches.labels(decision.route).observe(matched / max(1, decision.request.prompt_tokens))

    def template_child(self, model: str, reason: Literal["unpriced", "allowance", "request_size"]) -> None:
        """A chat is rendered in the template's child process (`gateway.models.tokenize_pool`)."""
        self._template_child.labels(model, reason).inc()

    def retried(self, model: str) -> None:
        """A request whose worker failed it unseen is started again."""
        self._retries.labels(model).inc()

    def timed_out(self, model: str) -> None:
        """An attempt gave no first token in time, and the request continues elsewhere."""
        self._timeouts.labels(model).inc()

    def breaker(self, model: str, worker: str, state: int) -> None:
        """The attempts that a worker's circuit breaker lets through: `BreakerState`."""
        self._breakers.labels(model, worker).set(state)

    def accelerator_costs(self, by_model: Mapping[str, Costs]) -> None:
        """The cost of each model's workers since the start."""
        for model, costs in by_model.items():
            for part in ("busy", "idle", "reserve", "charged", "floor"):
                followed = self._costs.get((model, part))
                if followed is None:
                    is_own = part in ("charged", "floor")
                    counter = self._table.counter(f"penstock_accelerator_{part if is_own else 'cost'}_total")
                    labels = (model,) if is_own else (model, part)
                    followed = self._costs[model, part] = Followed(counter.labels(*labels), MICROS)
                followed.follow(getattr(costs, part))

    def retry_budget(self, level: float) -> None:
        """Requests that could be tried again now."""
        self._retry_budget.set(level)

    def hedged(self, model: str, outcome: str) -> None:
        """A request was started on a second worker beside the first, or was to be
        (`policy.hedge.HedgeOutcome`).
        """
        self._hedges.labels(model, outcome).inc()

    def migrated(self, model: str) -> None:
        """A stream lost its worker and waits to continue."""
        self._migrations.labels(model).inc()

    def sent_to_cell(self, model: str, cell: str) -> None:
        """An attempt was sent to a peer cell."""
        self._cell_requests.labels(model, cell).inc()

    def guest_ended(self, cell: str, outcome: str) -> None:
        """A request of a peer cell has ended here."""
        self._cell_guests.labels(cell, outcome).inc()

    def shadowed(self, model: str, outcome: str) -> None:
        """A copy of a request is over, or was not made."""
        self._shadows.labels(model, outcome).inc()

    def round_trip(self, cell: str, rtt_ns: int) -> None:
        """To a peer cell and back."""
        self._cell_round_trip.labels(cell).set(rtt_ns / NS_PER_S)

    def predicted(self, model: str, error: float) -> None:
        """A first token came: the relative error of when it was expected."""
        self._errors.labels(model).observe(error)

    def judged(self, model: str, band: str, objective: str, *, due: int, missed: int) -> None:
        """So many ended requests had to meet an objective (`telemetry.history.Objective`), and did not."""
        key = (model, band, objective)
        found = self._slo.get(key)
        if found is None:
            found = self._slo[key] = (self._slo_due.labels(*key), self._slo_missed.labels(*key))
        found[0].inc(due)
        found[1].inc(missed)

    def tenant(self, ended: "EndedTogether") -> None:
        """Count requests of a tenant; of those that use little as of "other"."""
        tokens = ended.prompt_tokens + ended.generated_tokens
        label = self._tenants.label(ended.like.tenant, tokens)
        self._tenant_requests.labels(label).inc(ended.count)
        self._tenant_tokens.labels(label).inc(tokens)

    def disk_free(self, share: float) -> None:
        """Of the disk that has the usage ledger."""
        self._disk_free.set(share)

    def budget_warning(self, period: Literal["day", "month"]) -> None:
        """A tenant has crossed a share of its budget (`policy.budget.BudgetEvent`)."""
        self._budget_warnings.labels(period).inc()

    def render(self, names: Iterable[str] | None = None) -> bytes:
        """All of it, or these metrics, in Prometheus' text format; serve it as `CONTENT_TYPE`."""
        self.count_ended()
        return self._table.page(names)


class ModelMetrics:
    """The handles of one model."""

    def __init__(self, table: Instruments, model: str) -> None:
        requests = table.counter("penstock_requests_total")
        self._requests = {
            (endpoint, outcome): requests.labels(model, endpoint.value, outcome.value)
            for endpoint in Endpoint
            for outcome in OutcomeLabel
        }
        self.ttft = table.histogram("penstock_request_ttft_seconds").labels(model)
        """Of all answers that were counted so far."""
        self._tpot = table.histogram("penstock_request_tpot_seconds").labels(model)
        self._duration = table.histogram("penstock_request_duration_seconds").labels(model)
        self._queue = table.histogram("penstock_request_queue_seconds").labels(model)
        self._prefill = table.histogram("penstock_request_prefill_seconds").labels(model)
        self._decode = table.histogram("penstock_request_decode_seconds").labels(model)
        self._prompt = table.counter("penstock_prompt_tokens_total").labels(model)
        self._cached = table.counter("penstock_cached_tokens_total").labels(model)
        self._generated = table.counter("penstock_generated_tokens_total").labels(model)
        self._running = table.gauge("penstock_engine_running").labels(model)
        self._waiting = table.gauge("penstock_engine_waiting").labels(model)
        blocks = table.gauge("penstock_kv_blocks")
        self._blocks = {state: blocks.labels(model, state.value) for state in BlockState}
        self._block_tokens = table.gauge("penstock_kv_block_tokens").labels(model)
        self._by_worker = WorkerMeters(model, table)
        self._adapter_slots = table.gauge("penstock_adapter_slots").labels(model)
        self._adapter_workers = table.gauge("penstock_adapter_workers")
        self._name, self._adapters = model, set[str]()
        """Adapters that are shown."""
        self._host_blocks = table.gauge("penstock_host_kv_blocks").labels(model)
        self._followed = {
            "host_stores": Followed(table.counter("penstock_host_kv_stores_total").labels(model)),
            "host_loads": Followed(table.counter("penstock_host_kv_loads_total").labels(model)),
            "step": Followed(table.counter("penstock_engine_steps_total").labels(model)),
            "step_ns": Followed(table.counter("penstock_engine_step_seconds_total").labels(model), NS_PER_S),
            "host_ns": Followed(table.counter("penstock_engine_host_seconds_total").labels(model), NS_PER_S),
            "drafted_tokens": Followed(table.counter("penstock_engine_drafted_tokens_total").labels(model)),
            "accepted_tokens": Followed(table.counter("penstock_engine_accepted_tokens_total").labels(model)),
            "kv_held_tokens": Followed(table.counter("penstock_engine_kv_held_tokens_total").labels(model)),
            "timed_kv_read": Followed(table.counter("penstock_engine_kv_read_tokens_total").labels(model)),
            "preemptions": Followed(table.counter("penstock_engine_preemptions_total").labels(model)),
        }
        """By the field of `Stats`."""
        self._restarts = table.counter("penstock_engine_restarts_total").labels(model)
        states = table.gauge("penstock_workers")
        self._workers = {state: states.labels(model, state.value) for state in WorkerState}

    def requests_ended(self, ended: EndedTogether) -> None:
        """Count requests; each exactly once, when it is over."""
        like = ended.like
        self._requests[like.endpoint, like.outcome].inc(ended.count)
        for histogram, times_ns in (
            (self._duration, ended.duration_ns),
            (self._queue, ended.queued_ns),
            (self.ttft, ended.ttft_ns),
            (self._prefill, ended.prefill_ns),
            (self._decode, ended.decode_ns),
            (self._tpot, ended.tpot_ns),
        ):
            histogram.observe_all([ns / NS_PER_S for ns in times_ns])
        self._prompt.inc(ended.prompt_tokens)
        self._cached.inc(ended.cached_tokens)
        self._generated.inc(ended.generated_tokens)
        if like.worker and like.outcome is OutcomeLabel.ERROR:
            self._by_worker.failed(like.worker, ended.count)
        elif like.worker and ended.ttft_ns and like.outcome is not OutcomeLabel.ABORT:
            prefill_ns, decode_ns = sum(ended.prefill_ns), sum(ended.decode_ns)
            self._by_worker.answered(like.worker, len(ended.ttft_ns), prefill_ns, decode_ns)

    def workers(self, states: Iterable[WorkerState]) -> None:
        """The states of all workers."""
        counts = Counts(states)
        for state, gauge in self._workers.items():
            gauge.set(counts[state])

    def engine_stats(self, by_worker: Mapping[str, Stats | None]) -> None:
        """Take over what the engines say (None: nothing now); gauges are their sums.

        Their counters may start again at 0; ours continue. A worker that is not named any more is forgotten.
        """
        known = {worker: stats for worker, stats in by_worker.items() if stats is not None}
        engines = known.values()
        self._running.set(sum(stats.running for stats in engines))
        self._waiting.set(sum(stats.waiting for stats in engines))
        used = sum(stats.blocks_used for stats in engines)
        cached = sum(stats.blocks_cached for stats in engines)
        self._blocks[BlockState.FREE].set(sum(stats.blocks_total for stats in engines) - used - cached)
        self._blocks[BlockState.USED].set(used)
        self._blocks[BlockState.CACHED].set(cached)
        self._host_blocks.set(sum(stats.host_blocks_used for stats in engines))
        for name, counter in self._followed.items():
            counter.follow_all({worker: getattr(stats, name) for worker, stats in known.items()})
            counter.keep(by_worker)
        self._by_worker.follow(by_worker)

    def worker_facts(self, facts: Mapping[str, WorkerLabels]) -> None:
        """The labels of each worker."""
        self._by_worker.tell(facts)

    def mbu(self, worker: str) -> float | None:
        """The memory bandwidth utilisation of a worker's last steps; None: it does not tell."""
        return self._by_worker.mbu.get(worker)

    def model_info(self, info: ModelInfo, adapters: Mapping[str, int]) -> None:
        """Its workers' facts of themselves, and how many of them have each adapter loaded."""
        self.block_tokens(info.block_tokens)
        self._adapter_slots.set(info.adapter_slots)
        for adapter in self._adapters - set(adapters):
            self._adapter_workers.remove(self._name, adapter)
        self._adapters = set(adapters)
        for adapter, num_workers in adapters.items():
            self._adapter_workers.labels(self._name, adapter).set(num_workers)

    def block_tokens(self, count: int) -> None:
        """How many tokens a KV block holds."""
        self._block_tokens.set(count)

    def engine_restarted(self) -> None:
        """An engine's process was started again."""
        self._restarts.inc()

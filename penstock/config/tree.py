"""Every setting there is, its default and its bound.

A config file is this tree in YAML. Fields are documented where they stand because `--print-config`, the docs
page and the error for a wrong key are all made from these files (`SECTIONS` in load.py). A bound that no
operator has a reason to move is a constant beside its code.
"""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.branch import Branch, Port, Positive, Seconds
from penstock.config.cells import CellsConfig
from penstock.config.fleet import (
    BackendsConfig,
    DiscoverConfig,
    FleetConfig,
    HealthConfig,
    Replicas,
    WorkerConfig,
)
from penstock.config.flow import LimitsConfig, QueueConfig, SharedConfig
from penstock.config.ledger import BudgetsConfig, LedgerConfig, PricesConfig
from penstock.config.routing import AdmissionConfig, EnsembleConfig, RoutingConfig
from penstock.config.scale import ScaleConfig
from penstock.config.tenancy import DEFAULT_TIERS, AuthConfig, TenantConfig, TierConfig

MODEL_LEN_MIN = 2
"""Tokens: one of a prompt and one of an answer."""


class KVEventsConfig(Branch, frozen=True, kw_only=True):
    """The KV events that the worker publishes, in vLLM's layout.

    Off until there is an endpoint; see docs/engine.md.
    """

    endpoint: str = ""
    """ZeroMQ PUB address: "tcp://127.0.0.1:5557", "tcp://*:5557", "ipc:///run/kv"; empty publishes
    nothing."""
    connect: bool = False
    """Connect to a subscriber that listens at `endpoint` (a name or an address), instead of listening
    there."""
    replay_endpoint: str = ""
    """ZeroMQ ROUTER address from which missed batches are sent again; empty offers none."""
    topic: str = ""
    """First frame of every message; llm-d wants "kv@<pod>@<model>"."""
    token_ids: Literal["none", "public", "all"] = "public"
    """The token ids that the events hold: none, those of the public prefixes, or every tenant's."""


Latency = Annotated[float, Meta(ge=0)]
"""Milliseconds."""


Scheduling = Literal["fair", "priority", "fcfs"]
"""Orders of the engine's queue (schedule/queue.py)."""


class EngineConfig(Branch, frozen=True, kw_only=True):
    """How one engine worker computes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": the first CUDA device if torch sees one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """"auto": bfloat16 on a GPU and where the native kernels compute or the processor multiplies it, else
    float32."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Of the KV cache. "auto": as `dtype`. "int8": every head of a token is rounded to 8 bits and a scale,
    nearly twice the blocks in the same memory; on the CPU only. "fp8": e4m3, twice the blocks; on a GPU
    only."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """Weights rounded when they are loaded: "int8" also rounds inputs as they come on a CPU (W8A8), "int4"
    takes the least memory. On a CPU native kernels only; "none" keeps `dtype`, or what the checkpoint has."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """"auto": the native kernels where they were built and can compute the model, else torch."""
    attention: Literal["auto", "triton", "flashinfer"] = "auto"
    """The attention kernels on a GPU. "auto": our Triton kernels. "flashinfer": that package's
    (penstock[flashinfer]), without CUDA graphs; for heads of 64, 128 or 256 in bfloat16. On the CPU only
    "auto"."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """CPU threads for the model; 0 takes every core the process may use."""
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """Tokens of prompt and answer together, at least 2; 0 takes the model's own limit."""
    kv_memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """Memory for the KV cache; 0 takes 0.3 of what is free after loading on a CPU (and 4 GiB at most), and
    0.92 on a GPU."""
    host_kv_memory_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Host memory for KV blocks of idle sessions and preempted requests; null takes a tenth of the free
    memory, 4 GiB at most; 0 switches the host tier off."""
    step_tokens: Positive = 512
    """Token budget of one step: decode rows first, the rest goes to chunks of prompts."""
    max_running: Positive = 64
    """Requests in one batch at most."""
    scheduling: Scheduling = "fair"
    """The order in which requests start. "fair": by class, where waiting makes up for class, and in a class
    the tenant that was served least; the default, because with one tenant it is "priority" and with several
    none can crowd out the others. "priority": by class, and waiting makes up for class. "fcfs": strictly by
    class, then arrival: lower classes may starve."""
    kv_quota_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the KV cache that one tenant's running requests may hold; 1 is no quota. A tenant over it
    starts nothing new and is preempted first; a request that alone is over it is refused. 0 is automatic: 0.5
    where the configuration lets several tenants in (`tenants`, `auth.keys`, `auth.keys_file`, `auth.jwt`),
    else 1."""
    itl_target_ms: Latency | dict[int, Latency] = 0.0
    """Prompts may not push the time between two tokens of running answers over this many milliseconds: of all
    answers, or of those of priority classes ({0: 50, 1: 200}); the strictest class that is decoding counts.
    0, and for a class that is not named, is automatic: one waiting prompt is to stretch it by less than half,
    and the more wait the more they get (schedule/prefill_budget.py)."""
    tpot_target_ms: Annotated[float, Meta(ge=0)] | None = None
    """Milliseconds per output token that running answers are promised in the mean: requests that would make
    steps longer wait, and prompts take what is left (schedule/prefill_budget.py). Never less than 2.5 times
    the step of a lone request, so that a slow machine still runs batches. 0 promises nothing; null is
    `admission.tpot_target_ms`, and 50 for a worker that stands alone. Classes with a target of their own
    (`itl_target_ms`) are promised that."""
    batch_delay_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    """Of models that make vectors or scores: how long the first text waits for others, while fewer than
    `step_tokens` tokens are there. 0: not at all; what comes while a step runs is the next one's batch."""
    adapter_slots: Annotated[int, Meta(ge=0, le=1024)] = 20
    """Low-rank adapters (LoRA) that the requests in one batch may have between them; a request for one more
    waits. 0: none are taken. On the CPU; see docs/adapters.md."""
    adapter_memory_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Memory for adapters, beside weights and KV cache; null takes a tenth of the free memory, 4 GiB at
    most."""
    speculation: Annotated[str, Meta(min_length=1)] = "off"
    """Guess tokens ahead and compute them in the same step, as many as pay: answers stay the same, to the
    token. "off"; "ngram": what followed the last tokens where the request has had them before; or the path of
    a smaller model with the same tokenizer, or of a head in EAGLE's layout, which guesses. On the CPU; see
    docs/engine.md."""
    prefix_cache: bool = True
    """Keep the KV blocks of finished requests and reuse them for equal prefixes of the same tenant."""
    kv_events: KVEventsConfig = KVEventsConfig()
    load_format: Literal["safetensors", "random"] = "safetensors"
    """"random" makes weights up from the config's shapes, for benchmarks."""
    startup_timeout_s: Seconds = 600.0
    """A worker that is not ready after this long is started again."""
    kernel_log: str = "/dev/kmsg"
    """Where a worker on a GPU reads of Xids, which end it when its device is damaged (docs/failures.md): the
    kernel's log, or a file that it is written to. Empty: nowhere."""
    stall_timeout_s: Seconds = 120.0
    """A worker with queued work whose steps do not advance for this long is declared hung and restarted."""
    restarts_max: Annotated[int, Meta(ge=0)] = 5
    """Restarts after a crash within ten minutes; then the model stays down and says so."""


class ModelConfig(Branch, frozen=True, kw_only=True):
    """One model that is served."""

    path: str
    """A Hugging Face model directory, a GGUF file, a hub id, `s3://bucket/prefix`, or the name of a built-in
    demo model (docs/models.md)."""
    name: str = ""
    """The name clients use; empty takes the last part of the path."""
    version: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Several versions of a model have one `name`, and clients name one of them as "name@2"; "name" alone is
    the version that stands first. 0: it has none."""
    public_prefixes: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Texts (of system prompts, of plain prompts) that are no tenant's secret: all tenants share their cached
    KV."""
    tool_format: Literal[
        "auto", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "phi", "functools", "gemma",
        "tool_code",
    ] = "auto"  # fmt: skip
    """How it calls tools; "auto": as its chat template says."""
    reasoning_marks: Annotated[str, Meta(pattern=r"^(auto|none|\S+ \S+)$", max_length=128)] = "auto"
    """The marks around its reasoning, such as "<think> </think>"; "auto": what its chat template has, if
    anything; "none": it does not reason."""
    replicas: Replicas = 1
    """Workers of our own engine that are launched for it; 0: none."""
    scale: ScaleConfig = ScaleConfig()
    sleep_after_s: Seconds = 0.0
    """Without work for so long its replicas give their memory back; the first request wakes them
    (docs/sleep.md). 0: only by hand, or for the sake of others (`fleet.memory_bytes`)."""
    workers: Annotated[tuple[WorkerConfig, ...], Meta(max_length=256)] = ()
    """Workers that run somewhere already."""
    discover: Annotated[tuple[DiscoverConfig, ...], Meta(max_length=16)] = ()
    """Workers that come and go: by a name, or in a cluster."""
    adapters: Annotated[
        dict[Annotated[str, Meta(max_length=256)], Annotated[str, Meta(max_length=4096)]],
        Meta(max_length=1024),
    ] = {}  # noqa: RUF012 - msgspec copies it.
    """Low-rank adapters (LoRA) of the model, by the names that clients ask for: directories in PEFT's format,
    `http(s)://` or `s3://`; with `#digest=HEX` behind it must have that one."""
    engine: EngineConfig = EngineConfig()


class ServerConfig(Branch, frozen=True, kw_only=True):
    """The HTTP front door."""

    host: str = "127.0.0.1"
    """Address to listen on. On addresses other than loopback callers must be named (`auth`)."""
    port: Port = 8000
    """0 takes a free one."""
    hosts: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Names, beside `host` and loopback's, under which browsers reach this server. Where no key is asked for,
    requests for other names and from pages of other origins are refused."""
    trust_local: bool = False
    """Let callers on this machine read /metrics and /status.json without a key. Not beside a proxy: one that
    adds no forwarding header makes all of its callers local."""
    cors_origins: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Pages of these origins may call the API (/v1) from a browser: "https://chat.example.com", or "*" for
    all; none: no page of another origin. Keys are asked for all the same."""
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Gateway processes that share the address, for more cores than one; bounds here and in `limits` count
    for each."""
    body_bytes_max: Positive = 8 * 1024 * 1024
    """A larger request body is refused with 413."""
    lameduck_s: Seconds = 10.0
    """After SIGTERM `/ready` says no at once and requests are served for this long, for load balancers hear
    of a stop seconds later; then the server drains. Ctrl-C on a loopback address drains at once."""
    drain_timeout_s: Seconds = 30.0
    """So long have running streams to end while the server drains; new requests get 503."""
    slow_client: Literal["pause", "abort"] = "pause"
    """"pause": while a client does not keep up its text is held back, and leaves in one piece when it has
    caught up. "abort": nothing is held back, so that the buffer (1 MiB) fills fifty times sooner and the
    request is aborted."""
    flush_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    """Text of one stream within this time leaves as one event, after the first, which leaves at once. 0:
    every token is an event of its own."""


class LogConfig(Branch, frozen=True, kw_only=True):
    """The lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below this level are left out."""
    format: Literal["text", "json"] = "text"
    """"json": one object per line."""
    access: bool = True
    """One line per request. Probes, scrapes and other polls that were answered have theirs at level debug."""


class TracesConfig(Branch, frozen=True, kw_only=True):
    """Traces of requests, for an OpenTelemetry collector."""

    endpoint: str = ""
    """The collector's OTLP/HTTP address for traces, "http://collector:4318/v1/traces"; empty: a caller's
    `traceparent` is passed to external workers, and nothing is exported."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Of the traces that begin here so many are exported, beside all of failed and slow requests; a caller
    with a `traceparent` has decided itself."""
    slow_ms: Latency = 2000.0
    """Requests whose first token took so long are exported all the same; 0: not for that."""


Objective = Annotated[float, Meta(ge=0.5, lt=1)]


class SloConfig(Branch, frozen=True, kw_only=True):
    """Objectives of each model and band, over 30 days: alerts say when their error budgets burn too fast
    (docs/runbook.md). The times are the promises of `admission`.
    """

    availability: Objective = 0.995
    """Share of requests that are answered. Wrong requests, tenants over limits of their own and clients that
    leave do not count."""
    ttft: Objective = 0.95
    """Share of answers whose first token comes in the promised time."""
    tpot: Objective = 0.95
    """Share of answers whose further tokens come in the promised time each."""
    webhook: str = ""
    """Where alerts that begin and end are posted, as Alertmanager does; empty: nowhere. For those who run no
    Alertmanager."""


class Config(Branch, frozen=True, kw_only=True):
    """The whole tree."""

    models: Annotated[tuple[ModelConfig, ...], Meta(max_length=64)] = (ModelConfig(path="penstock-demo"),)
    """The models that are served, by the names that clients use."""
    server: ServerConfig = ServerConfig()
    tenants: Annotated[tuple[TenantConfig, ...], Meta(max_length=10_000)] = ()
    """Tenants with something of their own; others are known from keys and tokens."""
    tiers: Annotated[tuple[TierConfig, ...], Meta(max_length=64)] = DEFAULT_TIERS
    """The allowances of the tenants of each tier; a list of one's own replaces these."""
    auth: AuthConfig = AuthConfig()
    limits: LimitsConfig = LimitsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    routing: RoutingConfig = RoutingConfig()
    ensembles: Annotated[tuple[EnsembleConfig, ...], Meta(max_length=64)] = ()
    """Models with steps of your own before and after them."""
    queue: QueueConfig = QueueConfig()
    fleet: FleetConfig = FleetConfig()
    health: HealthConfig = HealthConfig()
    shared: SharedConfig = SharedConfig()
    prices: PricesConfig = PricesConfig()
    budgets: BudgetsConfig = BudgetsConfig()
    ledger: LedgerConfig = LedgerConfig()
    cells: CellsConfig = CellsConfig()
    backends: BackendsConfig = BackendsConfig()
    log: LogConfig = LogConfig()
    traces: TracesConfig = TracesConfig()
    slo: SloConfig = SloConfig()


RETIRED: dict[str, str] = {
    "models[].engine.pin_threads": "removed: pinned threads were slower (docs/engine.md)",
    "models[].engine.kv_memory_fraction": "`models[].engine.kv_memory_bytes` sets the size",
    "models[].engine.host_kv_memory_fraction": "fixed at 0.1; `models[].engine.host_kv_memory_bytes` sets "
    "the size, 0 none",
    "models[].engine.host_kv_idle_s": "fixed at 30",
    "models[].engine.host_kv_loads_max": "fixed at 256",
    "models[].engine.host_kv_stores_max": "fixed at 32",
    "models[].engine.graphs_max": "fixed at 64",
    "models[].engine.graph_tokens_max": "fixed at 2048",
    "models[].engine.graph_memory_bytes_max": "fixed at 1 GiB",
    "models[].engine.overlap": "on where a GPU computes, off on the CPU",
    "models[].engine.max_waiting": "fixed at 1024",
    "models[].engine.fair_weights": "`tiers[].weight` and `tenants[].weight` hold at the gateway, before its "
    "engines",
    "models[].engine.priority_ageing_s": "fixed at 10",
    "models[].engine.starvation_s": "fixed at 60",
    "models[].engine.preemptions_max": "fixed at 3",
    "models[].engine.itl_targets": "`models[].engine.itl_target_ms` may be a mapping from class to target",
    "models[].engine.prefill_tokens_min": "fixed at 4",
    "models[].engine.seed": "made-up weights are the same every time",
    "models[].engine.connection_buffer_bytes_max": "fixed at 64 MiB",
    "models[].engine.kv_events.buffer_steps": "fixed at 10000",
    "models[].engine.kv_events.hwm": "fixed at 100000",
    "server.connections_max": "fixed at 20000 for each process; `limits.concurrent_max` bounds the streams",
    "server.header_bytes_max": "fixed at 32 KiB",
    "server.headers_max": "fixed at 100",
    "server.header_timeout_s": "fixed at 15",
    "server.body_timeout_s": "fixed at 60",
    "server.keepalive_timeout_s": "fixed at 75",
    "relay.*": "how text travels to clients is in `server` (docs/relay.md)",
    "relay.buffer_bytes_max": "fixed at 1 MiB for each client",
    "relay.slow_client": "moved to `server.slow_client`",
    "relay.write_timeout_s": "fixed at 30",
    "relay.flush_ms": "moved to `server.flush_ms`",
    "relay.heartbeat_s": "fixed at 15",
    "kv_index.*": "the bounds of the KV index are fixed (docs/kv-index.md)",
}

"""The workers of a model, how they are reached, and how their failures are handled: `models[].workers` and
`models[].discover`, and the sections `fleet`, `backends` and `health`.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.branch import Branch, Count, Port, Seconds
from penstock.types import Capability

Engine = Literal["penstock", "vllm", "sglang", "tgi", "trtllm", "triton", "openai"]
Replicas = Annotated[int, Meta(ge=0, le=256)]
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
WORKERS_MAX = 1024
"""Workers of all models together; more are not taken."""


class WorkerTraits(Branch, frozen=True, kw_only=True):
    """Traits of workers that this server does not launch, at an address or found."""

    engine: Engine
    """The engine that runs there. "openai": any server or provider with an OpenAI-compatible API."""
    served_model: str = ""
    """The model's name over there; empty is the same as here."""
    kind: str = ""
    """Workers of one kind are about as fast as each other, and are predicted together; empty: the engine's
    name."""
    api_key_env: str = ""
    """The environment variable with the key that it wants."""
    max_model_len: Count = 0
    """Its context, for engines that do not tell it; 0: as it says itself."""
    max_running: Count = 0
    """Streams that it runs at once; 0: not known, and it is given 64. It is never given more, gateway
    processes divide them, and with several tenants some stay free for one that arrives (docs/overload.md)."""
    order: Count = 0
    """Smaller goes first: it gets the requests that workers of a smaller order cannot take now, or fail.
    Workers that are launched here have 0."""
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Its share of starts beside those of the same order, where their weights differ; else they share by
    load and by where prompts are cached."""
    rpm: Count = 0
    """Requests a minute, of all gateway processes of this server together; 0: no limit."""
    tpm: Count = 0
    """Tokens a minute in the same way, of prompts and answers; 0: no limit."""
    priorities: bool = False
    """It takes the request's priority (vLLM, SGLang and TensorRT-LLM, when they were started for it)."""
    lacks: tuple[Capability, ...] = ()
    """Capabilities of its engine that this worker does not have: "images" of a model that only reads, say.
    docs/api.md has the names."""
    kv_events: Port | str = ""
    """ZeroMQ PUB address of its KV events ("tcp://host:port"), for engines that have them, or the port alone
    if the host is the worker's own."""
    kv_replay: Port | str = ""
    """ZeroMQ ROUTER address or port that sends missed ones again."""


class WorkerConfig(WorkerTraits, frozen=True, kw_only=True):
    """One worker that was started elsewhere."""

    url: str
    """Where it listens: "http://host:port" or "https://host/path"; our own engine at "unix:/path" or
    "tcp:host:port"."""
    metrics_url: str = ""
    """Where its metrics are, if not where this engine has them."""


class KubernetesConfig(Branch, frozen=True, kw_only=True):
    """The endpoints of a service, as the cluster's API server tells them (EndpointSlices, list and watch)."""

    namespace: str
    """Of the service."""
    service: str
    """Its name; the workers are its endpoints."""
    port: Port | str = 0
    """The pods' port, by number or by the name that the service has for it; 0: the service's only one."""
    api_server: str = ""
    """"https://host:port"; empty: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, which every pod
    has."""
    account: str = SERVICE_ACCOUNT
    """Directory with `token`, read again for every connection since the cluster renews it, and `ca.crt`, the
    API server's certificate authority; empty: neither."""


class DiscoverConfig(WorkerTraits, frozen=True, kw_only=True):
    """Workers that come and go. One of `dns` and `kubernetes` says where they are looked for."""

    dns: str = ""
    """"name:port": all its addresses (A, AAAA). "_service._tcp.name": its SRV records, which name the ports
    (extra `dns`)."""
    kubernetes: KubernetesConfig | None = None
    scheme: Literal["http", "https"] = "http"
    """How workers of engines that are not ours are talked to."""


class FleetConfig(Branch, frozen=True, kw_only=True):
    """How workers join and leave."""

    launcher: Literal["local", "ray"] = "local"
    """Where `replicas` run: processes on this machine, or actors on a Ray cluster (extra `ray`), of which
    every machine needs this version of Penstock and the model at the same path."""
    ray_address: str = "auto"
    """The cluster: "host:6379", or "auto" for the one of this machine (or of RAY_ADDRESS)."""
    ray_resources: dict[str, Annotated[float, Meta(ge=0)]] = {}  # noqa: RUF012 - msgspec copies it.
    """The resources that Ray sets aside for one worker, by Ray's own names ("CPU", 1 if not given, and "GPU")
    and those that the cluster's machines were started with. With `engine.threads` 0 a worker computes on as
    many threads as it has "CPU"."""
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """Memory that all `replicas` on this machine may take together. A model that does not fit beside the
    others is asleep; a request for it wakes it, and the idle model that was used longest ago sleeps instead.
    Each model's memory is planned before it is loaded (docs/sleep.md). 0: no bound, all are loaded."""
    accelerators_max: Count = 0
    """Workers of all models that scale (`models[].scale`), together: one more is held back. 0: no bound."""
    per_hour_max: Annotated[float, Meta(ge=0)] = 0.0
    """Their cost together per hour, at most, by `models[].scale.pools[].price`. 0: no bound."""
    drain_timeout_s: Seconds = 600.0
    """A worker that is taken away while the server runs lets its streams end, up to so long; then they are
    aborted."""


Timeout = Annotated[float, Meta(gt=0, le=86_400)]


class BackendsConfig(Branch, frozen=True, kw_only=True):
    """Workers that run another engine, and providers."""

    first_byte_timeout_s: Timeout = 120.0
    """From the request to the answer's head. Most engines send it at once, some only with the first token."""
    idle_timeout_s: Timeout = 60.0
    """Between two events of a stream (or its head and the first): a worker that is silent for longer
    hangs."""
    ca_file: str = ""
    """Certificates (PEM) of authorities to trust for https beside the system's own."""


class HealthConfig(Branch, frozen=True, kw_only=True):
    """The handling of failures, beside what is always done."""

    probe_s: Seconds = 30.0
    """Time between two probes of a worker of our engine: 16 tokens of a fixed prompt, whose log-probabilities
    must be those of its peers. With that also its speed is held against theirs. A worker that is wrong or
    slow gets less, then nothing (docs/failures.md); 0: neither is done."""
    migrations_max: Count = 3
    """Workers that one stream may lose and still continue behind its last token; 0: a stream ends with its
    worker."""
    first_token_s: Seconds = 10.0
    """How long an attempt at an external worker has, and 2 ms more for each token of its prompt, while fewer
    than 20 first tokens of it are known: then another worker or model answers, where one would. 0: until
    `backends.first_byte_timeout_s`."""
    hedge_share: Annotated[float, Meta(ge=0, le=0.1)] = 0.0
    """Hedged requests (Dean and Barroso, "The Tail at Scale", CACM 2013): second attempts per start, at most,
    which is the load that they may add; 0: none, 0.02: two in a hundred. A request that has had no first
    output for longer than nearly all others is also started on another worker, if that has room. The first
    answer counts, the other attempt is aborted. Providers that are paid by the token are paid for both."""


_HTTP = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?(/[^\s?#]*)?")
_OWN = re.compile(r"tcp:(//)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})|unix:/[^\x00]{1,106}")
_NAME_AND_PORT = re.compile(
    r"[A-Za-z0-9.-]{1,253}:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-5][0-9]{2})"
)
_SRV = re.compile(r"_[A-Za-z0-9-]{1,62}\._(tcp|udp)\.[A-Za-z0-9.-]{1,253}")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def discover_problems(discover: DiscoverConfig, key: str) -> Iterator[str]:
    """Problems of a place where workers are looked for, which stands at `key`."""
    kubernetes = discover.kubernetes
    if bool(discover.dns) == (kubernetes is not None):
        yield f"{key}: expected exactly one of dns and kubernetes"
    if discover.dns and not (_NAME_AND_PORT.fullmatch(discover.dns) or _SRV.fullmatch(discover.dns)):
        yield f"{key}.dns: expected name:port or _service._tcp.name, got {discover.dns!r}"
    if kubernetes is not None:
        for field in ("namespace", "service"):
            if not _LABEL.fullmatch(name := getattr(kubernetes, field)):
                yield f"{key}.kubernetes.{field}: expected a name of 1 to 63 of a-z, 0-9 and -, got {name!r}"
        if kubernetes.api_server and not _HTTP.fullmatch(kubernetes.api_server):
            yield f"{key}.kubernetes.api_server: expected https://HOST:PORT, got {kubernetes.api_server!r}"
        if kubernetes.api_server.startswith("http:") and kubernetes.account:
            yield (
                f"{key}.kubernetes.api_server: refused over http, which shows the token to anybody; use "
                f"https, or an empty account"
            )
    if discover.api_key_env and not _VARIABLE.fullmatch(discover.api_key_env):
        yield f"{key}.api_key_env: expected the name of an environment variable, got {discover.api_key_env!r}"
    for field in ("kv_events", "kv_replay"):
        if isinstance(address := getattr(discover, field), str) and address:
            yield f"{key}.{field}: expected the port alone, on the host that is found, got {address!r}"
    if discover.kv_replay and not discover.kv_events:
        yield f"{key}.kv_replay: of no use without {key}.kv_events"


def worker_problems(worker: WorkerConfig, key: str) -> Iterator[str]:
    """Problems of a worker at an address, which stands at `key`."""
    own = worker.engine == "penstock"
    if own and not _OWN.fullmatch(worker.url):
        yield f"{key}.url: engine penstock listens at unix:/PATH or tcp:HOST:PORT, got {worker.url!r}"
    elif not own and not _HTTP.fullmatch(worker.url):
        yield f"{key}.url: expected http://HOST:PORT or https://HOST/PATH, got {worker.url!r}"
    elif (port := re.search(r":([0-9]+)(/|$)", worker.url.partition("://")[2] or worker.url)) and not (
        0 < int(port[1]) <= 65_535
    ):
        yield f"{key}.url: expected a port from 1 to 65535, got {port[1]}"
    if worker.api_key_env and not _VARIABLE.fullmatch(worker.api_key_env):
        yield f"{key}.api_key_env: expected the name of an environment variable, got {worker.api_key_env!r}"
    if 0 < worker.tpm < worker.rpm:
        yield f"{key}.tpm: {worker.tpm} is below rpm ({worker.rpm}), and every request has a token at least"
    if worker.kv_replay and not worker.kv_events:
        yield f"{key}.kv_replay: of no use without {key}.kv_events"


_FOUND = "a constant now (penstock/fleet/members.py, penstock/fleet/discovery.py)"
_BOUND = "the bounds of HTTP to one worker are fixed (docs/backends.md)"
_HEARTBEAT = "a constant now: a silent worker is suspect after 1 s and lost after 2 s"
_QUARANTINE = "a constant of the quarantine now (penstock/policy/extras/quarantine.py)"
_HEDGE = "a constant of hedging now (penstock/policy/extras/hedging.py)"
RETIRED: dict[str, str] = {
    "fleet.ray.address": "now `fleet.ray_address`",
    "fleet.ray.num_cpus": "now CPU in `fleet.ray_resources`",
    "fleet.ray.num_gpus": "now GPU in `fleet.ray_resources`",
    "fleet.ray.resources": "now `fleet.ray_resources`",
    "fleet.ray.*": "a constant now (penstock/fleet/launchers/ray.py)",
    "fleet.logs": "always workers/ in the state directory (`PENSTOCK_STATE_DIR`)",
    "fleet.log_bytes_max": "fixed at 8 MiB for each worker",
    "fleet.workers_max": "fixed at 1024",
    "fleet.connect_timeout_s": "fixed at 5",
    "models[].discover[].found_max": _FOUND,
    "models[].discover[].refresh_s": _FOUND,
    "models[].discover[].timeout_s": _FOUND,
    "models[].discover[].kv_events_port": "now `models[].discover[].kv_events`",
    "models[].discover[].kv_replay_port": "now `models[].discover[].kv_replay`",
    "models[].discover[].kubernetes.token_file": "`models[].discover[].kubernetes.account` is its directory",
    "models[].discover[].kubernetes.ca_file": "`models[].discover[].kubernetes.account` is its directory",
    "models[].discover[].kubernetes.port_name": "`models[].discover[].kubernetes.port` takes the name too",
    "backends.http.*": _BOUND,
    "backends.http.first_byte_timeout_s": "moved to `backends.first_byte_timeout_s`",
    "backends.http.idle_timeout_s": "moved to `backends.idle_timeout_s`",
    "backends.http.ca_file": "moved to `backends.ca_file`",
    "backends.http.request_timeout_s": "fixed at 3600",
    "backends.probe_s": "fixed at 2",
    "backends.probe_timeout_s": "fixed at 5",
    "backends.stale_s": "fixed at 10",
    "backends.metrics_bytes_max": "fixed at 8 MiB",
    "health.heartbeat.*": _HEARTBEAT,
    "health.breaker.*": "constants of the breakers now (penstock/policy/resilience/worker_state.py)",
    "health.panic_above": "a constant now: never more than half of a model's workers are left alone",
    "health.retry.*": "constants of the retry budget now (penstock/policy/resilience/health.py)",
    "health.quarantine.*": _QUARANTINE,
    "health.quarantine_crashes": _QUARANTINE,
    "health.hedge.enabled": "now `health.hedge_share`: 0.02 for what was true, 0 for none",
    "health.hedge.share": "now `health.hedge_share`",
    "health.hedge.*": _HEDGE,
    "health.hedge_after_ms": _HEDGE,
}

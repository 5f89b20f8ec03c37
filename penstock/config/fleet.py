"""Who computes a model: workers that are launched, workers that run already, and the section `fleet`."""

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
    """What is said of workers that this server does not launch, at an address or found."""

    engine: Engine
    """What runs there. "openai": any server or provider with an OpenAI-compatible API."""
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
    """Streams that it runs at once; 0: as it says itself, else 64."""
    priorities: bool = False
    """It takes the request's priority (vLLM, SGLang and TensorRT-LLM, when they were started for it)."""
    lacks: tuple[Capability, ...] = ()
    """What its engine can do and it cannot: "images" of a model that only reads, say. docs/api.md has the
    names."""
    kv_events: Port | str = ""
    """ZeroMQ PUB address of its KV events ("tcp://host:port"), for engines that have them, or the port alone
    if the host is the worker's own."""
    kv_replay: Port | str = ""
    """ZeroMQ ROUTER address or port that sends missed ones again."""


class WorkerConfig(WorkerTraits, frozen=True, kw_only=True):
    """One worker that somebody else started."""

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
    """What Ray sets aside for one worker, by its own names ("CPU", 1 if not given, and "GPU") and those that
    the cluster's machines were started with. With `engine.threads` 0 a worker computes on as many threads as
    it has "CPU"."""
    drain_timeout_s: Seconds = 600.0
    """A worker that is taken away while the server runs lets its streams end, up to so long; then they are
    aborted."""


_FOUND = "a constant now (penstock/fleet/sources/found.py and dns.py)"
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
}

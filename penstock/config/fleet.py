"""Who computes a model: workers that are launched, workers at an address, and the section `fleet`."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.branch import Branch, Count, Positive, Seconds
from penstock.config.ray import RayConfig
from penstock.types import Capability

Engine = Literal["penstock", "vllm", "sglang", "tgi", "trtllm", "triton", "openai"]
Replicas = Annotated[int, Meta(ge=0, le=256)]


class WorkerConfig(Branch, frozen=True, kw_only=True):
    """One worker that somebody else started."""

    url: str
    """Where it listens: "http://host:port" or "https://host/path"; our own engine at "unix:/path" or
    "tcp:host:port"."""
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
    metrics_url: str = ""
    """Where its metrics are, if not where this engine has them."""
    kv_events: str = ""
    """ZeroMQ PUB address of its KV events ("tcp://host:port"), for engines that have them."""
    kv_replay: str = ""
    """ZeroMQ ROUTER address that sends missed ones again."""


class FleetConfig(Branch, frozen=True, kw_only=True):
    """How workers join and leave."""

    launcher: Literal["local", "ray"] = "local"
    """Where `replicas` run: processes on this machine, or actors on a Ray cluster (extra `ray`)."""
    ray: RayConfig = RayConfig()
    logs: str = ""
    """Directory of what launched workers print, a file for each; empty: "workers" in the state directory."""
    log_bytes_max: Annotated[int, Meta(ge=4096)] = 8 * 1024 * 1024
    """Kept of one worker."""
    workers_max: Positive = 1024
    """Workers of all models together; more are not taken."""
    drain_timeout_s: Seconds = 600.0
    """A worker that is taken away while the server runs lets its streams end, up to so long; then they are
    aborted."""
    connect_timeout_s: Seconds = 5.0
    """`serve` waits so long for workers at addresses when it starts. Who is not there then is waited for in
    the background."""

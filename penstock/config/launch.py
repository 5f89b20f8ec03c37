"""What a launcher tells a new engine worker: one line of JSON on the worker's standard input.

Standard input, because it holds a secret: arguments and environments can be read by other processes.
The worker keeps reading afterwards; the end of the pipe means that its parent is gone.
"""

from msgspec.structs import replace

from penstock.config.branch import Branch
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config, EngineConfig

SHARED_KV_QUOTA = 0.5
"""Share of the KV cache that one of several tenants may hold, if no setting says it."""
REAL_RUNNER = "penstock.engine.runner:build_runner"


class WorkerLaunch(Branch, frozen=True, kw_only=True):
    """Everything that one worker process needs to start."""

    model_path: str
    """A model directory on this machine; names and hub ids are resolved before."""
    model_name: str
    """What clients call it; told back in `ModelInfo.model`."""
    address: str
    """Where to listen (see protocol/address.py)."""
    shares_port: bool = False
    """The launcher keeps the port of a TCP address (fleet/launchers/ports.py), so it is bound with SO_REUSEPORT."""
    hash_key: bytes
    """Key of the block-hash chain: a guess at a tenant's prompt cannot be tested without it."""
    key: bytes = b""
    """What gateways must prove to have (protocol/worker_auth.py); empty: whoever can connect is one."""
    engine: EngineConfig = EngineConfig()
    runner: str = REAL_RUNNER
    """`module:factory` of what computes. Tests name their own, so that a process starts at once."""


def with_quota(engine: EngineConfig, config: Config) -> EngineConfig:
    """The engine's settings with its tenants' KV quota decided: half the cache where there may be several tenants.

    Half, because then no tenant alone can keep the others from starting, and a lone one in the evening still has half.
    """
    if engine.kv_quota_fraction:
        return engine
    auth = config.auth
    many = len(config.tenants) + len(auth.keys) > 1 or bool(auth.keys_file or auth.jwt.issuer)
    return replace(engine, kv_quota_fraction=SHARED_KV_QUOTA if many else 1.0)


def promised(engine: EngineConfig, admission: AdmissionConfig) -> EngineConfig:
    """The engine's settings with what its gateway promises, where they do not say otherwise."""
    if engine.tpot_target_ms is not None:
        return engine
    return replace(engine, tpot_target_ms=admission.tpot_target_ms)


def share_of(engine: EngineConfig, replicas: int, cores: int) -> EngineConfig:
    """The engine's settings for one of several replicas on one machine: they share its cores."""
    if replicas == 1 or engine.threads or not cores:
        return engine
    return replace(engine, threads=max(1, cores // replicas))

"""What the rest of the configuration means for an engine: its tenants' quota, its gateway's promises, its
share of the cores.
"""

from typing import TypeVar

from msgspec.structs import replace

from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config, EngineConfig

SHARED_KV_QUOTA = 0.5
"""Share of the KV cache that one of several tenants may hold, if no setting says it."""
Engine = TypeVar("Engine", bound=EngineConfig)


def with_quota(engine: Engine, config: Config) -> Engine:
    """The engine's settings with its tenants' KV quota decided: half the cache where there may be several
    tenants.

    Half, because then no tenant alone can keep the others from starting, and a lone one in the evening still
    has half.
    """
    if engine.kv_quota_fraction:
        return engine
    auth = config.auth
    many = len(config.tenants) + len(auth.keys) > 1 or bool(auth.keys_file or auth.jwt.issuer)
    return replace(engine, kv_quota_fraction=SHARED_KV_QUOTA if many else 1.0)


def promised(engine: Engine, admission: AdmissionConfig) -> Engine:
    """The engine's settings with what its gateway promises, where they do not say otherwise."""
    if engine.tpot_target_ms is not None:
        return engine
    return replace(engine, tpot_target_ms=admission.tpot_target_ms)


def share_of(engine: Engine, replicas: int, cores: int) -> Engine:
    """The engine's settings for one of several replicas on one machine: they share its cores."""
    if replicas == 1 or engine.threads or not cores:
        return engine
    return replace(engine, threads=max(1, cores // replicas))

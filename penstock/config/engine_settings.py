"""An engine's settings as it runs: the section `engine`, its meaning within the rest of the configuration,
and the constants that only tests and simulations change.
"""

from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config, EngineConfig


class EngineSettings(EngineConfig, frozen=True, kw_only=True):
    """The settings that a worker is launched with. Every field here is a constant in the product."""

    overlap: Literal["auto", "on", "off"] = "auto"
    """Plan and launch a step while the one before computes. "auto": on for a GPU, off on the CPU."""
    max_waiting: int = 1024
    """Requests queued in the engine at most; one more is refused as overloaded."""
    graphs_max: int = 64
    """CUDA graphs kept at most; 0: every kernel of every step is launched by itself."""
    fair_weights: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it.
    """Tenants whose share of the engine is not 1, by id."""
    priority_ageing_s: float = 10.0
    """Waiting this long makes up for one priority class."""
    starvation_s: float = 60.0
    """A request that came this much later never starts first, whatever the classes."""
    prefill_tokens_min: int = 4
    """Prompt tokens that a step takes whatever the target says, so that no prompt starves."""
    host_kv_idle_s: float = 30.0
    """KV blocks that no request has used for this long are copied to host memory."""
    draft_worth: float = 1.2
    """A draft must give so many times the tokens that its time is worth (schedule/speculation.py): the law
    errs, and a draft that just pays gains nothing. 0: as many drafts as there is room for."""
    memory_bytes: int = 0
    """`fleet.memory_bytes`: what all workers of its machine may have; 0: no bound."""
    connection_buffer_bytes_max: int = 64 * 1024 * 1024
    """Unsent bytes that the worker holds for one gateway; over it the connection is dropped."""

    @classmethod
    def of(cls, config: EngineConfig) -> "EngineSettings":
        """As configured."""
        return config if isinstance(config, cls) else cls(**msgspec.structs.asdict(config))

    @property
    def configured(self) -> EngineConfig:
        """The part of them that stands in the configuration."""
        return EngineConfig(**{name: getattr(self, name) for name in EngineConfig.__struct_fields__})


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
    return replace(engine, kv_quota_fraction=SHARED_KV_QUOTA if may_have_tenants(config) else 1.0)


def may_have_tenants(config: Config) -> bool:
    """Whether there may be several."""
    auth = config.auth
    return len(config.tenants) + len(auth.keys) > 1 or bool(auth.keys_file or auth.jwt.issuer)


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

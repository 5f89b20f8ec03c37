"""A simulated fleet as an operator describes it: through the parsing and the checks of `penstock serve`, to
the names and engines that come out.

A model's directory is called by the shape that is simulated, and served under the pool's name, so nothing in
a simulation works because the two are the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from penstock.config.checks import check
from penstock.config.load import convert_config
from penstock.config.presets import served_name
from penstock.config.tree import Config, ModelConfig
from penstock.errors import ConfigError
from penstock.sim.world.spec import PoolSpec


def described(config: Config, pools: Sequence[PoolSpec]) -> tuple[Config, tuple[PoolSpec, ...]]:
    """The whole configuration, and the pools as it describes them.

    Pools of one model in several regions are one entry.

    Raises:
        ConfigError: `penstock serve` would not start with it.
    """
    entries: dict[str, dict[str, object]] = {}
    for pool in pools:
        entry = entries.setdefault(
            pool.model,
            {
                "path": f"/models/{pool.worker.checkpoint or 'unnamed'}",
                "name": pool.model,
                "replicas": 0,
                "engine": msgspec.to_builtins(pool.worker.engine.configured),
            },
        )
        entry["replicas"] = int(str(entry["replicas"])) + pool.count
    # The other sections were parsed already, or hold constants that no operator could write.
    made = msgspec.structs.replace(config, models=convert_config({"models": list(entries.values())}).models)
    check(made)
    by_name = {served_name(model): model for model in made.models}
    return made, tuple(_as_described(by_name, pool) for pool in pools)


def _as_described(models: dict[str, ModelConfig], pool: PoolSpec) -> PoolSpec:
    model = models.get(pool.model)
    if model is None:
        raise ConfigError(f"no model of the configuration is served as {pool.model}")
    if model.engine != pool.worker.engine.configured:
        raise ConfigError(f"the pools of {pool.model} have different engines; a model has one")
    return replace(pool, model=served_name(model))

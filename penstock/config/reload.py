"""What of the models a running server takes from a new configuration: who computes them, and nothing else."""

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.config.presets import served_name
from penstock.config.tree import ModelConfig

MEMBERS = ("replicas", "workers", "discover")
"""Fields of a model that say who its workers are."""


def with_members(running: Sequence[ModelConfig], new: Sequence[ModelConfig]) -> tuple[ModelConfig, ...]:
    """The running models, each with the workers that `new` gives the model of its name.

    Models that come or go, and all other settings, wait for a restart.
    """
    by_name = {served_name(model): model for model in new}

    def member(model: ModelConfig) -> ModelConfig:
        wanted = by_name.get(served_name(model), model)
        return replace(model, **{name: getattr(wanted, name) for name in MEMBERS})

    return tuple(member(model) for model in running)

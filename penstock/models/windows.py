"""Sliding windows of `config.json`, layer by layer, with errors that name the field."""

from collections.abc import Sequence

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig, positive

WINDOWED, FULL = "sliding_attention", "full_attention"
_MAX_WINDOW_LAYERS = 28


def every_layer(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """One window for all layers (Mistral); empty if the config has none.

    Raises:
        CheckpointError: the window is not positive.
    """
    return () if config.sliding_window is None else (positive(config, "sliding_window"),) * num_layers


def by_kind(config: HfConfig, num_layers: int, default: Sequence[str]) -> tuple[int, ...]:
    """Windows of the layers that `layer_types` (else `default`) calls windowed; empty if none is.

    Raises:
        CheckpointError: as many kinds as there are layers were expected, a kind is unknown, or there is no
            window.
    """
    kinds = config.layer_types or default
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{CONFIG_FILE}: layer_types names {len(kinds)} layers, num_hidden_layers {num_layers}"
        )
    unknown = set(kinds) - {WINDOWED, FULL}
    if unknown:
        raise CheckpointError(f"{CONFIG_FILE}: layer type {unknown.pop()!r} is not supported")
    if WINDOWED not in kinds:
        return ()
    window = positive(config, "sliding_window")
    return tuple(window if kind == WINDOWED else 0 for kind in kinds)


def qwen_windows(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """Qwen's: only if `use_sliding_window` says so, and only from layer `max_window_layers` on.

    Raises:
        CheckpointError: as `by_kind`.
    """
    if not config.use_sliding_window:
        return ()
    first = _MAX_WINDOW_LAYERS if config.max_window_layers is None else config.max_window_layers
    return by_kind(config, num_layers, [WINDOWED if i >= first else FULL for i in range(num_layers)])

"""Bounds on the sizes that a model's `config.json` may name, so that a file of numbers cannot make anything
be built.

They are several times what published models have. What stands in the files beside it is a second, closer
bound (engine/loader.py).
"""

from penstock.errors import CheckpointError

SIZES_MAX = {
    "num_hidden_layers": 1024,
    "hidden_size": 131_072,
    "intermediate_size": 1_048_576,
    "moe_intermediate_size": 1_048_576,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 8192,
    "vocab_size": 8_388_608,
    "num_experts": 8192,
    "num_local_experts": 8192,
    "num_experts_per_tok": 8192,
    "max_position_embeddings": 134_217_728,
    "sliding_window": 134_217_728,
}
LAYERS_TIMES_EXPERTS_MAX = 262_144
"""Each is three tensors with names."""
CONFIG_BYTES_MAX = 16 * 1024 * 1024
"""Of `config.json`; published ones have a few thousand."""


def check_sizes(config: object, where: str) -> None:
    """Refuse sizes that no model has. `config` has some of `SIZES_MAX` as attributes, perhaps None.

    Raises:
        CheckpointError: naming the field.
    """
    for field, limit in SIZES_MAX.items():
        value = getattr(config, field, None)
        if isinstance(value, int) and value > limit:
            raise CheckpointError(f"{where}: {field} is {value}; expected at most {limit}")
    layers = getattr(config, "num_hidden_layers", None) or 0
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    if layers * experts > LAYERS_TIMES_EXPERTS_MAX:
        raise CheckpointError(
            f"{where}: {layers} layers of {experts} experts each; expected at most "
            f"{LAYERS_TIMES_EXPERTS_MAX} "
            "experts in all"
        )

"""Checkpoints that see as well as read: the part that reads, which answers text alone as the whole would."""

import msgspec

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig
from penstock.models.families.gemma import GEMMA_NAMES, gemma3_spec
from penstock.models.families.mistral import mistral_spec
from penstock.models.names import CheckpointNames
from penstock.models.spec import DecoderSpec

_PREFIX, _BESIDE = "language_model.", ("vision_tower.", "multi_modal_projector.")
GEMMA3_TEXT_NAMES = GEMMA_NAMES.within(_PREFIX, beside=_BESIDE)
MISTRAL3_TEXT_NAMES = CheckpointNames().within(_PREFIX, beside=_BESIDE)
_GEMMA3_SILENT: dict[str, int] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""The values that the published configs leave to the family's defaults."""


def gemma3_text_spec(config: HfConfig) -> DecoderSpec:
    """The decoder inside a `Gemma3ForConditionalGeneration` (4B, 12B and 27B).

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    text = _text(config, "gemma3_text")
    silent = {name: value for name, value in _GEMMA3_SILENT.items() if getattr(text, name) is None}
    return gemma3_spec(msgspec.structs.replace(text, **silent))


def mistral3_text_spec(config: HfConfig) -> DecoderSpec:
    """The decoder inside a `Mistral3ForConditionalGeneration` (Mistral Small 3.1 and 3.2).

    Raises:
        CheckpointError: a field is missing, its value is not supported, or the text part is of another
            family.
    """
    return mistral_spec(_text(config, "mistral"))


def _text(config: HfConfig, expected: str) -> HfConfig:
    """The text part's own config. Whether the head is tied stands outside, if anywhere."""
    text = config.text_config
    if text is None:
        raise CheckpointError(f"{CONFIG_FILE}: text_config is missing")
    if text.model_type not in (None, expected):
        raise CheckpointError(
            f"{CONFIG_FILE}: text_config.model_type {text.model_type!r} is not supported; expected "
            f"{expected!r}"
        )
    tied = text.tie_word_embeddings if config.tie_word_embeddings is None else config.tie_word_embeddings
    return msgspec.structs.replace(text, tie_word_embeddings=tied)

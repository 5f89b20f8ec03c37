"""Loading a model that guesses tokens ahead of another: whether it can, what it takes, and its wiring."""

from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.clock import Clock
from penstock.config.checkpoints import resolve
from penstock.config.tree import EngineConfig
from penstock.engine.decoder import DecoderLimits, WeightSource
from penstock.engine.draft_model import DraftModel, DraftParts
from penstock.engine.fingerprint import RANDOM_SEED, fingerprint
from penstock.engine.kv_cache import KVCache
from penstock.engine.loader import load_weights, random_weights
from penstock.engine.memory import block_bytes_of
from penstock.engine.sampler import NativeSampler, Sampler
from penstock.engine.step_model import Computing, choose_computing, reserved_bytes, wire_model
from penstock.errors import ConfigError
from penstock.models.files import is_gguf
from penstock.models.registry import read_spec, stored_quantization
from penstock.models.spec import DecoderSpec
from penstock.schedule.speculation import STEP_DRAFTS_MAX

WITHOUT_MODEL = ("off", "ngram")
"""Values of `engine.speculation` that name no model."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PlannedDraft:
    """A draft model whose files were looked at, before a weight of it is read."""

    spec: DecoderSpec
    target_vocab_size: int
    computing: Computing
    weights: WeightSource
    limits: DecoderLimits
    num_bytes: int
    """Memory of its weights and what is kept beside them."""
    block_bytes: int
    """Of one of its KV blocks."""


def plan_draft(config: EngineConfig, target: Path, spec: DecoderSpec) -> PlannedDraft | None:
    """The draft model for the one in `target`; None: none is configured.

    Raises:
        ConfigError: the two do not go together.
        CheckpointError: the directory does not hold a model that can be loaded.
    """
    if config.speculation in WITHOUT_MODEL:
        return None
    named = f"engine.speculation is {config.speculation}"
    try:
        path = resolve(config.speculation)
    except ConfigError as error:
        raise ConfigError(f"{named}, which is neither off nor ngram nor a model: {error}") from error
    draft, names = read_spec(path)
    _check_pair(named, (path, draft), (target, spec), is_random=config.load_format == "random")
    computing = choose_computing(config, draft)
    if config.load_format == "random":
        weights = random_weights(draft, computing.dtype, RANDOM_SEED, _silent)
    else:
        stored = stored_quantization(path)
        weights = load_weights(
            path, draft, names, computing.dtype, _silent, quantization=stored, kept_bits=computing.kept_bits
        )
    limits = DecoderLimits(
        step_tokens=config.step_tokens,
        max_samples=STEP_DRAFTS_MAX,
        max_model_len=min(config.max_model_len or spec.max_position, draft.max_position),
    )
    return PlannedDraft(
        spec=draft,
        target_vocab_size=spec.vocab_size,
        computing=computing,
        weights=weights,
        limits=limits,
        num_bytes=reserved_bytes(draft, weights.num_bytes_left, computing, limits),
        block_bytes=block_bytes_of(config, draft, computing.dtype.itemsize),
    )


def load_draft(
    planned: PlannedDraft, config: EngineConfig, clock: Clock, num_blocks: int, max_running: int
) -> DraftModel:
    """Read the weights and wire the model, with as many KV blocks and rows as the target has."""
    spec, computing, limits = planned.spec, planned.computing, planned.limits
    with torch.inference_mode():
        cache = KVCache(
            spec, num_blocks, computing.dtype, torch.device("cpu"),
            rounded=config.kv_dtype == "int8", products=computing.products,
        )  # fmt: skip
        model = wire_model(spec, planned.weights, limits, cache, computing)
    native = computing.native
    return DraftModel(
        DraftParts(
            model=model,
            cache=cache,
            sampler=Sampler(spec.vocab_size) if native is None else NativeSampler(native),
            vocab_size=spec.vocab_size,
            target_vocab_size=planned.target_vocab_size,
            step_tokens=limits.step_tokens,
            max_len=limits.max_model_len,
            max_running=max_running,
            max_drafts=limits.max_samples,
        ),
        clock,
    )


def _check_pair(
    named: str, draft: tuple[Path, DecoderSpec], target: tuple[Path, DecoderSpec], *, is_random: bool
) -> None:
    (path, spec), (target_path, target_spec) = draft, target
    if spec.embeds or target_spec.embeds:
        which = path if spec.embeds else target_path
        raise ConfigError(f"{named}, but {which} makes vectors of texts: it says nothing")
    if spec.num_parameters >= target_spec.num_parameters:
        raise ConfigError(
            f"{named} with {spec.num_parameters} parameters, which is not smaller than the model in "
            f"{target_path} with {target_spec.num_parameters}"
        )
    seed = RANDOM_SEED if is_random else None
    ours, theirs = (fingerprint(each, random_seed=seed).tokenizer for each in (path, target_path))
    if ours != theirs:
        raise ConfigError(
            f"{named}, but {_tokenizer(path)} is not the same tokenizer as {_tokenizer(target_path)}"
        )


def _tokenizer(model: Path) -> Path:
    return model if is_gguf(model) else model / "tokenizer.json"


def _silent(done: int, total: int) -> None:
    """Its weights are the smaller part of what is being loaded."""

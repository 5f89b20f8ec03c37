"""Loading what guesses tokens ahead of a model, a smaller model or a head on its states: whether it can, what
it takes, and its wiring.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.clock import Clock
from penstock.config.checkpoints import resolve
from penstock.config.tree import EngineConfig
from penstock.engine.decoder import DecoderLimits, WeightSource
from penstock.engine.draft_head import DraftHead, HeadParts, head_buffer_bytes
from penstock.engine.draft_model import DraftModel, DraftParts
from penstock.engine.fingerprint import RANDOM_SEED, fingerprint
from penstock.engine.kv_cache import KVCache
from penstock.engine.loader import holds_head, load_head, load_weights, random_weights
from penstock.engine.memory import block_bytes_of
from penstock.engine.sampler import sampler_of
from penstock.engine.speculation import Proposer
from penstock.engine.step_model import (
    Computing,
    StepModel,
    choose_computing,
    layer_shapes,
    reserved_bytes,
    wire_model,
)
from penstock.engine.weights import Weights
from penstock.errors import CheckpointError, ConfigError
from penstock.models.config import CONFIG_FILE
from penstock.models.files import is_gguf
from penstock.models.registry import check_loads, read_spec, stored_quantization
from penstock.models.spec import DecoderSpec
from penstock.schedule.batch import resolve_max_running
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

    def load(self, config: EngineConfig, clock: Clock, target: "LoadedTarget") -> Proposer:
        """Read the weights and wire the model, with as many KV blocks and rows as the target has."""
        spec, computing, limits = self.spec, self.computing, self.limits
        with torch.inference_mode():
            cache = _cache(config, spec, computing, target)
            model = wire_model(spec, self.weights, limits, cache, computing)
        return DraftModel(
            DraftParts(
                model=model,
                cache=cache,
                sampler=sampler_of(spec.vocab_size, computing.native),
                vocab_size=spec.vocab_size,
                target_vocab_size=self.target_vocab_size,
                step_tokens=limits.step_tokens,
                max_len=limits.max_model_len,
                max_running=target.max_running,
                max_drafts=limits.max_samples,
            ),
            clock,
        )


@dataclass(slots=True, frozen=True, kw_only=True)
class PlannedHead:
    """A head on the target's states whose files were looked at, before a weight of it is read."""

    spec: DecoderSpec
    computing: Computing
    weights: Weights
    table: Weights
    """The source of its embedding: itself, or the target."""
    limits: DecoderLimits
    num_bytes: int
    """Memory of its weights and what is kept beside them."""
    block_bytes: int
    """Of one of its KV blocks."""

    def load(self, config: EngineConfig, clock: Clock, target: "LoadedTarget") -> Proposer:
        """Read the weights and wire the head, with as many KV blocks and rows as the target has."""
        spec, computing = self.spec, self.computing
        with torch.inference_mode():
            parts = HeadParts(
                spec=spec,
                weights=self.weights,
                table=self.table.take("embedding"),
                cache=_cache(config, spec, computing, target),
                computing=computing,
                sampler=sampler_of(spec.vocab_size, computing.native),
                logits=target.model.head,
                step_tokens=self.limits.step_tokens,
                max_len=self.limits.max_model_len,
                max_running=target.max_running,
                max_drafts=self.limits.max_samples,
            )
            return DraftHead(parts, clock)


@dataclass(slots=True, frozen=True)
class LoadedTarget:
    """The model that is guessed for."""

    model: StepModel
    num_blocks: int
    max_running: int


def plan_draft(config: EngineConfig, target: Path, spec: DecoderSpec) -> PlannedDraft | PlannedHead | None:
    """The model or head that guesses for the model in `target`; None: none is configured.

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
    check_loads(path, needs_weights=config.load_format != "random")
    if config.load_format != "random" and holds_head(path):
        return _plan_head(config, path, target, spec)
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


def _plan_head(config: EngineConfig, path: Path, target: Path, spec: DecoderSpec) -> PlannedHead:
    if spec.embeds:
        raise ConfigError(
            f"engine.speculation is {config.speculation}, but {target} makes vectors of texts: it says "
            "nothing"
        )
    head, names = read_spec(path)
    where = path / CONFIG_FILE
    for what, given, expected in (
        ("num_hidden_layers", head.num_layers, 1),
        ("hidden_size", head.hidden_size, spec.hidden_size),
        ("vocab_size", head.vocab_size, spec.vocab_size),
    ):
        if given != expected:
            raise CheckpointError(
                f"{where}: {what} is {given}, but a head that guesses for the model in {target} has "
                f"{expected}"
            )
    if head.moe is not None or head.sublayer_norms or head.embedding_scale != 1.0:
        raise CheckpointError(f"{where}: a head with the layer of a {head.architecture} is not supported")
    computing = choose_computing(config, spec)
    dtype, table = computing.dtype, load_head(path, head, names, computing.dtype)
    weights, table_bytes = table, 0
    if "embedding" not in table:
        table = _target_weights(target, spec, dtype)
        table_bytes = spec.vocab_size * spec.hidden_size * dtype.itemsize
    limits = DecoderLimits(
        step_tokens=config.step_tokens,
        max_samples=STEP_DRAFTS_MAX,
        max_model_len=config.max_model_len or spec.max_position,
    )
    running = resolve_max_running(config.max_running, config.step_tokens)
    sizes = limits.step_tokens, limits.max_model_len, running, limits.max_samples
    # Its own matrix takes an embedding and a state to one state.
    matrices = 2 * head.hidden_size**2 + sum(n * k for n, k in layer_shapes(head))
    return PlannedHead(
        spec=head,
        computing=computing,
        weights=weights,
        table=table,
        limits=limits,
        num_bytes=weights.num_bytes_left
        + (computing.products.itemsize - dtype.itemsize) * matrices
        + table_bytes
        + head_buffer_bytes(head, sizes, dtype.itemsize),
        block_bytes=block_bytes_of(config, head, dtype.itemsize),
    )


def _target_weights(target: Path, spec: DecoderSpec, dtype: torch.dtype) -> Weights:
    """The target's, once more: its embedding is wanted as it is."""
    _, names = read_spec(target)
    return load_weights(target, spec, names, dtype, _silent, quantization=stored_quantization(target))


def _cache(config: EngineConfig, spec: DecoderSpec, computing: Computing, target: LoadedTarget) -> KVCache:
    cache = KVCache(
        spec, target.num_blocks, computing.dtype, torch.device("cpu"),
        rounded=config.kv_dtype == "int8", products=computing.products,
    )  # fmt: skip
    cache.commit_ahead()
    return cache


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

"""Carries out step plans: tables, forward pass, sampler. Decides nothing.

The runner owns the weights, the KV tensor and what it holds of every row. It does not know requests' lives,
queues or processes: a `StepPlan` comes in, a `StepResult` goes out.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.clock import Clock, SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import EngineConfig
from penstock.engine.adapters.compute import adapter_reader
from penstock.engine.adapters.files import AdapterReader
from penstock.engine.arrays import Int64Array, as_tensor
from penstock.engine.decoder import DecoderLimits
from penstock.engine.device_speed import cost_floor, device_name
from penstock.engine.draft_load import LoadedTarget, PlannedDraft, PlannedHead, plan_draft
from penstock.engine.fingerprint import RANDOM_SEED, identify, name_of
from penstock.engine.gpu.load import cuda_target, load_on_device
from penstock.engine.gpu.runner import DeviceRunner
from penstock.engine.inputs import RowTables, StepInputs
from penstock.engine.kv_cache import HostStore, KVCache, host_store
from penstock.engine.loader import load_weights, random_weights
from penstock.engine.memory import (
    block_bytes_of,
    blocks_of,
    free_memory_bytes,
    largest_step,
    own_memory_bytes,
    plan_adapter_bytes,
    plan_host_blocks,
    plan_kv,
    scoring_step,
)
from penstock.engine.native.library import KernelsUnavailable, NativeLibrary
from penstock.engine.sampler import SampleRows, TokenSampler, results, sampler_of, score_chunks
from penstock.engine.speculation import Follows, PromptLookup, Proposer, ReadsStates, verified
from penstock.engine.step_model import Computing, StepModel, choose_computing, reserved_bytes, wire_model
from penstock.engine.weight_check import WeightCheck
from penstock.engine.weights import Weights
from penstock.errors import ConfigError
from penstock.models.quantization import Quantization
from penstock.models.registry import read_spec, stored_quantization
from penstock.models.spec import DecoderSpec
from penstock.planning.roofline import CostFloor
from penstock.protocol.worker import LOADING_WEIGHTS, ModelInfo
from penstock.schedule.batch import BatchLimits, resolve_max_running
from penstock.schedule.plan import SCORED_TOKENS_MAX, Forced, Sampled, StepPlan, StepResult
from penstock.types import BLOCK_TOKENS, CPU_CAPABILITIES

if TYPE_CHECKING:
    from penstock.engine.grammar.compiler import GrammarTokens
    from penstock.engine.grammar.rows import GrammarRows

OnProgress = Callable[[str, int, int], None]
"""Called with (stage in words, done, total); total 0 means unknown."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RunnerParts:
    """Everything a runner is wired from."""

    info: ModelInfo
    model: StepModel
    cache: KVCache
    sampler: TokenSampler
    step_tokens: int
    host: HostStore
    floor: CostFloor
    adapters: AdapterReader | None = None
    """The reader of its adapters; None: it takes none."""
    proposer: Proposer | None = None
    """Guesses rows' next tokens; None: none does."""


class Runner:
    """One model on one device. Not thread-safe: one step at a time."""

    def __init__(self, parts: RunnerParts) -> None:
        self.parts, self.info, self.floor, self.adapters = parts, parts.info, parts.floor, parts.adapters
        self._model, self._cache = parts.model, parts.cache
        self._host = parts.host
        self._step_tokens = parts.step_tokens
        self._tables = RowTables(max_running=parts.info.max_running, max_model_len=parts.info.max_model_len)
        self._sampler, self.proposer = parts.sampler, parts.proposer
        self._grammar_tokens: GrammarTokens | None = None
        self._grammars: GrammarRows | None = None
        """None until a request has a grammar."""

    @property
    def kernels(self) -> str:
        """The name of the kernels, for people: "torch", or "native" and the instruction set."""
        return self._model.kernels

    @property
    def proposer(self) -> Proposer | None:
        """Guesses what rows will say; None: none does."""
        return self._proposer

    @proposer.setter
    def proposer(self, proposer: Proposer | None) -> None:
        self._proposer = proposer
        self._head = proposer if isinstance(proposer, ReadsStates) else None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's step and draw the tokens that it asks for; without work, wait for a copy."""
        self._host.start(plan)
        self._enter_grammars(plan)
        if not plan.work:
            self._tables.enter(plan)
            if self.proposer is not None:
                self.proposer.begin(plan, ())
            return StepResult(plan.step, (), copied=self._host.collect(wait=True))
        inputs = self._tables.apply(plan, self.proposer)
        self._cache.clear(inputs.fresh_blocks)
        logits = self._compute(plan, inputs)
        num_samples = len(inputs.sample_rows)
        scored = score_chunks(logits[num_samples:], inputs.scored) if inputs.scored else ()
        sampled, logits = tuple[Sampled, ...](), logits[:num_samples]
        if inputs.drafted is not None:
            sampled = verified(logits, inputs, inputs.drafted, self._tables, self._draw, self._has_grammar)
        elif num_samples:
            rows = inputs.sample_rows
            token_ids, follows = self._draw(logits, rows, inputs.sample_positions)
            sampled = results(logits, token_ids, rows, self._tables.logprobs, follows)
        drafting = None if self.proposer is None else self.proposer.spent()
        return StepResult(plan.step, sampled, scored, self._host.collect(wait=False), drafting)

    def _compute(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        """The step's logits; states go to whom they help to guess."""
        head, batch = self._head if plan.reads_states else None, inputs.batch
        tokens, wanted = as_tensor(inputs.token_ids), as_tensor(inputs.logit_tokens)
        states = None if head is None else head.states[: len(tokens)]
        logits = self._model.compute(tokens, wanted, batch, inputs.adapters, states)
        if head is not None:
            rows = np.fromiter((work.row for work in plan.work), np.int64, len(plan.work))
            head.read(rows, batch.num_computed, batch.num_tokens, self._tables)
        return logits

    def _draw(self, logits: Tensor, rows: Int64Array, positions: Int64Array) -> tuple[Tensor, Follows]:
        """Draw the tokens at `positions` of `rows`, and remember them and what their grammars force."""
        tables, grammars = self._tables, self._grammars
        masks = None if grammars is None else grammars.masks(rows, positions)
        edits = tables.adjust(logits, rows, positions, masks)
        how = SampleRows.of(tables, rows, positions, masks)
        token_ids = self._sampler.draw(logits, how)
        drawn = token_ids.numpy()
        while grammars is not None and (again := grammars.refused(drawn)) is not None:
            index, masks = again
            drawn[index] = self._sampler.draw(logits[as_tensor(index)], how.pick(index, masks)).numpy()
        if edits is not None:
            edits.undo()  # Log-probabilities are the model's own.
        follows: Follows = {} if grammars is None else grammars.take(rows, positions, drawn)
        tables.append_tokens(rows, positions, drawn)
        for index, forced in follows.items():
            if isinstance(forced, Forced) and forced.token_ids:
                tables.append_forced(int(rows[index]), int(positions[index]) + 1, forced.token_ids)
        return token_ids, follows

    def _has_grammar(self, row: int) -> bool:
        return self._grammars is not None and row in self._grammars

    def idle(self) -> bool:
        """See `Prepares`."""
        return self._cache.commit_idly() or (self.proposer is not None and self.proposer.idle())

    def weight_check(self, clock: Clock) -> WeightCheck:
        """The background check of its weights in idle time."""
        return WeightCheck(self._model.weights(), clock)

    def weight_tensors(self) -> list[Tensor]:
        """The weights that it computes with, as they lie in memory."""
        return self._model.weights()

    def use_grammars(self, tokens: "GrammarTokens") -> None:
        """Follow the grammars of requests, which are made for this vocabulary."""
        self._grammar_tokens = tokens

    def _enter_grammars(self, plan: StepPlan) -> None:
        if self._grammars is None:
            if all(new.grammar is None for new in plan.new_rows):
                return
            self._grammars = self._grammar_rows()
        for row in plan.freed_rows:
            self._grammars.leave(row)
        for new in plan.new_rows:
            self._grammars.enter(new)

    def _grammar_rows(self) -> "GrammarRows":
        from penstock.engine.grammar.rows import GrammarRows  # llguidance may not be installed.

        assert self._grammar_tokens is not None, "a worker without a vocabulary refuses grammars"
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        known = self._tables.known_tokens
        return GrammarRows(self.info.max_running, self._grammar_tokens, threads, known, asks_refused=True)

    @torch.inference_mode()
    def warm_up_again(self) -> None:
        """After sleep: one token, through the first layer. That the largest steps fit was seen when the
        process started, and their scratch is committed as it is used.
        """
        plan = largest_step(BatchLimits(1, 1, self.info.max_model_len), self.info.num_blocks)
        with self._model.rehearsing():
            self.run(plan)
        self._cache.clear(list(range(blocks_of(plan))))
        self._tables.forget_adjustments()
        self._cache.commit_ahead()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the largest steps that can come: no request pays for first calls, and what they need is in
        memory.

        The large part is scratch of a fixed size, made when the model was wired and touched here; the part
        that a step makes by itself is no more than it was here and goes back to the system
        (`memory.settle_malloc`). Later steps raise the peak only by Python's own objects (requests, their
        tables and outputs). The KV cache, whose size is fixed, is committed a little ahead of its use, the
        host tier page by page as it is first used.

        Must be called while no row is live: it uses rows and blocks from 0 on, and leaves the blocks clean.
        """
        bounds = BatchLimits(self._step_tokens, self.info.max_running, self.info.max_model_len)
        for plan in (largest_step(bounds, self.info.num_blocks), scoring_step(bounds, self.info.num_blocks)):
            with self._model.rehearsing():
                self.run(plan)
            self._cache.clear(list(range(blocks_of(plan))))
        self._tables.forget_adjustments()
        self._cache.commit_ahead()


def build_runner(
    model_path: str | Path, config: EngineConfig, clock: Clock, on_progress: OnProgress
) -> "Runner | DeviceRunner":
    """Called by a worker process at its start: a CUDA device's runner if there is one, else one on every
    core.

    Raises:
        CheckpointError: the directory does not hold a model that can be served.
        ConfigError: a setting that is impossible on this machine or with this model.
    """
    if (target := cuda_target(EngineSettings.of(config), clock)) is not None:
        return load_on_device(Path(model_path), target, on_progress)
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    if config.kernels != "torch":
        with suppress(KernelsUnavailable):  # Then `load_runner` refuses, or computes with torch.
            # Before loading: packing takes them too.
            NativeLibrary().set_threads(threads)
    runner = load_runner(Path(model_path), config, on_progress)
    if runner.kernels != "torch":
        # The native kernels bring their own threads; torch's would only compete with them for the cores.
        torch.set_num_threads(1)
    return runner


def decoder_limits(config: EngineConfig, max_model_len: int, *, embeds: bool = False) -> DecoderLimits:
    """Sizes of a decoder's buffers; `embeds`: the hidden states of all tokens are wanted."""
    max_rows = resolve_max_running(config.max_running, config.step_tokens) + SCORED_TOKENS_MAX
    return DecoderLimits(
        step_tokens=config.step_tokens,
        max_samples=config.step_tokens if embeds else max_rows,
        max_model_len=max_model_len,
    )


def _weights_name(config: EngineConfig, stored: Quantization | None) -> str:
    return stored.name if stored is not None and config.quantization == "none" else config.quantization


@dataclass(slots=True, frozen=True, kw_only=True)
class PlannedModel:
    """A model whose files were looked at: what it will be, before a weight of it is read."""

    info: ModelInfo
    spec: DecoderSpec
    computing: Computing
    weights: Weights
    kept_bits: int
    adapter_bytes: int
    draft: PlannedDraft | PlannedHead | None = None
    """A model, or a head on its states, that guesses tokens ahead of it."""


def plan_model(model_path: str | Path, config: EngineConfig, clock: Clock) -> ModelInfo | None:
    """The model that `build_runner` would load, and the memory that this would take; None: that shows on the
    device only.

    Raises:
        CheckpointError, ConfigError: as `build_runner`.
    """
    if cuda_target(EngineSettings.of(config), clock) is not None:
        return None
    return _planned(Path(model_path), config, lambda stage, done, total: None).info


def _planned(model_path: Path, config: EngineConfig, on_progress: OnProgress) -> PlannedModel:
    on_progress("reading the configuration", 0, 0)
    spec, names = read_spec(model_path)
    stored = None if config.load_format == "random" else stored_quantization(model_path)
    computing = choose_computing(config, spec)
    dtype = computing.dtype

    on_bytes = partial(on_progress, LOADING_WEIGHTS)
    if config.load_format == "random":
        weights = random_weights(spec, dtype, RANDOM_SEED, on_bytes)
    else:
        weights = load_weights(
            model_path, spec, names, dtype, on_bytes, quantization=stored, kept_bits=computing.kept_bits
        )
    # Memory for the weights is reserved: they are read when the decoder is built.
    limits = decoder_limits(config, config.max_model_len or spec.max_position, embeds=spec.embeds)
    reserved = reserved_bytes(spec, weights.num_bytes_left, computing, limits)
    draft = plan_draft(config, model_path, spec)
    if draft is not None:
        reserved += draft.num_bytes
    size, free = dtype.itemsize, _left_bytes(config, reserved)
    draft_spec = None if draft is None else draft.spec
    budget = plan_kv(config, spec, bytes_per_value=size, free_bytes=free, draft_spec=draft_spec)
    num_host_blocks = plan_host_blocks(config, spec, bytes_per_value=size, free_bytes=free)
    block_bytes = block_bytes_of(config, spec, size)
    device_bytes = budget.num_blocks * (block_bytes + (0 if draft is None else draft.block_bytes))
    kv_bytes = device_bytes + num_host_blocks * block_bytes
    info = ModelInfo(
        model=model_path.name,
        identity=identify(model_path, config, dtype=name_of(dtype), kernels=computing.kernels),
        architecture=spec.architecture,
        dtype=name_of(dtype),
        quantization=_weights_name(config, stored),
        num_parameters=spec.num_parameters,
        vocab_size=spec.vocab_size,
        max_model_len=budget.max_model_len,
        num_blocks=budget.num_blocks,
        block_tokens=BLOCK_TOKENS,
        max_running=resolve_max_running(config.max_running, config.step_tokens),
        num_host_blocks=num_host_blocks,
        capabilities=CPU_CAPABILITIES,
        device=device_name(torch.device("cpu")),
        kernels=computing.kernels,
        adapter_slots=config.adapter_slots,
        speculation="" if config.speculation == "off" else Path(config.speculation).name,
        vector_size=spec.hidden_size if spec.embeds else 0,
        weight_bytes=reserved,
        kv_bytes=device_bytes,
        host_kv_bytes=num_host_blocks * block_bytes,
    )
    kept_bits = 0 if stored is None else stored.kept(computing.kept_bits)
    return PlannedModel(
        info=info, spec=spec, computing=computing, weights=weights, kept_bits=kept_bits,
        adapter_bytes=plan_adapter_bytes(config, free_bytes=free, taken_bytes=kv_bytes),
        draft=draft,
    )  # fmt: skip


def _left_bytes(config: EngineConfig, reserved: int) -> int:
    """The memory for KV blocks beside the weights: of the machine, and of what all models may have.

    Raises:
        ConfigError: the weights alone are too much.
    """
    free, bound = free_memory_bytes() - reserved, EngineSettings.of(config).memory_bytes
    if not bound:
        return free
    left = bound - own_memory_bytes() - reserved
    if left <= 0:
        raise ConfigError(
            f"fleet.memory_bytes is {bound}, but the weights and the process take {bound - left}"
        )
    return min(free, left)


def _proposer(config: EngineConfig, planned: PlannedModel, model: StepModel) -> Proposer | None:
    """As configured."""
    if planned.draft is not None:
        target = LoadedTarget(model, planned.info.num_blocks, planned.info.max_running)
        return planned.draft.load(config, SystemClock(), target)
    return None if config.speculation == "off" else PromptLookup(planned.computing.native)


def load_runner(model_path: Path, config: EngineConfig, on_progress: OnProgress) -> Runner:
    """Load the model in `model_path` and wire a runner on the CPU for it. `warm_up` is left to the caller.

    Raises:
        CheckpointError: the directory does not hold a model that can be served.
        ConfigError: a setting that is impossible on this machine or with this model.
    """
    device, planned = torch.device("cpu"), _planned(model_path, config, on_progress)
    info, spec, computing = planned.info, planned.spec, planned.computing
    dtype, limits = computing.dtype, decoder_limits(config, info.max_model_len, embeds=spec.embeds)
    with torch.inference_mode():
        cache = KVCache(
            spec, info.num_blocks, dtype, device,
            rounded=config.kv_dtype == "int8", products=computing.products,
        )  # fmt: skip
        takes, weights = config.adapter_slots > 0, planned.weights
        # Kernels that compute with weights as they are read them when they copy them.
        weights.reports_each = computing.native is None or computing.precision != "native"
        weights.report()  # The stage begins.
        model = wire_model(
            spec, weights, limits, cache, computing, takes_adapters=takes, on_copies=weights.report
        )
    on_progress("preparing kernels", 0, 0)
    sampler = sampler_of(spec.vocab_size, computing.native)
    floor = cost_floor(
        spec, info, device, itemsize=dtype.itemsize, kept_bits=planned.kept_bits, rounded_kv=cache.rounded
    )
    adapters = adapter_reader(
        spec, dtype, limits.step_tokens, computing.native, bytes_max=planned.adapter_bytes
    )
    return Runner(
        RunnerParts(
            info=info,
            model=model,
            cache=cache,
            sampler=sampler,
            step_tokens=config.step_tokens,
            host=host_store(cache, info.num_host_blocks),
            floor=floor,
            adapters=adapters if takes else None,
            proposer=_proposer(config, planned, model),
        )
    )

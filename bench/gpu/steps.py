"""Steps in device memory for the kernels: rows with scattered blocks, and a cache that is poisoned wherever
nobody wrote.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bench.gpu.common import Bench
from penstock.engine.gpu.ops import HeadRotation, Ops, Partials
from penstock.engine.gpu.step import (
    DeviceStep,
    DeviceStepInputs,
    Int32Array,
    RowState,
    StepBuffer,
    StepLimits,
)
from penstock.engine.gpu.worklist import WorkList, WorkListLimits
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import RotaryTable
from penstock.models.spec import DecoderSpec
from penstock.types import BLOCK_TOKENS

Rows = list[tuple[int, int]]
"""(tokens in the cache, new tokens) of every row; all draw."""


@dataclass(frozen=True)
class Case:
    """One step and what its kernels work on."""

    spec: DecoderSpec
    step: DeviceStep
    cache: KVCache
    partials: Partials
    rotation: HeadRotation
    num_tokens: int
    slots_per_block: int
    host: tuple[Int32Array, Int32Array, Int32Array]
    """Places in the tables, tokens in the cache and new tokens, of each row."""

    def begin(self, ops: Ops) -> None:
        """The work before a step's layers, on the host and on the device."""
        ops.plan(*self.host, self.step.state)
        ops.prepare(self.step, self.slots_per_block)

    def heads(self, seed: int, *, all_heads: bool) -> Tensor:
        """Random queries, or queries, keys and values, of the step's tokens."""
        count = self.spec.num_heads + (2 * self.spec.num_kv_heads if all_heads else 0)
        device = self.cache.tensor.device
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.num_tokens, count, self.spec.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=self.cache.dtype)


def case(bench: Bench, spec: DecoderSpec, rows: Rows, *, layers: int = 2) -> Case:
    """A filled step over a cache of `layers` layers; `prepare` has not run."""
    step_tokens = sum(new for _, new in rows)
    longest = max(computed + new for computed, new in rows)
    sizes = {"max_running": len(rows), "step_tokens": step_tokens}
    work_limits = WorkListLimits.of(**sizes, group_size=spec.group_size)
    limits = StepLimits(**sizes, max_model_len=longest + BLOCK_TOKENS, work=work_limits)
    computed, new = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    places = np.arange(len(rows) - 1, -1, -1, dtype=np.int32)
    device = bench.device
    state, buffer = RowState.allocate(limits, device), StepBuffer(limits, torch.device("cpu"))
    work = WorkList.of(places, computed, new, limits.work)
    buffer.fill(places, computed, new, np.arange(len(rows), dtype=np.int32), work)
    on_device = StepBuffer(limits, device)
    on_device.flat.copy_(buffer.flat)
    inputs = DeviceStepInputs.allocate(limits, device).head(step_tokens, len(rows))
    held = -(-(computed + new) // BLOCK_TOKENS)
    small = replace(spec, num_layers=layers)
    cache = KVCache(small, int(held.sum()) + 3, bench.dtype, device)
    fill(cache, state, places, computed, held)
    state.token_ids.random_(0, spec.vocab_size)
    heads = (limits.work.partials_max, spec.num_heads)
    partials = Partials(torch.zeros(*heads, spec.head_dim, device=device), torch.zeros(*heads, device=device))
    norm = torch.linspace(0.5, 1.5, spec.head_dim, device=device).to(bench.dtype)
    table = RotaryTable(spec.rope, spec.head_dim, limits.max_model_len, device)
    rotation = HeadRotation(table, (norm, norm.flip(0)) if spec.qk_norm else None, spec.norm_eps)
    decode_only = bool((new == 1).all())
    step = DeviceStep(on_device, state, inputs, decode_only)
    slots = cache.pages_per_block * BLOCK_TOKENS
    return Case(small, step, cache, partials, rotation, step_tokens, slots, (places, computed, new))


def fill(cache: KVCache, state: RowState, places: np.ndarray, computed: np.ndarray, held: np.ndarray) -> None:
    """Random keys and values where rows have them, NaN everywhere else: nothing may read that."""
    cache.tensor[:-1].fill_(torch.nan)
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(3))
    first = 0
    for place, known, count in zip(places.tolist(), computed.tolist(), held.tolist(), strict=True):
        blocks = order[first : first + count].to(cache.tensor.device)
        first += count
        state.block_tables[place, :count] = blocks.int()
        whole, rest = divmod(known, BLOCK_TOKENS)
        cache.tensor[blocks[:whole]] = torch.randn_like(cache.tensor[blocks[:whole]])
        if rest:
            part = cache.tensor[blocks[whole], :, :, :rest]
            cache.tensor[blocks[whole], :, :, :rest] = torch.randn_like(part)

"""Steps in device memory, for the operations of `engine/gpu`: rows with scattered blocks and known
contents.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.gpu.step import DeviceStep, DeviceStepInputs, RowState, StepBuffer, StepLimits
from penstock.engine.gpu.worklist import WorkList, WorkListLimits
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import RotaryTable, RotaryWeights
from penstock.engine.sampler import SampleRows
from penstock.models.spec import DecoderSpec, RopeSpec

CPU = torch.device("cpu")
MAX_LEN = 1200
NUM_BLOCKS = 400


def limits(
    *, max_running: int = 8, step_tokens: int = 256, group_size: int = 16, max_model_len: int = MAX_LEN
) -> StepLimits:
    work = WorkListLimits.of(max_running=max_running, step_tokens=step_tokens, group_size=group_size)
    return StepLimits(
        max_running=max_running, step_tokens=step_tokens, max_model_len=max_model_len, work=work
    )


@dataclass(frozen=True)
class Heads:
    """The shape of attention in a test."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.float32
    rope: RopeSpec = RopeSpec()  # noqa: RUF009  (frozen)
    qk_norm: bool = True

    def cache(self, *, float8: bool = False) -> KVCache:
        spec = DecoderSpec(
            architecture="", vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=2,
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.dim, max_position=MAX_LEN,
            norm_eps=1e-6, rope=self.rope,
        )  # fmt: skip
        return KVCache(spec, NUM_BLOCKS, self.dtype, CPU, float8=float8)

    def rotary(self) -> RotaryWeights:
        table = RotaryTable(self.rope, self.dim, MAX_LEN, CPU)
        norms = (torch.linspace(0.5, 1.5, self.dim), torch.linspace(1.5, 0.5, self.dim))
        return RotaryWeights(
            (table, table), (norms, norms) if self.qk_norm else (), 1e-6, self.heads, self.kv_heads
        )

    def qkv(self, num_tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_tokens, self.heads + 2 * self.kv_heads, self.dim)
        return torch.randn(shape, generator=generator).to(self.dtype)


@dataclass(frozen=True)
class Row:
    computed: int
    num_tokens: int
    samples: bool = False


def device_step(
    rows: list[Row], bounds: StepLimits, *, padding: int = 0, state: RowState | None = None
) -> DeviceStep:
    """A filled step, not yet prepared.

    Rows sit in the tables from the last one down, their blocks anywhere.
    """
    state = state or RowState.allocate(bounds, CPU)
    places = np.arange(bounds.max_running - 1, bounds.max_running - 1 - len(rows), -1, dtype=np.int32)
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(7)).int()
    for place, row in zip(places.tolist(), rows, strict=True):
        held = -(-(row.computed + row.num_tokens) // 16)
        state.block_tables[place, :held], blocks = blocks[:held], blocks[held:]
    buffer = StepBuffer(bounds, CPU)
    computed = np.array([row.computed for row in rows], np.int32)
    num_tokens = np.array([row.num_tokens for row in rows], np.int32)
    sampled = np.flatnonzero([row.samples for row in rows]).astype(np.int32)
    buffer.fill(places, computed, num_tokens, sampled, WorkList.of(places, computed, num_tokens, bounds.work))
    inputs = DeviceStepInputs.allocate(bounds, CPU).head(
        int(num_tokens.sum()) + padding, len(sampled) + padding
    )
    return DeviceStep(buffer, state, inputs, bool((num_tokens == 1).all()))


def sampling_state(state: RowState, rows: list[tuple[float, int, float, float, int]]) -> SampleRows:
    """Write (temperature, top k, top p, min p, seed) to the last rows, downwards; the same for the engine's
    sampler.
    """
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    seeds = np.array([row[4] for row in rows], np.uint64)
    places = torch.arange(state.unused_row - 1, state.unused_row - 1 - len(rows), -1)
    for table, column in zip(
        (state.temperature, state.top_k, state.top_p, state.min_p), columns, strict=False
    ):
        table[places] = torch.from_numpy(column).to(table.dtype)
    state.seed[places] = torch.from_numpy(seeds.view(np.int64))
    positions = np.arange(40, 40 + len(rows), dtype=np.int64)
    return SampleRows(
        columns[0].astype(np.float32), columns[1].astype(np.int64), columns[2].astype(np.float64),
        columns[3].astype(np.float32), seeds, positions,
    )  # fmt: skip

"""The layout of a step in device memory: tables of the live rows, the step's description, and what is made
of it.

A captured graph sees addresses, not arguments: everything that changes from step to step is in these buffers,
which live as long as the runner. Between host and device goes one copy per step, of one int32 buffer:

    counts | rows | computed | starts | sampled | items | combines

The host knows all of it before the previous step's tokens are drawn: lengths, blocks and who draws. Token ids
are not in it; the device takes them from its own row tables, where the sampler writes what it draws.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.gpu.worklist import COMBINE_FIELDS, ITEM_FIELDS, WorkList, WorkListLimits
from penstock.types import BLOCK_TOKENS

Int32Array = npt.NDArray[np.int32]

NUM_TOKENS, NUM_SAMPLES, NUM_ITEMS, NUM_COMBINES, NUM_CHUNKS = range(1, 6)
"""Places in `counts`; the first holds the number of rows."""
_COUNTS = 8


@dataclass(slots=True, frozen=True, kw_only=True)
class StepLimits:
    """The sizes of the buffers."""

    max_running: int
    """Rows of the tables, and rows and samples of one step at most."""
    step_tokens: int
    max_model_len: int
    work: WorkListLimits

    @property
    def max_blocks(self) -> int:
        """Width of the block tables."""
        return -(-self.max_model_len // BLOCK_TOKENS)


@dataclass(slots=True, frozen=True)
class RowState:
    """The device's state of every live row. The last row is unused: padding reads and writes it.

    The runner writes a row when its request enters, and block ids as they are announced. The sampler writes
    tokens. All are `[max_running + 1, ...]`.
    """

    token_ids: Tensor
    """`[.., max_model_len + 1]` int32, valid up to the row's last drawn token."""
    block_tables: Tensor
    """`[.., max_blocks]` int32."""
    temperature: Tensor
    """float32; under `GREEDY_BELOW` greedy."""
    top_k: Tensor
    """int32; 0: off."""
    top_p: Tensor
    """float64; 1: off."""
    min_p: Tensor
    """float32; 0: off."""
    seed: Tensor
    """int64, the 64 bits of the unsigned seed."""

    @classmethod
    def allocate(cls, limits: StepLimits, device: torch.device) -> Self:
        """Empty tables."""
        rows = limits.max_running + 1

        def zeros(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(rows, *width, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(torch.int32, limits.max_model_len + 1),
            block_tables=zeros(torch.int32, limits.max_blocks),
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int32),
            top_p=zeros(torch.float64) + 1,
            min_p=zeros(torch.float32),
            seed=zeros(torch.int64),
        )

    @property
    def unused_row(self) -> int:
        """The row that padding uses."""
        return self.token_ids.shape[0] - 1


class StepBuffer:
    """One step's description: a flat int32 tensor and named views of it.

    The host and the device have one each.

    The host's is pinned memory if the device is a GPU, so that the copy does not wait. A host buffer may be
    filled again only when its copy has run: two or three in rotation let the next plan be written while one
    is read.
    """

    def __init__(self, limits: StepLimits, device: torch.device, *, pinned: bool = False) -> None:
        rows, work = limits.max_running, limits.work
        sizes = (
            _COUNTS, rows, rows, rows + 1, rows, work.items_max * ITEM_FIELDS,
            work.combines_max * COMBINE_FIELDS,
        )  # fmt: skip
        ends = np.cumsum((0, *sizes)).tolist()
        self.flat = torch.zeros(ends[-1], dtype=torch.int32, device=device, pin_memory=pinned)
        parts = [self.flat[start:end] for start, end in pairwise(ends)]
        self.counts = parts[0]
        """`[8]`: rows, tokens, samples, items, combines, tiles of chunks among the items."""
        self.rows = parts[1]
        """`[max_running]` the table row of each row of work."""
        self.computed = parts[2]
        """`[max_running]` the position of its first token."""
        self.starts = parts[3]
        """`[max_running + 1]` its first token within the step; beyond the last row: the number of tokens."""
        self.sampled = parts[4]
        """`[max_running]` the rows of work that draw."""
        self.items = parts[5].view(-1, ITEM_FIELDS)
        """See `WorkList`."""
        self.combines = parts[6].view(-1, COMBINE_FIELDS)
        """See `WorkList`."""

    def fill(
        self,
        rows: Int32Array,
        computed: Int32Array,
        num_tokens: Int32Array,
        sampled: Int32Array,
        work: WorkList,
    ) -> None:
        """Describe a step (host buffers only).

        Args:
            rows: `[num_rows]` rows of the tables.
            computed: `[num_rows]` tokens of the row that are in the cache already.
            num_tokens: `[num_rows]` new tokens, at least 1.
            sampled: `[num_samples]` indices into `rows`, ascending.
            work: the attention of the step.
        """
        count = len(rows)
        self.rows.numpy()[:count] = rows
        self.computed.numpy()[:count] = computed
        starts = self.starts.numpy()
        starts[0] = 0
        np.cumsum(num_tokens, out=starts[1 : count + 1])
        starts[count + 1 :] = starts[count]
        self.sampled.numpy()[: len(sampled)] = sampled
        self.items.numpy()[: len(work.items)] = work.items
        self.combines.numpy()[: len(work.combines)] = work.combines
        totals = (count, starts[count], len(sampled), len(work.items), len(work.combines), work.num_chunks)
        self.counts.numpy()[: len(totals)] = totals


@dataclass(slots=True, frozen=True)
class DeviceStepInputs:
    """The result of `Ops.prepare` on the device: token by token and sample by sample, padded to fixed
    numbers.
    """

    token_ids: Tensor
    """`[num_tokens]` int64; padding: 0."""
    positions: Tensor
    """`[num_tokens]` int64; padding: 0."""
    slots: Tensor
    """`[num_tokens]` int64: the token's first-layer key in `KVCache.slots`; padding: -1."""
    token_rows: Tensor
    """`[num_tokens]` int32 rows of the tables; padding: the unused row."""
    sample_tokens: Tensor
    """`[num_samples]` int64 indices of the tokens whose logits are drawn from; padding: 0."""
    sample_rows: Tensor
    """`[num_samples]` int32 rows of the tables; padding: the unused row."""
    sample_positions: Tensor
    """`[num_samples]` int32 positions of the tokens to be drawn; padding: 0."""

    @classmethod
    def allocate(cls, limits: StepLimits, device: torch.device) -> Self:
        """Buffers for the largest step; `head` gives those of a smaller one."""

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        tokens, samples = limits.step_tokens, limits.max_running
        return cls(
            zeros(tokens, torch.int64),
            zeros(tokens, torch.int64),
            zeros(tokens, torch.int64),
            zeros(tokens, torch.int32),
            zeros(samples, torch.int64),
            zeros(samples, torch.int32),
            zeros(samples, torch.int32),
        )

    def head(self, num_tokens: int, num_samples: int) -> "DeviceStepInputs":
        """The same memory for a step (or graph) of these sizes, padding included."""
        return DeviceStepInputs(
            self.token_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slots[:num_tokens],
            self.token_rows[:num_tokens],
            self.sample_tokens[:num_samples],
            self.sample_rows[:num_samples],
            self.sample_positions[:num_samples],
        )


@dataclass(slots=True, frozen=True)
class DeviceStep:
    """All that a step's kernels read: fixed addresses, so that it can be part of a captured graph."""

    buffer: StepBuffer
    """The device's."""
    state: RowState
    inputs: DeviceStepInputs
    """As many tokens and samples as the step or the graph computes, padding included."""
    decode_only: bool = False
    """Every row has one new token: attention may leave out the code for chunks."""


@dataclass(slots=True, frozen=True)
class Drawn:
    """The result of `Ops.sample`, padding included."""

    token_ids: Tensor
    """`[num_samples]` int32."""
    healthy: Tensor
    """`[num_samples]` bool: the row's logits were numbers. A row that is not gets token 0."""

    @classmethod
    def allocate(cls, max_samples: int, device: torch.device) -> Self:
        """Memory for the largest step."""
        return cls(
            torch.zeros(max_samples, dtype=torch.int32, device=device),
            torch.zeros(max_samples, dtype=torch.bool, device=device),
        )

    def head(self, num_samples: int) -> "Drawn":
        """The same memory for fewer samples."""
        return Drawn(self.token_ids[:num_samples], self.healthy[:num_samples])

"""The host's side of the row tables: what enters is written to the device, what must be known to plan a step
is kept here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engine.gpu.adjust import DeviceAdjustments
from penstock.engine.gpu.platform import Staging
from penstock.engine.gpu.step import RowState
from penstock.schedule.plan import NewRow, StepPlan

Int32Array = npt.NDArray[np.int32]
_SEED_MASK = (1 << 64) - 1


@dataclass(slots=True, frozen=True)
class HostStep:
    """A step's rows of work, as the host knows them; arrays of `[num_rows]` but for `sampled`."""

    rows: Int32Array
    """Rows of the tables."""
    computed: Int32Array
    num_tokens: Int32Array
    sampled: Int32Array
    """`[num_samples]` indices of those that draw."""
    scoring: list[int]
    """Indices of those whose prompt tokens are scored."""

    @classmethod
    def of(cls, plan: StepPlan) -> "HostStep":
        """Columns of the plan's work."""
        work, count = plan.work, len(plan.work)
        samples = np.fromiter((one.samples for one in work), np.bool_, count)
        return cls(
            np.fromiter((one.row for one in work), np.int32, count),
            np.fromiter((one.num_computed for one in work), np.int32, count),
            np.fromiter((one.num_tokens for one in work), np.int32, count),
            np.flatnonzero(samples).astype(np.int32),
            [index for index, one in enumerate(work) if one.scores],
        )

    @property
    def total_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.num_tokens.sum())

    @property
    def decode_only(self) -> bool:
        """Whether every row has one new token."""
        return int(self.num_tokens.max()) == 1

    @property
    def sample_rows(self) -> Int32Array:
        """`[num_samples]` rows of the tables that draw."""
        return self.rows[self.sampled]

    @property
    def sample_positions(self) -> Int32Array:
        """`[num_samples]` positions of the tokens to be drawn."""
        return (self.computed + self.num_tokens)[self.sampled]


class HostRows:
    """Writes plans' changes to `RowState`, in the order of the device's queue: a step in flight sees the old
    rows.
    """

    def __init__(self, state: RowState) -> None:
        self._state = state
        max_running = state.unused_row
        self._num_blocks = [0] * max_running
        self.logprobs: list[int | None] = [None] * max_running
        """Alternatives wanted beside each drawn token's log-probability; None: not even that."""
        self.prompt_logprobs = [0] * max_running
        self.num_prompt = [0] * max_running
        self.adjustments = DeviceAdjustments(max_running)

    def apply(self, plan: StepPlan, staging: Staging) -> None:
        """Take in the plan's new rows and blocks."""
        for new in plan.new_rows:
            self._enter(new, staging)
        if plan.new_rows:
            self._write_sampling(plan.new_rows, staging)
        grown = [(new.row, new.blocks) for new in plan.new_rows if new.blocks]
        grown += [(work.row, work.new_blocks) for work in plan.work if work.new_blocks]
        if grown:
            self._append_blocks(grown, staging)

    def _enter(self, new: NewRow, staging: Staging) -> None:
        row, sampling = new.row, new.sampling
        tokens = staging.put(np.array(new.token_ids, np.int32))
        self._state.token_ids[row, : len(new.token_ids)].copy_(tokens, non_blocking=True)
        self._num_blocks[row] = 0
        self.logprobs[row] = sampling.logprobs
        self.prompt_logprobs[row] = sampling.prompt_logprobs or 0
        self.num_prompt[row] = new.num_prompt_tokens
        self.adjustments.enter(new)

    def _write_sampling(self, new_rows: tuple[NewRow, ...], staging: Staging) -> None:
        state = self._state
        rows = staging.put(np.array([new.row for new in new_rows], np.int64))
        asked = [new.sampling for new in new_rows]
        top_k = [min(max(one.top_k, 0), np.iinfo(np.int32).max) for one in asked]
        seeds = np.array([one.seed & _SEED_MASK for one in asked], np.uint64).view(np.int64)
        for table, values in (
            (state.temperature, np.array([one.temperature for one in asked], np.float32)),
            (state.top_k, np.array(top_k, np.int32)),
            (state.top_p, np.array([one.top_p for one in asked], np.float64)),
            (state.min_p, np.array([one.min_p for one in asked], np.float32)),
            (state.seed, seeds),
        ):
            table.index_copy_(0, rows, staging.put(values))

    def _append_blocks(self, grown: list[tuple[int, tuple[int, ...]]], staging: Staging) -> None:
        """Extend the block tables of rows, all of them with one indexed copy."""
        width = self._state.block_tables.shape[1]
        firsts: list[int] = []
        for row, blocks in grown:
            held = self._num_blocks[row]
            self._num_blocks[row] = held + len(blocks)
            assert self._num_blocks[row] <= width, (row, held, blocks)
            firsts.append(row * width + held)
        counts = [len(blocks) for _, blocks in grown]
        starts = np.cumsum(counts) - counts
        places = np.repeat(np.array(firsts) - starts, counts) + np.arange(sum(counts))
        added = np.array([block for _, blocks in grown for block in blocks], np.int32)
        flat = self._state.block_tables.view(-1)
        flat.index_copy_(0, staging.put(places.astype(np.int64)), staging.put(added))

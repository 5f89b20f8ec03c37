"""The host's side of the row tables: what enters is written to the device, what must be known to plan a step
is kept here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.adjustments import Adjustments, Masks
from penstock.engine.arrays import Int32Array
from penstock.engine.gpu.platform import Staging
from penstock.engine.gpu.step import RowState
from penstock.schedule.plan import NewRow, StepPlan

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


# Penalties, logit bias and minimum lengths on the device: the arithmetic of `engine/adjustments.py`, from
# the device's rows.
#
# The host knows which rows ask for anything, and only then is anything launched. A row's answer so far is
# read from its row of the token table, which holds tokens that the host has not seen yet.

_ROWS_AT_ONCE = 32
"""Rows whose counts `[rows, vocab_size]` are in memory at the same time."""


@dataclass(slots=True, frozen=True)
class Adjusted:
    """Logits as they were before they were changed for the draw."""

    logits: Tensor
    index: Tensor
    """`[num_changed]` int64: which rows were changed."""
    before: Tensor

    def undo(self) -> None:
        """Put them back: log-probabilities are the model's own."""
        self.logits.index_copy_(0, self.index, self.before)


class DeviceAdjustments(Adjustments):
    """The parameters of every row, as the host's twin keeps them; `change` computes on the device."""

    def any(self, rows: Int32Array) -> bool:
        """Whether any of `rows` asks for a change."""
        return bool(self._active[rows].any())

    def change(
        self,
        logits: Tensor,
        rows: Int32Array,
        positions: Int32Array,
        state: RowState,
        staging: Staging,
        masks: Masks | None = None,
    ) -> Adjusted:
        """Change the logits `[num_samples, vocab_size]` of the tokens to be drawn at `positions` of
        `rows`. `masks` win over everything else.
        """
        active = self._active[rows]
        index = np.flatnonzero(active if masks is None else active | (masks.of_row >= 0))
        everywhere = staging.put(index.astype(np.int64))
        adjusted = Adjusted(logits, everywhere, logits.index_select(0, everywhere))
        for start in range(0, len(index), _ROWS_AT_ONCE):
            some = index[start : start + _ROWS_AT_ONCE]
            changed = adjusted.before[start : start + len(some)].clone()
            some_masks = None if masks is None else masks.of(some)
            self._change_rows(
                changed, rows[some].astype(np.int64), positions[some], state, staging, some_masks
            )
            logits.index_copy_(0, everywhere[start : start + len(some)], changed)
        return adjusted

    def _change_rows(
        self,
        logits: Tensor,
        rows: npt.NDArray[np.int64],
        positions: Int32Array,
        state: RowState,
        staging: Staging,
        masks: Masks | None,
    ) -> None:
        penalised = (self._frequency[rows] != 0) | (self._presence[rows] != 0)
        if penalised.any() or (self._repetition[rows] != 1).any():
            known = state.token_ids[staging.put(rows), : int(positions.max())].long()
            place = torch.arange(known.shape[1], device=known.device)
            said = place < staging.put(positions)[:, None]
            self._penalise_known(logits, known, said, staging.put(self._repetition[rows])[:, None])
            new = said & (place >= staging.put(self._num_prompt[rows])[:, None])
            self._penalise_new(logits, known, new, rows, staging)
        self._add_biases(logits, rows, staging)
        self._mask_early_stops(logits, rows, positions, staging, masks)
        if masks is not None:
            _hide(logits, masks, staging)

    @staticmethod
    def _penalise_known(logits: Tensor, known: Tensor, said: Tensor, penalty: Tensor) -> None:
        seen = _counts(logits, known, said) > 0
        changed = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits.copy_(torch.where(seen, changed, logits))

    def _penalise_new(
        self, logits: Tensor, known: Tensor, new: Tensor, rows: npt.NDArray[np.int64], staging: Staging
    ) -> None:
        counts = _counts(logits, known, new)
        frequency, presence = (staging.put(of[rows])[:, None] for of in (self._frequency, self._presence))
        amount = counts.float().mul_(frequency).add_(presence)
        logits.sub_(amount.masked_fill_(counts == 0, 0.0))

    def _add_biases(self, logits: Tensor, rows: npt.NDArray[np.int64], staging: Staging) -> None:
        ids = [self._bias_ids[row] for row in _listed(rows)]
        if not any(map(len, ids)):
            return
        at, where = _places(ids, staging)
        logits[at, where] += staging.put(np.concatenate([self._bias[row] for row in _listed(rows)]))

    def _mask_early_stops(
        self,
        logits: Tensor,
        rows: npt.NDArray[np.int64],
        positions: Int32Array,
        staging: Staging,
        masks: Masks | None,
    ) -> None:
        early = positions < self._min_known[rows]
        if masks is not None:
            for at, row in enumerate(_listed(rows)):
                early[at] = early[at] and not masks.allow_only(at, self._stop_ids[row])
        vocab_size = logits.shape[1]
        # A checkpoint may name an EOS that its vocabulary does not have.
        stops = [self._stop_ids[row] for row in _listed(rows)]
        ids = [
            one[(one >= 0) & (one < vocab_size) & is_early]
            for one, is_early in zip(stops, early, strict=True)
        ]
        if any(map(len, ids)):
            at, where = _places(ids, staging)
            logits[at, where] = -torch.inf


def _hide(logits: Tensor, masks: Masks, staging: Staging) -> None:
    """Minus infinity where a token may not be drawn."""
    index, vocab_size = np.flatnonzero(masks.of_row >= 0), logits.shape[1]
    if not len(index):
        return
    bits = np.ascontiguousarray(masks.bits[masks.of_row[index]])
    words = staging.put(bits.reshape(-1)).view(len(index), -1, 1)
    allowed = (words >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    hidden = allowed.view(len(index), -1)[:, :vocab_size] == 0
    where = staging.put(index)
    logits.index_copy_(0, where, logits.index_select(0, where).masked_fill_(hidden, -torch.inf))


def _listed(rows: npt.NDArray[np.int64]) -> list[int]:
    return rows.tolist()


def _counts(logits: Tensor, token_ids: Tensor, counted: Tensor) -> Tensor:
    """How often each token of the vocabulary is among the counted ones: int32, like `logits`."""
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    return counts.scatter_add_(1, token_ids * counted, counted.int())


def _places(ids: list[npt.NDArray[np.int64]], staging: Staging) -> tuple[Tensor, Tensor]:
    """(rows, ids) of one entry for every id, each `[n]` int64."""
    at = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    return staging.put(at), staging.put(np.concatenate(ids))

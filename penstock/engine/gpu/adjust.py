"""Penalties, logit bias and minimum lengths on the device: the arithmetic of `engine/adjustments.py`, from
the device's rows.

The host knows which rows ask for anything, and only then is anything launched. What a row has said so far is
read from its row of the token table, which holds tokens that the host has not seen yet.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.adjustments import Adjustments, Masks
from penstock.engine.gpu.platform import Staging
from penstock.engine.gpu.step import RowState

Int32Array = npt.NDArray[np.int32]
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

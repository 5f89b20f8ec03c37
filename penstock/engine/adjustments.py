"""Penalties, logit bias and minimum lengths: what requests change in their logits before a token is drawn.

Owns these parameters of every row. Knows nothing about how tokens are drawn. A change is a few entries of a
row and not a pass over the vocabulary: they are written into the logits, and taken back after the draw, so
that log-probabilities stay those of the model.

Nothing is counted along the way. Each step looks at the tokens that the row has then, as attention does, so
there is no state that a preemption, a chunk or another row could leave wrong.

The order is: repetition penalty (Keskar et al. 2019, arXiv 1909.05858), frequency and presence penalty, bias,
then what may not be drawn at all: the last tokens of bad words, all but the allowed tokens, and stop tokens
before the minimum length. The last yields where nothing else is allowed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.arrays import Int32Array, Int64Array, as_tensor
from penstock.protocol.worker_parts import changes_logits
from penstock.schedule.plan import NewRow

# Which tokens the rows of a step may draw, as bits: how grammars bound what the sampler draws.


@dataclass(slots=True, frozen=True)
class Masks:
    """Which tokens the rows that draw may draw, where a grammar says so."""

    bits: Int32Array
    """`[.., words]`, dense: bit t of a row is set where token t may be drawn."""
    of_row: Int32Array
    """`[num_rows]` their rows in `bits`; -1: any token."""

    def of(self, index: Int64Array) -> "Masks":
        """Of these rows alone, in this order."""
        return Masks(self.bits, self.of_row[index])

    def with_only(self, token_ids: Mapping[int, int]) -> "Masks":
        """A copy in which the rows of these indices may draw one token each."""
        index, of_row = np.flatnonzero(self.of_row >= 0), np.full_like(self.of_row, -1)
        bits = np.zeros((len(index) + len(token_ids), self.bits.shape[1]), np.uint32)
        bits[: len(index)] = self.bits[self.of_row[index]].view(np.uint32)
        of_row[index] = np.arange(len(index))
        for place, (i, token_id) in enumerate(token_ids.items(), len(index)):
            bits[place, token_id // 32] = 1 << (token_id % 32)
            of_row[i] = place
        return Masks(bits.view(np.int32), of_row)

    def hide(self, logits: Tensor) -> Tensor:
        """A copy of the logits, minus infinity where a token may not be drawn."""
        hidden, vocab_size = logits.clone(), logits.shape[1]
        index = np.flatnonzero(self.of_row >= 0)
        as_bytes = np.ascontiguousarray(self.bits[self.of_row[index]]).view(np.uint8)
        allowed = np.unpackbits(as_bytes, axis=1, count=vocab_size, bitorder="little").astype(np.bool_)
        where = as_tensor(index)
        hidden[where] = hidden[where].masked_fill_(as_tensor(~allowed), -torch.inf)
        return hidden

    def allow_only(self, index: int, token_ids: Int64Array) -> bool:
        """Whether a row may draw none but these tokens."""
        row = self.of_row[index]
        if row < 0:
            return False
        allowed = np.unpackbits(self.bits[row].view(np.uint8), bitorder="little")
        return bool(np.isin(np.flatnonzero(allowed), token_ids).all())


Scalar = TypeVar("Scalar", bound=np.generic)
_NO_IDS = np.empty(0, np.int64)
_NO_VALUES = np.empty(0, np.float32)


_Where = tuple[Tensor, Tensor] | int


@dataclass(slots=True)
class Edits:
    """Entries of one step's logits `[num_rows, vocab_size]` that are changed for the draw."""

    logits: Tensor
    _undo: list[tuple[_Where, Tensor]] = field(default_factory=list["tuple[_Where, Tensor]"])

    def change(self, rows: Int64Array, ids: Int64Array, to: Callable[[Tensor], Tensor]) -> None:
        """Replace the entries `[n]` at (rows, ids); one that is named twice must get the same value twice."""
        at_rows, at_ids = as_tensor(rows), as_tensor(ids)
        before = self.logits[at_rows, at_ids]
        self._undo.append(((at_rows, at_ids), before))
        self.logits[at_rows, at_ids] = to(before)

    def keep_only(self, row: int, ids: Tensor) -> None:
        """Replace all entries of a row but those at `ids` by minus infinity."""
        entries = self.logits[row]
        before = entries.clone()
        self._undo.append((row, before))
        entries.fill_(-torch.inf)
        entries[ids] = before[ids]

    def undo(self) -> None:
        """Put every entry back as it was, to the bit."""
        while self._undo:
            where, before = self._undo.pop()
            self.logits[where] = before


class BadWords:
    """Runs of tokens that an answer must not have."""

    __slots__ = ("_longer", "_single")

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._single = [word[0] for word in words if len(word) == 1]
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        """By the last token but one."""
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)

    def last_tokens(self, answer: Int32Array) -> Int64Array:
        """The tokens with which a word would be complete behind the answer so far."""
        found = self._single
        if len(answer) and (words := self._longer.get(int(answer[-1]))):
            found = found + [word[-1] for word in words if _ends_with(answer, word[:-1])]
        return np.array(found, np.int64)


def _ends_with(answer: Int32Array, tokens: tuple[int, ...]) -> bool:
    return len(tokens) <= len(answer) and tuple(answer[-len(tokens) :].tolist()) == tokens


class Adjustments:
    """The parameters of every row of the batch; arrays and lists of `[max_running]`."""

    def __init__(self, max_running: int) -> None:
        self._active = np.zeros(max_running, np.bool_)
        """Rows that may change anything. The others cost nothing but this flag."""
        self._repetition = np.ones(max_running, np.float32)
        self._frequency = np.zeros(max_running, np.float32)
        self._presence = np.zeros(max_running, np.float32)
        self._num_prompt = np.zeros(max_running, np.int64)
        self._min_known = np.zeros(max_running, np.int64)
        """Tokens, those of the prompt included, that a row has before a stop token may be drawn."""
        self._bias_ids: list[Int64Array] = [_NO_IDS] * max_running
        self._bias: list[npt.NDArray[np.float32]] = [_NO_VALUES] * max_running
        self._stop_ids: list[Int64Array] = [_NO_IDS] * max_running
        self._bad_words: dict[int, BadWords] = {}
        self._allowed: dict[int, Tensor] = {}
        """By row, where there are any."""

    def enter(self, new: NewRow) -> None:
        """Take in the parameters of a request that (re)enters the batch."""
        row, sampling = new.row, new.sampling
        self._active[row] = changes_logits(sampling)
        if not self._active[row]:
            return  # The values of the row's last request are not read.
        self._repetition[row] = sampling.repetition_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._presence[row] = sampling.presence_penalty
        self._num_prompt[row] = new.num_prompt_tokens
        self._min_known[row] = new.num_prompt_tokens + sampling.min_tokens
        self._bias_ids[row] = np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)
        self._bias[row] = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._stop_ids[row] = np.array(sampling.stop_token_ids, np.int64)
        self._bad_words.pop(row, None)
        self._allowed.pop(row, None)
        if sampling.bad_words:
            self._bad_words[row] = BadWords(sampling.bad_words)
        if sampling.allowed_token_ids:
            self._allowed[row] = torch.tensor(sampling.allowed_token_ids, dtype=torch.int64)

    def apply(
        self,
        logits: Tensor,
        rows: Int64Array,
        positions: Int64Array,
        token_ids: Int32Array,
        masks: Masks | None = None,
    ) -> Edits:
        """Change the logits of the tokens to be drawn at `positions` of `rows`; `undo` follows the draw.

        `token_ids` `[max_running, ...]`: every row's known tokens, valid below its position. `masks` win over
        minimum lengths.
        """
        edits = Edits(logits)
        index = np.flatnonzero(self._active[rows])  # Into the rows of the logits.
        if not len(index):
            return edits
        step = _Step(edits, index, rows[index], positions[index], token_ids)
        self._penalise_repetition(step)
        self._penalise_generated(step)
        self._add_bias(step)
        if self._bad_words or self._allowed:
            self._mask_words(step)
        self._mask_stops(step, masks)
        return edits

    def _penalise_repetition(self, step: "_Step") -> None:
        which = np.flatnonzero(self._repetition[step.rows] != 1)
        if not len(which):
            return
        known = [step.known(i, 0) for i in which.tolist()]
        at, ids = _places(step.index[which], known)
        penalty = as_tensor(_repeat(self._repetition[step.rows[which]], known))
        step.edits.change(at, ids, lambda logit: torch.where(logit > 0, logit / penalty, logit * penalty))

    def _penalise_generated(self, step: "_Step") -> None:
        penalised = (self._frequency[step.rows] != 0) | (self._presence[step.rows] != 0)
        which = np.flatnonzero(penalised)
        if not len(which):
            return
        generated = [step.known(i, int(self._num_prompt[step.rows[i]])) for i in which.tolist()]
        local, ids = _places(np.arange(len(which)), generated)
        vocab_size = step.edits.logits.shape[1]
        keys, counts = np.unique(local * vocab_size + ids, return_counts=True)
        local, ids = np.divmod(keys, vocab_size)
        rows = step.rows[which][local]
        amount = self._frequency[rows] * counts.astype(np.float32) + self._presence[rows]
        step.edits.change(step.index[which][local], ids, lambda logit: logit - as_tensor(amount))

    def _add_bias(self, step: "_Step") -> None:
        rows: list[int] = step.rows.tolist()
        at, ids = _places(step.index, [self._bias_ids[row] for row in rows])
        if len(ids):
            bias = as_tensor(np.concatenate([self._bias[row] for row in rows]))
            step.edits.change(at, ids, lambda logit: logit + bias)

    def _mask_words(self, step: "_Step") -> None:
        rows: list[int] = step.rows.tolist()
        for i, row in enumerate(rows):
            at = int(step.index[i])
            if (words := self._bad_words.get(row)) is not None:
                ids = words.last_tokens(step.known(i, int(self._num_prompt[row])))
                at_rows = np.full(len(ids), at, np.int64)
                step.edits.change(at_rows, ids, lambda logit: torch.full_like(logit, -torch.inf))
            if (allowed := self._allowed.get(row)) is not None:
                step.edits.keep_only(at, allowed)

    def _mask_stops(self, step: "_Step", masks: Masks | None) -> None:
        which = np.flatnonzero(step.positions < self._min_known[step.rows])
        if not len(which):
            return
        stop_ids: list[Int64Array] = []
        index: list[int] = step.index[which].tolist()
        rows: list[int] = step.rows[which].tolist()
        for at, row in zip(index, rows, strict=True):
            ids = self._stop_ids[row]
            allowed = self._allowed.get(row)
            if masks is not None and masks.allow_only(at, ids):
                ids = _NO_IDS  # The answer ends, or its grammar has no way on.
            elif allowed is not None and np.isin(allowed.numpy(), ids).all():
                ids = _NO_IDS  # No other token is allowed.
            stop_ids.append(ids)
        places, ids = _places(step.index[which], stop_ids)
        # A checkpoint may name an EOS that its vocabulary does not have.
        exists = (ids >= 0) & (ids < step.edits.logits.shape[1])
        step.edits.change(places[exists], ids[exists], lambda logit: torch.full_like(logit, -torch.inf))


@dataclass(slots=True, frozen=True)
class _Step:
    """The rows of one step that may change anything; arrays of `[num_active]`."""

    edits: Edits
    index: Int64Array
    """Rows of the logits."""
    rows: Int64Array
    """Rows of the tables."""
    positions: Int64Array
    token_ids: Int32Array

    def known(self, i: int, first: int) -> Int32Array:
        """The known tokens of one row from position `first` on."""
        return self.token_ids[self.rows[i], first : self.positions[i]]


def _places(index: Int64Array, ids: Sequence[npt.NDArray[Any]]) -> tuple[Int64Array, Int64Array]:
    """Entries of the logits, one for every id: (rows, ids), each `[n]`."""
    return _repeat(index, ids), np.concatenate(ids).astype(np.int64)


def _repeat(values: npt.NDArray[Scalar], lists: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Scalar]:
    return np.repeat(values, [len(one) for one in lists])

"""Which tokens the rows of a step may draw, as bits: how grammars bound what the sampler draws."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import Int32Array, Int64Array, as_tensor


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

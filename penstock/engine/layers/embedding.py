"""Token embeddings: rows of a table, for some families scaled."""

import torch
from torch import Tensor


class Embedding:
    """Rows of a `[vocab_size, hidden]` table."""

    __slots__ = ("_table",)

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, token_ids: Tensor, out: Tensor) -> None:
        """Write the rows of `token_ids` `[num_tokens]` to `out` `[num_tokens, hidden]`."""
        torch.index_select(self._table, 0, token_ids, out=out)


class ScaledEmbedding(Embedding):
    """Rows times a constant that has the table's precision (Gemma)."""

    __slots__ = ("_scale",)

    def __init__(self, table: Tensor, scale: float) -> None:
        super().__init__(table)
        self._scale = float(torch.tensor(scale, dtype=table.dtype))

    def __call__(self, token_ids: Tensor, out: Tensor) -> None:
        """See `Embedding`."""
        super().__call__(token_ids, out)
        out.mul_(self._scale)

"""A proposer that knows what rows will say, and now and then says something else."""

from collections.abc import Sequence

import numpy as np

from penstock.engine.arrays import Int64Array
from penstock.engine.inputs import RowTables
from penstock.schedule.plan import StepPlan


class KnowingProposer:
    """Guesses from whole texts, prompts and answers; every so manyth token of a text is guessed wrong."""

    def __init__(self, texts: Sequence[Sequence[int]], *, wrong_every: int = 7) -> None:
        self._texts = [np.array(text, np.int32) for text in texts]
        self._wrong_every = wrong_every

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        """See `Proposer`."""

    def spent(self) -> None:
        """See `Proposer`."""

    def idle(self) -> bool:
        """See `Proposer`."""
        return False

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        """See `Proposer`."""
        found = np.zeros(len(rows), np.int64)
        for i, (row, num_known) in enumerate(zip(rows.tolist(), known.tolist(), strict=True)):
            said = tables.token_ids[row, :num_known]
            texts = (
                text for text in self._texts if len(text) > num_known and (text[:num_known] == said).all()
            )
            if (text := next(texts, None)) is None:
                continue
            guesses = text[num_known : num_known + int(limit[i])].copy()
            places = np.arange(num_known, num_known + len(guesses))
            guesses[places % self._wrong_every == 0] = 1
            tables.token_ids[row, num_known : num_known + len(guesses)] = guesses
            found[i] = len(guesses)
        return found

"""Grammars of a device's rows: its steps are launched before the host knows what the ones before have drawn.

    launch     the step's forward pass is queued; then the host waits for the draws of the steps before, takes
               them, and sends the masks of this step's draws, which are queued behind
    collect    takes the step's draws, if no later launch had to

So masks are computed while the device computes, and only steps that draw for a grammar wait. A device
remembers its draws at once, so a token that is known beforehand is drawn from a mask of one bit, and forced
tokens that follow are written to the row's tokens behind the draw.
"""

from collections.abc import Iterable

import numpy as np
import torch

from penstock.engine.adjustments import Masks
from penstock.engine.arrays import as_tensor, int_list
from penstock.engine.gpu.platform import Staging
from penstock.engine.gpu.results import DeviceFlight
from penstock.engine.gpu.rows import HostStep
from penstock.engine.gpu.step import RowState
from penstock.engine.grammar.compiler import GrammarTokens
from penstock.engine.grammar.rows import GrammarRows
from penstock.schedule.plan import Forced, StepPlan

_THREADS = 2


class DeviceGrammars:
    """Those of one runner."""

    def __init__(self, tokens: GrammarTokens, state: RowState) -> None:
        self._state = state
        self._rows = GrammarRows(state.unused_row, tokens, _THREADS, self._known_tokens)
        self._num_words = -(-tokens.vocab_size // 32)

    def enter(self, plan: StepPlan, under_way: Iterable[DeviceFlight], staging: Staging) -> None:
        """Take in the plan's rows. What is drawn for requests that leave is taken before."""
        freed = [*plan.freed_rows, *(new.row for new in plan.new_rows)]
        if any(row in self._rows for row in freed):
            self.take(under_way, staging)
        for row in plan.freed_rows:
            self._rows.leave(row)
        for new in plan.new_rows:
            self._rows.enter(new)

    def any(self, host: HostStep) -> bool:
        """Whether a row that draws has a grammar."""
        return any(row in self._rows for row in host.sample_rows.tolist())

    def masks(self, flight: DeviceFlight, host: HostStep, under_way: Iterable[DeviceFlight]) -> Masks | None:
        """What the step may draw, behind everything that is under way; its rows are noted in `flight`."""
        self.take(under_way, flight.staging)
        rows, positions = host.sample_rows.astype(np.int64), host.sample_positions.astype(np.int64)
        flight.constrained = [i for i, row in enumerate(rows.tolist()) if row in self._rows]
        flight.positions = positions
        if not flight.constrained:
            return None
        masks = self._rows.masks(rows, positions)
        if masks is None:
            masks = Masks(np.zeros((0, self._num_words), np.int32), np.full(len(rows), -1, np.int32))
        return masks.with_only(self._rows.known(rows, positions))

    def take(self, flights: Iterable[DeviceFlight], staging: Staging | None = None) -> None:
        """Continue behind what these steps drew, oldest first, if that was not done. `staging` is that of a
        step which is being launched; without one the host waits for its copies.
        """
        for flight in flights:
            if flight.constrained:
                assert flight.mark is not None, "a step that is under way was launched"
                flight.mark.wait()
                self._take(flight, staging)

    def _take(self, flight: DeviceFlight, staging: Staging | None) -> None:
        places, flight.constrained = flight.constrained, []
        rows, positions = np.array(flight.rows, np.int64)[places], flight.positions[places]
        drawn = flight.drawn.token_ids.numpy()[places].astype(np.int64)
        drawn[~flight.drawn.healthy.numpy()[places]] = -1
        for i, follows in self._rows.take(rows, positions, drawn).items():
            flight.follows[places[i]] = follows
            if isinstance(follows, Forced) and follows.token_ids:
                self._write(int(rows[i]), int(positions[i]) + 1, follows.token_ids, staging)

    def _write(self, row: int, first: int, token_ids: tuple[int, ...], staging: Staging | None) -> None:
        known = self._state.token_ids[row, first : first + len(token_ids)]
        values = np.array(token_ids[: known.shape[0]], np.int32)
        known.copy_(as_tensor(values) if staging is None else staging.put(values))

    def _known_tokens(self, row: int, start: int, end: int) -> list[int]:
        with torch.inference_mode():
            return int_list(self._state.token_ids[row, start:end].cpu())

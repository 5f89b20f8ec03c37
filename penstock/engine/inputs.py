"""The runner's view of every live request, in tables with stable row indices, and a step's inputs from them.

A plan is a change against these tables. The tables are arrays with one row per request in the batch, so a
decode step is a handful of vector operations however many rows there are; no token is looked at in Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.engine.adjustments import Adjustments, Edits, Masks
from penstock.engine.arrays import Int32Array, Int64Array, as_tensor, token_rows
from penstock.engine.attention.base import AttentionBatch
from penstock.protocol.worker_parts import changes_logits
from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.types import BLOCK_TOKENS

_SEED_MASK = (1 << 64) - 1


@dataclass(slots=True, frozen=True)
class ScoredChunk:
    """A chunk of a prompt whose successors are scored: each token's logits say how likely the next one
    was.
    """

    row: int
    targets: Tensor
    """`[num_scored]` int64: the prompt tokens that follow the chunk's."""
    count: int
    """How many alternatives to tell beside each."""


@dataclass(slots=True, frozen=True)
class StepInputs:
    """One step's inputs, token by token and row by row."""

    token_ids: Int64Array
    """`[num_tokens]`"""
    logit_tokens: Int64Array
    """`[num_samples + num_scored]` indices of the tokens whose logits are wanted: first those that are drawn
    from, then those that score the prompt token that follows them."""
    sample_rows: Int64Array
    """`[num_samples]` their rows in the tables."""
    sample_positions: Int64Array
    """`[num_samples]` positions of the tokens to be drawn."""
    scored: list[ScoredChunk]
    """The rows of those that score."""
    batch: AttentionBatch
    fresh_blocks: list[int]
    """Blocks of this step that hold nothing of their row yet."""
    adapters: list[Any] | None = None
    """Each row's adapter; None: no row has one."""
    drafted: Int64Array | None = None
    """`[num_rows that sample]` how many drafts follow each one's token: so many more samples it has. None: no
    row has any."""


class Proposes(Protocol):
    """Guesses what rows will say (`engine/speculation.py`)."""

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        """Take in which rows and blocks change hands."""
        ...

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: "RowTables"
    ) -> Int64Array:
        """Write guesses of the tokens behind the `known` ones of each row into `tables.token_ids`, at most so
        many; how many there are of each.
        """
        ...


class RowTables:
    """Tokens, blocks and sampling parameters of every row of the batch.

    Token and block tables: `[max_running, ...]`, int32, valid up to what the row's plan has announced.
    """

    def __init__(self, *, max_running: int, max_model_len: int) -> None:
        self._max_blocks = -(-max_model_len // BLOCK_TOKENS)
        self.token_ids = np.zeros((max_running, max_model_len + 1), np.int32)
        """`[max_running, max_model_len + 1]`"""
        self.blocks = np.zeros((max_running, self._max_blocks), np.int32)
        """`[max_running, ...]`: block tables."""
        self._num_blocks = [0] * max_running
        self.temperature = np.zeros(max_running, np.float32)
        self.top_k = np.zeros(max_running, np.int64)
        self.top_p = np.ones(max_running, np.float64)
        self.min_p = np.zeros(max_running, np.float32)
        self.seed = np.zeros(max_running, np.uint64)
        self.match_min = np.zeros(max_running, np.int64)
        """See `RowWork`; of rows that have drafts in this step."""
        self.logprobs: list[int | None] = [None] * max_running
        self._prompt_logprobs = [0] * max_running
        self._num_prompt = [0] * max_running
        self._adjustments: Adjustments | None = None
        """Made for the first request that changes its logits: most never do."""
        self._adapters: dict[int, Any] = {}

    def apply(self, plan: StepPlan, proposer: Proposes | None = None) -> StepInputs:
        """Take in a plan's changes and lay out its step, with drafts of `proposer` where it wants any."""
        self.enter(plan)
        fresh = [block for work in plan.work if work.new_blocks for block in self._append(work)]
        rows = np.fromiter((work.row for work in plan.work), np.int64, len(plan.work))
        computed = np.fromiter((work.num_computed for work in plan.work), np.int32, len(plan.work))
        num_tokens = np.fromiter((work.num_tokens for work in plan.work), np.int32, len(plan.work))
        samples = np.fromiter((work.samples for work in plan.work), np.bool_, len(plan.work))
        scores = [index for index, work in enumerate(plan.work) if work.scores]
        if proposer is None:
            return self._lay_out(rows, computed, num_tokens, samples, scores, fresh)
        proposer.begin(plan, fresh)
        asked = [index for index, work in enumerate(plan.work) if work.drafts]
        if not asked:
            return self._lay_out(rows, computed, num_tokens, samples, scores, fresh)
        work = [plan.work[index] for index in asked]
        facts = np.array([(each.row, each.num_computed + 1, each.drafts) for each in work], np.int64)
        its_rows, known, limit = np.ascontiguousarray(facts.T)
        self.match_min[its_rows] = [each.match_min for each in work]
        found = proposer.propose(its_rows, known, limit, self)
        if not any(found.tolist()):
            return self._lay_out(rows, computed, num_tokens, samples, scores, fresh)
        drafted = np.zeros(len(rows), np.int64)
        drafted[asked] = found
        num_tokens += drafted.astype(np.int32)
        return self._lay_out(rows, computed, num_tokens, samples, scores, fresh, drafted[samples])

    def enter(self, plan: StepPlan) -> None:
        """Take in the rows of a plan without work: they wait for parts of their prefix."""
        if self._adapters:
            for row in (*plan.freed_rows, *(new.row for new in plan.new_rows)):
                self._adapters.pop(row, None)
        for new in plan.new_rows:
            self._enter(new)

    def append_tokens(self, rows: Int64Array, positions: Int64Array, token_ids: Int64Array) -> None:
        """Remember drawn tokens: they are the inputs of coming steps.

        A failed row's (-1) is any token that exists.
        """
        self.token_ids[rows, positions] = np.maximum(token_ids, 0)

    def append_forced(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        """Remember tokens that follow without a draw, as far as the row has room."""
        room = self.token_ids.shape[1] - position
        self.token_ids[row, position : position + len(token_ids)] = token_ids[:room]

    def known_tokens(self, row: int, first: int, end: int) -> list[int]:
        """A row's tokens at the positions from `first` to before `end`, which must be known."""
        return self.token_ids[row, first:end].tolist()

    def blocks_of(self, row: int) -> Int32Array:
        """A row's block table."""
        return self.blocks[row, : self._num_blocks[row]]

    def adjust(
        self, logits: Tensor, rows: Int64Array, positions: Int64Array, masks: Masks | None = None
    ) -> Edits | None:
        """Change logits as their rows' penalties, biases and minimum lengths say, until `undo`."""
        if self._adjustments is None:
            return None
        return self._adjustments.apply(logits, rows, positions, self.token_ids, masks)

    def forget_adjustments(self) -> None:
        """No row is live that changes its logits, after a rehearsal of those that do."""
        self._adjustments = None

    def _enter(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self._num_blocks[row] = len(new.blocks)
        self.blocks[row, : len(new.blocks)] = new.blocks
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed & _SEED_MASK
        self.logprobs[row] = sampling.logprobs
        self._prompt_logprobs[row] = sampling.prompt_logprobs or 0
        self._num_prompt[row] = new.num_prompt_tokens
        if self._adjustments is None and changes_logits(sampling):
            self._adjustments = Adjustments(len(self._num_blocks))
        if self._adjustments is not None:
            self._adjustments.enter(new)
        if new.adapter is not None:
            self._adapters[row] = new.adapter

    def _append(self, work: RowWork) -> list[int]:
        """Extend a row's block table; the blocks that lie wholly beyond its computed tokens."""
        held = self._num_blocks[work.row]
        end = held + len(work.new_blocks)
        assert end <= self._max_blocks, (work, held)
        self.blocks[work.row, held:end] = work.new_blocks
        self._num_blocks[work.row] = end
        first_fresh = -(-work.num_computed // BLOCK_TOKENS)
        return list(work.new_blocks[max(first_fresh - held, 0) :])

    def _lay_out(
        self,
        rows: Int64Array,
        computed: Int32Array,
        num_tokens: Int32Array,
        samples: npt.NDArray[np.bool_],
        scores: list[int],
        fresh: list[int],
        drafted: Int64Array | None = None,
    ) -> StepInputs:
        ends = np.cumsum(num_tokens, dtype=np.int64)
        if ends[-1] == len(rows):  # Decode only.
            token_of_row, positions = rows, computed.astype(np.int64)
        else:
            work_of_token, offsets = token_rows(num_tokens)
            token_of_row, positions = rows[work_of_token], computed[work_of_token] + offsets
        width = -(-int((computed + num_tokens).max()) // BLOCK_TOKENS)
        sampled = np.flatnonzero(samples)
        logit_tokens, scored = ends[sampled] - 1, list[ScoredChunk]()
        sample_rows, sample_positions = rows[sampled], (computed + num_tokens)[sampled].astype(np.int64)
        if drafted is not None:  # Every draft is drawn at, and the token behind the last of them.
            of_sample, offsets = token_rows((drafted + 1).astype(np.int32))
            back = offsets - drafted[of_sample]
            logit_tokens, sample_rows = logit_tokens[of_sample] + back, sample_rows[of_sample]
            sample_positions = sample_positions[of_sample] + back
        for index in scores:
            first = int(ends[index] - num_tokens[index])
            scored.append(self._scored_chunk(int(rows[index]), int(computed[index]), int(num_tokens[index])))
            logit_tokens = np.append(logit_tokens, np.arange(first, first + len(scored[-1].targets)))
        return StepInputs(
            token_ids=self.token_ids[token_of_row, positions].astype(np.int64),
            logit_tokens=logit_tokens,
            sample_rows=sample_rows,
            sample_positions=sample_positions,
            scored=scored,
            batch=AttentionBatch(computed, num_tokens, as_tensor(positions), self.blocks[rows, :width]),
            fresh_blocks=fresh,
            adapters=self._adapters_of(rows),
            drafted=drafted,
        )

    def _adapters_of(self, rows: Int64Array) -> list[Any] | None:
        adapters = self._adapters
        if not adapters:
            return None
        found = [adapters.get(row) for row in rows.tolist()]
        return None if all(each is None for each in found) else found

    def _scored_chunk(self, row: int, first: int, num_tokens: int) -> ScoredChunk:
        """The prompt tokens after each of `num_tokens` from position `first` on."""
        end = min(first + num_tokens + 1, self._num_prompt[row])
        targets = self.token_ids[row, first + 1 : end].astype(np.int64)
        return ScoredChunk(row, as_tensor(targets), self._prompt_logprobs[row])

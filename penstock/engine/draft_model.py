"""A smaller model that guesses what rows will say: a `Proposer` with weights and KV of its own.

Its KV has as many blocks as the target's, and the same block tables name them: what is shared, preempted or
freed there is so here, and nothing has to be allocated. It computes nothing until a row is to have drafts;
then the known tokens that its KV lacks, which may be a whole prompt, and one token after the other behind
them:

    of a row      known tokens, computed | known, not yet | guess | guess | ..
    first pass                             ^^^^^^^^^^^^^^   as a chunk; draws the first guess
    later ones                                              ^ each reads the last one's guess

All passes are one native call. Guesses are drawn as the target draws, with the same parameters and the
randomness of the same place: so both draw the same token more often the closer they are, at any temperature.

The content of its KV is known token by token: those of wrong guesses are no longer the row's tokens, and are
computed again with all behind them. A mistake here could cost time, and could change no answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.clock import Clock
from penstock.engine.arrays import Int32Array, Int64Array, as_tensor, token_rows
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.inputs import RowTables
from penstock.engine.kv_cache import KVCache
from penstock.engine.native.library import PsDraft, PsSample
from penstock.engine.sampler import GREEDY_BELOW, SampleRows, TokenSampler, key_pairs, min_p_bounds
from penstock.engine.step_model import StepModel
from penstock.schedule.plan import Drafting, StepPlan
from penstock.types import BLOCK_TOKENS

_UNKNOWN = -1


@dataclass(slots=True, frozen=True, kw_only=True)
class DraftParts:
    """Everything a draft model is wired from."""

    model: StepModel
    cache: KVCache
    sampler: TokenSampler
    vocab_size: int
    """Of the draft model."""
    target_vocab_size: int
    step_tokens: int
    """Tokens that it computes in one pass at most."""
    max_len: int
    """Positions that it has."""
    max_running: int
    max_drafts: int
    """Rows that have drafts in one step at most."""


@dataclass(slots=True, frozen=True)
class _Round:
    """The rows of one call, those that want the most guesses first; arrays of `[num_rows]`."""

    rows: Int64Array
    firsts: Int64Array
    counts: Int64Array
    limit: Int64Array
    blocks: Int32Array

    def drafting(self, took_ns: int) -> Drafting:
        """The draft computation."""
        ends, passes = self.firsts + self.counts, np.maximum(self.limit, 1)
        later = np.maximum(self.limit - 1, 0)
        chunks = self.counts > 1
        pairs = self.counts * self.firsts + self.counts * (self.counts + 1) // 2
        return Drafting(
            num_passes=int(passes.max()),
            num_tokens=int((self.counts + later).sum()),
            num_sequences=int(passes.sum()),
            kv_read=int((passes * ends + later * passes // 2).sum()),
            chunk_pairs=int(pairs[chunks].sum()),
            took_ns=took_ns,
        )


class DraftModel:
    """See above. Not thread-safe: it is the runner's."""

    def __init__(self, parts: DraftParts, clock: Clock) -> None:
        self._parts, self._clock = parts, clock
        self._written = np.full((parts.cache.num_blocks, BLOCK_TOKENS), _UNKNOWN, np.int32)
        """By block and place: the token whose KV is there, behind those before it in the row."""
        self._valid = np.zeros(parts.max_running, np.int64)
        """By row: so many of its first tokens are known to be computed."""
        self._spent: Drafting | None = None

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        """See `Proposer`."""
        self._spent = None
        for new in plan.new_rows:
            self._valid[new.row] = 0
        if fresh_blocks:
            self._written[list(fresh_blocks)] = _UNKNOWN
            self._parts.cache.clear(list(fresh_blocks))
        for copy in plan.copies_in:
            self._written[copy.block] = _UNKNOWN

    def spent(self) -> Drafting | None:
        """See `Proposer`."""
        return self._spent

    def idle(self) -> bool:
        """See `Proposer`: memory of its KV cache."""
        return self._parts.cache.commit_idly()

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        """See `Proposer`."""
        started_ns, found = self._clock.now_ns(), np.zeros(len(rows), np.int64)
        place, round_ = self._lay_out(rows, known, limit, tables)
        if not len(place):
            return found
        if self._parts.model.draft is not None:
            self._run_native(round_, tables)
        else:
            self._run(round_, tables)
        for i, row in enumerate(round_.rows.tolist()):
            end, count = int(round_.firsts[i] + round_.counts[i]), int(round_.limit[i])
            self._valid[row] = end
            # The last guess is drawn, and not computed.
            self._note(tables, row, int(round_.firsts[i]), end + max(count - 1, 0))
            guesses = tables.token_ids[row, end : end + count]
            strange = np.flatnonzero(guesses >= self._parts.target_vocab_size)
            found[place[i]] = strange[0] if len(strange) else count
        self._spent = round_.drafting(self._clock.now_ns() - started_ns)
        return found

    def _lay_out(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> tuple[Int64Array, _Round]:
        """Which of the rows have a part in this round, and what it computes of each."""
        parts, left = self._parts, self._parts.step_tokens
        chosen: list[tuple[int, int, int, int]] = []
        for i, (row, num_known, count) in enumerate(
            zip(rows.tolist(), known.tolist(), limit.tolist(), strict=True)
        ):
            if num_known >= parts.max_len or not left or len(chosen) == parts.max_drafts:
                continue
            first = self._num_valid(tables, row, num_known)
            tokens = min(num_known - first, left)
            left -= tokens
            is_whole = first + tokens == num_known
            chosen.append((min(count, parts.max_len - num_known) if is_whole else 0, i, first, tokens))
        chosen.sort(key=lambda each: -each[0])
        laid = np.array(chosen, np.int64).reshape(-1, 4)
        place = laid[:, 1].copy()
        its_rows = rows[place]
        width = -(-int((laid[:, 2] + laid[:, 3] + laid[:, 0]).max(initial=0)) // BLOCK_TOKENS)
        blocks = np.ascontiguousarray(tables.blocks[its_rows, :width])
        firsts, counts, wanted = laid[:, 2].copy(), laid[:, 3].copy(), laid[:, 0].copy()
        return place, _Round(its_rows, firsts, counts, wanted, blocks)

    def _num_valid(self, tables: RowTables, row: int, num_known: int) -> int:
        """How many of the row's first tokens need not be computed; what stands behind them is no longer
        known. The last token always is to be: behind it the first guess is drawn.
        """
        first = min(int(self._valid[row]), num_known - 1)
        blocks, written = tables.blocks_of(row), self._written
        begin = first // BLOCK_TOKENS
        here = written[blocks[begin:]].reshape(-1)
        tokens = tables.token_ids[row, begin * BLOCK_TOKENS : num_known - 1]
        same = here[: len(tokens)] == tokens
        same[: first - begin * BLOCK_TOKENS] = True
        wrong = np.flatnonzero(~same)
        valid = begin * BLOCK_TOKENS + int(wrong[0] if len(wrong) else len(same))
        block = valid // BLOCK_TOKENS
        written[blocks[block], valid % BLOCK_TOKENS :] = _UNKNOWN
        written[blocks[block + 1 :]] = _UNKNOWN
        return valid

    def _note(self, tables: RowTables, row: int, first: int, end: int) -> None:
        """The KV of the row's tokens from `first` to before `end` was computed."""
        positions = np.arange(first, end)
        blocks = tables.blocks_of(row)[positions // BLOCK_TOKENS]
        self._written[blocks, positions % BLOCK_TOKENS] = tables.token_ids[row, first:end]

    def _run_native(self, now: _Round, tables: RowTables) -> None:
        """All passes in one call."""
        run = self._parts.model.draft
        assert run is not None, "only the native decoder drafts in one call"
        how, num_passes, keys = SampleRows.of(tables, now.rows, now.rows), int(now.limit.max()), None
        bounds = min_p_bounds(how)
        if (how.temperature >= GREEDY_BELOW).any():
            places = (now.firsts + now.counts)[None] + np.arange(num_passes)[:, None]
            keys = key_pairs(np.tile(how.seed, num_passes), places.reshape(-1))
        token_ids = tables.token_ids
        draw = PsSample(
            temperature=how.temperature.ctypes.data, top_k=how.top_k.ctypes.data,
            top_p=how.top_p.ctypes.data, min_p_bound=bounds.ctypes.data,
            keys=None if keys is None else keys.ctypes.data, vocab=self._parts.vocab_size,
            greedy_below=GREEDY_BELOW,
        )  # fmt: skip
        run(
            PsDraft(
                token_ids=token_ids.ctypes.data, rows=now.rows.ctypes.data, firsts=now.firsts.ctypes.data,
                counts=now.counts.ctypes.data, limit=now.limit.ctypes.data,
                block_tables=now.blocks.ctypes.data, draw=draw,
                num_rows=len(now.rows), ld_tokens=token_ids.shape[1], ld_tables=now.blocks.shape[1],
            )
        )  # fmt: skip

    def _run(self, now: _Round, tables: RowTables) -> None:
        """Pass by pass: the twin of the native call."""
        token_ids, ends = tables.token_ids, now.firsts + now.counts
        for i in range(max(int(now.limit.max()), 1)):
            active = int((now.limit > i).sum())
            rows = now.rows if i == 0 else now.rows[:active]
            firsts = now.firsts if i == 0 else ends[:active] + (i - 1)
            counts = now.counts if i == 0 else np.ones(active, np.int64)
            of_row, offsets = token_rows(counts.astype(np.int32))
            positions = firsts[of_row] + offsets
            tokens = token_ids[rows[of_row], positions].astype(np.int64)
            tokens[tokens >= self._parts.vocab_size] = 0
            batch = AttentionBatch(
                firsts.astype(np.int32),
                counts.astype(np.int32),
                as_tensor(positions),
                now.blocks[: len(rows)],
            )
            samples = as_tensor((np.cumsum(counts) - 1)[:active])
            logits = self._parts.model.compute(as_tensor(tokens), samples, batch)
            if active:
                places = ends[:active] + i
                how = SampleRows.of(tables, rows[:active], places)
                tables.append_tokens(rows[:active], places, self._parts.sampler.draw(logits, how).numpy())

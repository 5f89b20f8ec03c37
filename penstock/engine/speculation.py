"""Speculation: guesses of what rows will say are computed in the same step as the tokens that they owe, and
kept as far as they turn out to be what is drawn.

    plan      "at most k drafts for this row"                                  schedule/speculation.py
    propose   k or fewer tokens behind the known ones, into the row's table    a `Proposer`
    step      1 + k tokens of the row, as a chunk; logits after each of them   the decoder
    verify    every token is drawn as it would be without drafts, with its     `verified`
              own position's randomness; drafts count up to the first that
              is another

So the output is the same as without drafts, to the bit, whatever the proposer: with sampling, since the draws
are the same draws; with penalties and word lists, since they look at the tokens before a position; with
grammars, since a row that has one is drawn token by token, each behind the state that the one before left.
Nothing is ever taken back but the KV of drafts that were wrong, which later tokens overwrite.
docs/design/026-speculation.md says why it is done so, and not by rejection sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from penstock.engine.arrays import Int32Array, Int64Array, as_tensor, int_list
from penstock.engine.inputs import RowTables, StepInputs
from penstock.engine.native.library import NativeLibrary, PsLookup
from penstock.engine.sampler import results
from penstock.schedule.plan import Drafting, Forced, Sampled, StepPlan

MATCH_MAX = 16
"""Of the tokens at the end of a row that have been said before: a longer run is no better."""

Follows = Mapping[int, Forced | str]
"""By index: the tokens that a row's grammar forces behind the drawn one, or why the row failed."""
Draw = Callable[[Tensor, Int64Array, Int64Array], tuple[Tensor, Follows]]
"""Draws from logits the tokens at positions of rows, and remembers them."""


class Proposer(Protocol):
    """Guesses the tokens that follow. A model for this has its own KV under the rows' block tables; a head on
    the target's own states is a `ReadsStates` too.
    """

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        """Before each step: take in which rows and blocks change hands; of `fresh_blocks` nothing is the
        row's that has them now.
        """
        ...

    def spent(self) -> Drafting | None:
        """The time that guessing for the step took, where that is worth counting."""
        ...

    def idle(self) -> bool:
        """Nothing runs: prepare one thing. False: nothing is left."""
        ...

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        """Write guesses of the tokens behind the `known` ones of each row into `tables.token_ids`, at most so
        many; how many there are of each. They must be tokens of the model.
        """
        ...


@runtime_checkable
class ReadsStates(Proposer, Protocol):
    """A proposer that guesses from the target's states: what its output head reads of each token, after the
    last norm. So do EAGLE's heads (Li et al. 2024, arXiv 2401.15077) and those of multi-token prediction.
    """

    states: Tensor
    """`[step_tokens, hidden_size]` in the decoder's type: each step writes the states of its tokens here."""

    def read(self, rows: Int64Array, firsts: Int32Array, counts: Int32Array, tables: RowTables) -> None:
        """After each step: `states` begins with those of the rows' tokens, row by row `counts` of them, from
        position `firsts` on. The tables are as they were for the step: nothing that it draws is known.

        A row's drafts are among them: the next `propose` tells by `known` which of them were right, and a
        later step brings the states of the tokens that took the place of others. Of a prefix that was found
        in the cache no states come: a row's first step then begins behind it. Nor do those of steps that are
        planned without (`StepPlan.reads_states`): `begin` tells of each.
        """
        ...


class PromptLookup:
    """Guesses that a row continues as it did where its last tokens stood before: in its prompt, or in its
    answer (Saxena 2023, prompt lookup decoding). The longest run of tokens counts, and of these the last. How
    long it must be at least the plan says.
    """

    def __init__(self, native: NativeLibrary | None) -> None:
        """`native`: looks for all rows in one call; None: numpy looks, row by row."""
        self._native = native

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        """See `Proposer`: it looks at tokens alone."""

    def spent(self) -> Drafting | None:
        """See `Proposer`: microseconds."""
        return None

    def idle(self) -> bool:
        """See `Proposer`: it has nothing of its own."""
        return False

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        """See `Proposer`."""
        token_ids, found = tables.token_ids, np.zeros(len(rows), np.int64)
        if self._native is None:
            for i, (row, num_known, count) in enumerate(zip(rows, known, limit, strict=True)):
                found[i] = _guess(token_ids[row], int(num_known), int(count), int(tables.match_min[row]))
            return found
        self._native.lookup(
            PsLookup(
                token_ids=token_ids.ctypes.data, rows=rows.ctypes.data, known=known.ctypes.data,
                limit=limit.ctypes.data, match_min=tables.match_min.ctypes.data, found=found.ctypes.data,
                num_rows=len(rows), ld_tokens=token_ids.shape[1], match_max=MATCH_MAX,
            )
        )  # fmt: skip
        return found


def _guess(token_ids: Int32Array, num_known: int, limit: int, match_min: int) -> int:
    """Write guesses behind the known tokens of one row; how many."""
    known = token_ids[:num_known]
    ends = np.flatnonzero(known[:-1] == known[-1])  # Of runs that may be repeated: of one token so far.
    if not len(ends):
        return 0
    lengths, growing = np.ones(len(ends), np.int64), np.arange(len(ends))
    for length in range(1, min(MATCH_MAX, num_known - 1)):
        starts = ends[growing] - length
        growing = growing[(starts >= 0) & (known[starts] == known[-1 - length])]
        if not len(growing):
            break
        lengths[growing] = length + 1
    longest = int(lengths.max())
    if longest < match_min:
        return 0
    first = int(ends[np.flatnonzero(lengths == longest)[-1]]) + 1
    for i in range(limit):  # One by one: where the run continues into the guesses, it is a period.
        token_ids[num_known + i] = token_ids[first + i]
    return limit


def verified(
    logits: Tensor,
    inputs: StepInputs,
    drafted: Int64Array,
    tables: RowTables,
    draw: Draw,
    has_grammar: Callable[[int], bool],
) -> tuple[Sampled, ...]:
    """Draw at all samples of a step with drafts, and keep what was drawn up to the first wrong draft of each
    row, and the token in its place.
    """
    rows, positions, counts = inputs.sample_rows, inputs.sample_positions, int_list(as_tensor(drafted))
    # Lists: there are some dozen tokens, for which an operation on arrays costs more than a loop.
    drafts: list[int] = tables.token_ids[rows, positions].tolist()
    firsts = list(accumulate([1 + count for count in counts], initial=0))[:-1]
    singly = {
        first: first + count
        for first, count in zip(firsts, counts, strict=True)
        if count and has_grammar(int(rows[first]))
    }
    if singly:
        drawn, follows = _draw_singly(logits, inputs, drafts, singly, draw)
    else:
        token_ids, follows = draw(logits, rows, positions)
        drawn = int_list(token_ids)
    kept, ends = list[int](), list[int]()
    for first, count in zip(firsts, counts, strict=True):
        at = first
        while at < first + count and drawn[at] == drafts[at] and at not in follows:
            at += 1
        kept += range(first, at + 1)
        ends.append(len(kept))
    where = np.array(kept)
    tells = any(tables.logprobs[row] is not None for row in rows[where].tolist())
    reported = results(
        logits[as_tensor(where)] if tells else logits,
        as_tensor(np.array([drawn[at] for at in kept])),
        rows[where],
        tables.logprobs,
        {kept.index(at): what for at, what in follows.items() if at in kept},
    )
    return _by_row(reported, ends, counts)


def _draw_singly(
    logits: Tensor, inputs: StepInputs, drafts: list[int], singly: dict[int, int], draw: Draw
) -> tuple[list[int], Follows]:
    """The tokens at all samples; those from the places in `singly` to the ones that it names are drawn one
    after the other, as far as drafts are right: what may follow in a row with a grammar depends on them.
    """
    rows, positions = inputs.sample_rows, inputs.sample_positions
    drawn, follows = np.full(len(rows), -1, np.int64), dict[int, Forced | str]()
    now = _without(np.arange(len(rows)), singly)
    while len(now):
        where = as_tensor(now)
        found, later = draw(logits if len(now) == len(rows) else logits[where], rows[now], positions[now])
        drawn[now] = found.numpy()
        follows.update({int(now[index]): what for index, what in later.items()})
        right = [at for at in singly if drawn[at] == drafts[at] and at not in follows]
        singly = {at + 1: singly[at] for at in right if at < singly[at]}
        now = np.fromiter(singly, np.int64, len(singly))
    return drawn.tolist(), follows


def _without(index: Int64Array, singly: Mapping[int, int]) -> Int64Array:
    """All samples but those behind the first of rows that are drawn token by token."""
    is_later = np.zeros(len(index), np.bool_)
    for first, last in singly.items():
        is_later[first + 1 : last + 1] = True
    return index[~is_later]


def _by_row(reported: tuple[Sampled, ...], ends: Sequence[int], counts: Sequence[int]) -> tuple[Sampled, ...]:
    """One for each row, with what follows it inside: each row's end, and how many drafts it had."""
    found: list[Sampled] = []
    first = 0
    for end, count in zip(ends, counts, strict=True):
        one = reported[first]
        found.append(replace(one, follows=reported[first + 1 : end], drafted=count) if count else one)
        first = end
    return tuple(found)

"""The grammars of a batch: what the sampler may draw, and what follows from what it drew.

    enter    a row's state is made on a thread, while its prompt is computed
    masks    before a draw: waits for the masks of the rows that draw
    refused  after it: the draws that were made without a mask and must be made again
    take     states advance, and the masks of the next draw are computed on a thread, while the next step
             computes

Bits of tokens are the only thing that the sampler sees. A token that is forced needs no mask: whatever is
drawn there is replaced.

Nor does a row need one where the grammar allows most tokens, as within a string: it draws among all, and only
if the grammar refuses that token, from a mask. The draw takes the largest of scores that are each token's own
(Gumbel-max), so a winner among all is the winner among those that are allowed. That does not hold of top-k,
top-p and min-p, which depend on what other tokens there are: rows with those always draw from masks.

A request that yields its row, or is preempted, comes back with the same answer. Its state is kept meanwhile:
an answer of 2,000 tokens takes a tenth of a second to read again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from llguidance import LLExecutor

from penstock.engine.adjustments import Masks
from penstock.engine.arrays import Int64Array
from penstock.engine.grammar.answer import GrammarAnswer
from penstock.engine.grammar.compiler import CompiledGrammar, GrammarTokens, eos_bits
from penstock.engine.sampler import GREEDY_BELOW
from penstock.schedule.plan import Forced, NewRow
from penstock.types import RequestId, SamplingParams

KnownTokens = Callable[[int, int, int], Sequence[int]]
"""The tokens of a row, from one position up to another, as the runner remembers them."""
_LOST = 1 << 60
KEPT_MAX = 32
"""States of requests without a row that are kept."""
_LOOKED_AT = 32
"""Words of a mask, evenly spread, by which it is told whether most tokens are allowed."""


class _Row:
    """A row whose answer has a grammar. Its fields belong to `job` until that is over."""

    __slots__ = (
        "answer", "grammar", "is_entering", "is_free", "is_gone", "is_wide", "job", "known", "may_be_free",
        "num_prompt", "request_id", "run", "singly", "taken",
    )  # fmt: skip

    def __init__(self, new: NewRow, grammar: CompiledGrammar, *, may_be_free: bool) -> None:
        self.answer: GrammarAnswer | None = None
        self.request_id, self.grammar = new.request_id, grammar
        self.num_prompt = new.num_prompt_tokens
        self.known = len(new.token_ids)
        """The position of the next token that is to be drawn; `_LOST` if `answer` may be anywhere."""
        self.run: tuple[int, ...] = ()
        """The forced tokens before that."""
        self.singly = new.sampling.logprobs is not None
        """Forced tokens are drawn one at a time: each one's log-probability is wanted."""
        self.job: Future[None] | None = None
        self.is_entering = False
        """`job` is its own, and reads the answer; else it fills the masks of several rows."""
        self.is_gone = False
        self.may_be_free = may_be_free
        self.is_free = False
        """The next token is drawn without a mask, and the grammar looks at it afterwards."""
        self.is_wide = False
        """The last mask allowed most tokens."""
        self.taken = -1
        """The position of a token that was drawn so, and of which the answer is behind already."""


class GrammarRows:
    """The grammars of the rows of one runner; one step at a time."""

    def __init__(
        self,
        max_running: int,
        tokens: GrammarTokens,
        num_threads: int,
        known_tokens: KnownTokens,
        *,
        asks_refused: bool = False,
    ) -> None:
        """`asks_refused`: the caller can draw a row again before it takes the draws."""
        self._known_tokens, self._asks_refused = known_tokens, asks_refused
        num_words = -(-tokens.vocab_size // 32)
        self._bits = np.zeros((max_running, num_words), np.int32)
        self._ends = np.array(eos_bits(tokens.eos_ids, num_words), np.uint32).view(np.int32)
        self._stride = max(1, num_words // _LOOKED_AT)
        some = ~self._ends[:: self._stride]
        self._num_most = len(some) * 16
        self._some_goes_on = int.from_bytes(some.tobytes(), "little")
        """Bits of the words that are looked at, but those of ends."""
        self._eos_ids, self._eos_id = frozenset(tokens.eos_ids), tokens.eos_ids[0]
        self._rows: dict[int, _Row] = {}
        self._kept: OrderedDict[RequestId, tuple[GrammarAnswer, list[int]]] = OrderedDict()
        """States of requests whose row was freed, and the answer so far of each; oldest first."""
        self._free: list[tuple[int, int, _Row]] = []
        """Index of the draw, row and its state: of those that `masks` has left without a mask."""
        self._to_take: list[int] | None = None
        """The draws that `take` looks at; None: all."""
        self._library = LLExecutor(num_threads)
        # Two threads: a long answer that is read again must not hold the masks of others up.
        self._entering = ThreadPoolExecutor(1, thread_name_prefix="grammar-enter")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def enter(self, new: NewRow) -> None:
        """A request has the row from now on."""
        self.leave(new.row)
        if new.grammar is None:
            return
        assert isinstance(new.grammar, CompiledGrammar)
        row = _Row(new, new.grammar, may_be_free=self._asks_refused and _draws_by_score(new.sampling))
        self._rows[new.row] = row
        answer = list(new.token_ids[new.num_prompt_tokens :])
        kept = self._kept.pop(new.request_id, None)
        if kept is not None and kept[0].grammar is new.grammar and kept[1] == answer:
            row.answer = kept[0]
        row.is_entering = True
        row.job = self._entering.submit(self._make, row, new.row, answer)

    def leave(self, index: int) -> None:
        """The row is free. Its state is kept, in case that its request comes back."""
        row = self._rows.pop(index, None)
        if row is None:
            return
        row.is_gone = True
        if row.job is not None and not (row.is_entering and row.job.cancel()):
            wait([row.job])  # It writes where the next request's mask will be.
            if row.job.exception() is not None:
                return
        answer = row.answer
        if answer is None or row.known == _LOST or answer.error or answer.is_complete:
            return
        self._kept[row.request_id] = answer, list(self._known_tokens(index, row.num_prompt, row.known))
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def masks(self, rows: Int64Array, positions: Int64Array) -> Masks | None:
        """The tokens that may be drawn at `positions` of `rows`; None: anything."""
        self._free, self._to_take = [], None
        if not self._rows:
            return None
        of_row, settled, known, free = [-1] * len(rows), None, self._rows, self._free
        for i, (index, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            row = known.get(index)
            if row is None:
                continue
            if row.is_free and position == row.known:
                free.append((i, index, row))
                continue
            if row.job is not None and row.job is not settled:
                settled = self._wait(row)
            row.job, row.is_entering = None, False
            if position < row.known - len(row.run):
                self._make_again(row, index, position)
            if position != row.known:
                continue  # It was forced, or a step that failed should have drawn the one before.
            answer = row.answer
            assert answer is not None
            if answer.is_bound or answer.wants_mask:
                if not answer.only_ends:
                    of_row[i] = index
            elif answer.must_go_on:
                self._bits[index] = ~self._ends
                of_row[i] = index
        return Masks(self._bits, np.array(of_row, np.int32)) if max(of_row) >= 0 else None

    def refused(self, token_ids: Int64Array) -> tuple[Int64Array, Masks] | None:
        """Which of the draws that `masks` was asked for are not allowed though there was no mask, by index,
        and the masks to draw them again from; None: all are. To be asked again once they were drawn.

        The first time nothing but the refused token is masked: nearly always the next best one is allowed,
        and it is what a mask would have left. The second time the mask is computed: behind a step, whose
        weights have pushed the library's memory out of the caches, that takes longer than a row's draw.
        """
        if not self._free:
            return None
        to_mask: list[tuple[int, int, _Row]] = []
        once: list[tuple[int, int, _Row]] = []
        drawn, eos_ids, settled = token_ids.tolist(), self._eos_ids, set[int]()
        is_first = self._to_take is None
        for entry in self._free:
            i, index, row = entry
            token_id, answer, position = drawn[i], row.answer, row.known
            assert answer is not None
            if token_id < 0:
                if not is_first:  # Nothing was left but what was refused.
                    to_mask.append(entry)
                continue
            row.known = _LOST  # If this fails.
            # Where nothing but the end may come there is one that is written: the mask tells.
            if token_id in eos_ids:
                row.known = position
                to_mask.append(entry)
            elif not answer.try_take(token_id):
                row.known = position
                (once if is_first else to_mask).append(entry)
                if is_first:
                    bits = self._bits[index].view(np.uint32)
                    bits.fill(0xFFFFFFFF)
                    bits[token_id // 32] ^= np.uint32(1 << token_id % 32)
            elif answer.is_bound:  # Nothing follows, and it stays free: this is all that there is to do.
                row.known, row.run = position + 1, ()
                settled.add(i)
            else:
                row.taken = position
        to_take = range(len(drawn)) if self._to_take is None else self._to_take
        self._to_take, self._free = [i for i in to_take if i not in settled], once
        if to_mask:
            for _, _, row in to_mask:
                row.is_free = False
            self._fill([index for _, index, _ in to_mask], [row for _, _, row in to_mask])
        found = once + [entry for entry in to_mask if _wants_mask(entry[2])]
        if not found:
            return None
        again = np.array([i for i, _, _ in found], np.int64)
        return again, Masks(self._bits, np.array([index for _, index, _ in found], np.int32))

    def __contains__(self, index: int) -> bool:
        """Whether the row's answer has a grammar."""
        return index in self._rows

    def known(self, rows: Int64Array, positions: Int64Array) -> dict[int, int]:
        """Tokens that are known without a draw, by index of `rows`, once `masks` was asked: for a device,
        which remembers what it draws before `take` can replace it.
        """
        found: dict[int, int] = {}
        for i, (index, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            if (row := self._rows.get(index)) is None:
                continue
            answer = row.answer
            assert answer is not None
            if position < row.known:
                found[i] = row.run[position - row.known]
            elif answer.forced:
                found[i] = answer.forced[0]
            elif answer.only_ends:
                found[i] = self._eos_id
        return found

    def take(
        self, rows: Int64Array, positions: Int64Array, token_ids: Int64Array
    ) -> "dict[int, Forced | str]":
        """Advance behind the drawn tokens. Replaces in `token_ids` what was forced.

        Returns the tokens that follow, or why a row failed, by index of `rows`.
        """
        follows: dict[int, Forced | str] = {}
        if not self._rows:
            return follows
        wanted: list[int] = []
        all_rows, all_positions, drawn = rows.tolist(), positions.tolist(), token_ids.tolist()
        for i in range(len(drawn)) if self._to_take is None else self._to_take:
            index, position, token_id = all_rows[i], all_positions[i], drawn[i]
            if (row := self._rows.get(index)) is None or token_id < 0:
                continue
            answer = row.answer
            if position != row.taken:
                if position < row.known:  # Forced by a step before this one, which was on its way already.
                    token_ids[i] = row.run[position - row.known]
                    continue
                if position > row.known:
                    continue  # The step before failed, and this one does not count.
                assert answer is not None
                if answer.forced:
                    token_ids[i] = token_id = answer.forced[0]
                elif answer.only_ends:
                    token_ids[i] = token_id = self._eos_id
                row.known = _LOST  # If this fails.
                answer.take(token_id)
            assert answer is not None
            row.taken, row.known = -1, position + 1
            if not answer.is_bound or row.run:
                row.run = () if row.singly else answer.take_forced()
                row.known += len(row.run)
                if row.run or answer.is_complete:
                    follows[i] = Forced(row.run, answer.is_complete)
                if answer.error is not None:
                    follows[i] = f"the answer's grammar became too complex: {answer.error}"
                    continue
            if answer.is_bound or answer.wants_mask:
                row.is_free = row.is_wide and row.may_be_free and answer.is_bound
                if not row.is_free:
                    wanted.append(index)
        self._free, self._to_take = [], None
        if wanted:
            job = self._masking.submit(self._fill, wanted, [self._rows[index] for index in wanted])
            for index in wanted:
                self._rows[index].job = job
        return follows

    def _wait(self, row: _Row) -> "Future[None] | None":
        """For the row's mask, and those that were computed with it; None: they could not be."""
        if row.job is not None and row.job.exception() is not None:
            row.known = _LOST
            return None
        return row.job

    def _make_again(self, row: _Row, index: int, position: int) -> None:
        """From its known tokens, where its draws were forgotten: a step may run out of memory behind `take`,
        and is planned again.
        """
        row.known, row.run, row.answer = _LOST, (), None  # If this fails.
        row.taken, row.is_free = -1, False
        self._make(row, index, self._known_tokens(index, row.num_prompt, position))
        row.known = position

    # --- on the threads ---------------------------------------------------------------------------

    def _make(self, row: _Row, index: int, token_ids: Sequence[int]) -> None:
        answer = row.answer or GrammarAnswer(row.grammar, _while_wanted(row, token_ids))
        if row.is_gone:
            return  # It may have been read in part.
        row.answer = answer
        if answer.wants_mask:
            self._fill([index], [row])

    def _fill(self, indexes: list[int], rows: list[_Row]) -> None:
        answers = [row.answer for row in rows if row.answer is not None]
        bits = self._bits
        self._library.unsafe_compute_mask_ptr(
            [(answer.matcher, index) for answer, index in zip(answers, indexes, strict=True)],
            bits.ctypes.data,
            bits.strides[0],
            bits.shape[0],
        )
        for row, answer, index in zip(rows, answers, indexes, strict=True):
            if not answer.is_bound and (token_id := answer.may_open_with) is not None:
                bits.view(np.uint32)[index, token_id // 32] |= np.uint32(1 << token_id % 32)
            some = int.from_bytes(bits[index, :: self._stride].tobytes(), "little")
            row.is_wide = some.bit_count() > self._num_most
            answer.only_ends = False
            if not some & self._some_goes_on:  # As after an error, which leaves no way on.
                answer.only_ends = not (bits[index] & ~self._ends).any()
                answer.check()


def _draws_by_score(how: SamplingParams) -> bool:
    """Whether what is drawn among some tokens is what is drawn among all, if it is one of them. Minimum
    lengths look at the mask.
    """
    is_greedy = how.temperature < GREEDY_BELOW
    return how.min_tokens == 0 and (is_greedy or (how.top_k <= 0 and how.top_p >= 1.0 and how.min_p <= 0))


def _wants_mask(row: _Row) -> bool:
    answer = row.answer
    return answer is not None and answer.wants_mask and not answer.only_ends


def _while_wanted(row: _Row, token_ids: Sequence[int]) -> Iterator[int]:
    for token_id in token_ids:
        if row.is_gone:
            return
        yield token_id

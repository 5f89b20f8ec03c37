"""A head that guesses what rows will say from the target's own states: a `ReadsStates` with the weights of
EAGLE's (Li et al. 2024, arXiv 2401.15077).

    state of a token, embedding of the next one -> fc -> a decoder layer without its first norm
                                                -> the next token's state -> the target's output head

A *pair* is a state and the token that followed it. The layer's KV of each pair lies where the target's of the
state's token lies, under the same block table, so that nothing has to be allocated:

    of a row      pairs whose KV is there | pairs whose states are held | the newest pair | guess | ..
    propose                                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^   first pass        later ones

States come with every step and are held until a guess is wanted, or until `HELD` of them are there; then the
KV of all their pairs is computed at once. A row without guesses costs a copy of its state in each step; where
no row is to have any, steps come without states (`StepPlan.reads_states`) and cost nothing.

KV may be missing: of tokens without states, which reads as zeros, and of the pair behind a prefix that was
found in the cache, where there is what the row that computed it left. All of that could make a guess wrong,
and can change no answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from torch.nn.functional import linear as product

from penstock.clock import Clock
from penstock.engine.arrays import Int32Array, Int64Array, as_tensor, token_rows
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.attention.cpu import SCRATCH_BYTES_MAX, CpuAttention
from penstock.engine.inputs import RowTables
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import RMSNorm, RotaryTable, RotaryWeights
from penstock.engine.native.weights import exact, multiply, pack
from penstock.engine.sampler import SampleRows, TokenSampler
from penstock.engine.step_model import Computing
from penstock.engine.weights import CPU, Weights
from penstock.models.spec import DecoderSpec
from penstock.schedule.plan import Drafting, StepPlan
from penstock.schedule.speculation import ROW_DRAFTS_MAX
from penstock.types import BLOCK_TOKENS

HELD = 2 * ROW_DRAFTS_MAX
"""States of a row that are held at most; more than the tokens of a step with drafts, whose successors are
not known when their states come."""

_Product = Callable[[Tensor], Tensor]


@dataclass(slots=True, frozen=True, kw_only=True)
class HeadParts:
    """Everything a head is wired from."""

    spec: DecoderSpec
    """Of its layer."""
    weights: Weights
    table: Tensor
    """`[vocab_size, hidden_size]`: embeddings of tokens."""
    cache: KVCache
    computing: Computing
    sampler: TokenSampler
    logits: Callable[[Tensor, Tensor], None]
    """See `StepModel.head`."""
    step_tokens: int
    max_len: int
    max_running: int
    max_drafts: int
    """Rows that have drafts in one step at most."""


def head_buffer_bytes(spec: DecoderSpec, limits: tuple[int, int, int, int], itemsize: int) -> int:
    """Memory that a head takes beside its weights and KV.

    Args:
        spec: of its layer.
        limits: tokens of a step, positions, rows, rows with drafts.
        itemsize: bytes of a number.
    """
    step_tokens, max_len, max_running, max_drafts = limits
    states = (step_tokens + max_running * HELD) * spec.hidden_size * itemsize
    rotation = max_len * spec.head_dim * 8
    kv, queries = 2 * step_tokens * spec.kv_size * itemsize, step_tokens * spec.q_size * itemsize
    return states + rotation + kv + queries + SCRATCH_BYTES_MAX + max_drafts * spec.vocab_size * 4


class _Layer:
    """The head's weights, and what is computed with them."""

    def __init__(self, parts: HeadParts) -> None:
        spec, weights, self._table, self._computing = parts.spec, parts.weights, parts.table, parts.computing

        def taken(key: str) -> _Product:
            bias = weights.take(f"{key}_bias") if f"{key}_bias" in weights else None
            return self._product(weights.take(key), bias)

        self._fc, self._qkv, self._o = taken("fc"), taken("0.qkv"), taken("0.o")
        self._gate_up, self._down = taken("0.gate_up"), taken("0.down")
        norm = weights.take("0.post_attention_norm")
        self._norm = RMSNorm(norm.float() + spec.norm_offset if spec.norm_offset else norm, spec.norm_eps)
        names = ("0.q_norm", "0.k_norm")
        norms = tuple(weights.take(name) for name in names) if spec.qk_norm else ()
        self._attention = CpuAttention(
            parts.cache,
            RotaryWeights(
                (RotaryTable(spec.layer_rope(0), spec.head_dim, parts.max_len, CPU),),
                ((norms[0], norms[1]),) if norms else (),
                spec.norm_eps,
                spec.num_heads,
                spec.num_kv_heads,
            ),
            spec.attention,
            max_tokens=parts.step_tokens,
        )
        self._head_dim, self._num_heads = spec.head_dim, spec.num_heads
        self._gelus = spec.activation == "gelu_tanh"

    def _product(self, weight: Tensor, bias: Tensor | None) -> _Product:
        native, products = self._computing.native, self._computing.products
        if native is not None:
            packed = pack(native, exact(weight, bias))

            def natively(x: Tensor) -> Tensor:
                out = x.new_empty(len(x), packed.n)
                multiply(native, packed, x, out)
                return out

            return natively
        wide, added = weight.to(products), None if bias is None else bias.to(products)
        return lambda x: product(x.to(products), wide, added).to(x.dtype)

    def store(self, states: Tensor, token_ids: Tensor, batch: AttentionBatch) -> None:
        """Compute the KV of pairs, row by row."""
        self._attention.begin_stores(batch)
        self._stored(self._fc(torch.cat((self._table[token_ids], states), -1)))

    def _stored(self, x: Tensor) -> Tensor:
        """The pairs' queries."""
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        queries = x.new_empty(len(x), self._num_heads, self._head_dim)
        self._attention.store(0, qkv, queries)
        return queries

    def forward(self, states: Tensor, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Of one pair of each row: the states that follow, `[num_rows, hidden_size]`."""
        x = self._fc(torch.cat((self._table[token_ids], states), -1))
        self._attention.begin(batch)
        queries = self._stored(x)
        attended = torch.empty_like(queries)
        self._attention.attend(0, queries, attended)
        x = x + self._o(attended.flatten(1))
        normed = torch.empty_like(x)
        self._norm(x, normed)
        gate, up = self._gate_up(normed).chunk(2, -1)
        gated = gelu(gate, approximate="tanh") if self._gelus else silu(gate)
        return x + self._down((gated * up).contiguous())


@dataclass(slots=True)
class _Pairs:
    """Pairs of one row, the tokens of which are known."""

    row: int
    first: int
    states: Tensor
    """Of the tokens from position `first` on."""


class DraftHead:
    """See above. Not thread-safe: it is the runner's."""

    def __init__(self, parts: HeadParts, clock: Clock) -> None:
        self._parts, self._clock, self._layer = parts, clock, _Layer(parts)
        hidden, dtype = parts.spec.hidden_size, parts.computing.dtype
        self.states = torch.zeros(parts.step_tokens, hidden, dtype=dtype)
        """See `ReadsStates`."""
        self._held = torch.zeros(parts.max_running, HELD, hidden, dtype=dtype)
        self._first = np.zeros(parts.max_running, np.int64)
        """By row: the position of the first state that is held."""
        self._count = np.zeros(parts.max_running, np.int64)
        self._logits = torch.zeros(parts.max_drafts, parts.spec.vocab_size)
        self._holds = False
        """Whether any row has states that are held."""
        self._spent: Drafting | None = None

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        """See `Proposer`."""
        self._spent = None
        for new in plan.new_rows:
            self._count[new.row] = 0
        if self._holds and not plan.reads_states:  # Those of the tokens behind them never come.
            self._count[:] = 0
        self._holds = plan.reads_states
        self._parts.cache.clear([*fresh_blocks, *(copy.block for copy in plan.copies_in)])

    def spent(self) -> Drafting | None:
        """See `Proposer`."""
        return self._spent

    def idle(self) -> bool:
        """See `Proposer`: memory of its KV cache."""
        return self._parts.cache.commit_idly()

    def read(self, rows: Int64Array, firsts: Int32Array, counts: Int32Array, tables: RowTables) -> None:
        """See `ReadsStates`."""
        at, due = 0, list[_Pairs]()
        if (counts == 1).all():
            held = self._count[rows]
            is_next = (held < HELD) & (self._first[rows] + held == firsts)
            for i in np.flatnonzero(~is_next).tolist():  # Few, or all rows would pay when one is full.
                due += self._take(int(rows[i]), int(firsts[i]), self.states[i : i + 1])
            now = np.flatnonzero(is_next)
            self._held[as_tensor(rows[now]), as_tensor(held[now])] = self.states[as_tensor(now)]
            self._count[rows[now]] += 1
        else:
            for row, first, count in zip(rows.tolist(), firsts.tolist(), counts.tolist(), strict=True):
                due += self._take(row, first, self.states[at : at + count])
                at += count
        if due:
            self._store(due, tables)

    def _take(self, row: int, first: int, states: Tensor) -> list[_Pairs]:
        """Hold a row's states; the pairs of those for which there is no room."""
        begin, due = int(self._first[row]), list[_Pairs]()
        is_next = begin <= first <= begin + self._count[row]
        # Behind `first` they are of guesses that were wrong.
        begin, held = (begin, first - begin) if is_next else (first, 0)
        if held + len(states) > HELD:
            if held:
                due.append(_Pairs(row, begin, self._held[row, :held].clone()))
            begin, held = first, 0
            if len(states) > HELD:  # A prompt's: all tokens are known but the one behind the last.
                due.append(_Pairs(row, first, states[:-1]))
                begin, states = first + len(states) - 1, states[-1:]
        self._held[row, held : held + len(states)] = states
        self._first[row], self._count[row] = begin, held + len(states)
        return due

    def _store(self, due: Sequence[_Pairs], tables: RowTables) -> int:
        """Compute the KV of pairs, as many at once as there is room for; how many there were."""
        pieces, room, total = list[_Pairs](), self._parts.step_tokens, 0
        for each in due:
            left = each
            while len(left.states):
                count = min(len(left.states), room)
                pieces.append(_Pairs(left.row, left.first, left.states[:count]))
                left = _Pairs(left.row, left.first + count, left.states[count:])
                room, total = room - count, total + count
                if not room:
                    self._store_pieces(pieces, tables)
                    pieces, room = [], self._parts.step_tokens
        if pieces:
            self._store_pieces(pieces, tables)
        return total

    def _store_pieces(self, pieces: Sequence[_Pairs], tables: RowTables) -> None:
        rows = np.array([each.row for each in pieces], np.int64)
        firsts = np.array([each.first for each in pieces], np.int64)
        counts = np.array([len(each.states) for each in pieces], np.int64)
        of_row, offsets = token_rows(counts.astype(np.int32))
        token_ids = tables.token_ids[rows[of_row], firsts[of_row] + offsets + 1].astype(np.int64)
        states = torch.cat([each.states for each in pieces])
        self._layer.store(states, as_tensor(token_ids), _batch(rows, firsts, counts, tables))

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        """See `Proposer`: drawn as the target draws, with the same parameters and randomness."""
        started_ns, found = self._clock.now_ns(), np.zeros(len(rows), np.int64)
        due, newest, places = list[_Pairs](), list[Tensor](), list[int]()
        limit = np.minimum(limit, self._parts.max_len - known)
        for i in np.argsort(-limit, kind="stable").tolist():
            row, last = int(rows[i]), int(known[i]) - 2
            index = last - int(self._first[row])
            is_there = last >= 0 and 0 <= index < self._count[row] and limit[i] > 0
            if not is_there or len(places) == self._parts.max_drafts:
                continue
            if index:
                due.append(_Pairs(row, last - index, self._held[row, :index].clone()))
            newest.append(self._held[row, index].clone())
            places.append(i)
            self._first[row], self._count[row] = last + 1, 0
        if not places:
            return found
        place = np.array(places, np.int64)
        its_rows, its_known, its_limit = rows[place], known[place], limit[place]
        num_stored = self._store(due, tables)
        self._guess(its_rows, its_known, its_limit, torch.stack(newest), tables)
        found[place] = its_limit
        num_guesses = int(its_limit.sum())
        self._spent = Drafting(
            num_passes=int(its_limit.max()), num_tokens=num_guesses + num_stored, num_sequences=num_guesses,
            kv_read=int((its_limit * its_known).sum()), chunk_pairs=0,
            took_ns=self._clock.now_ns() - started_ns, reads=False,
        )  # fmt: skip
        return found

    def _guess(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, states: Tensor, tables: RowTables
    ) -> None:
        """Pass by pass; rows with the most guesses come first."""
        token_ids = tables.token_ids[rows, known - 1].astype(np.int64)
        for i in range(int(limit.max())):
            active = int((limit > i).sum())
            now, places = rows[:active], known[:active] + i
            batch = _batch(now, places - 2, np.ones(active, np.int64), tables)
            states = self._layer.forward(states[:active], as_tensor(token_ids[:active]), batch)
            logits = self._logits[:active]
            self._parts.logits(states, logits)
            drawn = self._parts.sampler.draw(logits, SampleRows.of(tables, now, places)).numpy()
            tables.append_tokens(now, places, drawn)
            token_ids = np.maximum(drawn, 0)


def _batch(rows: Int64Array, firsts: Int64Array, counts: Int64Array, tables: RowTables) -> AttentionBatch:
    of_row, offsets = token_rows(counts.astype(np.int32))
    width = -(-int((firsts + counts).max()) // BLOCK_TOKENS)
    return AttentionBatch(
        firsts.astype(np.int32),
        counts.astype(np.int32),
        as_tensor(firsts[of_row] + offsets),
        tables.blocks[rows, :width],
    )

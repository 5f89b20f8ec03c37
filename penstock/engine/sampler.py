"""Drawing the next token: greedy, temperature, top-k, top-p, min-p, and log-probabilities.

Draws are Gumbel-max: add `-log(E)` with `E` exponential to every scaled logit and take the largest, which is
a draw from the softmax (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). `E` is no generator's state
but a hash of (seed, position, token id): a request's tokens do not depend on the batch, on preemption or on
the worker that computes them.

Filters apply in the order top-k, top-p (of what top-k left), min-p. Ties rank by lowest id, so each keeps
exactly as many tokens as it says. All operations look at one row only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.adjustments import Masks
from penstock.engine.arrays import Int64Array, as_tensor, float_list, int_list
from penstock.engine.inputs import RowTables, ScoredChunk
from penstock.engine.native.library import NativeLibrary, PsSample
from penstock.schedule.plan import Forced, Sampled, Scored
from penstock.types import TokenLogprob

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""
CANDIDATES = 256
"""Likeliest tokens that top-k and top-p look at first; few distributions need more."""
_CANDIDATES_GROWTH = 16

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def key_pairs(seeds: npt.NDArray[np.uint64], positions: Int64Array) -> npt.NDArray[np.int32]:
    """Two int32 keys `[num_rows, 2]` per (seed, position), by SplitMix64 (Steele et al. 2014)."""
    mixed = _split_mix(_split_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    return mixed.view(np.int32).reshape(-1, 2)


def row_keys(seeds: npt.NDArray[np.uint64], positions: Int64Array) -> tuple[Tensor, Tensor]:
    """`key_pairs` as two columns `[num_rows, 1]`."""
    halves = as_tensor(key_pairs(seeds, positions))
    return halves[:, :1], halves[:, 1:]


def _split_mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def exponential(token_ids: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """Standard exponential variates for `token_ids` (int32, `[num_rows or 1, n]`): `[num_rows, n]`
    float32.
    """
    x = _avalanche(token_ids * -1640531527 + keys[0])
    x = _avalanche(x.bitwise_xor_(keys[1]))
    # 31 bits; small values keep their full relative precision, and they decide who wins.
    uniform = x.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _avalanche(x: Tensor) -> Tensor:
    """A 32-bit integer hash in place (Wellons 2018, "lowbias32"); shifts are logical, so sign bits are
    masked.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(-2073254261)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


@dataclass(slots=True, frozen=True)
class SampleRows:
    """The sampling parameters of the rows that draw in one step; arrays of `[num_rows]`."""

    temperature: npt.NDArray[np.float32]
    top_k: Int64Array
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: Int64Array
    """Of the tokens to be drawn."""
    masks: Masks | None = None
    """None: every row may draw any token."""

    @classmethod
    def of(
        cls, tables: RowTables, rows: Int64Array, positions: Int64Array, masks: Masks | None = None
    ) -> "SampleRows":
        """Gather the parameters of `rows`."""
        return cls(
            tables.temperature[rows],
            tables.top_k[rows],
            tables.top_p[rows],
            tables.min_p[rows],
            tables.seed[rows],
            positions,
            masks,
        )

    def pick(self, index: Int64Array, masks: Masks | None = None) -> "SampleRows":
        """Some of the rows, which draw from `masks`."""
        return SampleRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.seed[index],
            self.position[index],
            masks,
        )


class TokenSampler(Protocol):
    """Draws the next token of every row."""

    def draw(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`[num_rows]` int64 from `[num_rows, vocab_size]` float32 logits, which are not changed; -1 where
        they are not finite numbers.
        """
        ...


class Sampler:
    """Draws for a whole batch at once, in torch. Stateless but for constants."""

    def __init__(self, vocab_size: int, *, candidates: int = CANDIDATES) -> None:
        self._vocab_size = vocab_size
        self._candidates = min(candidates, vocab_size)
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32)[None]

    def draw(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """See `TokenSampler`."""
        if rows.masks is not None:
            logits = rows.masks.hide(logits)
        token_ids = self._draw(logits, rows)
        return token_ids.masked_fill_(logits.amax(-1).isfinite().logical_not_(), -1)  # A NaN is the maximum.

    def _draw(self, logits: Tensor, rows: SampleRows) -> Tensor:
        token_ids = logits.argmax(-1)
        random = rows.temperature >= GREEDY_BELOW
        if not random.any():
            return token_ids
        filtered = random & (((rows.top_k > 0) & (rows.top_k < self._vocab_size)) | (rows.top_p < 1.0))
        for kind, draw in ((random & ~filtered, self._draw_plain), (filtered, self._draw_filtered)):
            index = np.flatnonzero(kind)
            if len(index):
                where = as_tensor(index)
                chosen = rows.pick(index)
                token_ids[where] = draw(_scale(logits[where], chosen), chosen)
        return token_ids

    def _draw_plain(self, scaled: Tensor, rows: SampleRows) -> Tensor:
        scores = scaled - exponential(self._token_ids, row_keys(rows.seed, rows.position)).log_()
        if rows.min_p.any():
            scores.masked_fill_(scaled < as_tensor(min_p_bounds(rows))[:, None], -torch.inf)
        return scores.argmax(-1)

    def _draw_filtered(self, scaled: Tensor, rows: SampleRows) -> Tensor:
        """Look at a few candidates first; rows whose cut may lie further out are done again with more."""
        token_ids, unsure = _draw_among(scaled, rows, self._candidates)
        count = self._candidates
        while len(unsure):
            count = min(count * _CANDIDATES_GROWTH, self._vocab_size)
            where = as_tensor(unsure)
            token_ids[where], still = _draw_among(scaled[where], rows.pick(unsure), count)
            unsure = unsure[still]
        return token_ids


def _draw_among(scaled: Tensor, rows: SampleRows, count: int) -> tuple[Tensor, Int64Array]:
    """Draws from the `count` likeliest tokens, and the indices of rows that `count` was too small for.

    A row's draw is the same for every count that is large enough.
    """
    values, token_ids = _ranked_top(scaled, count)
    num_kept = _num_kept(scaled, values, rows)
    scores = values - exponential(token_ids.int(), row_keys(rows.seed, rows.position)).log_()
    dropped = torch.arange(count) >= num_kept
    if rows.min_p.any():
        dropped |= values < as_tensor(min_p_bounds(rows))[:, None]
    best = scores.masked_fill_(dropped, -torch.inf).argmax(-1, keepdim=True)
    drawn = token_ids.gather(1, best)[:, 0]
    if count == scaled.shape[1]:
        return drawn, np.empty(0, np.int64)
    # The last kept value ties with the last candidate: what comes after may belong to the set, or rank before
    # it.
    at_the_end = (values.gather(1, num_kept - 1) <= values[:, -1:])[:, 0].numpy()
    return drawn, np.flatnonzero(at_the_end | (rows.top_k > count))


def _scale(logits: Tensor, rows: SampleRows) -> Tensor:
    """Logits over temperature, the largest at 0: never an overflow."""
    return (logits - logits.amax(-1, keepdim=True)).div_(as_tensor(rows.temperature)[:, None])


def min_p_bounds(rows: SampleRows) -> npt.NDArray[np.float32]:
    """The scaled logits below which min-p drops a token; -inf where it is off. At 1 the likeliest stays."""
    with np.errstate(divide="ignore"):
        return np.log(rows.min_p)


def _ranked_top(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row as (values, ids), ranked by value, then by lowest id."""
    if count == scaled.shape[1]:
        return torch.sort(scaled, dim=-1, descending=True, stable=True)
    ids = scaled.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _num_kept(scaled: Tensor, values: Tensor, rows: SampleRows) -> Tensor:
    """How many of the ranked `values` `[num_rows, n]` top-k and top-p keep: `[num_rows, 1]`, at least 1."""
    n = values.shape[1]
    weights = values.exp()
    # Summed one after the other in float64, so that a row's sums do not depend on how many are ranked.
    running = weights.cumsum(-1, dtype=torch.float64)
    limits = as_tensor(np.where(rows.top_k > 0, rows.top_k, n)).clamp_(max=n)[:, None]
    unlimited = as_tensor(rows.top_k <= 0)[:, None]
    total = torch.where(
        unlimited, scaled.exp().sum(-1, keepdim=True, dtype=torch.float64), running.gather(1, limits - 1)
    )
    top_p = as_tensor(rows.top_p)[:, None]
    inside = ((running - weights) < top_p * total) | (top_p >= 1.0)
    inside &= torch.arange(n) < limits
    return inside.sum(-1, keepdim=True).clamp_(min=1)


def results(
    logits: Tensor,
    token_ids: Tensor,
    rows: Int64Array,
    wanted: list[int | None],
    follows: Mapping[int, Forced | str] | None = None,
) -> tuple[Sampled, ...]:
    """Pack what was drawn, with log-probabilities where wanted; a row whose draw is -1 gets an error.

    `follows`: by index, the tokens that a row's grammar forces, or why the row failed.
    """
    drawn = int_list(token_ids)
    packed: list[Sampled] = []
    for index, (row, token_id) in enumerate(zip(int_list(as_tensor(rows)), drawn, strict=True)):
        count = wanted[row]
        if token_id < 0:
            packed.append(Sampled(row, 0, error=NOT_NUMBERS))
        elif count is None:
            packed.append(Sampled(row, token_id))
        else:
            one = slice(index, index + 1)
            (logprob,) = logprobs_of(logits[one], token_ids[one], count)
            packed.append(Sampled(row, token_id, logprob))
    for index, forced in (follows or {}).items():
        change = {"error": forced} if isinstance(forced, str) else {"forced": forced}
        packed[index] = msgspec.structs.replace(packed[index], **change)
    return tuple(packed)


class NativeSampler:
    """The same draws with the native kernels, each row by itself on their threads; no vocabulary is sorted.

    A histogram of how far logits lie below the largest finds the interval in which top-k or top-p cuts, and
    only the tokens in that one are ranked. Scores differ from the torch twin's by rounding of the logarithm,
    so a draw differs only where two tokens' scores are equal to the last bits.
    """

    def __init__(self, kernels: NativeLibrary) -> None:
        self._kernels = kernels

    def draw(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """See `TokenSampler`; rows of logits have unit inner stride."""
        num_rows, vocab_size = logits.shape
        assert logits.dtype is torch.float32
        assert logits.stride(1) == 1
        keys = bounds = None
        if (rows.temperature >= GREEDY_BELOW).any():  # Else neither is looked at.
            keys, bounds = key_pairs(rows.seed, rows.position), min_p_bounds(rows)
        token_ids, masks = np.empty(num_rows, np.int64), rows.masks
        self._kernels.sample(
            PsSample(
                logits=logits.data_ptr(), temperature=rows.temperature.ctypes.data,
                top_k=rows.top_k.ctypes.data, top_p=rows.top_p.ctypes.data,
                min_p_bound=None if bounds is None else bounds.ctypes.data,
                keys=None if keys is None else keys.ctypes.data,
                masks=None if masks is None else masks.bits.ctypes.data,
                mask_rows=None if masks is None else masks.of_row.ctypes.data,
                token_ids=token_ids.ctypes.data, rows=num_rows, vocab=vocab_size,
                ld_logits=logits.stride(0), ld_masks=0 if masks is None else masks.bits.shape[1],
                greedy_below=GREEDY_BELOW,
            )
        )  # fmt: skip
        return as_tensor(token_ids)


# Log-probabilities: of tokens that were drawn, and of a prompt's own tokens.
#
# They are the model's own: of the logits before temperature, penalties and filters. Rows are looked at
# one by one, so what else is in the batch, or how a prompt was cut into chunks, changes nothing.

NOT_NUMBERS = "the model's logits for this request are not finite numbers"

_AT_ONCE = 8
"""Rows that are turned into log-probabilities together: they take the memory of their logits once more."""


def logprobs_of(logits: Tensor, targets: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """Log-probability of one token `targets[i]` under each row of `logits` `[n, vocab_size]`, with `count`
    alternatives.

    Alternatives are the likeliest tokens, ties by lowest id.
    """
    logprobs = torch.log_softmax(logits, -1)
    at_target = logprobs.gather(1, targets[:, None])
    chosen, ranks = float_list(at_target[:, 0]), int_list((logprobs > at_target).sum(-1) + 1)
    tops = _top(logprobs, min(count, logprobs.shape[1])) if count > 0 else [()] * len(chosen)
    return tuple(
        TokenLogprob(token_id, logprob, top, rank)
        for token_id, logprob, top, rank in zip(int_list(targets), chosen, tops, ranks, strict=True)
    )


def score_chunks(logits: Tensor, chunks: list[ScoredChunk]) -> tuple[Scored, ...]:
    """Score every chunk; `logits` `[sum of num_scored, vocab_size]` has their rows one after another."""
    scored: list[Scored] = []
    first = 0
    for chunk in chunks:
        rows = logits[first : first + len(chunk.targets)]
        first += len(chunk.targets)
        if rows.amax().isfinite():  # A NaN anywhere is the maximum.
            cuts = range(0, len(rows), _AT_ONCE)
            found = (
                each
                for cut in cuts
                for each in logprobs_of(
                    rows[cut : cut + _AT_ONCE], chunk.targets[cut : cut + _AT_ONCE], chunk.count
                )
            )
            scored.append(Scored(chunk.row, tuple(found)))
        else:
            scored.append(Scored(chunk.row, (), error=NOT_NUMBERS))
    assert first == len(logits), (first, logits.shape)
    return tuple(scored)


def _top(logprobs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    values, ids = logprobs.topk(count, dim=-1)
    return [
        tuple(sorted(zip(int_list(some_ids), float_list(some), strict=True), key=_likeliest_first))
        for some, some_ids in zip(values, ids, strict=True)
    ]


def _likeliest_first(item: tuple[int, float]) -> tuple[float, int]:
    return -item[1], item[0]


def sampler_of(vocab_size: int, native: NativeLibrary | None) -> TokenSampler:
    """The native kernels' where there are some, else torch's."""
    return Sampler(vocab_size) if native is None else NativeSampler(native)

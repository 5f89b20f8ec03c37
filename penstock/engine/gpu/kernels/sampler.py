# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Drawing tokens without a sort: the draws of `engine/sampler.py`, one program per sample.

Passes over a row's logits, which stay in the second-level cache after the first:

1. the largest logit, the lowest id that has it, and whether all are numbers; a greedy row is done;
2. only with top-k or top-p: one pass counts and weighs the tokens within eight distances of the largest. The
   nearest distance within which top-k and top-p must both end bounds the *candidates*; where those are too
   many, a second pass tries eight distances up to it. Then one pass lists the candidates in order of id;
3. only with top-k or top-p: the *cut*, found bit by bit among the candidates, which are in registers. A
   token's distance from the largest, `(top - logit) / temperature`, is never negative, so its bits order as
   an integer does. The largest key below which fewer than k tokens (less than p of the mass) lie is the cut:
   all tokens before it are kept, and the first few that are on it;
4. Gumbel-max over what is kept, with the hash of (seed, position, token id).

A row whose candidates are more than the list holds (a distribution that is nearly flat) takes passes 3 and 4
over all logits. Sums of probabilities that move the cut are float64, so that a program's order of adding does
not. The sums that choose the candidates are float32 with a margin: they only have to choose enough.
"""

import triton
import triton.language as tl

LEVELS = tl.constexpr(8)
"""Bounds of the candidates that a pass tries."""


@triton.jit
def _split_mix(x):
    """SplitMix64's finaliser (Steele et al. 2014) on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _avalanche(x):
    """A 32-bit integer hash (Wellons 2018, "lowbias32") on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log_exponential(ids, key):
    """The logarithm of the standard exponential variate of each token id, for a row's 64-bit key."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    x = _avalanche(_avalanche(ids.to(tl.uint32) * 0x9E3779B9 + low) ^ high)
    uniform = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # log(1 - u) for small u, without losing its digits: log(w) * u / (1 - w) with w = 1 - u as it is rounded.
    rest = 1.0 - uniform
    near_one = rest == 1.0
    logarithm = tl.log(rest) * (uniform / tl.where(near_one, 1.0, 1.0 - rest))
    return tl.log(tl.where(near_one, uniform, -logarithm))


@triton.jit
def _distances(logits, ids, size, top, temperature):
    """How far tokens lie below the largest, at least 0; inf beyond the vocabulary."""
    values = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
    return tl.div_rn(top - values, temperature + tl.zeros_like(values))


@triton.jit
def _reach(logits, size, top, temperature, k, p, by_count, by_mass, levels, BLOCK: tl.constexpr):
    """The least of the ascending distances `levels` `[LEVELS]` within which the cut lies.

    Returns:
        that level, the level before it (0: none), the number of tokens nearer than it, the mass of all tokens
            in float64.
        Where none is known to be enough: inf, the last level, `size`, the mass.
    """
    counts = tl.zeros([LEVELS, BLOCK], tl.int32)
    masses = tl.zeros([LEVELS, BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        distance = _distances(logits, start + tl.arange(0, BLOCK), size, top, temperature)
        weight = tl.exp(-distance)
        within = distance[None, :] < levels[:, None]
        counts += within.to(tl.int32)
        masses += tl.where(within, weight[None, :], 0.0)
        total += weight.to(tl.float64)
    count, mass, all_mass = tl.sum(counts, 1), tl.sum(masses, 1), tl.sum(total, 0)
    enough = ((count > k) | (not by_count)) & ((mass.to(tl.float64) * 0.9999 >= p * all_mass) | (not by_mass))
    reach = tl.min(tl.where(enough, levels, float("inf")), 0)
    short = tl.max(tl.where(enough, 0.0, levels), 0)
    return reach, short, tl.min(tl.where(enough, count, size), 0), all_mass


@triton.jit
def _list(logits, size, top, temperature, reach, listed_logits, listed_ids, BLOCK: tl.constexpr):
    """Write the logits and ids of the tokens nearer than `reach`, in order of id."""
    first = 0
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        near = _distances(logits, ids, size, top, temperature) < reach
        place = first + tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(listed_logits + place, tl.load(logits + ids, mask=ids < size), mask=near)
        tl.store(listed_ids + place, ids, mask=near)
        first += tl.sum(near.to(tl.int32), 0)
    # Values that other threads of the program wrote are read from here on.
    tl.debug_barrier()


@triton.jit
def _before(
    logits, size, top, temperature, keys, weights, key, IN_REGISTERS: tl.constexpr, BLOCK: tl.constexpr
):
    """(tokens, their mass in float64) that lie before a key: among `keys`, or else among all logits."""
    if IN_REGISTERS:
        count = tl.sum((keys < key).to(tl.int32), 0)
        mass = tl.sum(tl.where(keys < key, weights, 0.0).to(tl.float64), 0)
    else:
        counts = tl.zeros([BLOCK], tl.int32)
        masses = tl.zeros([BLOCK], tl.float64)
        for start in range(0, size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            distance = _distances(logits, ids, size, top, temperature)
            ahead = (distance.to(tl.int32, bitcast=True) < key) & (ids < size)
            counts += ahead.to(tl.int32)
            masses += tl.where(ahead, tl.exp(-distance), 0.0).to(tl.float64)
        count, mass = tl.sum(counts, 0), tl.sum(masses, 0)
    return count, mass


@triton.jit
def _cut_top_k(
    logits, size, top, temperature, keys, weights, k, IN_REGISTERS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(key, number of tokens on it) that top-k keeps, besides all tokens before the key."""
    key, ahead, bit = k * 0, k * 0, k * 0 + 30
    while bit >= 0:
        tried = key + (1 << bit)
        count, _ = _before(logits, size, top, temperature, keys, weights, tried, IN_REGISTERS, BLOCK)
        if count <= k:
            key, ahead = tried, count
        # Just k lie before it: no need to look closer.
        bit = tl.where(count == k, -1, bit - 1)
    return key, k - ahead


@triton.jit
def _cut_top_p(
    logits, size, top, temperature, keys, weights, wanted, IN_REGISTERS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """As `_cut_top_k`, for the least likeliest tokens whose mass reaches `wanted` (float64)."""
    key = (wanted * 0).to(tl.int32)
    ahead = wanted * 0
    for step in range(31):
        tried = key + (1 << (30 - step))
        _, mass = _before(logits, size, top, temperature, keys, weights, tried, IN_REGISTERS, BLOCK)
        if mass < wanted:
            key, ahead = tried, mass
    weight = tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)
    # The r-th token on the cut is kept if what lies before it, r - 1 of its like included, is less than
    # wanted.
    on_it = tl.ceil((wanted - ahead) / tl.maximum(weight, 1e-300))
    return key, tl.minimum(tl.maximum(on_it, 1.0), 1e9).to(tl.int32)


@triton.jit
def _cut(
    logits, size, top, temperature, k, p, by_count, by_mass, all_mass, IN_REGISTERS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """(key, number of tokens on it) that top-k and then top-p keep; in registers, `size` is at most
    `BLOCK`.
    """
    distance = _distances(logits, tl.arange(0, BLOCK), size, top, temperature)
    keys, weights = distance.to(tl.int32, bitcast=True), tl.exp(-distance)
    cut, on_cut, mass = k * 0 + 2147483647, k * 0, all_mass
    if by_count:
        cut, on_cut = _cut_top_k(logits, size, top, temperature, keys, weights, k, IN_REGISTERS, BLOCK)
    if by_mass:
        if by_count:
            _, mass = _before(logits, size, top, temperature, keys, weights, cut, IN_REGISTERS, BLOCK)
            mass += on_cut * tl.exp(-cut.to(tl.float32, bitcast=True)).to(tl.float64)
        p_cut, p_on_cut = _cut_top_p(
            logits, size, top, temperature, keys, weights, p * mass, IN_REGISTERS, BLOCK
        )
        on_cut = tl.where(p_cut == cut, tl.minimum(on_cut, p_on_cut), p_on_cut)
        cut = p_cut
    return cut, on_cut


@triton.jit
def _best(
    logits, listed_ids, num_listed, size, top, temperature, row_key, cut, on_cut, floor, filtered,
    BLOCK: tl.constexpr
):  # fmt: skip
    """The id with the highest score among tokens before `cut`, the first `on_cut` on it, and not below
    `floor`.

    `num_listed`: not 0 if `logits` are candidates, whose ids are `listed_ids`; else a place is an id.
    """
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], 2147483647, tl.int32)
    met = on_cut * 0
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        distance = _distances(logits, places, size, top, temperature)
        ids = tl.load(listed_ids + places, mask=places < num_listed, other=0)
        ids = tl.where(num_listed > 0, ids, places)
        kept = (places < size) & (-distance >= floor)
        if filtered:
            keys = distance.to(tl.int32, bitcast=True)
            on_it = ((keys == cut) & (places < size)).to(tl.int32)
            rank = tl.cumsum(on_it, 0) + met
            kept = kept & ((keys < cut) | ((on_it > 0) & (rank <= on_cut)))
            met += tl.sum(on_it, 0)
        scores = tl.where(kept, -distance - _log_exponential(ids, row_key), float("-inf"))
        better = scores > best
        best, best_id = tl.where(better, scores, best), tl.where(better, ids, best_id)
    return tl.min(tl.where(best == tl.max(best, 0), best_id, 2147483647), 0)


@triton.jit
def _largest(logits, size, BLOCK: tl.constexpr):
    """(largest logit, its lowest id, whether all are numbers and none is +inf)."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    top_id = tl.full([BLOCK], 2147483647, tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        wrong = wrong | ((values != values) | (values == float("inf"))).to(tl.int32)
        better = values > top
        top, top_id = tl.where(better, values, top), tl.where(better, ids, top_id)
    largest = tl.max(top, 0)
    healthy = (tl.max(wrong, 0) == 0) & (largest > float("-inf"))
    return largest, tl.min(tl.where(top == largest, top_id, 2147483647), 0), healthy


@triton.jit
def _random(
    logits, size, top, temperature, k, p, min_p, row_key, listed_logits, listed_ids, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw from the filtered softmax."""
    by_count, by_mass = (k > 0) & (k < size), p < 1.0
    cut, on_cut = k * 0 + 2147483647, k * 0
    num_listed = k * 0
    if by_count | by_mass:
        step = tl.arange(0, LEVELS).to(tl.float32) + 1
        reach, short, count, mass = _reach(
            logits, size, top, temperature, k, p, by_count, by_mass, tl.exp2(0.5 * step), BLOCK
        )
        if (count > CAPACITY) & (reach < float("inf")):
            finer = short + (reach - short) * (step / LEVELS)
            reach, short, count, mass = _reach(
                logits, size, top, temperature, k, p, by_count, by_mass, finer, BLOCK
            )
        if (reach < float("inf")) & (count <= CAPACITY):
            _list(logits, size, top, temperature, reach, listed_logits, listed_ids, BLOCK)
            logits, size, num_listed = listed_logits, count, count
            cut, on_cut = _cut(logits, size, top, temperature, k, p, by_count, by_mass, mass, True, CAPACITY)
        else:
            cut, on_cut = _cut(logits, size, top, temperature, k, p, by_count, by_mass, mass, False, BLOCK)
    floor = tl.log(min_p)
    return _best(
        logits, listed_ids, num_listed, size, top, temperature, row_key, cut, on_cut, floor,
        by_count | by_mass, BLOCK
    )  # fmt: skip


@triton.jit
def sample(
    logits, rows, positions, temperatures, top_ks, top_ps, min_ps, seeds, state_token_ids, token_ids, healthy,
    listed_logits, listed_ids, size, token_stride, GREEDY_BELOW: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid `[num_samples]`.

    Args:
        logits: `[num_samples, size]` float32.
        rows, positions: `[num_samples]` int32: rows of the tables, positions of the tokens to be drawn.
        temperatures, top_ks, top_ps, min_ps, seeds: see `RowState`.
        state_token_ids: `[rows, token_stride]` int32, written at (row, position).
        token_ids, healthy: see `Drawn`.
        listed_logits, listed_ids: `[num_samples, CAPACITY]` float32 and int32, for the candidates of filtered
            rows.
    """
    index = tl.program_id(0)
    row, position = tl.load(rows + index), tl.load(positions + index)
    logits += index.to(tl.int64) * size
    top, token_id, is_healthy = _largest(logits, size, BLOCK)
    temperature = tl.load(temperatures + row)
    if is_healthy & (temperature >= GREEDY_BELOW):
        seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
        mixed = _split_mix(seed + 0x9E3779B97F4A7C15) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
        token_id = _random(
            logits, size, top, temperature, tl.load(top_ks + row), tl.load(top_ps + row),
            tl.load(min_ps + row), _split_mix(mixed), listed_logits + index.to(tl.int64) * CAPACITY,
            listed_ids + index.to(tl.int64) * CAPACITY, CAPACITY, BLOCK,
        )  # fmt: skip
    token_id = tl.where(is_healthy, token_id, 0)
    tl.store(token_ids + index, token_id)
    tl.store(healthy + index, is_healthy)
    tl.store(state_token_ids + row.to(tl.int64) * token_stride + position, token_id)

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The layers around attention: RMSNorm, rotation into the cache, and the gates of feed-forward layers.

Each reads its values once and writes them once, so bandwidth decides.
"""

import triton
import triton.language as tl

# RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), alone or after the addition to the residual.
#
# One program per row, the row in registers: read once, written once.
#
# Estimate, unmeasured: add+norm moves 4 rows of hidden values per token (reads x and residual, writes
# residual and the norm). At 1 to 64 tokens of hidden 4096 that is under 2 MB: a launch of about 2-3 us
# inside a graph, no matter the bandwidth. At 8192 tokens 268 MB: 65 us at 4.1 TB/s, 85 % of the nominal
# rate.


@triton.jit
def norm(residual, x, weight, out, size, eps, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Grid `[num_rows]`. With ADD, `residual += x` first, rounded to its type; `out` may be `x`."""
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


# From the fused projection to attention in one pass: head norms, rotation (Su et al. 2021), the write
# into the cache.
#
# A program takes one token and 8 of its heads. Queries go to their own tensor, keys and values to the
# token's slot in the layout of `KVCache`: `[block, layer, keys or values, token, head, dim]`.
#
# Estimate, unmeasured: every value is read once (its rotation partner comes from the same cache line) and
# written once. 8B shape (48 heads of 128), 8192 tokens: 201 MB, 50 us; up to 64 tokens a launch of 2-3 us
# instead of five.


@triton.jit
def _normed(x, flipped, weights, scale):
    """Both the values and their rotation partners times the head's factor and their weights."""
    own, partner = weights
    return x * scale[:, None] * own, flipped * scale[:, None] * partner


@triton.jit(do_not_specialize=["layer"])
def rotate_store(
    qkv, q, cache, slots, positions, cosines, sines, q_norm, k_norm, layer, eps, NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Grid `[num_tokens, ceil((NUM_HEADS + 2 * KV_HEADS) / HEADS)]`.

    Args:
        qkv: `[num_tokens, NUM_HEADS + 2 * KV_HEADS, HEAD_DIM]`.
        q: `[num_tokens, NUM_HEADS, HEAD_DIM]`.
        cache: `KVCache.tensor`.
        slots, positions: `[num_tokens]` int64; slot -1: the token is padding and nothing is stored for it.
        cosines, sines: `[max_len, HEAD_DIM]` float32 of `RotaryTable`; sines carry the sign.
        q_norm, k_norm: `[HEAD_DIM]`, read with NORM.
        FLOAT8: the cache has FP8 (e4m3), whose largest number is 448.
    """
    TURNING: tl.constexpr = NUM_HEADS + KV_HEADS
    ALL: tl.constexpr = NUM_HEADS + 2 * KV_HEADS
    KV_SIZE: tl.constexpr = KV_HEADS * HEAD_DIM
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < ROTARY_DIM, dims - HALF, dims))
    within = dims < HEAD_DIM
    filled = (heads < ALL)[:, None] & within[None, :]
    base = (token * ALL + heads)[:, None] * HEAD_DIM
    raw = tl.load(qkv + base + dims[None, :], mask=filled, other=0.0)
    x = raw.to(tl.float32)
    flipped = tl.load(qkv + base + partner[None, :], mask=filled, other=0.0).to(tl.float32)
    if NORM:
        is_query = (heads < NUM_HEADS)[:, None]
        own = tl.where(
            is_query,
            tl.load(q_norm + dims, mask=within, other=0.0).to(tl.float32)[None, :],
            tl.load(k_norm + dims, mask=within, other=0.0).to(tl.float32)[None, :],
        )
        across = tl.where(
            is_query,
            tl.load(q_norm + partner, mask=within, other=0.0).to(tl.float32)[None, :],
            tl.load(k_norm + partner, mask=within, other=0.0).to(tl.float32)[None, :],
        )
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
        x, flipped = _normed(x, flipped, (own, across), scale)
    angle = tl.load(positions + token) * HEAD_DIM + dims
    cos = tl.load(cosines + angle, mask=within, other=0.0)[None, :]
    sin = tl.load(sines + angle, mask=within, other=0.0)[None, :]
    turned = (x * cos + flipped * sin).to(raw.dtype)
    finished = tl.where((heads < TURNING)[:, None], turned, raw)

    place = (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(q + place, finished, mask=filled & (heads < NUM_HEADS)[:, None])
    slot = tl.load(slots + token)
    of_kv = heads - NUM_HEADS
    part = tl.where(of_kv >= KV_HEADS, 1, 0)
    row = slot + (layer * 2 + part) * BLOCK_TOKENS
    address = (row * KV_SIZE + (of_kv - part * KV_HEADS) * HEAD_DIM)[:, None] + dims[None, :]
    end = tl.where(slot >= 0, ALL, 0)
    if FLOAT8:
        kept = tl.minimum(tl.maximum(finished.to(tl.float32), -448.0), 448.0).to(cache.dtype.element_ty)
    else:
        kept = finished
    tl.store(cache + address, kept, mask=filled & ((heads >= NUM_HEADS) & (heads < end))[:, None])


# The gates of feed-forward layers, SwiGLU's and GeGLU's (Shazeer 2020, arXiv 2002.05202).
#
# Estimate, unmeasured: 3 values moved per inner value and about 10 FLOPs: memory-bound. 8B shape (inner
# 14,336), 8192 tokens: 705 MB, 170 us at 4.1 TB/s; up to 64 tokens it is one launch of 2-3 us.


@triton.jit
def gate_mul(gate_up, out, size, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """`gate_up` `[num_tokens, 2 * size]` to `out` `[num_tokens, size]`.

    Grid `[num_tokens, ceil(size / BLOCK)]`.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + token * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # x * (1 + tanh(u)) / 2 is x / (1 + exp(-2u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        slope = gate
    tl.store(
        out + token * size + columns,
        (gate / (1.0 + tl.exp(-slope)) * up).to(out.dtype.element_ty),
        mask=inside,
    )

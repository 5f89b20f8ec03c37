# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Unified paged attention: every row of a step, whatever its number of new tokens, in one launch for each
kind of item.

A fixed grid of programs works off the items of `worklist.py` from device memory, so a captured graph serves
any step. A program takes one item for one key/value head. Its query rows are
`tokens x query heads of the group`, so that grouped queries fill the matrix unit: 16 rows for a row that
decodes, 128 for a tile of a chunk.

Tiles are 64 positions, four blocks of the cache, whose addresses come from the row's block table. Softmax
runs online in base 2 (Dao et al. 2022, arXiv 2205.14135). A split context leaves normalised partial outputs
with their logsumexp, which `combine` merges in order.

Each kind of item has a launch of its own, because a tile of a chunk wants 8 warps and one that decodes wants
4. With another number of warps a row sum would be added up in another order; since an item's kind depends on
its row alone, what a row gets does not depend on the rest of the step.

A decode step reads 2 * context * kv_heads * head_dim values once, about 2 FLOPs per byte and query head of
the group, far below the ratio at which a GPU is balanced: memory-bound. Measured shares:
`docs/design/004-gpu-execution.md`.
"""

import triton
import triton.language as tl


@triton.jit
def _span(
    acc, top, den, q, span, sight, cache, table, dims, scale, softcap, window,
    block_stride, KV_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Take the tiles from `span[0]` to before `span[1]` into the running softmax; `sight`: rows' (position,
    live).
    """
    first, last = span
    position, live = sight
    for start in range(first, last, TILE):
        places = start + tl.arange(0, TILE)
        known = places < last
        blocks = tl.load(table + places // BLOCK_TOKENS, mask=known, other=0).to(tl.int64)
        base = blocks * block_stride + (places % BLOCK_TOKENS) * KV_SIZE
        inside = dims < HEAD_DIM
        if MASKED:
            k = tl.load(
                cache + base[None, :] + dims[:, None], mask=known[None, :] & inside[:, None], other=0.0
            )
        else:
            k = tl.load(cache + base[None, :] + dims[:, None], mask=inside[:, None], other=0.0)
        # A cache in FP8 is only read as such.
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        factor = scale
        if SOFTCAP:
            scores *= scale
            # cap * tanh(s / cap) as cap * (1 - 2 / (exp(2 s / cap) + 1)); scores are in base 2 afterwards.
            capped = 1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0)
            scores = capped * softcap * 1.4426950408889634
            factor = 1.0
        if MASKED:
            seen = known[None, :] & (places[None, :] <= position[:, None]) & live[:, None]
            if WINDOW:
                seen = seen & (position[:, None] - places[None, :] < window)
            scores = tl.where(seen, scores, float("-inf"))
        # The factor is positive, so the largest score is that of the largest product: scaling and shifting
        # are one operation.
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * factor - shift[:, None])
        keep = tl.exp2(top - shift)
        den = den * keep + tl.sum(weights, 1)
        values = cache + BLOCK_TOKENS * KV_SIZE
        if MASKED:
            v = tl.load(
                values + base[:, None] + dims[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )
        else:
            v = tl.load(values + base[:, None] + dims[None, :], mask=inside[None, :], other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * keep[:, None], input_precision="ieee")
        top = higher
    return acc, top, den


@triton.jit
def _item(
    item, head, q, out, cache, block_tables, partial_outputs, partial_logsumexps, scale, softcap, window,
    table_stride, block_stride, NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SPLIT_LOOP: tl.constexpr,
):  # fmt: skip
    """One item for one key/value head; see `WorkList.items` for the fields."""
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    KV_SIZE: tl.constexpr = KV_HEADS * HEAD_DIM
    token, first_position, queries = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end, place = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    table = block_tables + tl.load(item).to(tl.int64) * table_stride
    dims = tl.arange(0, DIM)
    rows = tl.arange(0, ROWS)
    query, of_group = rows // GROUP, rows % GROUP
    live = query < queries
    position = first_position + query
    heads = head * GROUP + of_group
    places = ((token + query).to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    filled = live[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + places, mask=filled, other=0.0)
    if cache.dtype.element_ty == tl.float8e4nv and q.dtype.element_ty == tl.bfloat16:
        # One instruction makes two numbers of FP8 float16, but several make them bfloat16.
        q_tile = tl.minimum(tl.maximum(q_tile.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    cache += head * HEAD_DIM

    last = tl.minimum(end, first_position + queries)
    if WINDOW:
        nearest = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        begin = tl.maximum(begin, nearest)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    masked_from = begin
    if SPLIT_LOOP:
        # Tiles that every query sees whole need no masks. A live row sees its own position: dead rows do no
        # harm.
        masked_from = tl.maximum(begin, tl.minimum((first_position + 1) // TILE * TILE, last // TILE * TILE))
        acc, top, den = _span(
            acc, top, den, q_tile, (begin, masked_from), (position, live), cache, table, dims, scale, softcap,
            window, block_stride, KV_SIZE, HEAD_DIM, BLOCK_TOKENS, TILE, False, SOFTCAP, False,
        )  # fmt: skip
    acc, top, den = _span(
        acc, top, den, q_tile, (masked_from, last), (position, live), cache, table, dims, scale, softcap,
        window, block_stride, KV_SIZE, HEAD_DIM, BLOCK_TOKENS, TILE, True, SOFTCAP, WINDOW,
    )  # fmt: skip
    empty = den == 0.0
    result = acc / tl.where(empty, 1.0, den)[:, None]
    if place < 0:
        tl.store(out + places, result.to(out.dtype.element_ty), mask=filled)
    else:
        step = tl.load(item + 7)
        partial = (place + query * step).to(tl.int64) * NUM_HEADS + heads
        tl.store(partial_outputs + partial[:, None] * HEAD_DIM + dims[None, :], result, mask=filled)
        logsumexp = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, den)))
        tl.store(partial_logsumexps + partial, logsumexp, mask=live)


@triton.jit(do_not_specialize=["layer", "window"])
def attend(
    q, out, cache, block_tables, items, counts, partial_outputs, partial_logsumexps, layer, scale, softcap,
    window, table_stride, block_stride, NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, ITEM_FIELDS: tl.constexpr, NUM_ITEMS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs.

    Args:
        q, out: `[num_tokens, NUM_HEADS, HEAD_DIM]`.
        cache: `KVCache.tensor`; `block_stride` is the distance between its blocks in values.
        block_tables: `[rows, table_stride]` int32.
        items, counts: `WorkList.items` and `StepBuffer.counts`.
        partial_outputs, partial_logsumexps: see `Partials`.
        scale: of the scores; with log2(e) in it, unless there is a soft cap.
        ROWS: query rows of an item at most.
        NUM_ITEMS, NUM_CHUNKS: the places of the numbers of items and of chunks' tiles among them in `counts`.
        CHUNKS: whether this launch takes the tiles of chunks, which come first, or the other items.
    """
    cache += layer.to(tl.int64) * (2 * BLOCK_TOKENS * KV_HEADS * HEAD_DIM)
    chunks = tl.load(counts + NUM_CHUNKS) * KV_HEADS
    if CHUNKS:
        first, last = chunks * 0, chunks
    else:
        first, last = chunks, tl.load(counts + NUM_ITEMS) * KV_HEADS
    for index in range(first + tl.program_id(0), last, tl.num_programs(0)):
        _item(
            items + index // KV_HEADS * ITEM_FIELDS, index % KV_HEADS, q, out, cache, block_tables,
            partial_outputs, partial_logsumexps, scale, softcap, window, table_stride, block_stride,
            NUM_HEADS, KV_HEADS, HEAD_DIM, DIM, BLOCK_TOKENS, TILE, ROWS, SOFTCAP, WINDOW,
            CHUNKS and not WINDOW,
        )  # fmt: skip


@triton.jit
def combine(
    out, combines, counts, partial_outputs, partial_logsumexps, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, COMBINE_FIELDS: tl.constexpr,
    NUM_COMBINES: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of split contexts, one token's head at a time; see `WorkList.combines`. Grid: any."""
    total = tl.load(counts + NUM_COMBINES) * NUM_HEADS
    dims, piece = tl.arange(0, DIM), tl.arange(0, SPLITS)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        merge, head = combines + index // NUM_HEADS * COMBINE_FIELDS, index % NUM_HEADS
        token, place, count = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
        partial = (place + piece).to(tl.int64) * NUM_HEADS + head
        logsumexp = tl.load(partial_logsumexps + partial, mask=piece < count, other=float("-inf"))
        # Some piece holds the token's own position, so the largest is finite.
        weights = tl.exp2(logsumexp - tl.max(logsumexp, 0))
        filled = (piece < count)[:, None] & (dims < HEAD_DIM)[None, :]
        outputs = tl.load(
            partial_outputs + partial[:, None] * HEAD_DIM + dims[None, :], mask=filled, other=0.0
        )
        result = tl.sum(outputs * weights[:, None], 0) / tl.sum(weights, 0)
        place_out = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
        tl.store(out + place_out, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""A step's inputs from the row tables: token ids, positions, slots, and what is sampled.

Programs of 128 tokens find each token's row by bisection in the rows' first tokens, a few hundred numbers
that stay in the first-level cache.

Estimate, unmeasured: a few KB of traffic; one launch, 3 us.
"""

import triton
import triton.language as tl


@triton.jit
def _tokens(
    index, num_tokens, counts, rows, computed, starts, max_rows, state_token_ids, block_tables, nobody,
    token_stride, table_stride, slots_per_block, token_ids, positions, slots, token_rows,
    BLOCK_TOKENS: tl.constexpr, STEPS: tl.constexpr, NUM_TOKENS: tl.constexpr,
):  # fmt: skip
    """Tokens `index` of the step."""
    live = index < tl.load(counts + NUM_TOKENS)
    low = tl.zeros_like(index)
    high = low + max_rows
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        begun = tl.load(starts + 1 + middle, mask=middle < max_rows, other=0) <= index
        low = tl.where((low < high) & begun, middle + 1, low)
        high = tl.where((low <= middle) & (low < high), middle, high)
    work = tl.minimum(low, max_rows - 1)
    row = tl.where(live, tl.load(rows + work, mask=live, other=0), nobody)
    position = (
        tl.load(computed + work, mask=live, other=0) + index - tl.load(starts + work, mask=live, other=0)
    )
    position = tl.where(live, position, 0)
    wide = row.to(tl.int64)
    block = tl.load(block_tables + wide * table_stride + position // BLOCK_TOKENS, mask=live, other=0)
    slot = block.to(tl.int64) * slots_per_block + position % BLOCK_TOKENS
    token = tl.load(state_token_ids + wide * token_stride + position, mask=live, other=0)
    inside = index < num_tokens
    tl.store(token_ids + index, token.to(tl.int64), mask=inside)
    tl.store(positions + index, position.to(tl.int64), mask=inside)
    tl.store(slots + index, tl.where(live, slot, -1), mask=inside)
    tl.store(token_rows + index, row, mask=inside)


@triton.jit
def _samples(
    index, num_samples, counts, rows, computed, starts, sampled, nobody, sample_tokens, sample_rows,
    sample_positions, NUM_SAMPLES: tl.constexpr,
):  # fmt: skip
    """Samples `index` of the step."""
    live = index < tl.load(counts + NUM_SAMPLES)
    inside = index < num_samples
    work = tl.load(sampled + index, mask=live, other=0)
    end = tl.load(starts + work + 1, mask=live, other=1)
    length = tl.load(computed + work, mask=live, other=0) + end - tl.load(starts + work, mask=live, other=0)
    tl.store(sample_tokens + index, tl.where(live, end - 1, 0).to(tl.int64), mask=inside)
    tl.store(
        sample_rows + index, tl.where(live, tl.load(rows + work, mask=live, other=0), nobody), mask=inside
    )
    tl.store(sample_positions + index, tl.where(live, length, 0), mask=inside)


@triton.jit
def prepare(
    counts, rows, computed, starts, sampled, max_rows, state_token_ids, block_tables, nobody, token_stride,
    table_stride, slots_per_block, token_ids, positions, slots, token_rows, sample_tokens, sample_rows,
    sample_positions, num_tokens, num_samples, BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    STEPS: tl.constexpr, NUM_TOKENS: tl.constexpr, NUM_SAMPLES: tl.constexpr,
):  # fmt: skip
    """Grid `[ceil(num_tokens / BLOCK) + ceil(num_samples / BLOCK)]`; see `StepBuffer` and `StepInputs` for
    the rest.

    STEPS: bisections that find one of `max_rows` rows. NUM_TOKENS, NUM_SAMPLES: places in `counts`.
    """
    program, token_programs = tl.program_id(0), tl.cdiv(num_tokens, BLOCK)
    if program < token_programs:
        _tokens(
            program * BLOCK + tl.arange(0, BLOCK), num_tokens, counts, rows, computed, starts, max_rows,
            state_token_ids, block_tables, nobody, token_stride, table_stride, slots_per_block, token_ids,
            positions, slots, token_rows, BLOCK_TOKENS, STEPS, NUM_TOKENS,
        )  # fmt: skip
    else:
        _samples(
            (program - token_programs) * BLOCK + tl.arange(0, BLOCK), num_samples, counts, rows, computed,
            starts, sampled, nobody, sample_tokens, sample_rows, sample_positions, NUM_SAMPLES,
        )  # fmt: skip

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Products with weights of four or eight bits, which are turned into the inputs' type in registers: W4A16 and
W8A16; the same weights made dense; and inputs rounded to FP8.

A step of few tokens reads every weight once and little else, so its time is their bytes over the memory's
bandwidth: at four bits a quarter of bfloat16's. Weights are the left operand of the product, so that the many
outputs fill the matrix unit's rows and the few tokens its columns. From a few hundred tokens on the product
is bound by arithmetic: then `unpack` and a dense product are faster (`gpu/packed.py` chooses).
"""

import triton
import triton.language as tl

_SPREAD = tl.constexpr("""{
    .reg .b32 word;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $4, 4;
    lop3.b32 $1, word, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $4, 8;
    lop3.b32 $2, word, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 word, $4, 12;
    lop3.b32 $3, word, 0x000F000F, 0x43004300, 0xEA;
}""")
"""Two words of four numbers each to numbers of bfloat16, plus 128: the bits of 128 + v are those of 128 with
v in the last places. Triton's own code takes several times the instructions."""


@triton.jit
def _quarters(words, like, BF16: tl.constexpr, FP16: tl.constexpr):
    """The four numbers of each word, plus 128, 1024 or nothing."""
    if BF16:
        return tl.inline_asm_elementwise(
            _SPREAD, "=r,=r,=r,=r,r", [words], is_pure=True, pack=2,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        )  # fmt: skip
    if FP16:
        return (
            ((words & 15) | 0x6400).to(tl.float16, bitcast=True),
            (((words >> 4) & 15) | 0x6400).to(tl.float16, bitcast=True),
            (((words >> 8) & 15) | 0x6400).to(tl.float16, bitcast=True),
            (((words >> 12) & 15) | 0x6400).to(tl.float16, bitcast=True),
        )
    return (
        (words & 15).to(like),
        ((words >> 4) & 15).to(like),
        ((words >> 8) & 15).to(like),
        ((words >> 12) & 15).to(like),
    )


@triton.jit
def _centre(zeros, place, like, mask, OFFSET: tl.constexpr, MIDDLE: tl.constexpr):
    """The number to subtract from those of `_quarters`: it is exact."""
    if OFFSET == 1:
        centre = MIDDLE - tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
    else:
        centre = tl.full(place.shape, MIDDLE, tl.float32)
    return centre.to(like)[:, None]


@triton.jit
def _scale_of(scales, rows, group, num_groups, mask, SCALES: tl.constexpr):
    """Of a program's outputs in one group of inputs: see `matmul`."""
    place = rows if SCALES == 0 else rows // 128 * num_groups + group
    return tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _four_bits(
    acc, words, from_x, scales, zeros, rows, is_row, is_token, span, n, word_stride, like: tl.constexpr,
    GROUP: tl.constexpr, QUARTER: tl.constexpr, MIDDLE: tl.constexpr, OFFSET: tl.constexpr,
    BF16: tl.constexpr, FP16: tl.constexpr,
):  # fmt: skip
    """Add the products of the tiles from `span[0]` to before `span[1]`: see `matmul`."""
    first, last = span
    # A tile of inputs is a group, or two of 32.
    TILE: tl.constexpr = 4 * QUARTER
    inner = tl.arange(0, QUARTER)
    from_words = words + rows.to(tl.int64)[:, None] * word_stride + inner[None, :]
    from_x += inner[:, None]
    for tile in range(first, last):
        word = tl.load(from_words + tile * QUARTER, mask=is_row[:, None], other=0)
        x0 = tl.load(from_x + tile * TILE, mask=is_token[None, :], other=0.0)
        x1 = tl.load(from_x + tile * TILE + QUARTER, mask=is_token[None, :], other=0.0)
        x2 = tl.load(from_x + tile * TILE + 2 * QUARTER, mask=is_token[None, :], other=0.0)
        x3 = tl.load(from_x + tile * TILE + 3 * QUARTER, mask=is_token[None, :], other=0.0)
        w0, w1, w2, w3 = _quarters(word, like, BF16, FP16)
        group = tile * (TILE // GROUP)
        place = group * n + rows
        centre = _centre(zeros, place, like, is_row, OFFSET, MIDDLE)
        scale = tl.load(scales + place, mask=is_row, other=0.0).to(tl.float32)[:, None]
        part = tl.dot(w0 - centre, x0, input_precision="ieee")
        part = tl.dot(w1 - centre, x1, part, input_precision="ieee")
        if GROUP < TILE:
            acc += part * scale
            centre = _centre(zeros, place + n, like, is_row, OFFSET, MIDDLE)
            scale = tl.load(scales + place + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
            part = tl.dot(w2 - centre, x2, input_precision="ieee")
        else:
            part = tl.dot(w2 - centre, x2, part, input_precision="ieee")
        part = tl.dot(w3 - centre, x3, part, input_precision="ieee")
        acc += part * scale
        if OFFSET == 2:
            early = tl.sum(x0.to(tl.float32), 0) + tl.sum(x1.to(tl.float32), 0)
            late = tl.sum(x2.to(tl.float32), 0) + tl.sum(x3.to(tl.float32), 0)
            shift = tl.load(zeros + place, mask=is_row, other=0.0)
            if GROUP < TILE:
                acc += shift[:, None] * early[None, :]
                shift = tl.load(zeros + place + n, mask=is_row, other=0.0)
                acc += shift[:, None] * late[None, :]
            else:
                acc += shift[:, None] * (early + late)[None, :]
    return acc


@triton.jit
def _eight_bits(
    acc, words, from_x, scales, rows, is_row, is_token, span, word_stride, scale_stride, like: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """As `_four_bits`, with a number in each word."""
    first, last = span
    inner = tl.arange(0, GROUP)
    from_words = words + rows.to(tl.int64)[:, None] * word_stride + inner[None, :]
    for group in range(first, last):
        place = group * GROUP
        weights = tl.load(from_words + place, mask=is_row[:, None], other=0.0).to(like)
        inputs = tl.load(from_x + place + inner[:, None], mask=is_token[None, :], other=0.0)
        if SCALES == 0:
            acc = tl.dot(weights, inputs, acc, input_precision="ieee")
        else:
            scale = _scale_of(scales, rows, group, scale_stride, is_row, SCALES)
            acc += tl.dot(weights, inputs, input_precision="ieee") * scale[:, None]
    if SCALES == 0:
        acc *= _scale_of(scales, rows, 0, scale_stride, is_row, SCALES)[:, None]
    return acc


@triton.jit
def matmul(
    x, words, scales, zeros, bias, out, num_tokens, n, k, groups_per_split, word_stride, scale_stride,
    GROUP: tl.constexpr, QUARTER: tl.constexpr, MIDDLE: tl.constexpr, FOUR: tl.constexpr,
    SCALES: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BF16: tl.constexpr, FP16: tl.constexpr,
):  # fmt: skip
    """`out = x W^T + bias`. Grid `[ceil(n / BLOCK_N), ceil(num_tokens / BLOCK_M), SPLITS]`.

    Args:
        x: `[num_tokens, k]`.
        words: see `PackedWeight`; with FOUR int16 `[n, k / 4]`, else int8 or FP8 `[n, k]`.
        scales: with FOUR `[k / GROUP, n]`; else one for each output `[n]` (SCALES 0), or for each block of
            128 by 128 `[n / 128, scale_stride]` (1).
        zeros: `[k / GROUP, n]` what is added to the integers (OFFSET 1), or to what they stand for (2).
        bias: `[n]`, read with BIAS.
        out: `[num_tokens, n]`; with SPLITS > 1 float32 `[SPLITS, num_tokens, n]`, which `add_splits` adds up.
        word_stride: from one output's words to the next one's.
        groups_per_split: how many tiles of inputs a program takes.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_row, is_token = rows < n, tokens < num_tokens
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, k // (64 if FOUR and GROUP == 32 else GROUP))
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    from_x = x + tokens.to(tl.int64)[None, :] * k
    if FOUR:
        acc = _four_bits(
            acc, words, from_x, scales, zeros, rows, is_row, is_token, (first, last), n, word_stride,
            x.dtype.element_ty, GROUP, QUARTER, MIDDLE, OFFSET, BF16, FP16,
        )  # fmt: skip
    else:
        acc = _eight_bits(
            acc, words, from_x, scales, rows, is_row, is_token, (first, last), word_stride, scale_stride,
            x.dtype.element_ty, GROUP, SCALES,
        )  # fmt: skip
    place = tokens.to(tl.int64)[None, :] * n + rows[:, None]
    mask = is_row[:, None] & is_token[None, :]
    if SPLITS > 1:
        tl.store(out + split.to(tl.int64) * num_tokens * n + place, acc, mask=mask)
    else:
        if BIAS:
            acc += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_splits(
    parts, bias, out, size, n, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the pieces of `matmul` in order: `parts` `[SPLITS, size]` to `out` `[size]`, rows of `n`.

    Grid `[ceil(size / BLOCK)]`.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size.to(tl.int64) + places, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + places % n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def unpack(
    words, scales, zeros, out, n, k, word_stride, scale_stride, GROUP: tl.constexpr, QUARTER: tl.constexpr,
    FOUR: tl.constexpr, SCALES: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The dense weight, `out` `[n, k]`. Grid `[ceil(n / ROWS), tiles]`; arguments as for `matmul`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    is_row = rows < n
    if FOUR:
        inner = tl.arange(0, QUARTER)
        to_out = out + rows.to(tl.int64)[:, None] * k + tile * (4 * QUARTER) + inner[None, :]
        word = tl.load(
            words + rows.to(tl.int64)[:, None] * word_stride + tile * QUARTER + inner[None, :],
            mask=is_row[:, None], other=0,
        )  # fmt: skip
        for quarter in tl.static_range(4):
            group = (tile * 4 + quarter) * QUARTER // GROUP
            place = group * n + rows
            scale = tl.load(scales + place, mask=is_row, other=0.0).to(tl.float32)[:, None]
            made = ((word >> (4 * quarter)) & 15).to(tl.float32) - 8.0
            if OFFSET:
                shift = tl.load(zeros + place, mask=is_row, other=0).to(tl.float32)[:, None]
            if OFFSET == 1:
                made += shift
            made *= scale
            if OFFSET == 2:
                made += shift
            tl.store(to_out + quarter * QUARTER, made.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        inner = tl.arange(0, GROUP)
        scale = _scale_of(scales, rows, tile, scale_stride, is_row, SCALES)[:, None]
        place = rows.to(tl.int64)[:, None] * k + tile * GROUP + inner[None, :]
        values = tl.load(words + place, mask=is_row[:, None], other=0.0).to(tl.float32)
        tl.store(out + place, (values * scale).to(out.dtype.element_ty), mask=is_row[:, None])


FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def round_rows(x, out, scales, k, scale_stride, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Inputs as FP8 with a scale of their own: for each token (WHOLE), or for each 128 inputs of it.

    Grid `[num_tokens]`, with WHOLE; else `[num_tokens, k / BLOCK]`, where BLOCK is 128.

    Args:
        x, out: `[num_tokens, k]`.
        scales: float32 `[num_tokens]`; without WHOLE `[k / BLOCK, scale_stride]`.
    """
    token = tl.program_id(0)
    row = token.to(tl.int64) * k
    inner = tl.arange(0, BLOCK)
    if WHOLE:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, k, BLOCK):
            part = tl.load(x + row + start + inner, mask=start + inner < k, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(part))
        scale = tl.maximum(tl.max(largest, 0), 1e-10) / FLOAT8_MAX
        tl.store(scales + token, scale)
        for start in range(0, k, BLOCK):
            mask = start + inner < k
            part = tl.load(x + row + start + inner, mask=mask, other=0.0).to(tl.float32) / scale
            part = tl.minimum(tl.maximum(part, -FLOAT8_MAX), FLOAT8_MAX)
            tl.store(out + row + start + inner, part.to(out.dtype.element_ty), mask=mask)
    else:
        block = tl.program_id(1)
        part = tl.load(x + row + block * BLOCK + inner).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(part), 0), 1e-10) / FLOAT8_MAX
        tl.store(scales + block * scale_stride + token, scale)
        part = tl.minimum(tl.maximum(part / scale, -FLOAT8_MAX), FLOAT8_MAX)
        tl.store(out + row + block * BLOCK + inner, part.to(out.dtype.element_ty))

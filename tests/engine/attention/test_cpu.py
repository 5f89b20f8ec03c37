"""CPU attention against the formula, and against itself in every other batch."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from reference_attention import ReferenceAttention
from torch import Tensor

from penstock.engine.attention.base import Attention, AttentionBatch
from penstock.engine.attention.cpu import CpuAttention
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import RowTiles
from penstock.engine.layers.rowwise import RotaryTable, RotaryWeights
from penstock.models.spec import AttentionSpec, DecoderSpec, RopeSpec

NUM_BLOCKS = 200
MAX_TOKENS = 512
SHAPES = [(6, 2, 16), (4, 4, 24), (8, 1, 64), (4, 2, 128), (3, 3, 26)]
"""(query heads, key/value heads, head size)."""
SPECS = {
    "plain": AttentionSpec(),
    "window": AttentionSpec(windows=(0, 20)),
    "window over tiles": AttentionSpec(windows=(0, 131)),
    "window, cap and scale": AttentionSpec(windows=(0, 128), softcap=2.0, scale=0.4),
}
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Model:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype

    rounded: bool = False

    def cache(self) -> KVCache:
        spec = DecoderSpec(
            architecture="", vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=2,
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.dim, max_position=1024,
            norm_eps=1e-6, rope=RopeSpec(),
        )  # fmt: skip
        return KVCache(spec, NUM_BLOCKS, self.dtype, torch.device("cpu"), rounded=self.rounded)

    def rotary(self) -> RotaryWeights:
        table = RotaryTable(RopeSpec(), self.dim, 1024, torch.device("cpu"))
        norms = (torch.linspace(0.5, 1.5, self.dim), torch.linspace(1.5, 0.5, self.dim))
        return RotaryWeights((table, table), (norms, norms), 1e-6, self.heads, self.kv_heads)

    def qkv(self, num_tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_tokens, self.heads + 2 * self.kv_heads, self.dim, generator=generator).to(
            self.dtype
        )


def run(attention: Attention, model: Model, rows: list[tuple[int, int, list[int]]], qkv: Tensor) -> Tensor:
    """One step of rows (computed, tokens, blocks); `qkv` is that of the step's tokens.

    The second layer's output.
    """
    positions = [np.arange(computed, computed + tokens) for computed, tokens, _ in rows]
    width = max(len(blocks) for _, _, blocks in rows)
    attention.begin(
        AttentionBatch(
            np.array([computed for computed, _, _ in rows], np.int32),
            np.array([tokens for _, tokens, _ in rows], np.int32),
            torch.from_numpy(np.concatenate(positions)),
            np.array([blocks + [0] * (width - len(blocks)) for _, _, blocks in rows], np.int32),
        )
    )
    q = qkv.new_empty(len(qkv), model.heads, model.dim)
    out = torch.empty_like(q)
    attention.store(1, qkv, q)
    attention.attend(1, q, out)
    return out


def sequences(model: Model, lengths: list[int]) -> list[tuple[list[int], Tensor]]:
    """Blocks (scattered) and projections of some rows."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    return [([order.pop() for _ in range(-(-n // 16))], model.qkv(n, seed)) for seed, n in enumerate(lengths)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_mixed_batch_equals_the_formula(spec: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    model = Model(*shape, dtype)
    computed, tokens = [0, 0, 127, 128, 250, 300, 40], [1, 150, 1, 1, 30, 1, 100]
    rows = sequences(model, [a + b for a, b in zip(computed, tokens, strict=True)])
    outputs = []
    for kind in (CpuAttention(model.cache(), model.rotary(), SPECS[spec], max_tokens=MAX_TOKENS),
                 ReferenceAttention(model.cache(), model.rotary(), SPECS[spec])):  # fmt: skip
        for start, (blocks, qkv) in zip(computed, rows, strict=True):
            if start:
                run(kind, model, [(0, start, blocks)], qkv[:start])
        batch = [(a, b, blocks) for a, b, (blocks, _) in zip(computed, tokens, rows, strict=True)]
        outputs.append(
            run(kind, model, batch, torch.cat([qkv[a:] for a, (_, qkv) in zip(computed, rows, strict=True)]))
        )
    ours, formula = outputs
    assert (ours.float() - formula.float()).abs().max() <= (1e-5 if dtype == torch.float32 else 0.04)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "spec"), [(shape, "plain") for shape in SHAPES] + [(SHAPES[0], spec) for spec in SPECS]
)
def test_chunks_and_company_change_no_bit(shape: tuple[int, int, int], spec: str, dtype: torch.dtype) -> None:
    check_company(shape, spec, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_company_change_no_bit_of_a_rounded_cache(dtype: torch.dtype) -> None:
    check_company((4, 2, 16), "window over tiles", dtype, chunks=(3, 100), rounded=True)


@pytest.mark.parametrize("shape", [(6, 2, 16), (8, 1, 64)])
def test_threads_that_share_the_rows_change_no_bit(shape: tuple[int, int, int]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_company(shape, "plain", torch.float32, chunks=(1, 3, 100))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 8, 128)])
def test_few_row_counts_are_enough(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a library whose other row counts do not agree: a group of 4 or 8 queries may need a call for
    each.
    """
    monkeypatch.setattr("penstock.engine.attention.tiles.query_tiles", lambda *_: RowTiles(sizes))
    for spec, shape in (("plain", (8, 1, 64)), ("window over tiles", (8, 2, 16))):
        model = Model(*shape, torch.float32)
        (row,) = sequences(model, [200])
        outputs = []
        for kind in (CpuAttention(model.cache(), model.rotary(), SPECS[spec], max_tokens=MAX_TOKENS),
                     ReferenceAttention(model.cache(), model.rotary(), SPECS[spec])):  # fmt: skip
            first = run(kind, model, [(0, 199, row[0])], row[1][:199])
            outputs.append(torch.cat((first, run(kind, model, [(199, 1, row[0])], row[1][199:]))))
        assert (outputs[0] - outputs[1]).abs().max() <= 1e-5


def check_company(
    shape: tuple[int, int, int],
    spec: str,
    dtype: torch.dtype,
    chunks: tuple[int, ...] = (1, 3, 16, 33, 100, 300),
    rounded: bool = False,
) -> None:
    model = Model(*shape, dtype, rounded)
    length = 330
    (blocks, qkv), (others, other_qkv) = sequences(model, [length, 300])
    whole = run(
        CpuAttention(model.cache(), model.rotary(), SPECS[spec], max_tokens=MAX_TOKENS),
        model,
        [(0, length, blocks)],
        qkv,
    )
    for chunk in chunks:
        attention = CpuAttention(model.cache(), model.rotary(), SPECS[spec], max_tokens=MAX_TOKENS)
        run(attention, model, [(0, 299, others)], other_qkv[:299])
        pieces = []
        for start in range(0, length, chunk):
            tokens = min(chunk, length - start)
            batch = [(299, 1, others), (start, tokens, blocks)]
            mixed = torch.cat((other_qkv[299:], qkv[start : start + tokens]))
            pieces.append(run(attention, model, batch, mixed)[1:])
        assert torch.equal(torch.cat(pieces), whole), f"chunks of {chunk}"


def test_a_row_too_long_for_the_scratch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(4, 2, 16, torch.float32)
    rows = sequences(model, [300, 100, 200])
    outputs = []
    for scratch in (32 << 20, 2 * 128 * 2 * 16 * 4 * 2, 1):
        monkeypatch.setattr("penstock.engine.attention.cpu.SCRATCH_BYTES_MAX", scratch)
        attention = CpuAttention(model.cache(), model.rotary(), max_tokens=MAX_TOKENS)
        for blocks, qkv in rows:
            run(attention, model, [(0, len(qkv) - 1, blocks)], qkv[:-1])
        batch = [(len(qkv) - 1, 1, blocks) for blocks, qkv in rows]
        outputs.append(run(attention, model, batch, torch.cat([qkv[-1:] for _, qkv in rows])))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("tokens", [1, 40])
def test_nan_stays_in_its_own_row(tokens: int) -> None:
    model = Model(4, 2, 16, torch.float32)
    (blocks, qkv), (others, other_qkv) = sequences(model, [200, 150])
    clean = None
    for poison in (0.0, torch.nan):
        attention = CpuAttention(model.cache(), model.rotary(), max_tokens=MAX_TOKENS)
        for table, values in ((blocks, qkv), (others, other_qkv + poison)):
            run(attention, model, [(0, len(values) - tokens, table)], values[:-tokens])
        batch = [(200 - tokens, tokens, blocks), (150 - tokens, tokens, others)]
        out = run(attention, model, batch, torch.cat((qkv[-tokens:], other_qkv[-tokens:] + poison)))
        clean = out if clean is None else clean
        assert torch.equal(out[:tokens], clean[:tokens])
    assert out[tokens:].isnan().all()

import pytest
import torch
from native_ops import Rows, paged_attention

from penstock.engine.kv_cache import ROUNDED_EXTRA_BYTES, round_heads
from penstock.engine.native.decoder import LayerCache

DTYPES = [torch.bfloat16, torch.float32]


class World:
    """Rows of random length in a cache whose other blocks hold NaN, with an exact answer for any query."""

    def __init__(
        self, rng, lens, *, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16, block_size=16, rounded=False
    ):
        self.lens, self.heads, self.kv_heads, self.dim = lens, heads, kv_heads, dim
        num_blocks = sum(-(-n // block_size) for n in lens) + 3
        shape = (num_blocks, 2, 2, block_size, kv_heads)
        if rounded:  # As a scale too these bytes are a NaN.
            self.cache = torch.full((*shape, dim + ROUNDED_EXTRA_BYTES), -1, dtype=torch.int8)
        else:
            self.cache = torch.full((*shape, dim), float("nan"), dtype=dtype)
        self.layer = LayerCache(self.cache, 1, dtype)
        self.kv = [torch.randn(2, n, kv_heads, dim, generator=rng).to(dtype) for n in lens]
        kept = [round_heads(kv) for kv in self.kv] if rounded else self.kv
        if rounded:
            self.kv = [each[..., :dim] * each[..., dim:].view(torch.float32) for each in kept]
        self.q = [torch.randn(n, heads, dim, generator=rng).to(dtype) for n in lens]
        free = torch.randperm(num_blocks, generator=rng).tolist()
        width = max(-(-n // block_size) for n in lens)
        self.tables = torch.zeros(len(lens), width, dtype=torch.int32)
        for row, n in enumerate(lens):
            for first in range(0, n, block_size):
                block = free.pop()
                self.tables[row, first // block_size] = block
                piece = kept[row][:, first : first + block_size]
                self.cache[block, 1, :, : piece.shape[1]] = piece

    def attend(self, kernels, chunks, **options):
        """Outputs of `chunks`, a list of (row, first token, last token + 1)."""
        starts = torch.tensor([0, *(b - a for _, a, b in chunks)]).cumsum(0).int()
        rows = Rows(
            block_tables=self.tables[[row for row, _, _ in chunks]].contiguous(),
            query_starts=starts,
            context_lens=torch.tensor([b for _, _, b in chunks], dtype=torch.int32),
        )
        q = torch.cat([self.q[row][a:b] for row, a, b in chunks]).flatten(1)
        rows.check(q.shape[0], self.layer.num_blocks, self.layer.block_size)
        out = paged_attention(kernels, q, self.layer, rows, scale=self.dim**-0.5, **options)
        return [piece.view(-1, self.heads, self.dim) for piece in out.split([b - a for _, a, b in chunks])]

    def exact(self, row, *, window=0, softcap=0.0):
        q, (k, v) = self.q[row].double(), self.kv[row].double()
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(self.lens[row])
        seen = at[:, None] >= at
        if window:
            seen &= at[:, None] - at < window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def near(got, want):
    tolerance = 1e-2 if got.dtype is torch.bfloat16 else 3e-6
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (7, 1), (20, 1)])
def test_matches_exact_attention(kernels, rng, dim, heads, kv_heads, dtype):
    world = World(rng, [1, 37, 130], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    for row, got in enumerate(world.attend(kernels, [(0, 0, 1), (1, 0, 37), (2, 0, 130)])):
        near(got, world.exact(row))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 80, 128, 256])
def test_a_rounded_cache_is_what_its_integers_say(kernels, rng, dim, dtype):
    """And no other row, chunk or later token moves a bit."""
    world = World(rng, [1, 37, 200], heads=6, kv_heads=2, dim=dim, dtype=dtype, rounded=True)
    whole = world.attend(kernels, [(0, 0, 1), (1, 0, 37), (2, 0, 200)], window=70, softcap=3.0)
    for row, got in enumerate(whole):
        near(got, world.exact(row, window=70, softcap=3.0))
    plain = world.attend(kernels, [(2, 0, 200)])[0]
    near(plain, world.exact(2))
    for first, last in ((0, 1), (1, 63), (63, 130), (130, 200)):
        assert torch.equal(world.attend(kernels, [(2, first, last)])[0], plain[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0), (5, 0), (64, 0), (100, 0), (0, 2.0), (33, 5.0)])
def test_window_and_softcap(kernels, rng, window, softcap, dtype):
    world = World(rng, [200], dtype=dtype)
    near(
        world.attend(kernels, [(0, 0, 200)], window=window, softcap=softcap)[0],
        world.exact(0, window=window, softcap=softcap),
    )


def test_larger_blocks(kernels, rng):
    world = World(rng, [50, 90], block_size=48)
    for row, got in enumerate(world.attend(kernels, [(0, 0, 50), (1, 0, 90)])):
        near(got, world.exact(row))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "window"), [(64, 0), (80, 0), (128, 70)])
def test_bits_do_not_depend_on_batch_chunks_or_threads(kernels, rng, dim, window, dtype):
    lens = [1, 40, 64, 65, 129, 257]
    world = World(rng, lens, heads=6, kv_heads=2, dim=dim, dtype=dtype)
    kernels.set_threads(1)
    whole = world.attend(kernels, [(row, 0, n) for row, n in enumerate(lens)], window=window)
    for threads, chunks in ((2, (16, 100)), (3, (1, 7, 48))):
        kernels.set_threads(threads)
        for chunk in chunks:
            for row, n in enumerate(lens):
                pieces = [
                    world.attend(kernels, [(row, a, min(a + chunk, n))], window=window)[0]
                    for a in range(0, n, chunk)
                ]
                assert torch.equal(torch.cat(pieces), whole[row]), f"row of {n} in chunks of {chunk}"
        # Decodes and chunks of several rows side by side, in another order.
        mixed = [(5, 256, 257), (2, 63, 64), (4, 0, 129), (1, 39, 40), (3, 11, 65), (0, 0, 1)]
        for (row, a, b), got in zip(mixed, world.attend(kernels, mixed, window=window), strict=True):
            assert torch.equal(got, whole[row][a:b])


def test_a_row_of_nan_harms_no_other(kernels, rng):
    world = World(rng, [70, 70])
    clean = world.attend(kernels, [(0, 0, 70), (1, 0, 70)])
    world.q[0][3] = float("nan")
    got = world.attend(kernels, [(0, 0, 70), (1, 0, 70)])
    assert got[0][3].isnan().all()
    others = torch.arange(70) != 3
    assert torch.equal(got[0][others], clean[0][others])
    assert torch.equal(got[1], clean[1])


def test_refusals(kernels, rng):
    world = World(rng, [20, 30])
    tables = world.tables

    def rows(starts, lens, block_tables=tables):
        return Rows(
            block_tables=block_tables,
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lens, dtype=torch.int32),
        )

    for message, bad in {
        "from 0 to 5": rows([0, 3, 4], [20, 30]),
        "row 1: 4 new tokens of 3": rows([0, 1, 5], [20, 3]),
        "row 0: 60 tokens need 4 blocks": rows([0, 1, 5], [60, 30]),
        "query_starts must be": rows([0, 5], [20, 30]),
        "name blocks below": rows([0, 1, 5], [20, 30], tables + 1000),
        "block_tables must be": rows([0, 1, 5], [20, 30], tables.long()),
    }.items():
        with pytest.raises(ValueError, match=message):
            bad.check(5, world.layer.num_blocks, 16)
    with pytest.raises(ValueError, match="does not fit the cache"):
        paged_attention(
            kernels, torch.zeros(1, 100, dtype=torch.bfloat16), world.layer, rows([0, 1], [1]), scale=1.0
        )

import pytest
import torch
import torch.nn.functional as F
from native_ops import Rope, rms_norm, rope_write, silu_mul

from penstock.engine.kv_cache import ROUNDED_EXTRA_BYTES, round_heads
from penstock.engine.native.decoder import LayerCache

DTYPES = [torch.bfloat16, torch.float32]


def near(got, want, dtype):
    tolerance = 8e-3 if dtype is torch.bfloat16 else 2e-6
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


def exact_norm(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16, 33, 384, 896, 4096])
def test_rms_norm(kernels, rng, n, dtype):
    x, weight = torch.randn(40, n, generator=rng).to(dtype), torch.rand(n, generator=rng)
    got = rms_norm(kernels, x, weight, 1e-5)
    near(got, exact_norm(x, weight, 1e-5), dtype)
    for m in (1, 2, 17):
        assert torch.equal(rms_norm(kernels, x[:m], weight, 1e-5), got[:m])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_to_the_residual_first(kernels, rng, dtype):
    x, residual = (torch.randn(9, 100, generator=rng).to(dtype) for _ in range(2))
    want = (x.float() + residual.float()).to(dtype)
    weight = torch.ones(100)
    got = rms_norm(kernels, x, weight, 1e-6, residual=residual)
    assert torch.equal(residual, want)
    assert torch.equal(got, rms_norm(kernels, want, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_added_to_what_is_there(kernels, rng, dtype):
    x, weight = torch.randn(9, 100, generator=rng).to(dtype), torch.rand(100, generator=rng)
    out = torch.randn(9, 100, generator=rng).to(dtype)
    want = out.double() + exact_norm(x, weight, 1e-6)
    assert rms_norm(kernels, x, weight, 1e-6, out=out, add=True) is out
    near(out, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16, 50, 1024])
def test_silu_mul(kernels, rng, n, dtype):
    x = (torch.randn(30, 2 * n, generator=rng) * 4).to(dtype)
    got = silu_mul(kernels, x)
    near(got, F.silu(x[:, :n].double()) * x[:, n:].double(), dtype)
    assert torch.equal(silu_mul(kernels, x[7:8]), got[7:8])


def test_silu_of_extremes(kernels):
    gate = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30, float("inf"), float("nan")]])
    got = silu_mul(kernels, torch.cat((gate, torch.ones_like(gate)), dim=1))[0]
    assert torch.allclose(got[:8], F.silu(gate)[0, :8], rtol=1e-6, atol=1e-30)
    assert got[8].isinf()
    assert got[9].isnan()


def rotate(x, cos, sin):
    """The Hugging Face formula, on [t, heads, dim] with a table of half the rotary size."""
    half = cos.shape[-1]
    cos, sin, x = cos[:, None].double(), sin[:, None].double(), x.double()
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(32, 32), (64, 64), (80, 80), (96, 40), (128, 128), (256, 256)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(kernels, rng, dim, rotary, dtype, normed):
    heads, kv_heads, t = 6, 2, 21
    qkv = torch.randn(t, (heads + 2 * kv_heads) * dim, generator=rng).to(dtype)
    angles = torch.rand(64, rotary // 2, generator=rng) * 6
    norms = torch.rand(2, dim, generator=rng) + 0.5
    rope = Rope(
        cos=angles.cos(), sin=angles.sin(), eps=1e-6,
        q_norm=norms[0] if normed else None, k_norm=norms[1] if normed else None,
    )  # fmt: skip
    positions = torch.randint(0, 64, (t,), generator=rng)
    slots = torch.randperm(3 * 16, generator=rng)[:t]
    slots[4] = -1
    cache = torch.zeros(3, 4, 2, 16, kv_heads, dim, dtype=dtype)
    got = rope_write(kernels, qkv, rope, LayerCache(cache, 2), positions, slots)

    q, k, v = qkv.view(t, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = exact_norm(q, norms[0], 1e-6), exact_norm(k, norms[1], 1e-6)
    cos, sin = rope.cos[positions], rope.sin[positions]
    near(got.view(t, heads, dim), rotate(q, cos, sin), dtype)
    stored = cache[:, 2].transpose(0, 1).reshape(2, 48, kv_heads, dim)
    kept = slots >= 0
    near(stored[0][slots[kept]], rotate(k, cos, sin)[kept], dtype)
    assert torch.equal(stored[1][slots[kept]], v[kept])
    assert cache.count_nonzero() == stored[:, slots[kept]].count_nonzero()  # Nothing else was written.

    again = torch.zeros_like(cache)
    for i in range(t):
        one = rope_write(
            kernels, qkv[i : i + 1], rope, LayerCache(again, 2), positions[i : i + 1], slots[i : i + 1]
        )
        assert torch.equal(one[0], got[i])
    assert torch.equal(again, cache)
    rounded = torch.zeros(3, 4, 2, 16, kv_heads, dim + ROUNDED_EXTRA_BYTES, dtype=torch.int8)
    rope_write(kernels, qkv, rope, LayerCache(rounded, 2, dtype), positions, slots)
    assert torch.equal(rounded, round_heads(cache))


def test_refusals(kernels, rng):
    x, weight = torch.randn(3, 16, generator=rng), torch.ones(16)
    cache = LayerCache(torch.zeros(2, 1, 2, 16, 1, 16), 0)
    rope = Rope(cos=torch.ones(8, 8), sin=torch.ones(8, 8))
    qkv, ids = torch.randn(2, 48, generator=rng), torch.zeros(2, dtype=torch.int64)
    for message, call in {
        "x must be": lambda: rms_norm(kernels, x, torch.ones(15), 1e-6),
        "weight must be 16 contiguous float32": lambda: rms_norm(kernels, x, weight.bfloat16(), 1e-6),
        "residual is": lambda: rms_norm(kernels, x, weight, 1e-6, residual=x.bfloat16()),
        "x must be .*2n": lambda: silu_mul(kernels, torch.ones(2, 3)),
        "layer 1 of 1": lambda: LayerCache(torch.zeros(2, 1, 2, 16, 1, 16), 1),
        "multiples of 16": lambda: LayerCache(torch.zeros(2, 1, 2, 16, 1, 24), 0),
        "not a KV cache": lambda: LayerCache(torch.zeros(2, 1, 3, 16, 1, 16), 0),
        "does not fit": lambda: rope_write(kernels, qkv[:, :40], rope, cache, ids, ids),
        "positions has 8": lambda: rope_write(kernels, qkv, rope, cache, ids + 8, ids),
        "slots has 32": lambda: rope_write(kernels, qkv, rope, cache, ids, ids + 32),
        "slots must be": lambda: rope_write(kernels, qkv, rope, cache, ids, ids.int()),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from native_ops import linear

from penstock.engine.native.library import Epilogue, Type
from penstock.engine.native.packing import Packing
from penstock.engine.native.weights import Matrix, can_stack, exact, int4, int8, pack, pack_stacked

# Odd sizes on purpose: n and k that are multiples of no tile, one panel, several pieces of k.
SHAPES = [(1, 1), (7, 5), (32, 32), (33, 31), (48, 100), (96, 384), (130, 257), (384, 1024), (70, 2050)]
ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 100]


def normal(rng, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=rng).to(dtype)


def worst(got, want):
    return ((got.float() - want).abs().max() / want.abs().max().clamp(min=1e-6)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_torch(kernels, rng, n, k, dtype):
    weight, bias = normal(rng, n, k, dtype=dtype), normal(rng, n, dtype=dtype)
    packed = pack(kernels, exact(weight, bias))
    for m in (1, 2, 17, 40):
        x = normal(rng, m, k, dtype=dtype)
        want = F.linear(x.double(), weight.double(), bias.double())
        got = linear(kernels, packed, x, out_dtype=torch.float32)
        assert worst(got, want) < 1e-5
        if dtype is torch.bfloat16:
            assert torch.equal(linear(kernels, packed, x), got.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gate_up_and_residual(kernels, rng, dtype):
    gate, up = normal(rng, 75, 96, dtype=dtype), normal(rng, 75, 96, dtype=dtype)
    packed = pack(kernels, exact(gate), exact(up))
    x, residual = normal(rng, 20, 96, dtype=dtype), normal(rng, 20, 75, dtype=dtype)
    want = F.silu(F.linear(x.double(), gate.double())) * F.linear(x.double(), up.double())
    got = linear(kernels, packed, x, out_dtype=torch.float32)
    assert worst(got, want) < 1e-5
    summed = residual.clone()
    linear(kernels, packed, x, residual=summed, out=summed)
    assert worst(summed, want + residual.double()) < (1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gate_may_be_gelu(kernels, rng, dtype):
    gate, up = normal(rng, 75, 96, dtype=dtype), normal(rng, 75, 96, dtype=dtype)
    packed = pack(kernels, exact(gate), exact(up), Epilogue.GELU_MUL)
    x = normal(rng, 40, 96, dtype=dtype)
    sums = F.linear(x.double(), gate.double())
    want = F.gelu(sums, approximate="tanh") * F.linear(x.double(), up.double())
    got = linear(kernels, packed, x, out_dtype=torch.float32)
    assert worst(got, want) < 1e-5
    assert torch.equal(linear(kernels, packed, x[7:8], out_dtype=torch.float32), got[7:8])


def test_gelu_of_extremes(kernels):
    x = torch.tensor([-1e18, -200.0, -12.0, -1e-4, 0.0, 12.0, 200.0, 1e18, float("inf"), float("nan")])[
        :, None
    ]
    one = torch.ones(1, 1)
    packed = pack(kernels, exact(one), exact(one), Epilogue.GELU_MUL)
    got = linear(kernels, packed, torch.where(x.isfinite(), x, 1.0))[:8, 0]
    want = F.gelu(x[:8, 0].double(), approximate="tanh") * x[:8, 0].double()
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-30)
    assert not linear(kernels, packed, x)[8:].isfinite().any()


def every_kind(kernels, rng, n, k):
    weight = normal(rng, n, k)
    yield pack(kernels, exact(weight)), torch.bfloat16
    yield pack(kernels, exact(weight.float())), torch.float32
    yield pack(kernels, exact(weight[: n // 2]), exact(weight[n // 2 : n // 2 * 2])), torch.bfloat16
    yield pack(kernels, int4(kernels, weight)), torch.bfloat16
    yield (
        pack(kernels, int4(kernels, weight[: n // 2]), int4(kernels, weight[n // 2 : n // 2 * 2])),
        torch.bfloat16,
    )
    if kernels.supports(Type.I8):
        yield pack(kernels, int8(kernels, weight)), torch.bfloat16


def test_parts_are_packed_as_the_whole_would_be(kernels, rng):
    parts = [normal(rng, n, 200) for n in (64, 32, 50)]
    whole, bias = torch.cat(parts), normal(rng, 146)
    assert not can_stack(parts[::-1])
    makers = [exact, partial(int4, kernels)] + [partial(int8, kernels)] * kernels.supports(Type.I8)
    for make in makers:
        packing = Packing(kernels)
        apart = pack_stacked(packing, [make(part) for part in parts], bias)
        packing.finish()
        together = pack(kernels, make(whole, bias))
        assert (apart.n, apart.k, apart.kind) == (together.n, together.k, together.kind)
        assert len(apart.tensors) == len(together.tensors) > 1
        assert all(map(torch.equal, apart.tensors, together.tensors))


@pytest.mark.parametrize(("n", "k"), [(96, 384), (70, 2050)])
def test_a_row_has_the_same_bits_in_any_batch(kernels, rng, n, k):
    for packed, dtype in every_kind(kernels, rng, n, k):
        x = normal(rng, 130, k, dtype=dtype)
        whole = linear(kernels, packed, x, out_dtype=torch.float32)
        for m in range(1, 131):
            assert torch.equal(linear(kernels, packed, x[:m], out_dtype=torch.float32), whole[:m]), (
                f"{m} rows"
            )
        assert torch.equal(linear(kernels, packed, x[77:78], out_dtype=torch.float32), whole[77:78])


def test_bits_do_not_depend_on_threads_or_on_pieces_of_k(kernels, rng):
    weight = normal(rng, 64, 4096)
    packed, x = pack(kernels, exact(weight)), normal(rng, 600, 4096)  # 600 rows: two passes, k in pieces
    kernels.set_threads(1)
    alone = linear(kernels, packed, x)
    one_by_one = torch.cat([linear(kernels, packed, x[i : i + 1]) for i in range(0, 600, 37)])
    assert torch.equal(alone[::37], one_by_one)
    for threads in (2, 3, 5):
        kernels.set_threads(threads)
        assert torch.equal(linear(kernels, packed, x), alone)


def test_int8_matches_exact_integer_arithmetic(kernels, rng):
    if not kernels.supports(Type.I8):
        pytest.skip(f"{kernels.isa} has no int8 dot products")
    for n, k in SHAPES:
        weight, x = normal(rng, n, k), normal(rng, 19, k)
        packed = pack(kernels, int8(kernels, weight))
        values, scale = int8(kernels, weight).values, int8(kernels, weight).scale
        x_scale = x.float().abs().amax(1) / 127
        rounded = torch.round(x.float() * (1 / x_scale)[:, None])
        want = (rounded.double() @ values.double().T) * x_scale[:, None].double() * scale.double()
        got = linear(kernels, packed, x, out_dtype=torch.float32)
        assert worst(got, want) < 1e-6
        assert torch.equal(got, linear(kernels, packed, x.float(), out_dtype=torch.float32))
    exact = F.linear(x.double(), weight.double())
    assert (got - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_the_largest_integers_do_not_saturate(kernels, rows):
    """A checkpoint's own -128 too: sums of products of bytes pass through sixteen bits where there is no
    instruction for four of them.
    """
    k = 256
    x = torch.full((rows, k), 127.0)
    x[:, 1::3] = -127.0
    for value in (-128, 127):
        values = torch.full((40, k), value, dtype=torch.int8)
        values[:, ::2] *= 1 if value > 0 else -1  # -128 stays what it is.
        packed = pack(kernels, Matrix(values=values, scale=torch.ones(40)))
        got = linear(kernels, packed, x, out_dtype=torch.float32)
        assert torch.equal(got, x @ values.float().T)
    for group in (32, 128):
        for value in (0, 15):
            values = torch.full((40, k), value, dtype=torch.uint8)
            packed = pack(kernels, Matrix(values=values, scale=torch.ones(40, k // group), group=group))
            for signed in (x, x.abs(), -x.abs()):
                got = linear(kernels, packed, signed, out_dtype=torch.float32)
                assert torch.equal(got, signed @ (values.float() - 8).T)


def test_int8_gate_up(kernels, rng):
    if not kernels.supports(Type.I8):
        pytest.skip(f"{kernels.isa} has no int8 dot products")
    gate, up, x = normal(rng, 50, 128), normal(rng, 50, 128), normal(rng, 33, 128)
    want = F.silu(F.linear(x.double(), gate.double())) * F.linear(x.double(), up.double())
    got = linear(kernels, pack(kernels, int8(kernels, gate), int8(kernels, up)), x)
    assert (got - want).norm() / want.norm() < 0.03


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (40, 100), (70, 512), (33, 1000)])
def test_int4_matches_its_definition(kernels, rng, n, k, group):
    groups = -(-k // group)
    scale = torch.rand(n, groups, generator=rng)
    zero = torch.randint(0, 16, (n, groups), generator=rng)
    values = torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8)
    spread = torch.arange(k) // group
    bias = normal(rng, n)
    for offset, weight in {
        None: (values.double() - 8) * scale.double()[:, spread],
        (8 - zero) * scale: (values.double() - zero[:, spread]) * scale.double()[:, spread],
    }.items():
        packed = pack(kernels, Matrix(values=values, bias=bias, scale=scale, offset=offset, group=group))
        for m in (1, 9, 40):
            x = normal(rng, m, k)
            got = linear(kernels, packed, x, out_dtype=torch.float32)
            assert worst(got, F.linear(rounded_by_group(x, group), weight, bias.double())) < 1e-5
            assert torch.equal(got, linear(kernels, packed, x.float(), out_dtype=torch.float32))
            exact_inputs = F.linear(x.double(), weight)
            assert (got - bias - exact_inputs).norm() / exact_inputs.norm() < 0.02


def rounded_by_group(x, group):
    """Inputs as int8 products see them, one scale for each group of a row."""
    padded = F.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    scale = padded.abs().amax(2, keepdim=True) / 127
    rounded = torch.round(padded * torch.where(scale > 0, 1 / scale, 0))
    return (rounded.double() * scale.double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_rounds_to_the_nearest(kernels, rng, dtype):
    weight = normal(rng, 9, 101, dtype=dtype)
    weight[4] = 0
    matrix, wide = int8(kernels, weight), weight.float()
    assert torch.equal(matrix.scale, wide.abs().amax(1) / 127)
    inverse = torch.where(matrix.scale > 0, 1 / matrix.scale, 0)
    assert torch.equal(matrix.values.float(), torch.round(wide * inverse[:, None]))
    with pytest.raises(ValueError, match="to round"):
        int8(kernels, weight.T)


def test_int4_rounds_to_the_nearest_of_sixteen(kernels, rng):
    weight = torch.randn(6, 256, generator=rng)
    matrix = int4(kernels, weight, group=64)
    step = matrix.scale.repeat_interleave(64, 1)
    back = (matrix.values.float() - 8) * step
    # Only at the end of the range without a mirror is more than half a step lost.
    assert ((back - weight).abs() <= step.abs() * torch.where(matrix.values == 15, 1.0, 0.5) + 1e-6).all()
    assert int4(kernels, torch.zeros(2, 64)).values.unique().tolist() == [8]
    assert [int4(kernels, torch.zeros(1, k)).group for k in (4864, 896, 96, 100)] == [128, 128, 32, 32]


def test_views_with_wide_rows_and_odd_addresses(kernels, rng):
    weight = normal(rng, 40, 96)
    packed, wide = pack(kernels, exact(weight)), normal(rng, 9, 300)
    x = wide[:, 33 : 33 + 96]
    want = linear(kernels, packed, x.contiguous())
    out = torch.zeros(9, 77, dtype=torch.bfloat16)
    linear(kernels, packed, x, out=out[:, 3:43])
    assert torch.equal(out[:, 3:43], want)
    assert out[:, :3].count_nonzero() == 0
    assert out[:, 43:].count_nonzero() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_shows_and_harms_no_other(kernels, rng, bad):
    for packed, dtype in every_kind(kernels, rng, 64, 64):
        x = normal(rng, 20, 64, dtype=dtype)
        clean = linear(kernels, packed, x)
        x[5, 9] = bad
        got = linear(kernels, packed, x)
        assert not got[5].isfinite().all()
        others = torch.arange(20) != 5
        assert torch.equal(got[others], clean[others])


def test_no_rows(kernels, rng):
    packed = pack(kernels, exact(normal(rng, 8, 8)))
    assert linear(kernels, packed, normal(rng, 0, 8)).shape == (0, 8)


def test_wrong_shapes_are_refused_by_name(kernels, rng):
    packed = pack(kernels, exact(normal(rng, 8, 16)))
    x = normal(rng, 3, 16)
    for message, call in {
        "x must be": lambda: linear(kernels, packed, normal(rng, 3, 15)),
        "with strides": lambda: linear(kernels, packed, normal(rng, 16, 3).T),
        "the weight BF16": lambda: linear(kernels, packed, x.float()),
        "out must be": lambda: linear(kernels, packed, x, out=torch.empty(3, 9)),
        "residual must be": lambda: linear(kernels, packed, x, residual=normal(rng, 2, 8)),
        "residual is": lambda: linear(kernels, packed, x, residual=torch.zeros(3, 8)),
        r"a weight must be .* not \[8\]": lambda: exact(normal(rng, 8)),
        "not .* float16": lambda: exact(torch.zeros(8, 8, dtype=torch.float16)),
        "bias of": lambda: exact(normal(rng, 8, 8), normal(rng, 7)),
        "must be alike": lambda: pack(kernels, exact(normal(rng, 8, 8)), exact(normal(rng, 7, 8))),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()

"""Every kernel against its torch twin, in Triton's interpreter.

float32 and float16 only: the interpreter computes products of bfloat16 wrongly.
"""

import pytest
import torch
from device_steps import CPU, Heads, Row, device_step, limits, sampling_state
from torch import Tensor

from penstock.engine.gpu.layers import DeviceAttention
from penstock.engine.gpu.ops import AttentionLayer, HeadRotation, Ops, Partials
from penstock.engine.gpu.step import DeviceStep, Drawn, RowState
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.gpu.triton_ops import TritonOps
from penstock.engine.kv_cache import KVCache
from penstock.engine.sampler import Sampler
from penstock.models.spec import AttentionSpec, RopeSpec

# numpy tells of infinities that are meant: exp of a large number in a sigmoid, the logarithm of a min-p that
# is off.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value):RuntimeWarning")
TWIN = TorchOps()
OURS = TritonOps(CPU, num_programs=3)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    half = ours.dtype == torch.float16
    torch.testing.assert_close(ours, theirs, atol=4e-3 if half else 2e-5, rtol=4e-3 if half else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [48, 128])
def test_norms(size: int, dtype: torch.dtype) -> None:
    weight, x = random(size) * 0.1 + 1, random(5, size, seed=1, dtype=dtype)
    results = []
    for ops in (OURS, TWIN):
        out, given, residual = torch.empty_like(x), x.clone(), random(5, size, seed=2, dtype=dtype)
        ops.norm(x, weight, 1e-6, out)
        ops.add_norm(residual, given, weight, 1e-6, given)
        results.append((out, residual, given))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates(name: str) -> None:
    gate_up = random(3, 2 * 1100) * 4
    ours, theirs = torch.empty(3, 1100), torch.empty(3, 1100)
    getattr(OURS, name)(gate_up, ours)
    getattr(TWIN, name)(gate_up, theirs)
    assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [[Row(17, 1, True)], [Row(30, 1, True), Row(0, 129), Row(5, 40, True)]])
def test_prepare(rows: list[Row]) -> None:
    bounds, made = limits(), []
    for ops in (OURS, TWIN):
        step = device_step(rows, bounds, padding=3)
        step.state.token_ids.copy_(torch.arange(step.state.token_ids.numel()).view_as(step.state.token_ids))
        ops.prepare(step, slots_per_block=64)
        made.append(step.inputs)
    for name in made[0].__dataclass_fields__:
        assert torch.equal(getattr(made[0], name), getattr(made[1], name)), name


@pytest.mark.parametrize(
    "heads",
    [
        Heads(6, 2, 16),
        Heads(4, 4, 24, qk_norm=False),
        Heads(5, 1, 32, torch.float16, RopeSpec(partial=0.5)),
        Heads(3, 3, 96, rope=RopeSpec(partial=0.75), qk_norm=False),
    ],
    ids=lambda heads: f"{heads.heads} over {heads.kv_heads} x {heads.dim}",
)
def test_rotate_store(heads: Heads) -> None:
    step = device_step([Row(21, 1), Row(3, 20)], limits(), padding=2)
    rotary, results = heads.rotary(), []
    qkv = heads.qkv(23, seed=1)
    for ops in (OURS, TWIN):
        cache, q = heads.cache(), torch.zeros(23, heads.heads, heads.dim, dtype=heads.dtype)
        ops.prepare(step, cache.pages_per_block * 16)
        rotation = HeadRotation(rotary.tables[1], rotary.head_norms[1] if heads.qk_norm else None, 1e-6)
        ops.rotate_store(qkv, q, cache, 1, step, rotation)
        results.append((q, cache.tensor))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)
    assert results[0][1][:, 0].abs().sum() == 0  # The other layer, and
    assert results[0][1][-1].abs().sum() == 0  # nobody's block, stay as they were.


def test_rotate_store_in_float8() -> None:
    """Numbers that FP8 holds, or that are too large for it, at the first position, which turns nothing:
    Triton's interpreter rounds others wrongly.
    """
    heads = Heads(2, 1, 16, qk_norm=False)
    step = device_step([Row(0, 1)], limits(), padding=2)
    qkv = heads.qkv(3, seed=1).to(torch.float8_e4m3fn).float()
    qkv[0, 2:, 3] = torch.tensor([1e4, -1e4])
    rotation, results = HeadRotation(heads.rotary().tables[1], None, 1e-6), []
    for ops in (OURS, TWIN):
        cache, q = heads.cache(float8=True), torch.zeros(3, 2, 16)
        ops.prepare(step, cache.pages_per_block * 16)
        ops.rotate_store(qkv, q, cache, 1, step, rotation)
        results.append((q, cache.tensor.float()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert float(results[0][1].max()) == -float(results[0][1].min()) == 448.0


def test_attention_over_a_cache_in_float8() -> None:
    heads = Heads(4, 2, 16)
    cache = heads.cache(float8=True)
    cache.tensor.copy_(random(*cache.tensor.shape, seed=9))
    how, found = AttentionLayer(1, 0.3, 0.0, 0), []
    for ops in (OURS, TWIN):
        step = device_step([Row(299, 1), Row(40, 25)], limits(group_size=2))
        found.append(attended(ops, heads, step, how, cache))
    assert_close(*found)


def attended(ops: Ops, heads: Heads, step: DeviceStep, how: AttentionLayer, cache: KVCache) -> Tensor:
    tokens, shape = step.inputs.token_ids.shape[0], (heads.heads, heads.dim)
    partials = Partials(
        torch.full((places := 400, *shape), torch.nan), torch.full((places, heads.heads), torch.nan)
    )
    ops.prepare(step, cache.pages_per_block * 16)
    q, out = random(tokens, *shape, seed=4, dtype=heads.dtype), torch.zeros(tokens, *shape, dtype=heads.dtype)
    ops.attend(q, out, cache, step, how, partials)
    return out


def both_attend(
    heads: Heads, rows: list[Row], window: int = 0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    bounds = limits(group_size=heads.heads // heads.kv_heads)
    how = AttentionLayer(1, heads.dim**-0.5 * 1.3, softcap, window)
    cache = heads.cache()
    cache.tensor.copy_(random(*cache.tensor.shape, seed=9))
    step = device_step(rows, bounds, padding=1)
    # What lies beyond a row's end may be anything, even what is not a number.
    for place, row in enumerate(rows):
        end = row.computed + row.num_tokens
        table = step.state.block_tables[bounds.max_running - 1 - place]
        if end % 16:
            cache.tensor[int(table[end // 16]), :, :, end % 16 :] = torch.nan
    ours, theirs = attended(OURS, heads, step, how, cache), attended(TWIN, heads, step, how, cache)
    live = sum(row.num_tokens for row in rows)
    return ours[:live], theirs[:live]


MIXED = [Row(299, 1), Row(0, 35), Row(70, 3), Row(15, 1)]
SHAPES = [
    Heads(4, 2, 16),
    Heads(6, 2, 24),
    Heads(5, 1, 96),
    Heads(3, 3, 64),
    Heads(2, 1, 256),
    Heads(20, 1, 16),
]


@pytest.mark.parametrize(
    "heads", SHAPES, ids=lambda heads: f"{heads.heads} over {heads.kv_heads} x {heads.dim}"
)
def test_attention_of_a_mixed_step(heads: Heads) -> None:
    assert_close(*both_attend(heads, MIXED))


@pytest.mark.parametrize(("window", "softcap"), [(0, 2.0), (20, 0.0), (64, 0.0), (130, 3.0), (1, 0.0)])
def test_attention_with_windows_and_caps(window: int, softcap: float) -> None:
    assert_close(*both_attend(Heads(4, 2, 16), MIXED, window, softcap))


@pytest.mark.parametrize("window", [0, 100])
def test_attention_of_rows_that_decode_over_many_pieces(window: int) -> None:
    rows = [Row(1030, 1), Row(255, 1), Row(256, 1), Row(0, 1)]
    assert_close(*both_attend(Heads(4, 2, 16), rows, window))


def test_attention_of_a_short_chunk_behind_a_long_context_is_split() -> None:
    assert_close(*both_attend(Heads(2, 1, 16), [Row(600, 14), Row(511, 2)]))


def test_attention_in_half_precision() -> None:
    assert_close(*both_attend(Heads(8, 2, 64, torch.float16), MIXED))


def test_what_a_row_gets_does_not_depend_on_the_others() -> None:
    alone, _ = both_attend(Heads(4, 2, 16), [Row(299, 1)])
    among, _ = both_attend(Heads(4, 2, 16), [Row(299, 1), Row(0, 35), Row(400, 1)])
    assert torch.equal(alone[0], among[0])


@pytest.mark.parametrize(("seed", "candidates_max"), [(3, 8192), (4, 16)])
def test_the_sampler_draws_what_the_engines_sampler_draws(seed: int, candidates_max: int) -> None:
    """With lists that hold every row's candidates, and with lists that are too short for most rows."""
    ours = TritonOps(CPU, num_programs=3, candidates_max=candidates_max)
    cases = [
        (0.0, 0, 1.0, 0.0, seed), (0.7, 0, 1.0, 0.0, seed), (1.3, 5, 1.0, 0.0, 2**64 - 5 - seed),
        (1.0, 0, 0.8, 0.0, seed), (2.0, 40, 0.9, 0.0, seed), (1.5, 0, 1.0, 0.2, seed),
        (0.9, 7, 0.5, 0.4, seed),
    ]  # fmt: skip
    step = device_step([Row(39 + i, 1, samples=True) for i in range(len(cases))], limits(), padding=1)
    wanted = sampling_state(step.state, cases)
    OURS.prepare(step, slots_per_block=64)
    logits = random(len(cases) + 1, 5000, seed=seed) * 3
    logits[2, 100:103] = logits[2].topk(5).values[-1]  # Ties on the cut of top-k,
    logits[3, 100:300] = logits[3].max()  # on that of top-p,
    logits[0, 4000] = logits[0].max()  # and for the largest.
    logits[4, 7:90] = -torch.inf
    drawn = Drawn.allocate(8, CPU).head(len(cases) + 1)
    ours.sample(logits, step, drawn)
    expected = Sampler(5000).draw(logits[:-1], wanted).tolist()
    assert drawn.token_ids[:-1].tolist() == expected
    assert drawn.healthy.all()
    assert [int(step.state.token_ids[7 - i, 40 + i]) for i in range(len(cases))] == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_numbers_are_told_and_the_others_go_on(bad: float) -> None:
    step = device_step([Row(4, 1, samples=True)] * 2, limits())
    step.state.temperature.fill_(1.0)
    OURS.prepare(step, slots_per_block=64)
    logits = torch.full((2, 50), -20.0)
    logits[0, :] = bad if bad == -torch.inf else logits[0, :]
    logits[0, 17], logits[1, 9] = bad, 20.0
    drawn = Drawn.allocate(2, CPU)
    OURS.sample(logits, step, drawn)
    assert drawn.healthy.tolist() == [False, True]
    assert drawn.token_ids.tolist() == [0, 9]


def test_a_decode_step_computes_the_same_without_the_code_for_chunks() -> None:
    heads, rows = Heads(4, 2, 16), [Row(20, 1), Row(300, 1)]
    cache = heads.cache()
    cache.tensor.copy_(random(*cache.tensor.shape, seed=9))
    step = device_step(rows, limits(group_size=2))
    assert step.decode_only
    general = DeviceStep(step.buffer, step.state, step.inputs)
    how = AttentionLayer(0, 0.25, 0.0, 0)
    assert torch.equal(attended(OURS, heads, step, how, cache), attended(OURS, heads, general, how, cache))


def test_attention_behind_the_engines_contract_uses_either() -> None:
    heads = Heads(4, 2, 16)
    bounds = limits(group_size=2)
    step = device_step(MIXED, bounds)
    qkv, outs = heads.qkv(40, seed=3), []
    for ops in (OURS, TWIN):
        cache = heads.cache()
        cache.tensor[:-1].copy_(random(cache.num_blocks, *cache.tensor.shape[1:], seed=8))
        attention = DeviceAttention(ops, cache, heads.rotary(), AttentionSpec(windows=(0, 50)), bounds)
        ops.prepare(step, attention.slots_per_block)
        attention.use(step)
        q = torch.empty(40, 4, 16)
        out = torch.empty_like(q)
        attention.store(1, qkv, q)
        attention.attend(1, q, out)
        outs.append(out)
    assert_close(*outs)


def test_row_state_has_a_row_for_nobody() -> None:
    state = RowState.allocate(limits(), CPU)
    assert state.unused_row == 8
    assert len(state.temperature) == 9

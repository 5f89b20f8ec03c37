"""FlashInfer's attention behind `Ops`, with a double that has its signatures and computes what its plan
describes.

What only its kernels on a GPU can tell (speed, rounding, that they take strided pages) `bench/gpu.sh`
measures.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_steps import CPU, MAX_LEN, Heads, Row, device_step, limits
from torch import Tensor

from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.gpu import flashinfer_ops as module
from penstock.engine.gpu.flashinfer_ops import STEPS_UNDER_WAY, FlashInferOps, flashinfer_ops
from penstock.engine.gpu.load import cuda_target
from penstock.engine.gpu.ops import AttentionLayer, Partials
from penstock.engine.gpu.runner import FLIGHTS
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.errors import ConfigError
from penstock.models.spec import DecoderSpec

# Of flashinfer-python 0.7.2; `plan` of the decode wrapper takes these by keyword (its signature
# says **kwargs).
DECODE_PLAN_OPTIONS = {
    "pos_encoding_mode", "window_left", "window_right", "logits_soft_cap", "q_data_type", "kv_data_type",
    "o_data_type", "data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking", "seq_lens",
    "block_tables", "fixed_split_size", "disable_split_kv", "q_len_per_req", "is_causal",
}  # fmt: skip


class Planned:
    """What a plan describes, and attention over exactly that, in float64."""

    made: list["Planned"]

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= 128 << 20
        self.plans = self.runs = 0
        self.made.append(self)

    def describe(self, queries, pages_from, pages, last, options: dict[str, Any]) -> None:
        self.plans += 1
        assert not pages_from.is_cuda, "index pointers are read on the host"
        assert {each.dtype for each in (queries, pages_from, pages, last)} == {torch.int32}
        self.queries, self.pages_from = queries.tolist(), pages_from.tolist()
        self.pages, self.last, self.options = pages, last.tolist(), options

    def compute(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        self.runs += 1
        keys, values = paged_kv_cache
        assert keys.shape[1:] == (16, self.options["num_kv_heads"], q.shape[2])
        assert keys.stride() == values.stride()
        assert keys.stride(-1) == 1
        for row in range(len(self.last)):
            first, end = self.queries[row : row + 2]
            blocks = self.pages[self.pages_from[row] : self.pages_from[row + 1]].long()
            known = 16 * (len(blocks) - 1) + self.last[row]
            k, v = (each[blocks].flatten(0, 1)[:known].double() for each in (keys, values))
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[first:end].double(), k) * self.options["sm_scale"]
            if cap := self.options["logits_soft_cap"]:
                scores = cap * torch.tanh(scores / cap)
            positions = torch.arange(known - (end - first), known)[:, None]  # Aligned at the end.
            distance = positions - torch.arange(known)
            seen = distance >= 0
            if (left := self.options["window_left"]) >= 0:
                seen &= distance <= left
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(Planned):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ) -> None:
        super().__init__(float_workspace_buffer)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ) -> None:
        assert not deprecated_positional_args
        assert set(kwargs) <= DECODE_PLAN_OPTIONS
        assert page_size == 16
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in (1, 2, 4, 8)
        queries = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self.describe(queries, indptr, indices, last_page_len, {"num_kv_heads": num_kv_heads, **kwargs})

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None):
        return self.compute(q, paged_kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper(Planned):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
    ) -> None:
        super().__init__(float_workspace_buffer)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ) -> None:
        assert causal
        assert page_size == 16
        options = {"num_kv_heads": num_kv_heads, "sm_scale": sm_scale, "window_left": window_left}
        options["logits_soft_cap"] = logits_soft_cap
        self.describe(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, options)

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None):
        return self.compute(q, paged_kv_cache, out)


DOUBLES = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)
HEADS = Heads(heads=4, kv_heads=2, dim=16)
DECODE = [Row(0, 1), Row(15, 1), Row(16, 1), Row(31, 1), Row(300, 1)]
MIXED = [Row(40, 1), Row(0, 9), Row(16, 16), Row(77, 33)]


@pytest.fixture
def ops() -> FlashInferOps:
    Planned.made = []
    package = SimpleNamespace(**{double.__name__: double for double in DOUBLES})
    return FlashInferOps(TorchOps(), CPU, package)


def attend(ops, rows: list[Row], hows: list[AttentionLayer], *, plan: bool = True) -> list[Tensor]:
    """What `ops` gives for each kind of layer in one step, over the same cache."""
    bounds = limits()
    step, cache = device_step(rows, bounds), HEADS.cache()
    cache.tensor[:-1] = torch.randn(cache.tensor[:-1].shape, generator=torch.Generator().manual_seed(3))
    ops.prepare(step, cache.pages_per_block * 16)
    buffer, count = step.buffer, len(rows)
    starts = buffer.starts[: count + 1].numpy()
    if plan:
        ops.plan(
            buffer.rows[:count].numpy(), buffer.computed[:count].numpy(), starts[1:] - starts[:-1], step.state
        )
    q = torch.randn((int(starts[-1]), 4, 16), generator=torch.Generator().manual_seed(4))
    partials = Partials(
        torch.zeros(bounds.work.partials_max, 4, 16), torch.zeros(bounds.work.partials_max, 4)
    )
    found = []
    for how in hows:
        out = torch.full_like(q, torch.nan)
        ops.attend(q, out, cache, step, how, partials)
        found.append(out)
    return found


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (5.0, 0), (0.0, 1), (0.0, 20), (3.0, 16)])
def test_what_it_plans_attends_as_the_twin_does(ops, rows: list[Row], softcap: float, window: int) -> None:
    hows = [AttentionLayer(layer, 0.3, softcap, window) for layer in (0, 1)]
    for ours, twin in zip(attend(ops, rows, hows), attend(TorchOps(), rows, hows), strict=True):
        torch.testing.assert_close(ours, twin, atol=2e-6, rtol=1e-5)


def test_one_plan_serves_all_layers_of_a_kind_and_wrappers_take_turns(ops) -> None:
    assert STEPS_UNDER_WAY >= FLIGHTS
    wide, narrow = AttentionLayer(0, 0.3, 0.0, 0), AttentionLayer(1, 0.3, 0.0, 16)
    for step in range(2 * STEPS_UNDER_WAY):
        attend(ops, DECODE, [wide, narrow, wide, narrow])
        turn = Planned.made[2 * (step % STEPS_UNDER_WAY) :][:2]
        assert [(each.plans, each.runs) for each in turn] == [
            (1 + step // STEPS_UNDER_WAY, 2 + 2 * (step // STEPS_UNDER_WAY))
        ] * 2
    assert len(Planned.made) == 2 * STEPS_UNDER_WAY, "wrappers are kept"


def test_a_step_that_was_not_planned_is_a_bug(ops) -> None:
    with pytest.raises(AssertionError, match="plan the step first"):
        attend(ops, DECODE, [AttentionLayer(0, 0.3, 0.0, 0)], plan=False)


def spec(head_dim: int) -> DecoderSpec:
    return DecoderSpec(
        architecture="", vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=head_dim, max_position=MAX_LEN, norm_eps=1e-6, rope=HEADS.rope,
    )  # fmt: skip


def test_models_that_it_has_no_kernels_for_are_refused_by_the_keys_name(ops) -> None:
    ops.check(spec(128), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"engine\.attention.*heads of 96"):
        ops.check(spec(96), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"engine\.attention.*float32"):
        ops.check(spec(128), torch.float32)


def test_without_the_package_or_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"penstock\[flashinfer\]"):
        flashinfer_ops(TorchOps(), CPU)
    for attention in ("flashinfer", "triton"):
        with pytest.raises(ConfigError, match=r"engine\.attention.*needs a CUDA device"):
            cuda_target(EngineSettings(device="cpu", attention=attention), SystemClock())


def test_the_doubles_have_the_packages_signatures() -> None:
    """Where the package is installed: every parameter that the doubles take is one of the real wrappers', in
    order.
    """
    flashinfer = pytest.importorskip("flashinfer")
    for double in DOUBLES:
        real = getattr(flashinfer, double.__name__)
        for name in ("__init__", "plan", "run"):
            theirs = list(inspect.signature(getattr(real, name)).parameters)
            assert (
                list(inspect.signature(getattr(double, name)).parameters)
                == theirs[: len(inspect.signature(getattr(double, name)).parameters)]
            )


def test_the_rest_is_the_others(ops) -> None:
    assert not ops.captures
    x = torch.randn(3, 16)
    ours, twin = torch.empty_like(x), torch.empty_like(x)
    ops.norm(x, torch.ones(16), 1e-6, ours)
    TorchOps().norm(x, torch.ones(16), 1e-6, twin)
    assert torch.equal(ours, twin)

"""A KV cache in int8: what it costs and what it is worth. That nothing depends on scheduling is in
`test_invariance_cells.py`.
"""

from pathlib import Path

import pytest
import torch
from device_driver import device_runner
from engine_driver import distributions, distributions_of, tiny_runner
from tiny_models import save, tiny_model

from penstock.engine.kv_cache import round_heads
from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3"), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_answers_change_little(model: Path, kernels: str) -> None:
    if kernels == "native":
        try:
            NativeLibrary()
        except KernelsUnavailable as why:
            pytest.skip(str(why))
    exact = distributions(model, dtype="float32", kernels=kernels)
    rounded = distributions(model, dtype="float32", kernels=kernels, kv_dtype="int8")
    assert 0 < (exact.exp() * (exact - rounded)).sum(1).mean() < 1e-4
    if kernels == "native":
        other = distributions(model, dtype="float32", kernels="torch", kv_dtype="int8")
        assert (other.exp() * (other - rounded)).sum(1).mean() < 1e-6


def test_there_are_more_blocks_under_another_identity(model: Path) -> None:
    plain = tiny_runner(model, dtype="bfloat16").info
    rounded = tiny_runner(model, dtype="bfloat16", kv_dtype="int8").info
    head = 16
    assert rounded.num_blocks == pytest.approx(plain.num_blocks * 2 * head / (head + 4), abs=1)
    assert rounded.num_host_blocks > 1.5 * plain.num_host_blocks
    assert rounded.identity != plain.identity


def test_what_cannot_be_rounded_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    odd = save(tiny_model("qwen3", head_dim=18), tmp_path)
    with pytest.raises(ConfigError, match=r"engine.kv_dtype is int8, .* multiple of 4 values, not 18"):
        tiny_runner(odd, kv_dtype="int8")
    with pytest.raises(ConfigError, match=r"engine.kv_dtype is int8, but a GPU"):
        device_runner(model, kv_dtype="int8")


def test_a_head_of_zeros_and_one_of_a_single_value() -> None:
    rounded = round_heads(torch.tensor([[0.0] * 8, [0.0] * 7 + [-3.0]]))
    scales = rounded[:, 8:].view(torch.float32)
    assert torch.equal(rounded[:, :8] * scales, torch.tensor([[0.0] * 8, [0.0] * 7 + [-3.0]]))


def test_a_gpu_keeps_its_cache_in_float8(model: Path) -> None:
    bounds = {"max_model_len": 256, "step_tokens": 256}
    exact, rounded = device_runner(model, **bounds), device_runner(model, kv_dtype="fp8", **bounds)
    assert rounded.cache.tensor.dtype == torch.float8_e4m3fn
    assert rounded.info.num_blocks // 4 == exact.info.num_blocks  # Here that is in float32.
    assert rounded.info.identity != exact.info.identity
    ours, right = distributions_of(rounded), distributions_of(exact)
    assert 0 < (right.exp() * (right - ours)).sum(1).mean() < 2e-3
    with pytest.raises(ConfigError, match=r"engine.kv_dtype is fp8, which needs a CUDA device"):
        tiny_runner(model, kv_dtype="fp8")

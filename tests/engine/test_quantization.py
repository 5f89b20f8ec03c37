"""Weights rounded while loading: how near the answers stay, what is refused, and what is told."""

from pathlib import Path

import pytest
import torch
from device_driver import device_runner
from engine_driver import distributions, distributions_of, tiny_runner
from tiny_models import save, tiny_model

from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.native.library import Type
from penstock.errors import ConfigError

BOUNDS = {"int8": (2e-3, 0.9), "int4": (0.1, 0.5)}
"""Mean KL divergence in nats to bfloat16 at most, and share of equal greedy tokens at least. The weights are
random, so the likeliest tokens lie close together; a trained model is kinder."""


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantization(request: pytest.FixtureRequest) -> str:
    try:
        kernels = NativeLibrary()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    if request.param == "int8" and not kernels.supports(Type.I8):
        pytest.skip(f"{kernels.isa} has no int8 dot products")
    return request.param


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "mixtral"])
def test_answers_stay_near_bfloat16(request: pytest.FixtureRequest, family: str, quantization: str) -> None:
    path = request.getfixturevalue(family)
    exact, rounded = distributions(path), distributions(path, quantization=quantization)
    divergence = (exact.exp() * (exact - rounded)).sum(1)
    kl_max, agreement_min = BOUNDS[quantization]
    assert 0 < divergence.mean() < kl_max
    assert (exact.argmax(1) == rounded.argmax(1)).float().mean() >= agreement_min


def test_the_runner_tells(qwen3: Path, quantization: str) -> None:
    info = tiny_runner(qwen3, dtype="bfloat16", kernels="auto", quantization=quantization).info
    assert (info.dtype, info.quantization) == ("bfloat16", quantization)


def test_torch_refuses_by_name(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.quantization is int8, but engine.kernels is torch"):
        tiny_runner(qwen3, kernels="torch", quantization="int8")


def test_what_the_kernels_cannot_is_refused_by_name(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.quantization is int4, but .*head size.* 24"):
        tiny_runner(llama, dtype="bfloat16", kernels="auto", quantization="int4")


@pytest.mark.parametrize(("bits", "kl_max"), [("int8", 2e-3), ("int4", 0.2)])
def test_a_gpu_rounds_weights_too(tmp_path: Path, bits: str, kl_max: float) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = save(tiny_model("qwen3", **sizes), tmp_path)
    bounds = {"max_model_len": 256, "step_tokens": 256}
    exact = distributions_of(device_runner(path, **bounds))
    runner = device_runner(path, quantization=bits, **bounds)
    rounded = distributions_of(runner)
    assert 0 < (exact.exp() * (exact - rounded)).sum(1).mean() < kl_max
    assert runner.info.quantization == bits
    assert {"int8": torch.int8, "int4": torch.int16}[bits] in {each.dtype for each in runner.weight_tensors()}


def test_auto_keeps_half_the_bytes_where_native_kernels_compute(qwen3: Path) -> None:
    try:
        NativeLibrary()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    assert tiny_runner(qwen3, dtype="auto", kernels="auto").info.dtype == "bfloat16"

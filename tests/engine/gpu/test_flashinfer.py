"""What FlashInfer is asked for, answered by a stand-in that follows its documented indices in plain torch."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_steps import CPU, Heads, limits
from torch import Tensor

from penstock.engine.attention.base import AttentionBatch
from penstock.engine.attention.reference import ReferenceAttention
from penstock.engine.gpu.attention import DeviceAttention
from penstock.engine.gpu.flashinfer import FlashInferAttention
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.models.spec import AttentionSpec
from penstock.errors import ConfigError


class Wrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, in its formula."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self, starts: Tensor, block_starts: Tensor, blocks: Tensor, last: Tensor, heads: int, kv_heads: int,
        dim: int, page: int, *, causal: bool, sm_scale: float, logits_soft_cap: float | None, window_left: int, **_: Any,
    ) -> None:  # fmt: skip
        assert causal
        self.rows = list(
            zip(
                starts.tolist(), starts.tolist()[1:], block_starts.tolist(), block_starts.tolist()[1:],
                last.tolist(), strict=False,
            )
        )  # fmt: skip
        self.blocks, self.group = blocks.long(), heads // kv_heads
        self.scale, self.cap, self.window = sm_scale, logits_soft_cap, window_left

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        for start, end, first, after, last in self.rows:
            length = (after - first - 1) * 16 + last
            k, v = (part[self.blocks[first:after]].flatten(0, 1)[:length] for part in kv)
            k, v = (part.repeat_interleave(self.group, 1).transpose(0, 1) for part in (k, v))
            scores = q[start:end].transpose(0, 1) @ k.transpose(1, 2) * self.scale
            scores = self.cap * torch.tanh(scores / self.cap) if self.cap else scores
            distance = torch.arange(length - (end - start), length)[:, None] - torch.arange(length)
            hidden = (distance < 0) | ((distance > self.window) & (self.window >= 0))
            out[start:end] = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def test_it_computes_what_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    )
    heads, spec = Heads(4, 2, 16), AttentionSpec(windows=(0, 30), softcap=5.0)
    batch = AttentionBatch(
        np.array([40, 0, 15], np.int32),
        np.array([1, 37, 3], np.int32),
        torch.cat([torch.arange(40, 41), torch.arange(37), torch.arange(15, 18)]),
        np.array([[9, 2, 30], [4, 17, 5], [6, 1, 0]], np.int32),
    )
    results: list[Tensor] = []
    for use in ("flashinfer", "reference"):
        cache, rotary = heads.cache(), heads.rotary()
        cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(2)))
        attention: Any = ReferenceAttention(cache, rotary, spec)
        if use == "flashinfer":
            ours = DeviceAttention(TorchOps(), cache, rotary, spec, limits())
            attention = FlashInferAttention(ours, cache, spec, num_heads=4)
        attention.begin(batch)
        for layer in range(2):
            q = torch.empty(41, 4, 16)
            out = torch.empty_like(q)
            attention.store(layer, heads.qkv(41, seed=layer), q)
            attention.attend(layer, q, out)
            results.append(out)
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])


def test_without_the_package_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    heads, spec = Heads(4, 2, 16), AttentionSpec()
    cache = heads.cache()
    ours = DeviceAttention(TorchOps(), cache, heads.rotary(), spec, limits())
    with pytest.raises(ConfigError, match="flashinfer-python"):
        FlashInferAttention(ours, cache, spec, num_heads=4)
    assert cache.tensor.device == CPU

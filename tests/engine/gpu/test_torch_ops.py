"""The torch twins: a whole decoder on them against the engine's own, and their sampler against the engine's
own.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from device_steps import CPU, Row, device_step, limits, sampling_state

from penstock.engine.attention.base import AttentionBatch
from penstock.engine.decoder import Decoder, DecoderLimits
from penstock.engine.gpu.layers import DeviceKernels
from penstock.engine.gpu.step import Drawn
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.kernels import Kernels, TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.loader import load_weights
from penstock.engine.sampler import Sampler
from penstock.models.registry import read_spec

FAMILIES = ["qwen3", "mistral", "gemma2", "gemma3", "mixtral", "llama"]


class Model:
    """A decoder on the given kernels, with its cache."""

    def __init__(self, directory: Path, twins: bool) -> None:
        spec, names = read_spec(directory)
        bounds = limits(max_model_len=256)
        self.cache = KVCache(spec, 60, torch.float32, CPU)
        kernels: Kernels = TorchKernels(spec, max_tokens=256, device=CPU, products=torch.float32)
        if twins:
            kernels = DeviceKernels(TorchOps(), spec, bounds)
        room = DecoderLimits(step_tokens=256, max_samples=8, max_model_len=bounds.max_model_len)
        weights = load_weights(directory, spec, names, torch.float32, lambda *_: None)
        self.decoder = Decoder(spec, weights, kernels, room)
        self.attention = kernels.attention(self.cache, self.decoder.rotary)

    @torch.inference_mode()
    def step(self, rows: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
        """Rows of (new token ids, computed tokens, blocks) to the logits of each row's last token."""
        counts = np.array([len(ids) for ids, _, _ in rows], np.int32)
        computed = np.array([done for _, done, _ in rows], np.int32)
        positions = [torch.arange(done, done + len(ids)) for ids, done, _ in rows]
        tables = np.zeros((len(rows), 12), np.int32)
        for table, (_, _, blocks) in zip(tables, rows, strict=True):
            table[: len(blocks)] = blocks
        self.attention.begin(AttentionBatch(computed, counts, torch.cat(positions), tables))
        ids = torch.tensor([token for row, _, _ in rows for token in row])
        samples = torch.from_numpy(counts.cumsum() - 1)
        return self.decoder.forward(ids, samples, self.attention).clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_on_the_twins_gives_the_engines_logits(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(family)
    ours, theirs = Model(directory, twins=True), Model(directory, twins=False)
    tokens = torch.randint(0, 211, (170,), generator=torch.Generator().manual_seed(5)).tolist()
    long, short = [40, 3, 17, 21, 50, 8, 9, 33, 2], [11, 12, 13]
    steps = [
        [(tokens[:90], 0, long[:6])],
        [(tokens[7:8], 90, long[:6]), (tokens[100:133], 0, short)],
        [(tokens[91:120], 91, long), (tokens[8:9], 33, short)],
        [(tokens[9:10], 120, long), (tokens[3:4], 34, short)],
    ]
    for step in steps:
        torch.testing.assert_close(ours.step(step), theirs.step(step), atol=2e-5, rtol=1e-5)


def test_prepare_lays_out_tokens_and_samples_and_pads_with_nobody() -> None:
    bounds = limits()
    step = device_step([Row(17, 1, samples=True), Row(30, 5), Row(0, 3, samples=True)], bounds, padding=2)
    step.state.token_ids.copy_(torch.arange(step.state.token_ids.numel()).view_as(step.state.token_ids))
    TorchOps().prepare(step, slots_per_block=64)
    inputs, rows = step.inputs, [7, 6, 6, 6, 6, 6, 5, 5, 5]
    positions = [17, 30, 31, 32, 33, 34, 0, 1, 2]
    assert inputs.positions.tolist() == [*positions, 0, 0]
    assert inputs.token_rows.tolist() == [*rows, 8, 8]
    width = bounds.max_model_len + 1
    assert inputs.token_ids.tolist() == [*(r * width + p for r, p in zip(rows, positions, strict=True)), 0, 0]
    tables = step.state.block_tables
    slots = [int(tables[r, p // 16]) * 64 + p % 16 for r, p in zip(rows, positions, strict=True)]
    assert inputs.slots.tolist() == [*slots, -1, -1]
    assert inputs.sample_tokens.tolist() == [0, 8, 0, 0]
    assert inputs.sample_rows.tolist() == [7, 5, 8, 8]
    assert inputs.sample_positions.tolist() == [18, 3, 0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_the_twin_draws_what_the_engines_sampler_draws(seed: int) -> None:
    cases = [
        (0.0, 0, 1.0, 0.0, seed), (0.7, 0, 1.0, 0.0, seed), (1.3, 5, 1.0, 0.0, 2**64 - 5 - seed),
        (1.0, 0, 0.8, 0.0, seed), (2.0, 40, 0.9, 0.0, seed), (1.5, 0, 1.0, 0.2, seed),
        (0.9, 7, 0.5, 0.4, seed),
    ]  # fmt: skip
    step = device_step([Row(39 + i, 1, samples=True) for i in range(len(cases))], limits(), padding=1)
    wanted = sampling_state(step.state, cases)
    ops = TorchOps()
    ops.prepare(step, slots_per_block=64)
    logits = torch.randn(len(cases) + 1, 3000, generator=torch.Generator().manual_seed(seed)) * 3
    logits[3, 100:300] = logits[3].max()  # Ties.
    drawn = Drawn.allocate(8, CPU).head(len(cases) + 1)
    ops.sample(logits, step, drawn)
    expected = Sampler(3000).draw(logits[:-1], wanted).tolist()
    assert drawn.token_ids[:-1].tolist() == expected
    assert drawn.healthy.all()
    assert [int(step.state.token_ids[7 - i, 40 + i]) for i in range(len(cases))] == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_numbers_is_told_and_the_others_go_on(bad: float) -> None:
    step = device_step([Row(4, 1, samples=True)] * 2, limits())
    TorchOps().prepare(step, slots_per_block=64)
    logits = torch.zeros(2, 50)
    logits[0, 17], logits[1, 9] = bad, 1.0
    drawn = Drawn.allocate(2, CPU)
    TorchOps().sample(logits, step, drawn)
    assert drawn.healthy.tolist() == [False, True]
    assert drawn.token_ids.tolist() == [0, 9]

from collections.abc import Callable
from pathlib import Path

import pytest
from device_driver import device_runner
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.gpu.platform import CpuPlatform
from penstock.engine.gpu.step import StepLimits
from penstock.engine.gpu.worklist import WorkListLimits
from penstock.engine.memory import Share, blocks_of, largest_step
from penstock.errors import ConfigError
from penstock.schedule.batch import resolve_max_running


@given(st.integers(1, 300), st.integers(1, 2000), st.integers(2, 4000), st.integers(2, 600))
def test_the_largest_step_is_one_that_may_come(
    max_running: int, step_tokens: int, max_model_len: int, num_blocks: int
) -> None:
    max_running = resolve_max_running(max_running, step_tokens)
    work = WorkListLimits.of(max_running=max_running, step_tokens=step_tokens, group_size=16)
    limits = StepLimits(
        max_running=max_running, step_tokens=step_tokens, max_model_len=max_model_len, work=work
    )
    plan = largest_step(limits, num_blocks)
    assert 0 < plan.num_tokens <= step_tokens
    assert blocks_of(plan) <= num_blocks
    assert len(plan.work) == min(max_running, num_blocks)
    blocks = [block for one in plan.work for block in one.new_blocks]
    assert blocks == list(range(len(blocks)))
    for new, one in zip(plan.new_rows, plan.work, strict=True):
        assert len(new.token_ids) == one.num_tokens < max_model_len
        assert one.num_tokens <= 16 * len(one.new_blocks)
        assert one.samples
    if num_blocks >= max_running + -(-step_tokens // 16) and max_model_len > step_tokens:
        assert plan.num_tokens == step_tokens


class OwnMemory(CpuPlatform):
    """A device whose memory is counted: 1 MiB is free, of which a step takes a part."""

    share = Share(0.5, None)

    def __init__(self, taken: int) -> None:
        self.steps = 0
        self._taken = taken

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        self.steps += 1
        return self._taken

    def free_bytes(self) -> int:
        return 1 << 20


def test_the_cache_gets_its_share_of_what_steps_and_graphs_leave(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.gpu.load.GRAPH_MEMORY_BYTES_MAX", 100_000)
    block_bytes = 16 * 2 * 3 * 2 * 16 * 4  # Tokens, keys and values, layers, heads, size, float32.
    platform = OwnMemory(taken=300_000)
    settings: dict[str, object] = {"kv_memory_bytes": 0}
    runner = device_runner(qwen3, platform=platform, **settings)
    assert platform.steps == 1
    assert runner.info.num_blocks == int(((1 << 20) - 400_000) * 0.5) // block_bytes
    with pytest.raises(ConfigError, match=r"50% of what is free leaves"):
        device_runner(qwen3, platform=OwnMemory(taken=1 << 20), **settings)

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, tiny_runner
from tiny_models import save, tiny_model

from penstock.config.engine_settings import EngineSettings
from penstock.engine.runner import load_runner
from penstock.errors import ConfigError
from penstock.protocol.worker import LOADING_WEIGHTS
from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.types import FinishReason, RequestId, SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=3, max_tokens=8)


def new_row(row: int, tokens: list[int]) -> NewRow:
    return NewRow(RequestId(f"r{row}"), row, tuple(tokens), len(tokens), GREEDY)


def test_info_says_what_was_loaded(qwen3: Path) -> None:
    info = tiny_runner(qwen3, max_running=7, max_model_len=300).info
    assert (info.architecture, info.dtype, info.vocab_size) == ("Qwen3ForCausalLM", "float32", 211)
    assert (info.max_model_len, info.max_running, info.block_tokens) == (300, 7, 16)
    assert info.num_blocks > 7 * 300 // 16


def test_warm_up_leaves_no_trace(qwen3: Path) -> None:
    runner = tiny_runner(qwen3)
    plan = StepPlan(1, (new_row(0, [1, 2, 3]),), (RowWork(0, 0, 3, True, (0,)),))
    before = runner.run(plan)
    runner.warm_up()
    assert runner.run(plan).sampled == before.sampled


def test_warm_up_fits_the_smallest_engine(qwen3: Path) -> None:
    for config in ({"step_tokens": 1}, {"max_model_len": 2}, {"kv_memory_bytes": 26_000}):
        tiny_runner(qwen3, **config).warm_up()


def test_only_rows_that_sample_are_answered_in_plan_order(qwen3: Path) -> None:
    runner = tiny_runner(qwen3)
    rows = (new_row(4, [1] * 20), new_row(2, [2] * 5), new_row(9, [3] * 7))
    work = (RowWork(4, 0, 9, False, (5,)), RowWork(9, 0, 7, True, (6,)), RowWork(2, 0, 5, True, (7,)))
    result = runner.run(StepPlan(3, rows, work))
    assert result.step == 3
    assert [sampled.row for sampled in result.sampled] == [9, 2]
    assert runner.run(StepPlan(4, (), (RowWork(4, 9, 2, False),))).sampled == ()


def test_a_row_is_reused_by_the_next_request(qwen3: Path) -> None:
    runner = tiny_runner(qwen3)
    first = StepPlan(1, (new_row(0, list(range(40))),), (RowWork(0, 0, 40, True, (3, 4, 5)),))
    again = StepPlan(2, (new_row(0, [9, 9]),), (RowWork(0, 0, 2, True, (4,)),), freed_rows=(0,))
    fresh = tiny_runner(qwen3).run(again).sampled
    runner.run(first)
    assert runner.run(again).sampled == fresh


def test_nan_of_an_earlier_owner_does_not_come_back(qwen3: Path) -> None:
    runner = tiny_runner(qwen3)
    plan = StepPlan(1, (new_row(0, [1, 2, 3]),), (RowWork(0, 0, 3, True, (8,)),))
    clean = runner.run(plan)
    with torch.inference_mode():
        runner._cache.tensor[8].fill_(torch.nan)
    assert runner.run(plan).sampled == clean.sampled


@pytest.mark.parametrize(
    ("kernels", "quantization", "reports_each"),
    [("torch", "none", True), ("native", "none", False), ("native", "int4", True)],
)
def test_loading_tells_its_stages(qwen3: Path, kernels: str, quantization: str, reports_each: bool) -> None:
    stages: list[tuple[str, int, int]] = []
    config = EngineSettings(
        dtype="float32", kernels=kernels, quantization=quantization, kv_memory_bytes=1 << 20
    )
    load_runner(qwen3, config, lambda *stage: stages.append(stage))
    (first, _, _), *reads, (last, _, _) = stages
    assert (first, last) == ("reading the configuration", "preparing kernels")
    total = reads[0][2]
    assert {(name, of) for name, _, of in reads} == {(LOADING_WEIGHTS, total)}
    done = [done for _, done, _ in reads]
    assert (done[0], done[-1]) == (0, total)
    assert done == sorted(done)
    # Weights that are copied as they are in the file are read in one go.
    assert (len(done) > 2) == reports_each


def test_logits_that_are_not_numbers_fail_their_request_only(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan
    driver = Driver(save(model, tmp_path))
    healthy = driver.ask([[1, 2, 3]], [GREEDY])[0]
    poisoned, other = driver.ask([[13] * 20, [1, 2, 3]], [GREEDY, GREEDY])
    assert poisoned.finish is FinishReason.ERROR
    assert "not finite" in (poisoned.error or "")
    assert other == healthy
    # Blocks of the failed request change hands: nothing of it may be left in them.
    for _ in range(3):
        assert driver.ask([[1, 2, 3]], [GREEDY])[0] == healthy


def test_kernels_are_chosen_by_the_config(llama: Path, qwen3: Path) -> None:
    assert tiny_runner(qwen3, kernels="torch").kernels == "torch"
    assert tiny_runner(llama, kernels="auto").kernels == "torch", (
        "a head size of 24 is none for the native kernels"
    )
    with pytest.raises(ConfigError, match=r"engine.kernels is native, but"):
        tiny_runner(llama, kernels="native")

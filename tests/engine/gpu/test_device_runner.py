"""The device's runner against the CPU's: the same tokens, and log-probabilities up to rounding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_driver import DeviceDriver, device_runner
from engine_driver import Answer, Driver
from msgspec.structs import replace
from tiny_models import VOCAB_SIZE, save, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.clock import ManualClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.gpu.graphs import StepKind
from penstock.engine.gpu.platform import CpuPlatform, Mark
from penstock.engine.gpu.runner import FLIGHTS
from penstock.engine.gpu.triton_ops import TritonOps
from penstock.engine.runner import build_runner
from penstock.errors import ConfigError
from penstock.rng import stream
from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.types import FinishReason, RequestId, SamplingParams, TokenLogprob

LENGTHS = (1, 9, 33, 60, 77, 16)
MAX_TOKENS = 6
KINDS = (
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=0.8, seed=11, logprobs=0, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=1.3, seed=-3, top_k=20, top_p=0.9, logprobs=2, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=1.0, seed=13, min_p=0.05, max_tokens=MAX_TOKENS, prompt_logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, logprobs=2, max_tokens=MAX_TOKENS),
    SamplingParams(
        temperature=0.9, seed=14, top_p=0.95, presence_penalty=0.5, frequency_penalty=1.3,
        repetition_penalty=1.2, logit_bias=((3, 2.5), (5, -100.0), (9, 4.0)),
        stop_token_ids=(*range(20, 60), VOCAB_SIZE + 5), min_tokens=MAX_TOKENS, logprobs=1,
        max_tokens=MAX_TOKENS,
    ),
)  # fmt: skip


def prompts() -> list[list[int]]:
    random = stream(5, "device prompts")
    return [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(qwen3: Path) -> list[Answer]:
    """What the CPU's runner answers."""
    return Driver(qwen3).ask(prompts(), KINDS)


def flat(logprobs: list[TokenLogprob]) -> Iterator[float]:
    for one in logprobs:
        yield one.logprob
        yield from (value for _, value in one.top)


def check_same(answers: list[Answer], expected: list[Answer]) -> None:
    for length, answer, other in zip(LENGTHS, answers, expected, strict=True):
        assert len(other.token_ids) == MAX_TOKENS
        assert answer.token_ids == other.token_ids, f"prompt of {length} tokens"
        for ours, theirs in (
            (answer.logprobs, other.logprobs),
            (answer.prompt_logprobs, other.prompt_logprobs),
        ):
            assert [one.token_id for one in ours] == [one.token_id for one in theirs]
            assert list(flat(ours)) == pytest.approx(list(flat(theirs)), abs=1e-4)


@pytest.mark.parametrize("graphs_max", [0, 64])
@pytest.mark.parametrize("step_tokens", [7, 64])
def test_same_answers_as_on_the_cpu(
    qwen3: Path, expected: list[Answer], step_tokens: int, graphs_max: int
) -> None:
    driver = DeviceDriver(qwen3, step_tokens=step_tokens, graphs_max=graphs_max)
    check_same(driver.ask(prompts(), KINDS), expected)


def test_alone_and_from_the_prefix_cache(qwen3: Path, expected: list[Answer]) -> None:
    driver = DeviceDriver(qwen3)
    alone = [driver.ask([prompt], [how])[0] for prompt, how in zip(prompts(), KINDS, strict=True)]
    check_same(alone, expected)
    assert driver.runner.graphs.replays > 10
    again = driver.ask(prompts(), KINDS)
    assert sum(answer.cached_tokens for answer in again) > 90
    check_same(again, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_every_kind_of_family(request: pytest.FixtureRequest, family: str) -> None:
    path = request.getfixturevalue(family)
    check_same(DeviceDriver(path).ask(prompts(), KINDS), Driver(path).ask(prompts(), KINDS))


def test_reloading_from_host_memory_changes_nothing(qwen3: Path, expected: list[Answer]) -> None:
    driver = DeviceDriver(qwen3, host_kv_idle_s=0.0, host_kv_memory_bytes=4 * 1024 * 1024)
    check_same(driver.ask(prompts(), KINDS), expected)
    while driver.core.stats().host_stores < driver.core.stats().blocks_cached:
        driver.core.step()
    pool = driver.core.kv.pool
    pool.free(pool.allocate(pool.num_available) or ())
    assert driver.core.stats().blocks_cached == 0
    again = driver.ask(prompts(), KINDS)
    assert driver.core.stats().host_loads > 5
    check_same(again, expected)


def test_preemption_changes_nothing(qwen3: Path) -> None:
    asked = [[row * 31 + i for i in range(30)] for row in range(3)]
    params = [
        SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=24, frequency_penalty=0.9 * (i // 2))
        for i in range(3)
    ]
    expected = Driver(qwen3).ask(asked, params)
    block_bytes = 4 * 1024 * 1024 // device_runner(qwen3).info.num_blocks
    tight = DeviceDriver(qwen3, kv_memory_bytes=8 * block_bytes, max_model_len=0)
    answers = tight.ask(asked, params)
    assert tight.core.stats().preemptions > 0
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def decode_plans(rows: int, steps: int) -> list[StepPlan]:
    """A step that prefills `rows` prompts, and steps that decode them."""
    how = SamplingParams(temperature=1.0, seed=3, max_tokens=99, logprobs=1)
    new = tuple(NewRow(RequestId(f"r{row}"), row, (row + 1,) * 5, 5, how) for row in range(rows))
    plans = [StepPlan(1, new, tuple(RowWork(row, 0, 5, True, (row * 2,)) for row in range(rows)))]
    for step in range(steps):
        blocks = {row: (row * 2 + 1,) if 5 + step == 16 else () for row in range(rows)}
        work = tuple(RowWork(row, 5 + step, 1, True, blocks[row]) for row in range(rows))
        plans.append(StepPlan(step + 2, (), work))
    return plans


def test_steps_launched_ahead_give_the_same(qwen3: Path) -> None:
    plans = decode_plans(3, 14)
    one_by_one = device_runner(qwen3)
    expected = [one_by_one.run(plan).sampled for plan in plans]
    ahead = device_runner(qwen3)
    ahead.launch(plans[0])
    results = []
    for plan in plans[1:]:
        ahead.launch(plan)  # Its input tokens are not known to the host yet.
        results.append(ahead.collect())
    results.append(ahead.collect())
    assert [result.step for result in results] == [plan.step for plan in plans]
    assert [result.sampled for result in results] == expected


def test_no_more_steps_under_way_than_there_is_room_for(qwen3: Path) -> None:
    runner = device_runner(qwen3)
    plans = decode_plans(1, 3)
    for plan in plans[:3]:
        runner.launch(plan)
    with pytest.raises(AssertionError, match="too many steps"):
        runner.launch(plans[3])
    with pytest.raises(AssertionError, match="collect"):
        runner.run(plans[3])


class _WatchedPlatform(CpuPlatform):
    """Counts what would stop the host on a real device."""

    def __init__(self) -> None:
        self.waits = 0

    def mark(self) -> Mark:
        watched = self

        class Watched:
            def wait(self) -> None:
                watched.waits += 1

        return Watched()


class _Answers(TorchDispatchMode):
    """Notes operations whose result the host must wait for: values that become Python's, shapes that depend
    on data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "unique",
            "_unique2",
            "equal",
            "is_nonzero",
        }:
            self.found.append(name)
        return func(*args, **kwargs or {})


def test_launching_never_waits_for_the_device(qwen3: Path) -> None:
    platform = _WatchedPlatform()
    runner = device_runner(qwen3, platform=platform)
    how = [KINDS[index % len(KINDS)] for index in range(6)]
    new = tuple(NewRow(RequestId(f"r{row}"), row, (7,) * 20, 20, how[row]) for row in range(6))
    fill = tuple(RowWork(row, 0, 10, False, (row * 2, row * 2 + 1)) for row in range(6))
    finish = tuple(RowWork(row, 10, 10, True, scores=row == 3) for row in range(6))
    decode = tuple(RowWork(row, 20, 1, True) for row in range(6))
    with _Answers() as answers:
        for plan in (StepPlan(1, new, fill), StepPlan(2, (), finish), StepPlan(3, (), decode)):
            runner.launch(plan)
    assert answers.found == []
    assert platform.waits == 0
    assert [len(runner.collect().sampled) for _ in range(3)] == [0, 6, 6]
    assert platform.waits == 3


def test_whatever_earlier_owners_left_in_blocks_does_not_come_back(qwen3: Path) -> None:
    runner = device_runner(qwen3)
    plans = decode_plans(2, 13)
    clean = [runner.run(plan).sampled for plan in plans]
    with torch.inference_mode():
        runner.cache.tensor[:-1].fill_(torch.nan)
    assert [runner.run(plan).sampled for plan in plans] == clean


def test_logits_that_are_not_numbers_fail_their_request_only(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan
    driver = DeviceDriver(save(model, tmp_path))
    asked = SamplingParams(temperature=0.7, seed=1, max_tokens=6, repetition_penalty=1.1)
    healthy = driver.ask([[1, 2, 3]], [asked])[0]
    poisoned, other = driver.ask([[13] * 20, [1, 2, 3]], [asked, asked])
    assert poisoned.finish is FinishReason.ERROR
    assert "not finite" in (poisoned.error or "")
    assert other == healthy
    for _ in range(3):
        assert driver.ask([[1, 2, 3]], [asked])[0] == healthy


def test_a_row_is_reused_by_the_next_request(qwen3: Path) -> None:
    how = SamplingParams(temperature=0.0, logprobs=1, max_tokens=9)
    busy = KINDS[-1]
    first = NewRow(RequestId("a"), 0, tuple(range(40)), 40, busy)
    second = NewRow(RequestId("b"), 0, (9, 9), 2, how)
    again = StepPlan(2, (second,), (RowWork(0, 0, 2, True, (4,)),), freed_rows=(0,))
    fresh = device_runner(qwen3).run(again).sampled
    runner = device_runner(qwen3)
    runner.launch(StepPlan(1, (first,), (RowWork(0, 0, 40, True, (3, 4, 5)),)))
    runner.launch(again)
    runner.collect()
    assert runner.collect().sampled == fresh


def test_warm_up_leaves_no_trace_and_captures_decoding(qwen3: Path) -> None:
    runner = device_runner(qwen3)
    plans = decode_plans(2, 3)
    before = [runner.run(plan).sampled for plan in plans]
    runner.warm_up()
    assert len(runner.graphs) == 4  # 1, 2, 4 and 8 rows.
    replays = runner.graphs.replays
    assert [runner.run(plan).sampled for plan in plans] == before
    assert runner.graphs.replays == replays + 3


def test_warm_up_fits_the_smallest_engine(qwen3: Path) -> None:
    for config in (
        {"step_tokens": 1},
        {"max_model_len": 2},
        {"kv_memory_bytes": 26_000, "max_model_len": 0},
    ):
        device_runner(qwen3, **config).warm_up()


def test_idle_time_captures_what_was_missed(qwen3: Path) -> None:
    runner = device_runner(qwen3)
    for plan in decode_plans(3, 1):
        runner.run(plan)
    assert len(runner.graphs) == 0
    assert runner.idle()
    assert runner.idle()
    assert not runner.idle()
    assert len(runner.graphs) == 2  # The prefill of 15 tokens and the decode step of 3.


def test_an_engine_without_work_captures_what_was_missed(qwen3: Path) -> None:
    driver = DeviceDriver(qwen3)
    driver.ask([[1, 2, 3]], [SamplingParams(temperature=0.0, max_tokens=3)])
    captured = len(driver.runner.graphs)
    while driver.core.use_idle_time():
        pass
    assert len(driver.runner.graphs) > captured


def test_a_launch_without_memory_is_done_again_in_parts(qwen3: Path) -> None:
    prompts = [[index] * 20 for index in range(1, 6)]
    params = [SamplingParams(temperature=0.0, max_tokens=6)] * 5
    expected = [answer.token_ids for answer in DeviceDriver(qwen3).ask(prompts, params)]
    driver = DeviceDriver(qwen3, graphs_max=0)
    ran, failed = driver.runner._run, 0

    def run_out(kind: StepKind) -> None:
        nonlocal failed
        if kind.tokens > 30:
            failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        ran(kind)

    driver.runner.graphs._run = run_out
    answers = driver.ask(prompts, params)
    assert failed > FLIGHTS  # Or the next one would find none.
    assert [answer.token_ids for answer in answers] == expected


def test_a_device_that_is_not_there_is_refused_by_name(qwen3: Path) -> None:
    assert not torch.cuda.is_available()
    with pytest.raises(ConfigError, match=r"engine.device is cuda, but torch sees no CUDA device \(torch 2"):
        build_runner(qwen3, EngineSettings(device="cuda"), ManualClock(), lambda _stage, _done, _total: None)


@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value):RuntimeWarning")
def test_the_real_kernels_draw_the_same_tokens(qwen3: Path) -> None:
    """The whole path on Triton's kernels, in its interpreter: a chunk beside a row that decodes, launched
    ahead.
    """
    plans = decode_plans(1, 2)
    late = NewRow(RequestId("late"), 5, tuple(range(40, 47)), 7, KINDS[-1])
    plans[2] = replace(plans[2], new_rows=(late,), work=(*plans[2].work, RowWork(5, 0, 7, True, (20,))))
    twin = device_runner(qwen3)
    expected = [twin.run(plan).sampled for plan in plans]
    runner = device_runner(qwen3, ops=TritonOps(torch.device("cpu"), num_programs=2), graphs_max=0)
    for plan in plans:
        runner.launch(plan)
    for sampled in expected:
        found = runner.collect().sampled
        assert [one.token_id for one in found] == [one.token_id for one in sampled]
        ours, theirs = ([one.logprob for one in each if one.logprob] for each in (found, sampled))
        assert list(flat(ours)) == pytest.approx(list(flat(theirs)), abs=1e-4)

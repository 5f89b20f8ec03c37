"""The roofline: published shapes come out right, and more work never takes less time."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CheckpointError, ConfigError
from penstock.planning.roofline import (
    ACCELERATORS,
    MODELS,
    CostFloor,
    Efficiency,
    Placed,
    Roofline,
    accelerator,
    model_shape,
)
from penstock.planning.step_time import LinearStepTime
from penstock.schedule.step import StepShape
from penstock.sim.world.rollout import Slower

BILLIONS = {
    "7b": 7.24,
    "8b": 8.03,
    "13b": 13.0,
    "70b": 70.6,
    "8x7b": 46.7,
    "30b-a3b": 30.5,
    "0.5b": 0.494,
    "28m": 0.0281,
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_have_their_published_size(name: str) -> None:
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_kv_of_the_70b_model_is_what_the_requirement_says() -> None:
    """128K tokens take 40 GiB."""
    assert MODELS["70b"].kv_bytes_per_token() == 327_680
    assert MODELS["70b"].kv_bytes_per_token() * 131_072 / 2**30 == 40


def test_one_row_is_bound_by_reading_the_weights() -> None:
    placed = Placed(model=MODELS["8b"], device=accelerator("h100"))
    memory, compute, link = Roofline(placed).parts_ns(StepShape(1, 0, 0, 100))
    assert memory > 10 * compute
    assert link == 0
    assert memory == pytest.approx((8.03e9 - 128_256 * 4096) * 2 / (3.35e12 * 0.85) * 1e9, rel=0.01)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    placed = Placed(model=MODELS["8b"], device=accelerator("h100"))
    memory, compute, _ = Roofline(placed).parts_ns(StepShape(0, 1, 8192, 8192, 8192 * 8193 // 2))
    assert compute > 5 * memory


def fleet_cost(floor: CostFloor, law: Roofline, *batches: int) -> float:
    """How many times the floor a fleet costs of which each worker runs steps of this batch for as long as the
    slowest, an empty one none.
    """
    shapes = [StepShape(rows, 0, 0, rows * 500) for rows in batches if rows]
    for shape in shapes:
        floor.count(shape)
    return len(batches) * max(map(law.step_ns, shapes)) / floor.floor_ns


def test_a_full_fleet_costs_less_than_twice_its_floor_and_a_half_empty_one_more() -> None:
    placed = Placed(model=MODELS["8b"], device=accelerator("h100"))
    law = Roofline(placed)

    def floor() -> CostFloor:
        return CostFloor(placed, rows=64, kv_tokens=64 * 500)

    assert 1 < fleet_cost(floor(), law, 64, 64) < 2
    assert fleet_cost(floor(), law, 64, 0) > 2
    assert fleet_cost(floor(), law, 16, 16) > 2
    full = floor()
    full.count(StepShape(64, 0, 0, 64 * 500))
    assert full.memory_ns == pytest.approx(full.floor_ns), "a full step of decoding is what memory needs"
    assert full.memory_ns / law.step_ns(StepShape(64, 0, 0, 64 * 500)) == pytest.approx(0.73, abs=0.05), "MBU"


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 4), st.integers(1, 2000)), min_size=1))
def test_no_step_is_faster_than_its_floor(steps: list[tuple[int, int, int]]) -> None:
    """Not even on a device that reaches all of its data sheet."""
    placed = Placed(model=MODELS["30b-a3b"], device=accelerator("h100"))
    ideal = Roofline(placed, Efficiency(memory=1, compute=1))
    floor, took = CostFloor(placed, rows=64, kv_tokens=10**5), 0.0
    for decoding, prompts, length in steps:
        shape = StepShape(decoding, prompts, prompts * length, (decoding + prompts) * length)
        if decoding + prompts:
            took += max(ideal.parts_ns(shape)[:2])
            floor.count(shape)
    assert floor.floor_ns <= took * (1 + 1e-9)
    floor.count(StepShape(0, 0, 0, 0))
    assert floor.floor_ns <= took * (1 + 1e-9), "a step without work costs nothing"


shapes = st.builds(
    StepShape, st.integers(0, 256), st.integers(0, 64), st.integers(1, 8192), st.integers(1, 500_000),
    st.integers(0, 10_000_000),
)  # fmt: skip


@given(shapes, shapes, st.sampled_from(sorted(MODELS)), st.sampled_from(["h100", "a100-80", "l4"]))
def test_more_work_never_takes_less_time(a: StepShape, b: StepShape, model: str, device: str) -> None:
    law = Roofline(Placed(model=MODELS[model], device=accelerator(device)))
    both = StepShape(*map(max, a, b))
    assert law.step_ns(both) >= max(law.step_ns(a), law.step_ns(b)) > 0


@given(st.integers(1, 256), st.integers(1, 500_000), st.sampled_from(sorted(MODELS)))
def test_steps_that_decode_take_what_each_of_them_takes(rows: int, kv_tokens: int, model: str) -> None:
    roofline = Roofline(Placed(model=MODELS[model], device=accelerator("h100")))
    read = range(kv_tokens, kv_tokens + 5 * rows, rows)
    for law in (roofline, LinearStepTime(), Slower(roofline, 1.7)):
        each = [law.step_ns(StepShape(rows, 0, 0, count)) for count in read]
        assert law.decode_ns(rows, read) == each


def test_tensor_parallelism_divides_reading_and_pays_for_the_link() -> None:
    one, four = (Roofline(Placed(model=MODELS["8b"], device=accelerator("h100"), tp=tp)) for tp in (1, 4))
    shape = StepShape(16, 0, 0, 16_000)
    assert four.parts_ns(shape)[0] == pytest.approx(one.parts_ns(shape)[0] / 4)
    assert four.parts_ns(shape)[2] > 0


def test_experts_are_read_as_tokens_reach_them() -> None:
    assert MODELS["8x7b"].touched_experts(1) == pytest.approx(2)
    assert 7.9 < MODELS["8x7b"].touched_experts(20) < 8


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ConfigError, match="do not fit 1 x a100-80"):
        _ = Placed(model=MODELS["70b"], device=accelerator("a100-80")).num_blocks
    tokens = Placed(model=MODELS["70b"], device=accelerator("a100-80"), tp=4).num_blocks * 16
    assert 350_000 < tokens < 480_000
    with pytest.raises(ConfigError, match="divide"):
        Placed(model=MODELS["8b"], device=accelerator("l4"), tp=3)
    with pytest.raises(ConfigError, match="dtype"):
        Placed(model=MODELS["8b"], device=accelerator("l4"), dtype="bf61")


def test_names_are_forgiving_about_typos_only_in_words() -> None:
    with pytest.raises(ConfigError, match="did you mean h100"):
        accelerator("h10")
    with pytest.raises(ConfigError, match="did you mean 70b"):
        model_shape("70bb")
    assert accelerator("H100") is ACCELERATORS["h100"]


def test_a_config_json_is_a_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers":32,"hidden_size":4096,"intermediate_size":14336,"num_attention_heads":32,'
        '"num_key_value_heads":8,"vocab_size":128256,"model_type":"llama"}'
    )
    assert model_shape(str(tmp_path)).num_parameters == MODELS["8b"].num_parameters
    text = (
        '{"num_hidden_layers":2,"hidden_size":64,"intermediate_size":128,"num_attention_heads":4,'
        '"vocab_size":100}'
    )
    (tmp_path / "config.json").write_text(f'{{"model_type":"a-vision-model","text_config":{text}}}')
    assert (model_shape(str(tmp_path)).num_layers, model_shape(str(tmp_path)).head_dim) == (2, 16)
    (tmp_path / "config.json").write_text('{"hidden_size":64,"num_attention_heads":4}')
    with pytest.raises(CheckpointError, match="intermediate_size is None"):
        model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"hidden_size":"x"}')
    with pytest.raises(CheckpointError):
        model_shape(str(tmp_path / "config.json"))

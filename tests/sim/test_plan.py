"""The planner: its bounds hold, more is never cheaper than less, and the requirement's example comes out as
written.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.commands.plan import check_plan
from penstock.errors import ConfigError
from penstock.planning.plan import Terms, TrafficDemand, cheapest, options, sizing_example
from penstock.planning.roofline import ACCELERATORS, MODELS, accelerator

DEVICES = [accelerator(name) for name in ("a100-80", "h100", "l40s")]


def test_the_example_is_what_the_requirement_says_and_then_corrected() -> None:
    lines = sizing_example(Terms()).lines
    assert [round(line.devices) for line in lines[:3]] == [110, 350, 35]
    assert lines[3].tokens_per_s == pytest.approx(200_000 / 30.5)
    assert 50 <= lines[4].devices <= 100


@given(
    st.floats(0.5, 500), st.integers(50, 8000), st.integers(10, 1000), st.floats(0, 0.9),
    st.sampled_from(["7b", "70b", "30b-a3b"]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_every_option_keeps_its_terms(
    rps: float, prompt: int, output: int, hit_rate: float, model: str
) -> None:
    demand = TrafficDemand(rps=rps, prompt_tokens=prompt, output_tokens=output, hit_rate=hit_rate)
    terms = Terms(ttft_ms=1000, tpot_ms=60)
    for option in options(MODELS[model], demand, terms, DEVICES):
        assert option.step_ms <= 60
        assert option.ttft_ms <= 1000
        assert (option.replicas - 1) * option.replica_tps * terms.load >= demand.tokens_per_s * (1 - 1e-6)
        assert option.times_least >= 1
        assert option.devices == option.replicas * option.tp


def test_more_traffic_or_longer_prompts_never_cost_less() -> None:
    prices = [
        cheapest(MODELS["70b"], TrafficDemand(rps=rps), Terms(), DEVICES).price_per_hour
        for rps in (1, 10, 50, 200)
    ]
    assert prices == sorted(prices)
    tokens = [
        cheapest(MODELS["7b"], TrafficDemand(rps=100, prompt_tokens=prompt), Terms(), DEVICES).price_per_hour
        for prompt in (100, 1000, 4000)
    ]
    assert tokens == sorted(tokens)


def test_what_cannot_be_kept_is_said() -> None:
    with pytest.raises(ConfigError, match="weights do not fit"):
        cheapest(MODELS["70b"], TrafficDemand(rps=1), Terms(), [accelerator("l4")], dtype="fp32")
    with pytest.raises(ConfigError, match=r"a single row takes \d"):
        cheapest(MODELS["70b"], TrafficDemand(rps=1), Terms(tpot_ms=2), DEVICES)


def test_a_plan_keeps_its_promise_in_the_simulator() -> None:
    """The planner's arithmetic and the real scheduler agree: at the planned load nearly all requests are in
    time.
    """
    demand, terms = (
        TrafficDemand(rps=6, prompt_tokens=600, output_tokens=40),
        Terms(ttft_ms=1500, tpot_ms=80, max_running=32),
    )
    option = cheapest(MODELS["7b"], demand, terms, [ACCELERATORS["a10g"]])
    assert check_plan(option, MODELS["7b"], demand, terms, [ACCELERATORS["a10g"]]).attainment > 0.9

"""A bit that flips in the weights of a real engine: probes see it, and so does the check in idle time."""

from pathlib import Path

import pytest
import torch
from engine_driver import Answer, Driver

from penstock.clock import NS_PER_S, ManualClock
from penstock.engine.weight_check import REST_NS, SLICE_BYTES, WeightCheck
from penstock.errors import WeightsDamaged
from penstock.policy.resilience.anomalies import Anomalies, Standing
from penstock.policy.resilience.probes import (
    PROMPT,
    TOKENS,
    TOLERANCE,
    TOP,
    ProbeAnswer,
    ProbeToken,
    distance,
)
from penstock.text.tokenizer import Tokenizer
from penstock.types import SamplingParams

MODEL = Path(__file__).parents[2] / "models" / "penstock-demo-mini"
PROBE = SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, temperature=0.0, logprobs=TOP)
BEAT_NS = 30 * NS_PER_S
PAGE = 4096 // 2
"""Weights in a page, of two bytes each."""


@pytest.fixture(scope="module")
def engine() -> Driver:
    return Driver(MODEL, dtype="bfloat16", kernels="auto", prefix_cache=False)


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    return Tokenizer.load(MODEL).encode(PROMPT, add_special_tokens=True)


def probe(engine: Driver, prompt: tuple[int, ...], beside: int = 0) -> ProbeAnswer:
    """Of the engine, among other requests of several lengths."""
    others = [tuple(range(40 + i, 41 + 17 * (i + 1) % 90 + 40 + i)) for i in range(beside)]
    sampling = [SamplingParams(max_tokens=9 + i, temperature=0.8, seed=i) for i in range(beside)]
    return answered(engine.ask([*others, prompt], [*sampling, PROBE])[-1])


def answered(answer: Answer) -> ProbeAnswer:
    tokens = (
        ProbeToken(b"%d" % each.token_id, {b"%d" % token: logprob for token, logprob in each.top})
        for each in answer.logprobs
    )
    return ProbeAnswer(tokens=tuple(tokens))


def test_batches_never_flag(engine, prompt):
    golden = probe(engine, prompt)
    assert len(golden.tokens) == TOKENS
    assert all(len(each.top) == TOP for each in golden.tokens)
    apart = [distance(golden, probe(engine, prompt, beside)) for beside in (1, 2, 5, 11)]
    assert max(apart) < TOLERANCE / 3


@pytest.mark.parametrize("layer", ["first", "last"])
def test_a_flipped_exponent_bit_in_a_page_is_caught_within_two_beats(engine, prompt, layer):
    large = [each for each in engine.runner._model.weights() if each.numel() >= 8 * PAGE and each.dim() == 1]
    weight = large[0 if layer == "first" else -2]
    words = weight.view(torch.int16)[3 * PAGE : 4 * PAGE]
    anomalies = Anomalies(BEAT_NS)
    anomalies.worker(0, "demo", "w", ready=True, identity="i")

    def beat(number: int) -> str:
        assert anomalies.due(number * BEAT_NS) == ["w"]
        return anomalies.probed(number * BEAT_NS, "w", probe(engine, prompt))

    assert beat(1) == "right"
    words ^= 1 << 14  # The highest of bfloat16's eight exponent bits.
    try:
        assert [beat(2), beat(2)] == ["wrong", "wrong"]
    finally:
        words ^= 1 << 14
    assert anomalies.get("w").is_certain
    assert anomalies.get("w").standing is Standing.DOUBTED, "it is alone, so it is not ejected"
    assert beat(3) == "right"


def passes(check: WeightCheck, clock: ManualClock, count: int) -> None:
    while check.num_passes < count:
        clock.advance(max(0, check.due_ns - clock.now_ns()))
        check.step()


def test_the_check_finds_any_bit_in_small_slices(engine):
    clock = ManualClock()
    check = engine.runner.weight_check(clock)
    before_ns = check.due_ns
    check.step()
    assert check.due_ns == before_ns, "it is not time yet"
    passes(check, clock, 2)
    assert check.due_ns - clock.now_ns() == REST_NS
    assert (
        sum(each.nbytes for each in engine.runner._model.weights())
        > engine.runner.info.num_parameters * 2 * 0.9
    )
    table = max(engine.runner._model.weights(), key=lambda each: each.nbytes)
    assert table.nbytes > SLICE_BYTES
    last = table.view(-1).view(torch.uint8)[-1:]
    last ^= 1
    try:
        with pytest.raises(WeightsDamaged, match="byte"):
            passes(check, clock, 3)
    finally:
        last ^= 1


def test_an_idle_engine_looks_after_its_weights_and_a_busy_one_does_not(engine):
    core, check = engine.core, engine.core._check
    assert core.rest_s is not None
    check.due_ns = 0
    assert core.rest_s == 0
    assert core.use_idle_time() is False
    assert check._next == 1
    assert core.rest_s > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_torch_decoder_is_looked_after_too(qwen3, dtype):
    """In the memory that it multiplies with, which may be a copy; what it was copied from is not kept."""
    runner = Driver(qwen3, dtype=dtype).runner
    clock = ManualClock()
    held, check = runner._model.weights(), runner.weight_check(clock)
    once = {each.data_ptr(): each.numel() for each in held}
    assert (
        0.9 < sum(once.values()) / runner.info.num_parameters <= 1.0 + 211 * 48 / runner.info.num_parameters
    )
    passes(check, clock, 1)
    multiplied = runner._model._decoder._layers[1].o.tensors[0]
    with torch.inference_mode():
        multiplied[0, 0] += 1
    with pytest.raises(WeightsDamaged):
        passes(check, clock, 2)

"""Scores: monotone in every fact, their terms sum to their totals, and the learned speeds they stand on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.policy.estimates import Ran, Speed, Speeds
from penstock.policy.placement.score import ScoredRequest, WorkerFacts, pressure, score_policy
from penstock.policy.terms import PlacementTerms, WeightedTerms
from penstock.types import WorkerId

SPEED = Speed(
    fixed_s=0.005, token_s=1 / 4000, pair_s=1e-9, stream_s=1e-4, token_stream_s=1e-7, step_s=0.03,
    step_stream_s=0.001, service_s=4.0,
)  # fmt: skip
POLICIES = [score_policy(PlacementTerms(policy=name)) for name in ("ttft", "weighted")]

requests = st.builds(
    ScoredRequest,
    prompt_tokens=st.integers(1, 100_000),
    output_tokens=st.integers(1, 4000),
    streams=st.integers(1, 4),
    level=st.integers(0, 3),
    needs_adapter=st.booleans(),
)
workers = st.builds(
    WorkerFacts,
    worker=st.just(WorkerId("w")),
    number=st.just(0),
    has_room=st.booleans(),
    device_tokens=st.integers(0, 50_000),
    host_tokens=st.integers(0, 50_000),
    backlog_tokens=st.integers(0, 50_000),
    running=st.integers(0, 300),
    rows=st.integers(0, 256),
    slots=st.integers(1, 260),
    held=st.integers(0, 10),
    kv_blocks=st.integers(0, 10_000),
    kv_blocks_used=st.integers(0, 10_000),
    adapter_s=st.sampled_from([0.0, 0.5, 2.0]),
    speed=st.just(SPEED),
)


def test_a_worker_that_tells_of_no_memory_is_under_no_pressure() -> None:
    request = ScoredRequest(prompt_tokens=1000, output_tokens=1000)
    assert pressure(request, WorkerFacts(worker=WorkerId("w"), number=0)) == 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@given(request_facts=requests, worker=workers, more=st.integers(1, 5000))
def test_more_of_anything_bad_never_makes_a_worker_better(policy, request_facts, worker, more) -> None:
    before = policy.score(request_facts, worker).total
    # Of many streams one ends sooner: good for whoever waits for room, bad for everybody else.
    for name in ("backlog_tokens", "held", "kv_blocks_used", *(["running"] if worker.has_room else [])):
        worse = replace(worker, **{name: getattr(worker, name) + more})
        assert policy.score(request_facts, worse).total >= before - 1e-9, name
    assert (
        policy.score(request_facts, replace(worker, adapter_s=worker.adapter_s + 1.0)).total >= before - 1e-9
    )
    held = min(worker.device_tokens + more, request_facts.prompt_tokens)
    if held + worker.host_tokens <= request_facts.prompt_tokens and held >= worker.device_tokens:
        assert policy.score(request_facts, replace(worker, device_tokens=held)).total <= before + 1e-9
    if worker.host_tokens + worker.device_tokens <= request_facts.prompt_tokens:
        nearer = replace(worker, device_tokens=worker.device_tokens + worker.host_tokens, host_tokens=0)
        assert policy.score(request_facts, nearer).total <= before + 1e-9


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@given(request_facts=requests, worker=workers)
def test_terms_sum_to_the_total(policy, request_facts, worker) -> None:
    score = policy.score(request_facts, worker)
    sign = -1 if policy.name == "weighted" else 1
    assert len(score.terms) == len(policy.terms)
    assert sum(score.terms) == pytest.approx(sign * score.total)
    assert 0 <= score.room_wait_s <= score.ttft_s


def test_the_terms_of_ttft_by_hand() -> None:
    speed = Speed(token_s=0.001, step_s=0.04, step_stream_s=0.005, service_s=2.0)
    worker = WorkerFacts(
        worker=WorkerId("w"), number=0, device_tokens=600, host_tokens=200, backlog_tokens=500, running=3,
        rows=8, slots=8, kv_blocks=100, kv_blocks_used=24, adapter_s=2.0, speed=speed,
    )  # fmt: skip
    request = ScoredRequest(prompt_tokens=1000, output_tokens=216, needs_adapter=True)
    policy = score_policy(PlacementTerms())
    terms = dict(zip(policy.terms, policy.score(request, worker).terms, strict=True))
    assert terms == pytest.approx(
        {
            "wait_s": 0.5,
            "reload_s": 0.02,
            "prefill_s": 0.2,
            "adapter_s": 2.0,
            "others_s": 0.2,
            "tpot_s": (0.06 - 0.05) * 216,
            "pressure_s": 0.1 * 99,
        }
    )


def test_the_terms_of_weighted_by_hand() -> None:
    speed = Speed(token_s=0.001)
    worker = WorkerFacts(
        worker=WorkerId("w"), number=0, device_tokens=600, host_tokens=200, backlog_tokens=500, running=3,
        rows=8, slots=8, kv_blocks=100, kv_blocks_used=24, speed=speed,
    )  # fmt: skip
    config = PlacementTerms(policy="weighted", weighted=WeightedTerms(reserve=0.2))
    terms = (
        score_policy(config).score(ScoredRequest(prompt_tokens=640, output_tokens=160, level=2), worker).terms
    )
    full = 0.74 / 0.26 / 4
    assert terms == pytest.approx((0.45, -0.25 * 0.5, -0.2 * full, 0.1))
    over = (
        score_policy(config).score(ScoredRequest(prompt_tokens=640, output_tokens=160, level=3), worker).terms
    )
    assert over[3] == 0, "three streams of its bands' reserve would be taken"


def ran(i: int, **facts) -> Ran:
    return Ran(at_ns=i * NS_PER_S, **{"computed_tokens": 100, "prompt_tokens": 100, **facts})


def test_speeds_are_believed_until_they_are_seen_and_kept_by_kind() -> None:
    speeds = Speeds(PlacementTerms(prefill_tokens_per_s=2000, step_ms=20))
    assert speeds.of("a").prefill_s(2000, 2000, 0) == pytest.approx(1.0)
    assert speeds.of("a").tpot_s(5) == pytest.approx(0.02)
    for i in range(200):
        tokens = 100 + 37 * (i % 50)
        speeds.learn(
            "a", ran(i, computed_tokens=tokens, prompt_tokens=tokens, first_ns=tokens * NS_PER_MS // 10)
        )
    assert speeds.of("a").prefill_s(1000, 1000, 0) == pytest.approx(0.1, rel=0.05)
    assert speeds.of("b").prefill_s(1000, 1000, 0) == pytest.approx(0.5)


def test_time_to_first_output_teaches_where_nobody_tells_less_what_went_before() -> None:
    speeds = Speeds(PlacementTerms(prefill_tokens_per_s=2000))
    for i in range(200):
        tokens, backlog = 100 + 37 * (i % 50), 500 * (i % 3)
        first_ns = (tokens + backlog) * NS_PER_MS // 10
        speeds.learn(
            "",
            ran(i, computed_tokens=tokens, prompt_tokens=tokens, backlog_tokens=backlog, first_ns=first_ns),
        )
        speeds.learn("", ran(i, first_ns=90 * NS_PER_S, waited=True))
    assert speeds.of("").prefill_s(1000, 1000, 0) == pytest.approx(0.1, rel=0.15)


def test_steps_and_service_are_learned() -> None:
    speeds = Speeds(PlacementTerms())
    for i in range(200):
        streams = 1 + i % 8
        speeds.learn(
            "", ran(i, step_ns=(10 + 2 * streams) * NS_PER_MS, step_streams=streams, service_ns=3 * NS_PER_S)
        )
    assert speeds.of("").tpot_s(4) == pytest.approx(0.018, rel=0.05)
    assert speeds.of("").service_s == pytest.approx(3.0)


def test_a_prompt_costs_what_each_of_its_parts_costs() -> None:
    speed = Speed(fixed_s=0.5, token_s=0.01, pair_s=0.001, stream_s=2.0, token_stream_s=0.1)
    assert speed.prefill_s(10, 100, 0) == pytest.approx(0.5 + 10 * (0.01 + 0.001 * 100))
    assert speed.prefill_s(10, 100, 3) == pytest.approx(0.5 + 10 * 0.11 + 3 * (2.0 + 10 * 0.1))
    assert speed.backlog_s(10, 3) == pytest.approx(10 * (0.01 + 0.1 * 3))

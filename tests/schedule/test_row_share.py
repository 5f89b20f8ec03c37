"""Whose row a waiting tenant gets: shares and turns."""

from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_engine import ScheduledEngine

from penstock.config.engine_settings import EngineSettings
from penstock.kv.hashing import token_array
from penstock.schedule.batch import Batch
from penstock.schedule.queue import WaitingQueue, waiting_queue
from penstock.schedule.request import Request, Status
from penstock.schedule.shares import TURN_TOKENS, RowShare
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

LONG = 400


def engine_of(rows: int = 4, scheduling: str = "fair", **limits) -> ScheduledEngine:
    queue = waiting_queue(EngineSettings(scheduling=scheduling, max_waiting=1000))
    limits = {"num_blocks": 2000, "step_tokens": 256, "max_model_len": 2000, **limits}
    return ScheduledEngine(queue=queue, max_running=rows, **limits)


def submit(engine: ScheduledEngine, name: str, tenant: str, max_tokens: int = LONG, **fields) -> None:
    prompt = [len(engine.requests)] * 20
    fields = {"fairness_key": tenant, "salt": tenant.encode(), "takes_row": True, **fields}
    engine.submit(name, prompt, max_tokens=max_tokens, **fields)


def flood(engine: ScheduledEngine, count: int, tenant: str = "big", steps: int = 40) -> list[str]:
    names = [f"{tenant}-{i}" for i in range(count)]
    for name in names:
        submit(engine, name, tenant)
    for _ in range(steps):
        engine.step()
    return names


def steps_to_first(engine: ScheduledEngine, name: str, limit: int = 3000) -> int:
    for count in range(1, limit):
        engine.step()
        if engine.got[name]:
            return count
    raise AssertionError(f"{name} has no token after {limit} steps")


def finish(engine: ScheduledEngine) -> None:
    """All end, each with the tokens that it would have had alone."""
    engine.run()
    for name in engine.requests:
        assert tuple(engine.got[name]) == engine.expected(name)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tenant_that_arrives_has_its_first_token_in_the_next_step(overlap: bool) -> None:
    engine = engine_of(overlap=overlap)
    flood(engine, 4)
    submit(engine, "small", "small", 10)
    assert steps_to_first(engine, "small") <= 1 + 2 * overlap  # A step that is in flight ends first.
    finish(engine)
    assert [request.num_yields for request in engine.requests.values()].count(1) == 1
    assert engine.scheduler.statistics().yields == 1


def test_the_example_of_the_page() -> None:
    """docs/overload.md, "A tenant that arrives"."""
    engine = engine_of(16, step_tokens=512)
    big = flood(engine, 16)
    submit(engine, "small", "small", 3)
    engine.step()
    assert engine.got["small"]
    assert engine.scheduler.statistics().running == 16
    assert engine.scheduler.statistics().waiting == 1
    (waits,) = (name for name in big if engine.requests[name].num_yields)
    for _ in range(3):
        engine.step()
    assert engine.ends["small"].finish is not None
    assert engine.requests[waits].status is Status.RUNNING
    finish(engine)


def test_also_where_the_flood_has_more_streams_than_rows() -> None:
    engine = engine_of()
    flood(engine, 8)
    submit(engine, "small", "small", 10)
    assert steps_to_first(engine, "small") == 1
    finish(engine)


def test_who_may_not_take_a_row_waits_for_one() -> None:
    engine = engine_of()
    flood(engine, 4)
    submit(engine, "small", "small", 10, takes_row=False)
    finish(engine)
    assert not engine.scheduler.statistics().yields


def test_rows_are_taken_up_to_the_share_and_not_back_and_forth() -> None:
    engine = engine_of(8)
    flood(engine, 8)
    flood(engine, 8, "other", steps=60)
    tenants = [request.fairness_key for request in engine.scheduler.running]
    assert tenants.count("big") == tenants.count("other") == 4
    assert engine.scheduler.statistics().yields == 4
    for _ in range(100):
        engine.step()
    assert engine.scheduler.statistics().yields == 4
    finish(engine)


def test_a_weight_is_worth_so_many_rows() -> None:
    queue = waiting_queue(EngineSettings(scheduling="fair", fair_weights={"other": 3.0}))
    engine = ScheduledEngine(queue=queue, max_running=8, num_blocks=2000, step_tokens=256, max_model_len=999)
    flood(engine, 8)
    flood(engine, 8, "other", steps=60)
    tenants = [request.fairness_key for request in engine.scheduler.running]
    assert (tenants.count("big"), tenants.count("other")) == (2, 6)
    finish(engine)


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
def test_without_shares_nobody_yields(scheduling: str) -> None:
    engine = engine_of(scheduling=scheduling)
    flood(engine, 4)
    submit(engine, "small", "small", 10)
    finish(engine)
    assert not engine.scheduler.statistics().yields


def test_a_tenant_takes_nothing_from_itself() -> None:
    engine = engine_of()
    flood(engine, 12)
    finish(engine)
    assert not engine.scheduler.statistics().yields


def test_a_lower_class_takes_nothing_from_a_better_one() -> None:
    engine = engine_of()
    flood(engine, 4)
    submit(engine, "later", "small", 10, priority=1)
    submit(engine, "better", "other", 10, priority=-1)
    assert steps_to_first(engine, "better") <= 2
    assert not engine.got["later"]
    finish(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_go_round_when_there_are_more_tenants_than_rows(overlap: bool) -> None:
    engine = engine_of(overlap=overlap)
    for number in range(12):
        submit(engine, f"r{number}", f"t{number}")
    for _ in range(3 * (TURN_TOKENS + BLOCK_TOKENS)):
        engine.step()
    assert all(engine.got[name] for name in engine.requests), "somebody waits for a whole stream"
    finish(engine)
    known = sum(len(request.tokens) - 1 for request in engine.requests.values())
    ends = [end.usage for end in engine.ends.values() if end.usage]
    assert sum(usage.computed_tokens for usage in ends) == known, "at the end of a block nothing is lost"
    assert engine.scheduler.statistics().yields > 12


def test_with_more_tenants_than_rows_a_first_token_waits_for_a_block_at_most() -> None:
    engine = engine_of()
    for number in range(8):
        submit(engine, f"r{number}", f"t{number}")
    for _ in range(100):
        engine.step()
    for number in range(4):  # Also those who wait for their turn let it pass.
        submit(engine, f"new-{number}", "new", 10)
        assert steps_to_first(engine, f"new-{number}") <= BLOCK_TOKENS + 1
        for _ in range(15):
            engine.step()
    finish(engine)


def test_a_tenant_that_waits_for_memory_gets_that_of_one_that_has_more_than_its_share() -> None:
    engine = engine_of(8, num_blocks=28)
    flood(engine, 4, steps=88)  # 4 streams of 7 blocks are all that there is.
    submit(engine, "small", "small", 10)
    assert len(engine.scheduler.running) <= 4
    assert steps_to_first(engine, "small") <= BLOCK_TOKENS
    finish(engine)


# --- the same decisions, however many wait ------------------------------------------------------------


class Rows:
    """What `RowShare` asks of a batch and of a queue; counts how often it asks for a weight."""

    def __init__(self, running: list[Request]) -> None:
        self.running = running
        self.rows_by_tenant = Counter(each.fairness_key for each in running)
        self.changes = 1
        self.asked = 0

    def weight_of(self, request: Request) -> float:
        self.asked += 1
        return request.fairness_weight


def known(number: int, tenant: str, weight: float, priority: int, drawn: int, num_yields: int) -> Request:
    request = Request(
        request_id=RequestId(f"r{number}"),
        tokens=token_array([1] * (20 + drawn)),
        sampling=SamplingParams(),
        fairness_key=tenant,
        fairness_weight=weight,
        priority=priority,
    )
    request.order = (priority, number, number)
    request.num_known_at_row, request.num_yields = 20, num_yields
    request.num_planned, request.num_tokens_max = 19 + drawn, 220
    request.status = Status.RUNNING
    return request


def slow_victim(rows: Rows, taker: Request) -> Request | None:
    """The rules word for word: every row, for every taker."""
    own, by_tenant = taker.fairness_key, rows.rows_by_tenant

    def yields(each: Request) -> bool:
        drawn = each.num_drawn_here
        if each.fairness_key == own or each.priority < taker.priority:
            return False
        if drawn < (BLOCK_TOKENS if each.num_yields else 1):
            return False
        if each.num_tokens_max - len(each.tokens) <= BLOCK_TOKENS:
            return False
        left, more = by_tenant[each.fairness_key] - 1, by_tenant.get(own, 0) + 1
        if left * taker.fairness_weight >= more * each.fairness_weight:
            return True
        turn = TURN_TOKENS if taker.num_generated else BLOCK_TOKENS
        return not by_tenant[own] and drawn >= turn and not each.num_planned % BLOCK_TOKENS

    def rank(each: Request) -> tuple[object, ...]:
        share = by_tenant[each.fairness_key] / each.fairness_weight
        return each.priority, share, -each.num_yields, -(each.num_planned % BLOCK_TOKENS), each.order

    return max(filter(yields, rows.running), key=rank, default=None)


rows_and_takers = st.tuples(
    st.sampled_from("abcdefgh"),
    st.sampled_from([1.0, 1.0, 1.0, 0.1, 0.3, 3.0]),
    st.integers(-1, 1),
    st.integers(0, 190),
    st.integers(0, 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(rows_and_takers, max_size=12), st.lists(rows_and_takers, max_size=6))
def test_each_taker_gets_the_row_that_the_rules_say(running: list[Any], takers: list[Any]) -> None:
    rows = Rows([known(i, *fields) for i, fields in enumerate(running)])
    share = RowShare(cast(Batch, rows), cast(WaitingQueue, rows))
    for number, fields in enumerate(takers):
        taker = known(100 + number, *fields)
        taker.status = Status.WAITING
        assert share.victim(taker) is slow_victim(rows, taker)


def test_takers_that_get_nothing_cost_little() -> None:
    rows = Rows([known(i, f"t{i % 64}", 1.0, 0, 30, 0) for i in range(256)])
    share = RowShare(cast(Batch, rows), cast(WaitingQueue, rows))
    takers = [known(1000 + i, f"t{i % 64}", 1.0, 0, 0, 0) for i in range(1000)]
    for taker in takers:
        taker.status = Status.WAITING
    for _ in range(2):
        share.look_again()
        assert not any(map(share.victim, takers))
    assert rows.asked <= 4 * (len(rows.running) + 2 * len(takers))


# --- whatever comes ---------------------------------------------------------------------------------

arrivals = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 150), st.integers(0, 40)), min_size=1, max_size=30
)


@settings(max_examples=12, deadline=None)
@given(arrivals, st.integers(1, 4), st.booleans(), st.integers(40, 200))
def test_tokens_never_depend_on_it_yields_are_bounded_and_no_tenant_starves(
    requests: list[tuple[int, int, int]], rows: int, overlap: bool, num_blocks: int
) -> None:
    """With as many streams of ten tenants as come, on very few rows."""
    engine = engine_of(rows, num_blocks=num_blocks, overlap=overlap, max_model_len=300, check_every=8)
    waited: dict[str, int] = {}
    for number, (tenant, max_tokens, pause) in enumerate(requests):
        submit(engine, f"r{number}", f"t{tenant}", max_tokens)
        for _ in range(pause):
            engine.step()
            running = {request.fairness_key for request in engine.scheduler.running}
            waiting = {engine.requests[name].fairness_key for name in engine.live} - running
            waited = {key: waited.get(key, 0) + 1 for key in sorted(waiting)}
            turns = -(-10 // rows)
            assert max(waited.values(), default=0) <= turns * (TURN_TOKENS + 2 * BLOCK_TOKENS)
    finish(engine)
    for request in engine.requests.values():
        assert request.num_yields <= 1 + request.num_generated // BLOCK_TOKENS

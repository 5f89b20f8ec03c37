"""Who gets KV blocks when there are not enough: the reserve of admission, victims, the shield, quotas."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_engine import ScheduledEngine

from penstock.errors import KVQuotaExceeded
from penstock.kv.cache.block_pool import BlockPool
from penstock.kv.cache.manager import BlockTable
from penstock.kv.hashing import BlockHash, token_array
from penstock.schedule.queue import ClassQueue, FCFSQueue, by_class
from penstock.schedule.request import Request
from penstock.schedule.shares import PRIOR_TOKENS, RISE, AdmissionReserve, OutputEstimate, VictimChoice
from penstock.types import RequestId, SamplingParams


def make(
    name: str, *, priority: int = 0, number: int = 0, tokens: int = 1, generated: int = 0, key: str = ""
) -> Request:
    request = Request(
        request_id=RequestId(name),
        tokens=token_array([1] * tokens),
        sampling=SamplingParams(max_tokens=1000),
        order=(priority, number, number),
        priority=priority,
        fairness_key=key,
    )
    request.tokens.extend([2] * generated)
    request.num_tokens_max = tokens + 1000
    request.table = BlockTable(owner=b"", root=BlockHash(b""))
    return request


# --- the reserve ----------------------------------------------------------------------------------


def test_the_reserve_rises_with_preemption_and_decays() -> None:
    reserve = AdmissionReserve()
    assert reserve.rho == 0
    reserve.step_over(preempted=True)
    assert reserve.rho == RISE
    for _ in range(180):
        reserve.step_over(preempted=False)
    assert reserve.rho == pytest.approx(RISE / 2, rel=0.02)
    for _ in range(10):
        reserve.step_over(preempted=True)
    assert reserve.rho == 1


def test_what_is_owed_grows_with_rho_up_to_what_is_expected() -> None:
    reserve, request = AdmissionReserve(), make("a", tokens=33)
    assert reserve.blocks_owed(request) == 3 + 1
    reserve.rho = 0.5
    assert reserve.blocks_owed(request) == 3 + PRIOR_TOKENS // 32
    reserve.rho = 1.0
    assert reserve.blocks_owed(request) == 3 + PRIOR_TOKENS // 16
    request.num_tokens_max = 33 + 16
    assert reserve.blocks_owed(request) == 3 + 1


def test_expected_answers_follow_what_ended_by_class() -> None:
    estimate = OutputEstimate()
    for _ in range(100):
        estimate.learn(make("short", generated=10))
        estimate.learn(make("long", priority=1, generated=900))
    assert estimate.remaining(make("a", generated=0)) == 16
    assert estimate.remaining(make("a", priority=1, generated=100)) == pytest.approx(800, abs=5)
    assert estimate.remaining(make("a", priority=1, generated=950)) == 16
    assert estimate.remaining(make("a", priority=1, generated=995)) == 5
    assert estimate.remaining(make("a", priority=2)) == PRIOR_TOKENS


def test_every_class_beyond_the_bound_shares_an_estimate() -> None:
    estimate = OutputEstimate()
    for priority in range(1000):
        estimate.learn(make("a", priority=priority, generated=50))
    assert len(estimate._means) == 65


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=300), st.integers(1, 300), st.integers(0, 500))
def test_the_reserve_stays_between_nothing_and_everything(steps, tokens, generated) -> None:
    reserve, request = AdmissionReserve(), make("a", tokens=tokens, generated=generated)
    for preempted in steps:
        reserve.step_over(preempted=preempted)
        assert 0 <= reserve.rho <= 1
    known = -(-(tokens + generated) // 16)
    assert known < reserve.blocks_owed(request) <= known + 1 + 1000 // 16


def test_thrashing_stops_by_itself() -> None:
    """Many answers that do not fit together: preemptions get rare, since admission learns to hold back."""
    engine = ScheduledEngine(num_blocks=40, step_tokens=64, max_running=16, max_model_len=400)
    for index in range(60):
        engine.submit(f"r{index}", [index] * 10, max_tokens=150)
    engine.run()
    per_request = [request.num_preemptions for request in engine.requests.values()]
    assert sum(per_request[:20]) > 0
    assert sum(per_request[30:]) < 15
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    engine = ScheduledEngine(num_blocks=8, step_tokens=32)
    for name, start in (("a", 0), ("b", 200)):
        engine.submit(name, range(start, start + 20), max_tokens=90)
    engine.step()
    engine.submit("tiny", [1], max_tokens=1)
    for _ in range(200):
        before = engine.scheduler.statistics().preemptions
        plan = engine.step()
        if engine.scheduler.statistics().preemptions > before:
            assert not plan.new_rows
            break
    else:
        pytest.fail("nobody was preempted")


# --- the victim -----------------------------------------------------------------------------------


GRAIN = 64


def choice_of(
    pool: BlockPool, *, preemptions_max=3, is_over=lambda request: False, served=None
) -> VictimChoice:
    """`served` has what tenants were served; without it shares do not count."""
    counters = served or {}
    return VictimChoice(
        pool, preemptions_max, is_over, lambda request: counters.get(request.fairness_key, 0), GRAIN
    )


def hold(pool: BlockPool, request: Request, blocks: int, shared: tuple[int, ...] = ()) -> Request:
    pool.acquire(shared)
    own = pool.allocate(blocks)
    assert own is not None
    request.table.blocks.extend(shared + own)
    request.num_computed = 16 * len(request.table.blocks)
    return request


def test_the_victim_is_the_lowest_class_then_the_least_work() -> None:
    pool = BlockPool(100)
    choice = choice_of(pool)
    first = hold(pool, make("first", number=0), 1)
    old = hold(pool, make("old", number=1), 9)
    small = hold(pool, make("small", number=2), 2)
    new = hold(pool, make("new", number=3), 5)
    low = hold(pool, make("low", priority=1, number=4), 30)
    assert choice.choose([first, old, small, new]) is small
    assert choice.choose([first, old, small, new, low]) is low
    assert choice.choose([first]) is first


def test_work_in_shared_blocks_is_not_lost() -> None:
    pool = BlockPool(100)
    choice = choice_of(pool)
    first = hold(pool, make("first", number=0), 8)
    sharer = hold(pool, make("sharer", number=1), 2, shared=tuple(first.table.blocks))
    alone = hold(pool, make("alone", number=2), 4)
    assert choice.work_lost(sharer) == 2 * 16
    assert choice.choose([first, sharer, alone]) is sharer


def test_the_shield_protects_within_a_class() -> None:
    pool = BlockPool(100)
    choice = choice_of(pool, preemptions_max=2)
    first, often, other = (hold(pool, make(f"r{n}", number=n), 9 - 4 * (n == 1)) for n in range(3))
    low = hold(pool, make("low", priority=1, number=3), 9)
    assert choice.choose([first, often, other]) is often
    often.num_preemptions = 2
    assert choice.choose([first, often, other]) is other
    other.num_preemptions = 5
    assert choice.choose([first, often, other]) is often
    low.num_preemptions = 9
    assert choice.choose([first, often, other, low]) is low


def test_in_a_class_the_tenant_that_was_served_most_gives_way() -> None:
    pool, served = BlockPool(200), {"greedy": 5 * GRAIN, "modest": 4 * GRAIN}
    choice = choice_of(pool, preemptions_max=2, served=served)
    first = hold(pool, make("first", key="greedy", number=0), 1)
    greedy = hold(pool, make("greedy", key="greedy", number=1), 9)
    larger = hold(pool, make("larger", key="greedy", number=2), 12)
    modest = hold(pool, make("modest", key="modest", number=3), 2)
    low = hold(pool, make("low", priority=1, key="modest", number=4), 20)
    assert choice.choose([first, greedy, larger, modest]) is greedy, "of one tenant the least work"
    assert choice.choose([first, greedy, modest, low]) is low, "classes come before shares"
    served["greedy"] -= 1
    assert choice.choose([first, greedy, larger, modest]) is modest, "within a grain they are alike"
    served["greedy"] += 1
    greedy.num_preemptions = larger.num_preemptions = 2
    assert choice.choose([first, greedy, larger, modest]) is modest, "the shield comes before shares"


running_requests = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 4), st.integers(0, 20)),
    min_size=2,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(running_requests, st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, GRAIN)), max_size=40))
def test_two_tenants_do_not_take_turns(facts, service) -> None:
    """Who gives way for its share is a grain ahead of another: before that one does in turn, it is served
    twice a grain.
    """
    pool, served = BlockPool(1000), dict.fromkeys("ab", 0)
    fair, plain = choice_of(pool, served=served), choice_of(pool)
    running = [
        hold(pool, make(f"r{i}", key=key, priority=priority, number=i), blocks)
        for i, (key, priority, times, blocks) in enumerate(facts)
    ]
    running.sort(key=lambda request: request.order)
    for request, (_, _, times, _) in zip(running, facts, strict=True):
        request.num_preemptions = times
    gave_way: dict[tuple[str, str], int] = {}  # (who, for whom) -> what the other had been served.
    for key, num_tokens in service:
        served[key] += num_tokens
        victim, cheapest = fair.choose(running), plain.choose(running)
        assert victim.priority == cheapest.priority
        assert (victim.num_preemptions < 3) == (cheapest.num_preemptions < 3)
        who, other = victim.fairness_key, cheapest.fairness_key
        if who == other:
            continue
        assert served[who] - served[other] >= GRAIN
        gave_way[who, other] = served[other]
        if (other, who) in gave_way:
            assert served[who] >= gave_way[other, who] + 2 * GRAIN
    alike = choice_of(pool, served=dict.fromkeys("ab", 7))
    assert alike.choose(running) is plain.choose(running)


def scarce(queue) -> ScheduledEngine:
    """Four tenants' answers that do not fit together, to their ends."""
    engine = ScheduledEngine(
        num_blocks=40, step_tokens=64, max_running=16, max_model_len=400, queue=queue, check_every=20
    )
    for index in range(30):
        key = "greedy" if index % 2 else f"modest{index % 3}"
        engine.submit(f"r{index}", [index] * 10, max_tokens=40 + 31 * index % 150, fairness_key=key)
    engine.run()
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)
    return engine


def test_shares_cost_no_thrashing() -> None:
    fair, plain = scarce(ClassQueue(100, by_class)), scarce(FCFSQueue(100))
    times = [engine.scheduler.statistics().preemptions for engine in (fair, plain)]
    assert 0 < times[0] <= 1.5 * times[1]
    assert max(request.num_preemptions for request in fair.requests.values()) <= 4
    computed = [sum(end.usage.computed_tokens for end in engine.ends.values()) for engine in (fair, plain)]
    assert computed[0] <= 1.2 * computed[1]


def test_a_tenant_over_its_quota_goes_before_lower_classes() -> None:
    pool = BlockPool(100)
    over = hold(pool, make("over", number=1), 9)
    choice = choice_of(pool, is_over=lambda request: request is over)
    first, low = hold(pool, make("first"), 1), hold(pool, make("low", priority=5, number=2), 1)
    assert choice.choose([first, over, low]) is over


# --- quotas ---------------------------------------------------------------------------------------


def test_what_never_fits_the_quota_is_refused_at_once() -> None:
    engine = ScheduledEngine(num_blocks=20, kv_quota_fraction=0.25)
    engine.submit("fits", range(70), max_tokens=11)
    for prompt, max_tokens, param in ((range(70), 12, "max_tokens"), (range(90), 1, "prompt")):
        with pytest.raises(KVQuotaExceeded, match="80 tokens") as refused:
            engine.submit("no", prompt, max_tokens=max_tokens)
        assert refused.value.param == param
    engine.run()


def test_a_tenant_at_its_quota_waits_and_does_not_hold_others_up() -> None:
    engine = ScheduledEngine(num_blocks=20, kv_quota_fraction=0.5, step_tokens=200)
    for index in range(4):
        engine.submit(f"greedy{index}", [index] * 70, salt=b"greedy", max_tokens=10)
    for index in range(2):
        engine.submit(f"modest{index}", [9 - index] * 20, salt=b"modest", max_tokens=10)
    engine.step()
    running = {name for name, request in engine.requests.items() if request.started_ns is not None}
    assert running == {"greedy0", "greedy1", "modest0", "modest1"}
    assert engine.scheduler.statistics().waiting == 2
    engine.run()
    order = [engine.requests[f"greedy{index}"].started_ns for index in range(4)]
    assert order == sorted(order)
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)


def test_without_a_quota_nobody_passes_the_head() -> None:
    """A quota of all there is parked whoever did not fit beside its own tenant's, and small ones passed it
    (swarm seed 88).
    """
    engine = ScheduledEngine(num_blocks=20, step_tokens=300)
    for name, number in (("large", 200), ("next", 180)):
        engine.submit(name, range(number), salt=b"a", max_tokens=10)
    engine.submit("small", [9] * 20, salt=b"b", max_tokens=10)
    engine.step()
    assert engine.requests["large"].started_ns is not None
    assert engine.requests["small"].started_ns is None
    engine.run()
    assert engine.requests["next"].started_ns <= engine.requests["small"].started_ns


def test_a_shared_prefix_counts_once() -> None:
    engine = ScheduledEngine(num_blocks=20, kv_quota_fraction=0.5, step_tokens=200, max_model_len=200)
    engine.submit("a", [7] * 112, salt=b"t", max_tokens=20)
    engine.step()
    engine.submit("b", [7] * 112 + [1], salt=b"t", max_tokens=4)
    engine.step()
    assert engine.requests["b"].started_ns is not None
    assert engine.kv.pool.num_used_by(b"t") == 9
    engine.run()


def test_a_parked_request_can_be_aborted() -> None:
    engine = ScheduledEngine(num_blocks=20, kv_quota_fraction=0.3, step_tokens=200)
    for index in range(3):
        engine.submit(f"r{index}", [index] * 70, salt=b"t", max_tokens=9)
    engine.step()
    assert engine.scheduler.statistics().waiting == 2
    assert engine.abort("r1") is not None
    engine.scheduler.check_invariants()
    engine.run()
    assert engine.got["r2"] == list(engine.expected("r2"))


def test_a_tenant_that_grew_over_its_quota_is_preempted_first() -> None:
    engine = ScheduledEngine(num_blocks=20, kv_quota_fraction=0.5, step_tokens=300, max_model_len=400)
    for index in range(3):
        engine.submit(f"over{index}", [index] * 30, salt=b"over", max_tokens=110)
    for index in range(2):
        engine.submit(f"late{index}", [7 + index] * 20, salt=b"late", max_tokens=110, priority=1)
    engine.run()
    assert engine.scheduler.statistics().preemptions > 0
    assert engine.requests["over0"].num_preemptions == 0  # The first of all always advances.
    preempted = {name for name, request in engine.requests.items() if request.num_preemptions}
    assert preempted & {"over1", "over2"}
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)


# --- termination ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 100), st.integers(0, 2), st.sampled_from([b"a", b"b"])),
        min_size=2,
        max_size=12,
    ),
    st.integers(10, 16),
    st.integers(0, 2),
    st.sampled_from([1.0, 1.0, 0.7]),
)
def test_the_first_in_order_advances_in_every_step_so_all_end(asked, num_blocks, shield, quota) -> None:
    engine = ScheduledEngine(
        num_blocks=num_blocks, step_tokens=32, preemptions_max=shield, kv_quota_fraction=quota
    )
    for index, (length, answer, priority, salt) in enumerate(asked):
        try:
            engine.submit(f"r{index}", [index] * length, max_tokens=answer, priority=priority, salt=salt)
        except KVQuotaExceeded:
            continue
    work = sum(request.num_tokens_max for request in engine.requests.values())
    for _ in range(20 * work):
        running = engine.scheduler._batch.running
        first = running[0] if running else None
        before = first.num_computed if first else 0
        if engine.step() is None:
            break
        assert first is None or first.num_computed > before
    assert not engine.scheduler.has_work
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)

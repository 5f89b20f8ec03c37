import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from penstock.policy.flow import TABLE, Event, Outcome, RequestFacts, State, Step, UsageRecord
from penstock.policy.request import Request, request_of
from penstock.policy.tenant import Tenant
from penstock.types import RequestId, TenantId, Usage, WorkerId

US = 1000


def make(**facts) -> Request:
    given = {"route": "m", "prompt_tokens": 10, "max_tokens": 5, **facts}
    facts = RequestFacts(id=RequestId("r"), **given)
    return request_of(facts, 1000 * US, model_queue=None)


def walk(flow: Request, *events: Event) -> list[Step]:
    """The events, a microsecond apart from 1001 us on; all actions in order."""
    return [action for i, event in enumerate(events, 1) for action in flow.on(event, (1000 + i) * US)]


E, A = Event, Step
RUN = (E.DISPATCH,)
LIVES = {
    "an answer": (
        (*RUN, E.FIRST_OUTPUT, E.OUTPUT, E.FINISH),
        (A.START, A.COUNT, A.RELEASE, A.SETTLE),
        Outcome.FINISHED,
    ),
    "an empty answer": ((*RUN, E.FINISH), (A.START, A.COUNT, A.RELEASE, A.SETTLE), Outcome.FINISHED),
    "the client left the queue": ((E.CANCEL,), (A.LEAVE, A.SETTLE), Outcome.CANCELLED),
    "waited too long": ((E.EVICT,), (A.LEAVE, A.SETTLE), Outcome.EVICTED),
    "tried again": (
        (*RUN, E.RETRY, E.DISPATCH, E.FINISH),
        (A.START, A.RELEASE, A.ENQUEUE, A.START, A.COUNT, A.RELEASE, A.SETTLE),
        Outcome.FINISHED,
    ),
    "broke in the middle": (
        (*RUN, E.FIRST_OUTPUT, E.FAIL),
        (A.START, A.COUNT, A.RELEASE, A.SETTLE),
        Outcome.FAILED,
    ),
    "moved twice": (
        (
            *RUN,
            E.FIRST_OUTPUT,
            E.MIGRATE,
            E.DISPATCH,
            E.MIGRATE,
            E.DISPATCH,
            E.FIRST_OUTPUT,
            E.OUTPUT,
            E.FINISH,
        ),
        (A.START, *(A.RELEASE, A.ENQUEUE, A.START) * 2, A.COUNT, A.RELEASE, A.SETTLE),
        Outcome.FINISHED,
    ),
    "the client left while it was to move": (
        (*RUN, E.FIRST_OUTPUT, E.MIGRATE, E.CANCEL),
        (A.START, A.RELEASE, A.ENQUEUE, A.LEAVE, A.SETTLE),
        Outcome.CANCELLED,
    ),
    "the client left, and left": (
        (*RUN, E.FIRST_OUTPUT, E.CANCEL, E.CANCEL, E.OUTPUT, E.FINISH),
        (A.START, A.ABORT, A.COUNT, A.RELEASE, A.SETTLE),
        Outcome.CANCELLED,
    ),
    "the worker died while the client left": (
        (*RUN, E.CANCEL, E.FAIL),
        (A.START, A.ABORT, A.COUNT, A.RELEASE, A.SETTLE),
        Outcome.CANCELLED,
    ),
    "out of budget": (
        (*RUN, E.FIRST_OUTPUT, E.STOP, E.CANCEL, E.FINISH),
        (A.START, A.ABORT, A.COUNT, A.RELEASE, A.SETTLE),
        Outcome.FINISHED,
    ),
    "gave way": (
        (*RUN, E.FIRST_OUTPUT, E.EVICT, E.FINISH),
        (A.START, A.ABORT, A.COUNT, A.RELEASE, A.SETTLE),
        Outcome.EVICTED,
    ),
}


@pytest.mark.parametrize(("events", "actions", "outcome"), LIVES.values(), ids=LIVES)
def test_lives(events, actions, outcome) -> None:
    flow = make()
    assert walk(flow, *events) == list(actions)
    assert flow.state is State.ENDED
    assert flow.outcome is outcome


def test_every_move_of_the_table_leads_somewhere_and_the_end_is_the_end() -> None:
    for (state, _), (then, actions) in TABLE.items():
        assert state is not State.ENDED
        if A.SETTLE in actions:
            assert then is State.ENDED
    for state in set(State) - {State.ENDED}:
        assert any(where is state for where, _ in TABLE), f"no way out of {state.name}"


@pytest.mark.parametrize(
    "events",
    [
        (*RUN, *RUN),
        (E.OUTPUT,),
        (E.FINISH,),
        (*RUN, E.FIRST_OUTPUT, E.RETRY),
        (*RUN, E.FINISH, E.FINISH),
    ],
)
def test_what_the_table_does_not_have_is_a_bug(events) -> None:
    with pytest.raises(AssertionError):
        walk(make(), *events)


@given(st.lists(st.sampled_from(sorted(Event)), max_size=30))
def test_whatever_happens_it_settles_once_and_its_times_are_in_order(events) -> None:
    flow, actions = make(), list[Step]()
    for i, event in enumerate(events):
        if (flow.state, event) not in TABLE:
            continue
        before = flow.outcome
        actions += flow.on(event, (1000 + i) * US)
        assert before is None or flow.outcome is before, "an outcome that is decided stays"
    assert actions.count(A.SETTLE) == (flow.state is State.ENDED)
    assert actions.count(A.START) == flow.attempts
    running = flow.state in (State.STARTED, State.STREAMING, State.STOPPING)
    assert actions.count(A.START) - actions.count(A.RELEASE) == running
    assert (flow.outcome is not None) == (flow.state in (State.STOPPING, State.ENDED))
    if flow.state is State.ENDED:
        record = flow.record(0)
        assert 0 <= record.queue_us <= record.total_us
        assert record.queue_us + record.prefill_us + record.decode_us <= record.total_us
        assert record.ttft_us <= record.total_us


def test_the_record_has_the_times_and_counts() -> None:
    tenant = Tenant(id=TenantId("acme"), tier="pro", band="priority")
    flow = make(
        tenant=tenant,
        requested_model="large",
        diverted="queue_depth",
        key_prefix="sk-12",
        user="u",
        choices=2,
    )
    walk(flow, *RUN, E.RETRY, E.DISPATCH, E.FIRST_OUTPUT, E.OUTPUT)
    flow.worker = WorkerId("w1")
    flow.completion_tokens, flow.counted_cached_tokens, flow.finish_reason = 7, 4, "stop"
    flow.counted_prompt_tokens = 10
    flow.on(E.FINISH, 1010 * US)
    record = flow.record(55)
    assert (record.request_id, record.ended_ns, record.tenant, record.tier) == ("r", 55, "acme", "pro")
    assert (record.requested_model, record.served_model) == ("large", "m")
    assert (record.route_reason, record.band, record.worker) == ("queue_depth", "priority", "w1")
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (10, 4, 7)
    assert (record.attempts, record.choices, record.outcome, record.error) == (2, 2, Outcome.FINISHED, "")
    # Queued at 1000, started at 1001, back at 1002, started at 1003, first output at 1004, over at 1010.
    assert (record.queue_us, record.prefill_us, record.decode_us) == (2, 1, 6)
    assert (record.ttft_us, record.total_us) == (4, 10)


def test_the_worker_knows_its_own_times_best() -> None:
    flow = make()
    walk(flow, *RUN, E.FIRST_OUTPUT)
    flow.usage = Usage(queue_ns=500 * US, prefill_ns=20 * US, decode_ns=30 * US, kv_block_ns=9 * US)
    flow.on(E.FINISH, 2000 * US)
    record = flow.record(0)
    assert (record.queue_us, record.prefill_us, record.decode_us, record.kv_block_us) == (501, 20, 30, 9)


def test_what_was_never_started_has_no_times_of_a_worker() -> None:
    flow = make()
    walk(flow, E.EVICT)
    record = flow.record(0)
    assert (record.queue_us, record.prefill_us, record.decode_us, record.ttft_us, record.total_us) == (
        1,
        0,
        0,
        0,
        1,
    )
    assert record.attempts == 0
    assert record.worker == ""


# --- what its streams used --------------------------------------------------------------------------


def test_a_prompt_counts_once_for_all_of_its_choices_and_an_answer_once_for_all_of_its_workers() -> None:
    request = make(choices=4, choices_per_prompt=2)
    request.on(E.DISPATCH, 0)
    for choice in range(4):
        request.stream_ended(choice, Usage(prompt_tokens=7, completion_tokens=9))
    request.break_off()
    assert request.used() == Usage(), "none had begun, so each begins again"
    request.on(E.FIRST_OUTPUT, 1)
    for choice in range(4):
        request.stream_ended(choice, Usage(prompt_tokens=10, completion_tokens=choice + 1, prefill_ns=3))
    request.break_off()
    request.stream_ended(3, Usage(prompt_tokens=10, completion_tokens=9, prefill_ns=5, decode_ns=6))
    used = request.used()
    assert (used.prompt_tokens, used.completion_tokens) == (20, 1 + 2 + 3 + 9)
    assert request.longest_answer == 9
    continued = request.used_by_choice[3]
    assert (continued.prefill_ns, continued.decode_ns) == (3, 11), "its prompt was read once for the client"
    assert 4 not in request.used_by_choice


def test_a_record_says_of_itself_only_that_one_answer_was_asked_for() -> None:
    numbers = {each.name: each.default for each in fields(UsageRecord) if isinstance(each.default, int)}
    assert numbers.pop("choices") == 1
    assert set(numbers.values()) == {0}, "tokens, times and money are what somebody counted"

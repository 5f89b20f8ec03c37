import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig, TtftTarget
from penstock.errors import Evicted, Overloaded, WorkerUnavailable
from penstock.policy.admission.admit import AdmissionControl
from penstock.policy.contracts import ModelFacts
from penstock.policy.flow import Diverted, Outcome, Queued, Refused, RequestFacts, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.request import Evict
from penstock.policy.tenant import Tenant
from penstock.policy.terms import BandTerms, CellView, QueueTerms
from penstock.types import RequestId, TenantId, Usage, WorkerId

ROUTING = RoutingConfig(
    models=(ModelRoute(model="large", fallback="small"), ModelRoute(model="small", tools=False))
)
SERVED = {"large": ModelFacts(max_model_len=32_768), "small": ModelFacts(max_model_len=4096)}
W = WorkerId("w")


def tenant(name: str = "acme", **facts) -> Tenant:
    return Tenant(id=TenantId(name), **facts)


def ask(number: int, who: Tenant | None = None, **facts) -> RequestFacts:
    facts = {"route": "large", "requested_model": "large", "prompt_tokens": 500, "max_tokens": 100, **facts}
    return RequestFacts(id=RequestId(f"r{number}"), tenant=who or tenant(), **facts)


class Rig:
    """Flow control with a gate, and one worker for each model."""

    def __init__(self, *, slots: int = 4, small: bool = True, queue=None, **admission) -> None:
        config = QueueTerms(**{"worker_credit": 0, "tenant_share": 1.0, "late_kept": 0, **(queue or {})})
        self.admission = AdmissionControl(AdmissionConfig(**admission), ROUTING, config, SERVED.get)
        self.flow = FlowControl(config, Policies(admission=self.admission))
        self.flow.set_worker(0, "large", W, WorkerView(max_running=slots))
        if small:
            self.flow.set_worker(0, "small", W, WorkerView(max_running=slots))

    def fill(self, num: int, *, at_ns: int = 0, first: int = 10_000) -> None:
        """Let `num` requests come, to run or wait."""
        for number in range(first, first + num):
            assert isinstance(self.flow.arrive(at_ns, ask(number)), Queued), number
            self.flow.dispatch(at_ns)


def crowded(**admission) -> Rig:
    """Four run, one has waited too long and left at `BUSY`, and since then two wait: at `LATE` one more would
    wait too long.
    """
    rig = Rig(**admission)
    rig.fill(5)
    rig.flow.dispatch(BUSY)
    rig.fill(2, at_ns=BUSY, first=20_000)
    return rig


DUE = AdmissionConfig().ttft_target_ms * NS_PER_MS
BUSY = 600 * NS_PER_MS
LATE = BUSY + 130 * NS_PER_MS


def test_nobody_is_refused_for_an_expected_wait_while_nothing_was_too_late() -> None:
    rig = Rig()
    rig.fill(6)
    assert isinstance(rig.flow.arrive(400 * NS_PER_MS, ask(1, degrade="never")), Queued)
    left = rig.flow.dispatch(BUSY)
    assert [action.id for action in left] == ["r10004", "r10005"]
    assert {action.reason for action in left if isinstance(action, Evict)} == {"late"}


def test_behind_who_waits_too_long_best_effort_goes_to_the_smaller_model() -> None:
    rig = crowded()
    assert isinstance(rig.flow.arrive(BUSY, ask(2)), Queued), "nobody has waited yet"
    assert rig.flow.arrive(LATE, ask(1)) == Diverted(RequestId("r1"), "small", "slo")
    assert isinstance(rig.flow.arrive(LATE, ask(1, route="small", diverted="slo")), Queued)


def test_a_protected_band_goes_before_it() -> None:
    assert isinstance(crowded().flow.arrive(LATE, ask(1, tenant(band="priority"))), Queued)


def test_never_is_told_when_to_come_back() -> None:
    answer = crowded().flow.arrive(LATE, ask(1, degrade="never"))
    assert isinstance(answer, Refused)
    assert answer.reason == "admission"
    assert isinstance(answer.error, Overloaded)
    assert str(answer.error) == "The model 'large' is busy: it could not answer in time. Try again in 1 s."


def test_who_says_that_it_waits_is_let_in() -> None:
    patient = ask(1, degrade="never", first_token_ns=5 * NS_PER_S)
    assert isinstance(crowded().flow.arrive(LATE, patient), Queued)
    assert isinstance(crowded(ttft_target_ms=0).flow.arrive(LATE, ask(1)), Queued), "nothing is promised"


def test_what_is_too_late_leaves_the_queue_and_is_told_when_to_come_back() -> None:
    rig = crowded()
    assert not rig.flow.dispatch(BUSY + 120 * NS_PER_MS)
    evicted, _ = rig.flow.dispatch(BUSY + 130 * NS_PER_MS)
    assert isinstance(evicted, Evict)
    assert (evicted.id, evicted.reason) == ("r20000", "late")
    assert isinstance(evicted.error, Evicted)
    assert evicted.error.retry_after_s == 1
    assert "could not be answered in time any more" in str(evicted.error)


def test_while_no_worker_is_there_nobody_is_late() -> None:
    rig = Rig(slots=1, small=False)
    rig.fill(2)
    rig.flow.set_worker(0, "large", W, WorkerView(ready=False))
    assert not rig.flow.dispatch(10 * NS_PER_S)
    rig.flow.set_worker(11 * NS_PER_S, "large", W, WorkerView(max_running=2))
    assert [action.id for action in rig.flow.dispatch(11 * NS_PER_S)] == ["r10001"]


@pytest.mark.parametrize(
    "facts",
    [{"needs_tools": True}, {"context_tokens": 5000}, {"adapter": "legal"}],
    ids=["tools", "context", "adapter"],
)
def test_not_across_what_the_smaller_model_lacks(facts) -> None:
    assert isinstance(crowded().flow.arrive(LATE, ask(1, **facts)), Refused)


def test_without_a_worker() -> None:
    rig = Rig(small=False)
    rig.flow.set_worker(0, "large", W, None)
    assert isinstance(rig.flow.arrive(0, ask(1)), Queued)
    refusing = Rig(queue={"no_worker_wait_s": 0}, small=False)
    refusing.flow.set_worker(0, "large", W, None)
    answer = refusing.flow.arrive(0, ask(1))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, WorkerUnavailable)


def test_in_a_band_of_deadlines_whoever_is_wanted_first_goes_first() -> None:
    """What the client says, or the promise to its tier; then whoever only has the end of its wait."""
    bands = (BandTerms(name="default", order=0, discipline="deadline", timeout_s=60),)
    targets = (TtftTarget(tier="pro", ttft_ms=5000),)
    rig = Rig(slots=1, small=False, queue={"bands": bands}, targets=targets, ttft_target_ms=0)
    pro = tenant(tier="pro")
    assert isinstance(rig.flow.arrive(0, ask(0)), Queued)
    rig.flow.dispatch(0)
    asked = [
        ask(1),
        ask(2, pro),
        ask(3, first_token_ns=7 * NS_PER_S),
        ask(4, pro, first_token_ns=4 * NS_PER_S),
        ask(5, first_token_ns=1 * NS_PER_S),
    ]
    for number, arrival in enumerate(asked):
        assert isinstance(rig.flow.arrive(number * NS_PER_MS, arrival), Queued)
    order = []
    for number in (0, 5, 4, 2, 3):
        rig.flow.ended(NS_PER_S // 2, RequestId(f"r{number}"), Outcome.FINISHED, Usage(prompt_tokens=500))
        order += [action.id for action in rig.flow.dispatch(NS_PER_S // 2)]
    assert order == ["r5", "r4", "r2", "r3", "r1"]


LOOKS = BUSY // 2
"""Later than any start that is in time, and before the first token is due."""


def test_one_that_was_only_not_looked_at_in_time_starts_where_there_is_room() -> None:
    rig = Rig(slots=1, small=False)
    assert isinstance(rig.flow.arrive(0, ask(1)), Queued)
    (start,) = rig.flow.dispatch(LOOKS)
    assert (type(start), start.id) == (Start, "r1")
    assert isinstance(rig.flow.arrive(LOOKS, ask(2, degrade="never")), Queued), "nobody was late"
    (evicted,) = rig.flow.dispatch(2 * LOOKS)
    assert (type(evicted), evicted.id) == (Evict, "r2"), "it waited for the other one"


def test_others_that_can_be_in_time_leave_only_where_there_is_no_room() -> None:
    rig = Rig(slots=4, small=False)
    for number in range(6):
        assert isinstance(rig.flow.arrive(0, ask(number)), Queued)
    done = [(type(action), action.id) for action in rig.flow.dispatch(LOOKS)]
    assert done == [(Start if number < 4 else Evict, f"r{number}") for number in range(6)]


def test_one_whose_time_is_over_takes_no_room_from_one_that_is_in_time() -> None:
    rig = Rig(slots=1, small=False)
    rig.fill(1)
    for number, at_ns in enumerate((0, 9 * NS_PER_S, 70 * NS_PER_S - 50 * NS_PER_MS)):
        assert isinstance(rig.flow.arrive(at_ns, ask(number)), Queued)
    rig.flow.ended(70 * NS_PER_S, RequestId("r10000"), Outcome.FINISHED, Usage(prompt_tokens=500))
    done = [(type(action), action.id) for action in rig.flow.dispatch(70 * NS_PER_S)]
    assert done == [(Evict, "r0"), (Evict, "r1"), (Start, "r2")]


@given(
    slots=st.integers(1, 4),
    events=st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=40),
)
def test_none_is_refused_before_it_is_due_while_a_worker_has_room(slots: int, events) -> None:
    """Whatever the gateway's own delays between its looks; at each some come, or all that run end."""
    rig, now_ns, running = Rig(slots=slots, small=False), 0, set[RequestId]()
    came = dict[RequestId, int]()
    for number, (after_ms, ends) in enumerate(events):
        now_ns += after_ms * NS_PER_MS
        if ends:
            for each in running:
                rig.flow.ended(now_ns, each, Outcome.FINISHED, Usage(prompt_tokens=500))
            running.clear()
        else:
            rig.flow.arrive(now_ns, ask(number))
            came[RequestId(f"r{number}")] = now_ns
        for action in rig.flow.dispatch(now_ns) if number % 3 else ():
            if isinstance(action, Start):
                running.add(action.id)
            else:
                is_due = now_ns - came[action.id] >= DUE
                assert is_due or len(running) == slots, f"{action.id} had room"


def few(num: int) -> Rig:
    """So many are here: one runs, the others wait."""
    rig = Rig(slots=1, small=False, queue={"late_kept": QueueTerms().late_kept})
    rig.fill(num)
    return rig


def test_a_few_that_are_here_when_the_first_is_late_wait_on_and_later_ones_do_not() -> None:
    rig, other = few(QueueTerms().late_kept - 1), tenant("other", band="priority")
    assert isinstance(rig.flow.arrive(0, ask(0, other)), Queued)
    assert [action.id for action in rig.flow.dispatch(0)] == ["r0"], "a tenant's first has a row"
    assert not rig.flow.dispatch(LOOKS), "a refusal would help nobody"
    assert isinstance(rig.flow.arrive(LOOKS, ask(1, degrade="never")), Refused), "it would be late too"
    assert isinstance(rig.flow.arrive(LOOKS, ask(2, other)), Queued)
    gone = [(action.id, action.reason) for action in rig.flow.dispatch(2 * BUSY) if isinstance(action, Evict)]
    assert gone == [("r2", "late")], "the others were there first"
    rig.flow.ended(2 * BUSY, RequestId("r10000"), Outcome.FINISHED, Usage(prompt_tokens=500))
    assert [action.id for action in rig.flow.dispatch(2 * BUSY)] == ["r10001"]


def test_of_more_than_a_few_all_leave() -> None:
    num = QueueTerms().late_kept
    gone = [type(action) for action in few(1 + num).flow.dispatch(LOOKS)]
    assert gone == [Evict] * num, "but for the one that runs"


def test_one_whose_client_gave_a_bound_does_not_wait_on() -> None:
    rig = few(1)
    rig.flow.first_output(LOOKS, RequestId("r10000"))
    assert isinstance(rig.flow.arrive(LOOKS, ask(1, first_token_ns=NS_PER_S)), Queued)
    (evicted,) = rig.flow.dispatch(NS_PER_S)
    assert isinstance(evicted, Evict)
    assert (evicted.id, evicted.reason) == ("r1", "late"), "sooner than its bound, to be asked for elsewhere"


def has_room(rig: Rig) -> bool:
    queue = rig.flow.model_queue("large")
    return queue is not None and queue.workers.has_room()


def fill_until_one_waits(rig: Rig, who: Tenant) -> RequestId:
    for number in range(60):
        assert isinstance(rig.flow.arrive(0, ask(number, who)), Queued)
        if not rig.flow.dispatch(0):
            return RequestId(f"r{number}")
    raise AssertionError("nothing waits")


def test_rows_that_are_kept_for_others_are_no_room_for_one_that_is_late() -> None:
    rig = Rig(slots=32, small=False, queue={"headroom": QueueTerms().headroom})
    assert isinstance(rig.flow.arrive(0, ask(1000, tenant("other"))), Queued)
    rig.flow.dispatch(0)
    waits = fill_until_one_waits(rig, tenant())
    assert has_room(rig), "its tenant has had its part of the rows"
    (evicted,) = rig.flow.dispatch(LOOKS)
    assert (type(evicted), evicted.id) == (Evict, waits)


def test_a_cell_that_is_too_far_away_is_no_room_for_one_that_is_late() -> None:
    rig = Rig(slots=1, small=False, queue={"worker_credit": QueueTerms().worker_credit})
    assert isinstance(rig.flow.arrive(0, ask(1000, tenant("other"))), Queued)
    rig.flow.dispatch(0)
    far = WorkerView(max_running=8, cell=CellView(name="far", rtt_ns=400 * NS_PER_MS))
    rig.flow.set_worker(0, "large", WorkerId("far"), far)
    waits = fill_until_one_waits(rig, tenant())
    assert has_room(rig), "the cell's, which is not nearer than its turn"
    (evicted,) = rig.flow.dispatch(LOOKS)
    assert (type(evicted), evicted.id) == (Evict, waits)

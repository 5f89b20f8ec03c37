import pytest

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.flow import BandConfig, QueueConfig
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig, TtftTarget
from penstock.errors import Overloaded, WorkerUnavailable
from penstock.policy.answers import Diverted, Queued, Refused
from penstock.policy.control import FlowControl
from penstock.policy.flow import Arrival
from penstock.policy.gate import Gate, ModelFacts
from penstock.policy.parts import Parts
from penstock.policy.record import Outcome
from penstock.policy.room import WorkerView
from penstock.policy.tenant import Tenant
from penstock.types import RequestId, TenantId, Usage, WorkerId

ROUTING = RoutingConfig(
    models=(ModelRoute(model="large", fallback="small"), ModelRoute(model="small", tools=False))
)
SERVED = {"large": ModelFacts(max_model_len=32_768), "small": ModelFacts(max_model_len=4096)}
W = WorkerId("w")


def tenant(name: str = "acme", **facts) -> Tenant:
    return Tenant(id=TenantId(name), **facts)


def ask(number: int, who: Tenant | None = None, **facts) -> Arrival:
    facts = {"route": "large", "requested_model": "large", "prompt_tokens": 500, "max_tokens": 100, **facts}
    return Arrival(id=RequestId(f"r{number}"), tenant=who or tenant(), **facts)


class Rig:
    """Flow control with a gate, and one worker for each model."""

    def __init__(self, *, slots: int = 4, small: bool = True, queue=None, **admission) -> None:
        config = QueueConfig(**{"worker_credit": 0, "tenant_share": 1.0, **(queue or {})})
        self.gate = Gate(AdmissionConfig(**admission), ROUTING, config, SERVED.get)
        self.flow = FlowControl(config, Parts(admission=self.gate))
        self.flow.set_worker(0, "large", W, WorkerView(max_running=slots))
        if small:
            self.flow.set_worker(0, "small", W, WorkerView(max_running=slots))

    def fill(self, num: int, who: Tenant | None = None) -> None:
        """Let requests come until `num` run or wait."""
        for number in range(num):
            assert isinstance(self.flow.arrive(0, ask(10_000 + number, who)), Queued), number
            self.flow.dispatch(0)

    def learn(self, num: int = 100, service_ns: int = NS_PER_S) -> None:
        """Serve requests one after the other: 10 ms to the first token, `service_ns` in all."""
        for number in range(num):
            now_ns = number * 2 * NS_PER_S
            assert isinstance(self.flow.arrive(now_ns, ask(number)), Queued)
            self.flow.dispatch(now_ns)
            told = now_ns + 10 * NS_PER_MS
            self.flow.first_output(told, RequestId(f"r{number}"))
            self.gate.first_token(
                told,
                RequestId(f"r{number}"),
                route="large",
                worker="w",
                ttft_ns=10 * NS_PER_MS,
                prefill_ns=10 * NS_PER_MS,
            )
            self.flow.ended(now_ns + service_ns, RequestId(f"r{number}"), Outcome.FINISHED, Usage())
            self.gate.stream_ended(RequestId(f"r{number}"), route="large", worker="w", service_ns=service_ns)


def test_behind_ten_who_wait_best_effort_goes_to_the_smaller_model() -> None:
    rig = Rig()
    rig.fill(4 + 11)
    answer = rig.flow.arrive(0, ask(1))
    assert answer == Diverted(RequestId("r1"), "small", "queue_depth")
    again = ask(1, route="small", diverted="queue_depth")
    assert isinstance(rig.flow.arrive(0, again), Queued)


def test_a_protected_band_waits() -> None:
    rig = Rig()
    rig.fill(4 + 11)
    assert isinstance(rig.flow.arrive(0, ask(1, tenant(band="priority"))), Queued)


def test_never_is_told_when_to_come_back() -> None:
    rig = Rig()
    rig.fill(4 + 11)
    answer = rig.flow.arrive(0, ask(1, degrade="never"))
    assert isinstance(answer, Refused)
    assert answer.reason == "admission"
    assert isinstance(answer.error, Overloaded)
    assert answer.error.retry_after_s == 2
    assert str(answer.error) == "The model 'large' is busy: too many requests wait for it. Try again in 2 s."


@pytest.mark.parametrize(
    "facts",
    [{"needs_tools": True}, {"context_tokens": 5000}, {"adapter": "legal"}],
    ids=["tools", "context", "adapter"],
)
def test_not_across_what_the_smaller_model_lacks(facts) -> None:
    rig = Rig()
    rig.fill(4 + 11)
    assert isinstance(rig.flow.arrive(0, ask(1, **facts)), Refused)


def test_by_the_prediction_once_it_is_good() -> None:
    rig = Rig(ttft_target_ms=2000, error_p90_max=0.5)
    rig.learn()
    assert rig.gate.calibration()["large"] is not None
    rig.fill(4)
    answer = rig.flow.arrive(0, ask(1))
    assert isinstance(answer, Queued)
    assert 0.2 * NS_PER_S < answer.predicted_ns < 0.4 * NS_PER_S, "one of four streams of a second must end"
    waiting = 1
    while isinstance(told := rig.flow.arrive(0, ask(1000 + waiting, degrade="never")), Queued):
        waiting += 1
    assert isinstance(told, Refused)
    assert 6 <= waiting <= 8, "a request fits while two seconds are enough for those before it"
    assert rig.flow.arrive(0, ask(2)) == Diverted(RequestId("r2"), "small", "slo")
    assert isinstance(rig.flow.arrive(0, ask(3, first_token_ns=100 * NS_PER_MS, degrade="never")), Refused)


def test_who_floods_the_queue_is_refused_and_others_are_not() -> None:
    rig = Rig(ttft_target_ms=2000)
    rig.learn()
    flood = tenant("flood", degrade="never")
    rig.fill(4, flood)
    for number in range(100):
        rig.flow.arrive(0, ask(number, flood))
    assert isinstance(rig.flow.arrive(0, ask(500, flood)), Refused)
    assert isinstance(rig.flow.arrive(0, ask(501, tenant("quiet", degrade="never"))), Queued)


def test_without_a_worker() -> None:
    rig = Rig(queue={"no_worker": "wait"}, small=False)
    rig.flow.set_worker(0, "large", W, None)
    assert isinstance(rig.flow.arrive(0, ask(1)), Queued)
    refusing = Rig(queue={"no_worker": "refuse"}, small=False)
    refusing.flow.set_worker(0, "large", W, None)
    answer = refusing.flow.arrive(0, ask(1))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, WorkerUnavailable)


def test_what_never_began_teaches_nothing() -> None:
    rig = Rig()
    rig.fill(1)
    rig.gate.stream_ended(RequestId("r10000"), route="large", worker="w", service_ns=0)
    told = rig.gate.first_token(NS_PER_S, RequestId("r10000"), route="large", worker="w", ttft_ns=NS_PER_S)
    assert told is None


def test_in_a_band_of_deadlines_whoever_is_wanted_first_goes_first() -> None:
    """What the client says, or the promise to its tier; then whoever only has the end of its wait."""
    bands = (BandConfig(name="default", order=0, discipline="deadline", timeout_s=60),)
    targets = (TtftTarget(tier="pro", ttft_ms=5000),)
    rig = Rig(slots=1, small=False, queue={"bands": bands}, targets=targets)
    pro = tenant(tier="pro")
    assert isinstance(rig.flow.arrive(0, ask(0)), Queued)
    rig.flow.dispatch(0)
    asked = [
        ask(1),
        ask(2, pro),
        ask(3, first_token_ns=7 * NS_PER_S),
        ask(4, pro, first_token_ns=9 * NS_PER_S),
        ask(5, first_token_ns=1 * NS_PER_S),
    ]
    for number, arrival in enumerate(asked):
        assert isinstance(rig.flow.arrive(number * NS_PER_MS, arrival), Queued)
    order = []
    for number in (0, 5, 2, 4, 3):
        rig.flow.ended(NS_PER_S // 2, RequestId(f"r{number}"), Outcome.FINISHED, Usage(prompt_tokens=500))
        order += [action.id for action in rig.flow.dispatch(NS_PER_S // 2)]
    assert order == ["r5", "r2", "r4", "r3", "r1"]

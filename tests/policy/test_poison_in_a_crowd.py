"""A request that ends workers, among many others: flow control finds it, and nobody else's request is
lost.
"""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.errors import CrashingRequest, StreamBroken, WorkerUnavailable
from penstock.policy.extras.quarantine import Quarantine
from penstock.policy.flow import Outcome, RequestFacts, Start, State
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.request import Evict, Settled
from penstock.policy.resilience.health import FleetHealth, HealthTerms, RetryTerms
from penstock.policy.terms import QueueTerms
from penstock.types import RequestId, Usage, WorkerId

POISON = RequestId("poison")
ANSWER = 8
"""Tokens of everybody's answer."""


class Fleet:
    """Workers that give what they are given one token at a time, by chance, and die of one request at its
    token number `at`.
    """

    def __init__(self, seed: int, *, workers: int, slots: int, at: int) -> None:
        config = HealthTerms(retry=RetryTerms(floor_per_s=1000))
        parts = Policies(health=FleetHealth(config, lambda: 0.0), poison=Quarantine(config))
        self.control = FlowControl(QueueTerms(worker_credit=0), parts)
        self.random, self.at, self.slots, self.now_ns = Random(seed), at, slots, 0
        self.running: dict[RequestId, WorkerId] = {}
        self.given: dict[RequestId, int] = {}
        self.ends: dict[RequestId, str] = {}
        self.num_deaths = 0
        for number in range(workers):
            self.join(WorkerId(f"w{number}"))

    def join(self, worker: WorkerId) -> None:
        self.control.set_worker(self.now_ns, "m", worker, WorkerView(max_running=self.slots))

    def arrive(self, name: str) -> None:
        self.control.arrive(
            self.now_ns,
            RequestFacts(
                id=RequestId(name),
                route="m",
                prompt_tokens=8,
                max_tokens=ANSWER,
                prompts=(tuple(name.encode()),),
            ),
        )

    def dispatch(self) -> None:
        for action in self.control.dispatch(self.now_ns):
            if isinstance(action, Start):
                self.running[action.id] = action.worker_id
            else:
                assert isinstance(action, Evict)
                assert isinstance(action.error, CrashingRequest), action.error
                self.ends[action.id] = "quarantine"
        self.control.model_queue("m").check_invariants()

    def run(self) -> None:
        for _ in range(100_000):
            self.dispatch()
            if not self.running and not len(self.control):
                return
            self.now_ns += 20 * NS_PER_MS
            self.step(self.random.choice(sorted(self.running)))
        raise AssertionError(f"{len(self.control)} requests wait for ever")

    def step(self, name: RequestId) -> None:
        given = self.given.get(name, 0)
        if name == POISON and given == self.at:
            self.die(self.running[name])
            return
        if given == ANSWER:
            usage = Usage(completion_tokens=given)
            settled = self.control.ended(self.now_ns, name, Outcome.FINISHED, usage, finish_reason="length")
            assert settled is not None
            self.ends[name] = "finished"
            del self.running[name]
            return
        self.control.first_output(self.now_ns, name)
        self.given[name] = given + 1

    def die(self, worker: WorkerId) -> None:
        self.num_deaths += 1
        self.control.set_worker(self.now_ns, "m", worker, None)
        for name in [name for name, where in self.running.items() if where == worker]:
            del self.running[name]
            flow = self.control.request(name)
            given = self.given.get(name, 0)
            kind = StreamBroken if flow.state is State.STREAMING else WorkerUnavailable
            usage = Usage(completion_tokens=given) if given else None
            answer = self.control.failed(self.now_ns, name, kind("gone", died=True), retry=True, usage=usage)
            assert not isinstance(answer, Settled), f"{name} failed"
        self.join(WorkerId(f"{worker}'"))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 6),
    slots=st.integers(1, 12),
    before=st.integers(0, 12),
    behind=st.integers(0, 12),
    at=st.sampled_from([0, 0, 3, 7]),
)
def test_one_request_takes_two_workers_or_three_and_nobody_else_fails(
    seed, workers, slots, before, behind, at
) -> None:
    """Two if it ends them before its first token, three in the middle of its answer, whoever is beside it."""
    fleet = Fleet(seed, workers=workers, slots=slots, at=at)
    for number in range(before):
        fleet.arrive(f"before {number}")
    fleet.dispatch()
    for name in list(fleet.running)[::2]:  # Some stream by then.
        fleet.step(name)
    fleet.arrive(POISON)
    for number in range(behind):
        fleet.arrive(f"behind {number}")
    fleet.run()
    assert fleet.num_deaths <= (3 if at else 2)
    assert fleet.ends.pop(POISON) == "quarantine"
    assert set(fleet.ends.values()) <= {"finished"}
    assert len(fleet.ends) == before + behind


def test_those_that_were_starting_are_tried_one_to_a_worker_and_the_others_go_on_at_once() -> None:
    fleet = Fleet(0, workers=2, slots=12, at=0)
    for number in range(8):
        fleet.arrive(f"r{number}")
    fleet.dispatch()
    lost = [name for name, where in fleet.running.items() if where == "w0"]
    assert len(lost) == 4
    fleet.step(lost[0])  # It streams; the three others on that worker start.
    fleet.die(WorkerId("w0"))
    fleet.dispatch()
    assert lost[0] in fleet.running, "what streamed goes on at once"
    assert sum(name in fleet.running for name in lost[1:]) == 1, "and one starts, where it does not"
    fleet.step(lost[0])
    fleet.dispatch()
    assert sum(name in fleet.running for name in lost[1:]) == 2, "whoever has begun there makes room"
    for _ in range(2):
        fleet.step(next(name for name in lost[1:] if name in fleet.running and name not in fleet.given))
        fleet.dispatch()
    assert set(lost) <= set(fleet.running)


def test_the_same_prompt_is_under_suspicion_when_it_comes_again() -> None:
    fleet = Fleet(0, workers=1, slots=4, at=0)
    for name in "ab":
        fleet.arrive(name)
    fleet.dispatch()
    fleet.die(WorkerId("w0"))
    fleet.dispatch()
    (first,) = fleet.running
    fleet.now_ns += NS_PER_S
    fleet.control.cancel(fleet.now_ns, RequestId("b" if first == "a" else "a"))
    fleet.arrive("c")
    fleet.dispatch()
    assert set(fleet.running) == {first, "c"}, "nothing is held against that one"

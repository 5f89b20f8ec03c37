"""When requests go to peer cells, and to which: on the queue of a model, as gateways drive it."""

from collections.abc import Iterator

import pytest

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.errors import WorkerUnavailable
from penstock.policy.flow import Outcome, RequestFacts, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.resilience.health import FleetHealth, HealthTerms
from penstock.policy.tenant import Tenant
from penstock.policy.terms import CellView
from penstock.types import RequestId, TenantId, Usage, WorkerId, places_of

HERE, EU, US = WorkerId("here"), WorkerId("cell:eu/m"), WorkerId("cell:us/m")
ROWS = 2


def a_worker(
    *, rows: int = ROWS, labels: tuple[str, ...] = ("home", "eu"), identity: str = "x"
) -> WorkerView:
    return WorkerView(max_running=rows, capabilities=places_of(labels), identity=identity)


def a_peer(
    name: str = "eu", *, rtt_ms: int = 20, wait_ms: int = 0, price: float = 0.0, rows: int = 8,
    waiting: int = 0, identity: str = "x",
) -> WorkerView:  # fmt: skip
    return WorkerView(
        max_running=rows,
        waiting=waiting,
        capabilities=places_of((name,)),
        identity=identity,
        cell=CellView(name=name, rtt_ns=rtt_ms * NS_PER_MS, wait_ns=wait_ms * NS_PER_MS, price=price),
    )


class OneModel:
    """One model of a gateway, by hand."""

    def __init__(self, *, health: FleetHealth | None = None, **workers: WorkerView) -> None:
        policies = Policies(health=health) if health is not None else Policies()
        self.control, self.now_ns, self._number = FlowControl(QueueConfig(), policies), 0, 0
        for name, view in workers.items():
            self.worker({"here": HERE, "eu": EU, "us": US}.get(name, WorkerId(name)), view)

    def worker(self, worker_id: WorkerId, view: WorkerView | None) -> None:
        self.control.set_worker(self.now_ns, "m", worker_id, view)

    def ask(self, num: int = 1, *, places: frozenset[str] = frozenset(), tenant: str = "t") -> list[str]:
        names = list[str]()
        for _ in range(num):
            self._number += 1
            names.append(f"r{self._number}")
            facts = RequestFacts(
                id=RequestId(names[-1]),
                tenant=Tenant(id=TenantId(tenant)),
                route="m",
                prompt_tokens=16,
                max_tokens=16,
                needs=places,
            )
            self.control.arrive(self.now_ns, facts)
        return names

    def starts(self) -> dict[str, WorkerId]:
        found = self.control.dispatch(self.now_ns)
        return {each.id: each.worker_id for each in found if isinstance(each, Start)}

    def end(self, name: str) -> None:
        usage = Usage(prompt_tokens=16, completion_tokens=4)
        self.control.ended(self.now_ns, RequestId(name), Outcome.FINISHED, usage)

    def pass_ms(self, ms: int) -> None:
        self.now_ns += ms * NS_PER_MS


def test_a_request_stays_here_while_a_worker_here_has_room() -> None:
    lane = OneModel(here=a_worker(), eu=a_peer(rtt_ms=1))
    (first,) = lane.ask()
    assert lane.starts() == {first: HERE}


def test_a_short_wait_here_is_better_than_a_peer_and_a_long_one_is_not() -> None:
    lane = OneModel(here=a_worker(rows=1))
    list(_fill(lane))
    lane.worker(EU, a_peer(rtt_ms=200, rows=4))
    (waits,) = lane.ask()
    assert lane.starts() == {}, "a stream here ends in less than a round trip, as far as is known"
    due_ns = lane.control.next_ns(lane.now_ns)
    assert due_ns is not None
    lane.pass_ms(299)
    assert lane.starts() == {}
    lane.pass_ms(2)
    assert due_ns <= lane.now_ns, "it is looked at when that time is over"
    assert lane.starts() == {waits: EU}


def _fill(lane: OneModel) -> Iterator[tuple[str, WorkerId]]:
    """Start requests until one waits, which is taken back."""
    while True:
        (name,) = lane.ask()
        started = lane.starts()
        if not started:
            lane.control.cancel(lane.now_ns, RequestId(name))
            return
        yield from started.items()


def test_a_long_queue_goes_to_the_peer_at_once_as_far_as_that_has_room() -> None:
    lane = OneModel(here=a_worker(rows=1))
    list(_fill(lane))
    lane.worker(EU, a_peer(rtt_ms=20, rows=2))
    lane.ask(30)
    started = lane.starts()
    assert set(started.values()) == {EU}
    assert len(started) == 2, "what it has rows for, and none that would wait there"


def test_a_peer_that_has_a_queue_of_its_own_is_sent_nothing() -> None:
    lane = OneModel(here=a_worker(rows=1))
    list(_fill(lane))
    lane.worker(EU, a_peer(rows=2, waiting=50))
    lane.ask(30)
    lane.pass_ms(5000)
    assert lane.starts() == {}


def test_with_no_worker_here_everything_goes_to_the_soonest_peer() -> None:
    lane = OneModel(eu=a_peer(rtt_ms=10), us=a_peer("us", rtt_ms=90))
    (first,) = lane.ask()
    assert lane.starts() == {first: EU}


def test_of_peers_that_are_about_as_near_the_cheapest_is_taken() -> None:
    lane = OneModel(eu=a_peer(rtt_ms=10, price=0.5), us=a_peer("us", rtt_ms=25, price=0.1))
    (first,) = lane.ask()
    assert lane.starts() == {first: US}
    lane.worker(US, a_peer("us", rtt_ms=60, price=0.1))
    (second,) = lane.ask()
    assert lane.starts() == {second: EU}


def test_the_wait_over_there_counts_as_the_way_does() -> None:
    lane = OneModel(eu=a_peer(rtt_ms=10, wait_ms=500), us=a_peer("us", rtt_ms=90))
    (first,) = lane.ask()
    assert lane.starts() == {first: US}


@pytest.mark.parametrize("where", ["full", "gone"])
def test_a_request_that_is_bound_to_a_place_goes_nowhere_else(where: str) -> None:
    lane = OneModel(here=a_worker(rows=1))
    if where == "full":
        list(_fill(lane))
    lane.worker(US, a_peer("us", rtt_ms=1))
    if where == "gone":
        lane.worker(HERE, WorkerView(ready=False, capabilities=places_of(("home", "eu"))))
    bound = lane.ask(3, places=places_of(("eu",)))
    lane.pass_ms(20_000)
    assert not set(bound) & lane.starts().keys()
    (free,) = lane.ask()
    assert lane.starts().get(free) == US, "others do go there"


def test_a_request_that_is_bound_elsewhere_leaves_although_there_is_room_here() -> None:
    lane = OneModel(here=a_worker(), us=a_peer("us"))
    (bound,) = lane.ask(places=places_of(("us",)))
    assert lane.starts() == {bound: US}


def test_open_breakers_of_all_workers_here_send_everything_to_a_peer() -> None:
    health = FleetHealth(HealthTerms(), lambda: 0.5)
    lane = OneModel(health=health, here=a_worker(rows=4), eu=a_peer())
    for _ in range(12):
        (name,) = lane.ask()
        started = lane.starts()
        if started[name] != HERE:
            break
        lane.control.failed(lane.now_ns, RequestId(name), WorkerUnavailable("it broke"), retry=False)
        lane.pass_ms(50)
    (after,) = lane.ask()
    assert lane.starts() == {after: EU}
    # Without a peer that could take it the panic rule holds: a worker that fails is better than none.
    lane.worker(EU, None)
    (alone,) = lane.ask()
    assert lane.starts() == {alone: HERE}


def test_a_broken_stream_goes_on_in_a_peer_only_if_that_computes_the_same() -> None:
    lane = OneModel(here=a_worker(), eu=a_peer(identity="other"), us=a_peer("us", rtt_ms=90))
    (name,) = lane.ask()
    lane.starts()
    lane.control.first_output(lane.now_ns, RequestId(name))
    lane.worker(HERE, None)
    error = WorkerUnavailable("it is gone")
    lane.control.failed(
        lane.now_ns, RequestId(name), error, retry=True, usage=Usage(prompt_tokens=16, completion_tokens=2)
    )
    assert lane.starts() == {name: US}


def test_the_end_of_a_peer_is_forgotten_and_nothing_is_left_of_it() -> None:
    lane = OneModel(here=a_worker(rows=1))
    list(_fill(lane))
    lane.worker(EU, a_peer())
    lane.worker(EU, None)
    waits = lane.ask(5)
    lane.pass_ms(10_000)
    assert not set(waits) & lane.starts().keys()
    queue = lane.control.lane("m")
    assert queue is not None
    queue.check_invariants()
    assert lane.control.next_ns(lane.now_ns) is None or lane.now_ns < 600 * NS_PER_S

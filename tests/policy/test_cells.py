"""When requests go to peer cells, and to which: on the queue of a model, as gateways drive it."""

from collections.abc import Iterator

import pytest

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.errors import WorkerUnavailable
from penstock.policy.flow import Outcome, RequestFacts, Start, State
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
    model_queue = OneModel(here=a_worker(), eu=a_peer(rtt_ms=1))
    (first,) = model_queue.ask()
    assert model_queue.starts() == {first: HERE}


def test_all_that_a_lost_cell_had_comes_home_though_the_retry_budget_is_small() -> None:
    model_queue = OneModel(health=FleetHealth(HealthTerms(), [0.5].pop), here=a_worker(rows=1))
    list(_fill(model_queue))
    model_queue.worker(EU, a_peer(rtt_ms=1, rows=40))
    away = model_queue.ask(30)
    assert set(model_queue.starts().values()) == {EU}
    control = model_queue.control
    for name in away:
        control.failed(model_queue.now_ns, RequestId(name), WorkerUnavailable("it is lost"), retry=True)
    waiting = {each.id for each in control.requests() if each.state is State.QUEUED}
    assert set(away) <= waiting


def test_a_short_wait_here_is_better_than_a_peer_and_a_long_one_is_not() -> None:
    model_queue = OneModel(here=a_worker(rows=1))
    list(_fill(model_queue))
    model_queue.worker(EU, a_peer(rtt_ms=200, rows=4))
    (waits,) = model_queue.ask()
    assert model_queue.starts() == {}, "a stream here ends in less than a round trip, as far as is known"
    due_ns = model_queue.control.next_ns(model_queue.now_ns)
    assert due_ns is not None
    model_queue.pass_ms(299)
    assert model_queue.starts() == {}
    model_queue.pass_ms(2)
    assert due_ns <= model_queue.now_ns, "it is looked at when that time is over"
    assert model_queue.starts() == {waits: EU}


def _fill(model_queue: OneModel) -> Iterator[tuple[str, WorkerId]]:
    """Start requests until one waits, which is taken back."""
    while True:
        (name,) = model_queue.ask()
        started = model_queue.starts()
        if not started:
            model_queue.control.cancel(model_queue.now_ns, RequestId(name))
            return
        yield from started.items()


def test_a_long_queue_goes_to_the_peer_at_once_as_far_as_that_has_room() -> None:
    model_queue = OneModel(here=a_worker(rows=1))
    list(_fill(model_queue))
    model_queue.worker(EU, a_peer(rtt_ms=20, rows=2))
    model_queue.ask(30)
    started = model_queue.starts()
    assert set(started.values()) == {EU}
    assert len(started) == 2, "what it has rows for, and none that would wait there"


def test_a_peer_that_has_a_queue_of_its_own_is_sent_nothing() -> None:
    model_queue = OneModel(here=a_worker(rows=1))
    list(_fill(model_queue))
    model_queue.worker(EU, a_peer(rows=2, waiting=50))
    model_queue.ask(30)
    model_queue.pass_ms(5000)
    assert model_queue.starts() == {}


def test_with_no_worker_here_everything_goes_to_the_soonest_peer() -> None:
    model_queue = OneModel(eu=a_peer(rtt_ms=10), us=a_peer("us", rtt_ms=90))
    (first,) = model_queue.ask()
    assert model_queue.starts() == {first: EU}


def test_of_peers_that_are_about_as_near_the_cheapest_is_taken() -> None:
    model_queue = OneModel(eu=a_peer(rtt_ms=10, price=0.5), us=a_peer("us", rtt_ms=25, price=0.1))
    (first,) = model_queue.ask()
    assert model_queue.starts() == {first: US}
    model_queue.worker(US, a_peer("us", rtt_ms=60, price=0.1))
    (second,) = model_queue.ask()
    assert model_queue.starts() == {second: EU}


def test_the_wait_over_there_counts_as_the_way_does() -> None:
    model_queue = OneModel(eu=a_peer(rtt_ms=10, wait_ms=500), us=a_peer("us", rtt_ms=90))
    (first,) = model_queue.ask()
    assert model_queue.starts() == {first: US}


@pytest.mark.parametrize("where", ["full", "gone"])
def test_a_request_that_is_bound_to_a_place_goes_nowhere_else(where: str) -> None:
    model_queue = OneModel(here=a_worker(rows=1))
    if where == "full":
        list(_fill(model_queue))
    model_queue.worker(US, a_peer("us", rtt_ms=1))
    if where == "gone":
        model_queue.worker(HERE, WorkerView(ready=False, capabilities=places_of(("home", "eu"))))
    bound = model_queue.ask(3, places=places_of(("eu",)))
    model_queue.pass_ms(20_000)
    assert not set(bound) & model_queue.starts().keys()
    (free,) = model_queue.ask()
    assert model_queue.starts().get(free) == US, "others do go there"


def test_a_request_that_is_bound_elsewhere_leaves_although_there_is_room_here() -> None:
    model_queue = OneModel(here=a_worker(), us=a_peer("us"))
    (bound,) = model_queue.ask(places=places_of(("us",)))
    assert model_queue.starts() == {bound: US}


def test_open_breakers_of_all_workers_here_send_everything_to_a_peer() -> None:
    health = FleetHealth(HealthTerms(), lambda: 0.5)
    model_queue = OneModel(health=health, here=a_worker(rows=4), eu=a_peer())
    for _ in range(12):
        (name,) = model_queue.ask()
        started = model_queue.starts()
        if started[name] != HERE:
            break
        model_queue.control.failed(
            model_queue.now_ns, RequestId(name), WorkerUnavailable("it broke"), retry=False
        )
        model_queue.pass_ms(50)
    (after,) = model_queue.ask()
    assert model_queue.starts() == {after: EU}
    # Without a peer that could take it the panic rule holds: a worker that fails is better than none.
    model_queue.worker(EU, None)
    (alone,) = model_queue.ask()
    assert model_queue.starts() == {alone: HERE}


def test_a_broken_stream_goes_on_in_a_peer_only_if_that_computes_the_same() -> None:
    model_queue = OneModel(here=a_worker(), eu=a_peer(identity="other"), us=a_peer("us", rtt_ms=90))
    (name,) = model_queue.ask()
    model_queue.starts()
    model_queue.control.first_output(model_queue.now_ns, RequestId(name))
    model_queue.worker(HERE, None)
    error = WorkerUnavailable("it is gone")
    model_queue.control.failed(
        model_queue.now_ns,
        RequestId(name),
        error,
        retry=True,
        usage=Usage(prompt_tokens=16, completion_tokens=2),
    )
    assert model_queue.starts() == {name: US}


def test_the_end_of_a_peer_is_forgotten_and_nothing_is_left_of_it() -> None:
    model_queue = OneModel(here=a_worker(rows=1))
    list(_fill(model_queue))
    model_queue.worker(EU, a_peer())
    model_queue.worker(EU, None)
    waits = model_queue.ask(5)
    model_queue.pass_ms(10_000)
    assert not set(waits) & model_queue.starts().keys()
    queue = model_queue.control.model_queue("m")
    assert queue is not None
    queue.check_invariants()
    assert model_queue.control.next_ns(model_queue.now_ns) is None or model_queue.now_ns < 600 * NS_PER_S


def test_where_no_peer_has_room_it_is_tried_again_here() -> None:
    model_queue = OneModel(here=a_worker(), eu=a_peer(rows=2, waiting=50))
    (first,) = model_queue.ask()
    assert model_queue.starts() == {first: HERE}
    failed = WorkerUnavailable("once")
    model_queue.control.failed(model_queue.now_ns, RequestId(first), failed, retry=True)
    assert model_queue.starts() == {first: HERE}, "the one where it failed is better than none"

"""What requests cost on their workers: on those that tell it, and on those that do not."""

from types import SimpleNamespace

import pytest

from penstock.clock import NS_PER_S
from penstock.config.ledger import PricesConfig
from penstock.policy.lifecycle.machine_costs import Costs, Meters
from penstock.policy.limits.price import PriceList
from penstock.types import Usage, WorkerId

S, DOLLAR = NS_PER_S, 10**6
W, V = WorkerId("w"), WorkerId("v")


def made(*, tells: bool, is_shared: bool = False) -> Meters:
    """Two workers of one model, at a dollar a second."""
    meters = Meters(PriceList(PricesConfig(accelerators={"m": 3600.0})), is_shared=is_shared)
    for worker in (W, V):
        meters.has_worker(0, "m", worker, tells=tells)
    meters.has_worker(0, "free", WorkerId("f"), tells=tells)
    return meters


def request_of(name: str, worker: WorkerId = W, *, prompt: int = 100, device_ns: int = 0):
    facts = SimpleNamespace(prompt_tokens=prompt, choices=1, route="m")
    return SimpleNamespace(
        id=name, worker=worker, facts=facts, counted_cached_tokens=0, completion_tokens=0,
        usage=Usage(device_ns=device_ns),
    )  # fmt: skip


def test_a_worker_that_tells_is_busy_or_idle_and_its_requests_pay_what_they_took() -> None:
    meters = made(tells=True)
    meters.reported(1 * S, W, busy_ns=0, num_requests=1)
    meters.started(1 * S, request := request_of("a", device_ns=2 * S))
    meters.reported(4 * S, W, busy_ns=3 * S, num_requests=0)
    assert meters.settled(4 * S, request, 5) == 2 * DOLLAR + 5
    assert meters.costs(4 * S) == {"m": Costs(busy=3 * DOLLAR, idle=5 * DOLLAR, charged=2 * DOLLAR + 5)}
    meters.left(4 * S, V)
    meters.left(5 * S, W)
    assert meters.costs(9 * S)["m"].idle == 6 * DOLLAR, "it costs nothing more"


@pytest.mark.parametrize("tells", [True, False])
def test_a_worker_out_of_service_costs_reserve(tells: bool) -> None:
    meters = made(tells=tells)
    meters.left(0, V)
    meters.serves(0, W, in_service=False, is_lost=True)
    meters.serves(2 * S, W, in_service=True)
    meters.reported(2 * S, W, busy_ns=0, num_requests=0)
    meters.serves(3 * S, W, in_service=False)
    assert meters.costs(7 * S)["m"] == Costs(idle=1 * DOLLAR, reserve=6 * DOLLAR)
    meters.left(8 * S, W)
    assert meters.costs(9 * S)["m"].reserve == 7 * DOLLAR


def test_what_a_worker_did_before_it_was_first_heard_counts_if_it_can_be_new() -> None:
    meters = made(tells=True)
    meters.reported(4 * S, W, busy_ns=3 * S, floor_ns=1 * S, num_requests=0)
    meters.reported(4 * S, V, busy_ns=5 * S, floor_ns=1 * S, num_requests=0)
    assert (meters.costs(4 * S)["m"].busy, meters.costs(4 * S)["m"].floor) == (3 * DOLLAR, 1 * DOLLAR)


def test_a_worker_that_died_with_work_was_busy_until_then_and_its_next_life_counts_anew() -> None:
    meters = made(tells=True)
    meters.left(0, V)
    meters.reported(0, W, busy_ns=50 * S, floor_ns=9 * S, num_requests=0)
    meters.reported(1 * S, W, busy_ns=51 * S, floor_ns=9 * S + S // 2, num_requests=2)
    meters.serves(3 * S, W, in_service=False, is_lost=True)
    meters.serves(5 * S, W, in_service=True)
    meters.reported(6 * S, W, busy_ns=S // 2, floor_ns=S // 4, num_requests=0)
    found = meters.costs(6 * S)["m"]
    assert found.busy + found.idle + found.reserve == 6 * DOLLAR
    assert (found.busy, found.reserve, found.charged) == (3 * DOLLAR + DOLLAR // 2, 2 * DOLLAR, 0)
    assert found.floor == DOLLAR * 3 // 4


def test_a_worker_that_does_not_tell_shares_its_time_by_what_it_has_done() -> None:
    meters = made(tells=False)
    one, two = request_of("a"), request_of("b", prompt=300)
    for request in (one, two):
        meters.started(0, request)
        meters.began(request)
    bill = [meters.settled(4 * S, request, 0) for request in (one, two)]
    assert 4 * DOLLAR - 1 <= sum(bill) <= 4 * DOLLAR, "each is rounded down"
    assert bill[0] < bill[1]
    assert meters.costs(4 * S)["m"] == Costs(busy=4 * DOLLAR, idle=4 * DOLLAR, charged=sum(bill))


def test_an_attempt_that_lost_is_paid_by_whoever_runs_the_worker() -> None:
    meters = made(tells=False)
    meters.started(0, request := request_of("a"))
    meters.started_beside(1 * S, request, V)
    meters.dropped(2 * S, request, second=False)
    request.worker = V
    assert meters.settled(4 * S, request, 0) == 3 * DOLLAR
    assert meters.costs(4 * S)["m"].busy == 5 * DOLLAR


def test_both_attempts_end_together_where_both_are_aborted() -> None:
    meters = made(tells=False)
    meters.started(0, request := request_of("a"))
    meters.started_beside(0, request, V)
    assert meters.ended(1 * S, request) == 1 * DOLLAR
    assert meters.ended(1 * S, request) == 0, "it is over"


def test_a_worker_that_left_costs_until_what_it_ran_is_settled() -> None:
    meters = made(tells=False)
    meters.started(0, request := request_of("a"))
    meters.left(1 * S, W)
    meters.tick(2 * S)
    assert meters.settled(2 * S, request, 0) == 2 * DOLLAR
    assert meters.costs(9 * S)["m"].busy == 2 * DOLLAR


def test_what_other_gateways_run_there_is_theirs() -> None:
    for is_shared, mine in ((True, 1), (False, 2)):
        meters = made(tells=False, is_shared=is_shared)
        meters.started(0, request := request_of("a"))
        meters.reported(0, W, busy_ns=0, num_requests=2)
        assert meters.settled(2 * S, request, 0) == mine * DOLLAR


def test_a_model_without_a_price_has_no_account() -> None:
    meters = made(tells=True)
    request = request_of("a", WorkerId("f"))
    request.facts.route = "free"
    meters.started(0, request)
    assert meters.settled(1 * S, request, 7) == 7
    assert "free" not in meters.costs(1 * S)

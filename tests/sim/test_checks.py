"""The checks see what they are for: each is shown a policy, an engine or a wire that was broken on
purpose.
"""

from dataclasses import replace

import msgspec
import pytest
import sim_case as case
from sim_case import Case, CaseShape, failure, run_case

from penstock.clock import NS_PER_MS
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.queueing import capacity
from penstock.policy.queueing.capacity import WorkerCapacity
from penstock.policy.queueing.fair_queue import FairQueue
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.tenant import Tenant
from penstock.schedule.queue import ClassQueue
from penstock.sim.traffic.prompts import PromptBlockNames, Segment, SimRequest
from penstock.sim.world.worker import SimWorker
from penstock.sim.world.world import World

BANDS = ("priority", "default", "bulk")


def crowd(count: int = 36, *, gap_ms: int = 12, workers: int = 1, gateways: int = 1, **shape: int) -> Case:
    """More requests than there are rows, of three tenants in three bands, all beginning alike."""
    requests = tuple(
        SimRequest(
            id=f"r{number}",
            at_ns=number * gap_ms * NS_PER_MS,
            tenant=f"t{number % 3}",
            prompt=(Segment(7, 64), Segment(100 + number, 20)),
            answer=10_000 + number,
            output_tokens=24,
            adapter=("one", "two")[number % 2] if number < 12 else "",
            band=BANDS[number % 3],
            region="region0",
        )
        for number in range(count)
    )
    sizes = CaseShape(workers=workers, gateways=gateways, max_running=4, **shape)
    return Case(seed=1, shape=sizes, requests=requests)


def test_nothing_is_wrong_with_what_is_not_broken() -> None:
    assert failure(crowd()) == ""
    assert failure(crowd(workers=3, gateways=2, concurrent_max=3)) == ""


def test_a_prefix_of_another_tenant_is_found(monkeypatch) -> None:
    """Every tenant is given the same salt: the engines see one namespace, and nothing is wrong for them."""
    monkeypatch.setattr(case, "Tenant", lambda **given: Tenant(**{**given, "cache_salt": b"one for all"}))
    assert "sent there by nobody who may share them" in failure(crowd())


def test_a_prefix_of_another_adapter_is_found(monkeypatch) -> None:
    chain = PromptBlockNames.chain
    monkeypatch.setattr(
        PromptBlockNames,
        "chain",
        lambda self, prompt, answer, **given: chain(self, prompt, answer, **{**given, "adapter": ""}),
    )
    assert "sent there by nobody who may share them" in failure(crowd(12))


def test_what_is_public_is_everybodys() -> None:
    made = crowd()
    shared = tuple(msgspec.structs.replace(each, public_tokens=64) for each in made.requests)
    assert failure(msgspec.structs.replace(made, requests=shared)) == ""


def test_a_stream_that_goes_to_another_gateway_is_found(monkeypatch) -> None:
    on_messages = World.on_messages
    monkeypatch.setattr(
        World,
        "on_messages",
        lambda self, now_ns, worker, gateway, sent: on_messages(self, now_ns, worker, 1 - gateway, sent),
    )
    assert "which it did not ask for" in failure(crowd(8, gateways=2))


def test_tokens_of_another_answer_are_found(monkeypatch) -> None:
    """All rows are given the tokens of whoever came first."""

    def draw(self, requests, count):
        first = next(iter(self._streams.values()))
        return [first.answer[(done := each.num_generated) : done + count] for each in requests]

    monkeypatch.setattr(SimWorker, "_draw", draw)
    with pytest.raises(AssertionError, match="has tokens of another answer"):
        run_case(crowd(4, gap_ms=1), every=1)


def test_lower_bands_that_go_first_are_found(monkeypatch) -> None:
    in_turn = FairQueue._in_turn
    monkeypatch.setattr(FairQueue, "_in_turn", lambda self, *args: list(in_turn(self, *args))[::-1])
    why = failure(crowd())
    assert "starts on" in why
    assert "(priority)" in why or "(default)" in why


def test_a_lower_class_that_an_engine_starts_first_is_found(monkeypatch) -> None:
    """Credit is what waits at the engine: its queue forgets classes."""
    first = ClassQueue._first

    def last(self):
        waiting = sorted(self._waiting.items())
        return waiting[-1][1] if waiting else first(self)

    monkeypatch.setattr(ClassQueue, "_first", last)
    assert "is started on" in failure(crowd(60, gap_ms=4))


@pytest.mark.parametrize("workers", [1, 3])
def test_room_that_nobody_is_given_is_found(monkeypatch, workers) -> None:
    """With two streams on a worker, the queue takes it for full."""
    fits = WorkerCapacity.fits
    monkeypatch.setattr(WorkerCapacity, "fits", lambda worker, work: worker.booked < 2 and fits(worker, work))
    assert "has room for it" in failure(crowd(workers=workers))


def test_a_request_that_is_forgotten_by_the_placement_is_found(monkeypatch) -> None:
    """Whoever was passed over once is not looked at again while anybody runs."""
    fits = ModelQueue._finds_place
    monkeypatch.setattr(
        ModelQueue,
        "_finds_place",
        lambda self, work: not (work.aside and self.workers.num_running) and fits(self, work),
    )
    assert "has room for it" in failure(crowd(blocks=40))


def test_more_streams_than_a_worker_has_room_for_are_found(monkeypatch) -> None:
    def more(*args, **kwargs):
        return tuple(each + 3 for each in slots_of(*args, **kwargs))

    slots_of = capacity.slots_of
    monkeypatch.setattr(capacity, "slots_of", more)
    assert "is to have 8" in failure(crowd())


def test_more_requests_than_a_tenant_may_have_are_found(monkeypatch) -> None:
    reserve = Limiter.reserve

    def generous(self, now_ns, tenant, *counts, **given):
        return reserve(self, now_ns, replace(tenant, concurrent_max=0), *counts, **given)

    monkeypatch.setattr(Limiter, "reserve", generous)
    assert "and may have 2" in failure(crowd(concurrent_max=2))

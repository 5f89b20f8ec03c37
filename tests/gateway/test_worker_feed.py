"""Requests for a model without a worker: they wait as long as one takes to come, where one will come."""

import asyncio
import io
from types import SimpleNamespace

import pytest
from fake_backend import FakeBackend
from fleets import worker_of

from penstock.backends.base import Phase
from penstock.clock import NS_PER_S, SystemClock
from penstock.config.flow import QueueConfig
from penstock.config.ledger import PricesConfig
from penstock.config.tree import LogConfig
from penstock.errors import WorkerUnavailable
from penstock.fleet.registry import Registry
from penstock.gateway.dispatch.worker_feed import ColdStarts, WorkerFeed
from penstock.policy.flow import Queued, Refused, RequestFacts, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.machine_costs import Meters
from penstock.policy.limits.price import PriceList
from penstock.policy.resilience.anomalies import Anomalies
from penstock.policy.tenant import Tenant
from penstock.policy.terms import QueueTerms
from penstock.telemetry.log import Log
from penstock.types import RequestId, TenantId

CLOCK = SystemClock()


class Place:
    """A model that has had no worker, in a gateway in which nothing waits for one by default."""

    def __init__(self) -> None:
        self.registry = Registry(CLOCK, Log(LogConfig(), CLOCK, stream=io.StringIO()))
        self.cold = ColdStarts(QueueConfig(no_worker_wait_s=0.0), self.registry)
        self.model = SimpleNamespace(name="m", workers=self.registry.of("m"))

    async def wait(self) -> None:
        exchange = SimpleNamespace(on_disconnect=None)
        await self.cold.wait(self.model, exchange, 100, TenantId("t"))


def test_nothing_waits_for_a_worker_that_will_not_come() -> None:
    async def check() -> None:
        place = Place()
        with pytest.raises(WorkerUnavailable, match="The model 'm' is not ready"):
            await place.wait()

    asyncio.run(check())


def test_a_request_waits_until_the_first_worker_is_ready() -> None:
    async def check() -> None:
        place = Place()
        place.cold.to_come = {"m": 3600.0}
        waits = asyncio.create_task(place.wait())
        while not place.cold.num_waiting("m"):
            await asyncio.sleep(0)
        place.registry.add(worker_of(place.registry, "m", FakeBackend(CLOCK)))
        async with asyncio.timeout(20):
            await waits
        assert place.cold.num_waiting("m") == 0

    asyncio.run(check())


def test_the_wait_is_twice_the_cold_start_and_ends_with_the_reason() -> None:
    async def check() -> None:
        place = Place()
        place.cold.to_come = {"m": 0.02}
        before = asyncio.get_running_loop().time()
        with pytest.raises(WorkerUnavailable, match="there is no worker"):
            await place.wait()
        assert asyncio.get_running_loop().time() - before >= 0.039
        assert place.cold.num_waiting("m") == 0

    asyncio.run(check())


def test_what_waits_from_zero_is_queued_for_twice_the_cold_start_and_starts_at_once_then() -> None:
    async def check() -> None:
        place, control = Place(), FlowControl(QueueTerms(no_worker_wait_s=0.0))
        feed = WorkerFeed(
            control, place.registry, Meters(PriceList(PricesConfig()), is_shared=False),
            Anomalies(NS_PER_S), processes=1, shed_kv_above=1.0, on_change=lambda: None,
        )  # fmt: skip

        def arrive(now_s: int, name: str) -> object:
            tenant = Tenant(id=TenantId("t"))
            facts = RequestFacts(id=RequestId(name), tenant=tenant, route="m", prompt_tokens=9, max_tokens=9)
            return control.arrive(now_s * NS_PER_S, facts)

        assert isinstance(arrive(0, "before"), Refused)
        feed.expect(0, {"m": 60.0})
        assert isinstance(arrive(1, "a"), Queued)
        worker = worker_of(place.registry, "m", FakeBackend(CLOCK))
        worker.backend.show(Phase.LOADING, "loading weights")
        place.registry.add(worker)
        feed.refresh(2 * NS_PER_S)
        assert control.dispatch(119 * NS_PER_S) == []
        worker.backend.show(Phase.READY, "ready")
        feed.expect(119 * NS_PER_S, {})
        feed.refresh(119 * NS_PER_S)
        (start,) = control.dispatch(119 * NS_PER_S)
        assert isinstance(start, Start)
        assert start.id == "a"
        place.registry.remove(worker.id)
        feed.refresh(120 * NS_PER_S)
        assert isinstance(arrive(120, "after"), Refused), "it is as before"

    asyncio.run(check())

"""Capacity decisions carried out: budgets, launchers that fail, sleeping workers, requests from zero."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from scaled_fleets import ScaledFleet

from penstock.backends.base import Phase
from penstock.clock import NS_PER_S
from penstock.config.fleet import FleetConfig
from penstock.config.scale import ScaleConfig, ScalePoolConfig
from penstock.errors import InvalidRequest
from penstock.fleet.scale_pools import BACKOFF_MAX_S
from penstock.fleet.scale_report import ScaleAsk, ScaleOrder
from penstock.policy.capacity.learn import COLD_START_S
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.pages import merged
from penstock.types import WorkerId

READY, DRAINING = WorkerState.READY, WorkerState.DRAINING
KINDS = ScaleConfig(
    max=6,
    min=2,
    pools=(
        ScalePoolConfig(name="small", price=1.0, max=2),
        ScalePoolConfig(name="large", price=4.0, max=4),
    ),
)


def run(check: Callable[[], Awaitable[None]]) -> None:
    async def with_timeout() -> None:
        async with asyncio.timeout(20):
            await check()

    asyncio.run(with_timeout())


async def order(fleet: ScaledFleet, workers: int | None, model: str = "m", for_s: float = 3600.0) -> None:
    await fleet.leader.ask(ScaleAsk(order=ScaleOrder(model=model, workers=workers, for_s=for_s), by="sk-1"))
    await fleet.settle()


# --- budgets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerators", "per_hour", "workers", "by"),
    [
        (0, 0.0, 6, ""),
        (3, 0.0, 3, "fleet.accelerators_max is 3"),
        (0, 10.0, 4, "fleet.per_hour_max is 10"),
        (3, 10.0, 3, "fleet.accelerators_max is 3"),
        (5, 10.0, 4, "fleet.per_hour_max is 10"),
        (5, 100.0, 5, "fleet.accelerators_max is 5"),
    ],
)
def test_the_smaller_room_of_two_budgets_counts(
    accelerators: int, per_hour: float, workers: int, by: str
) -> None:
    async def check() -> None:
        budget = FleetConfig(accelerators_max=accelerators, per_hour_max=per_hour)
        priced = ScaleConfig(max=6, pools=(ScalePoolConfig(name="a", price=2.5),))
        fleet = ScaledFleet({"m": priced}, budget, first=(1,))
        await fleet.begin()
        await order(fleet, 6)
        assert len(fleet.names()) == workers
        decision = fleet.report().decision
        assert decision is not None
        assert decision.held_by == by

    run(check)


def test_models_share_a_budget_and_who_leaves_still_counts() -> None:
    async def check() -> None:
        one = ScaleConfig(max=6)
        fleet = ScaledFleet({"a": one, "b": one}, FleetConfig(accelerators_max=4), first=(1,))
        await fleet.begin()
        await order(fleet, 3, "a")
        await order(fleet, 3, "b")
        assert (fleet.report("a").workers, fleet.report("b").workers) == (3, 1)
        assert fleet.report("b").decision.held_by == "fleet.accelerators_max is 4"
        fleet.make_ready(*fleet.names())
        left = asyncio.Event()

        async def stop(_: float) -> None:
            await left.wait()

        for worker in fleet.registry.of("a"):
            worker.stop = stop
        await order(fleet, 1, "a")
        assert len(fleet.names(DRAINING)) == 2
        await fleet.look()
        assert fleet.report("b").workers == 1, "the two that drain have their accelerators yet"
        left.set()
        await fleet.settle()
        await fleet.look()
        assert fleet.report("b").workers == 3

    run(check)


def test_workers_without_a_price_have_no_bound_by_cost() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=6)}, FleetConfig(per_hour_max=1.0), first=(1,))
        await fleet.begin()
        await order(fleet, 6)
        assert len(fleet.names()) == 6

    run(check)


# --- launchers that fail ----------------------------------------------------------------------------


def test_a_launcher_that_refuses_is_left_alone_for_twice_as_long_each_time_ten_minutes_at_most() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=4, min=3)})
        fleet.refused = ("m",)
        tried_s: list[float] = []
        for _ in range(600):
            before = len(fleet.tried)
            report = await fleet.look()
            if len(fleet.tried) > before:
                tried_s.append(fleet.clock.now_ns() / NS_PER_S)
                assert len(fleet.tried) == before + 3, "all three that are missing"
            else:
                assert report.decision is not None
                assert report.decision.held_by.startswith("no worker can be started for ")
                assert "the launcher refuses to start it" in report.pools[0].trouble
            assert report.ready == report.pools[0].pending == 0
        pauses = [round(two - one) for one, two in itertools.pairwise(tried_s)]
        waits = [30, 60, 120, 240, 480, 600, 600]
        # A look later the refusal is seen, and at the first look behind the pause it is tried again.
        assert all(wait <= pause <= wait + 10 for pause, wait in zip(pauses, waits, strict=False)), pauses
        assert len(pauses) >= 5
        assert max(pauses) <= BACKOFF_MAX_S + 10
        fleet.refused = ()
        await fleet.look(BACKOFF_MAX_S)
        fleet.make_ready(*fleet.names())
        report = await fleet.look()
        assert (report.ready, report.pools[0].trouble, report.decision.held_by) == (3, "", "")

    run(check)


def test_workers_that_never_come_up_are_one_failed_attempt_and_one_that_does_ends_the_doubling() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=4, min=2)})
        await fleet.look()
        assert fleet.pool().pending == 2
        fleet.give_up("m-0")
        report = await fleet.look()
        assert report.pools[0].trouble == "no worker can be started for 30 s: it exits with code 1"
        fleet.give_up("m-1")  # Begun together with the other: its end says nothing new.
        report = await fleet.look()
        assert report.pools[0].trouble.startswith("no worker can be started for 30 s")
        assert report.decision is not None
        assert report.decision.held_by == report.pools[0].trouble
        for _ in range(6):
            await fleet.look()
        assert fleet.pool().pending == 2, "it is tried again"
        fleet.give_up(*fleet.names(WorkerState.STARTING))
        assert (await fleet.look()).pools[0].trouble.startswith("no worker can be started for 60 s")
        await fleet.look(60)
        fleet.make_ready(*fleet.names(WorkerState.STARTING)[:1])
        await fleet.look()
        fleet.give_up(*fleet.names(WorkerState.STARTING))
        assert (await fleet.look()).pools[0].trouble.startswith("no worker can be started for 30 s")

    run(check)


def test_while_one_pools_launcher_refuses_the_next_pool_grows() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": KINDS}, first=(0, 0))
        fleet.refused = ("m-small",)
        await fleet.look()
        assert fleet.tried == ["m-small-0", "m-small-1"], "the cheaper pool first"
        report = await fleet.look()
        assert "refuses" in report.pools[0].trouble
        assert fleet.names() == ["m-large-0", "m-large-1"]
        assert report.decision is not None
        assert report.decision.held_by == "", "nothing is lacking"
        fleet.make_ready("m-large-0", "m-large-1")
        await fleet.look()
        fleet.refused = ("m-small", "m-large")
        await order(fleet, 5)
        report = await fleet.look()
        assert report.ready == 2
        assert "refuses" in report.decision.held_by

    run(check)


# --- sleeping workers -------------------------------------------------------------------------------


def test_sleeping_workers_wake_before_new_ones_are_launched_and_none_that_is_ready_leaves() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=6)}, first=(3,))
        await fleet.begin()
        await fleet.look()
        for name in ("m-1", "m-2"):
            fleet.backends[WorkerId(name)].show(Phase.ASLEEP, "asleep")
        await order(fleet, 3)
        assert fleet.woken == ["m"]
        assert fleet.names(READY) == ["m-0"], "the one that is ready stays while two wake"
        for name in ("m-1", "m-2"):
            fleet.backends[WorkerId(name)].show(Phase.WAKING, "wakes")
        await fleet.look()
        fleet.make_ready("m-1", "m-2")
        await fleet.look()
        assert len(fleet.tried) == 3, "nothing new was launched"
        fleet.backends[WorkerId("m-2")].show(Phase.ASLEEP, "asleep")
        await order(fleet, 4)
        assert fleet.woken == ["m", "m"]
        assert fleet.tried[3:] == ["m-3"], "one wakes, and one is new"

    run(check)


def test_fewer_of_those_that_sleep_are_needed_than_wake() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=6)}, first=(3,))
        await fleet.begin()
        await fleet.look()
        for name in ("m-1", "m-2"):
            fleet.backends[WorkerId(name)].show(Phase.ASLEEP, "asleep")
        await order(fleet, 2)
        assert fleet.names(READY) == ["m-0"], "one more is asked for, so the one that is there stays"
        for name in ("m-1", "m-2"):
            fleet.backends[WorkerId(name)].show(Phase.WAKING, "wakes")
        await fleet.look()
        assert fleet.names() == ["m-0", "m-1"], "who starts leaves before who serves"

    run(check)


def test_where_those_that_sleep_do_not_wake_another_pool_grows() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": KINDS}, first=(2, 0))
        await fleet.begin()
        await fleet.look()
        fleet.backends[WorkerId("m-small-1")].show(Phase.ASLEEP, "asleep")
        for _ in range(6):
            report = await fleet.look()
            assert report.pools[0].trouble == ""
            assert len(fleet.names()) == 2
        for _ in range(2):
            report = await fleet.look()
        trouble = "no worker can be started for 30 s: those that sleep do not wake; the log says why"
        assert report.pools[0].trouble == trouble
        assert fleet.names()[2:] == ["m-large-0"]
        fleet.make_ready("m-large-0", "m-small-1")
        for _ in range(8):
            report = await fleet.look()
        assert report.pools[0].trouble == ""
        assert report.ready == 3, "whoever woke late stays until five minutes have shown that it is spare"

    run(check)


# --- from zero --------------------------------------------------------------------------------------


def test_requests_may_wait_for_the_cold_start_while_a_worker_can_come() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=2, min=0, in_after_s=30)})
        await fleet.look()
        assert fleet.names() == []
        assert fleet.published == {"m": COLD_START_S}
        fleet.waiting = {"m": 1}
        report = await fleet.look(0.5)
        assert (report.workers, fleet.names()) == (1, ["m-0"]), "a request with nobody does not wait for 5 s"
        assert report.decision.opinions[2].why == "somebody asks for the model"
        assert fleet.published == {"m": COLD_START_S}
        await fleet.look(6.5)
        fleet.make_ready("m-0")
        fleet.waiting = {}
        report = await fleet.look()
        assert fleet.published == {}, "it takes requests now"
        assert report.decision.cold_start_s == 6.5, "from being asked for to being ready"
        for _ in range(30):
            await fleet.look()
        assert fleet.names() == []
        assert fleet.published == {"m": 6.5}

    run(check)


@pytest.mark.parametrize("why", ["advice", "frozen", "order"])
def test_requests_do_not_wait_for_a_worker_that_will_not_come(why: str) -> None:
    async def check() -> None:
        scale = ScaleConfig(max=2, min=0)
        if why == "advice":
            scale = msgspec.structs.replace(scale, mode="advise")
        if why == "frozen":
            scale = msgspec.structs.replace(scale, frozen=("00:00-24:00",))
        fleet = ScaledFleet({"m": scale})
        if why == "order":
            await order(fleet, 0)
        fleet.waiting = {"m": 1}
        await fleet.look()
        assert fleet.tried == []
        assert fleet.published == {}

    run(check)


# --- times and orders -------------------------------------------------------------------------------


def test_at_frozen_times_only_orders_change_anything() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=6, min=3, frozen=("00:00-24:00",))}, first=(1,))
        await fleet.begin()
        report = await fleet.look()
        assert fleet.names() == ["m-0"]
        assert report.decision is not None
        assert (report.decision.move, report.decision.acts) == ("out", False)
        assert "frozen" in report.decision.why
        assert (report.workers, report.decision.workers) == (1, 3), "others who scale by it change nothing"
        await order(fleet, 2, for_s=60)
        assert fleet.names() == ["m-0", "m-1"]
        fleet.make_ready("m-1")
        await fleet.look(60)
        assert fleet.report().override is None, "it has expired"
        assert fleet.names() == ["m-0", "m-1"], "and it is frozen again"

    run(check)


def test_orders_outside_the_bounds_are_refused() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=3)}, first=(1,))
        for workers, for_s in ((4, 60.0), (-1, 60.0), (1, 0.0), (1, 1e9)):
            with pytest.raises(InvalidRequest):
                await order(fleet, workers, for_s=for_s)

    run(check)


def test_the_number_that_other_autoscalers_read_is_in_the_catalog_and_on_the_page() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": KINDS}, first=(0, 0))
        await fleet.look()
        metrics = Metrics(["m"], version="1.2.3")
        fleet.leader.measure(metrics.scale_wanted)
        lines = [
            b'penstock_scale_wanted_workers{model="m",pool="small"} 2.0',
            b'penstock_scale_wanted_workers{model="m",pool="large"} 0.0',
        ]
        for page in (metrics.render(), fleet.leader.page()):
            assert [each for each in page.splitlines() if each.startswith(b"penstock_scale_")] == lines
        children = [Metrics(["m"], version="1.2.3").render()] * 2
        summed = merged([*children, fleet.leader.page()])
        assert summed.count(b"# TYPE penstock_scale_wanted_workers gauge") == 1
        assert lines[0] in summed

    run(check)


# --- pools ------------------------------------------------------------------------------------------


def test_the_cheaper_pool_grows_first_and_the_dearer_one_shrinks_first() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": KINDS}, first=(0, 0))
        await fleet.look()
        assert fleet.names() == ["m-small-0", "m-small-1"]
        await order(fleet, 4)
        assert fleet.names()[2:] == ["m-large-0", "m-large-1"], "the cheaper one is full"
        fleet.make_ready(*fleet.names())
        await fleet.look()
        assert (fleet.pool("small").workers, fleet.pool("large").workers) == (2, 2)
        await order(fleet, 3)
        await order(fleet, 2)
        assert fleet.names() == ["m-small-0", "m-small-1"]

    run(check)


def test_an_order_for_fewer_goes_before_what_spot_machines_leave_uncovered() -> None:
    async def check() -> None:
        pools = (ScalePoolConfig(name="firm", price=4.0), ScalePoolConfig(name="spot", price=1.0, spot=True))
        fleet = ScaledFleet({"m": ScaleConfig(max=6, min=2, pools=pools)}, first=(0, 3))
        await fleet.begin()
        await order(fleet, 1)
        assert len(fleet.names()) == 1, "not one more in the steady pool"

    run(check)


def test_a_worker_that_is_taken_out_of_service_is_replaced_and_its_name_is_not_taken_meanwhile() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=3, min=2)}, first=(2,))
        await fleet.begin()
        await fleet.look()
        assert fleet.members.hold(WorkerId("m-0"), 0.0)
        report = await fleet.look()
        assert fleet.tried == ["m-0", "m-1", "m-2"]
        assert (report.ready, report.pools[0].pending, report.pools[0].trouble) == (1, 1, "")

    run(check)


def test_the_least_loaded_leaves() -> None:
    async def check() -> None:
        fleet = ScaledFleet({"m": ScaleConfig(max=3, min=1)}, first=(3,))
        await fleet.begin()
        fleet.backends[WorkerId("m-0")]._streams = {"r": None}
        fleet.backends[WorkerId("m-2")]._streams = {"r": None}
        await order(fleet, 2)
        assert fleet.names(READY) == ["m-0", "m-2"]

    run(check)

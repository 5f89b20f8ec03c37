"""Scenarios of cells (zones, regions) that help each other: a load that one of them cannot answer, workers of
one that all fail, and cells that are lost: one, or a whole region.

Three cells: east and south are near each other, in one region; west is far, in another.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.clock import NS_PER_S
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome
from penstock.sim.report.figures import Objective
from penstock.sim.scenarios.faults import BEGINS, ENDS, fault
from penstock.sim.scenarios.scenario import (
    Finding,
    answered,
    at_least,
    at_most,
    finished_share,
    good_share,
    no_failures,
    pool,
    scenario,
    setup,
)
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.prompts import RequestRecord, SimRequest
from penstock.sim.traffic.workload import (
    Arrivals,
    Callers,
    Chat,
    LengthDistribution,
    Poisson,
    Spike,
    TrafficSource,
    even,
    merged,
)
from penstock.sim.world.cells import MISSED_NS, Cells, CellsSpec
from penstock.sim.world.faults import FaultKind, InjectedFault
from penstock.sim.world.run import PoolSpec

EAST, SOUTH, WEST = "east", "south", "west"
CELLS = (EAST, SOUTH, WEST)
LAW = LinearStepTime(fixed_ns=60_000_000, row_ns=4_000_000, prefill_ns=1_000_000)
PROMPT, ANSWER = LengthDistribution(200, 0.4, maximum=1024), LengthDistribution(24, 0.4, maximum=96)
OBJECTIVE = Objective(ttft_ms=4000, tpot_ms=400)
WORKER_RPS = 2.0
"""The load of one worker that is half full."""
SPEC = CellsSpec(
    rtt_s=0.005,
    far={frozenset((EAST, WEST)): 0.08, frozenset((SOUTH, WEST)): 0.08},
    labels={EAST: ("eu",), SOUTH: ("eu",), WEST: ("us",)},
    prices={EAST: 0.02, SOUTH: 0.02, WEST: 0.09},
)


@dataclass(slots=True, frozen=True)
class AtCell:
    """A source whose clients come to one cell, some of them bound to cells with a label."""

    source: TrafficSource
    cell: str
    bound: str = ""
    every: int = 4
    """One in so many is bound."""

    @property
    def name(self) -> str:
        """See `TrafficSource`."""
        return f"{self.source.name}@{self.cell}"

    def requests(self, seed: int, first: int, seconds: float) -> Iterator[SimRequest]:
        """See `TrafficSource`."""
        for number, request in enumerate(self.source.requests(seed, first, seconds)):
            places = (self.bound,) if self.bound and number % self.every == 0 else ()
            yield msgspec.structs.replace(request, region=self.cell, places=places)


def _setup(
    knobs: Knobs, arrivals: dict[str, Arrivals], *, seconds: float, faults: Sequence[InjectedFault] = (),
    bound: str = "",
) -> Setup:  # fmt: skip
    pools, sources = list[PoolSpec](), list[TrafficSource]()
    for cell in CELLS:
        made = pool(knobs, workers=2, cold_start_s=3)
        worker = replace(made.worker, step_time=knobs.step_time or LAW)
        pools.append(replace(made, worker=worker, count=2, region=cell))
        callers = Callers(tenants=even(4), patience_s=30.0)
        chat = Chat(
            name=f"chat-{cell}", arrivals=arrivals[cell], callers=callers, prompt=PROMPT, output=ANSWER,
            system_tokens=32,
        )  # fmt: skip
        sources.append(AtCell(chat, cell, bound))
    made = setup(knobs, pools, sources, seconds=seconds, faults=faults, objective=OBJECTIVE)
    return replace(made, cells=SPEC)


def _of(played: Played) -> Cells:
    assert played.cells is not None, "there are cells"
    return played.cells


def _alone(build: Callable[[Knobs], Setup]) -> Callable[[Knobs], Setup]:
    """The same cells without each other."""
    return lambda knobs: replace(build(knobs), cells=None)


def _from(cell: str) -> Callable[[RequestRecord], bool]:
    return lambda record: record.id.startswith(f"chat-{cell}")


def _bills(played: Played) -> Sequence[Finding]:
    """One bill: a line for each request in the ledger of its own cell, and beside it no more than one
    finished line of a guest's for each.
    """
    guests = Counter(each.origin_id for each in _of(played).guest_bills if each.outcome is Outcome.FINISHED)
    finished = sum(record.outcome is Outcome.FINISHED for record in played.records)
    ended = sum(record.outcome is not Outcome.REJECTED for record in played.records)
    return (
        at_most("requests that two cells have answered", max(guests.values(), default=1), 1),
        at_most("lines of own cells' ledgers, less requests that were accepted",
                abs(played.result.counters.records - ended), 0),
        at_least("answered requests", finished, 1),
    )  # fmt: skip


def _check_spill(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None, "it is held against cells that know nothing of each other"
    away = [each for each in played.records if each.worker.startswith("cell:")]
    asked = merged(played.setup.sources, played.seed, played.setup.seconds)
    bound = {request.id for request in asked if request.places}
    us = [each for each in away if each.worker.startswith(f"cell:{WEST}/") and each.id in bound]
    near = sum(each.worker.startswith(f"cell:{SOUTH}/") for each in away)
    quiet = [each for each in away if not _from(EAST)(each)]
    return (
        answered(played), no_failures(played), *_bills(played),
        at_least("requests that a peer answered", len(away), 20),
        at_least("of these, the near cell's share", near / max(1, len(away)), 0.5),
        at_most("requests of other cells that were sent away", len(quiet), len(away) / 4),
        at_most("bound requests that left the EU", len(us), 0),
        at_least("good share of the cell with the load", good_share(played, _from(EAST)), 0.9),
        at_most("the same without peers", good_share(baseline, _from(EAST)), 0.6),
        at_least("good share of the others", good_share(played, lambda r: not _from(EAST)(r)), 0.95),
    )  # fmt: skip


def _spill(knobs: Knobs) -> Setup:
    rate = WORKER_RPS * 2 * knobs.load
    arrivals: dict[str, Arrivals] = {
        EAST: Spike(0.5 * rate, 5.0, 10.0, 25.0), SOUTH: Poisson(0.3 * rate), WEST: Poisson(0.3 * rate),
    }  # fmt: skip
    return _setup(knobs, arrivals, seconds=35, bound="eu")


@scenario(_check_spill, baseline=_alone(_spill))
def cell_spill(knobs: Knobs) -> Setup:
    """Do other cells answer what one of them cannot, and only that?

    A request waits here unless a peer would begin clearly sooner; the near one before the far one, and what
    is bound to the EU stays there.
    """
    return _spill(knobs)


def _check_broken(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None, "it is held against cells that know nothing of each other"

    def during(record: RequestRecord) -> bool:
        return _from(EAST)(record) and BEGINS + 6 <= record.at_ns / NS_PER_S < ENDS

    late = [each for each in played.records if _from(EAST)(each) and each.at_ns > (ENDS + 15) * NS_PER_S]
    back = sum(not each.worker.startswith("cell:") for each in late) / max(1, len(late))
    return (
        answered(played), *_bills(played),
        at_least("answered share of the cell's requests, from 6 s after its workers failed",
                 finished_share(played, during), 0.97),
        at_most("the same without peers", finished_share(baseline, during), 0.6),
        at_least("share that its own workers answer, from 15 s after they are well", back, 0.8),
    )  # fmt: skip


def _broken(knobs: Knobs) -> Setup:
    rate = WORKER_RPS * 2 * 0.4 * knobs.load
    faults = [fault(FaultKind.GRAY), fault(FaultKind.GRAY, target=1)]
    return _setup(knobs, dict.fromkeys(CELLS, Poisson(rate)), seconds=55, faults=faults)


@scenario(_check_broken, baseline=_alone(_broken))
def cell_breakers(knobs: Knobs) -> Setup:
    """Both workers of a cell fail every request: do peers answer, and does it take its work back?

    Breakers that are open go before the rule that failing workers are better than none, where there is a
    peer.
    """
    return _broken(knobs)


def _check_lost(gone: Sequence[str], good: float) -> Callable[[Played, Played | None], Sequence[Finding]]:
    def check(played: Played, _: Played | None) -> Sequence[Finding]:
        since = BEGINS + MISSED_NS / NS_PER_S + 6
        sent = sum(num for (_, to), num in _of(played).num_sent.items() if to in gone)

        def stays(record: RequestRecord) -> bool:
            return not any(_from(cell)(record) for cell in gone)

        return (
            answered(played), *_bills(played),
            at_least("requests that were sent to the lost cells", sent, 3),
            at_most("failed requests of cells that stay",
                    sum(each.outcome is Outcome.FAILED for each in played.records if stays(each)), 0),
            at_least("requests that continued or began again elsewhere",
                     sum(each.attempts > 1 for each in played.records), 1),
            at_least("good share of cells that stay, from 6 s after they were missed",
                     good_share(played, lambda r: stays(r) and r.at_ns >= since * NS_PER_S), good),
            at_least("answered share of all, from then on",
                     finished_share(played, lambda r: r.at_ns >= since * NS_PER_S), good),
        )  # fmt: skip

    return check


def _lost(knobs: Knobs, gone: Sequence[str]) -> Setup:
    """One of the cells that stay has more than it can do, so that others have its guests."""
    rate = WORKER_RPS * 2 * knobs.load
    busy = WEST if EAST in gone and SOUTH in gone else EAST
    arrivals: dict[str, Arrivals] = {cell: Poisson(0.3 * rate) for cell in CELLS}
    arrivals[busy] = Spike(0.3 * rate, 8.0, BEGINS - 6.0, BEGINS + 0.5)
    faults = [fault(FaultKind.REGION_LOSS, target=CELLS.index(cell), until=0) for cell in gone]
    return _setup(knobs, arrivals, seconds=40, faults=faults)


@scenario(_check_lost((SOUTH,), 0.9))
def cell_lost(knobs: Knobs) -> Setup:
    """A cell is lost, with its gateway, its workers and the guests that it has: what do the others lose?

    Guests that ran there continue at home behind their last token; its own clients ask again elsewhere.
    """
    return _lost(knobs, (SOUTH,))


@scenario(_check_lost((EAST, SOUTH), 0.8))
def region_lost(knobs: Knobs) -> Setup:
    """A whole region is lost, two cells of three at once: does the third serve everybody?

    It has room for all of them; what it had sent there comes back to it.
    """
    return _lost(knobs, (EAST, SOUTH))

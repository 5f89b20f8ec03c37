"""The regions of a world as cells that help each other: each is, to the others, one worker of each model
(policy/queueing/cells.py decides when it is given something).

    gateway ──submit, abort──> (half a round trip) ──> a gateway over there: queue, placement, worker
            <──Began, Sliced, Finished, Failed──
            <──how it stands (`CellView`), twice a second, as long as it lives──

As with real cells (gateway/cells/), a request of another cell, a guest, waits and is placed like any other,
and stays there; when its worker fails it goes back to its own cell, which knows all places where it could go
on. Its own cell bills it; what the cell that it was a guest of writes down is in `guest_bills`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.errors import Overloaded, PenstockError, StreamBroken, WorkerBusy, WorkerUnavailable
from penstock.policy.flow import Outcome, RequestFacts, UsageRecord
from penstock.policy.queueing.capacity import WorkerCapacity, WorkerView
from penstock.policy.request import Request
from penstock.policy.terms import CellView
from penstock.sim.traffic.prompts import SimRequest
from penstock.sim.world.facts import GuestTicket, ticket_of
from penstock.sim.world.gateway import SimGateway
from penstock.sim.world.messages import (
    Began,
    Failed,
    Finished,
    Rank,
    Sliced,
    Submission,
    WorkerMessage,
)
from penstock.sim.world.world import WORLD, World
from penstock.types import FinishReason, RequestId, Usage, WorkerId, places_of

_What = TypeVar("_What")
PING_NS = 500 * NS_PER_MS
MISSED_NS = 2 * NS_PER_S
"""A cell is missed so long after its last sign of life."""


@dataclass(slots=True, frozen=True, kw_only=True)
class CellsSpec:
    """The cells of a world: its regions."""

    rtt_s: float = 0.02
    """Between any two, there and back, unless `far` says more."""
    far: Mapping[frozenset[str], float] = field(default_factory=dict[frozenset[str], float])
    """Of two cells, by their names."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Of each cell, beside its name."""
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of sending a cell a million tokens."""

    def rtt_ns(self, one: str, other: str) -> int:
        """There and back."""
        return round(self.far.get(frozenset((one, other)), self.rtt_s) * NS_PER_S)

    def places(self, cell: str) -> frozenset[str]:
        """Where its workers are, as capabilities."""
        return places_of((cell, *self.labels.get(cell, ())))


class Cells:
    """Of one world, in which every region has the same model."""

    def __init__(self, world: World, spec: CellsSpec) -> None:
        self.spec, self._world = spec, world
        self.guest_bills: list[UsageRecord] = []
        """Ledger lines of cells about requests of others."""
        self.num_sent: dict[tuple[str, str], int] = {}
        """Attempts that a cell has sent to another one."""
        self._model = world.spec.pools[0].model
        self._cells = {WorkerId(f"cell:{each}/{self._model}"): each for each in world.regions}
        self._guests: dict[tuple[int, RequestId], tuple[SimGateway, RequestId]] = {}
        """Gateway and id of each request that is away -> where it is, and its id there."""
        self._missing: set[str] = set()
        self._num = 0
        world.cells = self
        for gateway in world.gateways:
            self.join(gateway)
        world.timeline.at(0, WORLD, Rank.TIMER, self._ping, None)

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._cells

    def join(self, gateway: SimGateway) -> None:
        """See `CellLinks`."""
        gateway.host(self, self.spec.places(self._cell_of(gateway.number)))

    def stays_in(self, gateway: int) -> frozenset[str]:
        """See `GuestHost`."""
        return places_of((self._cell_of(gateway),))

    # --- from the cell that a request came to ---------------------------------------------------------

    def submit(self, now_ns: int, worker_id: WorkerId, submission: Submission) -> None:
        """See `CellLinks`."""
        origin, away = self._world.gateways[submission.gateway], self._cells[worker_id]
        request = origin.control.request(submission.id)
        assert request is not None, f"{submission.id} was just started"
        here = self._cell_of(origin.number)
        self.num_sent[here, away] = self.num_sent.get((here, away), 0) + 1
        what = (away, submission, request.facts, ticket_of(request).request)
        self._later(now_ns, here, away, self._on_guest, what)

    def abort(self, now_ns: int, gateway: int, worker_id: WorkerId, request_id: RequestId) -> None:
        """See `CellLinks`."""
        here, away = self._cell_of(gateway), self._cells[worker_id]
        self._later(now_ns, here, away, self._on_abort, (gateway, request_id))

    def _on_guest(self, now_ns: int, what: tuple[str, Submission, RequestFacts, SimRequest]) -> None:
        away, submission, facts, asked = what
        fronts = [self._world.gateways[each] for each in self._world.fronts[away]]
        living = [each for each in fronts if not each.is_gone]
        if not living:
            return  # Its cell will miss this one.
        self._num += 1
        gateway, number = living[self._num % len(living)], (1 << 40) + self._num
        left_ns = max(1, facts.first_token_ns - (now_ns - asked.at_ns)) if facts.first_token_ns else 0
        guest = SimRequest(
            id=f"{submission.id}>{submission.attempt}",
            at_ns=now_ns,
            tenant=asked.tenant,
            model=facts.route,
            prompt=submission.prompt,
            answer=submission.answer,
            output_tokens=submission.output_tokens,
            max_tokens=submission.max_tokens,
            public_tokens=submission.public_tokens,
            session=asked.session,
            adapter=submission.adapter,
            band=asked.band,
            first_token_ns=left_ns,
        )
        ticket = GuestTicket(guest, number, submission, self)
        ticket.cell, ticket.away = self._cell_of(submission.gateway), away
        self._guests[submission.gateway, submission.id] = gateway, RequestId(guest.id)
        gateway.arrive_guest(now_ns, ticket, facts)

    def _on_abort(self, now_ns: int, what: tuple[int, RequestId]) -> None:
        if (found := self._guests.get(what)) is not None:
            gateway, request_id = found
            if not gateway.is_gone:
                gateway.cancel(now_ns, request_id)

    # --- from the cell that a guest is in: see `GuestHost` ----------------------------------------------

    def said(self, now_ns: int, ticket: GuestTicket, message: Began | Sliced) -> None:
        """See `GuestHost`."""
        asked = ticket.asked
        self._tell(now_ns, ticket, msgspec.structs.replace(message, id=asked.id, attempt=asked.attempt))

    def refused(self, now_ns: int, ticket: GuestTicket) -> None:
        """See `GuestHost`: that is load, and no failure of the cell."""
        asked = ticket.asked
        self._forget(asked)
        self._tell(now_ns, ticket, Failed(asked.id, asked.attempt, WorkerBusy("the cell has no room for it")))

    def settled(
        self, now_ns: int, ticket: GuestTicket, request: Request, error: PenstockError | None
    ) -> None:
        """See `GuestHost`."""
        asked, last = ticket.asked, ticket.last
        self._forget(asked)
        if request.outcome is Outcome.CANCELLED:
            usage = last.usage if last is not None else Usage()
            self._tell(now_ns, ticket, Finished(asked.id, asked.attempt, FinishReason.ABORT, usage))
        elif last is not None:
            self._tell(now_ns, ticket, msgspec.structs.replace(last, id=asked.id, attempt=asked.attempt))
        else:
            kind = StreamBroken if ticket.first_ns >= 0 else WorkerUnavailable
            if isinstance(error, Overloaded):
                kind = WorkerBusy
            self._tell(now_ns, ticket, Failed(asked.id, asked.attempt, kind("it failed in its cell")))

    def billed(self, record: UsageRecord) -> None:
        """See `GuestHost`."""
        self.guest_bills.append(record)

    # --- a cell is lost -----------------------------------------------------------------------------

    def lost(self, now_ns: int, region: str) -> None:
        """See `CellLinks`: nobody is told. The others miss it, and end what it has brought them."""
        self._world.timeline.at(now_ns + MISSED_NS, WORLD, Rank.TIMER, self._on_missed, region)

    def _on_missed(self, now_ns: int, region: str) -> None:
        self._missing.add(region)
        (worker_id,) = [each for each, cell in self._cells.items() if cell == region]
        for gateway in self._world.gateways:
            if not gateway.is_gone and self._cell_of(gateway.number) != region:
                gateway.lost(now_ns, worker_id, died=False)
        for (number, _), (gateway, request_id) in list(self._guests.items()):
            if self._cell_of(number) == region and not gateway.is_gone:
                gateway.cancel(now_ns, request_id)

    # --- how cells stand ------------------------------------------------------------------------------

    def _ping(self, now_ns: int, _: None) -> None:
        if self._world.is_over:
            return
        for worker_id, away in self._cells.items():
            fronts = [self._world.gateways[each] for each in self._world.fronts[away]]
            living = [each for each in fronts if not each.is_gone]
            if not living:
                continue
            self._missing.discard(away)
            for here in self._world.regions:
                if here != away:
                    view = self._view(living[0], here, away)
                    self._later(now_ns, away, here, self._on_view, (here, worker_id, view))
        self._world.timeline.at(now_ns + PING_NS, WORLD, Rank.TIMER, self._ping, None)

    def _on_view(self, now_ns: int, what: tuple[str, WorkerId, WorkerView]) -> None:
        here, worker_id, view = what
        if self._cells[worker_id] in self._missing:
            return
        for number in self._world.fronts[here]:
            self._world.gateways[number].peer(now_ns, self._model, worker_id, view)

    def _view(self, gateway: SimGateway, here: str, away: str) -> WorkerView:
        """How a cell stands for another one, as its gateways tell (gateway/cells/server.py)."""
        rtt_ns, price = self.spec.rtt_ns(here, away), self.spec.prices.get(away, 0.0)
        model_queue = gateway.control.model_queue(self._model)
        own: list[WorkerCapacity] = []
        if model_queue is not None:
            own = [each for each in model_queue.workers if each.view.cell is None and each.view.ready]
        if model_queue is None or not own:
            return WorkerView(ready=False, cell=CellView(name=away, rtt_ns=rtt_ns, price=price))
        identities, waiting = {each.view.identity for each in own}, model_queue.queue.num_waiting
        wait_ns = waiting * model_queue.gap_ns
        return WorkerView(
            max_running=sum(each.view.max_running for each in own),
            running=sum(each.booked + each.others for each in own),
            waiting=waiting,
            kv_blocks_total=sum(each.view.kv_blocks_total for each in own),
            kv_blocks_used=sum(each.view.kv_blocks_used for each in own),
            kind=f"cell:{away}",
            max_model_len=min(each.view.max_model_len for each in own),
            identity=identities.pop() if len(identities) == 1 else "",
            capabilities=self.spec.places(away),
            cell=CellView(name=away, rtt_ns=rtt_ns, wait_ns=wait_ns, price=price),
        )

    # --- inside ---------------------------------------------------------------------------------------

    def _cell_of(self, gateway: int) -> str:
        (found,) = [cell for cell, fronts in self._world.fronts.items() if gateway in fronts]
        return found

    def _later(
        self, now_ns: int, one: str, other: str, handler: Callable[[int, _What], None], what: _What
    ) -> None:
        """It is on its way from one cell to the other."""
        when_ns = now_ns + self.spec.rtt_ns(one, other) // 2
        self._world.timeline.at(when_ns, WORLD, Rank.MESSAGE, handler, what)

    def _forget(self, asked: Submission) -> None:
        self._guests.pop((asked.gateway, asked.id), None)

    def _tell(self, now_ns: int, ticket: GuestTicket, message: WorkerMessage) -> None:
        """A word about a guest, to the cell that it came from."""
        what = (ticket.asked.gateway, WorkerId(f"cell:{ticket.away}/{self._model}"), message)
        self._later(now_ns, ticket.away, ticket.cell, self._on_message, what)

    def _on_message(self, now_ns: int, what: tuple[int, WorkerId, WorkerMessage]) -> None:
        number, worker_id, message = what
        gateway = self._world.gateways[number]
        if not gateway.is_gone:
            gateway.received(now_ns, worker_id, (message,))

"""Interfaces and records that a simulated gateway and its world share.

The network that it sends to (`Network`), what is the same for all gateways (`Facts`), the workers that the
fleet knows (`Member`) and how fast they are (`SpeedWatch`), the note that is kept with each accepted request
(`Ticket`, and of another cell's request `GuestTicket`), who listens while a world runs (`RunRecorder`,
`Watcher`), and who tries a new version in it (`Dealer`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.config.tree import Config
from penstock.errors import PenstockError
from penstock.policy.flow import UsageRecord
from penstock.policy.placement.adapters import ResidencyOrder
from penstock.policy.queueing.capacity import Placement
from penstock.policy.request import Request
from penstock.policy.resilience.anomalies import Anomalies, StandingChange
from penstock.policy.tenant import Tenant
from penstock.sim.traffic.prompts import RequestRecord, SimRequest
from penstock.sim.world.caches import Asked
from penstock.sim.world.messages import (
    Began,
    Finished,
    KVEventChannel,
    Sliced,
    Submission,
    WorkerLoadReport,
    WorkerMessage,
)
from penstock.sim.world.run import PoolSpec, SimWorkerSpec
from penstock.sim.world.worker import SimWorker
from penstock.types import RequestId, TenantId, Usage, WorkerId


class Network(Protocol):
    """The actors that a gateway can reach."""

    def submit(self, now_ns: int, worker_id: WorkerId, submission: Submission) -> None:
        """Send a request to a worker."""
        ...

    def ask_kv(self, now_ns: int, gateway: int, worker_id: WorkerId, asked: Asked) -> None:
        """Ask a worker to say again what it said of its cache."""
        ...

    def abort(self, now_ns: int, gateway: int, worker_id: WorkerId, request_id: RequestId) -> None:
        """Tell a worker to end one."""
        ...

    def order(self, gateway: int, order: ResidencyOrder) -> None:
        """Tell a worker which adapters are to be in memory."""
        ...


class RunRecorder(Protocol):
    """The recorder of requests' results."""

    def ended(self, record: RequestRecord) -> None:
        """A request has ended, or was refused."""
        ...

    def billed(self, record: UsageRecord) -> None:
        """One line of the ledger."""
        ...


class Ticket:
    """One request as its client sees it."""

    __slots__ = ("first_ns", "num_reported", "number", "request", "usage")

    def __init__(self, request: SimRequest, number: int) -> None:
        self.request, self.number = request, number
        self.num_reported = 0
        """Tokens of the answer that the client has."""
        self.first_ns = -1
        self.usage = Usage()
        """The worker's report with the first token."""


class GuestHost(Protocol):
    """Carries what becomes of guests to the cells that they came from."""

    def stays_in(self, gateway: int) -> frozenset[str]:
        """Needs of a guest of this gateway, so that it is not sent on."""
        ...

    def said(self, now_ns: int, ticket: "GuestTicket", message: Began | Sliced) -> None:
        """There is output."""
        ...

    def refused(self, now_ns: int, ticket: "GuestTicket") -> None:
        """It was not accepted."""
        ...

    def settled(
        self, now_ns: int, ticket: "GuestTicket", request: Request, error: PenstockError | None
    ) -> None:
        """It has ended."""
        ...

    def billed(self, record: UsageRecord) -> None:
        """One line of the ledger of the cell that it was a guest of."""
        ...


class CellLinks(Protocol):
    """Carries requests between cells: see cells.py."""

    def __contains__(self, worker_id: WorkerId) -> bool:
        """Whether it is a peer cell."""
        ...

    def submit(self, now_ns: int, worker_id: WorkerId, submission: Submission) -> None:
        """Send a request to a peer cell."""
        ...

    def abort(self, now_ns: int, gateway: int, worker_id: WorkerId, request_id: RequestId) -> None:
        """Tell it to end one."""
        ...

    def lost(self, now_ns: int, region: str) -> None:
        """A cell is gone, with all that it has."""
        ...

    def join(self, gateway: Any) -> None:  # noqa: ANN401 - the module of gateways imports this one.
        """A gateway of a cell begins."""
        ...


class GuestTicket(Ticket):
    """One request of another cell, at a gateway of this one."""

    __slots__ = ("asked", "away", "cell", "host", "last")

    def __init__(self, request: SimRequest, number: int, asked: Submission, host: GuestHost) -> None:
        """`asked` is what its own cell has sent."""
        super().__init__(request, number)
        self.asked, self.host = asked, host
        self.cell = self.away = ""
        """The cell that it came to, and the one that it is a guest of."""
        self.num_reported = asked.num_resumed
        self.last: Finished | None = None
        """Its worker's last word."""


class Dealer(Protocol):
    """Deals conversations to versions of a model, and copies requests: see rollout.py."""

    def deal(self, request: SimRequest) -> SimRequest:
        """A client asks: the version that it gets."""
        ...

    def accepted(self, now_ns: int, gateway: int, request: SimRequest, number: int) -> None:
        """A gateway has accepted it."""
        ...

    def received(self, now_ns: int, message: WorkerMessage) -> None:
        """A worker's word about no attempt of a gateway's: about a copy, it may be."""
        ...

    def gone(self, worker_id: WorkerId) -> None:
        """A worker is gone."""
        ...

    def dispatched(self, now_ns: int, gateway: int) -> None:
        """Requests of a gateway may have begun to run, or to wait."""
        ...


def ticket_of(request: Request) -> Ticket:
    """The ticket that the gateway submitted it with."""
    assert isinstance(request.io, Ticket), f"{request.id} is not a simulated request"
    return request.io


class Facts:
    """The facts that are the same for all gateways of a world."""

    __slots__ = (
        "config",
        "hash_key",
        "link_ns",
        "models",
        "placement",
        "poison",
        "seed",
        "skews_ns",
        "tenants",
        "watches_speed",
    )

    def __init__(
        self, config: Config, models: Mapping[str, SimWorkerSpec], tenants: Mapping[str, Tenant], link_ns: int
    ) -> None:
        """`models` by name; `link_ns` is the way to a client."""
        self.config, self.models, self.link_ns = config, models, link_ns
        self.hash_key = b"the launcher's own"
        """The key by which workers name their KV blocks. A launcher draws it by chance; here the same seed is
        to be the same run."""
        self.poison: frozenset[int] = frozenset()
        """Numbers of requests that bring down every worker that computes them."""
        self.skews_ns: dict[int, int] = {}
        """How far the dates of gateways are off, by their number."""
        self.watches_speed = False
        """See `WorldSpec`."""
        self.seed = 0
        """The seed of chance in decisions."""
        self.placement: Callable[[str], Placement] | None = None
        """In place of the configured one."""
        self.tenants = dict(tenants)

    def tenant(self, name: str, band: str) -> Tenant:
        """A tenant, with its own band or the one that a request asks for."""
        key = f"{name}\0{band}" if band else name
        found = self.tenants.get(key)
        if found is None:
            found = self.tenants.get(name)
            if found is None:
                found = Tenant(id=TenantId(name), cache_salt=name.encode(), fairness_key=name)
            if band:
                found = replace(found, band=band)
            self.tenants[key] = found
        return found


@dataclass(slots=True, eq=False)
class Member:
    """One worker, and how it is reached."""

    worker: SimWorker
    pool: PoolSpec
    since_ns: int
    kv: KVEventChannel
    ready: bool = False
    draining: bool = False
    left: bool = False
    """It drained, and left when it was empty."""
    is_mute: bool = False
    """Its reports of itself are lost."""
    late_ns: int = 0
    """The time that its messages take beyond others'."""
    sent_ns: dict[int, int] = field(default_factory=dict[int, int])
    """When the last message of each gateway arrives there: none overtakes another."""
    retry_after_ns: dict[int, int] = field(default_factory=dict[int, int])


class Watcher(Protocol):
    """An observer that checks: see tests/doubles/sim_checks.py."""

    def asked(self, request: SimRequest) -> None:
        """A client asks."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A request has ended, or was refused."""
        ...

    def billed(self, record: UsageRecord) -> None:
        """One line of the ledger."""
        ...

    def submitted(self, worker_id: WorkerId, submission: Submission, model: str) -> None:
        """A gateway sends a request to a worker of this model."""
        ...

    def on_messages(self, worker: SimWorker, gateway: int, messages: Sequence[WorkerMessage]) -> None:
        """A worker says something of requests to the gateway with this number."""
        ...

    def happened(self, num_events: int) -> None:
        """An event is over; so many were until now."""
        ...


Report = tuple[str, SimWorker, WorkerLoadReport | None, bool]
"""Model, worker, what it said last, and whether it is ready."""


class SpeedWatch:
    """One for a gateway."""

    def __init__(self, anomalies: Anomalies) -> None:
        self._anomalies = anomalies
        self._reports: dict[WorkerId, Report] = {}
        self.standings: list[tuple[int, StandingChange]] = []
        """The standings of workers that were slow, and when."""

    def weight(self, now_ns: int, report: Report, again: Callable[[Report], None]) -> float:
        """The part of a worker that is used. One without work reports nothing, so what changes for others is
        carried out at any report: by what they said last, `again`.
        """
        route, worker, load, ready = self._reports[report[1].id] = report
        self._anomalies.worker(now_ns, route, worker.id, ready=ready, kind=worker.spec.kind)
        if load is not None:
            self._anomalies.stepped(worker.id, load.timed)
        for change in self._anomalies.tick(now_ns):
            self.standings.append((now_ns, change))
            if change.worker != worker.id and (last := self._reports.get(change.worker)) is not None:
                again(last)
        return self._anomalies.weight(worker.id)

    def gone(self, worker_id: WorkerId) -> None:
        """It is no more."""
        self._anomalies.gone(worker_id)
        self._reports.pop(worker_id, None)

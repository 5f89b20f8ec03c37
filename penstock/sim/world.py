"""The whole simulated product: gateways, pools of workers, clients that come at their times, on one timeline.

    requests ──> front door ──> SimGateway ──┐                 all of it is driven by one heap of events (events.py)
                                  (FlowControl)│ link
                                SimWorker <──┘
                                  (Scheduler, KVManager)

How many workers a pool has follows a schedule; whoever scales by load instead calls `scale`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.clock import NS_PER_MS
from penstock.config.tree import Config
from penstock.policy.record import UsageRecord
from penstock.policy.tenant import Tenant
from penstock.sim.events import Rank, Timeline
from penstock.sim.gateway import Facts, SimGateway
from penstock.sim.messages import Report, Submission, Told
from penstock.sim.request import RequestRecord, SimRequest
from penstock.sim.result import SimResult, Tally
from penstock.sim.streams import Streams
from penstock.sim.worker import SimWorker, WorkerSpec
from penstock.types import RequestId, WorkerId

_WORLD = 0
"""The world's own number as an actor; gateways and workers follow."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolSpec:
    """The workers of one model in one region."""

    model: str = "model"
    worker: WorkerSpec = field(default_factory=WorkerSpec)
    count: int = 4
    """Ready from the start."""
    schedule: tuple[tuple[int, int], ...] = ()
    """(time, count): how many there shall be from then on. New ones take their cold start, the newest leave first."""
    region: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class WorldSpec:
    """All that a run depends on, beside its requests."""

    seed: int = 0
    config: Config = field(default_factory=Config)
    """Queues, admission, limits, prices, as in the file that `penstock serve` reads."""
    pools: tuple[PoolSpec, ...] = (PoolSpec(),)
    gateways: int = 1
    """In every region."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict[str, Tenant])
    """By name; a request of any other tenant is one's with the defaults."""
    link_ns: int = NS_PER_MS // 2
    """One way between a gateway and a worker, and between a client and a gateway."""
    report_ns: int = 500 * NS_PER_MS
    """Time between two reports of a worker."""
    until_ns: int = 0
    """When the run is cut off; 0: when everything has ended."""


@dataclass(slots=True, eq=False)
class Member:
    """A worker as the fleet knows it."""

    worker: SimWorker
    pool: PoolSpec
    since_ns: int
    ready: bool = False
    draining: bool = False


class World:
    """One run: `run` it, once."""

    def __init__(
        self,
        spec: WorldSpec,
        requests: Iterable[SimRequest],
        *,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """`requests` in the order of their times; may be made while they are read. With `on_record` records are handed over
        as they come, and not kept.
        """
        self.spec, self.timeline, self.streams = spec, Timeline(), Streams(spec.seed)
        self.tally = Tally()
        self._records: list[RequestRecord] = []
        self._on_record = on_record or self._records.append
        self._requests: Iterator[SimRequest] = iter(requests)
        self._next: SimRequest | None = None
        models = {pool.model: pool.worker for pool in spec.pools}
        self.facts = Facts(spec.config, models, spec.tenants, spec.link_ns)
        self.regions = tuple(dict.fromkeys(pool.region for pool in spec.pools))
        self.gateways: list[SimGateway] = []
        self._fronts: dict[str, list[SimGateway]] = {region: [] for region in self.regions}
        for region in self.regions:
            for _ in range(spec.gateways):
                number = len(self.gateways)
                gateway = SimGateway(number, 1 + number, self.facts, self.timeline, self, self)
                self.gateways.append(gateway)
                self._fronts[region].append(gateway)
        self.members: dict[WorkerId, Member] = {}
        self._num_workers = 0
        self.use_by_kind: dict[str, tuple[int, int]] = {}
        """Nanoseconds that workers of each kind were there, and were in steps; of those that are left, until now."""
        config = spec.config
        self.slice_tokens = min(config.rate_limits.slice_tokens, config.budgets.slice_tokens)
        self.report_ns = spec.report_ns
        for pool in spec.pools:
            for _ in range(pool.count):
                self._ready(0, self._add(0, pool))
            for when_ns, count in pool.schedule:
                self.timeline.at(when_ns, _WORLD, Rank.FAULT, self._on_scale, (pool, count))

    def run(self) -> SimResult:
        """Let everything happen."""
        self._take_next()
        timeline, until_ns = self.timeline, self.spec.until_ns
        while (next_ns := timeline.next_ns) is not None and (not until_ns or next_ns <= until_ns):
            timeline.step()
        return self.result()

    def result(self) -> SimResult:
        """What it came to, until now."""
        now_ns, counters = self.timeline.now_ns(), self.tally.counters
        for member in self.members.values():
            if not member.worker.is_gone:
                self._count(now_ns, member)
                member.since_ns = now_ns
        return SimResult(
            seed=self.spec.seed,
            digest=self.tally.digest(),
            counters=counters,
            records=self._records,
            virtual_ns=now_ns,
            num_events=self.timeline.num_events,
        )

    # --- the fleet ----------------------------------------------------------------------------------

    def scale(self, now_ns: int, pool: PoolSpec, count: int) -> None:
        """Let the pool have so many workers: new ones after their cold start, the newest drain."""
        members = [each for each in self.members.values() if each.pool is pool and not each.draining]
        for _ in range(count - len(members)):
            member = self._add(now_ns, pool)
            self.timeline.at(now_ns + pool.worker.cold_start_ns, _WORLD, Rank.FAULT, self._on_ready, member)
        for member in members[max(count, 0) :]:
            self.drain(now_ns, member)

    def drain(self, now_ns: int, member: Member) -> None:
        """Give it nothing new; it leaves when what runs there has ended."""
        member.draining = True
        self._tell_state(now_ns, member, member.worker.report(now_ns))
        # By then whatever was sent there before the gateways knew has come.
        self.timeline.at(now_ns + 3 * self.spec.link_ns, _WORLD, Rank.TIMER, self._leave_if_empty, member)

    # --- Network ------------------------------------------------------------------------------------

    def submit(self, now_ns: int, worker_id: WorkerId, submission: Submission) -> None:
        """See `Network`."""
        if (member := self.members.get(worker_id)) is not None:
            when_ns = now_ns + self.spec.link_ns
            self.timeline.at(
                when_ns, member.worker.actor, Rank.MESSAGE, self._on_message, (member, submission)
            )

    def abort(self, now_ns: int, worker_id: WorkerId, request_id: RequestId) -> None:
        """See `Network`."""
        if (member := self.members.get(worker_id)) is not None:
            when_ns = now_ns + self.spec.link_ns
            self.timeline.at(
                when_ns, member.worker.actor, Rank.MESSAGE, self._on_message, (member, request_id)
            )

    # --- Listener -----------------------------------------------------------------------------------

    def told(self, now_ns: int, worker: SimWorker, gateway: int, told: Sequence[Told]) -> None:
        """See `Listener`."""
        to, when_ns = self.gateways[gateway], now_ns + self.spec.link_ns
        self.timeline.at(when_ns, to.actor, Rank.MESSAGE, self._on_told, (to, worker.id, told))
        member = self.members[worker.id]
        if member.draining:
            self._leave_if_empty(now_ns, member)

    def reported(self, now_ns: int, worker: SimWorker, report: Report) -> None:
        """See `Listener`."""
        self._tell_state(now_ns, self.members[worker.id], report)

    # --- Witness ------------------------------------------------------------------------------------

    def ended(self, record: RequestRecord) -> None:
        """See `Witness`."""
        self.tally.ended(record)
        self._on_record(record)

    def billed(self, record: UsageRecord) -> None:
        """See `Witness`."""
        self.tally.billed(record)

    # --- inside: clients ----------------------------------------------------------------------------

    def _take_next(self) -> None:
        """Only the next request is in the heap: a workload of a million need not be in memory."""
        request = next(self._requests, None)
        if request is not None:
            self.timeline.at(request.at_ns, _WORLD, Rank.MESSAGE, self._on_request, request)

    def _on_request(self, now_ns: int, what: SimRequest) -> None:
        number = self.tally.counters.arrived
        self.tally.counters.arrived = number + 1
        fronts = self._fronts[what.region or self.regions[0]]
        gateway = fronts[number % len(fronts)]
        self.timeline.at(
            now_ns + self.spec.link_ns, gateway.actor, Rank.MESSAGE, self._on_arrival, (gateway, what, number)
        )
        self._take_next()

    def _on_arrival(self, now_ns: int, what: tuple[SimGateway, SimRequest, int]) -> None:
        gateway, request, number = what
        if not gateway.arrive(now_ns, request, number):
            return
        timeline, request_id = self.timeline, RequestId(request.id)
        if request.cancel_at_ns:
            when_ns = max(now_ns, request.cancel_at_ns)
            timeline.at(when_ns, gateway.actor, Rank.MESSAGE, self._on_cancel, (gateway, request_id, False))
        if request.patience_ns:
            when_ns = max(now_ns, request.at_ns + request.patience_ns)
            timeline.at(when_ns, gateway.actor, Rank.MESSAGE, self._on_cancel, (gateway, request_id, True))

    def _on_cancel(self, now_ns: int, what: tuple[SimGateway, RequestId, bool]) -> None:
        gateway, request_id, unless_begun = what
        gateway.cancel(now_ns, request_id, unless_begun=unless_begun)

    # --- inside: links ------------------------------------------------------------------------------

    def _on_message(self, now_ns: int, what: tuple[Member, Submission | RequestId]) -> None:
        member, message = what
        member.worker.take(now_ns, message)

    def _on_told(self, now_ns: int, what: tuple[SimGateway, WorkerId, Sequence[Told]]) -> None:
        gateway, worker_id, told = what
        gateway.heard(now_ns, worker_id, told)

    def _tell_state(self, now_ns: int, member: Member, report: Report) -> None:
        """Let the region's gateways know what the worker says of itself, and whether it takes requests."""
        for gateway in self._fronts[member.pool.region]:
            what = (gateway, member, report, member.ready and not member.draining)
            self.timeline.at(now_ns + self.spec.link_ns, gateway.actor, Rank.MESSAGE, self._on_state, what)

    def _on_state(self, now_ns: int, what: tuple[SimGateway, Member, Report, bool]) -> None:
        gateway, member, report, ready = what
        if not member.worker.is_gone:
            gateway.reported(now_ns, member.pool.model, member.worker.id, report, ready=ready)

    # --- inside: workers ----------------------------------------------------------------------------

    def _add(self, now_ns: int, pool: PoolSpec) -> Member:
        number = self._num_workers
        self._num_workers += 1
        worker_id = WorkerId(f"{pool.model}-{number}")
        actor = 1 + len(self.gateways) + number
        worker = SimWorker(worker_id, actor, pool.worker, self.timeline, self)
        member = self.members[worker_id] = Member(worker, pool, now_ns)
        return member

    def _ready(self, now_ns: int, member: Member) -> None:
        member.ready = True
        self._tell_state(now_ns, member, member.worker.report(now_ns))

    def _on_ready(self, now_ns: int, member: Member) -> None:
        if not member.draining and not member.worker.is_gone:
            self._ready(now_ns, member)

    def _on_scale(self, now_ns: int, what: tuple[PoolSpec, int]) -> None:
        self.scale(now_ns, *what)

    def _leave_if_empty(self, now_ns: int, member: Member) -> None:
        if member.worker.is_gone or member.worker.num_streams:
            return
        member.worker.leave()
        self._count(now_ns, member)
        for gateway in self._fronts[member.pool.region]:
            # Behind its last words.
            when_ns = now_ns + 2 * self.spec.link_ns
            self.timeline.at(when_ns, gateway.actor, Rank.MESSAGE, self._on_gone, (gateway, member))

    def _on_gone(self, now_ns: int, what: tuple[SimGateway, Member]) -> None:
        gateway, member = what
        gateway.lost(now_ns, member.worker.id)
        self.members.pop(member.worker.id, None)

    def _count(self, now_ns: int, member: Member) -> None:
        """What a worker did, into the counters: when it leaves, or at the end."""
        worker, counters = member.worker, self.tally.counters
        statistics = worker.scheduler.statistics()
        counters.steps += worker.steps
        counters.busy_ns += worker.busy_ns
        counters.ready_ns += now_ns - member.since_ns
        counters.preemptions += statistics.preemptions
        counters.generated_tokens += statistics.generated_tokens
        kind = worker.spec.kind or member.pool.model
        paid_ns, busy_ns = self.use_by_kind.get(kind, (0, 0))
        self.use_by_kind[kind] = (paid_ns + now_ns - member.since_ns, busy_ns + worker.busy_ns)

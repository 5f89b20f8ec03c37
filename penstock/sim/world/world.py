"""The whole simulated product: gateways, pools of workers, clients that come at their times, on one timeline.

    requests ──> front door ──> SimGateway ──┐                 driven by one heap of events (messages.py)
                                  (FlowControl)│ link
                                SimWorker <──┘
                                  (Scheduler, KVManager)
How many workers a pool has follows a schedule; a caller that scales by load instead calls `scale`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import structs

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.branch import extended
from penstock.gc_tuning import rare_gc
from penstock.kv.events import KVEvent
from penstock.policy.flow import SLICE_TOKENS, UsageRecord
from penstock.policy.limits.rate_limit import RateTerms
from penstock.policy.placement.adapters import ResidencyOrder
from penstock.sim.traffic.prompts import RequestRecord, SimRequest, Streams, unreachable
from penstock.sim.traffic.workload import Comebacks
from penstock.sim.world.caches import Asked
from penstock.sim.world.facts import CellLinks, Dealer, Facts, Member, Watcher
from penstock.sim.world.gateway import SimGateway
from penstock.sim.world.kv_links import KVLinks
from penstock.sim.world.messages import (
    KVEventChannel,
    Rank,
    Submission,
    Timeline,
    WorkerLoadReport,
    WorkerMessage,
)
from penstock.sim.world.run import PoolSpec, RunTally, SimResult, WorldSpec
from penstock.sim.world.store import SharedStore
from penstock.sim.world.worker import SimWorker
from penstock.types import RequestId, WorkerId

_ToWorker = Submission | RequestId | ResidencyOrder
WORLD = 0
"""The world's own number as an actor; gateways and workers follow."""
_DETECT_NS = 100 * NS_PER_MS
"""Until a gateway sees that a worker is gone: its connection ends."""
_LINGER_NS = 5 * NS_PER_S
_RESTART_NS = 1000 * NS_PER_MS
"""Until a crashed worker restarts, or a client that was cut off asks again elsewhere."""


class World:
    """One run: `run` it, once."""

    def __init__(
        self, spec: WorldSpec, requests: Iterable[SimRequest], *,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:  # fmt: skip
        """`requests` in the order of their times, lazily. With `on_record`, `records` stays empty."""
        self.spec, self.timeline, self.streams = spec, Timeline(), Streams(spec.seed)
        self.tally = RunTally()
        self.watcher: Watcher | None = None
        self._records: list[RequestRecord] = []
        self.on_record = on_record or self._records.append
        self._requests: Iterator[SimRequest] = iter(requests)
        self._next: SimRequest | None = None
        self._comebacks = Comebacks(self.ask_at)
        models = {pool.model: pool.worker for pool in spec.pools}
        facts = self.facts = Facts(spec.config, models, spec.tenants, spec.link_ns)
        facts.skews_ns = {at: int(skew_s * NS_PER_S) for at, skew_s in enumerate(spec.clock_skews_s)}
        facts.seed, facts.placement, facts.watches_speed = spec.seed, spec.placement, spec.watches_speed
        self.dealer: Dealer | None = None
        """Tries a new version of a model."""
        self.cells: CellLinks | None = None
        """Where the regions are cells that help each other."""
        self.regions = tuple(dict.fromkeys(pool.region for pool in spec.pools))
        shared = spec.config.shared
        self.store = SharedStore(shared) if shared.url else None
        self.gateways: list[SimGateway] = []
        """Those that are gone too, until they are back."""
        self.fronts: dict[str, list[int]] = {}
        """The gateways of each region, by number."""
        for region in self.regions:
            first = len(self.gateways)
            self.fronts[region] = list(range(first, first + spec.gateways))
            self.gateways += [self._gateway(number) for number in self.fronts[region]]
        self._kv = KVLinks(self.timeline, self.gateways, self.fronts, self._arrives_ns)
        self._cut: dict[int, list[SimRequest]] = {}
        self.members: dict[WorkerId, Member] = {}
        self._num_workers = 0
        self.use_by_kind: dict[str, tuple[int, int]] = {}
        """Nanoseconds that workers of each kind existed and computed, until now."""
        self.slice_tokens = min(extended(spec.config.limits, RateTerms).slice_tokens, SLICE_TOKENS)
        self.report_ns = spec.report_ns
        for pool in spec.pools:
            for _ in range(pool.count):
                self._ready(0, self._add(0, pool))
            for when_ns, count in pool.schedule:
                self.timeline.at(when_ns, WORLD, Rank.FAULT, self._on_scale, (pool, count))

    @rare_gc()
    def run(self) -> SimResult:
        """Let everything happen."""
        self._take_next()
        timeline, until_ns = self.timeline, self.spec.until_ns
        if self.watcher is None and self.store is None and not until_ns:
            timeline.run()
        while (next_ns := timeline.next_ns) is not None and (not until_ns or next_ns <= until_ns):
            if self.store is not None and not until_ns and self.is_over:
                until_ns = next_ns + _LINGER_NS  # Those who keep leases never rest.
            timeline.step()
            if self.watcher is not None:
                self.watcher.happened(timeline.num_events)
        return self.result()

    def result(self) -> SimResult:
        """The result until now."""
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
        members = [
            each
            for each in self.members.values()
            if each.pool is pool and not each.draining and not each.worker.is_gone
        ]
        for _ in range(count - len(members)):
            self.start(now_ns, pool, pool.worker.cold_start_ns)
        for member in members[max(count, 0) :]:
            self.drain(now_ns, member)

    def crash(self, now_ns: int, member: Member) -> None:
        """It is gone at once, with all that runs there."""
        self._gone(now_ns, member, now_ns + _DETECT_NS)

    def replace(self, now_ns: int, member: Member) -> None:
        """Start another worker like this one."""
        self.start(now_ns, member.pool, member.pool.worker.cold_start_ns)

    def reset_link(self, now_ns: int, gateway: SimGateway, member: Member) -> None:
        """The two lose their connection and the streams on it; soon they are connected again."""
        if gateway.number not in self.fronts[member.pool.region] or gateway.is_gone:
            return
        actor = member.worker.actor
        when_ns = self._arrives_ns(now_ns, member.sent_ns, member, gateway.number)
        self.timeline.at(when_ns, actor, Rank.MESSAGE, self._on_hang_up, (member, gateway.number))
        self.timeline.at(
            now_ns + self.spec.link_ns, gateway.actor, Rank.MESSAGE, self._on_gone, (gateway, member, False)
        )
        self.timeline.at(now_ns + _DETECT_NS, WORLD, Rank.TIMER, self._on_connected, (gateway, member))

    def hear_kv(self, now_ns: int, member: Member) -> None:
        """Its reports of its cache arrive again."""
        self._kv.hear(now_ns, member)

    def lose_gateway(self, now_ns: int, gateway: SimGateway) -> None:
        """It is gone at once; its clients ask again when it is back."""
        if gateway.is_gone:
            return
        number = gateway.number
        self._cut.setdefault(number, []).extend(gateway.leave(now_ns))
        for member in self.members.values():
            if number in self.fronts[member.pool.region]:
                when_ns = self._arrives_ns(now_ns, member.sent_ns, member, number)
                self.timeline.at(
                    when_ns, member.worker.actor, Rank.MESSAGE, self._on_hang_up, (member, number)
                )

    def restore_gateway(self, now_ns: int, number: int) -> None:
        """It starts again, and those that were cut off ask again, all at once."""
        if not self.gateways[number].is_gone:
            return
        gateway = self.gateways[number] = self._gateway(number, life=self.gateways[number].life + 1)
        for member in self.members.values():
            self._on_connected(now_ns, (gateway, member))
        self._ask_again(now_ns, self._cut.pop(number, []))

    def lose_region(self, now_ns: int, region: str) -> None:
        """All of its gateways and workers are gone; clients that were cut off soon ask elsewhere."""
        for number in self.fronts[region]:
            self.lose_gateway(now_ns, self.gateways[number])
            self.timeline.at(
                now_ns + _RESTART_NS, WORLD, Rank.TIMER, self._ask_again, self._cut.pop(number, [])
            )
        for member in list(self.members.values()):
            if member.pool.region == region:
                self.crash(now_ns, member)
        if self.cells is not None:
            self.cells.lost(now_ns, region)

    def restore_region(self, now_ns: int, region: str) -> None:
        """Its gateways are back, and its workers start."""
        for number in self.fronts[region]:
            self.restore_gateway(now_ns, number)
        for pool in self.spec.pools:
            if pool.region == region:
                self.scale(now_ns, pool, pool.count)

    def drain(self, now_ns: int, member: Member) -> None:
        """Give it nothing new; it leaves when what runs there has ended."""
        member.draining = True
        self._tell_state(now_ns, member, member.worker.report(now_ns))
        # By then whatever was sent there before the gateways knew has come.
        self.timeline.at(now_ns + 3 * self.spec.link_ns, WORLD, Rank.TIMER, self._leave_if_empty, member)

    # --- Network ------------------------------------------------------------------------------------

    def submit(self, now_ns: int, worker_id: WorkerId, submission: Submission) -> None:
        """See `Network`."""
        if self.cells is not None and worker_id in self.cells:
            self.cells.submit(now_ns, worker_id, submission)
            return
        if self.watcher is not None and (member := self.members.get(worker_id)) is not None:
            self.watcher.submitted(worker_id, submission, member.pool.model)
        self._send(now_ns, submission.gateway, worker_id, submission)

    def ask_kv(self, now_ns: int, gateway: int, worker_id: WorkerId, asked: Asked) -> None:
        """See `Network`."""
        if (member := self.members.get(worker_id)) is not None:
            self._kv.ask(now_ns, gateway, member, asked)

    def abort(self, now_ns: int, gateway: int, worker_id: WorkerId, request_id: RequestId) -> None:
        """See `Network`."""
        if self.cells is not None and worker_id in self.cells:
            self.cells.abort(now_ns, gateway, worker_id, request_id)
            return
        self._send(now_ns, gateway, worker_id, request_id)

    def order(self, gateway: int, order: ResidencyOrder) -> None:
        """See `Network`."""
        self._send(self.timeline.now_ns(), gateway, order.worker, order)

    def on_messages(
        self, now_ns: int, worker: SimWorker, gateway: int, messages: Sequence[WorkerMessage]
    ) -> None:
        """See `Listener`."""
        if self.watcher is not None:
            self.watcher.on_messages(worker, gateway, messages)
        member = self.members[worker.id]
        to, when_ns = self.gateways[gateway], self._arrives_ns(now_ns, member.retry_after_ns, member, gateway)
        self.timeline.at(when_ns, to.actor, Rank.MESSAGE, self._on_messages, (to, worker.id, messages))

    def reported(self, now_ns: int, worker: SimWorker, report: WorkerLoadReport) -> None:
        """See `Listener`."""
        member = self.members[worker.id]
        if not member.is_mute:
            self._tell_state(now_ns, member, report)

    def died(self, now_ns: int, worker: SimWorker) -> None:
        """See `Listener`."""
        member = self.members[worker.id]
        self.crash(now_ns, member)
        self.start(now_ns, member.pool, max(_RESTART_NS, member.pool.worker.cold_start_ns))

    def cached(self, now_ns: int, worker: SimWorker, events: tuple[KVEvent, ...]) -> None:
        """See `Listener`."""
        self._kv.cached(now_ns, self.members[worker.id], events)

    # --- Witness ------------------------------------------------------------------------------------

    def ended(self, record: RequestRecord) -> None:
        """See `RunRecorder`."""
        self.tally.ended(record)
        if self.watcher is not None:
            self.watcher.ended(record)
        self._comebacks.ended(record)
        self.on_record(record)

    def billed(self, record: UsageRecord) -> None:
        """See `RunRecorder`."""
        self.tally.billed(record)
        if self.watcher is not None:
            self.watcher.billed(record)

    @property
    def is_over(self) -> bool:
        """Whether all requests have come, and ended."""
        counters = self.tally.counters
        return self._next is None and counters.arrived == counters.ended

    # --- inside: clients ----------------------------------------------------------------------------

    def _take_next(self) -> None:
        """Only the next request is in the heap: a workload of a million need not be in memory."""
        request = self._next = next(self._requests, None)
        if request is not None:
            self.timeline.at(request.at_ns, WORLD, Rank.MESSAGE, self._on_request, request)

    def _on_request(self, now_ns: int, what: SimRequest) -> None:
        number = self.tally.counters.arrived
        self.tally.counters.arrived = number + 1
        self._ask(now_ns, what, number)
        self._take_next()

    def _ask(self, now_ns: int, request: SimRequest, number: int) -> None:
        """Send it to a gateway of its region, or of any other if there is none; none at all refuses it."""
        if self.dealer is not None:
            request = self.dealer.deal(request)
        self._comebacks.asked(request)
        if self.watcher is not None:
            self.watcher.asked(request)
        own = self.fronts[request.region or self.regions[0]]
        fronts = [self.gateways[each] for each in own if not self.gateways[each].is_gone]
        fronts = fronts or [gateway for gateway in self.gateways if not gateway.is_gone]
        if not fronts:
            self.ended(unreachable(request, now_ns))
            return
        gateway, when_ns = fronts[number % len(fronts)], now_ns + self.spec.link_ns
        self.timeline.at(when_ns, gateway.actor, Rank.MESSAGE, self._on_arrival, (gateway, request, number))

    def _ask_again(self, now_ns: int, requests: list[SimRequest]) -> None:
        """Clients that were cut off: each comes as a new request."""
        for request in requests:
            leaves_ns = request.cancel_at_ns and now_ns + max(0, request.cancel_at_ns - request.at_ns)
            again = structs.replace(request, id=f"{request.id}~", at_ns=now_ns, cancel_at_ns=leaves_ns)
            self.ask_at(now_ns, again)

    def ask_at(self, when_ns: int, request: SimRequest) -> None:
        """Let a client send a request then, beside those of the workload: a retry, or a follow-up."""
        number = self.tally.counters.arrived
        self.tally.counters.arrived = number + 1
        self.timeline.at(when_ns, WORLD, Rank.MESSAGE, self._on_again, (request, number))

    def _on_again(self, now_ns: int, what: tuple[SimRequest, int]) -> None:
        self._ask(now_ns, *what)

    def _on_arrival(self, now_ns: int, what: tuple[SimGateway, SimRequest, int]) -> None:
        gateway, request, number = what
        if gateway.is_gone:
            self.ended(unreachable(request, now_ns))
            return
        if not gateway.arrive(now_ns, request, number):
            return
        if self.dealer is not None:
            self.dealer.accepted(now_ns, gateway.number, request, number)
        timeline, request_id = self.timeline, RequestId(request.id)
        if request.cancel_at_ns:
            when_ns = max(now_ns, request.cancel_at_ns)
            timeline.at(when_ns, gateway.actor, Rank.MESSAGE, self._on_cancel, (gateway, request_id, False))
        if request.patience_ns:
            when_ns = max(now_ns, request.at_ns + request.patience_ns)
            timeline.at(when_ns, gateway.actor, Rank.MESSAGE, self._on_cancel, (gateway, request_id, True))

    def _on_cancel(self, now_ns: int, what: tuple[SimGateway, RequestId, bool]) -> None:
        gateway, request_id, unless_begun = what
        if not gateway.is_gone:
            gateway.cancel(now_ns, request_id, unless_begun=unless_begun)

    # --- inside: links ------------------------------------------------------------------------------

    def _arrives_ns(self, now_ns: int, last_ns: dict[int, int], member: Member, gateway: int) -> int:
        """When a message between these two arrives, behind those before it."""
        when_ns = max(now_ns + self.spec.link_ns + member.late_ns, last_ns.get(gateway, 0))
        last_ns[gateway] = when_ns
        return when_ns

    def _send(self, now_ns: int, gateway: int, worker_id: WorkerId, message: _ToWorker) -> None:
        if (member := self.members.get(worker_id)) is not None:
            when_ns = self._arrives_ns(now_ns, member.sent_ns, member, gateway)
            self.timeline.at(when_ns, member.worker.actor, Rank.MESSAGE, self._on_message, (member, message))

    def _on_hang_up(self, now_ns: int, what: tuple[Member, int]) -> None:
        """A gateway hangs up: what it had there ends."""
        member, gateway = what
        for request_id in member.worker.ids_of(gateway):
            member.worker.take(now_ns, request_id)

    def _on_connected(self, now_ns: int, what: tuple[SimGateway, Member]) -> None:
        gateway, member = what
        if gateway.number in self.fronts[member.pool.region] and not member.worker.is_gone:
            ready = member.ready and not member.draining
            state = (gateway, member, member.worker.report(now_ns), ready)
            self.timeline.at(now_ns + self.spec.link_ns, gateway.actor, Rank.MESSAGE, self._on_state, state)
            if (update := member.kv.anew()) is not None and member.worker.tells_kv:
                self._kv.tell(now_ns, gateway, member, update)

    def _on_message(self, now_ns: int, what: tuple[Member, _ToWorker]) -> None:
        member, message = what
        member.worker.take(now_ns, message)

    def _on_messages(self, now_ns: int, what: tuple[SimGateway, WorkerId, Sequence[WorkerMessage]]) -> None:
        gateway, worker_id, messages = what
        if not gateway.is_gone:
            gateway.received(now_ns, worker_id, messages)

    def _tell_state(self, now_ns: int, member: Member, report: WorkerLoadReport) -> None:
        """Let the region's gateways know what the worker says of itself, and whether it takes requests."""
        for number in self.fronts[member.pool.region]:
            gateway = self.gateways[number]
            what = (gateway, member, report, member.ready and not member.draining)
            self.timeline.at(now_ns + self.spec.link_ns, gateway.actor, Rank.MESSAGE, self._on_state, what)

    def _on_state(self, now_ns: int, what: tuple[SimGateway, Member, WorkerLoadReport, bool]) -> None:
        gateway, member, report, ready = what
        if not member.worker.is_gone and not gateway.is_gone:
            gateway.reported(now_ns, member.pool.model, member.worker, report, ready=ready)

    # --- inside: workers ----------------------------------------------------------------------------

    def _add(self, now_ns: int, pool: PoolSpec) -> Member:
        number = self._num_workers
        self._num_workers += 1
        worker_id = WorkerId(f"{pool.model}-{number}")
        actor = 1 + len(self.gateways) + number
        spec, key, timeline = self.spec.worker_of(pool), self.facts.hash_key, self.timeline
        worker = SimWorker(worker_id, actor, spec, timeline, self, hash_key=key, tells_kv=self.spec.tells_kv)
        kv = KVEventChannel(worker.scheduler.kv.pool, kept=self.spec.kv_kept)
        return self.members.setdefault(worker_id, Member(worker, pool, now_ns, kv))

    def _ready(self, now_ns: int, member: Member) -> None:
        member.ready = True
        self._tell_state(now_ns, member, member.worker.report(now_ns))

    def _on_ready(self, now_ns: int, member: Member) -> None:
        if not member.draining and not member.worker.is_gone:
            self._ready(now_ns, member)

    def _on_scale(self, now_ns: int, what: tuple[PoolSpec, int]) -> None:
        self.scale(now_ns, *what)

    def _leave_if_empty(self, now_ns: int, member: Member) -> None:
        """A drained worker leaves once no gateway has anything there, which is checked every so often."""
        if member.worker.is_gone:
            return
        fronts = (self.gateways[number] for number in self.fronts[member.pool.region])
        if any(front.has_streams(member.pool.model, member.worker.id) for front in fronts):
            self.timeline.at(now_ns + _DETECT_NS, WORLD, Rank.TIMER, self._leave_if_empty, member)
            return
        member.left = True
        self._gone(now_ns, member, now_ns + self.spec.link_ns)

    def _gone(self, now_ns: int, member: Member, seen_ns: int) -> None:
        if member.worker.is_gone:
            return
        member.worker.leave(now_ns)
        self._count(now_ns, member)
        for number in self.fronts[member.pool.region]:
            gateway = self.gateways[number]
            self.timeline.at(seen_ns, gateway.actor, Rank.MESSAGE, self._on_gone, (gateway, member, True))
        self.timeline.at(seen_ns, WORLD, Rank.TIMER, self._on_forgotten, member)

    def _on_gone(self, now_ns: int, what: tuple[SimGateway, Member, bool]) -> None:
        gateway, member, died = what
        if not gateway.is_gone:
            num_lost = gateway.lost(now_ns, member.worker.id, died=died)
            assert not num_lost or not member.left, f"the drain of {member.worker.id} cut {num_lost} streams"

    def _on_forgotten(self, now_ns: int, member: Member) -> None:
        del now_ns, self.members[member.worker.id]

    def start(self, now_ns: int, pool: PoolSpec, cold_ns: int) -> None:
        """Another worker, ready after its cold start."""
        member = self._add(now_ns, pool)
        self.timeline.at(now_ns + cold_ns, WORLD, Rank.FAULT, self._on_ready, member)

    def _gateway(self, number: int, *, life: int = 0) -> SimGateway:
        gateway = SimGateway(
            number, 1 + number, self.facts, self.timeline, self, self, store=self.store, life=life
        )
        gateway.dealer = self.dealer
        if self.cells is not None:
            self.cells.join(gateway)
        return gateway

    def _count(self, now_ns: int, member: Member) -> None:
        """A worker's work, into the counters: when it leaves, or at the end."""
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

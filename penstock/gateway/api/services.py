"""The services that all endpoints share; and the last requests that have ended, for people who look:
`/admin/requests` and the console's feed.

Those are kept in memory by the process that answered them, and bounded; the ledger has the lasting record. Of
several processes their parent has the last ones of all. Nothing of a prompt or an answer is there.
"""

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from penstock.clock import NS_PER_MS, Clock
from penstock.config.tree import Config
from penstock.errors import Draining, Overloaded
from penstock.gateway.dispatch.dispatcher import Dispatcher
from penstock.gateway.dispatch.trials import Trials
from penstock.gateway.dispatch.worker_feed import ColdStarts, WakeCalls
from penstock.gateway.http.exchange import Ending, Exchange, Served
from penstock.gateway.models.prepare import TokenizePool
from penstock.gateway.models.served import ModelTable
from penstock.gateway.shared.peers import GatewayPeers
from penstock.kv.index.locality import KVLocality
from penstock.policy.admission.admit import AdmissionControl
from penstock.policy.flow import RequestFacts
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.placement.pick import ComplexityChoice, DecisionLog
from penstock.policy.request import Request
from penstock.policy.tenant import Tenant
from penstock.protocol.peers import LookAt
from penstock.rng import IdSource
from penstock.telemetry.audit import Notes
from penstock.telemetry.catalog import OutcomeLabel
from penstock.telemetry.counts import RequestMeasurement
from penstock.telemetry.decision_files import DecisionKeeper
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import RequestId, Usage

KEPT_MAX = 2000
"""Requests; about a kilobyte each."""
LISTED_MAX = 500
"""Of them, in one answer."""
NAME_CHARS_MAX = 128
"""Of a model that was asked for, which may be any text."""
_HUNDREDTH_NS = NS_PER_MS // 100
REPORTED_MAX = 100
"""Requests that a process tells the parent at once, every second: of more the newest."""


class EndedRequest(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One request. Times are milliseconds, since it came where they are moments; -1: never."""

    number: int
    """Counts this process's requests."""
    id: str
    """`x-request-id`."""
    request_id: str = ""
    """The answer's, by which decisions are found; empty: it was refused before it had one."""
    came_ms: int
    """Wall clock."""
    came_ns: int
    """The monotonic clock, which decisions use."""
    endpoint: str
    tenant: str = ""
    key_prefix: str = ""
    tier: str = ""
    band: str = ""
    model: str
    requested: str = ""
    """The model that was asked for, if another one answered."""
    worker: str = ""
    status: int
    outcome: str
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    limits_ms: float = -1.0
    """When its prompt was made, and limits were asked."""
    admitted_ms: float = -1.0
    queue_ms: float = -1.0
    """How long it waited here and at its worker."""
    dispatched_ms: float = -1.0
    """When its last attempt began."""
    worker_queue_ms: float = -1.0
    """How long it waited at its worker, of a request that is one stream."""
    prefill_chunks: int = 0
    """Steps of its worker in which its prompt was computed; 0: the worker does not tell."""
    computed_tokens: int = 0
    """Of its prompt, what was computed there."""
    ttft_ms: float = -1.0
    tpot_ms: float = -1.0
    total_ms: float
    attempts: int = 0
    migrations: int = 0
    cost_micros: int = 0


class RecentRequests:
    """The ring of one gateway process, or of all: the parent of several merges what they tell."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: deque[_Ended | EndedRequest] = deque(maxlen=KEPT_MAX)
        self.num_ended = 0
        """The number of the last one."""
        self._reported = 0

    def add(self, exchange: Exchange, served: Served, measured: RequestMeasurement) -> None:
        """A request is over."""
        request, came_ns = exchange.request, exchange.started_ns
        self.num_ended += 1
        if len(served.requested) > NAME_CHARS_MAX or len(served.model) > NAME_CHARS_MAX:
            names = {"requested": served.requested[:NAME_CHARS_MAX], "model": served.model[:NAME_CHARS_MAX]}
            served = msgspec.structs.replace(served, **names)
        self._kept.append(
            _Ended(
                self.num_ended, exchange.id, "" if request is None else request.facts.id, came_ns,
                self._clock.wall_ns() - (self._clock.now_ns() - came_ns), exchange.status,
                exchange.ending is Ending.DISCONNECTED, exchange.limits_ns, exchange.first_usage, served,
                measured, None if request is None else _flow(request),
            )
        )  # fmt: skip

    def take_unreported(self) -> bytes:
        """The last ones not taken before, at most `REPORTED_MAX`, for `merge` in another process."""
        reported, self._reported = self._reported, self.num_ended
        return _encode(self.since(reported, REPORTED_MAX))

    def merge(self, body: bytes) -> None:
        """Requests that ended in another process; it is numbered here."""
        for each in reversed(_requests.decode(body)):
            self.num_ended += 1
            each.number = self.num_ended
            self._kept.append(each)

    def encoded(self, number: int) -> bytes:
        """Those that ended after that one, for `follow` in another process."""
        return _encode(self.since(number, LISTED_MAX))

    def follow(self, body: bytes) -> None:
        """The counterpart of `encoded`, with the numbers from there."""
        for each in reversed(_requests.decode(body)):
            if each.number > self.num_ended:
                self.num_ended = each.number
                self._kept.append(each)

    def latest(self, num_max: int = LISTED_MAX, tenant: str | None = None) -> list[EndedRequest]:
        """The last ones, newest first; of one tenant, if that is given."""
        return self.since(0, num_max, tenant)

    def since(self, number: int, num_max: int, tenant: str | None = None) -> list[EndedRequest]:
        """Those that ended after that one, newest first, and at most so many."""
        found = list[EndedRequest]()
        for each in reversed(self._kept):
            if each.number <= number or len(found) >= num_max:
                break
            whole = each.whole() if isinstance(each, _Ended) else each
            if tenant is None or whole.tenant == tenant:
                found.append(whole)
        return found

    def find(self, name: str) -> EndedRequest | None:
        """By `x-request-id`, or by the id of its answer."""
        kept = reversed(self._kept)
        found = next((each for each in kept if name in (each.id, each.request_id)), None)
        return found.whole() if isinstance(found, _Ended) else found


_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(list[EndedRequest])


class AllRequests:
    """The last requests of all gateway processes, as far as they were looked at."""

    def __init__(self, own: RecentRequests, clock: Clock, peers: GatewayPeers | None) -> None:
        self._own, self._peers = own, peers
        self._all = own if peers is None else RecentRequests(clock)

    async def look(self) -> RecentRequests:
        """As of now; the parent has those of other processes as of a second ago. Those that are known if it
        does not answer.
        """
        if self._peers is not None:
            with contextlib.suppress(Overloaded):
                self._all.follow(await self._peers.look(LookAt("requests", before=self._all.num_ended)))
        return self._all

    async def find(self, name: str) -> EndedRequest | None:
        """By `x-request-id`, or by the id of its answer. Of many a second the parent has the newest only."""
        return self._own.find(name) or (await self.look()).find(name)


_Flow = tuple[str, str, str, int, int, int, int, int]


def _flow(request: Request) -> _Flow:
    """Flow control's facts of it, without the request, which has its prompt."""
    return (
        request.facts.key_prefix, request.worker, request.error, request.attempts, request.migrations,
        request.arrived_ns, request.dispatched_ns, request.cost_micros,
    )  # fmt: skip


class _Ended(msgspec.Struct, frozen=True, gc=False):
    """A request that is over, as it is remembered: its description is made when it is asked for, which is
    rare beside requests.
    """

    number: int
    id: str
    request_id: str
    came_ns: int
    came_wall_ns: int
    status: int
    has_left: bool
    """Its client has."""
    limits_ns: int | None
    first_usage: Usage | None
    served: Served
    measured: RequestMeasurement
    flow: _Flow | None

    def whole(self) -> EndedRequest:
        served, measured = self.served, self.measured
        found = EndedRequest(
            number=self.number,
            id=self.id,
            request_id=self.request_id,
            came_ms=self.came_wall_ns // NS_PER_MS,
            came_ns=self.came_ns,
            endpoint=served.endpoint,
            tenant=served.tenant.id,
            tier=served.tenant.tier,
            band=served.tenant.band,
            model=served.model,
            requested=served.requested if served.requested != served.model else "",
            status=self.status or 499,
            outcome=OutcomeLabel.ABORT if self.has_left else measured.outcome,
            prompt_tokens=measured.prompt_tokens,
            cached_tokens=measured.cached_tokens,
            generated_tokens=measured.generated_tokens,
            queue_ms=_ms(measured.queue_ns),
            ttft_ms=_ms(measured.ttft_ns),
            tpot_ms=_ms(measured.tpot_ns),
            total_ms=_ms(measured.duration_ns),
        )
        if self.limits_ns is not None:
            found.limits_ms = _ms(self.limits_ns - self.came_ns)
        if (first := self.first_usage) is not None and first.steps:
            found.worker_queue_ms = _ms(first.queue_ns)
            found.prefill_chunks, found.computed_tokens = first.steps, first.computed_tokens
        if self.flow is not None:
            (found.key_prefix, found.worker, found.error, found.attempts, found.migrations,
             arrived_ns, dispatched_ns, found.cost_micros) = self.flow  # fmt: skip
            found.admitted_ms = _ms(arrived_ns - self.came_ns)
            if dispatched_ns >= 0:
                found.dispatched_ms = _ms(dispatched_ns - self.came_ns)
        return found


def _ms(ns: int | None) -> float:
    """In hundredths."""
    return -1.0 if ns is None else ns // _HUNDREDTH_NS / 100


@dataclass(slots=True, kw_only=True)
class Services:
    """Handed to every endpoint."""

    config: Config
    models: ModelTable
    ids: IdSource
    clock: Clock
    tokenize: TokenizePool
    dispatcher: Dispatcher
    admission: AdmissionControl
    limiter: Limiter
    ask_store: Callable[[RequestFacts], Awaitable[None]] | None
    """Asks the store of shared limits for what a request needs and is not on lease here; None: there is no
    store."""
    budgets: TenantBudgets
    metrics: Metrics
    explained: DecisionLog
    """Which worker got which of the last requests, and why; and which model, of those that named none."""
    kept: DecisionKeeper | None
    """The same of the last hour, whichever process decided."""
    recent: RecentRequests = field(init=False)
    """The last requests that ended here."""
    all_requests: AllRequests = field(init=False)
    """And in all gateway processes."""
    peers: GatewayPeers | None = None
    trials: Trials = field(init=False)
    """The part of rollouts that learns from requests."""
    wakes: WakeCalls
    """Wakes models that are asleep."""
    cold: ColdStarts
    """Where requests wait for a model's first worker."""
    locality: KVLocality
    """Where prompts are cached; makes their keys."""
    log: Log
    notes: Notes
    """For the audit trail."""
    leaving: bool = False
    """The server was told to stop: `/ready` says no."""
    draining: bool = False
    """It takes no new requests."""

    falls_back: bool = field(init=False)
    """Whether any model has another one to fall back to."""

    def __post_init__(self) -> None:
        self.falls_back = any(route.fallback for route in self.config.routing.models)
        self.recent = RecentRequests(self.clock)
        self.all_requests = AllRequests(self.recent, self.clock, self.peers)
        self.trials = Trials(
            self.models.rollouts, self.dispatcher, metrics=self.metrics, clock=self.clock, log=self.log
        )

    def check_draining(self) -> None:
        """Refuse new work once the server is going away.

        Raises:
            Draining: it is.
        """
        if self.draining:
            raise Draining("The server is shutting down.")

    def tell_choice(self, exchange_id: str, tenant: Tenant, choice: ComplexityChoice) -> None:
        """Keep how a model was chosen, and log a line of it where there are lines about requests:
        `exchange_id` is in the access line too.
        """
        self.explained.chose(RequestId(exchange_id), choice)
        if not self.log.tells_requests:
            return
        facts: dict[str, str | float] = {f"part_{name}": round(value, 3) for name, value in choice.parts}
        if choice.passed_over:
            facts["passed_over"] = ",".join(choice.passed_over)
        self.log.info(
            "model chosen",
            request_id=exchange_id,
            tenant=tenant.id,
            tier=tenant.tier,
            model=choice.model,
            complexity=round(choice.complexity, 3),
            **facts,
        )

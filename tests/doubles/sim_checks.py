"""The invariants of every simulation, whatever fails in it: looked at while it runs, and when it is over.

| check | when |
|---|---|
| a request ends exactly once; it has one ledger record if accepted, else none | every end |
| counts: output, prompt and cached tokens are those of the model and the worker | every end |
| queue bounds; requests and holds agree | every event of a gateway, O(1) |
| cache hits are text of the same tenant and adapter (`Isolation`) | every message of a worker |
| a higher band goes first, but for floors, starvation and age (sim_order_checks.py) | every start |
| no request waits that a worker has room for; caps (sim_order_checks.py) | every `_LOOK_EVERY` events |
| what an engine runs and has waiting (`over_engine_cap`) | every `every` events |
| KV blocks: one state each, references add up, one namespace; answers | every `every` events |
| queue, rooms, scheduler and rows agree | every `every` events |
| a drain cuts no stream | when a worker has left (world.py) |
| nothing is left: no request, no stream, no held token, no used block | at the end |
| tokens: what was billed was generated | at the end |
| first tokens come as soon as before the faults, and every live worker is used again | after the end |

The invariants of a simulated engine beside its own: who is started before whom, and how many run and wait.

Data that no tenant may get: a prefix, an adapter's cache or a stream that is another's.

Kept from outside of the engines.

The books are the checks' own: which requests were sent to which worker, by whom, and what their prompts and
answers are made of. Of the blocks that a worker reports as found in its cache, each must be the same text
under the same adapter that the same tenant sent there before, or that was sent there as no tenant's. So
nothing here trusts the engine's names of blocks, or knows them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sim_order_checks import ObservedStart, OrderChecks

from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.policy.flow import Outcome, State, UsageRecord
from penstock.policy.terms import queue_terms
from penstock.schedule.request import Request, Status
from penstock.sim.traffic.prompts import RequestRecord, Segment, SimRequest
from penstock.sim.world.gateway import SimGateway
from penstock.sim.world.messages import Began, Finished, Submission, WorkerMessage
from penstock.sim.world.run import SimResult
from penstock.sim.world.worker import SimWorker
from penstock.sim.world.world import World
from penstock.types import BLOCK_TOKENS, RequestId, WorkerId


def over_engine_cap(worker: SimWorker) -> str:
    """More runs or waits than the engine may have; empty: no."""
    limits, now = worker.spec.engine, worker.scheduler.statistics()
    if now.running > limits.max_running:
        return f"{worker.id} runs {now.running} requests, and may run {limits.max_running}"
    # A request that was preempted waits again, on top of the bound.
    if now.waiting > limits.max_waiting + limits.max_running:
        return f"{worker.id} has {now.waiting} requests waiting, and may have {limits.max_waiting}"
    return ""


def inverted_in_engine(worker: SimWorker, messages: Sequence[WorkerMessage]) -> str:
    """A request that has begun was started before one of a better class that had come; empty: none was.

    A class goes before those below it until one of theirs has waited `priority_ageing_s` longer per class, or
    `starvation_s` in all.
    """
    config, began = worker.spec.engine, {message.id for message in messages if isinstance(message, Began)}
    if not began or config.scheduling != "fair" or 0 < config.kv_quota_fraction < 1:
        return ""
    requests = list(worker.requests())
    waiting = [request for request in requests if request.status is Status.WAITING]
    for started in (request for request in requests if request.request_id in began):
        at_ns, level = started.started_ns, started.order[0]
        for passed in waiting:
            if at_ns is None or passed.order[0] >= level or passed.arrival_ns >= at_ns:
                continue
            # The oldest of a class speaks for it: a later one may have been that until then.
            peers = (each for each in requests if each.order[0] == level and each.arrival_ns <= at_ns)
            if all(_turn_ns(config, passed) < _turn_ns(config, each) for each in peers):
                waited_ms = (at_ns - passed.arrival_ns) // 1_000_000
                return (
                    f"{started.request_id} (class {level}) is started on {worker.id} before "
                    f"{passed.request_id} (class {passed.order[0]}), which had waited {waited_ms} ms there"
                )
    return ""


def _turn_ns(config: EngineSettings, request: Request) -> int:
    """When it came, later by what its class stands behind the best."""
    bound = int(config.starvation_s * NS_PER_S) // 2
    behind_ns = int(request.order[0] * config.priority_ageing_s * NS_PER_S)
    return request.arrival_ns + min(max(behind_ns, -bound), bound)


_SEVERAL = ("", 0)
"""Sent by more than one: for any caller, another one did."""
_Sent = tuple[str, int]
"""A request's id, and which attempt."""


class Isolation:
    """Of one world."""

    __slots__ = ("_chains", "_known", "_sent")

    def __init__(self) -> None:
        self._known: dict[WorkerId, dict[int, _Sent]] = {}
        """By worker: block -> who sent it there."""
        self._sent: dict[tuple[WorkerId, RequestId], Submission] = {}
        self._chains: dict[tuple[WorkerId, RequestId], list[int]] = {}

    def submitted(self, worker_id: WorkerId, submission: Submission, request: SimRequest) -> None:
        """A gateway sends a request to a worker."""
        known = self._known.setdefault(worker_id, {})
        place, who = (worker_id, submission.id), (submission.id, submission.attempt)
        self._sent[place] = submission
        chain = self._chains[place] = list(_blocks(request))
        for block in chain:
            if known.setdefault(block, who) != who:
                known[block] = _SEVERAL

    def on_messages(self, worker_id: WorkerId, gateway: int, messages: Sequence[WorkerMessage]) -> str:
        """A worker speaks of requests to a gateway. Returns what is wrong with that; empty: nothing."""
        for message in messages:
            sent = self._sent.get((worker_id, message.id))
            if sent is None or sent.gateway != gateway:
                return f"{worker_id} tells gateway {gateway} of {message.id}, which it did not ask for"
            if message.attempt > sent.attempt:
                return (
                    f"{worker_id} tells of attempt {message.attempt} of {message.id}, the last there is "
                    f"{sent.attempt}"
                )
            if isinstance(message, Began):
                cached = message.cached_tokens
            elif isinstance(message, Finished):
                cached = message.usage.cached_tokens
            else:
                continue
            if (where := self._stranger(worker_id, message.id, message.attempt, cached)) >= 0:
                return (
                    f"{message.id} found {cached} cached tokens on {worker_id}, and those from {where} on "
                    "were sent there by nobody who may share them"
                )
        return ""

    def _stranger(self, worker_id: WorkerId, request_id: RequestId, attempt: int, cached_tokens: int) -> int:
        """Where the found blocks begin to be those of a tenant that may not share them; -1: nowhere."""
        known, chain = self._known[worker_id], self._chains[worker_id, request_id]
        for index, block in enumerate(chain[: cached_tokens // BLOCK_TOKENS]):
            if known[block] == (request_id, attempt):
                return index * BLOCK_TOKENS
        return -1


def _blocks(request: SimRequest) -> Iterator[int]:
    """A request's whole blocks, prompt and answer, each named by all that is before it and by who may share
    it.
    """
    segments = (*request.prompt, Segment(request.answer or hash(request.id), request.output_tokens))
    state, left, num_blocks = hash(request.adapter), BLOCK_TOKENS, 0
    for content, tokens in ((segment.content, segment.tokens) for segment in segments):
        start = 0
        while tokens - start >= left:
            state = hash((state, content, start, left))
            start, left = start + left, BLOCK_TOKENS
            owner = "" if num_blocks < request.public_tokens // BLOCK_TOKENS else f"of {request.tenant}"
            yield hash((state, owner))
            num_blocks += 1
        if start < tokens:
            state = hash((state, content, start, tokens - start))
            left -= tokens - start


ANSWERED_MIN = 0.85
"""Of some dozens of requests after the faults, beside the same without faults. Which of them clients give up
by themselves, and which are shed in a small world under load, is chance (seed 269: 48 of 54)."""
_BUDGET = "budget"
_OWN_LIMITS = ("limits", "budget")
"""Reasons of refusals that say nothing of how the system is."""
_LOOK_EVERY = 16
"""Events between two such looks: what waits for nothing does so until the next event of its gateway."""


class Violation(AssertionError):
    """A check does not hold."""


@dataclass(slots=True, frozen=True)
class Recovery:
    """When latency must be back to what it was."""

    calm_ns: int
    """Before this nothing failed."""
    over_ns: int
    """From here on nothing fails any more, and there was time to recover."""
    usual: Callable[[int], float]
    """The share of the requests from a time on that are answered where nothing ever fails: asked if it is low
    where something did."""
    times_max: float = 3.0
    """How many times as long the median first token may take then."""
    slack_ns: int = NS_PER_S // 2
    """And so much more, since short times differ by chance."""
    least: int = 20
    """Requests that each side must have for a verdict."""


class Checks:
    """Watches one world. Put between the world and its recorder."""

    def __init__(self, world: World, *, every: int = 256) -> None:
        """`every` so many events the checks that cost O(n) are made."""
        self._world, self._every = world, every
        self._ended: dict[str, RequestRecord] = {}
        self._billed: dict[str, UsageRecord] = {}
        self._asked: dict[str, SimRequest] = {}
        self._isolation, self._order = Isolation(), OrderChecks(world.spec.config)
        self._starts: dict[tuple[int, str], list[ObservedStart]] = {}
        """Of the event that happens now, by gateway and model."""
        world.watcher = self

    # --- Watcher ------------------------------------------------------------------------------------

    def asked(self, request: SimRequest) -> None:
        """A client asks."""
        _hold(request.id not in self._asked, f"{request.id} is asked twice")
        self._asked[request.id] = request

    def ended(self, record: RequestRecord) -> None:
        """A request has ended, or was refused."""
        _hold(record.id not in self._ended, f"{record.id} ends twice")
        _hold(record.id in self._asked, f"{record.id} was never asked")
        self._ended[record.id] = record
        is_billed = record.id in self._billed
        _hold(
            is_billed == (record.outcome is not Outcome.REJECTED),
            f"{record.id}: {record.outcome}, and the ledger disagrees",
        )
        self._check_counts(self._asked[record.id], record)

    def billed(self, record: UsageRecord) -> None:
        """One line of the ledger."""
        _hold(record.request_id not in self._billed, f"{record.request_id} is billed twice")
        self._billed[record.request_id] = record

    def submitted(self, worker_id: WorkerId, submission: Submission, model: str) -> None:
        """A gateway sends a request to a worker."""
        self._isolation.submitted(worker_id, submission, self._asked[submission.id])
        starts = self._starts.setdefault((submission.gateway, model), [])
        starts.append(ObservedStart(worker_id, submission))

    def on_messages(self, worker: SimWorker, gateway: int, messages: Sequence[WorkerMessage]) -> None:
        """A worker says something of requests to a gateway."""
        _none(self._isolation.on_messages(worker.id, gateway, messages))
        _none(inverted_in_engine(worker, messages))

    def happened(self, num_events: int) -> None:
        """An event is over."""
        config = queue_terms(self._world.spec.config.queue)
        now_ns, starts, self._starts = self._world.timeline.now_ns(), self._starts, {}
        for gateway in self._world.gateways:
            if gateway.is_gone:
                continue
            for model in self._world.facts.models:
                started = starts.get((gateway.number, model), ())
                _none(self._order.started(now_ns, gateway, model, started))
                if num_events % _LOOK_EVERY == 0:
                    _none(self._order.waits_for_nothing(now_ns, gateway, model))
                    _none(self._order.over_cap(gateway, model))
                if (model_queue := gateway.control.model_queue(model)) is not None:
                    _hold(
                        model_queue.queue.num_waiting <= config.requests_max
                        or _fresh(gateway) <= config.requests_max,
                        f"{model_queue.queue.num_waiting} wait",
                    )
                    _hold(
                        model_queue.queue.num_bytes <= config.bytes_max,
                        f"{model_queue.queue.num_bytes} bytes wait",
                    )
        if num_events % self._every == 0:
            self.check_all()

    def check_all(self) -> None:
        """Everything that can be checked at any time. O(n)."""
        for member in self._world.members.values():
            if not member.worker.is_gone:
                member.worker.check_invariants()
                _none(over_engine_cap(member.worker))
        for gateway in self._world.gateways:
            if not gateway.is_gone:
                for model in self._world.facts.models:
                    if (model_queue := gateway.control.model_queue(model)) is not None:
                        model_queue.check_invariants()

    # --- the end ------------------------------------------------------------------------------------

    def finish(self, result: SimResult, recovery: Recovery | None = None) -> None:
        """The world has come to rest."""
        self.check_all()
        missing = [name for name in self._asked if name not in self._ended]
        _hold(not missing, f"{len(missing)} requests never ended, {missing[:3]} first")
        for gateway in self._world.gateways:
            if not gateway.is_gone:
                _hold(not len(gateway.control), "a gateway has requests left")
                _hold(
                    not gateway.policies.limiter.outstanding,
                    f"{gateway.policies.limiter.outstanding} tokens are still held",
                )
        for member in self._world.members.values():
            if not member.worker.is_gone:
                used = member.worker.report(result.virtual_ns).blocks_used
                _hold(
                    not used and not member.worker.num_streams, f"{member.worker.id} has {used} blocks left"
                )
        counters = result.counters
        lines = sum(record.completion_tokens for record in self._billed.values())
        _hold(lines == counters.completion_tokens, "the ledger does not add up")
        _hold(
            lines <= counters.generated_tokens,
            f"{lines} tokens are billed, {counters.generated_tokens} were generated",
        )
        if recovery is not None:
            self._check_recovery(recovery)
            if result.virtual_ns >= recovery.over_ns:
                self._check_breakers(result.virtual_ns)

    def _check_counts(self, request: SimRequest, record: RequestRecord) -> None:
        name, limit = record.id, min(request.output_tokens, request.max_tokens or request.output_tokens)
        _hold(record.completion_tokens <= limit, f"{name}: {record.completion_tokens} tokens of {limit}")
        _hold(
            record.prompt_tokens in (0, request.prompt_tokens),
            f"{name}: {record.prompt_tokens} prompt tokens",
        )
        _hold(record.cached_tokens <= max(0, request.prompt_tokens - 1), f"{name}: too much was cached")
        if record.outcome is Outcome.REJECTED:
            return
        line = self._billed[name]
        same = (line.completion_tokens, line.prompt_tokens, line.outcome, line.tenant)
        mine = (record.completion_tokens, record.prompt_tokens, record.outcome, record.tenant)
        _hold(same == mine, f"{name}: the ledger says {same}, the client saw {mine}")
        if record.outcome is Outcome.FINISHED and line.finish_reason != _BUDGET:
            _hold(
                record.completion_tokens == limit,
                f"{name} finished with {record.completion_tokens} of {limit} tokens",
            )
            _hold(record.prompt_tokens == request.prompt_tokens, f"{name}: its prompt does not count")
        _hold(
            record.first_ns < 0 or record.at_ns <= record.first_ns <= record.end_ns, f"{name}: time runs back"
        )

    def _check_recovery(self, recovery: Recovery) -> None:
        """The median time to first token after the faults, beside that before them."""
        before = sorted(
            each.ttft_ns
            for each in self._ended.values()
            if each.first_ns >= 0 and each.at_ns < recovery.calm_ns
        )
        late = self._since(recovery.over_ns)
        after = sorted(each.ttft_ns for each in late if each.first_ns >= 0)
        if len(before) < recovery.least or len(late) < recovery.least:
            return
        answered = len(after) / len(late)
        if answered < ANSWERED_MIN:
            usual = recovery.usual(recovery.over_ns)
            why = f"only {answered:.0%} are answered after the faults, {usual:.0%} without any"
            _hold(answered >= ANSWERED_MIN * usual, why)
        was_ns, is_ns = before[len(before) // 2], after[len(after) // 2]
        bound_ns = was_ns * recovery.times_max + recovery.slack_ns
        _hold(
            is_ns <= bound_ns,
            f"first tokens take {is_ns / 1e6:.0f} ms after the faults, {was_ns / 1e6:.0f} ms before",
        )

    def answered(self, since_ns: int) -> float:
        """The share of the requests from then on that had a first token; 1 if there were none."""
        late = self._since(since_ns)
        return sum(each.first_ns >= 0 for each in late) / len(late) if late else 1.0

    def _since(self, at_ns: int) -> list[RequestRecord]:
        """Requests from then on, without those that only their tenants' own limits refused."""
        return [
            each for each in self._ended.values() if each.at_ns >= at_ns and each.reason not in _OWN_LIMITS
        ]

    def _check_breakers(self, now_ns: int) -> None:
        """A worker that failed gets another chance: breakers that are still open are due to be probed."""
        for gateway in self._world.gateways:
            for model in () if gateway.is_gone else self._world.facts.models:
                blocked = gateway.policies.health.blocked(now_ns, model)
                _hold(not blocked, f"{sorted(blocked)} are left alone long after the faults")


def _fresh(gateway: SimGateway) -> int:
    """Requests that wait for their first attempt: those that wait for another one come on top of a queue's
    bound.
    """
    return sum(each.state is State.QUEUED and not each.attempts for each in gateway.requests())


def _hold(holds: object, why: str) -> None:
    if not holds:
        raise Violation(why)


def _none(why: str) -> None:
    if why:
        raise Violation(why)

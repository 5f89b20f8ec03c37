"""Placement by where the KV lives: gathers the workers worth looking at, scores them, picks one, remembers
why.

    candidates   holders of the prompt's prefix, the session's last worker, residents and homes of the
                 adapter (adapters.py), the least loaded
    filter       ready, not blocked, context fits, it can do what is needed, adapter can be served
    score, pick  score.py, pick.py: one of two policies; ties, chance, holds
    learn        estimates.py: what requests took at their workers

One per model; fulfils `contracts.Placement`. A decision looks at a bounded number of workers, whatever the
size of the fleet. Load is what `CapacityTable` has booked since dispatch; reports only correct it.

A worker that is alone gets what fits on it: no prompt is hashed, looked up, predicted or audited, and nothing
is learned, because nothing could be chosen by it. Its own events keep the index up to date for the day when
another worker comes.

`Locality` is what a placement asks where parts of prompts are cached; where sessions and adapters were last
it remembers itself.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.branch import extended
from penstock.config.routing import PlacementConfig
from penstock.kv.index.prefix_index import NOTHING_HELD, Held
from penstock.policy.estimates import Ran, Speeds
from penstock.policy.placement.adapters import AdapterPlacement
from penstock.policy.placement.pick import Choice, Decision, DecisionLog, Draw, choose, choose_only, score_all
from penstock.policy.placement.score import ScoredRequest, WorkerFacts, score_policy
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import (
    CapacityTable,
    Hold,
    WorkerCapacity,
    can_resume_at,
    uncached_tokens,
)
from penstock.policy.terms import PlacementTerms
from penstock.types import BLOCK_TOKENS, RequestId, Usage, WorkerId


class Located(Protocol):
    """Which workers have how much of one prompt."""

    def of(self, worker: WorkerId) -> Held:
        """The cached blocks of this worker."""
        ...

    def holders(self, limit: int) -> Sequence[tuple[WorkerId, Held]]:
        """Up to `limit` workers that have something, longest prefix first."""
        ...


class Locality(Protocol):
    """The caches of all workers: `kv.locality.KVLocality`.

    `keys` is what `Arrival.keys` holds: `kv.prompt_keys.PromptKeys`.
    """

    def match(self, now_ns: int, keys: object) -> Located:
        """Look a prompt up."""
        ...

    def sent(self, now_ns: int, worker: WorkerId, keys: object) -> None:
        """The prompt was sent there, so the worker will soon have it."""
        ...

    def answered(self, now_ns: int, worker: WorkerId, keys: object, cached_tokens: int) -> None:
        """The prompt was computed there, and so many of its tokens were cached."""
        ...


class _NothingLocated:
    """No worker has anything."""

    __slots__ = ()

    def of(self, worker: WorkerId) -> Held:
        del worker
        return NOTHING_HELD

    def holders(self, limit: int) -> Sequence[tuple[WorkerId, Held]]:
        del limit
        return ()


NOTHING_LOCATED: Located = _NothingLocated()


class NoLocality:
    """Knows of no caches: placement goes by load, sessions and adapters."""

    __slots__ = ()

    def match(self, now_ns: int, keys: object) -> Located:
        """Nothing."""
        del now_ns, keys
        return NOTHING_LOCATED

    def sent(self, now_ns: int, worker: WorkerId, keys: object) -> None:
        """Not remembered."""

    def answered(self, now_ns: int, worker: WorkerId, keys: object, cached_tokens: int) -> None:
        """Not remembered."""


class LastWorkers:
    """By name (of a session, of an adapter) the worker that had it last, for a while.

    Bounded: the oldest are forgotten.
    """

    __slots__ = ("_last", "_limit", "_ttl_ns")

    def __init__(self, *, ttl_s: float, limit: int) -> None:
        self._last: OrderedDict[str, tuple[WorkerId, int]] = OrderedDict()
        self._ttl_ns, self._limit = int(ttl_s * NS_PER_S), limit

    def of(self, now_ns: int, name: str) -> WorkerId | None:
        """None: none, or too long ago."""
        found = self._last.get(name)
        return found[0] if found is not None and found[1] > now_ns else None

    def put(self, now_ns: int, name: str, worker: WorkerId) -> None:
        """This worker has it now."""
        self._last.pop(name, None)
        if len(self._last) >= self._limit:
            self._last.popitem(last=False)
        self._last[name] = (worker, now_ns + self._ttl_ns)

    def __len__(self) -> int:
        return len(self._last)


_WIDE = 64
"""Workers that are looked at, least loaded first, when no candidate may have the request."""
_ADAPTERS_MAX = 4096
_NO_WORKERS = WorkerId("")
_NOBODY_WAITS: Mapping[WorkerId, int] = MappingProxyType({})


class _Sent(msgspec.Struct, gc=False):
    """A request at its worker."""

    at_ns: int
    backlog_tokens: int
    streams: int
    waited: bool
    began_ns: int = 0
    began_streams: int = 0


class Router:
    """See the module."""

    __slots__ = (
        "_adapters", "_config", "_draw", "_drawn", "_held", "_locality", "_log", "_route", "_sent",
        "_sessions", "adapters", "policy", "speeds",
    )  # fmt: skip

    def __init__(
        self,
        route: str,
        config: PlacementConfig,
        draw: Draw,
        *,
        locality: Locality | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        """`draw` gives the chance; the same draws give the same decisions."""
        config = self._config = extended(config, PlacementTerms)
        self._route, self._draw = route, draw
        self.policy = score_policy(config)
        self._locality = NoLocality() if locality is None else locality
        self._log = DecisionLog(kept_max=0) if log is None else log
        self.speeds = Speeds(config)
        self._sessions = LastWorkers(ttl_s=config.session_ttl_s, limit=config.sessions_max)
        self._adapters = LastWorkers(ttl_s=config.session_ttl_s, limit=_ADAPTERS_MAX)
        self.adapters = AdapterPlacement(load_s=config.adapter_load_ms / 1000)
        """Where the model's adapters are kept; the wiring that can reach its workers sets `on_order`."""
        self._held: dict[RequestId, Hold] = {}
        self._sent: dict[RequestId, _Sent] = {}
        self._drawn: list[int] = []

    # --- parts.Placement ---------------------------------------------------------------------------

    def asked(self, now_ns: int, work: Work, workers: CapacityTable) -> None:
        """See `contracts.Placement`."""
        self.adapters.asked(now_ns, work.adapter, work.prompt_tokens + work.output_tokens, workers)

    def place(
        self,
        now_ns: int,
        work: Work,
        workers: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | Hold | None:
        """See `contracts.Placement`."""
        look = _Look(now_ns, work, workers, avoid, blocked)
        if work.aside and not self._may_fit(look):
            return None
        if self._held:
            self._held.pop(work.id, None)
        decision = self._decide(look) if (only := workers.only) is None else self._decide_only(look, only)
        picked, choice = decision.picked, decision.choice
        if choice.reason == "none":
            work.hold_for = picked.worker if picked is not None else _NO_WORKERS
            if not work.aside:
                self._log.add(decision)
            return None
        self._log.add(decision)
        assert picked is not None, "every other choice names a worker"
        if choice.hold_s > 0:
            hold = self._held[work.id] = Hold(picked.worker, now_ns + max(1, int(choice.hold_s * NS_PER_S)))
            return hold
        work.matched_tokens = picked.device_tokens + picked.host_tokens
        return workers.get(picked.worker)

    def started(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """See `contracts.Placement`."""
        if work.session:
            self._sessions.put(now_ns, work.session, worker.id)
        if work.adapter:
            self._adapters.put(now_ns, work.adapter, worker.id)
            self.adapters.started(now_ns, work.adapter, worker)
        if worker.alone:
            return
        running = worker.booked + worker.others
        rows = worker.view.max_running
        self._sent[work.id] = _Sent(
            now_ns,
            worker.pending_tokens - uncached_tokens(work),
            running - work.streams,
            waited=0 < rows < running,
        )
        if work.keys is not None:
            self._locality.sent(now_ns, worker.id, work.keys)

    def began(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """See `contracts.Placement`."""
        sent = self._sent.get(work.id)
        if sent is not None and not sent.began_ns:
            sent.began_ns, sent.began_streams = now_ns, worker.booked + worker.others

    def ended(self, now_ns: int, work: Work, worker: WorkerCapacity, usage: Usage | None) -> None:
        """See `contracts.Placement`."""
        sent = self._sent.pop(work.id, None)
        if sent is None or usage is None:
            return
        if work.keys is not None and (sent.began_ns or usage.completion_tokens):
            self._locality.answered(now_ns, worker.id, work.keys, usage.cached_tokens)
        further = usage.completion_tokens // work.streams - 1
        decode_ns = usage.decode_ns // work.streams
        if not decode_ns and sent.began_ns:
            decode_ns = now_ns - sent.began_ns
        running = worker.booked + worker.others + work.streams
        self.speeds.learn(
            worker.view.kind,
            Ran(
                at_ns=now_ns,
                computed_tokens=max(1, work.prompt_tokens - usage.cached_tokens),
                prompt_tokens=work.prompt_tokens,
                backlog_tokens=sent.backlog_tokens,
                streams=sent.streams,
                first_ns=sent.began_ns - sent.at_ns if sent.began_ns else 0,
                waited=sent.waited,
                step_ns=decode_ns // further if further > 0 else 0,
                step_streams=(sent.began_streams + running) // 2,
                service_ns=now_ns - sent.at_ns,
            ),
        )

    # --- inside ------------------------------------------------------------------------------------

    def _candidates(self, look: "_Look") -> list[WorkerFacts]:
        """The workers worth looking at, each once, in an order that does not depend on chance."""
        workers, work, config = look.workers, look.work, self._config
        found: dict[WorkerId, WorkerFacts] = {}
        for worker, held in look.located.holders(config.holders_max):
            if (capacity := workers.get(worker)) is not None:
                found[worker] = self._facts(look, capacity, held)
        names = [] if look.session is None else [look.session]
        if work.adapter:
            names += workers.residents(work.adapter, config.least_loaded)
            names += self.adapters.homes(work.adapter)
            last = self._adapters.of(look.now_ns, work.adapter)
            if last is not None:
                names.append(last)
        others = [capacity for worker in names if (capacity := workers.get(worker)) is not None]
        for capacity in (*others, *workers.least_loaded(config.least_loaded, work)):
            if capacity.id not in found:
                found[capacity.id] = self._facts(look, capacity, look.located.of(capacity.id))
        return list(found.values())

    def _facts(self, look: "_Look", capacity: WorkerCapacity, held: Held) -> WorkerFacts:
        """The facts of a worker for this request."""
        work, view, worker = look.work, capacity.view, capacity.id
        device = host = 0
        if held is not NOTHING_HELD:
            device = min(held.device * BLOCK_TOKENS, work.prompt_tokens)
            if held.host:
                host = min(held.host * BLOCK_TOKENS, work.prompt_tokens - device)
        return WorkerFacts(  # In the order of its fields: half of what a candidate costs were their names.
            worker,
            capacity.number,
            capacity.turn,
            _filter(work, capacity, look.blocked),
            not capacity.held and capacity.fits(work),
            worker in look.avoid,
            worker == look.session,
            device,
            host,
            capacity.pending_tokens,
            capacity.booked + capacity.others,
            view.max_running,
            capacity.slots or 1,
            look.waiting.get(worker, 0) if look.waiting else 0,
            view.kv_blocks_total,
            view.kv_blocks_used + capacity.pending_blocks,
            self.adapters.wait_ns(look.now_ns, capacity, work.adapter) / NS_PER_S if work.adapter else 0.0,
            self.speeds.of(view.kind),
        )

    def _decide_only(self, look: "_Look", capacity: WorkerCapacity) -> Decision:
        """There is nothing to choose: whether the worker that is alone can start it now."""
        request, worker = self._request(look), self._facts(look, capacity, NOTHING_HELD)
        return self._decision(look, request, [worker], choose_only(request, worker), looked_up=False)

    def _decide(self, look: "_Look") -> Decision:
        """One decision, with all that it is made of."""
        now_ns, work, policy, config = look.now_ns, look.work, self.policy, self._config
        if work.keys is not None:
            look.located = self._locality.match(now_ns, work.keys)
        if work.session:
            look.session = self._sessions.of(now_ns, work.session)
        request = self._request(look)
        candidates = self._candidates(look)
        scores = score_all(policy, request, candidates)
        choice = choose(policy, config, request, candidates, scores, self._drawing)
        if choice.reason == "none" and (others := self._others(look, candidates)):
            candidates += others
            scores = score_all(policy, request, candidates)
            choice = choose(policy, config, request, candidates, scores, self._drawing)
        return self._decision(look, request, candidates, choice, looked_up=True)

    def _request(self, look: "_Look") -> ScoredRequest:
        """The facts of the request; and who else waits for which worker, if anybody does."""
        work = look.work
        if self._held:
            look.waiting = self._count_held(look.now_ns)
        return ScoredRequest(
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
            streams=work.streams,
            level=max(0, work.level),
            needs_adapter=work.adapter != "",
            was_held=work.hold_ns != 0 or len(self._held) >= self._config.holds_max,
        )

    def _decision(
        self,
        look: "_Look",
        request: ScoredRequest,
        candidates: list[WorkerFacts],
        choice: Choice,
        *,
        looked_up: bool,
    ) -> Decision:
        drawn = tuple(self._drawn)
        if drawn:
            self._drawn.clear()
        return Decision(
            request_id=look.work.id,
            route=self._route,
            at_ns=look.now_ns,
            config=self._config,
            request=request,
            candidates=tuple(candidates),
            draws=drawn,
            choice=choice,
            looked_up=looked_up,
        )

    def _others(self, look: "_Look", known: list[WorkerFacts]) -> list[WorkerFacts]:
        """More workers that can start the request, where none of the candidates can: a few of the least
        loaded.
        """
        seen, found = {worker.worker for worker in known}, list[WorkerFacts]()
        # The few that can do what is needed may be the most loaded of a thousand.
        workers, work = look.workers, look.work
        for capacity in workers.least_loaded(_WIDE, work) if not work.needs else workers.all_open(work):
            if (
                capacity.id in seen
                or not capacity.fits(look.work)
                or _filter(look.work, capacity, look.blocked)
            ):
                continue
            found.append(self._facts(look, capacity, look.located.of(capacity.id)))
            if len(found) >= self._config.least_loaded:
                break
        return found

    def _may_fit(self, look: "_Look") -> bool:
        """Whether a decision is worth its time for one that was passed over: it is tried again at every start
        of others.
        """
        work, workers = look.work, look.workers
        if workers.place(work, look.avoid, look.blocked) is not None:
            return True
        wanted = workers.get(work.hold_for)
        return wanted is not None and wanted.fits(work)

    def _count_held(self, now_ns: int) -> dict[WorkerId, int]:
        """How many wait for each warm worker.

        Those whose time is over, and those that left meanwhile, are forgotten.
        """
        waiting: dict[WorkerId, int] = {}
        for name, hold in list(self._held.items()):
            if hold.until_ns > now_ns:
                waiting[hold.worker_id] = waiting.get(hold.worker_id, 0) + 1
            else:
                del self._held[name]
        return waiting

    def _drawing(self, limit: int) -> int:
        """Draw by chance, and remember what for the replay."""
        number = self._draw(limit)
        self._drawn.append(number)
        return number


class _Look(msgspec.Struct, gc=False):
    """The data of one decision."""

    now_ns: int
    work: Work
    workers: CapacityTable
    avoid: Collection[WorkerId]
    blocked: Collection[WorkerId]
    located: Located = NOTHING_LOCATED
    session: WorkerId | None = None
    waiting: Mapping[WorkerId, int] = _NOBODY_WAITS
    """Requests that are held for a worker."""


def _filter(work: Work, worker: WorkerCapacity, blocked: Collection[WorkerId]) -> str:
    """Why a worker cannot have a request, however long it waited; empty: it can."""
    view = worker.view
    if not view.ready:
        return "not_ready"
    if blocked and worker.id in blocked:
        return "blocked"
    if work.goes_on and not can_resume_at(work, view):
        return "resume"
    if 0 < view.max_model_len < work.context_tokens:
        return "context"
    if work.needs and not worker.is_able(work):
        return "capability"
    if not work.adapter:
        return ""
    served = view.adapters_served
    if served is None and not view.adapters_max:
        served = view.adapters
    return "adapter" if served is not None and work.adapter not in served else ""

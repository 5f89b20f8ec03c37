"""Placement by where the KV lives: gathers the workers worth looking at, scores them, picks one, remembers why.

    candidates   holders of the prompt's prefix, the session's last worker, residents of the adapter, the least loaded
    filter       ready, not blocked, context fits, adapter can be served
    score, pick  score.py, pick.py: one of two policies; ties, chance, holds
    learn        speed.py: what requests took at their workers

One per model; fulfils `parts.Placement`. A decision looks at a bounded number of workers, however large the fleet is.
Load is what `Rooms` has booked since dispatch; what workers report only corrects it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from penstock.clock import NS_PER_S
from penstock.config.placement import PlacementConfig
from penstock.kv.prefix_index import Held
from penstock.policy.band import Work
from penstock.policy.decision_log import DecisionLog
from penstock.policy.locality import NOTHING_LOCATED, LastWorkers, Locality, Located, NoLocality
from penstock.policy.parts import Hold
from penstock.policy.pick import Decision, Draw, choose, score_all
from penstock.policy.room import Room, Rooms, uncached_tokens
from penstock.policy.score import RequestFacts, WorkerFacts, score_policy
from penstock.policy.speed import Ran, Speeds
from penstock.types import BLOCK_TOKENS, RequestId, Usage, WorkerId

_WIDE = 64
"""Workers that are looked at, least loaded first, when no candidate may have the request."""
_ADAPTERS_MAX = 4096
_NOBODY = WorkerId("")


@dataclass(slots=True)
class _Sent:
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
        "_adapters", "_config", "_draw", "_drawn", "_held", "_locality", "_log", "_route", "_sent", "_sessions", "policy",
        "speeds",
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
        self._route, self._config, self._draw = route, config, draw
        self.policy = score_policy(config)
        self._locality = NoLocality() if locality is None else locality
        self._log = DecisionLog(kept_max=0) if log is None else log
        self.speeds = Speeds(config)
        self._sessions = LastWorkers(ttl_s=config.session_ttl_s, most=config.sessions_max)
        self._adapters = LastWorkers(ttl_s=config.session_ttl_s, most=_ADAPTERS_MAX)
        self._held: dict[RequestId, Hold] = {}
        self._sent: dict[RequestId, _Sent] = {}
        self._drawn: list[int] = []

    # --- parts.Placement ---------------------------------------------------------------------------

    def place(
        self,
        now_ns: int,
        work: Work,
        rooms: Rooms,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> Room | Hold | None:
        """See `parts.Placement`."""
        look = _Look(now_ns, work, rooms, avoid, blocked)
        if work.aside and not self._may_fit(look):
            return None
        self._held.pop(work.id, None)
        if work.keys is not None:
            look.located = self._locality.match(now_ns, work.keys)
        if work.session:
            look.session = self._sessions.of(now_ns, work.session)
        decision = self._decide(look)
        picked, choice = decision.picked, decision.choice
        if choice.reason == "none":
            work.hold_for = picked.worker if picked is not None else _NOBODY
            if not work.aside:
                self._log.add(decision)
            return None
        self._log.add(decision)
        assert picked is not None, "every other choice names a worker"
        if choice.hold_s > 0:
            hold = self._held[work.id] = Hold(picked.worker, now_ns + max(1, int(choice.hold_s * NS_PER_S)))
            return hold
        work.matched_tokens = picked.device_tokens + picked.host_tokens
        return rooms.get(picked.worker)

    def started(self, now_ns: int, work: Work, room: Room) -> None:
        """See `parts.Placement`."""
        running = room.booked + room.others
        rows = room.view.max_running
        self._sent[work.id] = _Sent(
            now_ns,
            room.pending_tokens - uncached_tokens(work),
            running - work.streams,
            waited=0 < rows < running,
        )
        if work.keys is not None:
            self._locality.sent(now_ns, room.id, work.keys)
        if work.session:
            self._sessions.put(now_ns, work.session, room.id)
        if work.adapter:
            self._adapters.put(now_ns, work.adapter, room.id)

    def began(self, now_ns: int, work: Work, room: Room) -> None:
        """See `parts.Placement`."""
        sent = self._sent.get(work.id)
        if sent is not None and not sent.began_ns:
            sent.began_ns, sent.began_streams = now_ns, room.booked + room.others

    def ended(self, now_ns: int, work: Work, room: Room, usage: Usage | None) -> None:
        """See `parts.Placement`."""
        sent = self._sent.pop(work.id, None)
        if sent is None or usage is None:
            return
        if work.keys is not None and (sent.began_ns or usage.completion_tokens):
            self._locality.answered(now_ns, room.id, work.keys, usage.cached_tokens)
        further = usage.completion_tokens // work.streams - 1
        decode_ns = usage.decode_ns // work.streams
        if not decode_ns and sent.began_ns:
            decode_ns = now_ns - sent.began_ns
        running = room.booked + room.others + work.streams
        self.speeds.learn(
            room.view.kind,
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
        rooms, work, config = look.rooms, look.work, self._config
        found: dict[WorkerId, WorkerFacts] = {}
        for worker, held in look.located.holders():
            if len(found) >= config.holders_max:
                break
            if (room := rooms.get(worker)) is not None:
                found[worker] = self._facts(look, room, held)
        names = [] if look.session is None else [look.session]
        if work.adapter:
            names += rooms.residents(work.adapter, config.least_loaded)
            last = self._adapters.of(look.now_ns, work.adapter)
            if last is not None:
                names.append(last)
        others = [room for worker in names if (room := rooms.get(worker)) is not None]
        for room in (*others, *rooms.least_loaded(config.least_loaded)):
            if room.id not in found:
                found[room.id] = self._facts(look, room, look.located.of(room.id))
        return list(found.values())

    def _facts(self, look: "_Look", room: Room, held: Held) -> WorkerFacts:
        """What is known of a worker for this request."""
        work, view = look.work, room.view
        device = min(held.device * BLOCK_TOKENS, work.prompt_tokens)
        adapters = view.adapters
        return WorkerFacts(
            worker=room.id,
            number=room.number,
            turn=room.turn,
            filtered=_filter(work, room, look.blocked),
            has_room=not room.held and room.fits(work),
            is_avoided=room.id in look.avoid,
            is_session=room.id == look.session,
            device_tokens=device,
            host_tokens=min(held.host * BLOCK_TOKENS, work.prompt_tokens - device),
            backlog_tokens=room.pending_tokens,
            running=room.booked + room.others,
            rows=view.max_running,
            slots=max(1, room.slots),
            held=self._num_held(look.now_ns, room.id) if self._held else 0,
            kv_blocks=view.kv_blocks_total,
            kv_blocks_used=view.kv_blocks_used + room.pending_blocks,
            has_adapter=not work.adapter or (adapters is not None and work.adapter in adapters),
            speed=self.speeds.of(view.kind),
        )

    def _decide(self, look: "_Look") -> Decision:
        """One decision, with all that it is made of."""
        work, policy = look.work, self.policy
        request = RequestFacts(
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
            streams=work.streams,
            level=max(0, work.level),
            needs_adapter=bool(work.adapter),
            was_held=work.hold_ns != 0 or not self._may_hold(look.now_ns),
        )
        self._drawn.clear()
        candidates = self._candidates(look)
        scores = score_all(policy, request, candidates)
        choice = choose(policy, self._config, request, candidates, scores, self._drawing)
        if choice.reason == "none" and (others := self._others(look, candidates)):
            candidates += others
            scores = score_all(policy, request, candidates)
            choice = choose(policy, self._config, request, candidates, scores, self._drawing)
        return Decision(
            request_id=work.id,
            route=self._route,
            at_ns=look.now_ns,
            config=self._config,
            request=request,
            candidates=tuple(candidates),
            scores=scores,
            draws=tuple(self._drawn),
            choice=choice,
        )

    def _others(self, look: "_Look", known: list[WorkerFacts]) -> list[WorkerFacts]:
        """More workers that can start the request, where none of the candidates can: a few of the least loaded."""
        seen, found = {worker.worker for worker in known}, list[WorkerFacts]()
        for room in look.rooms.least_loaded(_WIDE):
            if room.id in seen or not room.fits(look.work) or _filter(look.work, room, look.blocked):
                continue
            found.append(self._facts(look, room, look.located.of(room.id)))
            if len(found) >= self._config.least_loaded:
                break
        return found

    def _may_fit(self, look: "_Look") -> bool:
        """Whether a decision is worth its time for one that was passed over: it is tried again at every start of others."""
        work, rooms = look.work, look.rooms
        if rooms.place(work, look.avoid, look.blocked) is not None:
            return True
        wanted = rooms.get(work.hold_for)
        return wanted is not None and wanted.fits(work)

    def _may_hold(self, now_ns: int) -> bool:
        """Whether one more may wait for a warm worker."""
        held, most = self._held, self._config.holds_max
        if len(held) >= most:  # Those that left while they were held are still in it.
            self._held = held = {name: hold for name, hold in held.items() if hold.until_ns > now_ns}
        return len(held) < most

    def _num_held(self, now_ns: int, worker: WorkerId) -> int:
        return sum(hold.worker_id == worker and hold.until_ns > now_ns for hold in self._held.values())

    def _drawing(self, most: int) -> int:
        """Draw by chance, and remember what for the replay."""
        number = self._draw(most)
        self._drawn.append(number)
        return number


@dataclass(slots=True)
class _Look:
    """What one decision is made from."""

    now_ns: int
    work: Work
    rooms: Rooms
    avoid: Collection[WorkerId]
    blocked: Collection[WorkerId]
    located: Located = NOTHING_LOCATED
    session: WorkerId | None = None


def _filter(work: Work, room: Room, blocked: Collection[WorkerId]) -> str:
    """Why a worker cannot have a request, however long it waited; empty: it can."""
    view = room.view
    if not view.ready:
        return "not_ready"
    if room.id in blocked:
        return "blocked"
    if 0 < view.max_model_len < work.context_tokens:
        return "context"
    if (
        work.adapter
        and view.adapters is not None
        and not view.adapters_max
        and work.adapter not in view.adapters
    ):
        return "adapter"
    return ""

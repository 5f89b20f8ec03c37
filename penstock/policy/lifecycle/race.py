"""Requests that run on two workers at once until one of them says something: what `FlowControl` does about hedges.

A race begins when a request's time has come (hedge.py), it is the first attempt of one stream, nobody waits for its model and another
worker has room of its own, not borrowed from its queue. It ends when one of the attempts is dropped: then the request is
an ordinary one again, on the other worker. Both attempts are booked with the worker, the placement and the breakers like any other, the
second one under a name of its own.
"""

from collections.abc import Callable, Mapping

import msgspec

from penstock.errors import PenstockError
from penstock.policy.answers import Abort, Start
from penstock.policy.extras.hedge import HedgeOutcome, Hedges
from penstock.policy.flow import Event, State
from penstock.policy.lifecycle.deaths import Deaths
from penstock.policy.lifecycle.life import Life, Race
from penstock.policy.parts import Health
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.lane import Lane
from penstock.policy.queueing.room import uncached_tokens
from penstock.types import RequestId, Usage, WorkerId


class Races:
    """All races of one flow control."""

    __slots__ = ("_by_name", "_deaths", "_health", "_hedges", "_lives", "_on_change")

    def __init__(
        self,
        hedges: Hedges | None,
        health: Health,
        lives: Mapping[RequestId, Life],
        deaths: Deaths,
        *,
        on_change: Callable[[Lane], None],
    ) -> None:
        """Without `hedges` there are none. `lives` are all accepted requests, by reference; `on_change` hears where room became free."""
        self._hedges, self._health, self._lives = hedges, health, lives
        self._deaths, self._on_change = deaths, on_change
        self._by_name: dict[RequestId, Life] = {}
        """Requests by the name under which their second attempt is booked, while it is."""

    # --- from the driver --------------------------------------------------------------------------

    def won(self, now_ns: int, request_id: RequestId, attempt: int) -> Abort | None:
        """An attempt has its first output (tell `first_output` too), or has ended without any. If there is another, abort that."""
        life = self._lives.get(request_id)
        if life is None or life.race is None:
            return None
        is_second = attempt == life.race.attempt
        loser = life.attempt if is_second else life.race.attempt
        return self._drop(now_ns, life, loser, HedgeOutcome.WON if is_second else HedgeOutcome.LOST)

    def lost(self, now_ns: int, request_id: RequestId, attempt: int, error: PenstockError | None) -> bool:
        """An attempt failed, or was aborted (no error), and the other one goes on. False if there is none: see `failed`."""
        life = self._lives.get(request_id)
        if life is None or life.race is None or attempt not in (life.attempt, life.race.attempt):
            return False
        is_second = attempt == life.race.attempt
        self._deaths.note(now_ns, life.race.worker if is_second else life.flow.worker, life, error)
        outcome = HedgeOutcome.FAILED if is_second else HedgeOutcome.SAVED
        lost = self._drop(now_ns, life, attempt, HedgeOutcome.ENDED if error is None else outcome, error)
        if error is not None:
            life.lane.failed(lost.worker_id, life.work)
        return True

    def attempt_at(self, request_id: RequestId, worker_id: WorkerId) -> int:
        """The number of the attempt that runs at a worker; 0: none does."""
        life = self._lives.get(request_id)
        if life is None or life.flow.state is State.QUEUED:
            return 0
        if life.race is not None and life.race.worker == worker_id:
            return life.race.attempt
        return life.attempt if life.flow.worker == worker_id else 0

    def second_worker(self, request_id: RequestId) -> WorkerId | None:
        """Where the second of two attempts runs; None of a request that runs once."""
        life = self._lives.get(request_id)
        return None if life is None or life.race is None else life.race.worker

    # --- from flow control ------------------------------------------------------------------------

    def started(self, now_ns: int, life: Life) -> None:
        """A request was started."""
        if self._hedges is not None:
            tokens = uncached_tokens(life.work)
            first = self._may_hedge(life)
            self._hedges.started(now_ns, life.lane.route, life.flow.id, prompt_tokens=tokens, first=first)

    def began(self, now_ns: int, life: Life) -> None:
        """A request has its first output: what is usual is told from those that were not tried again."""
        if self._hedges is None:
            return
        flow = life.flow
        if life.raced_ns >= 0 or flow.attempts == 1:
            since_ns = life.raced_ns if life.raced_ns >= 0 else flow.dispatched_ns
            tokens = uncached_tokens(life.work)
            self._hedges.began(life.lane.route, now_ns - since_ns, prompt_tokens=tokens)

    def next_ns(self) -> int | None:
        """When `due` must be looked at next."""
        return None if self._hedges is None else self._hedges.next_ns(self._is_silent)

    def due(self, now_ns: int) -> list[Start]:
        """Start whoever has waited long enough a second time, where that is allowed."""
        found = list[Start]()
        while self._hedges is not None and (request_id := self._hedges.due(now_ns)) is not None:
            if self._is_silent(request_id):
                start = self._hedge(now_ns, self._hedges, self._lives[request_id])
                if start is not None:
                    found.append(start)
        return found

    def end(self, now_ns: int, life: Life) -> Abort:
        """The request ends before either attempt has said anything: the second one is dropped."""
        assert life.race is not None, f"{life.flow.id} runs once"
        return self._drop(now_ns, life, life.race.attempt, HedgeOutcome.ENDED)

    def release(self, now_ns: int, life: Life, usage: Usage | None = None) -> None:
        """A request holds nothing of its worker any more."""
        self._release(now_ns, life, life.flow.worker, life.booked, usage)
        life.booked = life.work

    def life_of(self, name: RequestId) -> Life:
        """Of whoever is booked under a name."""
        return self._lives.get(name) or self._by_name[name]

    # --- inside -----------------------------------------------------------------------------------

    def _may_hedge(self, life: Life) -> bool:
        flow = life.flow
        return flow.attempts == 1 and flow.arrival.choices == 1 and not life.lane.is_suspect(life.work)

    def _is_silent(self, request_id: RequestId) -> bool:
        life = self._lives.get(request_id)
        return life is not None and life.flow.state is State.STARTED and self._may_hedge(life)

    def _drop(
        self, now_ns: int, life: Life, attempt: int, outcome: HedgeOutcome, error: PenstockError | None = None
    ) -> Abort:
        """One of two attempts is over, and gives back what it holds. Without an `error` its worker is not blamed."""
        race, flow, lane = life.race, life.flow, life.lane
        assert race is not None, f"{flow.id} runs once"
        assert attempt in (life.attempt, race.attempt), f"{flow.id} has no attempt {attempt}"
        life.race = None
        worker, work = race.worker, race.work
        if attempt == life.attempt:
            worker, work = flow.worker, life.booked
            flow.worker, flow.dispatched_ns = race.worker, race.started_ns
            life.attempt, life.booked = race.attempt, race.work
        flow.on(Event.DROP, now_ns)
        self._release(now_ns, life, worker, work)
        self._health.ended(now_ns, lane.route, worker, error)
        assert self._hedges is not None, "there was a race"
        self._hedges.tell(lane.route, outcome)
        self._on_change(lane)
        return Abort(flow.id, worker, attempt)

    def _release(
        self, now_ns: int, life: Life, worker: WorkerId, work: Work, usage: Usage | None = None
    ) -> None:
        if work is not life.work:
            del self._by_name[work.id]
        life.lane.release(now_ns, worker, work, usage)

    def _hedge(self, now_ns: int, hedges: Hedges, life: Life) -> Start | None:
        flow, lane = life.flow, life.lane
        attempt = flow.attempts + 1
        work = msgspec.structs.replace(
            life.work, id=RequestId(f"{flow.id}~{attempt}"), matched_tokens=0, hold_ns=1
        )
        room = lane.place_beside(now_ns, work, flow.worker)
        if room is None:
            hedges.tell(lane.route, HedgeOutcome.NO_ROOM)
            return None
        if not hedges.take():
            hedges.tell(lane.route, HedgeOutcome.NO_BUDGET)
            return None
        lane.book(now_ns, work, room)
        life.race = Race(room.id, work, attempt, now_ns)
        life.raced_ns = flow.dispatched_ns
        self._by_name[work.id] = life
        flow.on(Event.HEDGE, now_ns)
        self._health.started(now_ns, lane.route, room.id)
        band = lane.queue.band_of(life.work)
        return Start(flow.id, lane.route, room.id, band.config.order, attempt, beside=True)

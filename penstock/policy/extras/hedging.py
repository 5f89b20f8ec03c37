"""Hedged requests on requests' lives: a request that runs on two workers at once until one of them says
something.

A second attempt begins when a request's time has come (hedge.py), it is the first attempt of one stream,
nothing waits for its model and another worker has capacity of its own, not borrowed from its queue. It ends
when one of the two attempts is dropped: then the request is an ordinary one again, on the other worker. Both
attempts are booked with the worker, the placement and the breakers like any other, the second one under a
name of its own.
"""

from collections.abc import Callable, Mapping

import msgspec

from penstock.errors import PenstockError
from penstock.policy.answers import Abort, Start
from penstock.policy.contracts import Health
from penstock.policy.extras.hedge import HedgeOutcome, Hedges
from penstock.policy.flow import State
from penstock.policy.queueing.capacity import uncached_tokens
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.requests.extra import Extra
from penstock.policy.requests.request import Hedge, Request
from penstock.types import RequestId, WorkerId


class Hedging(Extra):
    """All hedges of one flow control."""

    __slots__ = ("_health", "_hedges", "_on_change", "_on_lost", "_requests")

    def __init__(
        self,
        hedges: Hedges,
        health: Health,
        requests: Mapping[RequestId, Request],
        *,
        on_lost: Callable[[int, Request, WorkerId, PenstockError | None], None],
        on_change: Callable[[ModelQueue], None],
    ) -> None:
        """`requests` are all accepted ones, by reference; `on_lost` is called for an attempt that failed,
        `on_change` for a model whose workers have capacity again.
        """
        self._hedges, self._health, self._requests = hedges, health, requests
        self._on_lost, self._on_change = on_lost, on_change

    # --- from the driver --------------------------------------------------------------------------

    def won(self, now_ns: int, request: Request, attempt: int) -> Abort:
        """Of two attempts this one has its first output, or has ended without any: the other must be
        aborted.
        """
        assert request.hedge is not None, f"{request.id} runs once"
        is_second = attempt == request.hedge.attempt
        loser = request.attempt if is_second else request.hedge.attempt
        return self._drop(now_ns, request, loser, HedgeOutcome.WON if is_second else HedgeOutcome.LOST)

    def lost(self, now_ns: int, request: Request, attempt: int, error: PenstockError | None) -> None:
        """Of two attempts this one failed, or was aborted (no error); the other continues."""
        assert request.hedge is not None, f"{request.id} runs once"
        is_second = attempt == request.hedge.attempt
        self._on_lost(now_ns, request, request.hedge.worker if is_second else request.worker, error)
        outcome = HedgeOutcome.FAILED if is_second else HedgeOutcome.SAVED
        lost = self._drop(now_ns, request, attempt, HedgeOutcome.ENDED if error is None else outcome, error)
        if error is not None:
            request.lane.failed(lost.worker_id, request.work)

    # --- hooks ------------------------------------------------------------------------------------

    def started(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        tokens, first = uncached_tokens(request.work), self._may_hedge(request)
        self._hedges.started(now_ns, request.lane.route, request.id, prompt_tokens=tokens, first=first)

    def first_output(self, now_ns: int, request: Request) -> None:
        """See `Extra`: requests that were not tried again say what is usual."""
        if request.hedged_ns >= 0 or request.attempts == 1:
            since_ns = request.hedged_ns if request.hedged_ns >= 0 else request.dispatched_ns
            tokens = uncached_tokens(request.work)
            self._hedges.began(request.lane.route, now_ns - since_ns, prompt_tokens=tokens)

    def ending(self, now_ns: int, request: Request) -> Abort | None:
        """See `Extra`: the second attempt is dropped first."""
        if request.hedge is None:
            return None
        return self._drop(now_ns, request, request.hedge.attempt, HedgeOutcome.ENDED)

    def due(self, now_ns: int) -> list[Start]:
        """See `Extra`: start a second time what has waited long enough, where that is allowed."""
        found = list[Start]()
        while (request_id := self._hedges.due(now_ns)) is not None:
            if self._is_silent(request_id):
                start = self._start_hedge(now_ns, self._requests[request_id])
                if start is not None:
                    found.append(start)
        return found

    def next_ns(self) -> int | None:
        """See `Extra`."""
        return self._hedges.next_ns(self._is_silent)

    # --- inside -----------------------------------------------------------------------------------

    def _may_hedge(self, request: Request) -> bool:
        return (
            request.attempts == 1 and request.facts.choices == 1 and not request.lane.is_suspect(request.work)
        )

    def _is_silent(self, request_id: RequestId) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.state is State.STARTED and self._may_hedge(request)

    def _drop(
        self,
        now_ns: int,
        request: Request,
        attempt: int,
        outcome: HedgeOutcome,
        error: PenstockError | None = None,
    ) -> Abort:
        """One of two attempts is over, and gives back what it holds.

        Without an `error` its worker is not blamed.
        """
        hedge, lane = request.hedge, request.lane
        assert hedge is not None, f"{request.id} runs once"
        assert attempt in (request.attempt, hedge.attempt), f"{request.id} has no attempt {attempt}"
        request.hedge = None
        worker, work = hedge.worker, hedge.work
        if attempt == request.attempt:
            worker, work = request.worker, request.booked
            request.worker, request.dispatched_ns = hedge.worker, hedge.started_ns
            request.attempt, request.booked = hedge.attempt, hedge.work
        lane.release(now_ns, worker, work)
        self._health.ended(now_ns, lane.route, worker, error)
        self._hedges.tell(lane.route, outcome)
        self._on_change(lane)
        return Abort(request.id, worker, attempt)

    def _start_hedge(self, now_ns: int, request: Request) -> Start | None:
        lane, attempt = request.lane, request.attempts + 1
        name = RequestId(f"{request.id}{MARK}{attempt}")
        work = msgspec.structs.replace(request.work, id=name, matched_tokens=0, hold_ns=1)
        room = lane.place_hedge(now_ns, work, request.worker)
        if room is None:
            self._hedges.tell(lane.route, HedgeOutcome.NO_ROOM)
            return None
        if not self._hedges.take():
            self._hedges.tell(lane.route, HedgeOutcome.NO_BUDGET)
            return None
        lane.book(now_ns, work, room)
        request.hedge = Hedge(room.id, work, attempt, now_ns)
        request.hedged_ns, request.attempts = request.dispatched_ns, attempt
        self._health.started(now_ns, lane.route, room.id)
        band = lane.queue.band_of(request.work)
        return Start(request.id, lane.route, room.id, band.config.order, attempt, beside=True)


MARK = "~"
"""Between a request's name and the number of an attempt, in the name under which a second attempt is
booked."""

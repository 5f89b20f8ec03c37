"""Drives requests through their lives: one for the gateway's event loop and for the simulator's heap, without
any I/O.

    submit ─────> FlowControl.arrive ────> Records.opened
    dispatch ───> FlowControl.dispatch ──> Workers.start, abort, give_up; Clients.fail, fall_back
    first_output, output, attempt_failed, ended <── the request's streams on its workers
    and at its one end ─────────────────> Records.closed, Clients.settled

`FlowControl` decides. This says what follows for workers, clients and records, and what of two attempts
counts. The ports are small: the gateway implements them over streams, replies and the ledger
(gateway/dispatch/dispatcher.py), the simulator over messages (sim/world/gateway.py). A call of a port may
come back here before it returns.
"""

from typing import Protocol

from penstock.errors import EngineFault, PenstockError, StreamBroken, WorkerEjected
from penstock.policy.flow import (
    Abort,
    Diverted,
    FallBack,
    GiveUp,
    Outcome,
    Queued,
    Refused,
    RequestFacts,
    Requeued,
    Start,
    State,
)
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.machine_costs import Meters
from penstock.policy.request import Evict, Request, Settled
from penstock.types import FinishReason, RequestId, WorkerId


class Workers(Protocol):
    """Where requests run."""

    def start(self, now_ns: int, request: Request, start: Start) -> None:
        """Send a request to a worker. Reports of its streams come back with `start.attempt`."""
        ...

    def abort(self, now_ns: int, worker_id: WorkerId, request_id: RequestId, attempt: int) -> None:
        """Abort one attempt there, which counts no more; with 0 whatever runs of the request, and its final
        report is awaited.
        """
        ...

    def give_up(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """Abort its only attempt, which has given nothing: it has failed with this error. `attempt_failed`
        follows.
        """
        ...

    def move_off(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """Abort its only attempt, so that it continues on another worker, behind all tokens that it has
        given. `attempt_failed` follows with this error.
        """
        ...


class Clients(Protocol):
    """The clients that asked."""

    def stop(self, now_ns: int, request: Request, reason: FinishReason) -> None:
        """The answer ends here, as a good one. Its running attempts are aborted."""
        ...

    def fail(self, now_ns: int, request: Request, error: PenstockError) -> None:
        """The request fails with this error. Its running attempts are aborted."""
        ...

    def fall_back(self, now_ns: int, request: Request, action: FallBack) -> None:
        """Make its prompt for another model, and then call `Driver.move`.

        The request waits on until then, or if that is refused.
        """
        ...

    def settled(self, now_ns: int, request: Request, error: PenstockError | None) -> None:
        """It has ended, and its record is written.

        Called exactly once; with an error that the client does not know yet, if any.
        """
        ...


class Records(Protocol):
    """The records of requests, and their counts."""

    def opened(self, request: Request) -> None:
        """It was accepted.

        Raises:
            PenstockError: that cannot be written down, so it must not run.
        """
        ...

    def progressed(self, request: Request) -> None:
        """It has its first output, or another slice of its answer."""
        ...

    def closed(self, request: Request, machine_micros: int) -> None:
        """It has ended. `machine_micros` is its share of the machines' cost."""
        ...

    def predicted(self, request: Request, error: float) -> None:
        """How far its time to first token was from the predicted one, as a share of the longer of the two."""
        ...

    def refused(self, route: str, reason: str) -> None:
        """A request was not accepted."""
        ...

    def diverted(self, route: str, why: str) -> None:
        """A request for this model goes to another one."""
        ...

    def evicted(self, route: str, reason: str) -> None:
        """An accepted request was ended for the sake of others, or waited too long."""
        ...

    def timed_out(self, request: Request) -> None:
        """Its attempt was given up because it took too long."""
        ...

    def tried_again(self, request: Request) -> None:
        """Its worker failed; it waits for another one, to begin again or, if it has begun, to continue."""
        ...


class Driver:
    """See the module. One for each flow control."""

    __slots__ = ("_clients", "_meters", "_records", "_workers", "control")

    def __init__(
        self, control: FlowControl, workers: Workers, clients: Clients, records: Records, meters: Meters
    ) -> None:
        self.control = control
        self._workers, self._clients, self._records, self._meters = workers, clients, records, meters

    # --- from clients -----------------------------------------------------------------------------

    def submit(self, now_ns: int, facts: RequestFacts, io: object) -> Queued | Diverted | Refused:
        """Accept a request, send it on to another model, or refuse it.

        `io` is what the ports keep with it (`Request.io`).

        Raises:
            PenstockError: it cannot be written down that it was accepted; nothing is left of it.
        """
        answer = self.control.arrive(now_ns, facts)
        if isinstance(answer, Diverted):
            self._records.diverted(facts.route, answer.why)
        elif isinstance(answer, Refused):
            self._records.refused(facts.route, answer.reason)
        else:
            request = self._of(facts.id)
            request.io = io
            try:
                self._records.opened(request)
            except PenstockError as error:
                self.control.failed(now_ns, facts.id, error, retry=False)
                raise
        return answer

    def refuse_any(self, now_ns: int, facts: RequestFacts) -> PenstockError | None:
        """Refuse a request before its prompt is made, if it would be refused with any prompt."""
        if (refused := self.control.refuses_any(now_ns, facts)) is None:
            return None
        self._records.refused(facts.route, refused.reason)
        return refused.error

    def move(self, now_ns: int, facts: RequestFacts, why: str) -> bool:
        """Let a request that waits for a model without workers wait for another one. False: it stays."""
        request = self.control.request(facts.id)
        if request is None:
            return False
        route = request.facts.route
        if not self.control.move(now_ns, facts):
            self.control.stay(facts.id)
            return False
        self._records.diverted(route, why)
        return True

    def cancel(self, now_ns: int, request: Request) -> None:
        """Its client left."""
        answer = self.control.cancel(now_ns, request.id)
        if isinstance(answer, Settled):
            self._close(now_ns, answer)
        elif answer is not None:
            self._workers.abort(now_ns, answer.worker_id, request.id, 0)

    # --- from workers -----------------------------------------------------------------------------

    def take_lead(self, now_ns: int, request: Request, attempt: int) -> None:
        """An attempt has output, or has ended well without any: if another one runs at the same time, that is
        dropped.
        """
        hedge = request.hedge
        if hedge is None:
            return
        assert self.control.hedging is not None, "there is a second attempt"
        self._meters.dropped(now_ns, request, second=attempt != hedge.attempt)
        loser = self.control.hedging.won(now_ns, request, attempt)
        self._workers.abort(now_ns, loser.worker_id, request.id, loser.attempt)

    def first_output(self, now_ns: int, request: Request, attempt: int, *, cached_tokens: int | None) -> None:
        """An attempt has its first output; `cached_tokens` of the prompts, if the worker reported them."""
        if request.hedge is not None:
            self.take_lead(now_ns, request, attempt)
        self.control.first_output(now_ns, request.id, cached_tokens=cached_tokens)
        if self._meters.are_any:
            self._meters.began(request)
        # From here on its prompt counts, also if nothing more is reported.
        self._records.progressed(request)
        # A request that was tried again, or hedged, was not what the prediction was about.
        if request.attempts == 1 and request.predicted_ns:
            ttft_ns = max(1, now_ns - request.arrived_ns)
            error = abs(request.predicted_ns - ttft_ns) / max(request.predicted_ns, ttft_ns)
            self._records.predicted(request, error)

    def output(self, now_ns: int, request: Request, num_tokens: int) -> bool:
        """It has `num_tokens` in all by now, all choices together: call it once per slice.

        False: the answer ends here.
        """
        new = max(0, num_tokens - request.completion_tokens)
        stop = self.control.output(now_ns, request.id, new)
        if self._meters.are_any:
            self._meters.produced(request)
        self._records.progressed(request)
        if stop is None:
            return True
        self._clients.stop(now_ns, request, FinishReason.BUDGET)
        self._workers.abort(now_ns, stop.worker_id, request.id, 0)
        return False

    def attempt_failed(
        self,
        now_ns: int,
        request: Request,
        attempt: int,
        error: PenstockError | None,
        *,
        can_resume: bool = True,
    ) -> bool:
        """All streams of an attempt are over, and it failed (`request.used` says what they used); without an
        error it was aborted as one of two. True: the request continues, on the other worker or on the next
        one.
        """
        hedge = request.hedge
        if hedge is not None:
            assert self.control.hedging is not None, "there is a second attempt"
            self._meters.dropped(now_ns, request, second=attempt == hedge.attempt)
            self.control.hedging.lost(now_ns, request, attempt, error)
            return True
        assert error is not None, "the only attempt ends by `ended` when it is aborted"
        machine_micros, usage = self._meters.ended(now_ns, request), None
        request.break_off()
        if request.has_begun:  # Else the operator of the worker pays for what it lost.
            request.machine_micros += machine_micros
            usage = request.used()
        retry = may_try_again(error, has_begun=request.has_begun, can_resume=can_resume)
        answer = self.control.failed(now_ns, request.id, error, retry=retry, usage=usage)
        if isinstance(answer, Requeued):
            self._records.tried_again(request)
            return True
        assert answer is not None, f"{request.id} has ended before"
        self._close(now_ns, answer, error)
        return False

    def ended(
        self,
        now_ns: int,
        request: Request,
        outcome: Outcome,
        *,
        finish_reason: str = "",
        error: Exception | None = None,
    ) -> None:
        """Nothing of it runs any more, or ever will: how it ended.

        `request.used` says what its streams used.
        """
        if request.state is State.ENDED:
            return
        if request.state is State.QUEUED:
            if outcome is Outcome.CANCELLED:
                answer = self.control.cancel(now_ns, request.id)
            else:
                why = error if isinstance(error, PenstockError) else EngineFault("it never started")
                answer = self.control.failed(now_ns, request.id, why, retry=False)
        else:
            answer = self.control.ended(
                now_ns,
                request.id,
                outcome,
                request.used(),
                finish_reason=finish_reason if outcome is Outcome.FINISHED else "",
                error=type(error).__name__ if error else "",
                fault=error if isinstance(error, PenstockError) else None,
            )
        assert isinstance(answer, Settled), answer
        self._close(now_ns, answer)

    # --- by the clock -----------------------------------------------------------------------------

    def dispatch(self, now_ns: int) -> None:
        """Start and end what flow control says."""
        for action in self.control.dispatch(now_ns):
            match action:
                case Start():
                    self._start(now_ns, action)
                case Abort():
                    self._workers.abort(now_ns, action.worker_id, action.id, action.attempt)
                case FallBack():
                    if (request := self.control.request(action.id)) is not None:
                        self._clients.fall_back(now_ns, request, action)
                case GiveUp():
                    self._give_up(now_ns, action)
                case Evict():
                    self._evict(now_ns, action)

    def move_off(self, now_ns: int, worker_id: WorkerId, error: WorkerEjected, *, now: bool) -> int:
        """Let requests that run on a worker continue on others, one after the other, as far as they can: how
        many did. `now`: only those that find room at once; others stay where they are.
        """
        num_moved = 0
        for request in self.control.running_at(worker_id):
            if self.control.can_move(now_ns, request, now=now):
                self._workers.move_off(now_ns, request, error)
                self.dispatch(now_ns)  # It takes the room that the next one is asked about.
                num_moved += 1
        return num_moved

    def drain(self, now_ns: int, deadline_ns: int) -> None:
        """Accept nothing new; accepted requests may run until the deadline."""
        self.control.drain(now_ns, deadline_ns)

    # --- inside -----------------------------------------------------------------------------------

    def _start(self, now_ns: int, start: Start) -> None:
        request = self.control.request(start.id)
        if request is None:  # A port ended it, as it carried out an action before this one.
            return
        if self._meters.are_any:
            if start.is_hedge:
                self._meters.started_beside(now_ns, request, start.worker_id)
            else:
                self._meters.started(now_ns, request)
        self._workers.start(now_ns, request, start)

    def _give_up(self, now_ns: int, action: GiveUp) -> None:
        request = self.control.request(action.id)
        if request is not None and request.state is State.STARTED:  # Else a port ended it meanwhile.
            self._records.timed_out(request)
            self._workers.give_up(now_ns, request, action.error)

    def _evict(self, now_ns: int, evict: Evict) -> None:
        if evict.settled is not None:
            self._records.evicted(evict.settled.request.facts.route, evict.reason)
            self._close(now_ns, evict.settled, evict.error)
        elif (request := self.control.request(evict.id)) is not None:
            assert evict.worker_id is not None, "what does not wait runs"
            self._records.evicted(request.facts.route, evict.reason)
            self._clients.fail(now_ns, request, evict.error)
            self._workers.abort(now_ns, evict.worker_id, evict.id, 0)

    def _close(self, now_ns: int, settled: Settled, error: PenstockError | None = None) -> None:
        request = settled.request
        machine_micros = request.machine_micros
        if self._meters.are_any:
            machine_micros = self._meters.settled(now_ns, request, machine_micros)
        self._records.closed(request, machine_micros)
        self._clients.settled(now_ns, request, error)

    def _of(self, request_id: RequestId) -> Request:
        request = self.control.request(request_id)
        assert request is not None, f"{request_id} was just accepted"
        return request


def may_try_again(error: PenstockError, *, has_begun: bool, can_resume: bool) -> bool:
    """Whether an attempt that failed with this error leaves another one possible: nothing of the answer was
    given, or another worker can continue behind all of it.
    """
    if isinstance(error, StreamBroken):
        return can_resume
    return error.retry_safe and (can_resume or not has_begun)

"""Ends attempts that give nothing in time, so that the request goes on elsewhere; and requests whose client
does not wait any longer.

    the client's bound     x-penstock-max-wait-ms, from its arrival: a request without output ends then. Half
                           of what is left of it is what an attempt at an external worker gets, if another
                           worker or model could answer
    what is usual there    attempt_times.py, external workers only, if another worker or model could answer

An attempt is never given up for nothing: while no other place would take the request, it goes on. After its
first output none of this holds.
"""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.errors import AttemptTimeout, Evicted, PenstockError
from penstock.policy.answers import GiveUp
from penstock.policy.estimates.attempt_times import FirstTokens
from penstock.policy.flow import State
from penstock.policy.queueing.capacity import uncached_tokens
from penstock.policy.requests.extra import Extra
from penstock.policy.requests.request import Request
from penstock.types import RequestId, Usage, WorkerId

_AGAIN_NS = NS_PER_S
"""An attempt that is over its time with nowhere else to go is looked at again after so long."""


class AttemptClock(Extra):
    """All attempts of one flow control."""

    __slots__ = ("_can_leave", "_deadlines", "_due", "_firsts", "_requests")

    def __init__(
        self, requests: Mapping[RequestId, Request], can_leave: Callable[[int, Request], bool]
    ) -> None:
        """`requests` are all accepted ones, by reference; `can_leave` says whether one that runs could be
        answered by another worker or model now.
        """
        self._requests, self._can_leave = requests, can_leave
        self._firsts = FirstTokens()
        self._due: list[tuple[int, RequestId, int]] = []
        """When which attempt is looked at."""
        self._deadlines: list[tuple[int, RequestId]] = []

    def queued(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        if request.facts.first_token_ns and not request.attempts:
            heappush(self._deadlines, (_deadline_ns(request), request.id))

    def started(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        if request.has_begun or not _is_external(request):
            return
        bound_ns = self._firsts.bound_ns(request.lane.route, request.worker, _tokens(request))
        if deadline_ns := _deadline_ns(request):
            half_ns = max(1, (deadline_ns - now_ns) // 2)
            assert half_ns <= max(1, deadline_ns - now_ns), "no attempt has more than the client"
            bound_ns = min(bound_ns or half_ns, half_ns)
        if bound_ns:
            heappush(self._due, (now_ns + bound_ns, request.id, request.attempts))

    def first_output(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        if not request.has_begun and request.hedge is None and _is_external(request):
            ttft_ns = now_ns - request.dispatched_ns
            self._firsts.took(request.lane.route, request.worker, _tokens(request), ttft_ns)

    def attempt_lost(
        self,
        now_ns: int,
        request: Request,
        worker: WorkerId,
        error: PenstockError | None,
        usage: Usage | None,
    ) -> None:
        """See `Extra`."""
        if isinstance(error, AttemptTimeout):
            self._firsts.gave_up(request.lane.route, worker, _tokens(request), error.waited_ns)

    def evictions(self, now_ns: int) -> list[tuple[Request, str, PenstockError]]:
        """See `Extra`: clients that do not wait any longer."""
        found = list[tuple[Request, str, PenstockError]]()
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            request = self._requests.get(heappop(self._deadlines)[1])
            if request is not None and _is_silent(request):
                wait_ms = request.facts.first_token_ns // NS_PER_MS
                error = Evicted(
                    f"no first token within {wait_ms} ms, which is as long as the client waits",
                    retry_after_s=request.lane.retry_after_s(),
                )
                found.append((request, "late", error))
        return found

    def due(self, now_ns: int) -> list[GiveUp]:
        """See `Extra`: attempts that are over their time."""
        found = list[GiveUp]()
        while self._due and self._due[0][0] <= now_ns:
            _, request_id, attempt = heappop(self._due)
            request = self._requests.get(request_id)
            if request is None or request.state is not State.STARTED or request.has_begun:
                continue
            if request.attempts != attempt or request.hedge is not None:
                continue  # Another attempt is the one that counts, and has its own time.
            if self._can_leave(now_ns, request):
                waited_ns = now_ns - request.dispatched_ns
                assert waited_ns > 0, "an attempt has some time"
                why = f"the worker gave no first token within {waited_ns / NS_PER_S:.1f} s"
                found.append(GiveUp(request.id, AttemptTimeout(why, waited_ns=waited_ns)))
            else:
                heappush(self._due, (now_ns + _AGAIN_NS, request_id, attempt))
        return found

    def next_ns(self) -> int | None:
        """See `Extra`."""
        while self._due and not self._counts(*self._due[0][1:]):
            heappop(self._due)
        while self._deadlines and not self._is_waited_for(self._deadlines[0][1]):
            heappop(self._deadlines)
        times = [heap[0][0] for heap in (self._due, self._deadlines) if heap]
        return min(times, default=None)

    def _counts(self, request_id: RequestId, attempt: int) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.attempts == attempt and request.state is State.STARTED

    def _is_waited_for(self, request_id: RequestId) -> bool:
        request = self._requests.get(request_id)
        return request is not None and _is_silent(request)


def _is_silent(request: Request) -> bool:
    """Whether its client has got nothing, and it has not been decided that it never will."""
    return request.state in (State.QUEUED, State.STARTED) and not request.has_begun


def _deadline_ns(request: Request) -> int:
    """When its client leaves; 0: it does not say."""
    first_token_ns = request.facts.first_token_ns
    return request.arrived_ns + first_token_ns if first_token_ns else 0


def _is_external(request: Request) -> bool:
    room = request.lane.rooms.get(request.worker)
    return room is not None and room.view.is_external


def _tokens(request: Request) -> int:
    return uncached_tokens(request.work)

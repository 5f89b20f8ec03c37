"""Crash quarantine on requests' lives: workers that crashed, and which requests they had, go to the
quarantine, which says which of them are not started again, and how the others are.
"""

from collections.abc import Iterator

from penstock.errors import PenstockError, WorkerError
from penstock.policy.contracts import CrashPolicy
from penstock.policy.extras.quarantine import InFlightAtCrash
from penstock.policy.flow import RequestFacts, State
from penstock.policy.requests.extra import Extra
from penstock.policy.requests.request import Request
from penstock.types import Usage, WorkerId


class CrashQuarantine(Extra):
    """Between flow control and `quarantine.Quarantine`."""

    __slots__ = ("_crashes", "_quarantine")

    def __init__(self, quarantine: CrashPolicy) -> None:
        self._quarantine = quarantine
        self._crashes: dict[WorkerId, tuple[int, list[tuple[Request, InFlightAtCrash]]]] = {}
        """Those since `evictions` was last called: when, and which requests were there."""

    def refusal(self, now_ns: int, facts: RequestFacts) -> PenstockError | None:
        """See `Extra`."""
        return self._quarantine.refusal(now_ns, facts)

    def queued(self, now_ns: int, request: Request) -> None:
        """See `Extra`: a suspect is started as the quarantine says."""
        request.lane.suspect(request.work, self._quarantine.trial(now_ns, request.facts))

    def attempt_lost(
        self,
        now_ns: int,
        request: Request,
        worker: WorkerId,
        error: PenstockError | None,
        usage: Usage | None,
    ) -> None:
        """See `Extra`."""
        if not isinstance(error, WorkerError) or not error.died:
            return
        given = request.completion_tokens if usage is None else usage.completion_tokens
        _, in_flight_at_crash = self._crashes.setdefault(worker, (now_ns, []))
        found = InFlightAtCrash(request.facts, is_starting=request.state is State.STARTED, num_tokens=given)
        in_flight_at_crash.append((request, found))

    def finished(self, facts: RequestFacts) -> None:
        """See `Extra`."""
        self._quarantine.ended_well(facts)

    def evictions(self, now_ns: int) -> Iterator[tuple[Request, str, PenstockError]]:
        """See `Extra`: a request that crashed a worker does not go on to the next one."""
        if not self._crashes:
            return
        crashes, self._crashes = self._crashes, {}
        for at_ns, in_flight_at_crash in crashes.values():
            self._quarantine.died(at_ns, [found for _, found in in_flight_at_crash])
        for request in [
            request for _, in_flight_at_crash in crashes.values() for request, _ in in_flight_at_crash
        ]:
            if request.state is not State.QUEUED:
                continue
            if (error := self._quarantine.refusal(now_ns, request.facts)) is not None:
                yield request, "quarantine", error
            else:
                self.queued(now_ns, request)

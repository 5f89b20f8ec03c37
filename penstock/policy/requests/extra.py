"""What a plug-in on the lives of requests may hook into: hedging, the crash quarantine and the attempt clock
are plug-ins (policy/extras/).

`FlowControl` calls each hook of each plug-in that is configured; one that is off is absent. A plug-in keeps
what it knows beside the request, not in it.
"""

from collections.abc import Iterable

from penstock.errors import PenstockError
from penstock.policy.answers import Abort, GiveUp, Start
from penstock.policy.flow import RequestFacts
from penstock.policy.requests.request import Request
from penstock.types import Usage, WorkerId


class Extra:
    """The hooks. Each does nothing here."""

    __slots__ = ()

    def refusal(self, now_ns: int, facts: RequestFacts) -> PenstockError | None:
        """Why a request that arrives is refused; None if it is not."""

    def queued(self, now_ns: int, request: Request) -> None:
        """A request was put into a queue, for the first time or another model's."""

    def started(self, now_ns: int, request: Request) -> None:
        """A request was dispatched to a worker."""

    def first_output(self, now_ns: int, request: Request) -> None:
        """Its worker sent its first output of this attempt."""

    def attempt_lost(
        self,
        now_ns: int,
        request: Request,
        worker: WorkerId,
        error: PenstockError | None,
        usage: Usage | None,
    ) -> None:
        """An attempt failed on a worker. It may be tried again, on another one."""

    def ending(self, now_ns: int, request: Request) -> Abort | None:
        """Its attempt ends, or is to end. Returns what else of it must be aborted."""

    def left(self, request: Request) -> None:
        """It is in its model's queue and at its workers no more: it has ended, or moves to another model."""

    def finished(self, facts: RequestFacts) -> None:
        """A request ended well."""

    def evictions(self, now_ns: int) -> Iterable[tuple[Request, str, PenstockError]]:
        """Requests that must not be waited for any longer, with the reason and the error.

        Called first of all at each dispatch.
        """
        return ()

    def due(self, now_ns: int) -> Iterable[Start | GiveUp]:
        """What to start, besides what the queues start, and which attempts to end.

        Called last of all at each dispatch.
        """
        return ()

    def next_ns(self) -> int | None:
        """When `due` must be called if nothing happens until then; None: not at all."""

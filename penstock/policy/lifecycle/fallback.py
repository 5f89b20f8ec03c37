"""Requests that wait for a model whose last worker is gone: another model may answer them, under the rules of
admission.

Which one is admission's to say; the driver makes the prompt anew for it, since it has another tokenizer and
template, and moves the request. All the while it waits where it was: should a worker come back meanwhile, or
the other model not let it in, nothing is lost.
"""

from collections.abc import Callable, Mapping

import msgspec

from penstock.policy.answers import Diverted, FallBack, Refused
from penstock.policy.contracts import Pass, Policies, RouteLoad
from penstock.policy.flow import RequestFacts, State
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.requests.account import Accounts, Holds
from penstock.policy.requests.request import Request, work_of
from penstock.types import RequestId

ASKED_MAX = 32
"""Requests that one look at a model without workers sends to others: those that have moved count at the
next."""
Look = Callable[[int, RequestFacts], Callable[[str], RouteLoad]]
"""How models stand for a request: `contracts.Admission.decide` asks."""


class Moved(msgspec.Struct, frozen=True, gc=False):
    """What a request that waits becomes for another model."""

    facts: RequestFacts
    lane: ModelQueue
    work: Work
    holds: Holds


class Fallbacks:
    """Those of one flow control."""

    __slots__ = ("_accounts", "_look", "_policies", "_requests")

    def __init__(
        self, policies: Policies, accounts: Accounts, requests: Mapping[RequestId, Request], look: Look
    ) -> None:
        """`requests` are all accepted ones, by reference."""
        self._policies, self._accounts, self._requests, self._look = policies, accounts, requests, look

    def ask(self, now_ns: int, lane: ModelQueue, down_ns: int) -> tuple[list[FallBack], list[Request], bool]:
        """What waits for a model that has had no worker since `down_ns`: which requests could go elsewhere,
        which could not, and whether there are more to ask. Each is asked once while the model is down.
        """
        found, stay = list[FallBack](), list[Request]()
        for work in lane.waiting():
            request = self._requests[work.id]
            if request.asked_ns == down_ns or request.has_begun:
                continue
            if len(found) + len(stay) == ASKED_MAX:
                return found, stay, True
            request.asked_ns, facts = down_ns, request.facts
            verdict = self._policies.admission.decide(now_ns, facts, self._look(now_ns, facts))
            if isinstance(verdict, Diverted):
                found.append(FallBack(facts.id, verdict.route, verdict.why))
            else:
                stay.append(request)
        return found, stay, False

    def move(self, now_ns: int, facts: RequestFacts, lane: ModelQueue) -> Moved | None:
        """What it becomes to wait in that queue; None if it has a worker by now, has ended, or is not let in
        there.
        """
        request = self._requests.get(facts.id)
        if request is None or request.state is not State.QUEUED or request.has_begun:
            return None
        if request.lane.down_ns is None or lane is request.lane:
            return None
        verdict = self._policies.admission.decide(now_ns, facts, self._look(now_ns, facts))
        if not isinstance(verdict, Pass):
            return None
        work = work_of(facts, request.arrived_ns, 0, verdict)
        if lane.queue.would_refuse(work):
            return None
        holds = self._accounts.open(now_ns, facts)
        if isinstance(holds, Refused):
            return None
        work.output_tokens = holds.expected
        return Moved(facts, lane, work, holds)

"""Requests that wait for a model whose last worker is gone: another model may answer them, under the rules of admission.

Which one is admission's to say; the driver makes the prompt anew for it, since it has another tokenizer and template, and moves
the request. All the while it waits where it was: should a worker come back meanwhile, or the other model not let it in, nothing is lost.
"""

from collections.abc import Callable, Mapping, Sequence

from penstock.policy.answers import Diverted, FallBack, Refused
from penstock.policy.flow import Arrival, Event, State
from penstock.policy.lifecycle.account import Accounts
from penstock.policy.lifecycle.life import Life, work_of
from penstock.policy.parts import Parts, Pass, RouteLoad
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.fair_queue import Full
from penstock.policy.queueing.lane import Lane
from penstock.types import RequestId

ASKED_MAX = 32
"""Requests that one look at a model without workers sends to others: those that have moved count at the next."""
Look = Callable[[int, Arrival], Callable[[str], RouteLoad]]
"""How models stand for a request: `parts.Admission.decide` asks."""


class Fallbacks:
    """Those of one flow control."""

    __slots__ = ("_accounts", "_lives", "_look", "_parts")

    def __init__(self, parts: Parts, accounts: Accounts, lives: Mapping[RequestId, Life], look: Look) -> None:
        """`lives` are all accepted requests, by reference."""
        self._parts, self._accounts, self._lives, self._look = parts, accounts, lives, look

    def ask(self, now_ns: int, lane: Lane, down_ns: int) -> tuple[list[FallBack], list[Life], bool]:
        """What waits for a model that has had no worker since `down_ns`: who could go elsewhere, who could not, and whether there are
        more to ask. Each is asked once while the model is down.
        """
        told, stay = list[FallBack](), list[Life]()
        for work in lane.waiting():
            life = self._lives[work.id]
            if life.asked_ns == down_ns or life.flow.has_begun:
                continue
            if len(told) + len(stay) == ASKED_MAX:
                return told, stay, True
            life.asked_ns, arrival = down_ns, life.flow.arrival
            verdict = self._parts.admission.decide(now_ns, arrival, self._look(now_ns, arrival))
            if isinstance(verdict, Diverted):
                told.append(FallBack(arrival.id, verdict.route, verdict.why))
            else:
                stay.append(life)
        return told, stay, False

    def move(self, now_ns: int, arrival: Arrival, lane: Lane) -> Sequence[Work] | None:
        """Let it wait in that lane as `arrival`. Who was dropped for it; None, and nothing has changed, if it has a worker by now, has
        ended, or is not let in there.
        """
        life = self._lives.get(arrival.id)
        if life is None or life.flow.state is not State.QUEUED or life.flow.has_begun:
            return None
        if life.lane.down_ns is None or lane is life.lane:
            return None
        verdict = self._parts.admission.decide(now_ns, arrival, self._look(now_ns, arrival))
        if not isinstance(verdict, Pass):
            return None
        work = work_of(arrival, life.flow.arrived_ns, 0, verdict)
        if lane.queue.would_refuse(work):
            return None
        account = self._accounts.open(now_ns, arrival)
        if isinstance(account, Refused):
            return None
        work.output_tokens = account.expected
        life.lane.queue.remove(life.work)
        life.lane.forget(life.work)
        life.account.undo(now_ns)
        dropped = lane.queue.push(now_ns, work)
        assert not isinstance(dropped, Full), "it was asked"
        life.flow.on(Event.MOVE, now_ns)
        life.flow.arrival, life.flow.cached_tokens = arrival, arrival.cached_tokens
        life.lane, life.work, life.booked, life.account = lane, work, work, account
        lane.suspect(work, self._parts.poison.trial(now_ns, arrival))
        return dropped

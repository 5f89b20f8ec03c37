"""When a request goes to a peer cell, and to which: local first.

    no worker here may be used (none is ready,    at once, to a peer that has room
    breakers are open, none in the place that
    the request is bound to)
    what waits here would wait longer than a      to the peer where it would begin soonest; of those that are
    round trip and the wait over there, clearly   about as soon, the cheapest
    else                                          it waits here

The wait here is predicted: what waits, times how long a stream takes, over the streams that run; and it is no
less than what the oldest one has waited already, for a prediction may be wrong and a worker stuck. Both cells
take about as long for a prompt, so that is in neither. `CLEARLY` keeps a request at home, where its prefix is
cached and nothing is paid for sending it, unless much is gained.

Whether a peer has room it says itself (its workers' rows, less what runs and waits there), so a cell that has
its own queue is sent nothing. A request that has come from a peer is bound to this cell (`types.PLACE`), and
so is sent on to none. Pure: time is handed in.
"""

from collections.abc import Callable, Collection, Iterable
from math import inf

from penstock.clock import NS_PER_MS
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import CapacityTable, WorkerCapacity, WorkerView, can_resume_at
from penstock.policy.queueing.fair_queue import FairQueue
from penstock.policy.terms import CellView
from penstock.types import RequestId, WorkerId

CLEARLY = 1.5
"""Times as long as over there, at least, and"""
AT_LEAST_NS = 50 * NS_PER_MS
"""so much longer."""
_ABOUT = 1.2
"""Peers that take up to so many times as long as the best one are as good, and the cheapest is taken,"""
_ABOUT_NS = 20 * NS_PER_MS
"""as are those that take so much longer."""
_SERVICE_PACE = 16
"""The mean time of a stream follows the last so many."""
_SERVICE_PRIOR_NS = 1000 * NS_PER_MS


class PeerCells:
    """The peer cells of one model, beside its own workers."""

    __slots__ = ("_began_ns", "_broken", "_known", "_queue", "_service_ns", "_workers", "ids")

    def __init__(
        self, queue: FairQueue, workers: CapacityTable, broken: Callable[[int], frozenset[WorkerId]]
    ) -> None:
        """`broken` says which workers are left alone by their breakers, however many that are."""
        self._queue, self._workers, self._broken = queue, workers, broken
        self._known: dict[WorkerId, CellView] = {}
        self.ids: frozenset[WorkerId] = frozenset()
        """The workers that are peers."""
        self._began_ns: dict[RequestId, int] = {}
        """Of what runs here."""
        self._service_ns = _SERVICE_PRIOR_NS

    def set(self, worker_id: WorkerId, view: WorkerView | None) -> None:
        """Take a worker's report, if it is a peer; None: it is gone."""
        if view is not None and view.cell is not None:
            self._known[worker_id] = view.cell
        elif self._known.pop(worker_id, None) is None:
            return
        if self.ids != self._known.keys():
            self.ids = frozenset(self._known)
        if not self.ids:
            self._began_ns.clear()  # Nobody will say when these end.

    def started(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """It was started."""
        assert work.id in worker.begun, f"{work.id} is booked where it starts"
        if worker.id not in self.ids:
            self._began_ns[work.id] = now_ns

    def ended(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """It runs there no more."""
        began_ns = self._began_ns.pop(work.id, None)
        if began_ns is not None and worker.id not in self.ids:
            self._service_ns += (now_ns - began_ns - self._service_ns) // _SERVICE_PACE
            assert self._service_ns >= 0, "no stream ends before it begins"

    def blocked(self, now_ns: int, work: Work, blocked: frozenset[WorkerId]) -> frozenset[WorkerId]:
        """Workers that a request is not given to: while a peer could have it, also those that their breakers
        leave alone, even if they are all of this cell's.
        """
        broken = self._broken(now_ns)
        return blocked | broken if any(worker.is_able(work) for worker in self._open(broken)) else blocked

    def has_room(self, now_ns: int) -> bool:
        """Whether something that waits could start now, here or at a peer."""
        if not self._workers.has_room() or self._workers.has_room_besides(self.ids):
            return self._workers.has_room()
        broken = self._broken(now_ns)
        away_ns = self._soonest_ns(self._open(broken))
        assert away_ns is None or away_ns >= 0, "nobody is there before it left"
        return away_ns is not None and self._is_clear(now_ns, away_ns, broken)

    def due_ns(self, now_ns: int) -> int | None:
        """When what waits has waited so long that it goes to a peer, if nothing happens until then."""
        away_ns = self._soonest_ns(self._open(self._broken(now_ns)))
        return None if away_ns is None else now_ns + int(_worth_ns(away_ns)) - self._oldest_ns(now_ns) + 1

    def place(
        self, now_ns: int, work: Work, avoid: Collection[WorkerId], blocked: Collection[WorkerId]
    ) -> WorkerCapacity | None:
        """The peer that is given this request now; None: it waits here."""
        peers = [worker for worker in self._open(blocked) if worker.id not in avoid and worker.fits(work)]
        away_ns = self._soonest_ns(peers)
        if away_ns is None:
            return None
        is_bound_away = not any(
            worker.id not in avoid
            and worker.is_able(work)
            and (not work.goes_on or can_resume_at(work, worker.view))
            for worker in self._usable(blocked)
        )
        if not is_bound_away and not self._is_clear(now_ns, away_ns, blocked):
            return None
        near_ns = max(_ABOUT * away_ns, away_ns + _ABOUT_NS)
        near = [worker for worker in peers if self._away_ns(worker) <= near_ns]
        assert near, "the nearest one is near"
        return min(
            near, key=lambda worker: (self._known[worker.id].price, self._away_ns(worker), worker.number)
        )

    def wait_ns(self, now_ns: int, blocked: Collection[WorkerId]) -> float:
        """The wait of a request that comes now for a worker of this cell; infinite: none may be used."""
        usable = self._usable(blocked)
        if not usable:
            return inf
        running = sum(worker.booked + worker.others for worker in usable)
        predicted = self._queue.num_waiting * self._service_ns / max(1, running)
        return max(predicted, self._oldest_ns(now_ns))

    def _is_clear(self, now_ns: int, away_ns: int, blocked: Collection[WorkerId]) -> bool:
        """Whether it pays to send something away."""
        return self.wait_ns(now_ns, blocked) >= _worth_ns(away_ns)

    def _oldest_ns(self, now_ns: int) -> int:
        """How long the oldest one has waited here."""
        firsts = [next(iter(band.waiting.values())) for band in self._queue.bands if band.waiting]
        oldest_ns = now_ns - min((work.queued_ns for work in firsts), default=now_ns)
        assert oldest_ns >= 0, "nothing waits since a time to come"
        return oldest_ns

    def _usable(self, blocked: Collection[WorkerId]) -> list[WorkerCapacity]:
        """Workers of this cell that could have something some time."""
        return [
            worker
            for worker in self._workers
            if worker.view.ready and worker.id not in self.ids and worker.id not in blocked
        ]

    def _open(self, blocked: Collection[WorkerId]) -> list[WorkerCapacity]:
        """Peers that could start something now."""
        found = (self._workers.get(worker_id) for worker_id in sorted(self.ids))
        return [
            worker for worker in found if worker is not None and worker.is_open and worker.id not in blocked
        ]

    def _away_ns(self, worker: WorkerCapacity) -> int:
        """From here to a worker over there: the round trip, and the wait."""
        known = self._known[worker.id]
        return known.rtt_ns + known.wait_ns

    def _soonest_ns(self, peers: Iterable[WorkerCapacity]) -> int | None:
        return min((self._away_ns(worker) for worker in peers), default=None)


def _worth_ns(away_ns: int) -> float:
    """The wait here from which on it pays to send something away."""
    return max(CLEARLY * away_ns, away_ns + AT_LEAST_NS)

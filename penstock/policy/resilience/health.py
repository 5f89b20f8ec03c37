"""Which workers are left alone, and whether one more try is granted: breakers and the retry budget behind one
face.

`FlowControl` tells of every attempt: where it was started, when its first output came, how it ended. What
counts against a worker is what a worker can help: a lost connection, its own faults, first tokens that come
late. What a client did never counts, and neither does a refusal for want of room.

The panic rule (after Envoy's): when more than half of a model's ready workers would be left alone, none is.
Then it is not the workers, or there is nothing to gain from knowing that it is.
"""

from collections.abc import Iterator

from penstock.config.branch import extended
from penstock.config.fleet import HealthConfig
from penstock.errors import PenstockError, WorkerError
from penstock.policy.resilience.breaker import Breaker, BreakerState, BreakerTerms, Draw
from penstock.policy.resilience.retry_budget import RetryBudget, RetryTerms
from penstock.types import WorkerId

_NONE: frozenset[WorkerId] = frozenset()


class HealthTerms(HealthConfig, frozen=True, kw_only=True):
    """The section, and what breakers and retries go by."""

    breaker: BreakerTerms = BreakerTerms()
    panic_above: float = 0.5
    """When more than this share of a model's ready workers would be left alone, none is."""
    retry: RetryTerms = RetryTerms()


class _Route:
    """One model's workers."""

    __slots__ = ("breakers", "known", "ready", "unwell")

    def __init__(self) -> None:
        self.breakers: dict[WorkerId, Breaker] = {}
        self.known: set[WorkerId] = set()
        """Those that are not gone."""
        self.ready: set[WorkerId] = set()
        self.unwell: dict[WorkerId, Breaker] = {}
        """Those that are not closed."""


class FleetHealth:
    """One for a gateway. See `contracts.Health`."""

    __slots__ = ("_config", "_draw", "_routes", "retries")

    def __init__(self, config: HealthConfig, draw: Draw) -> None:
        config = self._config = extended(config, HealthTerms)
        self._draw = draw
        self._routes: dict[str, _Route] = {}
        self.retries = RetryBudget(config.retry)

    def blocked(self, now_ns: int, route: str) -> frozenset[WorkerId]:
        """Ready workers of the model that are left alone now; none if they would be more than half.

        Nothing while all are well.
        """
        found = self._routes.get(route)
        if found is None or not found.unwell:
            return _NONE
        blocked = frozenset(
            worker_id
            for worker_id, breaker in found.unwell.items()
            if worker_id in found.ready and breaker.blocks(now_ns)
        )
        assert len(blocked) <= len(found.ready), "only ready workers are left alone"
        if len(blocked) > self._config.panic_above * len(found.ready):
            return _NONE
        return blocked

    def due_ns(self, route: str) -> int | None:
        """When `blocked` may change by time alone; None if it does not."""
        found = self._routes.get(route)
        if found is None or not found.unwell:
            return None
        # Of those that are not ready nothing changes: asked for a time in the past, a driver would wake up
        # for ever.
        times = [breaker.due_ns for worker_id, breaker in found.unwell.items() if worker_id in found.ready]
        return min((time for time in times if time is not None), default=None)

    def worker(self, route: str, worker_id: WorkerId, *, ready: bool | None) -> None:
        """A worker is ready or is not; None: it is gone for good."""
        found = self._routes.get(route)
        if found is None:
            found = self._routes[route] = _Route()
        if ready:
            found.ready.add(worker_id)
        else:
            found.ready.discard(worker_id)
        found.known.add(worker_id)
        if ready is None:
            found.known.discard(worker_id)
            found.breakers.pop(worker_id, None)
            found.unwell.pop(worker_id, None)
        assert (worker_id in found.ready) <= (worker_id in found.known), "a worker that is gone is not ready"

    def started(self, now_ns: int, route: str, worker_id: WorkerId) -> None:
        """An attempt begins there."""
        found = self._routes.get(route)
        if found is not None and found.unwell and (breaker := found.unwell.get(worker_id)) is not None:
            breaker.started(now_ns)

    def began(self, now_ns: int, route: str, worker_id: WorkerId, ttft_ns: int) -> None:
        """Its first output came, so long after it was started there."""
        breaker = self._breaker(route, worker_id)
        if breaker is not None:
            breaker.began(now_ns, ttft_ns, peers_fine=lambda: self._peers_fine(now_ns, route, worker_id))
            self._note(route, worker_id, breaker)

    def ended(self, now_ns: int, route: str, worker_id: WorkerId, error: PenstockError | None) -> None:
        """It ended there: None if it ended well, or its client or this gateway ended it."""
        if error is None:
            self._forget(route, worker_id)
        elif isinstance(error, WorkerError) and (breaker := self._breaker(route, worker_id)) is not None:
            breaker.failed(now_ns)
            self._note(route, worker_id, breaker)
        else:
            self._forget(route, worker_id)

    def succeeded(self) -> None:
        """A request ended well."""
        self.retries.succeeded()

    def may_retry(self, now_ns: int) -> bool:
        """Whether one more may be tried again; then it counts."""
        return self.retries.take(now_ns)

    def states(self) -> Iterator[tuple[str, WorkerId, BreakerState]]:
        """Model, worker and breaker, for metrics."""
        for route, found in self._routes.items():
            for worker_id in found.ready:
                breaker = found.breakers.get(worker_id)
                yield route, worker_id, BreakerState.CLOSED if breaker is None else breaker.state

    def _breaker(self, route: str, worker_id: WorkerId) -> Breaker | None:
        found = self._routes.get(route)
        if found is None or worker_id not in found.known:
            return None  # Gone: what was lost with it is told after that.
        breaker = found.breakers.get(worker_id)
        if breaker is None:
            breaker = found.breakers[worker_id] = Breaker(self._config.breaker, self._draw)
        return breaker

    def _forget(self, route: str, worker_id: WorkerId) -> None:
        found = self._routes.get(route)
        if found is not None and found.unwell and (breaker := found.unwell.get(worker_id)) is not None:
            breaker.forget()

    def _note(self, route: str, worker_id: WorkerId, breaker: Breaker) -> None:
        unwell = self._routes[route].unwell
        assert self._routes[route].breakers[worker_id] is breaker, f"{worker_id} has another breaker"
        if breaker.state is BreakerState.CLOSED:
            unwell.pop(worker_id, None)
        else:
            unwell[worker_id] = breaker

    def _peers_fine(self, now_ns: int, route: str, worker_id: WorkerId) -> bool:
        """Whether most others are well, so that a slow one is slow by itself. Without peers nobody can tell.

        When the load grows first outputs take longer everywhere, and somewhere first: a peer that takes
        nearly as long by now has the same load.
        """
        found = self._routes[route]
        peers = [found.breakers.get(each) for each in found.ready if each != worker_id]
        late_ns = found.breakers[worker_id].recent_ns / self._config.breaker.slow_factor
        fine = sum(
            peer is None or (not peer.state and peer.is_fine(now_ns) and peer.recent_ns < late_ns)
            for peer in peers
        )
        return 2 * fine > len(peers)

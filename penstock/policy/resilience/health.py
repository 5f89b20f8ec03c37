"""Which workers are left alone, and whether one more attempt is granted: breakers and the retry budget behind
one interface.

`FlowControl` tells of every attempt: where it was started, when its first output came, how it ended. Only
failures that a worker can help count against it: a lost connection, its own faults, first tokens that come
late. A failure that a client caused never counts, and neither does a refusal for want of room: that is load,
and the worker is given nothing until the time that it named.

The panic rule (after Envoy's): when more than half of a model's ready workers would be left alone, none is.
Then it is not the workers, or there is nothing to gain from knowing that it is. Where another model may
answer there is something to gain: `trouble` says so, and such requests go by the breakers alone.

The retry budget bounds retries by a share of the requests that succeed, so that they never multiply an
overload. It is a token bucket (after Finagle's): every success pays in a tenth of a token, every retry takes
one, and a few a second are always there, for a fleet that is nearly idle. Over any time the retries are at
most `share` x successes + `floor_per_s` x seconds + what was saved up. Pure; integers, so that nothing
drifts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.clock import NS_PER_S
from penstock.config.branch import extended
from penstock.config.fleet import HealthConfig
from penstock.errors import AttemptTimeout, KeyRejected, PenstockError, WorkerBusy, WorkerError
from penstock.policy.contracts import RouteTrouble
from penstock.policy.resilience.worker_state import Breaker, BreakerState, BreakerTerms, Draw
from penstock.types import WorkerId

_UNIT = NS_PER_S
"""Of the level, per token: a token a second is one unit a nanosecond."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RetryTerms:
    """How many requests that failed before their first byte may be tried again, on another worker.

    `retries_max` of policy/terms.py bounds the retries of each.
    """

    share: float = 0.1
    """Of the requests that end well."""
    floor_per_s: int = 3
    """So many a second are granted in any case."""
    saved_max: int = 100
    """The credit that good times can save up."""


class RetryBudget:
    """One for a gateway. Begins with its floor."""

    __slots__ = ("_cap", "_floor", "_level", "_rate", "_seen_ns", "_share")

    def __init__(self, config: RetryTerms) -> None:
        self._rate = config.floor_per_s
        self._floor, self._cap = config.floor_per_s * _UNIT, max(config.saved_max, config.floor_per_s) * _UNIT
        self._share = round(config.share * _UNIT)
        self._level, self._seen_ns = self._floor, 0

    def succeeded(self) -> None:
        """A request has ended well."""
        assert self._share >= 0, self._share
        self._level = min(self._cap, self._level + self._share)

    def take(self, now_ns: int) -> bool:
        """Whether one more may be tried again; then it counts."""
        self._refill(now_ns)
        if self._level < _UNIT:
            return False
        self._level -= _UNIT
        assert 0 <= self._level <= self._cap, "a retry is taken from those that are there"
        return True

    def level(self, now_ns: int) -> float:
        """Retries that are there."""
        self._refill(now_ns)
        return self._level / _UNIT

    def _refill(self, now_ns: int) -> None:
        """Up to the floor by time, beyond it only by successes."""
        elapsed_ns, self._seen_ns = max(0, now_ns - self._seen_ns), max(now_ns, self._seen_ns)
        if self._level < self._floor:
            self._level = min(self._floor, self._level + elapsed_ns * self._rate)


_NONE: frozenset[WorkerId] = frozenset()
REST_S, REST_MAX_S = 1.0, 3600.0
"""How long a worker that has no room is given nothing: if it does not say, and at most."""
SLOW_ALONE_NS = NS_PER_S
"""An external worker without peers is held against its own history alone, and only over this: what runs
elsewhere does not slow down with our load as a worker of ours does."""


class HealthTerms(HealthConfig, frozen=True, kw_only=True):
    """The section, and what breakers and retries go by."""

    breaker: BreakerTerms = BreakerTerms()
    panic_above: float = 0.5
    """When more than this share of a model's ready workers would be left alone, none is."""
    retry: RetryTerms = RetryTerms()


class _Route:
    """One model's workers."""

    __slots__ = ("breakers", "external", "known", "ready", "resting", "unwell")

    def __init__(self) -> None:
        self.external: set[WorkerId] = set()
        """Those that do not run our engine."""
        self.resting: dict[WorkerId, tuple[int, int]] = {}
        """Those that have no room -> since when, and until when."""
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

    def blocked(self, now_ns: int, route: str, *, strict: bool = False) -> frozenset[WorkerId]:
        """Ready workers of the model that are left alone now. Of those that failed none if they would be more
        than half, unless `strict`.

        Nothing while all are well.
        """
        found = self._routes.get(route)
        if found is None or not (found.unwell or found.resting):
            return _NONE
        broken = _broken(found, now_ns)
        if not strict and len(broken) > self._config.panic_above * len(found.ready):
            broken = _NONE
        return broken | _resting(found, now_ns)

    def trouble(self, now_ns: int, route: str) -> RouteTrouble | None:
        """The fault if no more than half of the model's ready workers may be used; None if more may."""
        found = self._routes.get(route)
        if found is None or not (found.unwell or found.resting):
            return None
        broken, resting, num_ready = _broken(found, now_ns), _resting(found, now_ns), len(found.ready)
        if len(broken | resting) < num_ready or not num_ready:
            is_panic = len(broken) > self._config.panic_above * num_ready
            return RouteTrouble(is_panic=True) if is_panic else None
        assert broken | resting <= found.ready, "only ready workers are left alone"
        since_ns = [found.breakers[each].since_ns for each in broken]
        since_ns += [found.resting[each][0] for each in resting]
        back_ns = min((found.resting[each][1] for each in resting), default=0)
        why = "busy" if len(resting) == num_ready else "breaker"
        return RouteTrouble(why=why, since_ns=max(since_ns), back_ns=back_ns)

    def due_ns(self, route: str) -> int | None:
        """When `blocked` may change by time alone; None if it does not."""
        found = self._routes.get(route)
        if found is None or not (found.unwell or found.resting):
            return None
        # Of those that are not ready nothing changes: asked for a time in the past, a driver would wake up
        # for ever.
        times = [breaker.due_ns for worker_id, breaker in found.unwell.items() if worker_id in found.ready]
        times += [until_ns for worker_id, (_, until_ns) in found.resting.items() if worker_id in found.ready]
        return min((time for time in times if time is not None), default=None)

    def worker(
        self, route: str, worker_id: WorkerId, *, ready: bool | None, is_external: bool = False
    ) -> None:
        """A worker is ready or is not; None: it is gone for good. `is_external`: not our engine."""
        found = self._routes.get(route)
        if found is None:
            found = self._routes[route] = _Route()
        if ready:
            found.ready.add(worker_id)
        else:
            found.ready.discard(worker_id)
        found.known.add(worker_id)
        if is_external:
            found.external.add(worker_id)
        if ready is None:
            found.external.discard(worker_id)
            found.resting.pop(worker_id, None)
            found.known.discard(worker_id)
            found.breakers.pop(worker_id, None)
            found.unwell.pop(worker_id, None)
        assert (worker_id in found.ready) <= (worker_id in found.known), "a worker that is gone is not ready"

    def started(self, now_ns: int, route: str, worker_id: WorkerId) -> None:
        """An attempt begins there."""
        found = self._routes.get(route)
        if found is not None and found.unwell and (breaker := found.unwell.get(worker_id)) is not None:
            breaker.started(now_ns)

    def doubt_ns(self, route: str, worker_id: WorkerId) -> int:
        """How long an attempt that begins there now may take, if it is an external worker without peers whose
        last attempt failed, or whose breaker is not closed: then it is slow, which is all there is to learn.
        0: it is in no doubt.
        """
        found = self._routes.get(route)
        breaker = found.breakers.get(worker_id) if found is not None else None
        if found is None or breaker is None or not breaker.is_doubted:
            return 0
        if worker_id not in found.external or len(found.ready) > 1:
            return 0
        return max(SLOW_ALONE_NS, breaker.slow_ns) + 1

    def began(self, now_ns: int, route: str, worker_id: WorkerId, ttft_ns: int) -> None:
        """Its first output came, so long after it was started there."""
        breaker = self._breaker(route, worker_id)
        if breaker is not None:
            was = breaker.state
            breaker.began(now_ns, ttft_ns, peers_fine=lambda: self._peers_fine(now_ns, route, worker_id))
            if breaker.state is not was:
                self._note(route, worker_id, breaker)

    def ended(self, now_ns: int, route: str, worker_id: WorkerId, error: PenstockError | None) -> None:
        """It ended there: None if it ended well, or its client or this gateway ended it."""
        if isinstance(error, WorkerBusy):
            self._rest(now_ns, route, worker_id, error.retry_after_s)
        if isinstance(error, WorkerError) and (breaker := self._breaker(route, worker_id)) is not None:
            if isinstance(error, KeyRejected):
                breaker.reject(now_ns, "it does not accept the key that it is given")
            elif isinstance(error, AttemptTimeout):
                breaker.gave_up(now_ns, error.waited_ns, error.unseen_ns)
            else:
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

    def can_retry(self, now_ns: int) -> bool:
        """Whether it could; nothing counts."""
        return self.retries.level(now_ns) >= 1

    def states(self) -> Iterator[tuple[str, WorkerId, BreakerState]]:
        """Model, worker and breaker, for metrics."""
        for route, found in self._routes.items():
            for worker_id in found.ready:
                breaker = found.breakers.get(worker_id)
                yield route, worker_id, BreakerState.CLOSED if breaker is None else breaker.state

    def left_alone(self, now_ns: int, route: str, *, rests: bool = True) -> dict[WorkerId, str]:
        """Ready workers of a model that are given nothing, or little, and why, for people. Without `rests`
        those are left out that said for how long they have no room.
        """
        found = self._routes.get(route)
        if found is None or not (found.unwell or found.resting):
            return {}
        reported = {
            worker_id: f"its breaker is {_STATES[breaker.state]}: {breaker.why}"
            for worker_id, breaker in found.unwell.items()
            if worker_id in found.ready
        }
        for worker_id in sorted(_resting(found, now_ns) - reported.keys()) if rests else ():
            wait_s = (found.resting[worker_id][1] - now_ns) / NS_PER_S
            reported[worker_id] = f"it has no room for another {wait_s:.0f} s, as it says"
        return reported

    def _rest(self, now_ns: int, route: str, worker_id: WorkerId, retry_after_s: float | None) -> None:
        found = self._routes.get(route)
        if found is None or worker_id not in found.known:
            return
        wait_s = min(REST_MAX_S, max(REST_S, retry_after_s or 0.0))
        since_ns, until_ns = found.resting.get(worker_id, (now_ns, 0))
        if until_ns <= now_ns:
            since_ns = now_ns
        found.resting[worker_id] = (since_ns, max(until_ns, now_ns + int(wait_s * NS_PER_S)))
        assert since_ns <= now_ns < found.resting[worker_id][1], "it rests from now on"

    def _breaker(self, route: str, worker_id: WorkerId) -> Breaker | None:
        found = self._routes.get(route)
        if found is None or worker_id not in found.known:
            return None  # Gone: requests that were lost with it are reported after that.
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
        """Whether most others are well, so that a slow one is slow by itself. Without peers only of external
        workers anything can be said.

        When the load grows first outputs take longer everywhere, and somewhere first: a peer that takes
        nearly as long by now has the same load.
        """
        found = self._routes[route]
        peers = [found.breakers.get(each) for each in found.ready if each != worker_id]
        if not peers:
            return worker_id in found.external and found.breakers[worker_id].recent_ns > SLOW_ALONE_NS
        late_ns = found.breakers[worker_id].recent_ns / self._config.breaker.slow_factor
        fine = sum(
            peer is None or (not peer.state and peer.is_fine(now_ns) and peer.recent_ns < late_ns)
            for peer in peers
        )
        return 2 * fine > len(peers)


_STATES = {BreakerState.OPEN: "open", BreakerState.PROBING: "half-open", BreakerState.TRUSTING: "ramping up"}


def _broken(found: _Route, now_ns: int) -> frozenset[WorkerId]:
    """Ready workers that their breakers leave alone."""
    return frozenset(
        worker_id
        for worker_id, breaker in found.unwell.items()
        if worker_id in found.ready and breaker.blocks(now_ns)
    )


def _resting(found: _Route, now_ns: int) -> frozenset[WorkerId]:
    """Ready workers that have no room, as they said. A worker whose time is over is forgotten."""
    if not found.resting:
        return _NONE
    for worker_id in [each for each, (_, until_ns) in found.resting.items() if until_ns <= now_ns]:
        del found.resting[worker_id]
    return frozenset(found.resting.keys() & found.ready)

"""The hooks for plug-ins on the lives of requests, and the attempt clock: a plug-in that exists from the
first external worker on, or the first request whose client waits only so long. The crash quarantine, which
exists from the first crash of a worker on, and hedging are the others.

`FlowControl` calls each hook of each plug-in that is configured; one that is off is absent. A plug-in keeps
what it knows beside the request, not in it.

The attempt clock ends attempts that give nothing in time, so that the request continues elsewhere; and
requests whose client does not wait any longer.

    the client's bound     x-penstock-max-wait-ms, from its arrival: a request without output ends then. Half
                           of what is left of it is what an attempt at an external worker gets, if another
                           worker or model could answer
    what is usual there    how long such attempts took there of late, times a factor: external workers
                           only, if another worker or model could answer. Less while the last attempt there
                           failed, or its breaker is not closed: when it is slow, enough is known
    what any engine takes  the same while little is known of the worker (`health.first_token_s`)

An attempt is never given up for nothing: while no other place would take the request, it continues. One is
given up at a time, so that the next one is asked about what is left of those places. After its first output
none of this holds.

Of a worker of ours more is known (heartbeats, its queue, how fast it computes), so it is not bounded so. The
configuration's bounds (section `backends`) hold in any case, where the connection is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.errors import AttemptTimeout, Evicted, PenstockError
from penstock.policy.contracts import Health
from penstock.policy.estimates import AMOUNT_MAX, QuantileWindow, nearest_rank
from penstock.policy.flow import Abort, GiveUp, RequestFacts, Start, State
from penstock.policy.queueing.capacity import uncached_tokens
from penstock.policy.request import Request
from penstock.types import RequestId, Usage, WorkerId


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
        """The attempts to start, besides those of the queues, and those to end.

        Called last of all at each dispatch.
        """
        return ()

    def next_ns(self) -> int | None:
        """When `due` must be called if nothing happens until then; None: not at all."""


class Hooks:
    """The hooks of some plug-ins that do something, by name: half of all would be calls of nothing, for each
    request.
    """

    __slots__ = (
        "_extras", "attempt_lost", "due", "ending", "evictions", "finished", "first_output", "left",
        "next_ns", "queued", "refusal", "started",
    )  # fmt: skip

    def __init__(self) -> None:
        self._extras: list[Extra] = []
        self._list()

    def put(self, index: int, extra: Extra) -> None:
        """Have one more, at this place of the order in which they are asked."""
        self._extras.insert(index, extra)
        self._list()

    def _list(self) -> None:
        extras = self._extras
        self.refusal = [each.refusal for each in extras if _does(each, Extra.refusal)]
        self.queued = [each.queued for each in extras if _does(each, Extra.queued)]
        self.started = [each.started for each in extras if _does(each, Extra.started)]
        self.first_output = [each.first_output for each in extras if _does(each, Extra.first_output)]
        self.attempt_lost = [each.attempt_lost for each in extras if _does(each, Extra.attempt_lost)]
        self.ending = [each.ending for each in extras if _does(each, Extra.ending)]
        self.left = [each.left for each in extras if _does(each, Extra.left)]
        self.finished = [each.finished for each in extras if _does(each, Extra.finished)]
        self.evictions = [each.evictions for each in extras if _does(each, Extra.evictions)]
        self.due = [each.due for each in extras if _does(each, Extra.due)]
        self.next_ns = [each.next_ns for each in extras if _does(each, Extra.next_ns)]


def _does(extra: Extra, hook: Callable[..., object]) -> bool:
    return getattr(type(extra), hook.__name__) is not hook


FACTOR, QUANTILE = 4, 0.95
"""A first token is given up after so many times what 19 of 20 such prompts took there."""
FIRST_MIN_NS = 2 * NS_PER_S
"""And never sooner than this."""
DOUBT_FACTOR = 2
"""So many times where the worker is in doubt."""
SAMPLES_MIN = 20
"""With fewer of them little is known."""
UNSEEN_TOKEN_NS = 2 * NS_PER_MS
"""More time for each token of the prompt at a worker of which little is known."""
UNSEEN_STEP, UNSEEN_DOUBLINGS = 5, 3
"""After so many attempts that were given up while nothing ever came from a worker it gets twice the time, and
so often: one that is slow, and not dead, is found out to be so."""
WINDOW = 256
_KEYS_MAX = 4096
_CLASSES = 32
"""Of prompts, by the bits of their number of tokens."""
_NS_PER_US = 1000


class FirstTokens:
    """Times to first token of one gateway's external workers, by worker and class of prompt."""

    __slots__ = ("_first_token_ns", "_num_silent", "_windows")

    def __init__(self, first_token_ns: int = 0) -> None:
        """`first_token_ns`: how long an attempt may take of which little is known; 0: any time."""
        self._first_token_ns = first_token_ns
        self._windows: dict[tuple[str, WorkerId, int], QuantileWindow] = {}
        self._num_silent: dict[tuple[str, WorkerId], int] = {}
        """Attempts that were given up at a worker that has never given anything."""

    def bound_ns(self, route: str, worker: WorkerId, prompt_tokens: int, doubt_ns: int = 0) -> int:
        """How long such an attempt may take there; 0: any time. `doubt_ns`: what is slow there, where the
        worker is in doubt.
        """
        usual_us, is_known = self._usual_us(route, worker, prompt_tokens)
        usual_ns = usual_us * _NS_PER_US
        least_ns = FIRST_MIN_NS if is_known else self._least_ns(route, worker, prompt_tokens)
        bound_ns = max(least_ns, FACTOR * usual_ns) if least_ns else 0
        return min(bound_ns or doubt_ns, max(doubt_ns, DOUBT_FACTOR * usual_ns)) if doubt_ns else bound_ns

    def unseen_ns(self, prompt_tokens: int) -> int:
        """How long any engine may take for such a prompt; 0: any time."""
        return self._first_token_ns and self._first_token_ns + UNSEEN_TOKEN_NS * prompt_tokens

    def _least_ns(self, route: str, worker: WorkerId, prompt_tokens: int) -> int:
        doublings = min(UNSEEN_DOUBLINGS, self._num_silent.get((route, worker), 0) // UNSEEN_STEP)
        return self.unseen_ns(prompt_tokens) << doublings

    def _usual_us(self, route: str, worker: WorkerId, prompt_tokens: int) -> tuple[int, bool]:
        """The time that 19 of 20 such attempts take, or of those few that there were (0: none), and whether
        there were enough. A class with few samples borrows those of the classes nearest to it: the factor
        covers a prompt of twice the length, and a longer one takes at most as many times as long as it is
        longer.
        """
        size, windows = prompt_tokens.bit_length(), self._windows
        own = windows.get((route, worker, size))
        if own is not None and own.count >= SAMPLES_MIN:
            return max(1, own.quantile(QUANTILE)), True
        found: list[int] = []
        for distance in range(_CLASSES):
            for other in {size - distance, size + distance}:
                if (window := windows.get((route, worker, other))) is not None:
                    found += [amount << max(0, size - other - 1) for amount in window.amounts()]
            if len(found) >= SAMPLES_MIN:
                return max(1, nearest_rank(sorted(found), QUANTILE)), True
        return (nearest_rank(sorted(found), QUANTILE) if found else 0), False

    def took(self, route: str, worker: WorkerId, prompt_tokens: int, ttft_ns: int) -> None:
        """An attempt took so long to its first token."""
        assert ttft_ns >= 0, ttft_ns
        if self._num_silent:
            self._num_silent.pop((route, worker), None)
        if ttft_ns > FIRST_MIN_NS:  # As hardly ever: none is given up sooner where something is known.
            bound_ns = self.bound_ns(route, worker, prompt_tokens)
            if bound_ns and ttft_ns > bound_ns and self._usual_us(route, worker, prompt_tokens)[1]:
                # Nowhere else took it: as slow all the same.
                self.gave_up(route, worker, prompt_tokens, ttft_ns)
                return
        key = (route, worker, prompt_tokens.bit_length())
        window = self._windows.get(key)
        if window is None:
            if len(self._windows) >= _KEYS_MAX:
                del self._windows[next(iter(self._windows))]
            window = self._windows[key] = QuantileWindow(WINDOW)
        window.add(min(ttft_ns // _NS_PER_US, AMOUNT_MAX))

    def gave_up(self, route: str, worker: WorkerId, prompt_tokens: int, waited_ns: int) -> None:
        """An attempt was given up after so long. It counts as a little slower than what is usual, so that a
        worker which has become slow for good is taken for it, in time. One that ended sooner than any engine
        may take says nothing of a worker that has never given anything.
        """
        assert waited_ns > 0, waited_ns
        window = self._windows.get((route, worker, prompt_tokens.bit_length()))
        if window is not None:
            limit_us = window.quantile(QUANTILE) * 5 // 4 + 1
            window.add(min(waited_ns // _NS_PER_US, limit_us))
            return
        was_long = 0 < self.unseen_ns(prompt_tokens) <= waited_ns
        if was_long and not self._usual_us(route, worker, prompt_tokens)[0]:
            if len(self._num_silent) >= _KEYS_MAX:
                del self._num_silent[next(iter(self._num_silent))]
            key = (route, worker)
            self._num_silent[key] = self._num_silent.pop(key, 0) + 1


_AGAIN_NS = NS_PER_S
"""An attempt that is over its time with nowhere else to go is looked at again after so long."""


class AttemptClock(Extra):
    """All attempts of one flow control. It has one from the first external worker on, or the first request
    whose client waits only so long: other attempts have all the time that they need.
    """

    __slots__ = ("_can_leave", "_deadlines", "_due", "_firsts", "_health", "_requests")

    def __init__(
        self,
        requests: Mapping[RequestId, Request],
        health: Health,
        can_leave: Callable[[int, Request], bool],
        *,
        first_token_ns: int,
    ) -> None:
        """`requests` are all accepted ones, by reference; `can_leave` says whether one that runs could be
        answered by another worker or model now; `first_token_ns` is as for `FirstTokens`.
        """
        self._requests, self._health, self._can_leave = requests, health, can_leave
        self._firsts = FirstTokens(first_token_ns)
        self._due: list[tuple[int, RequestId, int]] = []
        """When which attempt is looked at."""
        self._deadlines: list[tuple[int, RequestId]] = []

    def queued(self, now_ns: int, request: Request) -> None:
        """See `Extra`. The deadline that it came with holds for every model that it moves to."""
        if request.facts.first_token_ns and now_ns == request.arrived_ns:
            heappush(self._deadlines, (_deadline_ns(request), request.id))

    def started(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        self._watch(now_ns, request, request.worker, request.attempt)

    def first_output(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        model_queue, worker = request.model_queue, request.worker
        if request.first_output_ns < 0 and request.hedge is None and _is_external(request, worker):
            ttft_ns = now_ns - request.dispatched_ns
            self._firsts.took(model_queue.route, worker, uncached_tokens(request), ttft_ns)

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
            tokens = uncached_tokens(request)
            self._firsts.gave_up(request.model_queue.route, worker, tokens, error.waited_ns)
        if request.hedge is not None and worker == request.worker:
            self._watch(now_ns, request, request.hedge.worker, request.hedge.attempt)

    def evictions(self, now_ns: int) -> Iterable[tuple[Request, str, PenstockError]]:
        """See `Extra`: clients that do not wait any longer."""
        return self._overdue(now_ns) if self._deadlines and self._deadlines[0][0] <= now_ns else ()

    def _overdue(self, now_ns: int) -> Iterator[tuple[Request, str, PenstockError]]:
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            request = self._requests.get(heappop(self._deadlines)[1])
            if request is not None and _is_silent(request):
                wait_ms = request.facts.first_token_ns // NS_PER_MS
                error = Evicted(
                    f"no first token within {wait_ms} ms, which is as long as the client waits",
                    retry_after_s=request.model_queue.retry_after_s(),
                )
                yield request, "late", error

    def due(self, now_ns: int) -> list[GiveUp]:
        """See `Extra`: an attempt that is over its time, one for each call."""
        while self._due and self._due[0][0] <= now_ns:
            _, request_id, attempt = heappop(self._due)
            request = self._requests.get(request_id)
            if request is None or not self._counts(request_id, attempt):
                continue
            if request.hedge is None and self._can_leave(now_ns, request):
                waited_ns = now_ns - request.dispatched_ns
                assert waited_ns > 0, "an attempt has some time"
                why = f"the worker gave no first token within {waited_ns / NS_PER_S:.1f} s"
                unseen_ns = self._firsts.unseen_ns(uncached_tokens(request))
                error = AttemptTimeout(why, waited_ns=waited_ns, unseen_ns=unseen_ns)
                return [GiveUp(request.id, error)]
            heappush(self._due, (now_ns + _AGAIN_NS, request_id, attempt))
        return []

    def next_ns(self) -> int | None:
        """See `Extra`."""
        while self._due and not self._counts(*self._due[0][1:]):
            heappop(self._due)
        while self._deadlines and not self._is_waited_for(self._deadlines[0][1]):
            heappop(self._deadlines)
        if not self._due or not self._deadlines:
            due = self._due or self._deadlines
            return due[0][0] if due else None
        return min(self._due[0][0], self._deadlines[0][0])

    def _watch(self, now_ns: int, request: Request, worker: WorkerId, attempt: int) -> None:
        """Bound an attempt that begins, or runs alone from now on."""
        model_queue = request.model_queue
        if request.first_output_ns >= 0 or not _is_external(request, worker):
            return
        doubt_ns = self._health.doubt_ns(model_queue.route, worker)
        bound_ns = self._firsts.bound_ns(model_queue.route, worker, uncached_tokens(request), doubt_ns)
        if request.facts.first_token_ns:
            deadline_ns = _deadline_ns(request)
            half_ns = max(1, (deadline_ns - now_ns) // 2)
            bound_ns = min(bound_ns or half_ns, half_ns)
        assert bound_ns >= 0, "no attempt is over before it begins"
        if bound_ns:
            heappush(self._due, (now_ns + bound_ns, request.id, attempt))

    def _counts(self, request_id: RequestId, attempt: int) -> bool:
        request = self._requests.get(request_id)
        return (
            request is not None
            and request.attempt == attempt
            and request.state is State.STARTED
            and request.first_output_ns < 0
        )

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


def _is_external(request: Request, worker: WorkerId) -> bool:
    capacity = request.model_queue.workers.get(worker)
    return capacity is not None and capacity.view.is_external

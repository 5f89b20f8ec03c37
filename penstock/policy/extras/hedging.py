"""Hedges: a request without output is started a second time, on another worker, and the first of the two
attempts that has output wins.

After Dean and Barroso, "The Tail at Scale" (CACM 2013): wait for a high percentile of the usual time, then
send a second request, and take whichever answers first. The delay alone bounds the extra load to some percent
while nothing is wrong; the budget bounds it when something is: every start pays in `hedge_share` of a hedge,
so hedges are never more than that share of the starts.

`Hedges` decides when a request is late enough and whether a hedge is paid for. `Hedging` hangs it on the
lives of requests. A second attempt begins if the first is the request's only one until then and has one
stream, nothing waits for the model, and another worker has capacity of its own, not borrowed from its queue.
It ends when one of the two attempts is dropped: then the request is an ordinary one again, on the other
worker. Both attempts are booked with the worker, the placement and the breakers like any other, the second
one under a name of its own. Pure; bounded; time is handed in.
"""

import enum
from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from penstock.clock import NS_PER_MS
from penstock.config.branch import extended
from penstock.config.fleet import HealthConfig
from penstock.errors import PenstockError
from penstock.policy.contracts import Health
from penstock.policy.estimates import AMOUNT_MAX, QuantileWindow
from penstock.policy.extras.hooks import Extra
from penstock.policy.flow import Abort, Start, State
from penstock.policy.queueing.capacity import uncached_tokens
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.request import Hedge, Request, hedge_of
from penstock.types import RequestId, WorkerId

_UNIT = 1_000_000
"""The budget is an integer, in so many parts of a hedge: nothing drifts."""
_NS_PER_US = 1000


class HedgeOutcome(enum.StrEnum):
    """The outcome of a hedge, or of the wish for one."""

    WON = "won"
    """It had the first output."""
    LOST = "lost"
    """The attempt that was there before had."""
    SAVED = "saved"
    """That one failed, and this one went on."""
    FAILED = "failed"
    """Its worker failed, and the other one went on."""
    ENDED = "ended"
    """The request ended before either had any output: its client left, or it gave way."""
    NO_ROOM = "no_room"
    """Not started: no other worker had room, or others waited for it."""
    NO_BUDGET = "no_budget"
    """Not started: too many were."""


Tell = Callable[[str, HedgeOutcome], None]
"""Hears of every outcome, with the model's name."""


class HedgeTerms(HealthConfig, frozen=True, kw_only=True):
    """When a request is late enough for a second attempt, and how many of those there may be."""

    hedge_after_ms: int = 0
    """How long a hedged request has had no output; 0: by `quantile`."""
    quantile: float = 0.98
    """Of the times from start to first output of the model's last `window` requests with prompts of about
    that length (within a factor of two, what is cached left out). Well under 1 - `hedge_share` the budget
    would go to requests that are only a little late."""
    window: int = 512
    samples_min: int = 50
    """With fewer of them nothing is hedged."""
    after_min_ms: int = 20
    """Nothing that is quicker is hedged."""
    saved_max: int = 10
    """The credit that times without any can save up."""


class Hedges:
    """One for a gateway."""

    __slots__ = ("_config", "_due", "_level", "_payment", "_tell", "_windows", "num_starts", "num_taken")

    def __init__(self, config: HealthConfig, tell: Tell) -> None:
        self._config, self._tell = extended(config, HedgeTerms), tell
        self._windows: dict[tuple[str, int], QuantileWindow] = {}
        """By model and class of prompt: long prompts take long, and a second attempt would too."""
        self._due: list[tuple[int, RequestId]] = []
        self._payment, self._level = round(config.hedge_share * _UNIT), 0
        self.num_starts = self.num_taken = 0

    def delay_ns(self, route: str, prompt_tokens: int) -> int | None:
        """After how long without output a request is hedged; None while its usual time is unknown."""
        config = self._config
        if config.hedge_after_ms:
            return config.hedge_after_ms * NS_PER_MS
        window = self._windows.get((route, prompt_tokens.bit_length()))
        if window is None or window.count < config.samples_min:
            return None
        return max(config.after_min_ms * NS_PER_MS, window.quantile(config.quantile) * _NS_PER_US)

    def started(
        self, now_ns: int, route: str, request_id: RequestId, *, prompt_tokens: int, first: bool
    ) -> None:
        """A request was started; `first`: for the first time, so that it may be hedged later.

        `prompt_tokens` are to be computed.
        """
        self.num_starts += 1
        self._level = min(self._config.saved_max * _UNIT, self._level + self._payment)
        if first and (delay_ns := self.delay_ns(route, prompt_tokens)) is not None:
            heappush(self._due, (now_ns + delay_ns, request_id))

    def began(self, route: str, ttft_ns: int, *, prompt_tokens: int) -> None:
        """A request had its first output so long after it was first started: hedged or not."""
        assert ttft_ns >= 0, ttft_ns
        key = (route, prompt_tokens.bit_length())
        window = self._windows.get(key)
        if window is None:  # As many as there are models, times the bits of a prompt's length.
            window = self._windows[key] = QuantileWindow(self._config.window)
        window.add(min(ttft_ns // _NS_PER_US, AMOUNT_MAX))

    def due(self, now_ns: int) -> RequestId | None:
        """The next request whose time has come; it is asked for once."""
        if self._due and self._due[0][0] <= now_ns:
            return heappop(self._due)[1]
        return None

    def next_ns(self, is_silent: Callable[[RequestId], bool]) -> int | None:
        """When the next one is due, of those that still have no output."""
        due = self._due
        while due and not is_silent(due[0][1]):
            heappop(due)
        return due[0][0] if due else None

    def take(self) -> bool:
        """Whether one more may be started now; then it counts."""
        if self._level < _UNIT:
            return False
        self._level -= _UNIT
        self.num_taken += 1
        assert self._level >= 0, "hedges are paid for"
        return True

    def tell(self, route: str, outcome: HedgeOutcome) -> None:
        """The outcome of one."""
        self._tell(route, outcome)


class Hedging(Extra):
    """All hedges of one flow control."""

    __slots__ = ("_health", "_hedges", "_on_change", "_on_lost", "_requests")

    def __init__(
        self,
        hedges: Hedges,
        health: Health,
        requests: Mapping[RequestId, Request],
        *,
        on_lost: Callable[[int, Request, WorkerId, PenstockError | None], None],
        on_change: Callable[[ModelQueue], None],
    ) -> None:
        """`requests` are all accepted ones, by reference; `on_lost` is called for an attempt that failed,
        `on_change` for a model whose workers have capacity again.
        """
        self._hedges, self._health, self._requests = hedges, health, requests
        self._on_lost, self._on_change = on_lost, on_change

    # --- from the driver --------------------------------------------------------------------------

    def won(self, now_ns: int, request: Request, attempt: int) -> Abort:
        """Of two attempts this one has its first output, or has ended without any: the other must be
        aborted.
        """
        assert request.hedge is not None, f"{request.id} runs once"
        is_second = attempt == request.hedge.attempt
        loser = request.attempt if is_second else request.hedge.attempt
        return self._drop(now_ns, request, loser, HedgeOutcome.WON if is_second else HedgeOutcome.LOST)

    def lost(self, now_ns: int, request: Request, attempt: int, error: PenstockError | None) -> None:
        """Of two attempts this one failed, or was aborted (no error); the other continues."""
        assert request.hedge is not None, f"{request.id} runs once"
        is_second = attempt == request.hedge.attempt
        self._on_lost(now_ns, request, request.hedge.worker if is_second else request.worker, error)
        outcome = HedgeOutcome.FAILED if is_second else HedgeOutcome.SAVED
        lost = self._drop(now_ns, request, attempt, HedgeOutcome.ENDED if error is None else outcome, error)
        if error is not None:
            request.model_queue.failed(lost.worker_id, request)

    # --- hooks ------------------------------------------------------------------------------------

    def started(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        tokens, first = uncached_tokens(request), self._may_hedge(request)
        self._hedges.started(now_ns, request.model_queue.route, request.id, prompt_tokens=tokens, first=first)

    def first_output(self, now_ns: int, request: Request) -> None:
        """See `Extra`: requests that were not tried again say what is usual."""
        if request.hedged_ns >= 0 or request.attempts == 1:
            since_ns = request.hedged_ns if request.hedged_ns >= 0 else request.dispatched_ns
            tokens = uncached_tokens(request)
            self._hedges.began(request.model_queue.route, now_ns - since_ns, prompt_tokens=tokens)

    def ending(self, now_ns: int, request: Request) -> Abort | None:
        """See `Extra`: the second attempt is dropped first."""
        if request.hedge is None:
            return None
        return self._drop(now_ns, request, request.hedge.attempt, HedgeOutcome.ENDED)

    def due(self, now_ns: int) -> list[Start]:
        """See `Extra`: start a second time what has waited long enough, where that is allowed."""
        found = list[Start]()
        while (request_id := self._hedges.due(now_ns)) is not None:
            if self._is_silent(request_id):
                start = self._start_hedge(now_ns, self._requests[request_id])
                if start is not None:
                    found.append(start)
        return found

    def next_ns(self) -> int | None:
        """See `Extra`."""
        return self._hedges.next_ns(self._is_silent)

    # --- inside -----------------------------------------------------------------------------------

    def _may_hedge(self, request: Request) -> bool:
        return (
            request.attempts == 1 and request.facts.choices == 1 and not request.model_queue.is_apart(request)
        )

    def _is_silent(self, request_id: RequestId) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.state is State.STARTED and self._may_hedge(request)

    def _drop(
        self,
        now_ns: int,
        request: Request,
        attempt: int,
        outcome: HedgeOutcome,
        error: PenstockError | None = None,
    ) -> Abort:
        """One of two attempts is over, and gives back what it holds.

        Without an `error` its worker is not blamed.
        """
        hedge, model_queue = request.hedge, request.model_queue
        assert hedge is not None, f"{request.id} runs once"
        assert attempt in (request.attempt, hedge.attempt), f"{request.id} has no attempt {attempt}"
        request.hedge = None
        worker, work = hedge.worker, hedge.work
        if attempt == request.attempt:
            worker, work = request.worker, request.booked
            request.worker, request.dispatched_ns = hedge.worker, hedge.started_ns
            request.attempt, request.hedge_booked = hedge.attempt, hedge.work
        model_queue.release(now_ns, worker, work)
        self._health.ended(now_ns, model_queue.route, worker, error)
        self._hedges.tell(model_queue.route, outcome)
        self._on_change(model_queue)
        return Abort(request.id, worker, attempt)

    def _start_hedge(self, now_ns: int, request: Request) -> Start | None:
        model_queue, attempt = request.model_queue, request.attempts + 1
        name = RequestId(f"{request.id}{MARK}{attempt}")
        work = hedge_of(request, name)
        worker = model_queue.place_hedge(now_ns, work, request.worker)
        if worker is None:
            self._hedges.tell(model_queue.route, HedgeOutcome.NO_ROOM)
            return None
        if not self._hedges.take():
            self._hedges.tell(model_queue.route, HedgeOutcome.NO_BUDGET)
            return None
        model_queue.book(now_ns, work, worker)
        request.hedge = Hedge(worker.id, work, attempt, now_ns)
        request.hedged_ns, request.attempts = request.dispatched_ns, attempt
        self._health.started(now_ns, model_queue.route, worker.id)
        order = model_queue.queue.order_of(request)
        return Start(request.id, model_queue.route, worker.id, order, attempt, is_hedge=True)


MARK = "~"
"""Between a request's name and the number of an attempt, in the name under which a second attempt is
booked."""

"""The cost of workers' time, shared out to the requests that they worked for, so that the parts sum to the
bill.

An engine worker reports what each request took (`ReportedCost`). Of an external one the gateway sees tokens,
not steps: a prompt counts as work when its first output comes, and each slice of an answer as the tokens
computed, each of which read the context before it. `Meters` brings what the gateway sees of all workers here.

    bill = price per hour * time
         = requests (their shares) + platform (probes and the like, and what rounding leaves)
         + idle (it is in service and nothing ran) + reserve (it is paid for and not in service: it starts,
           loads its model, is doubted or was taken out of service)

Time is cut into intervals (between two reports of the worker's `Stats`, or any others). While at least one
request runs, time goes into the interval's pot. At the interval's end, the pot is divided among the requests
by the work that they had done in it, w_r / sum(w); a request that ends in between takes its proportion of
what the pot has until then. A busy interval in which no work was reported (a long prompt under way) is
divided equally among what runs.

Everything is counted in price times nanoseconds, in whole numbers: nothing is lost between the accounts, and
a request's share is rounded down to whole millionths of the currency once, when it ends; what that leaves
goes to `platform`.

Other gateways may use the same worker. Then a part of the time is theirs: as many of the requests that run
there. That is an estimate, for the number is as old as the worker's last report. A worker that tells by
itself what each request took needs none of this, and its shares are right however many gateways there are:
`ReportedCost`.

The weight of work follows the law of step times (schedule/): w = a * tokens computed + b * KV tokens read, so
that of two requests with equal tokens the one with the longer context costs more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.clock import NS_PER_S
from penstock.policy.limits.price import PriceList
from penstock.policy.request import Request
from penstock.types import TOKEN_WEIGHT, RequestId, Usage, WorkerId

HOUR_NS = 3600 * NS_PER_S
"""Units of price times nanoseconds in one millionth of the currency."""
KV_TOKEN_WEIGHT = 1
"""Beside `TOKEN_WEIGHT`; a fitted law of step times knows better: hand its ratio in."""


def work_weight(*, computed_tokens: int, kv_tokens_read: int) -> int:
    """The weight of some work: tokens run through the model, and for each of them the tokens that its
    attention read.
    """
    return TOKEN_WEIGHT * computed_tokens + KV_TOKEN_WEIGHT * kv_tokens_read


@dataclass(slots=True, frozen=True, kw_only=True)
class WorkerCostAccount:
    """Where one worker's bill went. All amounts in millionths of the currency times `HOUR_NS`."""

    bill: int
    requests: int
    """Of requests that ended."""
    running: int
    """Shares of requests that still run, and the open interval's pot."""
    idle: int
    platform: int
    reserve: int = 0
    elsewhere: int = 0
    """Of requests of other gateways."""

    def micros(self) -> "WorkerCostAccount":
        """The same in millionths, rounded down."""
        return WorkerCostAccount(
            bill=self.bill // HOUR_NS,
            requests=self.requests // HOUR_NS,
            running=self.running // HOUR_NS,
            idle=self.idle // HOUR_NS,
            platform=self.platform // HOUR_NS,
            reserve=self.reserve // HOUR_NS,
            elsewhere=self.elsewhere // HOUR_NS,
        )


@dataclass(slots=True)
class _Reported:
    is_platform: bool
    weight: int = 0
    """Work in the open interval."""
    share: int = 0
    """From intervals that are over."""


class AcceleratorCost:
    """One worker's time, from `now_ns` on."""

    def __init__(self, now_ns: int, micros_per_hour: int) -> None:
        assert micros_per_hour >= 0, micros_per_hour
        self._price = micros_per_hour
        self._seen_ns = now_ns
        self._running: dict[RequestId, _Reported] = {}
        self._weight = self._pot = 0
        self._others = 0
        self._bill = self._requests = self._idle = self._reserve = self._platform = self._elsewhere = 0
        self._in_service = True

    def reprice(self, now_ns: int, micros_per_hour: int) -> None:
        """From now on it costs this much."""
        self._pass_time(now_ns)
        self._price = micros_per_hour

    def serves(self, now_ns: int, *, in_service: bool, is_lost: bool) -> None:
        """From now on, time in which nothing runs is idle (in service) or reserve."""
        del is_lost  # Requests that ran there are settled by themselves.
        self._pass_time(now_ns)
        self._in_service = in_service

    def beside(self, now_ns: int, num_requests: int) -> None:
        """So many requests run there altogether, as the worker says: those that are not known here are
        others'.
        """
        self._pass_time(now_ns)
        self._others = max(0, num_requests - len(self._running))

    def started(self, now_ns: int, request_id: RequestId, *, is_platform: bool = False) -> None:
        """The worker has a request. `is_platform`: no tenant pays for it (a probe, a hedge that lost)."""
        assert request_id not in self._running, request_id
        self._pass_time(now_ns)
        self._running[request_id] = _Reported(is_platform)

    def worked(self, request_id: RequestId, weight: int) -> None:
        """It has done this much for a request since the last call (`work_weight`)."""
        assert weight >= 0, weight
        self._running[request_id].weight += weight
        self._weight += weight

    def interval(self, now_ns: int) -> None:
        """An interval is over: divide its pot. Costs O(running); call it every second or so."""
        self._pass_time(now_ns)
        total, pot = self._weight, self._pot
        if not self._running:
            assert pot == 0, pot  # The last request took it all.
            return
        for running in self._running.values():
            share = pot * running.weight // total if total else pot // len(self._running)
            running.share += share
            running.weight = 0
            self._pot -= share
        self._weight = 0
        assert self._pot >= 0, "shares add up to no more than the pot"
        self._platform += self._pot  # The rest of dividing whole numbers.
        self._pot = 0

    def settle(self, now_ns: int, request_id: RequestId) -> int:
        """A request is over (or left this worker); its cost in millionths."""
        self._pass_time(now_ns)
        running = self._running.pop(request_id)
        num = len(self._running) + 1
        share = self._pot * running.weight // self._weight if self._weight else self._pot // num
        if num == 1:
            share = self._pot
        self._pot -= share
        self._weight -= running.weight
        assert self._pot >= 0 <= self._weight, "a share is a part of the pot"
        total = running.share + share
        if running.is_platform:
            self._platform += total
            return 0
        micros, rest = divmod(total, HOUR_NS)
        self._requests += total - rest
        self._platform += rest
        return micros

    def accounts(self, now_ns: int) -> WorkerCostAccount:
        """Where the money went until now; the parts sum to the bill."""
        self._pass_time(now_ns)
        running = self._pot + sum(running.share for running in self._running.values())
        return WorkerCostAccount(
            bill=self._bill,
            requests=self._requests,
            running=running,
            idle=self._idle,
            platform=self._platform,
            reserve=self._reserve,
            elsewhere=self._elsewhere,
        )

    def _pass_time(self, now_ns: int) -> None:
        amount = self._price * (now_ns - self._seen_ns)
        assert amount >= 0, "time goes forward"
        self._seen_ns = now_ns
        self._bill += amount
        if not self._running and not self._others:
            if self._in_service:
                self._idle += amount
            else:
                self._reserve += amount
            return
        mine = amount * len(self._running) // (len(self._running) + self._others)
        assert 0 <= mine <= amount, "others pay for their part"
        self._pot += mine
        self._elsewhere += amount - mine


class ReportedCost:
    """The time of one worker that counts itself how long it had work, and what each request took of that.

    Every gateway hears the same, so each of them knows the bill and the idle part; a request's share is known
    to the one gateway that it came through. The part of the busy time that no request pays is the platform's:
    probes, attempts that lost, workers that died.
    """

    def __init__(self, now_ns: int, micros_per_hour: int) -> None:
        self._price = micros_per_hour
        self._began_ns = now_ns
        self._reported_ns: int | None = None
        self._has_work = False
        self._in_service = True
        self._counted_ns = 0
        self._floor_ns: int | None = None
        self.busy = self.idle = self.reserve = self.floor = 0
        """In price times nanoseconds, as in `WorkerCostAccount`; none ever falls. `floor` is what its work
        would cost at the least (`planning/roofline.py`)."""

    def reprice(self, now_ns: int, micros_per_hour: int) -> None:
        """From now on it costs this much."""
        self.pass_time(now_ns)
        self._price = micros_per_hour

    def report(self, now_ns: int, busy_ns: int, floor_ns: int, *, has_work: bool) -> None:
        """It says that it had work for `busy_ns` since its start, which would have taken `floor_ns` at the
        least; less than before: it was started again.
        """
        if self._reported_ns is None and busy_ns <= now_ns - self._began_ns:
            self._reported_ns = self._floor_ns = 0  # All of it was done since this gateway knows it.
        new_ns = _growth(self._reported_ns, busy_ns)
        self._reported_ns, self._has_work = busy_ns, has_work
        self._counted_ns += new_ns
        self.busy += self._price * new_ns
        self.floor += self._price * _growth(self._floor_ns, floor_ns)
        self._floor_ns = floor_ns
        self.pass_time(now_ns)

    def serves(self, now_ns: int, *, in_service: bool, is_lost: bool) -> None:
        """From now on, time without work is idle (in service) or reserve.

        `is_lost`: it tells nothing more of what it had, so that was busy until now, and no request pays for
        it.
        """
        if is_lost and self._has_work:
            self._has_work = False
            lost_ns = max(0, now_ns - self._began_ns - self._counted_ns)
            self._counted_ns += lost_ns
            self.busy += self._price * lost_ns
        self.pass_time(now_ns)
        self._in_service = in_service

    def pass_time(self, now_ns: int) -> None:
        """Without work, what it did not tell of was idle, or reserve.

        Should some of that turn out to have been busy, that time stands still until the clock has caught up.
        With work, the next report will tell.
        """
        rest_ns = now_ns - self._began_ns - self._counted_ns
        if rest_ns > 0 and not self._has_work:
            self._counted_ns += rest_ns
            if self._in_service:
                self.idle += self._price * rest_ns
            else:
                self.reserve += self._price * rest_ns


def _growth(before: int | None, now: int) -> int:
    """The growth of a worker's counter: nothing if it was not heard before, all of it after a new start."""
    if before is None:
        return 0
    grown = now - before if now >= before else now
    assert grown >= 0, "a worker's counters only grow"
    return grown


def share_micros(device_ns: int, micros_per_hour: int) -> int:
    """The cost of so much of a worker's time, in millionths, rounded down."""
    return device_ns * micros_per_hour // HOUR_NS


INTERVAL_NS = NS_PER_S


@dataclass(slots=True)
class _Running:
    """A request that a worker has."""

    worker: WorkerId
    tokens: int = 0
    """Answer tokens whose work was counted."""


@dataclass(slots=True)
class Costs:
    """The cost of the workers of one model while this gateway knew them, in millionths.

    No amount ever falls.
    """

    busy: int = 0
    """While they had requests, whosever those were: every gateway knows it."""
    idle: int = 0
    reserve: int = 0
    """While they were not in service."""
    floor: int = 0
    """The least that the work would have cost, of workers that report it."""
    charged: int = 0
    """Of the busy time, what requests of this gateway paid."""


class Meters:
    """One account for each worker that has a price; without prices it does nothing."""

    def __init__(self, prices: PriceList, *, is_shared: bool = False) -> None:
        """`is_shared`: other gateways use the workers too."""
        self._prices, self._is_shared, self.are_any = prices, is_shared, False
        """Whether there was ever a worker that has a price: before, nothing need be told of requests."""
        self._routes: dict[WorkerId, str] = {}
        self._accounts: dict[WorkerId, AcceleratorCost] = {}
        self._reported: dict[WorkerId, ReportedCost] = {}
        """Of workers that count by themselves."""
        self._costs: dict[str, Costs] = {}
        """By model: what was charged, and what workers cost that are gone."""
        self._running: dict[RequestId, _Running] = {}
        self._beside: dict[RequestId, _Running] = {}
        """Second attempts that run at once with the first."""
        self._left: set[WorkerId] = set()
        self._interval_ns = 0

    def has_worker(self, now_ns: int, route: str, worker: WorkerId, *, tells: bool) -> None:
        """A worker is there, and costs money from now on.

        `tells`: what each request took of its time, by itself.
        """
        price = self._prices.accelerator_micros_per_hour(route)
        self._left.discard(worker)
        if not price or worker in self._accounts or worker in self._reported:
            return
        self._routes[worker], self.are_any = route, True
        self._costs.setdefault(route, Costs())
        if tells:
            self._reported[worker] = ReportedCost(now_ns, price)
        else:
            self._accounts[worker] = AcceleratorCost(now_ns, price)

    def serves(self, now_ns: int, worker: WorkerId, *, in_service: bool, is_lost: bool = False) -> None:
        """Whether a worker takes requests now. `is_lost`: nothing of what it had runs any more."""
        if (account := self._reported.get(worker) or self._accounts.get(worker)) is not None:
            account.serves(now_ns, in_service=in_service, is_lost=is_lost)

    def reported(
        self, now_ns: int, worker: WorkerId, *, busy_ns: int, num_requests: int, floor_ns: int = 0
    ) -> None:
        """A worker's report of itself: how long it had work since it was started, what it has now, and how
        long its work would have taken at the least.
        """
        if (cost := self._reported.get(worker)) is not None:
            cost.report(now_ns, busy_ns, floor_ns, has_work=num_requests > 0)
        elif self._is_shared and (account := self._accounts.get(worker)) is not None:
            account.beside(now_ns, num_requests)

    def left(self, now_ns: int, worker: WorkerId) -> None:
        """A worker is gone: it costs nothing more once what it ran has been settled."""
        if (cost := self._reported.pop(worker, None)) is not None:
            cost.serves(now_ns, in_service=False, is_lost=True)
            _add_reported(self._costs[self._routes.pop(worker)], cost)
        if worker in self._accounts:
            self._left.add(worker)
            self._close(now_ns, worker)

    def started(self, now_ns: int, request: Request) -> None:
        """A request was sent to its worker."""
        if (account := self._accounts.get(request.worker)) is not None:
            self._running[request.id] = _Running(request.worker, request.completion_tokens)
            account.started(now_ns, request.id)

    def started_beside(self, now_ns: int, request: Request, worker: WorkerId) -> None:
        """It was sent to a second worker too."""
        if (account := self._accounts.get(worker)) is not None:
            self._beside[request.id] = _Running(worker, request.completion_tokens)
            account.started(now_ns, request.id)

    def dropped(self, now_ns: int, request: Request, *, second: bool) -> None:
        """One of two attempts is over. The operator of the worker pays its cost."""
        other = self._beside.pop(request.id, None)
        gone = other if second else self._running.pop(request.id, None)
        if not second and other is not None:
            self._running[request.id] = other
        if gone is not None:
            self._accounts[gone.worker].settle(now_ns, request.id)
            self._close(now_ns, gone.worker)

    def copied(self, now_ns: int, worker: WorkerId, copy_id: RequestId) -> None:
        """A copy of a request was sent to a worker: no tenant pays for it."""
        if (account := self._accounts.get(worker)) is not None:
            self._running[copy_id] = _Running(worker)
            account.started(now_ns, copy_id, is_platform=True)

    def copy_ended(self, now_ns: int, copy_id: RequestId, usage: Usage) -> None:
        """It is over."""
        if (running := self._running.get(copy_id)) is not None:
            prompt, answer = usage.prompt_tokens, usage.completion_tokens
            self._worked(running, copy_id, prompt - usage.cached_tokens, prompt // 2)
            self._worked(running, copy_id, answer, prompt + answer)
            del self._running[copy_id]
            self._accounts[running.worker].settle(now_ns, copy_id)
            self._close(now_ns, running.worker)

    def began(self, request: Request) -> None:
        """Its first output is here: the prompt is done."""
        if (running := self._running.get(request.id)) is not None:
            computed = request.facts.prompt_tokens - request.counted_cached_tokens
            self._worked(running, request.id, computed, request.facts.prompt_tokens // 2)

    def produced(self, request: Request) -> None:
        """More of its answer is here, as flow control has counted it."""
        if (running := self._running.get(request.id)) is not None:
            new, running.tokens = request.completion_tokens - running.tokens, request.completion_tokens
            context = request.facts.prompt_tokens + request.completion_tokens // request.facts.choices
            self._worked(running, request.id, max(0, new), context)

    def ended(self, now_ns: int, request: Request) -> int:
        """It has left its worker: what it cost there, in millionths; 0 if that has no price, or tells at the
        end.
        """
        if request.id in self._beside:  # Both attempts were aborted.
            self.dropped(now_ns, request, second=True)
        running = self._running.get(request.id)
        if running is None:
            return 0
        self.produced(request)
        del self._running[request.id]
        cost = self._accounts[running.worker].settle(now_ns, request.id)
        self._close(now_ns, running.worker)
        return cost

    def settled(self, now_ns: int, request: Request, before_micros: int) -> int:
        """It has ended: what it cost on all its workers, in millionths.

        `before_micros` of it was told by `ended`.
        """
        costs = self._costs.get(request.facts.route)
        if costs is None:
            return before_micros
        total = before_micros + self.ended(now_ns, request)
        if request.usage is not None and request.usage.device_ns:
            price = self._prices.accelerator_micros_per_hour(request.facts.route)
            total += share_micros(request.usage.device_ns, price)
        costs.charged += total
        return total

    def tick(self, now_ns: int) -> None:
        """Close the interval if it has been long enough. Costs O(running) then."""
        if now_ns - self._interval_ns < INTERVAL_NS:
            return
        self._interval_ns = now_ns
        for worker, account in (*self._accounts.items(), *self._reported.items()):
            account.reprice(now_ns, self._prices.accelerator_micros_per_hour(self._routes[worker]))
            if isinstance(account, AcceleratorCost):
                account.interval(now_ns)

    def costs(self, now_ns: int) -> Mapping[str, Costs]:
        """The cost of the workers of each model until now."""
        found = {route: replace(each) for route, each in self._costs.items()}
        for worker, cost in self._reported.items():
            cost.pass_time(now_ns)
            _add_reported(found[self._routes[worker]], cost)
        for worker, account in self._accounts.items():
            _add(found[self._routes[worker]], account, now_ns)
        return found

    def _close(self, now_ns: int, worker: WorkerId) -> None:
        """Drop the account of a worker that is gone and runs nothing."""
        running = (*self._running.values(), *self._beside.values())
        if worker in self._left and all(each.worker != worker for each in running):
            self._left.remove(worker)
            _add(self._costs[self._routes.pop(worker)], self._accounts.pop(worker), now_ns)

    def _worked(self, running: _Running, request_id: RequestId, tokens: int, context: int) -> None:
        weight = work_weight(computed_tokens=tokens, kv_tokens_read=tokens * context)
        self._accounts[running.worker].worked(request_id, weight)


def _add(costs: Costs, account: AcceleratorCost, now_ns: int) -> None:
    found = account.accounts(now_ns)
    costs.busy += (found.bill - found.idle - found.reserve) // HOUR_NS
    costs.idle += found.idle // HOUR_NS
    costs.reserve += found.reserve // HOUR_NS


def _add_reported(costs: Costs, cost: ReportedCost) -> None:
    costs.busy += cost.busy // HOUR_NS
    costs.idle += cost.idle // HOUR_NS
    costs.reserve += cost.reserve // HOUR_NS
    costs.floor += cost.floor // HOUR_NS

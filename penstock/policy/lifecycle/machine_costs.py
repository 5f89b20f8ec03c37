"""What the workers' time costs, and whose it was: drives `policy/limits/accelerator_cost.py` with what the
gateway sees.

Our own workers tell what each request took. Of others the gateway sees tokens, not steps: a prompt counts as
work when its first output comes, and each slice of an answer as the tokens computed, each of which read the
context before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.clock import NS_PER_S
from penstock.policy.limits.accelerator_cost import (
    HOUR_NS,
    AcceleratorCost,
    ReportedCost,
    share_micros,
    work_weight,
)
from penstock.policy.limits.price import PriceList
from penstock.policy.requests.request import Request
from penstock.types import RequestId, WorkerId

INTERVAL_NS = NS_PER_S


@dataclass(slots=True)
class _Running:
    """A request that a worker has."""

    worker: WorkerId
    tokens: int = 0
    """Answer tokens whose work was counted."""


@dataclass(slots=True)
class Costs:
    """What the workers of one model have cost while this gateway knew them, in millionths.

    No amount ever falls.
    """

    busy: int = 0
    """While they had requests, whosever those were: every gateway knows it."""
    idle: int = 0
    charged: int = 0
    """Of the busy time, what requests of this gateway paid."""


class Meters:
    """One account for each worker that has a price; without prices it does nothing."""

    def __init__(self, prices: PriceList, *, is_shared: bool = False) -> None:
        """`is_shared`: other gateways use the workers too."""
        self._prices, self._is_shared = prices, is_shared
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
        self._routes[worker] = route
        self._costs.setdefault(route, Costs())
        if tells:
            self._reported[worker] = ReportedCost(now_ns, price)
        else:
            self._accounts[worker] = AcceleratorCost(now_ns, price)

    def reported(self, now_ns: int, worker: WorkerId, *, busy_ns: int, num_requests: int) -> None:
        """What a worker says of itself: how long it had work since it was started, and what it has now."""
        if (cost := self._reported.get(worker)) is not None:
            cost.report(now_ns, busy_ns, has_work=num_requests > 0)
        elif self._is_shared and (account := self._accounts.get(worker)) is not None:
            account.beside(now_ns, num_requests)

    def left(self, now_ns: int, worker: WorkerId) -> None:
        """A worker is gone: it costs nothing more once what it ran has been settled."""
        if (cost := self._reported.pop(worker, None)) is not None:
            cost.pass_time(now_ns)
            costs = self._costs[self._routes.pop(worker)]
            costs.busy += cost.busy // HOUR_NS
            costs.idle += cost.idle // HOUR_NS
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
        """One of two attempts is over. What it cost is paid by whoever runs the worker."""
        other = self._beside.pop(request.id, None)
        gone = other if second else self._running.pop(request.id, None)
        if not second and other is not None:
            self._running[request.id] = other
        if gone is not None:
            self._accounts[gone.worker].settle(now_ns, request.id)
            self._close(now_ns, gone.worker)

    def began(self, request: Request) -> None:
        """Its first output is here: the prompt is done."""
        if (running := self._running.get(request.id)) is not None:
            computed = request.facts.prompt_tokens - request.cached_tokens
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
        """What the workers of each model have cost until now."""
        found = {route: Costs(each.busy, each.idle, each.charged) for route, each in self._costs.items()}
        for worker, cost in self._reported.items():
            costs = found[self._routes[worker]]
            costs.busy += cost.busy // HOUR_NS
            costs.idle += cost.idle // HOUR_NS
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
    costs.busy += (found.bill - found.idle) // HOUR_NS
    costs.idle += found.idle // HOUR_NS

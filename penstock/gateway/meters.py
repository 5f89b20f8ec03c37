"""What the workers' time costs, and whose it was: drives `policy/accelerator_cost.py` with what the gateway sees.

The gateway sees tokens, not steps: a prompt counts as work when its first output comes, and each slice of an answer as the
tokens computed, each of which read the context before it.
"""

from dataclasses import dataclass

from penstock.clock import NS_PER_S
from penstock.policy.accelerator_cost import AcceleratorCost, work_weight
from penstock.policy.flow import Flow
from penstock.policy.price import PriceList
from penstock.types import RequestId, WorkerId

INTERVAL_NS = NS_PER_S


@dataclass(slots=True)
class _Running:
    """A request that a worker has."""

    worker: WorkerId
    tokens: int = 0
    """Answer tokens whose work was counted."""


class Meters:
    """One account for each worker that has a price; without prices it does nothing."""

    def __init__(self, prices: PriceList) -> None:
        self._prices = prices
        self._accounts: dict[WorkerId, AcceleratorCost] = {}
        self._running: dict[RequestId, _Running] = {}
        self._beside: dict[RequestId, _Running] = {}
        """Second attempts that run at once with the first."""
        self._left: set[WorkerId] = set()
        self._interval_ns = 0

    def has_worker(self, now_ns: int, route: str, worker: WorkerId) -> None:
        """A worker is there, and costs money from now on."""
        price = self._prices.accelerator_micros_per_hour(route)
        self._left.discard(worker)
        if price and worker not in self._accounts:
            self._accounts[worker] = AcceleratorCost(now_ns, price)

    def left(self, worker: WorkerId) -> None:
        """A worker is gone: it costs nothing more once what it ran has been settled."""
        if worker in self._accounts:
            self._left.add(worker)
            self._close(worker)

    def started(self, now_ns: int, flow: Flow) -> None:
        """A request was sent to its worker."""
        if (account := self._accounts.get(flow.worker)) is not None:
            self._running[flow.id] = _Running(flow.worker, flow.completion_tokens)
            account.started(now_ns, flow.id)

    def started_beside(self, now_ns: int, flow: Flow, worker: WorkerId) -> None:
        """It was sent to a second worker too."""
        if (account := self._accounts.get(worker)) is not None:
            self._beside[flow.id] = _Running(worker, flow.completion_tokens)
            account.started(now_ns, flow.id)

    def dropped(self, now_ns: int, flow: Flow, *, second: bool) -> None:
        """One of two attempts is over. What it cost is paid by whoever runs the worker."""
        other = self._beside.pop(flow.id, None)
        gone = other if second else self._running.pop(flow.id, None)
        if not second and other is not None:
            self._running[flow.id] = other
        if gone is not None:
            self._accounts[gone.worker].settle(now_ns, flow.id)
            self._close(gone.worker)

    def began(self, flow: Flow) -> None:
        """Its first output is here: the prompt is done."""
        if (running := self._running.get(flow.id)) is not None:
            computed = flow.arrival.prompt_tokens - flow.cached_tokens
            self._worked(running, flow.id, computed, flow.arrival.prompt_tokens // 2)

    def produced(self, flow: Flow) -> None:
        """More of its answer is here, as flow control has counted it."""
        if (running := self._running.get(flow.id)) is not None:
            new, running.tokens = flow.completion_tokens - running.tokens, flow.completion_tokens
            context = flow.arrival.prompt_tokens + flow.completion_tokens // flow.arrival.choices
            self._worked(running, flow.id, max(0, new), context)

    def ended(self, now_ns: int, flow: Flow) -> int:
        """It has left its worker: what it cost, in millionths; 0 if that has no price."""
        running = self._running.get(flow.id)
        if running is None:
            return 0
        self.produced(flow)
        del self._running[flow.id]
        cost = self._accounts[running.worker].settle(now_ns, flow.id)
        self._close(running.worker)
        return cost

    def tick(self, now_ns: int) -> None:
        """Close the interval if it has been long enough. Costs O(running) then."""
        if now_ns - self._interval_ns >= INTERVAL_NS:
            self._interval_ns = now_ns
            for account in self._accounts.values():
                account.interval(now_ns)

    def _close(self, worker: WorkerId) -> None:
        """Drop the account of a worker that is gone and runs nothing."""
        running = (*self._running.values(), *self._beside.values())
        if worker in self._left and all(each.worker != worker for each in running):
            self._left.remove(worker)
            del self._accounts[worker]

    def _worked(self, running: _Running, request_id: RequestId, tokens: int, context: int) -> None:
        weight = work_weight(computed_tokens=tokens, kv_tokens_read=tokens * context)
        self._accounts[running.worker].worked(request_id, weight)

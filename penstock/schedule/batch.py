"""The requests that run: in which order, with which rows, holding which blocks."""

from bisect import bisect_left, insort

from penstock.kv.manager import KVManager
from penstock.schedule.request import Request, Status
from penstock.schedule.rows import RowTable
from penstock.types import BLOCK_TOKENS


class Batch:
    """Every running request. To enter it takes a row and cached blocks; to leave gives everything back."""

    def __init__(self, manager: KVManager, num_rows: int) -> None:
        self.manager = manager
        self.running: list[Request] = []
        """By `order`: who came last is the first to be preempted."""
        self.rows = RowTable(num_rows)
        self.releases = 0
        """How often blocks were given back: what found no room may look again."""

    def enter(self, request: Request, hits: tuple[int, ...]) -> None:
        """Give the request a row and its cached prefix."""
        self.manager.adopt(request.table, hits)
        request.num_computed = len(hits) * BLOCK_TOKENS
        request.move_to(Status.RUNNING)
        self.rows.assign(request)
        insort(self.running, request, key=_order)

    def leave(self, request: Request) -> None:
        """Take the request out of the order; it still holds its row and its blocks."""
        index = bisect_left(self.running, request.order, key=_order)
        left = self.running.pop(index)
        assert left is request

    def release(self, request: Request, *, bad: bool = False) -> None:
        """Give back a request's row and blocks. No step may be using them."""
        self.manager.release(request.table, bad=bad)
        self.rows.release(request)
        self.releases += 1


def _order(request: Request) -> tuple[int, int, int]:
    return request.order

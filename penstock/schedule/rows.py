"""Rows: the small numbers by which the scheduler and the runner speak of running requests.

Every row that was released is reported in the next plan. Rows are only ever assigned while a plan is
made, and the runner applies `freed_rows` before `new_rows`: so it never sees one row with two requests.
"""

from heapq import heappop, heappush

from penstock.schedule.request import Request


class RowTable:
    """Rows `0 .. num_rows - 1`; the lowest that is free is given out first."""

    __slots__ = ("_free", "_freed", "_requests")

    def __init__(self, num_rows: int) -> None:
        self._requests: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows))  # A heap.
        self._freed: list[int] = []

    def assign(self, request: Request) -> int:
        """Give the request a row. There must be one: no more requests run than there are rows."""
        assert request.row < 0, f"{request.request_id} has row {request.row} already"
        row = heappop(self._free)
        assert self._requests[row] is None, f"row {row} is taken"
        self._requests[row] = request
        request.row = row
        return row

    def release(self, request: Request) -> None:
        """Take the request's row back; the next plan must report it."""
        assert self._requests[request.row] is request, f"{request.request_id} does not have row {request.row}"
        self._requests[request.row] = None
        heappush(self._free, request.row)
        self._freed.append(request.row)
        request.row = -1

    def report_freed(self) -> tuple[int, ...]:
        """The rows released since the last call, for the plan in the making."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def __getitem__(self, row: int) -> Request:
        """The request that has the row."""
        request = self._requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def check_invariants(self, running: list[Request]) -> None:
        """Assert that exactly `running` have rows, each its own."""
        taken = [request for request in self._requests if request is not None]
        assert len(taken) == len(running), "rows and running requests differ in number"
        assert all(self._requests[request.row] is request for request in running), "a row is mixed up"
        rows = sorted([*self._free, *(request.row for request in taken)])
        assert rows == list(range(len(self._requests))), "a row is lost or taken twice"

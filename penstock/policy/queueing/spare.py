"""Where a copy of a request may run without being in the way of requests: only on rows that nobody needs.

    nothing waits for the model, and a worker of this cell has     there: on the one with the most to spare
    a quarter of its rows and of its KV memory free beside it
    else                                                           nowhere: the request is not copied

A copy is not in the model's queue, and no request waits for one to end: where requests begin to wait, or to
need the rows, copies are ended (`num_in_the_way`).
"""

from collections.abc import Mapping

import msgspec

from penstock.policy.queueing.capacity import WorkerCapacity
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.types import WorkerId

FREE = 4
"""Of a worker's rows and KV blocks one in so many stays free of copies."""


class ShadowCopies(msgspec.Struct):
    """The copies at one worker."""

    num: int = 0
    blocks: int = 0
    """KV blocks that they may take."""


NONE = ShadowCopies()


def spare_worker(
    model_queue: ModelQueue, copies: Mapping[WorkerId, ShadowCopies], blocks: int, needs: frozenset[str]
) -> WorkerCapacity | None:
    """The worker for another copy, which may take so many KV blocks; None: there is none to spare."""
    assert blocks > 0, "a prompt takes memory"
    if model_queue.queue.num_waiting:
        return None
    able = (
        each
        for each in model_queue.workers
        if each.view.ready and each.view.cell is None and needs <= each.view.capabilities
    )
    found = [
        (num, -each.number, each)
        for each in able
        if (num := _num_spare(each, there := copies.get(each.id, NONE))) > 0
        and _has_memory(each, there.blocks + blocks)
    ]
    return max(found)[2] if found else None


def num_in_the_way(model_queue: ModelQueue | None, worker_id: WorkerId, copies: ShadowCopies) -> int:
    """How many of a worker's copies must end now."""
    assert copies.num >= 0, copies
    worker = None if model_queue is None else model_queue.workers.get(worker_id)
    if model_queue is None or worker is None or model_queue.queue.num_waiting or not worker.view.ready:
        return copies.num
    return max(0, min(copies.num, copies.num + worker.booked + worker.others - _rows(worker)))


def _rows(worker: WorkerCapacity) -> int:
    return worker.view.max_running or worker.slots


def _num_spare(worker: WorkerCapacity, there: ShadowCopies) -> int:
    rows, taken = _rows(worker), worker.booked + worker.others + there.num
    return rows - max(1, rows // FREE) - taken


def _has_memory(worker: WorkerCapacity, blocks: int) -> bool:
    view = worker.view
    free = view.kv_blocks_total - view.kv_blocks_used - worker.pending_blocks
    return not view.kv_blocks_total or blocks <= free - view.kv_blocks_total // FREE

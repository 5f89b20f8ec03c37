"""Where a copy of a request may run without being in the way of requests: only on rows that nobody needs.

    nothing waits for the model, and a worker of this cell has     there: on the one with the most to spare
    a quarter of its rows and of its KV memory free beside it
    else                                                           nowhere: the request is not copied

A copy is not in the model's queue, and no request waits for one to end: where requests begin to wait, or to
need the rows, copies are ended (`num_in_the_way`). Our own copies are among the streams of others that a
worker reports, and among its KV blocks. Blocks count twice, so that there are fewer copies than there could
be, never more.
"""

from collections.abc import Mapping

import msgspec

from penstock.policy.queueing.capacity import WorkerCapacity
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.types import BLOCK_TOKENS, WorkerId

FREE = 4
"""Of a worker's rows and KV blocks one in so many stays free of copies."""
PRIORITY = 1000
"""Of copies in the engine's queue: behind every band's."""
ANSWER_TOKENS = 512
"""The part of an answer's bound that is counted as memory: most answers end long before it."""


class ShadowCopies(msgspec.Struct):
    """The copies at one worker."""

    num: int = 0
    blocks: int = 0
    """KV blocks that they may take."""


NONE = ShadowCopies()


def blocks_of(prompt_tokens: int, max_tokens: int) -> int:
    """The KV blocks that a copy of such a request may take."""
    return 1 + (prompt_tokens + min(max_tokens, ANSWER_TOKENS)) // BLOCK_TOKENS


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
        if each.view.ready and each.view.cell is None and needs <= each.view.capabilities and _is_free(each)
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
    return max(0, min(copies.num, _taken(worker, copies) - _rows(worker)))


def rows_for_copies(worker: WorkerCapacity) -> int:
    """The rows that requests and copies may have together."""
    rows = _rows(worker)
    return rows - max(1, rows // FREE)


def _is_free(worker: WorkerCapacity) -> bool:
    """Whether a request there takes nothing that is metered, as those of a provider with limits are."""
    terms = worker.view.terms
    return terms is None or not (terms.rpm or terms.tpm)


def _rows(worker: WorkerCapacity) -> int:
    return worker.view.max_running or worker.slots


def _taken(worker: WorkerCapacity, there: ShadowCopies) -> int:
    return worker.booked + max(worker.others, there.num)


def _num_spare(worker: WorkerCapacity, there: ShadowCopies) -> int:
    return rows_for_copies(worker) - _taken(worker, there)


def _has_memory(worker: WorkerCapacity, blocks: int) -> bool:
    view = worker.view
    free = view.kv_blocks_total - view.kv_blocks_used - worker.pending_blocks
    return not view.kv_blocks_total or blocks <= free - view.kv_blocks_total // FREE

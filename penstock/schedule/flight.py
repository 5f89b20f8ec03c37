"""A plan on its way: made, handed to the runner, and not applied yet."""

from dataclasses import dataclass

from penstock.kv.cache.block_pool import Epoch
from penstock.schedule.plan import StepPlan
from penstock.schedule.request import Request
from penstock.schedule.step_time import StepLoad, chunk_pairs
from penstock.types import TOKEN_WEIGHT

FLIGHTS_MAX = 2
"""One step computes while the next is planned. More would only make stops and new requests wait longer."""


@dataclass(slots=True, eq=False)
class Flight:
    """One step between `schedule` and `apply`."""

    plan: StepPlan
    requests: tuple[Request, ...]
    """Whose work it is, beside `plan.work`: a row may belong to somebody else when the result comes."""
    num_decoding: int
    """So many of the first decode: one token each, which samples and scores nothing."""
    epoch: Epoch
    """Holds the blocks of requests that end meanwhile."""
    load: StepLoad
    """What the step costs."""
    is_void: bool = False
    """A step before it failed, so that it computed on nothing: its result is dropped."""

    def count_in(self) -> None:
        """Let every request know what this step will do for it."""
        epoch, num_decoding = self.epoch, self.num_decoding
        assert num_decoding <= len(self.requests) == len(self.plan.work), "every row's work is somebody's"
        for request in self.requests[:num_decoding]:
            request.num_planned += 1
            request.num_drawing += 1
            request.last_used = epoch
        others = zip(self.requests[num_decoding:], self.plan.work[num_decoding:], strict=True)
        for request, work in others:
            request.num_planned = work.num_computed + work.num_tokens
            request.num_drawing += work.samples
            request.last_used = epoch

    def share(self, time_ns: int) -> None:
        """Divide the time that this step took among its requests, by the work in it: tokens run through the
        model, and for each of them the tokens that its attention read. What whole numbers leave, fewer
        nanoseconds than requests, nobody gets.
        """
        num_decoding, load = self.num_decoding, self.load
        rows, works = self.requests, self.plan.work
        total = TOKEN_WEIGHT * load.num_tokens + load.kv_read  # As if all decoded: each token reads its row.
        others = [
            (rows[i], works[i].num_computed, works[i].num_tokens) for i in range(num_decoding, len(rows))
        ]
        for _, num_computed, num_tokens in others:
            total += chunk_pairs(num_computed, num_tokens) - num_computed - num_tokens
        assert total > 0 <= time_ns, "a step has work, and takes time"
        for request, num_computed, num_tokens in others:
            weight = TOKEN_WEIGHT * num_tokens + chunk_pairs(num_computed, num_tokens)
            request.device_ns += time_ns * weight // total
        for request, work in zip(rows[:num_decoding], works, strict=False):
            request.device_ns += time_ns * (TOKEN_WEIGHT + 1 + work.num_computed) // total

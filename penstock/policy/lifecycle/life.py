"""One accepted request as `FlowControl` keeps it, and what is read off it: its work for the queue, its KV blocks, who gives way."""

from collections.abc import Sequence

import msgspec

from penstock.policy.flow import Arrival, Flow, State
from penstock.policy.lifecycle.account import Account
from penstock.policy.parts import Pass
from penstock.policy.queueing.band import Work, cost
from penstock.policy.queueing.kv_pressure import RunningStream, blocks_to_free, choose_victims
from penstock.policy.queueing.lane import Lane
from penstock.policy.queueing.room import Room
from penstock.policy.queueing.terms import QueueTerms
from penstock.types import BLOCK_TOKENS, Usage, WorkerId

NO_PROMISE = Pass()


class Race(msgspec.Struct, gc=False):
    """The second of two attempts that run at once."""

    worker: WorkerId
    work: Work
    attempt: int
    started_ns: int


class Life:
    """One accepted request and what is held for it."""

    __slots__ = ("account", "asked_ns", "attempt", "booked", "flow", "lane", "race", "raced_ns", "work")

    def __init__(self, flow: Flow, lane: Lane, work: Work, account: Account) -> None:
        self.flow, self.lane, self.work, self.account = flow, lane, work, account
        self.booked = work
        """What is booked at `flow.worker`: `work`, or that of a second attempt which outran the first."""
        self.attempt = 0
        """The number of the attempt at `flow.worker`."""
        self.asked_ns = -1
        """Since when its model had no worker when another one was last looked for."""
        self.race: Race | None = None
        """The other attempt, while there are two."""
        self.raced_ns = -1
        """When it was started first, if it was then started beside that."""


def work_of(arrival: Arrival, now_ns: int, expected: int, verdict: Pass = NO_PROMISE) -> Work:
    """What the queue is told of a request that came at `now_ns` and was let in with that `verdict`."""
    tenant = arrival.tenant
    computed = arrival.prompt_tokens - arrival.cached_tokens
    return Work(
        id=arrival.id,
        band=tenant.band,
        tenant=tenant.id,
        weight=tenant.weight,
        arrived_ns=now_ns,
        deadline_ns=now_ns + verdict.first_token_ns if verdict.first_token_ns else 0,
        max_wait_ns=arrival.max_wait_ns,
        start_by_ns=verdict.start_by_ns,
        num_bytes=arrival.num_bytes,
        streams=arrival.choices,
        blocks=-(-computed // BLOCK_TOKENS) + arrival.choices,
        prompt_tokens=computed,
        cached_tokens=arrival.cached_tokens,
        output_tokens=expected,
        context_tokens=arrival.context_tokens,
        keys=arrival.keys,
        session=arrival.session,
        adapter=arrival.adapter,
        needs=arrival.needs,
    )


def charge(life: Life, output_tokens: int) -> None:
    """Its tenant's fair share pays for the prompt and so much of the answer."""
    prompt, cached = life.flow.arrival.prompt_tokens, life.flow.cached_tokens
    life.lane.queue.charge(life.work, cost(prompt - cached, cached, output_tokens))


def charge_matched(life: Life) -> None:
    """Its worker should have part of the prompt: charge that as cached, until the worker tells."""
    work, prompt = life.work, life.flow.arrival.prompt_tokens
    cached = min(work.cached_tokens + work.matched_tokens, prompt)
    life.lane.queue.charge(work, cost(prompt - cached, cached, work.output_tokens))


def count(flow: Flow, usage: Usage | None) -> None:
    """Take a worker's own count of what a request used until now, if there is one."""
    if usage is not None:
        flow.usage = usage
        flow.completion_tokens = usage.completion_tokens
        flow.cached_tokens = min(usage.cached_tokens, flow.arrival.prompt_tokens)


def continued(before: Usage, after: Usage) -> Usage:
    """What a stream used that went on on another worker, as if it had never been interrupted: its prompt was read once for it,
    its answer is one, and the time of the move is part of its decoding. The machines' work is the sum.
    """
    if not before.completion_tokens:
        before, after = after, before  # It gave nothing there: its prompt was read where it did.
        prefill_ns, decode_ns = before.prefill_ns, before.decode_ns
    else:
        prefill_ns = before.prefill_ns
        decode_ns = before.decode_ns + after.queue_ns + after.prefill_ns + after.decode_ns
    return Usage(
        prompt_tokens=before.prompt_tokens,
        completion_tokens=max(before.completion_tokens, after.completion_tokens),
        cached_tokens=before.cached_tokens,
        host_cached_tokens=before.host_cached_tokens,
        queue_ns=before.queue_ns,
        prefill_ns=prefill_ns,
        decode_ns=decode_ns,
        steps=before.steps + after.steps,
        computed_tokens=before.computed_tokens + after.computed_tokens,
        preemptions=before.preemptions + after.preemptions,
        kv_block_ns=before.kv_block_ns + after.kv_block_ns,
        device_ns=before.device_ns + after.device_ns,
    )


def blocks_of(flow: Flow) -> int:
    """KV blocks that a stream needs to go on elsewhere: its prompt and what it gave."""
    tokens = flow.arrival.prompt_tokens + flow.completion_tokens
    return -(-tokens // BLOCK_TOKENS) + flow.arrival.choices


def blocks_held(life: Life) -> int:
    """KV blocks that a running request holds for itself alone, as far as was told."""
    flow = life.flow
    tokens = flow.arrival.prompt_tokens - flow.cached_tokens + flow.completion_tokens
    return -(-tokens // BLOCK_TOKENS)


def victims(config: QueueTerms, lane: Lane, room: Room, lives: Sequence[Life]) -> Sequence[str]:
    """Whom to end at a worker whose KV memory is nearly full, for the sake of a higher band there or in the queue."""
    view = room.view
    need = blocks_to_free(
        view.kv_blocks_used, view.kv_blocks_total, above=config.shed_kv_above, to=config.shed_kv_to
    )
    need -= sum(blocks_held(life) for life in lives if life.flow.state is State.STOPPING)
    waiting = (band.level for band in lane.queue.bands if band.waiting)
    best = min([*waiting, *(life.work.level for life in lives)], default=0)
    streams = [
        RunningStream(
            id=life.flow.id,
            band_order=life.work.level,
            is_protected=lane.queue.band_of(life.work).config.protected,
            remaining_tokens=max(0, life.account.expected - life.flow.completion_tokens),
            blocks=blocks_held(life),
        )
        for life in lives
        if life.work.level > best and life.flow.state is not State.STOPPING
    ]
    return choose_victims(streams, need, victims_max=config.shed_max)

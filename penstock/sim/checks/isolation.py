"""What no tenant may get: a prefix, an adapter's cache or a stream that is another's.

Kept from outside of the engines.

The books are the checks' own: which requests were sent to which worker, by whom, and what their prompts and
answers are made of. Of what a worker says it found in its cache, each block must be the same text under the
same adapter that the same tenant sent there before, or that somebody sent there as nobody's. So nothing here
trusts the engine's names of blocks, or knows them.
"""

from collections.abc import Iterator, Sequence

from penstock.sim.traffic.request import Segment, SimRequest
from penstock.sim.world.messages import Began, Finished, Submission, WorkerMessage
from penstock.types import BLOCK_TOKENS, RequestId, WorkerId

_SEVERAL = ("", 0)
"""Sent by more than one: whoever asks, somebody else did."""
_Sent = tuple[str, int]
"""A request's id, and which attempt."""


class Isolation:
    """Of one world."""

    __slots__ = ("_chains", "_known", "_sent")

    def __init__(self) -> None:
        self._known: dict[WorkerId, dict[int, _Sent]] = {}
        """By worker: block -> who sent it there."""
        self._sent: dict[tuple[WorkerId, RequestId], Submission] = {}
        self._chains: dict[tuple[WorkerId, RequestId], list[int]] = {}

    def submitted(self, worker_id: WorkerId, submission: Submission, request: SimRequest) -> None:
        """A gateway sends a request to a worker."""
        known = self._known.setdefault(worker_id, {})
        place, who = (worker_id, submission.id), (submission.id, submission.attempt)
        self._sent[place] = submission
        chain = self._chains[place] = list(_blocks(request))
        for block in chain:
            if known.setdefault(block, who) != who:
                known[block] = _SEVERAL

    def on_messages(self, worker_id: WorkerId, gateway: int, messages: Sequence[WorkerMessage]) -> str:
        """A worker speaks of requests to a gateway. Returns what is wrong with that; empty: nothing."""
        for message in messages:
            sent = self._sent.get((worker_id, message.id))
            if sent is None or sent.gateway != gateway:
                return f"{worker_id} tells gateway {gateway} of {message.id}, which it did not ask for"
            if message.attempt > sent.attempt:
                return (
                    f"{worker_id} tells of attempt {message.attempt} of {message.id}, the last there is "
                    f"{sent.attempt}"
                )
            if isinstance(message, Began):
                cached = message.cached_tokens
            elif isinstance(message, Finished):
                cached = message.usage.cached_tokens
            else:
                continue
            if (where := self._stranger(worker_id, message.id, message.attempt, cached)) >= 0:
                return (
                    f"{message.id} found {cached} cached tokens on {worker_id}, and those from {where} on "
                    "were sent there by nobody who may share them"
                )
        return ""

    def _stranger(self, worker_id: WorkerId, request_id: RequestId, attempt: int, cached_tokens: int) -> int:
        """Where what was found begins to be nobody's whom it may share with; -1: nowhere."""
        known, chain = self._known[worker_id], self._chains[worker_id, request_id]
        for index, block in enumerate(chain[: cached_tokens // BLOCK_TOKENS]):
            if known[block] == (request_id, attempt):
                return index * BLOCK_TOKENS
        return -1


def _blocks(request: SimRequest) -> Iterator[int]:
    """A request's whole blocks, prompt and answer, each named by all that is before it and by who may share
    it.
    """
    segments = (*request.prompt, Segment(request.answer or hash(request.id), request.output_tokens))
    state, left, num_blocks = hash(request.adapter), BLOCK_TOKENS, 0
    for content, tokens in ((segment.content, segment.tokens) for segment in segments):
        start = 0
        while tokens - start >= left:
            state = hash((state, content, start, left))
            start, left = start + left, BLOCK_TOKENS
            owner = "" if num_blocks < request.public_tokens // BLOCK_TOKENS else f"of {request.tenant}"
            yield hash((state, owner))
            num_blocks += 1
        if start < tokens:
            state = hash((state, content, start, tokens - start))
            left -= tokens - start

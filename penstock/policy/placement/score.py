"""The worth of sending a request to a worker: two policies behind one interface, from facts to terms to one
number.

    ttft       wait + reload + prefill + adapter + others + lambda * TPOT penalty + mu * x / (1 - x), least
    weighted   0.45 match - 0.25 delay - 0.20 pressure + 0.10 headroom, most

`Score.total` is a cost for both, so that what picks need not know which of them it has. Pure, and each score
depends on its own worker alone: the same facts give the same score.
"""

from typing import Literal, Protocol

import msgspec

from penstock.policy.estimates import Speed
from penstock.policy.terms import PlacementTerms
from penstock.types import BLOCK_TOKENS, WorkerId

_FULL_MAX = 0.99
"""KV memory is never taken for fuller than this: x / (1 - x) has no end."""
_WEIGHTED_PRESSURE = 0.25
_NEXT_STREAM = 1.0
"""Streams that must end before a worker without KV room has some, as far as anybody can tell."""


class ScoredRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The request that is to be placed."""

    prompt_tokens: int
    output_tokens: int
    """Expected, of all its streams together."""
    streams: int = 1
    level: int = 0
    """Bands that go before its own."""
    needs_adapter: bool = False
    was_held: bool = False
    """It waited for a warm worker already, and will not again."""


class WorkerFacts(msgspec.Struct, frozen=True, gc=False):
    """One worker, as it stands for one request.

    Not by keyword alone: a dozen are made for every request, in this order.
    """

    worker: WorkerId
    number: int
    """Breaks ties that `turn` leaves."""
    turn: int = 0
    """When it was last given something, as a count: who waited longest is next among equals."""
    filtered: str = ""
    """Why it cannot have the request at all: "not_ready", "blocked", "resume", "context" or "adapter"; empty:
    it can."""
    has_room: bool = True
    """Whether it could start the request now."""
    is_avoided: bool = False
    """The request failed there before."""
    is_session: bool = False
    """The session's last request ran there."""
    device_tokens: int = 0
    """Of the prompt, in its KV cache."""
    host_tokens: int = 0
    """More of it, in its host memory."""
    backlog_tokens: int = 0
    """Prompt tokens that were sent there and have shown no output."""
    running: int = 0
    """Streams there."""
    rows: int = 0
    """Streams in one batch; 0: it does not tell."""
    slots: int = 1
    """Streams that it may be given."""
    held: int = 0
    """Requests that are held for it."""
    kv_blocks: int = 0
    """0: it does not tell."""
    kv_blocks_used: int = 0
    """By what runs, and what was sent there just now."""
    adapter_s: float = 0.0
    """The wait there for its adapter; 0: it is there, or needs none."""
    speed: Speed = Speed()


class Score(msgspec.Struct, frozen=True, gc=False):
    """One worker's."""

    total: float
    """A cost: less is better."""
    terms: tuple[float, ...]
    """In the order of the policy's `terms`; they sum to the total, or to its negative."""
    ttft_s: float
    """Expected time to first token, sent there as soon as it has room."""
    room_wait_s: float
    """Of that, the wait until it has room."""


class ScorePolicy(Protocol):
    """A named way to score."""

    @property
    def name(self) -> str:
        """As in the configuration."""
        ...

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of a score's terms."""
        ...

    @property
    def sign(self) -> Literal[1, -1]:
        """1: people read a total as it is; -1: they read its negative, of which more is better."""
        ...

    def score(self, request: ScoredRequest, worker: WorkerFacts) -> Score:
        """The cost of sending the request there."""
        ...

    def margin(self, best: float, share: float) -> float:
        """Totals up to so much over `best` are within `share` of it."""
        ...


def pressure(request: ScoredRequest, worker: WorkerFacts) -> float:
    """The odds x / (1 - x) of full memory, where x is the share of KV memory in use once the request and its
    answer are there.

    Convex, as in smg's least-load policy: the last tenth of the memory counts more than all before it.
    """
    total = worker.kv_blocks
    if not total:
        return 0.0
    full = (worker.kv_blocks_used + (request.prompt_tokens + request.output_tokens) / BLOCK_TOKENS) / total
    return full / (1 - full) if full < _FULL_MAX else _FULL_MAX / (1 - _FULL_MAX)


def _waits_s(request: ScoredRequest, worker: WorkerFacts, backlog_s: float) -> tuple[float, float]:
    """Until the prompt is begun there, and of that until it can be sent there, where streams must end first.

    One of n streams ends in a n-th of the time that they take. The work that is there already takes
    `backlog_s`.
    """
    running = worker.running
    each_s = worker.speed.service_s / max(1, running)
    over_rows = running + request.streams - worker.rows if worker.rows else 0
    wait_s = max(0, min(over_rows, running)) * each_s
    if worker.has_room:
        return backlog_s + wait_s, 0.0
    over_slots = min(running, running + request.streams - worker.slots)
    room_wait_s = max(_NEXT_STREAM, over_slots, 0) * each_s + worker.held * each_s
    # While it waits for room, the prompts that are there are computed.
    return max(backlog_s, room_wait_s, wait_s + worker.held * each_s), room_wait_s


def _times_s(
    config: PlacementTerms, request: ScoredRequest, worker: WorkerFacts
) -> tuple[float, float, float, float, float]:
    """Wait, reload, prefill and adapter load; and of the wait, that for room."""
    speed, running, host_tokens = worker.speed, worker.running, worker.host_tokens
    # Prompts go one after the other.
    wait_s, room_wait_s = speed.backlog_s(worker.backlog_tokens, running), 0.0
    if not worker.has_room or 0 < worker.rows < running + request.streams:
        wait_s, room_wait_s = _waits_s(request, worker, wait_s)
    uncached = request.prompt_tokens - worker.device_tokens - host_tokens
    prefill_s = speed.prefill_s(uncached if uncached > 0 else 1, request.prompt_tokens, running)
    reload_s = host_tokens * speed.token_s * config.host_cost if host_tokens else 0.0
    return wait_s, reload_s, prefill_s, worker.adapter_s, room_wait_s


class TtftScore:
    """`ttft`: what the client waits, and what the request does to those that run.

    All terms are seconds, so they add.
    """

    name = "ttft"
    sign: Literal[1, -1] = 1
    terms = ("wait_s", "reload_s", "prefill_s", "adapter_s", "others_s", "tpot_s", "pressure_s")

    def __init__(self, config: PlacementTerms) -> None:
        self._config = config
        self._target_s, self._weight = config.ttft.tpot_target_ms / 1000, config.ttft.tpot_weight
        self._others = config.ttft.others_weight
        self._pressure_s = config.ttft.pressure_ms / 1000

    def score(self, request: ScoredRequest, worker: WorkerFacts) -> Score:
        """See `ScorePolicy`."""
        wait_s, reload_s, prefill_s, adapter_s, room_wait_s = _times_s(self._config, request, worker)
        ttft_s = wait_s + reload_s + prefill_s + adapter_s
        over_s = worker.speed.tpot_s(worker.running + request.streams) - self._target_s
        tpot_s = self._weight * over_s * request.output_tokens if over_s > 0 else 0.0
        pressure_s = self._pressure_s * pressure(request, worker)
        others_s = self._others * prefill_s
        terms = (wait_s, reload_s, prefill_s, adapter_s, others_s, tpot_s, pressure_s)
        return Score(ttft_s + others_s + tpot_s + pressure_s, terms, ttft_s, room_wait_s)

    def margin(self, best: float, share: float) -> float:
        """A share of the best."""
        return share * best


class WeightedScore:
    """`weighted`: four marks from 0 to 1 and their weights."""

    name = "weighted"
    sign: Literal[1, -1] = -1
    terms = ("match", "delay", "pressure", "headroom")

    def __init__(self, config: PlacementTerms) -> None:
        self._config, self._weights = config, config.weighted

    def score(self, request: ScoredRequest, worker: WorkerFacts) -> Score:
        """See `ScorePolicy`."""
        config, weights = self._config, self._weights
        wait_s, reload_s, prefill_s, adapter_s, room_wait_s = _times_s(config, request, worker)
        cached = worker.device_tokens + (1 - config.host_cost) * worker.host_tokens
        match = min(1.0, cached / max(1, request.prompt_tokens))
        delay = min(1.0, (wait_s + adapter_s) * 1000 / weights.ttft_target_ms)
        full = min(1.0, _WEIGHTED_PRESSURE * pressure(request, worker))
        free = worker.slots - worker.running - request.streams
        headroom = float(free >= weights.reserve * worker.slots * request.level)
        terms = (
            weights.match * match,
            -weights.delay * delay,
            -weights.pressure * full,
            weights.headroom * headroom,
        )
        return Score(-sum(terms), terms, wait_s + reload_s + prefill_s + adapter_s, room_wait_s)

    def margin(self, best: float, share: float) -> float:
        """A share of the scale, which goes from 0 to 1."""
        del best
        return share


def score_policy(config: PlacementTerms) -> ScorePolicy:
    """The one that is configured; `ttft` also where no score is asked for."""
    return WeightedScore(config) if config.policy == "weighted" else TtftScore(config)

"""How fast the workers of one model answer what they are sent, learned from what they were sent.

    start to first token = fixed + tokens * a + computed * prompt * b + streams * c + tokens * streams * d

`tokens` are the request's own and those of the prompts that its worker was sent before and has not finished.
From the start at a worker on nothing of the queue is in it, so it is much more certain than a law from the
arrival on. It says

    what a promise is on this machine       never less than a multiple of what an idle worker takes for that
                                            prompt
    when a request is too late              when it would miss its promise even if it were started now
    when a worker is given another prompt   when those it has take no longer than a part of the promise, and
                                            none of them has waited that long: what waits in the gateway can
                                            still go in another order, to another worker, or be refused in
                                            time

The second condition needs no law: where the law is wrong (a worker that is new, or slower than it was),
prompts would pile up in the engine, and those of a lower band would wait there behind all that come after
them. A prompt that has waited long with no other one near it is in no queue: it is long, and its engine
computes it slowly for the sake of the streams that run. Its worker is given one more, whatever the law says;
otherwise one long prompt would keep a worker from all others for seconds.

Pure and deterministic: gateway and simulator use the same object.
"""

from bisect import bisect_left, insort
from collections import deque

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.branch import extended
from penstock.config.routing import AdmissionConfig, PlacementConfig
from penstock.policy.estimates import Ran, Speeds
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import WorkerCapacity, uncached_tokens
from penstock.policy.terms import PlacementTerms
from penstock.types import RequestId, WorkerId

BACKLOG_SHARE = 0.5
"""Of the promise to everybody, what a worker's unfinished prompts may take. Less leaves workers idle while
the next prompt is on its way to them; more is time that the queue's order cannot decide about any more."""
OVERDUE = 1.2
"""Times that a prompt may wait at its worker before that is given no other one, but one where it waits
alone."""
LATE_NS = 10 * NS_PER_S
"""So long after a request was too late the next ones are refused by what is expected of their wait."""
_SCORED = 64
"""First tokens that the margin looks back on."""
_SCORED_MIN = 16
_MARGIN_MAX = 3.0
_SHORTEST_S = 1e-3
"""Ratios of shorter times say nothing."""
_KINDS_MAX = 256


class _Sent(msgspec.Struct, gc=False):
    """A request at its worker, without an output."""

    at_ns: int
    backlog_tokens: int
    streams: int
    waited: bool
    said_s: float


class Pace:
    """Of one model's workers."""

    __slots__ = (
        "_backlog_s",
        "_kinds",
        "_late_ns",
        "_lesson",
        "_margin",
        "_overdue",
        "_ratios",
        "_sent",
        "_speeds",
        "_unbegun",
        "backlog_ns",
    )

    def __init__(
        self, admission: AdmissionConfig | None = None, placement: PlacementConfig | None = None
    ) -> None:
        """Without an `admission` nothing is promised, and workers are given all that they have rows for."""
        self._backlog_s = BACKLOG_SHARE * admission.ttft_target_ms / 1000 if admission is not None else 0.0
        self.backlog_ns = round(self._backlog_s * NS_PER_S)
        """The time that a worker's unfinished prompts may take; 0: any time."""
        self._speeds = Speeds(extended(placement or PlacementConfig(), PlacementTerms))
        self._sent: dict[tuple[RequestId, WorkerId], _Sent] = {}
        self._unbegun: dict[tuple[RequestId, WorkerId], int] = {}
        """Requests that were started and have no output -> when they were started, oldest first; not those in
        `_overdue`."""
        self._overdue: dict[WorkerId, set[RequestId]] = {}
        """Those that have waited at their worker for longer than its prompts may take."""
        self._lesson: tuple[str, Ran] | None = None
        """To be learned before the laws are asked for anything: the client of that request need not wait for
        it."""
        self._ratios = _Latest()
        self._margin = 1.0
        self._late_ns: dict[int, int] = {}
        """By band: when a request of it last left the queue because it was too late to start it."""
        self._kinds: dict[str, None] = {}
        """Those that have answered, oldest first."""

    # --- what it says -------------------------------------------------------------------------------

    @property
    def margin(self) -> float:
        """Nine of ten first tokens came within this many times what was expected when they were started."""
        return self._margin

    def idle_ttft_ns(self, tokens: int, prompt_tokens: int) -> int:
        """The time that computing `tokens` of a prompt takes on an idle worker, of the slowest kind; 0: not
        known.
        """
        return self.expected_ns(tokens, prompt_tokens, 0)[1]

    def expected_ns(self, tokens: int, prompt_tokens: int, streams: float) -> tuple[int, int]:
        """The time that nine of ten such requests take from their start to their first token beside so many
        streams, with nothing ahead; and `idle_ttft_ns`.
        """
        if self._lesson is not None:
            self.learn()
        beside_s = idle_s = 0.0
        for kind in self._kinds:
            speed = self._speeds.of(kind)
            took_s = speed.prefill_s(tokens, prompt_tokens, streams)
            beside_s = max(beside_s, took_s)
            if streams:
                took_s = speed.prefill_s(tokens, prompt_tokens, 0)
            idle_s = max(idle_s, took_s)
        return round(self._margin * round(beside_s * NS_PER_S)), round(idle_s * NS_PER_S)

    def is_late(self, now_ns: int, level: int) -> bool:
        """Whether requests of this band were too late a short while ago."""
        late_ns = self._late_ns.get(level)
        return late_ns is not None and now_ns - late_ns <= LATE_NS

    def is_any_late(self, now_ns: int) -> bool:
        """Whether requests of some band were."""
        late = self._late_ns
        return bool(late) and any(now_ns - late_ns <= LATE_NS for late_ns in late.values())

    def too_late(self, now_ns: int, work: Work) -> None:
        """Its start would be too late: it leaves the queue, or is one of the few that wait on."""
        self._late_ns[work.level] = now_ns

    def is_busy(self, worker: WorkerCapacity) -> bool:
        """Whether a worker has prompts enough for now."""
        if not self._backlog_s or not worker.pending_tokens:
            return False
        if worker.id in self._overdue:
            return worker.num_pending > 1
        if self._lesson is not None:
            self.learn()
        speed = self._speeds.of(worker.view.kind)
        return speed.backlog_s(worker.pending_tokens, worker.booked + worker.others) > self._backlog_s

    def overdue(self, now_ns: int) -> list[WorkerId]:
        """Workers that may have become busy, or free, by the time alone since this was last asked.

        O(1) where there are none.
        """
        found: list[WorkerId] = []
        if not self._backlog_s:
            return found
        while self._unbegun:
            (request_id, worker), at_ns = next(iter(self._unbegun.items()))
            if now_ns - at_ns <= OVERDUE * self.backlog_ns:
                break
            del self._unbegun[request_id, worker]
            assert (request_id, worker) in self._sent, "who has no output was sent"
            self._overdue.setdefault(worker, set()).add(request_id)
            found.append(worker)
        return found

    def next_overdue_ns(self) -> int | None:
        """When that is the case next."""
        at_ns = next(iter(self._unbegun.values()), None) if self._backlog_s else None
        assert at_ns is None or at_ns >= 0, "time begins at 0"
        return None if at_ns is None else at_ns + round(OVERDUE * self.backlog_ns) + 1

    def _left(self, work: Work, worker: WorkerCapacity) -> _Sent | None:
        """It has output, or runs there no more: what it was sent with, the first time."""
        sent = self._sent.pop((work.id, worker.id), None)
        if sent is not None and self._unbegun.pop((work.id, worker.id), None) is None:
            late = self._overdue[worker.id]
            late.discard(work.id)
            if not late:
                del self._overdue[worker.id]
        return sent

    # --- what it learns from ------------------------------------------------------------------------

    def started(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """It was sent there, and is booked in `worker`. A peer cell's times say nothing of workers here."""
        if worker.view.cell is not None:
            return
        running, tokens = worker.booked + worker.others, uncached_tokens(work)
        backlog, streams = worker.pending_tokens - tokens, running - work.streams
        if self._lesson is not None:
            self.learn()
        speed, prompt = self._speeds.of(worker.view.kind), work.prompt_tokens + work.cached_tokens
        said_s = speed.prefill_s(tokens, prompt, streams) + speed.backlog_s(backlog, streams)
        waited = 0 < worker.view.max_running < running
        assert backlog >= 0 <= streams, "it is booked where it was sent"
        self._sent[work.id, worker.id] = _Sent(now_ns, backlog, streams, waited, said_s)
        self._unbegun[work.id, worker.id] = now_ns

    def began(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """Its first output came."""
        sent, kind = self._left(work, worker), worker.view.kind
        if sent is None:
            return
        if kind not in self._kinds and len(self._kinds) >= _KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = None
        first_ns = now_ns - sent.at_ns
        assert first_ns >= 0, "no output comes before its start"
        said_s = max(_SHORTEST_S, sent.said_s)
        if self._ratios.add(first_ns / NS_PER_S / said_s) >= _SCORED_MIN:
            p90 = self._ratios.p90()
            self._margin = 1.0 if p90 < 1.0 else min(_MARGIN_MAX, p90)
        self.learn()
        if not self._speeds.learns_at(kind, now_ns):
            return
        ran = Ran(
            at_ns=now_ns,
            computed_tokens=max(1, uncached_tokens(work)),
            prompt_tokens=work.prompt_tokens + work.cached_tokens,
            backlog_tokens=sent.backlog_tokens,
            streams=sent.streams,
            first_ns=first_ns,
            waited=sent.waited,
        )
        self._lesson = kind, ran

    @property
    def has_lesson(self) -> bool:
        """Whether `learn` has something to do."""
        return self._lesson is not None

    def learn(self) -> None:
        """Take in what the last request has shown, if that was not done."""
        if self._lesson is not None:
            lesson, self._lesson = self._lesson, None
            self._speeds.learn(*lesson)

    def ended(self, work: Work, worker: WorkerCapacity) -> None:
        """It runs there no more."""
        self._left(work, worker)


class _Latest:
    """The last `_SCORED` values, which stay sorted: nothing is sorted when a request asks."""

    __slots__ = ("_values", "ordered")

    def __init__(self) -> None:
        self._values = deque[float]()
        self.ordered: list[float] = []

    def add(self, value: float) -> int:
        """The oldest makes room; returns how many there are."""
        values, ordered = self._values, self.ordered
        values.append(value)
        if (num := len(values)) > _SCORED:
            num -= 1
            del ordered[bisect_left(ordered, values.popleft())]
        insort(ordered, value)
        return num

    def p90(self) -> float:
        """The value that nine of ten do not exceed; there must be one."""
        ordered = self.ordered
        assert ordered, "nothing has no quantile"
        return ordered[(9 * len(ordered) - 1) // 10]

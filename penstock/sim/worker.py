"""A simulated worker: the real scheduler, KV manager, block pool and prefix cache; only the time of a step is modelled.

    submit, abort ──> Scheduler ──plan──> StepTime: so many ns later ──result──> Scheduler ──> told to the gateways

What it tells of a request is what a gateway acts on: its first token, every full slice of its answer, and its end. A step
that tells nothing is not seen by anybody, which is what makes it possible to leap over many of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.config.tree import EngineConfig
from penstock.errors import PenstockError
from penstock.kv.hashing import BlockHash, BlockHasher
from penstock.kv.manager import KVManager
from penstock.schedule.limits import Limits
from penstock.schedule.order import waiting_queue
from penstock.schedule.plan import RequestOutput, Sampled, StepPlan, StepResult
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget
from penstock.schedule.request import Request
from penstock.schedule.scheduler import Scheduler
from penstock.sim.events import LocalClock, Rank, Timeline
from penstock.sim.prompts import EOS, content_tokens, prompt_tokens
from penstock.sim.request import Segment
from penstock.sim.step_time import LinearStepTime, StepShape, StepTime
from penstock.types import RequestId, SamplingParams, Usage, WorkerId

_KEY = b"simulated worker"
_STOPS = (EOS,)


@dataclass(slots=True, frozen=True, kw_only=True)
class WorkerSpec:
    """One kind of worker."""

    step_time: StepTime = field(default_factory=LinearStepTime)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(step_tokens=2048, max_running=64))
    num_blocks: int = 8192
    """KV blocks of 16 tokens."""
    max_model_len: int = 32_768
    kind: str = ""
    """Name of the accelerator, for reports and prices."""
    cold_start_ns: int = 0
    """From being asked for to being ready."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request as it is sent to a worker: what `protocol.worker.Submit` carries, with names in place of hashes."""

    id: RequestId
    gateway: int
    attempt: int
    prompt: tuple[Segment, ...]
    names: Sequence[BlockHash]
    """Of the prompt's and the answer's whole blocks."""
    answer: int
    """The content of the answer."""
    output_tokens: int
    """When the model stops by itself."""
    max_tokens: int
    salt: bytes = b""
    public_tokens: int = 0
    priority: int = 0
    fairness_key: str = ""
    fairness_weight: float = 1.0
    poison: bool = False


class Began(msgspec.Struct, frozen=True, gc=False):
    """The first token came."""

    id: RequestId
    attempt: int
    cached_tokens: int


class Sliced(msgspec.Struct, frozen=True, gc=False):
    """Another slice of the answer is full."""

    id: RequestId
    attempt: int
    num_tokens: int
    """All that there are by now."""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The last word."""

    id: RequestId
    attempt: int
    reason: str
    usage: Usage
    error: str = ""


class Failed(msgspec.Struct, frozen=True):
    """The request was refused, or its worker is gone."""

    id: RequestId
    attempt: int
    error: PenstockError


Told = Began | Sliced | Finished | Failed


class Report(msgspec.Struct, frozen=True, gc=False):
    """What a worker says of itself: see `WorkerView`."""

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int


class Listener(Protocol):
    """Whoever carries a worker's words to the gateways."""

    slice_tokens: int
    """Answer tokens between two words about a request."""
    report_ns: int
    """Time between two reports of a worker that has work."""

    def told(self, now_ns: int, worker: "SimWorker", gateway: int, told: Sequence[Told]) -> None:
        """What a worker says of its requests, to the gateway with this number."""
        ...

    def reported(self, now_ns: int, worker: "SimWorker", report: Report) -> None:
        """What it says of itself, to all."""
        ...


class _Stream:
    """One request here."""

    __slots__ = ("answer", "due", "request", "submission")

    def __init__(self, submission: Submission, request: Request) -> None:
        self.submission, self.request = submission, request
        self.due = 1
        """Its answer's length at which it is told next."""
        stops = submission.output_tokens < submission.max_tokens
        self.answer = content_tokens(
            submission.answer, 0, min(submission.output_tokens, submission.max_tokens)
        )
        if stops:
            self.answer[-1] = EOS


class SimWorker:
    """One engine. Its owner sends it what arrives; it enters its own steps into the timeline."""

    def __init__(
        self, worker_id: WorkerId, actor: int, spec: WorkerSpec, timeline: Timeline, listener: Listener
    ) -> None:
        self.id, self.actor, self.spec = worker_id, actor, spec
        self._timeline, self._listener = timeline, listener
        self.clock = LocalClock()
        manager = KVManager.with_prefix_cache(
            spec.num_blocks, BlockHasher(key=_KEY, model="sim", kv_dtype="sim")
        )
        if not spec.engine.prefix_cache:
            manager = KVManager.without_prefix_cache(spec.num_blocks)
        self.scheduler = Scheduler(
            Limits.of(spec.engine, spec.max_model_len),
            manager,
            self.clock,
            waiting_queue(spec.engine),
            PrefillBudget(LatencyTargets.of(spec.engine)),
        )
        self._streams: dict[RequestId, _Stream] = {}
        self._rows: dict[int, _Stream] = {}
        self._plan: StepPlan | None = None
        self._news: dict[int, list[Told]] = {}
        self._is_reporting = False
        self.is_gone = False
        self.steps = 0
        self.busy_ns = 0

    # --- what gateways do ---------------------------------------------------------------------------

    def submit(self, now_ns: int, submission: Submission) -> None:
        """Take a request; what cannot be taken is told at once."""
        if self.is_gone:
            return
        self.clock.time_ns = now_ns
        sampling = SamplingParams(max_tokens=submission.max_tokens, stop_token_ids=_STOPS)
        request = Request(
            request_id=submission.id,
            tokens=prompt_tokens(submission.prompt),
            sampling=sampling,
            salt=submission.salt,
            public_tokens=submission.public_tokens,
            priority=submission.priority,
            fairness_key=submission.fairness_key,
            fairness_weight=submission.fairness_weight,
        )
        try:
            self.scheduler.submit(request, arrived_ns=now_ns)
        except PenstockError as error:
            failed = Failed(submission.id, submission.attempt, error)
            self._listener.told(now_ns, self, submission.gateway, [failed])
            return
        request.table.hashes += submission.names
        self._streams[submission.id] = _Stream(submission, request)
        if not self._is_reporting:
            self._is_reporting = True
            self._timeline.at(
                now_ns + self._listener.report_ns, self.actor, Rank.TIMER, self._on_report, None
            )
        if self._plan is None:
            self._begin(now_ns)

    def abort(self, now_ns: int, request_id: RequestId) -> None:
        """End a request; its last word is told, unless it has ended."""
        stream = self._streams.get(request_id)
        if stream is None or self.is_gone:
            return
        self.clock.time_ns = now_ns
        output = self.scheduler.abort(request_id)
        assert output is not None, "what has a stream has not ended"
        self._end(stream, output)
        self._flush(now_ns)
        if self._plan is None:
            self._begin(now_ns)

    def leave(self) -> None:
        """Be no more: whatever runs here is lost, and nothing is told any more."""
        self.is_gone, self._plan = True, None

    @property
    def num_streams(self) -> int:
        """Requests that have come and not ended."""
        return len(self._streams)

    def report(self) -> Report:
        """Gauges."""
        now = self.scheduler.statistics()
        return Report(now.running, now.waiting, now.blocks_total, now.blocks_used)

    def _on_report(self, now_ns: int, _: None) -> None:
        if self.is_gone:
            return
        self._listener.reported(now_ns, self, self.report())
        self._is_reporting = bool(self._streams)
        if self._is_reporting:
            self._timeline.at(
                now_ns + self._listener.report_ns, self.actor, Rank.TIMER, self._on_report, None
            )

    # --- steps --------------------------------------------------------------------------------------

    def _begin(self, now_ns: int) -> None:
        self.clock.time_ns = now_ns
        plan = self._plan = self.scheduler.schedule()
        if plan is None:
            return
        for new in plan.new_rows:
            self._rows[new.row] = self._streams[new.request_id]
        step_ns = max(1, self.spec.step_time.step_ns(StepShape.of(plan.work)))
        self.steps += 1
        self.busy_ns += step_ns
        self._timeline.at(now_ns + step_ns, self.actor, Rank.STEP, self._on_step, plan)

    def _on_step(self, now_ns: int, what: StepPlan) -> None:
        plan = self._plan
        if what is not plan or plan is None:
            return  # It was lost in a crash.
        self._plan, self.clock.time_ns = None, now_ns
        rows = self._rows
        sampled: list[Sampled] = []
        for work in plan.work:
            if work.samples:
                stream = rows[work.row]
                position = work.num_computed + work.num_tokens - stream.request.num_prompt
                sampled.append(Sampled(work.row, stream.answer[position]))
        outcome = self.scheduler.apply(StepResult(plan.step, tuple(sampled)))
        streams = self._streams
        for output in outcome.outputs:
            stream = streams[output.request_id]
            if output.finish is not None:
                self._end(stream, output)
            elif stream.request.num_generated >= stream.due:
                self._news.setdefault(stream.submission.gateway, []).append(self._due(stream))
        if self._news:
            self._flush(now_ns)
        self._begin(now_ns)

    def _due(self, stream: _Stream) -> Told:
        request, submission = stream.request, stream.submission
        num_tokens = request.num_generated
        stream.due = (num_tokens // self._listener.slice_tokens + 1) * self._listener.slice_tokens
        if num_tokens == 1:
            return Began(submission.id, submission.attempt, request.num_cached)
        return Sliced(submission.id, submission.attempt, num_tokens)

    def _end(self, stream: _Stream, output: RequestOutput) -> None:
        submission = stream.submission
        del self._streams[submission.id]
        assert output.finish is not None
        assert output.usage is not None
        told = Finished(
            submission.id, submission.attempt, output.finish.value, output.usage, output.error or ""
        )
        self._news.setdefault(submission.gateway, []).append(told)

    def _flush(self, now_ns: int) -> None:
        news, self._news = self._news, {}
        for gateway, told in news.items():
            self._listener.told(now_ns, self, gateway, told)

"""A simulated worker: the real scheduler, KV manager, block pool and prefix cache; only the time of a step is
modelled.

    submit, abort ──> Scheduler ──plan──> StepTime: so many ns later ──result──> Scheduler ──> the gateways

Its messages about a request are all that a gateway acts on: its first token, every full slice of its answer,
and its
end. A step without messages is not seen. So while all rows decode and nothing is due, the worker
coasts: it knows when the next steps end, and does them in one leap when something is due or comes in
(schedule/fast_forward.py).
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from penstock.errors import PenstockError, WorkerUnavailable
from penstock.kv.cache.manager import KVManager
from penstock.kv.events import KVEvent, KVEventLog
from penstock.kv.hashing import BlockHash, BlockHasher
from penstock.policy.placement.adapters import ResidencyOrder
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import RequestOutput, Sampled, StepPlan, StepResult
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget
from penstock.schedule.queue import waiting_queue
from penstock.schedule.request import Request
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step import StepShape
from penstock.sim.traffic.prompts import EOS, PromptBlockNames, Segment, content_tokens, prompt_tokens
from penstock.sim.world.adapters import SimAdapters
from penstock.sim.world.messages import (
    AnswerStream,
    Began,
    Failed,
    Finished,
    LocalClock,
    Rank,
    Sliced,
    Submission,
    Timeline,
    WorkerLoadReport,
    WorkerMessage,
)
from penstock.sim.world.run import SimWorkerSpec
from penstock.types import RequestId, SamplingParams, WorkerId

_FAST_FORWARD_STEPS = 24
"""Steps whose times are worked out at once: whatever comes in before them makes the rest useless."""
_STOPS = (EOS,)
_MANY = 1 << 30


class Listener(Protocol):
    """Carries a worker's messages to the gateways."""

    slice_tokens: int
    """Answer tokens between two words about a request."""
    report_ns: int
    """Time between two reports of a worker that has work."""

    def on_messages(
        self, now_ns: int, worker: "SimWorker", gateway: int, messages: Sequence[WorkerMessage]
    ) -> None:
        """A worker's messages about its requests, to the gateway with this number."""
        ...

    def reported(self, now_ns: int, worker: "SimWorker", report: WorkerLoadReport) -> None:
        """Its report of itself, to all."""
        ...

    def died(self, now_ns: int, worker: "SimWorker") -> None:
        """A request brought it down."""
        ...

    def cached(self, now_ns: int, worker: "SimWorker", events: tuple[KVEvent, ...]) -> None:
        """The changes of its KV cache, to all."""
        ...


class SimWorker:
    """One engine. Its owner sends it what arrives; it enters its own steps into the timeline."""

    def __init__(
        self,
        worker_id: WorkerId,
        actor: int,
        spec: SimWorkerSpec,
        timeline: Timeline,
        listener: Listener,
        *,
        hash_key: bytes,
        tells_kv: bool = False,
    ) -> None:
        """`hash_key` is its launcher's.

        With `tells_kv` it tells what its KV cache holds, whenever it tells of requests.
        """
        self.id, self.actor, self.spec = worker_id, actor, spec
        self.identity = spec.identity
        """Its announced identity (`ModelInfo.identity`)."""
        self._timeline, self._listener = timeline, listener
        self.clock = LocalClock()
        hasher = BlockHasher(key=hash_key, identity=self.identity)
        self._names = PromptBlockNames(hasher)
        manager = KVManager.with_prefix_cache(spec.num_blocks, hasher)
        if not spec.engine.prefix_cache:
            manager = KVManager.without_prefix_cache(spec.num_blocks)
        self.tells_kv = tells_kv
        self._kv_events = KVEventLog("none") if tells_kv else None
        if self._kv_events is not None:
            manager.pool.events = self._kv_events
        self._prefill = PrefillBudget(LatencyTargets.of(spec.engine))
        self.scheduler = Scheduler(
            BatchLimits.of(spec.engine, spec.max_model_len),
            manager,
            self.clock,
            waiting_queue(spec.engine),
            self._prefill,
        )
        self._running = self.scheduler.running  # The list itself, which changes.
        if spec.fast_forwards:
            self.scheduler.decode_together(self._draw)
        self._streams: dict[RequestId, AnswerStream] = {}
        self._rows: dict[int, AnswerStream] = {}
        self._plan: StepPlan | None = None
        self._times: list[int] = []  # When the steps it coasts over begin, and the last of them ends.
        self._fast_forward_max = self._fast_forward_rows = self._fast_forward_kv = 0
        self._due_in = 0
        """Steps after which something is due for one of the rows, if all decode; 0 if one does not yet."""
        self._outbox: dict[int, list[WorkerMessage]] = {}
        self._inbox: list[tuple[int, Submission | RequestId]] = []
        self.adapters: SimAdapters | None = None
        if spec.adapters is not None:
            self.adapters = SimAdapters(spec.adapters, timeline, actor, on_read=self._adapter_came)
        self._is_reporting = False
        self._last_gauges = self._gauges()
        self.is_gone = False
        self.fails = False
        """Every request that it is given."""
        self.sticks_next = False
        """The next request sends nothing."""
        self._is_garbage = False
        self._slowness = 1.0
        self._stuck: dict[RequestId, tuple[int, WorkerMessage]] = {}
        self.steps = 0
        self.busy_ns = 0

    # --- what gateways do ---------------------------------------------------------------------------

    def take(self, now_ns: int, message: Submission | RequestId | ResidencyOrder) -> None:
        """A request, the id of one to end, or what adapters are to be in memory. As in our engine requests
        are looked at between two steps.
        """
        if self.is_gone:
            return
        if self.adapters is None:
            assert not isinstance(message, ResidencyOrder), "it tells of no adapters"
            self._take(now_ns, message)
        else:
            self._take_all(now_ns, self.adapters.pass_on(now_ns, message))

    def _take_all(self, now_ns: int, messages: Sequence[Submission | RequestId]) -> None:
        for each in messages:
            self._take(now_ns, each)

    def _adapter_came(self, now_ns: int, ready: Sequence[Submission]) -> None:
        if not self.is_gone:
            self._take_all(now_ns, ready)
            self._listener.reported(now_ns, self, self.report(now_ns))

    def _take(self, now_ns: int, message: Submission | RequestId) -> None:
        self._inbox.append((now_ns, message))
        if self._times:
            self._stop_coasting(bisect_right(self._times, now_ns))
        elif self._plan is None:
            self._rest(now_ns)
        if not self._is_reporting:
            self._is_reporting = True
            self._report_later(now_ns)

    def leave(self, now_ns: int) -> None:
        """Be no more: all requests here are lost, and nothing is sent any more.

        Output that was made until now is on its way: a worker sends each token when it has it, also where its
        gateway would have acted on whole slices only.
        """
        if self._times:
            self._leap_to(max(0, bisect_left(self._times, now_ns) - 1))
            self.steps += 1  # The one that is under way.
            self.busy_ns += self._times[1] - self._times[0]
        for stream in self._streams.values():
            if not stream.is_stuck and stream.request.num_generated > stream.first:
                self._is_due(stream)
        self._flush(now_ns)
        self.is_gone, self._plan, self._times = True, None, []

    def change_pace(self, now_ns: int, slowness: float, *, garbage: bool = False) -> None:
        """From the next step on steps take so many times as long; with `garbage` they compute what is not
        numbers.
        """
        self._slowness, self._is_garbage = slowness, garbage
        if self.spec.fast_forwards:
            self.scheduler.decode_together(None if garbage else self._draw)
        if self._times:
            self._stop_coasting(bisect_left(self._times, now_ns))

    @property
    def num_streams(self) -> int:
        """Requests that have come and not ended."""
        return len(self._streams) + len(self._inbox) + len(self._stuck) + len(self._held())

    def requests(self) -> Iterator[Request]:
        """The scheduler's requests, oldest submission first."""
        return (stream.request for stream in self._streams.values())

    def check_invariants(self) -> None:
        """Assert what must hold between two events: the scheduler's own, and that every stream has the
        beginning of its answer.
        """
        self.scheduler.check_invariants()
        for stream in self._streams.values():
            given = stream.request.tokens[stream.request.num_prompt :]
            assert given == stream.answer[: len(given)], (
                f"{stream.submission.id} has tokens of another answer"
            )

    def ids_of(self, gateway: int) -> list[RequestId]:
        """Requests of one gateway that are here."""
        ids = [each.submission.id for each in self._streams.values() if each.submission.gateway == gateway]
        ids += [request_id for request_id, (owner, _) in self._stuck.items() if owner == gateway]
        ids += [each.id for each in self._held() if each.gateway == gateway]
        return ids + [
            message.id
            for _, message in self._inbox
            if isinstance(message, Submission) and message.gateway == gateway
        ]

    def _held(self) -> Sequence[Submission]:
        return () if self.adapters is None else tuple(self.adapters.waiting())

    def report(self, now_ns: int) -> WorkerLoadReport:
        """Gauges, as they were when the last step ended."""
        if self._times:
            self._leap_to(bisect_right(self._times, now_ns) - 1)
        return self._gauges() if self._plan is None else self._last_gauges

    def _gauges(self) -> WorkerLoadReport:
        loaded = None if self.adapters is None else self.adapters.loaded
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        running, counts = len(self._running), self._prefill.sums.counts
        waiting = len(self._streams) - running
        blocks = pool.num_blocks, pool.num_used
        return WorkerLoadReport(running, waiting, *blocks, scheduler.rows_max, counts, loaded)

    def _report_later(self, now_ns: int) -> None:
        when_ns = now_ns + self._listener.report_ns
        self._timeline.at(when_ns, self.actor, Rank.TIMER, self._on_report, None)

    def _on_report(self, now_ns: int, _: None) -> None:
        if self.is_gone:
            return
        self._listener.reported(now_ns, self, self.report(now_ns))
        self._is_reporting = bool(self._streams)
        if self._is_reporting:
            self._report_later(now_ns)

    # --- between steps ------------------------------------------------------------------------------

    def _rest(self, now_ns: int) -> None:
        """A step is over: send its outputs, take in messages that came meanwhile, and continue."""
        self.clock.time_ns = now_ns
        while self._inbox:
            inbox, self._inbox = self._inbox, []
            for arrived_ns, message in inbox:
                if isinstance(message, Submission):
                    self._submit(arrived_ns, message)
                else:
                    self._abort(message)
        if self._outbox:
            self._flush(now_ns)
        decodes = self.spec.fast_forwards and not self._is_garbage and self._running
        steps_max = self._due_in if decodes else 0
        if steps_max and (steps_max := self.scheduler.fast_forward_max(steps_max)):
            running = self._running
            self._fast_forward_max, self._fast_forward_rows = steps_max, len(running)
            self._fast_forward_kv = sum([request.num_planned for request in running])
            self._times = [now_ns]
            self._extend_fast_forward()
        elif self._streams:
            self._launch(now_ns)

    def _abort(self, request_id: RequestId) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.is_stuck = False
            output = self.scheduler.abort(request_id)
            assert output is not None, "what has a stream has not ended"
            self._end(stream, output)
        elif (held := self._stuck.pop(request_id, None)) is not None:
            self._send(*held)

    def _submit(self, arrived_ns: int, submission: Submission) -> None:
        if self.fails:
            self._send(
                submission.gateway, Failed(submission.id, submission.attempt, WorkerUnavailable("it fails"))
            )
            return
        resumed = content_tokens(submission.answer, 0, submission.num_resumed)
        request = Request(
            request_id=submission.id,
            tokens=prompt_tokens(submission.prompt) + resumed,
            num_resumed=submission.num_resumed,
            sampling=SamplingParams(max_tokens=submission.max_tokens, stop_token_ids=_STOPS),
            salt=submission.salt,
            public_tokens=submission.public_tokens,
            priority=submission.priority,
            fairness_key=submission.fairness_key,
            fairness_weight=submission.fairness_weight,
            takes_row=submission.takes_row,
        )
        try:
            self.scheduler.submit(request, arrived_ns=arrived_ns)
        except PenstockError as error:
            self._send(submission.gateway, Failed(submission.id, submission.attempt, error))
            return
        if self.spec.engine.prefix_cache:
            request.table.hashes += self._names_of(submission)
        self._streams[submission.id] = AnswerStream(submission, request, is_stuck=self.sticks_next)
        self.sticks_next = False

    def _names_of(self, submission: Submission) -> Sequence[BlockHash]:
        """Of the prompt's and the answer's whole blocks, in place of the hashes of the tokens when they are
        full: to pool and cache one name is as good as another.
        """
        num_answer = min(submission.output_tokens, submission.max_tokens)
        names = self._names.chain(
            submission.prompt,
            Segment(submission.answer, num_answer),
            salt=submission.salt,
            adapter=submission.adapter,
            public_tokens=submission.public_tokens,
        )
        return cast(Sequence[BlockHash], names)

    # --- one step -----------------------------------------------------------------------------------

    def _launch(self, now_ns: int) -> None:
        """Plan one step, which ends after its time."""
        self._last_gauges = self._gauges()
        self._plan = plan = self.scheduler.schedule()
        assert plan is not None, "what has come waits or runs"
        for new in plan.new_rows:
            self._rows[new.row] = self._streams[new.request_id]
        step_ns = self._step_ns(self.scheduler.oldest.shape)
        self.steps += 1
        self.busy_ns += step_ns
        self._timeline.at(now_ns + step_ns, self.actor, Rank.STEP, self._on_step, plan)

    def _step_ns(self, shape: StepShape) -> int:
        step_ns = self.spec.step_time.step_ns(shape)
        return max(1, step_ns if self._slowness == 1.0 else int(step_ns * self._slowness))

    def _on_step(self, now_ns: int, plan: StepPlan) -> None:
        if plan is not self._plan:
            return  # It was lost in a crash.
        self._plan, self.clock.time_ns = None, now_ns
        rows, error = self._rows, "the logits are not numbers" if self._is_garbage else None
        if any(rows[new.row].submission.poison for new in plan.new_rows):
            self._listener.died(now_ns, self)
            return
        sampled = [
            Sampled(
                row, rows[row].answer[work.num_computed + work.num_tokens - rows[row].num_prompt], None, error
            )
            for work in self.scheduler.oldest.plan.work
            if work.samples and (row := work.row) >= 0
        ]
        outcome = self.scheduler.apply(StepResult(plan.step, tuple(sampled)))
        self._tell_of(outcome.outputs)
        self._rest(now_ns)

    # --- coasting -----------------------------------------------------------------------------------

    def _extend_fast_forward(self) -> None:
        """Work out when some more steps end."""
        times, rows, read = self._times, self._fast_forward_rows, self._fast_forward_kv
        count = min(_FAST_FORWARD_STEPS, self._fast_forward_max + 1 - len(times))
        self._fast_forward_kv = end = read + rows * count
        time_ns, slowness = times[-1], self._slowness
        for each_ns in self.spec.step_time.decode_ns(rows, range(read + rows, end + 1, rows)):
            if slowness != 1.0:
                each_ns = int(each_ns * slowness)
            time_ns += each_ns if each_ns > 1 else 1
            times.append(time_ns)
        self._timeline.at(time_ns, self.actor, Rank.STEP, self._on_coasted, times)

    def _on_coasted(self, now_ns: int, times: list[int]) -> None:
        if times is not self._times:
            return  # Something came in between.
        if len(times) <= self._fast_forward_max:
            self._extend_fast_forward()
        else:
            self._leap_to(len(times) - 1)
            self._times = []
            self._rest(now_ns)

    def _stop_coasting(self, end: int) -> None:
        """Let the step that ends at this one of the times be the last to coast over."""
        times = self._times
        self._fast_forward_max = min(self._fast_forward_max, end)
        if end < len(times) - 1:
            self._times = times[: end + 1]
            self._timeline.at(times[end], self.actor, Rank.STEP, self._on_coasted, self._times)

    def _leap_to(self, index: int) -> None:
        """Do the steps until one of the times; the rest continues."""
        if not index:
            return
        self.clock.time_ns = (times := self._times[: index + 1])[-1]
        outcome = self.scheduler.fast_forward(times, self._draw)
        self.steps += index
        self.busy_ns += times[-1] - times[0]
        del self._times[:index]
        self._fast_forward_max -= index
        if not self._fast_forward_max:
            self._tell_of(outcome.outputs)

    def _draw(self, requests: Sequence[Request], count: int) -> list["array[int]"]:
        streams = self._streams
        return [
            streams[request.request_id].answer[
                (first := len(request.tokens) - request.num_prompt) : first + count
            ]
            for request in requests
        ]

    # --- words --------------------------------------------------------------------------------------

    def _tell_of(self, outputs: Sequence[RequestOutput]) -> None:
        """The outputs of a step: first who ended, then whose first token or slice is here. And when the next
        is.
        """
        streams = self._streams
        for output in outputs:
            if output.finish is not None:
                self._end(streams[output.request_id], output)
        least = _MANY
        for request in self._running:
            stream = streams[request.request_id]
            num_tokens, due = len(request.tokens) - request.num_prompt, stream.due
            if num_tokens >= due:
                self._is_due(stream)
                due = stream.due
            if due == stream.first:
                least = 0
            else:
                left = (due if due < stream.num_answer else stream.num_answer) - num_tokens
                least = left if left < least else least
        self._due_in = least

    def _is_due(self, stream: AnswerStream) -> None:
        request, submission = stream.request, stream.submission
        num_tokens, each = request.num_generated, self._listener.slice_tokens
        stream.due = (num_tokens // each + 1) * each
        if stream.is_stuck:
            return
        if num_tokens == 1:
            prefill_ns = request.usage(self.clock.now_ns()).prefill_ns
            message = Began(submission.id, submission.attempt, request.num_cached, prefill_ns)
            self._send(submission.gateway, message)
        else:
            self._send(submission.gateway, Sliced(submission.id, submission.attempt, num_tokens))

    def _end(self, stream: AnswerStream, output: RequestOutput) -> None:
        submission = stream.submission
        del self._streams[submission.id]
        if self.adapters is not None:
            now_ns = self.clock.now_ns()
            self._inbox += [(now_ns, each) for each in self.adapters.finished(now_ns, submission.id)]
        assert output.finish is not None
        assert output.usage is not None
        reason, error = output.finish.value, output.error or ""
        message = Finished(submission.id, submission.attempt, reason, output.usage, error)
        if stream.is_stuck:
            self._stuck[submission.id] = (submission.gateway, message)
        else:
            self._send(submission.gateway, message)

    def _send(self, gateway: int, message: WorkerMessage) -> None:
        self._outbox.setdefault(gateway, []).append(message)

    def _flush(self, now_ns: int) -> None:
        outbox, self._outbox = self._outbox, {}
        for gateway, messages in outbox.items():
            self._listener.on_messages(now_ns, self, gateway, messages)
        # Between two messages about requests no events of blocks are sent: a leap over steps changes nothing
        # that is seen.
        if self._kv_events is not None and (events := self._kv_events.take()):
            self._listener.cached(now_ns, self, events)

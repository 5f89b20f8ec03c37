"""The engine of a model that makes vectors: a submission is many texts, each a request of the scheduler.

    Submit (texts) ──> a batch; a few of its texts at a time ──> Scheduler ──> Runner
    Output (vectors as they come, one finish) <── the batch is over with its last text, or one that failed

A few at a time, so that a batch of 2,048 texts does not fill the queue: others' texts come in between, as the
scheduler's order says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.clock import NS_PER_MS, NS_PER_S, Clock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, Live, Outputs, StepRunner, build_core
from penstock.engine.mailbox import failed_by, request_of
from penstock.errors import ContextTooLong, Draining, InvalidRequest, PenstockError
from penstock.kv.hashing import token_array, token_bytes
from penstock.protocol.worker import Output, RequestFinished, Submit
from penstock.protocol.worker_parts import BATCH_TEXTS_MAX, inputs_problem
from penstock.schedule.scheduler import Scheduler
from penstock.types import FinishReason, RequestId, Usage

TEXTS_MAX = 256
"""Texts of all submissions in the scheduler at once, beyond the one that each has there at least."""


@dataclass(slots=True, eq=False)
class _Batch:
    """One submission: what of it waits, runs and is over."""

    owner: int
    message: Submit
    arrived_ns: int
    pending: Iterator[tuple[int, Submit]]
    """Texts that the scheduler has not seen, by their places."""
    live: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """Those that it has: their places."""
    vectors: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    """Of those that ended since this was last told."""
    usage: Usage = field(default_factory=Usage)
    """Of those that ended."""
    failed: RequestFinished | None = None
    """The first that failed: the others end too."""
    aborted: bool = False


class VectorCore(EngineCore):
    """See the module. Its inputs must be `Submit`s with `inputs`."""

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, clock: Clock, config: EngineSettings
    ) -> None:
        super().__init__(scheduler, runner, clock, config)
        self._delay_ns, self._step_tokens = round(config.batch_delay_ms * NS_PER_MS), config.step_tokens
        self._batches: dict[RequestId, _Batch] = {}
        self._of_text: dict[RequestId, _Batch] = {}

    @property
    def gathers_s(self) -> float:
        """See `EngineCore`: until a step is full, or the oldest has waited for `engine.batch_delay_ms`."""
        if not self._delay_ns or not self._live or self._in_flight or self._outbox:
            return 0.0
        requests = [live.request for live in self._live.values()]
        if any(request.num_computed for request in requests):
            return 0.0
        if sum(request.num_pending for request in requests) >= self._step_tokens:
            return 0.0
        due_ns = min(request.arrival_ns for request in requests) + self._delay_ns
        return max(0, due_ns - self._clock.now_ns()) / NS_PER_S

    def submit(self, owner: int, message: Submit, arrived_ns: int, grammar: object = None) -> None:
        """See `EngineCore`."""
        try:
            if self._draining:
                raise Draining("this worker is going away")
            batch = _Batch(owner, message, arrived_ns, _texts(message, self.info.max_model_len))
        except PenstockError as error:
            self._end_with(owner, message.request_id, error)
            return
        self._batches[message.request_id] = batch
        self._feed_or_fail(batch)
        if not batch.live:
            self._outbox.setdefault(owner, []).append(self._output(batch))

    def abort(self, owner: int, request_ids: tuple[RequestId, ...]) -> None:
        """See `EngineCore`."""
        for request_id in request_ids:
            batch = self._batches.get(request_id)
            if batch is not None and batch.owner == owner:
                batch.aborted = True
                self._end_texts(batch)

    def step(self) -> Outputs:
        """See `EngineCore`: outputs about texts become outputs about their batches."""
        reported: Outputs = {}
        for owner, outputs in super().step().items():
            touched: dict[RequestId, _Batch] = {}
            for output in outputs:
                batch = self._of_text.pop(output.request_id, None)
                if batch is None:  # A submission that was no batch.
                    reported.setdefault(owner, []).append(output)
                    continue
                self._take(batch, output)
                touched[batch.message.request_id] = batch
            for batch in touched.values():
                reported.setdefault(owner, []).append(self._output(batch))
        return reported

    def _feed(self, batch: _Batch) -> None:
        """Let the scheduler have more texts of a batch.

        Raises:
            PenstockError: it does not take one; nothing more of the batch will be given to it.
        """
        while not batch.live or (len(batch.live) < BATCH_TEXTS_MAX and len(self._of_text) < TEXTS_MAX):
            place, message = next(batch.pending, (-1, batch.message))
            if place < 0:
                return
            request = request_of(message, self._runner.info.vocab_size, None)
            request.pools = True
            request.num_first = batch.message.firsts[place] if batch.message.firsts else 0
            # It stands behind what came before it was let in: else the rest of a large batch went first.
            arrived_ns = self._clock.now_ns() if batch.usage.prompt_tokens else batch.arrived_ns
            self._scheduler.submit(request, arrived_ns=arrived_ns)
            if not self._live:
                self._busy_since_ns = self._clock.now_ns()
            self._live[message.request_id] = Live(batch.owner, request)
            self._of_text[message.request_id] = batch
            batch.live[message.request_id] = place

    def _feed_or_fail(self, batch: _Batch) -> None:
        try:
            self._feed(batch)
        except PenstockError as error:
            batch.failed = failed_by(error)
            self._end_texts(batch)

    def _take(self, batch: _Batch, output: Output) -> None:
        """A text is over."""
        finish, place = output.finish, batch.live.pop(output.request_id)
        assert finish is not None, "a text has nothing to tell before its end"
        batch.usage = _added(batch.usage, finish.usage)
        if finish.reason is FinishReason.ERROR:
            batch.failed = batch.failed or finish
        batch.vectors += [(place, vector) for _, vector in output.vectors]
        if batch.failed is None and not batch.aborted:
            self._feed_or_fail(batch)
        elif batch.failed is not None:
            self._end_texts(batch)

    def _end_texts(self, batch: _Batch) -> None:
        """End what runs of a batch; what waits is not begun. Each is reported in the next step."""
        batch.pending = iter(())
        super().abort(batch.owner, tuple(batch.live))

    def _output(self, batch: _Batch) -> Output:
        """The output for a batch: vectors, and its end with its last text."""
        vectors, batch.vectors = tuple(batch.vectors), []
        name, finish = batch.message.request_id, None
        if not batch.live:
            del self._batches[name]
            finish = self._finished(batch)
        return Output(name, (), finish=finish, device_ns=batch.usage.device_ns, vectors=vectors)

    def _finished(self, batch: _Batch) -> RequestFinished:
        spent_ns = self._clock.now_ns() - batch.arrived_ns
        usage = replace(batch.usage, prefill_ns=max(0, spent_ns - batch.usage.queue_ns), decode_ns=0)
        if batch.failed is not None:
            return replace(batch.failed, usage=usage)
        return RequestFinished(reason=FinishReason.ABORT if batch.aborted else FinishReason.STOP, usage=usage)


def build_vector_core(
    runner: StepRunner, config: EngineSettings, hash_key: bytes, clock: Clock
) -> EngineCore:
    """`build_core` for a model that makes vectors. Only what the last token has seen can come from a cache: a
    mean is of tokens that were computed.
    """
    prefix_cache = config.prefix_cache and runner.info.pooling == "last"
    return build_core(runner, replace(config, prefix_cache=prefix_cache), hash_key, clock, VectorCore)


def _texts(message: Submit, tokens_max: int) -> Iterator[tuple[int, Submit]]:
    """Each text as a submission of its own.

    Raises:
        InvalidRequest: there are none, or the prompt is not divided into them.
        ContextTooLong: one has more than `tokens_max` tokens.
    """
    if not message.inputs:
        raise InvalidRequest("this model makes vectors of texts, and generates none", param="inputs")
    try:
        tokens = token_array(message.prompt)
    except ValueError:
        raise InvalidRequest("the prompt is not a whole number of tokens", param="prompt") from None
    if problem := inputs_problem(len(tokens), message.inputs, message.firsts):
        param, reason = problem
        raise InvalidRequest(reason, param=param)
    if (longest := max(message.inputs)) > tokens_max:
        raise ContextTooLong(f"a text has {longest} tokens; the model takes {tokens_max}", param="inputs")
    if message.adapter:
        raise InvalidRequest("a model that makes vectors takes no adapters", param="adapter")
    return _pieces(message, tokens)


def _pieces(message: Submit, tokens: Sequence[int]) -> Iterator[tuple[int, Submit]]:
    start = 0
    for place, length in enumerate(message.inputs):
        name = RequestId(f"{message.request_id}#{place}")
        prompt = token_bytes(tokens[start : start + length])
        yield place, replace(message, request_id=name, prompt=prompt, inputs=(), firsts=())
        start += length


def _added(one: Usage, other: Usage) -> Usage:
    """The usage of both; it queued until the first of them began."""
    return Usage(
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        host_cached_tokens=one.host_cached_tokens + other.host_cached_tokens,
        queue_ns=min(one.queue_ns, other.queue_ns) if one.prompt_tokens else other.queue_ns,
        steps=one.steps + other.steps,
        computed_tokens=one.computed_tokens + other.computed_tokens,
        preemptions=one.preemptions + other.preemptions,
        kv_block_ns=one.kv_block_ns + other.kv_block_ns,
        device_ns=one.device_ns + other.device_ns,
    )

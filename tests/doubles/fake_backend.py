"""A backend without a worker: scripted words at a steady rate.

It keeps the whole contract (stop strings, limits, log-probabilities, abort, loss of the worker) and is
deterministic. Like an engine it works in steps: every stream gets one token per step.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count, islice

import msgspec

from penstock.backends.base import (
    BackendStatus,
    Delta,
    Finish,
    GenerateRequest,
    Phase,
    Sink,
    TextLogprob,
    end_streams,
    nothing,
)
from penstock.clock import Clock
from penstock.errors import PenstockError, StreamBroken, WorkerUnavailable
from penstock.protocol.worker import ModelInfo
from penstock.text.detokenizer import StopChecker
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId, Usage

Script = Callable[[GenerateRequest], Iterator[str]]
"""The tokens of an answer, as text. When they end, the answer ends as if by EOS."""

WORDS = ("water", " runs", " down", " the", " pipe", " to", " a", " turbine", ",", " and", " light", " comes")


def endless_words(request: GenerateRequest) -> Iterator[str]:
    """Words without end, the same for the same seed."""
    seed = request.sampling.seed
    return (WORDS[(seed + i) % len(WORDS)] for i in count())


class FakeBackend:
    """Answers every request from `script`. `step_s` 0 gives a token per turn of the event loop."""

    def __init__(
        self,
        clock: Clock,
        *,
        script: Script = endless_words,
        step_s: float = 0.0,
        max_running: int = 1024,
        token_id: Callable[[str], int | None] = lambda _token: None,
    ) -> None:
        """`token_id`: of a scripted token, where the ids matter; else they count up."""
        self.on_change: Callable[[], None] = nothing
        self.resumes = True
        """Whether another worker can go on with what this one began, as with our own engine."""
        self._clock, self._script, self._step_s = clock, script, step_s
        self._token_id = token_id
        self._streams: dict[RequestId, _FakeStream] = {}
        self._timer: asyncio.Handle | None = None
        self._idle = asyncio.Event()
        self._status = BackendStatus(
            phase=Phase.READY, info=msgspec.structs.replace(INFO, max_running=max_running), stage="ready"
        )

    @property
    def status(self) -> BackendStatus:
        """See `Backend.status`."""
        return self._status

    @property
    def num_streams(self) -> int:
        """Streams that have not had their finish."""
        return len(self._streams)

    def generate(self, request: GenerateRequest, sink: Sink) -> "_FakeStream":
        """See `Backend.generate`.

        Raises:
            WorkerUnavailable: after `lose_worker` or `drain`.
        """
        if not self._status.ready:
            raise WorkerUnavailable(f"the worker is not ready: {self._status.stage}")
        assert request.request_id not in self._streams, f"{request.request_id} is already running"
        if request.resumed and not self.resumes:
            raise WorkerUnavailable("this kind of worker cannot continue a stream of another one")
        stream = _FakeStream(
            request,
            sink,
            self._script(request),
            self._clock,
            self._leave,
            resumes=self.resumes,
            token_id=self._token_id,
        )
        self._streams[request.request_id] = stream
        if self._timer is None:
            self._schedule()
        return stream

    async def drain(self, timeout_s: float) -> None:
        """See `Backend.drain`."""
        self._change(Phase.DRAINING, "draining")
        await end_streams(self._streams, self._idle, timeout_s)
        self._change(Phase.DOWN, "closed")

    def lose_worker(self, why: str = "the worker is gone") -> None:
        """Break every stream off, as when a worker dies; nothing is taken until `recover`."""
        self._change(Phase.LOST, why)
        for stream in list(self._streams.values()):
            stream.break_off(StreamBroken(why) if stream.num_tokens else WorkerUnavailable(why))

    def recover(self) -> None:
        """The worker is back."""
        self._status.restarts += 1
        self._change(Phase.READY, "ready")

    def show(self, phase: Phase, stage: str, *, done: int = 0, total: int = 0) -> None:
        """Say that it is this far."""
        self._status.done, self._status.total = done, total
        self._change(phase, stage)

    def fail(self, request_id: RequestId, error: PenstockError) -> None:
        """End one stream with an error, as the engine does for NaN logits."""
        self._streams[request_id].break_off(error)

    def _change(self, phase: Phase, stage: str) -> None:
        self._status.phase, self._status.stage = phase, stage
        self.on_change()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        step = self._step
        self._timer = loop.call_later(self._step_s, step) if self._step_s else loop.call_soon(step)

    def _step(self) -> None:
        self._timer = None
        for stream in list(self._streams.values()):
            stream.step()
        if self._streams and self._timer is None:
            self._schedule()

    def _leave(self, request_id: RequestId) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()


class _FakeStream:
    """One scripted answer."""

    def __init__(
        self,
        request: GenerateRequest,
        sink: Sink,
        tokens: Iterator[str],
        clock: Clock,
        leave: Callable[[RequestId], None],
        *,
        resumes: bool,
        token_id: Callable[[str], int | None],
    ) -> None:
        self.num_tokens, self._resumes, self._token_id = 0, resumes, token_id
        self._request, self._sink, self._tokens = request, sink, tokens
        self._clock, self._leave = clock, leave
        self._stop = StopChecker(request.stop, include_stop=request.include_stop)
        self._started_ns = clock.now_ns()
        self._first_ns = 0
        self._done = False
        for token in islice(tokens, len(request.resumed)):  # As `EngineStream` does.
            self.num_tokens += 1
            self._stop.push(token)

    @property
    def usage(self) -> Usage | None:
        """See `Generation.usage`."""
        return self._usage() if self.num_tokens else None

    def step(self) -> None:
        """One more token, or the end."""
        if self._done:
            return  # A sink ended it earlier in this very step.
        token = next(self._tokens, None)
        if token is None:
            self._end(FinishReason.STOP, last=self._stop.finish())
            return
        if not self.num_tokens and self._request.sampling.prompt_logprobs is not None:
            self._sink.on_delta(
                Delta("", (), (), self._prompt_logprobs(self._request.sampling.prompt_logprobs))
            )
            if self._done:
                return  # The sink left.
        self.num_tokens += 1
        self._first_ns = self._first_ns or self._clock.now_ns()
        text, matched = self._stop.push(token)
        at_limit = self.num_tokens == self._request.sampling.max_tokens
        if at_limit and matched is None:
            text += self._stop.finish()
        token_id = self._token_id(token) or self.num_tokens
        self._sink.on_delta(Delta(text, (token_id,), self._logprobs(token)))
        if matched is not None:
            self._end(FinishReason.STOP, stop=matched)
        elif at_limit:
            self._end(FinishReason.LENGTH)

    def abort(self) -> None:
        """See `Generation.abort`."""
        self._end(FinishReason.ABORT)

    def pause_reading(self) -> bool:
        """See `Generation.pause_reading`: it steps with all others."""
        return False

    def resume_reading(self) -> None:
        """See `Generation.resume_reading`."""

    def break_off(self, error: PenstockError) -> None:
        """End with an error."""
        self._end(FinishReason.ERROR, error=error)

    def _end(
        self,
        reason: FinishReason,
        *,
        last: str = "",
        stop: str | None = None,
        error: PenstockError | None = None,
    ) -> None:
        if last:
            self._sink.on_delta(Delta(last, ()))
        if not self._done:
            self._done = True
            self._leave(self._request.request_id)
            resume = None
            if self._resumes and reason in (FinishReason.ABORT, FinishReason.ERROR):
                resume = tuple(range(1, self.num_tokens + 1))
            finish = Finish(reason=reason, usage=self._usage(), stop=stop, error=error, resume=resume)
            self._sink.on_finish(finish)

    def _usage(self) -> Usage:
        now_ns = self._clock.now_ns()
        first_ns = self._first_ns or now_ns
        return Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self.num_tokens,
            prefill_ns=first_ns - self._started_ns,
            decode_ns=now_ns - first_ns,
            device_ns=now_ns - self._started_ns,
        )

    def _logprobs(self, token: str) -> tuple[TextLogprob, ...]:
        wanted = self._request.sampling.logprobs
        return () if wanted is None else (_logprob(token, wanted),)

    def _prompt_logprobs(self, wanted: int) -> tuple[TextLogprob, ...]:
        """Token ids stand for the prompt's tokens: there is no tokenizer here."""
        return tuple(_logprob(str(token_id), wanted) for token_id in self._request.prompt_token_ids[1:])


def _logprob(token: str, wanted: int) -> TextLogprob:
    others = ((WORDS[i % len(WORDS)], WORDS[i % len(WORDS)].encode(), -1.0 - i) for i in range(wanted - 1))
    top = ((token, token.encode(), -0.5), *others)[:wanted]
    return TextLogprob(token, token.encode(), -0.5, top, 1, tuple(range(1, wanted + 1)), 1)


INFO = ModelInfo(
    model="fake",
    architecture="Fake",
    dtype="float32",
    num_parameters=0,
    vocab_size=32_768,
    max_model_len=32_768,
    num_blocks=32_768 // BLOCK_TOKENS,
    block_tokens=BLOCK_TOKENS,
    max_running=1024,
)

"""One stream of our own engine: token ids in, text out, exactly one end.

    primed with what another worker gave before, if it continues that
    push* ──> finished by the engine
          ──> stop string: finished here, aborted there
          ──> abort (the client left)
          ──> break_off (the worker is lost)

Whichever comes first wins; everything after it is ignored. `push` runs once per stream and step: it is the
relay's hot path, so all that is only needed at the ends stays out of it.

Tokens may wait here for a moment: those of a read that brings several steps (`gather`, then
`release_buffered`), and of an answer that is read only at its end, in pieces. Any end of the stream
tells them first.

The sink's input is a function of the tokens alone, however they were cut into steps: so the detokenizer and
the stop checker of a migrated stream are given the tokens so far, and what they say to that was said before.
"""

from array import array
from collections.abc import Callable

from msgspec.structs import replace

from penstock.backends.base import Delta, Finish, GenerateRequest, Sink, fault_of, to_text_logprob
from penstock.clock import Clock
from penstock.errors import (
    ClientError,
    ContextTooLong,
    Draining,
    EngineFault,
    InvalidRequest,
    KVQuotaExceeded,
    Overloaded,
    PenstockError,
    StreamBroken,
    WorkerBusy,
    WorkerUnavailable,
)
from penstock.protocol.worker import Output, RequestFinished
from penstock.text.detokenizer import StopChecker, detokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, RequestId, Usage

_KINDS: dict[str, type[PenstockError]] = {
    kind.__name__: kind
    for kind in (
        ContextTooLong,
        Draining,
        EngineFault,
        InvalidRequest,
        KVQuotaExceeded,
        Overloaded,
        StreamBroken,
        WorkerBusy,
        WorkerUnavailable,
    )
}


class EngineStream:
    """The `Generation` of one request.

    `leave` is called once, at the end: True if the worker must be told.
    """

    __slots__ = (
        "_clock",
        "_detokenizer",
        "_device_ns",
        "_done",
        "_drafts",
        "_first_ns",
        "_held",
        "_leave",
        "_piece",
        "_push_text",
        "_received",
        "_request",
        "_sink",
        "_stop",
        "_token_ids",
        "_tokenizer",
        "_usage",
    )

    def __init__(
        self,
        request: GenerateRequest,
        sink: Sink,
        tokenizer: Tokenizer,
        clock: Clock,
        leave: Callable[[RequestId, bool], None],
    ) -> None:
        self._request, self._sink, self._leave = request, sink, leave
        self._tokenizer, self._clock = tokenizer, clock
        self._detokenizer = detokenizer(tokenizer, skip_special_tokens=request.skip_special_tokens)
        self._push_text = self._detokenizer.push
        self._stop = StopChecker(request.stop, include_stop=request.include_stop) if request.stop else None
        self._usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        self._token_ids = array("i", request.resumed)
        """The answer so far."""
        self._received = False
        """The sink has heard the first output, and more may come in pieces."""
        self._held: list[int] = []
        """Tokens of the answer that the sink has not received yet."""
        # Stop strings must be seen at once, and logprobs belong to their tokens.
        self._piece = 1 if request.stop else request.piece_tokens
        self._first_ns = 0
        self._device_ns, self._drafts = 0, (0, 0)
        """The worker's last report of what was used up to now: see `Output`."""
        self._done = False
        if request.resumed:
            self._prime(request.resumed)

    @property
    def usage(self) -> Usage | None:
        """See `Generation.usage`: our engine tells with the first tokens."""
        return self._usage if self._first_ns else None

    def gather(self, output: Output) -> bool:
        """One step's output, of which more came with it.

        True: what it gave is held until `release_buffered` is called.
        """
        plain = (
            output.finish is None and output.usage is None and output.logprobs is None and output.token_ids
        )
        if not plain or self._stop is not None or self._piece > 1:
            self.push(output)
            return False
        self._device_ns, self._drafts = output.device_ns, output.drafts
        self._held.extend(output.token_ids)
        return len(self._held) == len(output.token_ids)

    def push(self, output: Output) -> None:
        """One step's output for this stream."""
        self._device_ns, self._drafts = output.device_ns, output.drafts
        if self._held and self._piece == 1:
            self.release_buffered()
        if output.usage is not None:
            self._usage, self._first_ns = output.usage, self._clock.now_ns()
        if output.finish is not None:
            self._push_last(output, output.finish)
            return
        token_ids = output.token_ids
        if output.vectors:
            self._sink.on_delta(Delta("", (), vectors=output.vectors))
            return
        if self._stop is not None and len(token_ids) > 1 and output.logprobs is None:
            self._push_singly(output)
            return
        if not token_ids:
            found = tuple(to_text_logprob(each, self._tokenizer) for each in output.prompt_logprobs)
            self._sink.on_delta(Delta("", (), (), found))
            return
        if self._received and output.logprobs is None:
            self._held.extend(token_ids)
            num_reported = len(self._token_ids)
            if num_reported // self._piece != (num_reported + len(self._held)) // self._piece:
                self.release_buffered()
            return
        self._received = self._piece > 1
        self._token_ids.extend(token_ids)
        text = self._push_text(token_ids)
        if self._stop is not None:
            text, matched = self._stop.push(text)
            if matched is not None:
                self._stop_here(self._delta(text, output), matched)
                return
        self._sink.on_delta(Delta(text, token_ids) if output.logprobs is None else self._delta(text, output))

    def _push_singly(self, output: Output) -> None:
        """Several tokens of one step, where a stop string may end the answer behind any of them: it is as
        long then as if they had come one by one.
        """
        for num_read, token_id in enumerate(output.token_ids, 1):
            if not self._done:
                drafts = _without_last(output.drafts, len(output.token_ids) - num_read)
                self.push(replace(output, token_ids=(token_id,), usage=None, drafts=drafts))

    def abort(self) -> None:
        """The client left: tell the worker, and the sink at once."""
        self.release_buffered()
        if not self._done:
            finish = Finish(reason=FinishReason.ABORT, usage=self._usage_here(), resume=self._resume())
            self._end(finish, tell_worker=True)

    def pause_reading(self) -> bool:
        """See `Generation.pause_reading`: all streams of a worker come over one connection, and its engine
        continues anyway.
        """
        return False

    def resume_reading(self) -> None:
        """See `Generation.resume_reading`."""

    def break_off(self, why: str, *, died: bool = False) -> None:
        """The worker is lost; `died`: its process ended."""
        self.release_buffered()
        if self._done:
            return
        kind = StreamBroken if self._token_ids else WorkerUnavailable
        error = kind(why, died=died)
        usage, resume = self._usage_here(), self._resume()
        self._end(Finish(reason=FinishReason.ERROR, usage=usage, error=error, resume=resume))

    def crash(self, error: Exception) -> None:
        """Output could not be passed on, which is a bug: it ends this stream alone."""
        if not self._done:
            finish = Finish(reason=FinishReason.ERROR, usage=self._usage_here(), error=fault_of(error))
            self._end(finish, tell_worker=True)

    def release_buffered(self) -> None:
        """Tell the sink what was held back. It may end the stream."""
        if self._held and not self._done:
            token_ids = tuple(self._held)
            self._held.clear()
            self._token_ids.extend(token_ids)
            self._sink.on_delta(Delta(self._push_text(token_ids), token_ids))

    def _prime(self, token_ids: tuple[int, ...]) -> None:
        """Bring everything to where it was after these tokens; the sink has heard all of it."""
        text = self._push_text(token_ids)
        if self._stop is not None:
            _, matched = self._stop.push(text)
            assert matched is None, "a stopped stream takes no more tokens"

    def _resume(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    def _push_last(self, output: Output, finish: RequestFinished) -> None:
        """The engine ended the answer: release text that was held back."""
        self.release_buffered()
        if output.vectors:
            self._sink.on_delta(Delta("", (), vectors=output.vectors))
        if self._done:
            return
        matched, text, num_tokens = None, "", len(output.token_ids)
        for num_read, token_id in enumerate(output.token_ids, 1):
            self._token_ids.append(token_id)
            piece = self._push_text((token_id,))
            if self._stop is not None:
                piece, matched = self._stop.push(piece)
            text += piece
            if matched is not None:
                num_tokens = num_read
                break
        else:
            piece = self._detokenizer.finish()
            if self._stop is not None:
                piece, matched = self._stop.push(piece)
                piece += self._stop.finish()
            text += piece
        if num_tokens < len(output.token_ids) and output.logprobs is None:
            usage, num_cut = finish.usage, len(output.token_ids) - num_tokens
            accepted, rejected = _without_last((usage.accepted_drafts, usage.rejected_drafts), num_cut)
            usage = replace(
                usage,
                completion_tokens=len(self._token_ids),
                accepted_drafts=accepted,
                rejected_drafts=rejected,
            )
            output = replace(output, token_ids=output.token_ids[:num_tokens])
            finish = replace(finish, usage=usage)
        if text or output.token_ids:
            self._sink.on_delta(self._delta(text, output))
        if not self._done:  # The sink may have aborted meanwhile.
            self._end(self._finish(finish, matched))

    def _finish(self, finish: RequestFinished, matched: str | None) -> Finish:
        if matched is not None:
            return Finish(reason=FinishReason.STOP, usage=finish.usage, stop=matched)
        if finish.reason is FinishReason.ERROR:
            error = _KINDS.get(finish.error_kind or "", EngineFault)(finish.error or "no reason given")
            if isinstance(error, ClientError):
                error = self._named(error, finish.param)
            return Finish(reason=finish.reason, usage=finish.usage, error=error, resume=self._resume())
        stop = finish.stop_token_id
        if stop in self._tokenizer.eos_ids:
            stop = None  # The model's own end-of-text token is not a stop token of the request.
        return Finish(reason=finish.reason, usage=finish.usage, stop=stop)

    def _named(self, error: ClientError, param: str | None) -> ClientError:
        """The error as the client knows its parameters: `param` is the field of ours that is wrong."""
        asked_by = self._request.constraint.param
        error.param = param
        if param is not None and param.partition(".")[0] == "grammar" and asked_by:
            keyword = param.partition(".")[2]
            where = {"response_format": ".json_schema.schema", "structured_outputs": f".{keyword}"}
            error.param = asked_by + (where.get(asked_by, "") if keyword else "")
            return InvalidRequest(
                f"Invalid '{error.param}': {error}.", param=error.param, code="invalid_value"
            )
        return error

    def _stop_here(self, last: Delta, matched: str) -> None:
        self._sink.on_delta(last)
        if not self._done:
            finish = Finish(reason=FinishReason.STOP, usage=self._usage_here(), stop=matched)
            self._end(finish, tell_worker=True)

    def _end(self, finish: Finish, *, tell_worker: bool = False) -> None:
        self._done = True
        self._leave(self._request.request_id, tell_worker)
        self._sink.on_finish(finish)

    def _usage_here(self) -> Usage:
        """Usage, as far as it arrived here: the worker's own count of the rest is not awaited."""
        decode_ns = self._clock.now_ns() - self._first_ns if self._first_ns else 0
        return replace(
            self._usage,
            completion_tokens=len(self._token_ids),
            decode_ns=decode_ns,
            device_ns=self._device_ns,
            accepted_drafts=self._drafts[0],
            rejected_drafts=self._drafts[1],
        )

    def _delta(self, text: str, output: Output) -> Delta:
        found = output.logprobs or ()
        return Delta(text, output.token_ids, tuple(to_text_logprob(each, self._tokenizer) for each in found))


def _without_last(drafts: tuple[int, int], num_cut: int) -> tuple[int, int]:
    """Drafts that were accepted and rejected, where so many of a step's last tokens are none of the answer's:
    each of those was guessed.
    """
    accepted, rejected = drafts
    num_cut = min(num_cut, accepted)
    return accepted - num_cut, rejected + num_cut

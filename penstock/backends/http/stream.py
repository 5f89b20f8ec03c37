"""One answer of a worker that is not ours: events in, text and tokens out, exactly one end.

    head ─> events* ─> finish (why it ended) ─> usage ─> end
      │        │           └─ the connection breaks here: the answer is whole all the same
      │        ├─ stop string, stop token or length reached here: ended here, the connection is closed
      │        ├─ error, corrupt event, silence, broken connection: StreamBroken; before output: unavailable.
      │        │  Where tokens come as ids, the end has them all: another worker can continue
      │        └─ abort (the client left): the connection is closed, which ends it on every engine
      └─ a status: the errors of dialects/base.py

Text is made from ids where there are ids, so that it does not depend on how a worker holds back parts
of characters; stop strings, stop tokens and the answer's length are watched here for every engine.
"""

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from penstock.backends.base import (
    Delta,
    Finish,
    GenerateRequest,
    Sink,
    TextLogprob,
    fault_of,
    to_text_logprob,
)
from penstock.backends.http.chunks import ChunkReader, IdHoles
from penstock.backends.http.client import HttpExchange
from penstock.backends.http.context import StreamContext
from penstock.backends.http.dialects.base import (
    AnswerReader,
    Piece,
    ReportedUsage,
    SaidError,
    error_of,
    said_in,
)
from penstock.backends.http.envelope import BadEvent, Envelopes
from penstock.backends.http.terms import Anomaly, FailureKind, HttpFailure
from penstock.backends.http.to_end import read_to_end
from penstock.backends.http.usage import NOT_REPORTED, SLACK_TOKENS, Counted, believed, oddity, within
from penstock.errors import Overloaded, PenstockError, StreamBroken, WorkerUnavailable
from penstock.protocol.stream import EventReader, EventTooLong
from penstock.text.detokenizer import IncrementalDetokenizer, StopChecker, detokenizer
from penstock.types import FinishReason, RequestId, TokenLogprob, Usage

USAGE_WAIT_S = 2.0  # After the finish: how long its usage may take.
_OVERRUN_FACTOR = 4  # Text is counted by our tokenizer, which may see more tokens in it.


class HttpStream:
    """The `Generation` of one request, and the handler of its exchange."""

    __slots__ = (
        "_body", "_chunks", "_clock", "_count", "_detokenizer", "_done", "_envelopes", "_error_bytes",
        "_events", "_exchange", "_finish", "_first_ns", "_has_ids", "_has_output", "_headers",
        "_holes", "_ids", "_may_move", "_model", "_num_logprobs", "_owner", "_pieces", "_reader", "_reported",
        "_request", "_said_before", "_sink", "_started_ns", "_status", "_stop", "_stop_ids", "_stopped_by",
        "_text_tokens_max", "_token_ids", "_tokenizer", "_trusts_prompt",
    )  # fmt: skip

    def __init__(
        self,
        context: StreamContext,
        request: GenerateRequest,
        sink: Sink,
        reader: AnswerReader,
        *,
        model: str,
        trusts_prompt: bool,
        may_move: bool,
        said_before: str = "",
    ) -> None:
        """`model` is the name that the answer must bear; empty: any. `trusts_prompt`: only the worker knows
        how many tokens the prompt has. `may_move`: another worker may continue it, if all of its tokens came
        as ids. `said_before`: the prompt's last text; the sink is to hear the answer begin with it.
        """
        self._envelopes: Envelopes | None = None  # Made when not all of an answer comes at once.
        self._tokenizer, self._pieces, self._holes, self._clock, self._owner, limits = context
        self._request, self._sink, self._reader, self._model = request, sink, reader, model
        self._trusts_prompt, self._said_before = trusts_prompt, said_before
        self._may_move = may_move and not said_before  # Elsewhere its prompt would not end so.
        self._error_bytes, self._events = limits.error_bytes_max, EventReader(limits.event_bytes_max)
        self._stop = StopChecker(request.stop, include_stop=request.include_stop) if request.stop else None
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._detokenizer: IncrementalDetokenizer | None = None
        self._exchange: HttpExchange | None = None
        self._headers: Mapping[bytes, bytes] = {}
        self._body: bytearray | None = None  # Of an answer that is no stream.
        self._chunks: ChunkReader | None = None  # Once events come one by one,
        self._ids: IdHoles | None = None  # and if they have ids.
        self._started_ns = self._clock.now_ns()
        self._first_ns = self._count = self._num_logprobs = self._status = 0
        self._text_tokens_max = request.sampling.max_tokens * _OVERRUN_FACTOR + SLACK_TOKENS
        self._has_ids = self._has_output = self._done = False
        self._finish: FinishReason | None = None
        self._stopped_by: str | int | None = None
        self._reported: ReportedUsage | None = None
        self._token_ids = array("i", request.resumed)  # The answer so far, as far as it came as ids.
        if request.resumed:
            self._prime(request.resumed)

    @property
    def request_id(self) -> RequestId:
        """Of the request."""
        return self._request.request_id

    @property
    def has_output(self) -> bool:
        """Whether the sink was given any."""
        return self._has_output

    def sent(self, exchange: HttpExchange) -> None:
        """The request is on its way."""
        self._exchange = exchange

    @property
    def usage(self) -> Usage | None:
        """See `Generation.usage`: most engines tell at the end only."""
        return self._usage() if self._reported is not None else None

    def abort(self) -> None:
        """See `Generation.abort`."""
        if not self._done and self._finish is not None:
            self._conclude(close=True)  # Only its usage is not there.
        elif not self._done:
            end = Finish(reason=FinishReason.ABORT, usage=self._usage(), resume=self._resume())
            self._end(end, close=True)

    def pause_reading(self) -> bool:
        """See `Generation.pause_reading`: TCP's window fills, and the worker waits."""
        if not self._done and self._exchange is not None:
            self._exchange.pause_reading()
        return True

    def resume_reading(self) -> None:
        """See `Generation.resume_reading`."""
        if self._exchange is not None:
            self._exchange.resume_reading()

    def fail(self, error: PenstockError) -> None:
        """End with an error, unless the whole answer has come."""
        if not self._done and not self._is_whole():
            end = Finish(reason=FinishReason.ERROR, usage=self._usage(), error=error, resume=self._resume())
            self._end(end, close=True)

    def _prime(self, token_ids: tuple[int, ...]) -> None:
        """Bring everything to where it was after these tokens; the sink has heard all of it."""
        self._count, self._has_ids, self._has_output = len(token_ids), True, True
        text = self._text_of(token_ids)
        if self._stop is not None:
            _, matched = self._stop.push(text)
            assert matched is None, "a stopped stream takes no more tokens"

    def _resume(self) -> tuple[int, ...] | None:
        """The answer so far; None: it cannot be continued, is not known as tokens, or lacks only its end."""
        known = self._may_move and len(self._token_ids) == self._count
        return tuple(self._token_ids) if known and self._count < self._request.sampling.max_tokens else None

    def _is_whole(self) -> bool:
        """Whether all of the answer has come; then it is over, and well."""
        if self._finish is None and self._has_ids and self._count >= self._request.sampling.max_tokens:
            self._owner.noted(Anomaly.NO_FINISH, "an answer of full length ended without saying why")
            self._finished(FinishReason.LENGTH, None)
        if self._finish is not None and not self._done:
            self._conclude(close=True)
        return self._done

    # --- from the exchange -----------------------------------------------------------------------------

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `HttpHandler`."""
        self._status, self._headers = status, headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if status != 200 or kind != b"text/event-stream":
            self._body = bytearray()

    def on_body(self, data: bytes) -> None:
        """See `HttpHandler`."""
        if self._body is not None:
            self._body += data[: self._error_bytes - len(self._body)]
            if len(self._body) >= self._error_bytes:
                self._answered()
            return
        try:
            block = self._events.whole(data)
            num_events = block.count(b"\ndata:") + block.startswith(b"data:")
            if num_events and self._finish is None and self._exchange is not None:
                self._exchange.touch(num_events)
            # Before a stop string one by one: tokens behind it do not count.
            if self._stop is None and (piece := read_to_end(block, self._reader, num_events)) is not None:
                if not self._take_answer(piece):
                    self._take(piece)
                return
            if (envelopes := self._envelopes) is None:
                envelopes = self._envelopes = Envelopes(self._reader, self._model)
            if self._has_output and self._stop is None and not self._said_before:
                texts, piece = envelopes.texts(block), None
                if texts is not None or (piece := envelopes.ids(block)) is not None:
                    if num_events == 1 and self._chunks is None:
                        self._expect_chunks(*envelopes.around)
                    if texts is not None:
                        self._take_texts(texts)
                    elif piece is not None:
                        self._take_alike(piece)
                    return
            for piece in envelopes.read(block, joins=self._stop is None):
                self._take(piece)
                if self._done:
                    return
        except EventTooLong as error:
            self._corrupt(str(error))
        except BadEvent as error:
            self._corrupt(f"an event cannot be read: {error}")
        except Exception as error:  # noqa: BLE001 - a bug of the sink's says nothing of the worker.
            self.fail(fault_of(error))

    def _expect_chunks(self, before: bytes, middle: bytes, behind: bytes) -> None:
        """Events come one by one: from now on a read that is one like those before it is taken as a whole."""
        if self._exchange is not None and (found := self._holes.reader(before, middle, behind)) is not None:
            self._chunks, self._ids = found
            self._exchange.take_chunk = self._take_chunk

    def _take_chunk(self, read: bytes) -> bool:
        """See `HttpExchange.take_chunk`."""
        chunks, exchange = self._chunks, self._exchange
        if chunks is None or exchange is None or self._done or self._finish is not None:
            return False
        if (hole := chunks.hole(read)) is None:
            return False
        try:
            if self._ids is None:
                if (delta := self._holes.texts[hole]) is None:
                    return False
                self._count += len(delta.token_ids)
            else:
                ids = self._ids[hole]
                if ids is None or self._count + len(ids) > self._request.sampling.max_tokens:
                    return False
                if not self._stop_ids.isdisjoint(ids):
                    return False
                delta = Delta(self._text_of(ids), ids)
                self._token_ids.extend(ids)
                self._count += len(ids)
            exchange.touch()
            self._sink.on_delta(delta)
            if self._count > self._text_tokens_max:
                self._overran()
        except Exception as error:  # noqa: BLE001 - a bug of the sink's says nothing of the worker.
            self.fail(fault_of(error))
        return True

    def on_end(self) -> None:
        """See `HttpHandler`."""
        if self._done:
            return
        if self._body is not None:
            self._answered()
            return
        self._take(self._reader.end())
        if not self._done:
            if self._finish is not None:
                self._owner.noted(Anomaly.NO_END, "an answer ended without its last event")
            self._break("it ended an answer without saying why")

    def on_failure(self, failure: HttpFailure) -> None:
        """See `HttpHandler`."""
        if self._done:
            return
        # No client has a worker for longer by moving.
        self._may_move &= failure.kind not in (FailureKind.HELD, FailureKind.TOO_LONG)
        if failure.kind is FailureKind.HELD:
            self.fail(Overloaded(f"The answer was read too slowly: {failure.message}."))
            return
        if failure.kind in (FailureKind.CONNECT, FailureKind.BROKEN):
            self._owner.lost(failure.message, unreachable=failure.kind is FailureKind.CONNECT)
        if not self._done:
            self._break(failure.message)

    # --- events ----------------------------------------------------------------------------------------

    def _take_answer(self, piece: Piece) -> bool:
        """A whole answer of ids that is as it should be, in few calls; False: `_take` is to take it."""
        ids, model, request = piece.token_ids, piece.model, self._request
        has_begun = self._has_ids or self._has_output or self._finish is not None or self._said_before
        if has_begun or not ids or piece.finish is None or (self._model and model not in ("", self._model)):
            return False
        if len(ids) > request.sampling.max_tokens or not self._stop_ids.isdisjoint(ids):
            return False
        text = self._tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
        self._token_ids.extend(ids)  # This may raise, so it stands before what makes the answer a whole one.
        self._reported, self._has_ids, self._has_output = piece.usage or self._reported, True, True
        self._count, self._first_ns = len(ids), self._clock.now_ns()
        self._sink.on_delta(Delta(text, ids))
        if not self._done:
            self._finished(piece.finish, piece.stop)
            self._conclude()
        return True

    def _take_alike(self, piece: Piece) -> None:
        """Nothing but ids, of events like one that was looked at."""
        ids, count = piece.token_ids, self._count + len(piece.token_ids)
        if self._done or self._finish is not None:
            return
        if count > self._request.sampling.max_tokens or not self._stop_ids.isdisjoint(ids):
            self._take(piece)
            return
        text = self._text_of(ids)
        self._token_ids.extend(ids)
        self._count = count
        self._sink.on_delta(Delta(text, ids))

    def _take_texts(self, texts: Sequence[str]) -> None:
        """The same of texts."""
        text = texts[0] if len(texts) == 1 else "".join(texts)
        if self._done or self._finish is not None or not text:
            return
        ids = self._pieces.of(text) if len(texts) == 1 else self._pieces.of_all(texts)
        self._count += len(ids)
        self._sink.on_delta(Delta(text, ids))
        if self._count > self._text_tokens_max:
            self._overran()

    def _take(self, piece: Piece) -> None:
        """One event's meaning, in the order in which it matters."""
        if piece.error is not None:
            self._said(piece.error)
            return
        if piece.model and self._model and piece.model != self._model:
            self._owner.noted(Anomaly.OTHER_MODEL, f"it serves '{piece.model[:64]}' as '{self._model}'")
            self._break("the worker serves another model than it should")
            return
        if piece.usage is not None:
            self._reported = piece.usage
        if self._finish is None:
            if piece.prompt_logprobs:
                self._sink.on_delta(Delta("", (), (), self._shown(piece.prompt_logprobs)))
            if self._done:
                return  # The sink left.
            if piece.token_ids:
                self._take_ids(piece)
            elif piece.text or piece.thought or piece.tool_calls or piece.text_logprobs:
                self._take_text(piece)
            if piece.finish is not None and not self._done and self._finish is None:
                self._finished(piece.finish, piece.stop)
            elif piece.ends and not self._done:
                is_full = self._count >= self._request.sampling.max_tokens
                self._finished(FinishReason.LENGTH if is_full else FinishReason.STOP, None)
        if self._finish is not None and not self._done and (piece.done or self._reported is not None):
            self._conclude()

    def _take_ids(self, piece: Piece) -> None:
        sampling = self._request.sampling
        ids, ended, stop_id = within(piece.token_ids, self._count, self._stop_ids, sampling)
        if stop_id is not None and stop_id not in self._tokenizer.eos_ids:
            self._stopped_by = stop_id  # The model's own is none of the request's.
        elif ended is FinishReason.LENGTH:
            self._owner.noted(Anomaly.OVERRUN, f"more tokens than the {sampling.max_tokens} asked for")
        self._has_ids = True
        logprobs = self._shown(piece.logprobs[: len(ids)]) or piece.text_logprobs[: len(ids)]
        if ids:
            self._token_ids.extend(ids)
            self._deliver(self._text_of(ids), ids, logprobs)
        if ended is not None and not self._done:
            self._finished(ended, None)
            if piece.finish is None and not self._done:
                self._conclude(close=True)  # The server would send more.

    def _text_of(self, ids: tuple[int, ...]) -> str:
        if self._detokenizer is None:
            skips = self._request.skip_special_tokens
            self._detokenizer = detokenizer(self._tokenizer, skip_special_tokens=skips)
        return self._detokenizer.push(ids)

    def _take_text(self, piece: Piece) -> None:
        """Text without ids: our tokenizer says about how much it is."""
        text, counted = piece.text, piece.text
        if piece.thought or piece.tool_calls:
            counted = piece.thought + text + "".join(call.name + call.arguments for call in piece.tool_calls)
        ids = self._pieces.of_all(piece.parts) if piece.parts else self._pieces.of(counted) if counted else ()
        self._num_logprobs += len(piece.text_logprobs)
        self._deliver(text, ids, piece.text_logprobs, piece)
        if self._count > self._text_tokens_max:
            self._overran()

    def _overran(self) -> None:
        if self._done:
            return
        self._owner.noted(Anomaly.OVERRUN, f"text of more than {self._text_tokens_max} tokens")
        self._finished(FinishReason.LENGTH, None)
        if not self._done:
            self._conclude(close=True)

    def _deliver(
        self, text: str, ids: tuple[int, ...], logprobs: tuple[TextLogprob, ...], piece: Piece | None = None
    ) -> None:
        """Pass output on, up to a stop string."""
        if said := self._said_before:
            self._said_before = ""
            self._sink.on_delta(Delta(said, self._pieces.of(said)))
            if self._done:
                return  # The sink left.
        self._count += len(ids)
        self._first_ns = self._first_ns or self._clock.now_ns()
        self._has_output = True
        calls, thought = ((), "") if piece is None else (piece.tool_calls, piece.thought)
        text, matched = (text, None) if self._stop is None else self._stop.push(text)
        self._sink.on_delta(Delta(text, ids, logprobs, (), calls, thought))
        if matched is not None and not self._done:
            self._finish, self._stopped_by = FinishReason.STOP, matched
            self._conclude(close=True)

    def _finished(self, reason: FinishReason, stop: str | int | None) -> None:
        """The finish reason is known: release text that was held back; usage may still come."""
        text = "" if self._detokenizer is None else self._detokenizer.finish()
        matched = None
        if self._stop is not None:
            text, matched = self._stop.push(text)
            text += self._stop.finish() if matched is None else ""
        self._finish = reason
        if matched is not None:
            self._finish, self._stopped_by = FinishReason.STOP, matched
        elif reason is FinishReason.STOP and self._stopped_by is None and stop not in self._tokenizer.eos_ids:
            self._stopped_by = stop
        if text:
            self._has_output = True
            self._sink.on_delta(Delta(text, ()))
        if not self._done and self._exchange is not None and not self._exchange.is_whole:
            self._exchange.wait("the usage", USAGE_WAIT_S)

    # --- ends ------------------------------------------------------------------------------------------

    def _conclude(self, *, close: bool = False) -> None:
        """A good end."""
        assert self._finish is not None
        counted = self._counted()
        if not close and (odd := oddity(self._reported, counted, self._finish)) is not None:
            self._owner.noted(*odd)
        self._end(Finish(reason=self._finish, usage=self._usage(counted), stop=self._stopped_by), close=close)

    def _break(self, why: str) -> None:
        """No more will come: a good end if all had come already, else an error."""
        if self._finish is not None:
            self._conclude()
            return
        why = f"the worker broke off: {why}"
        self.fail(StreamBroken(why) if self._has_output else WorkerUnavailable(why))

    def _said(self, said: SaidError) -> None:
        if self._finish is not None:
            self._conclude()  # The answer is whole; what follows it does not matter.
            return
        self.fail(error_of(said, headers=self._headers, has_output=self._has_output))

    def _corrupt(self, why: str) -> None:
        self._owner.noted(Anomaly.CORRUPT, why)
        self._break(why)

    def _answered(self) -> None:
        """It answered with a status, or with something that is no stream."""
        said = said_in(bytes(self._body or b""))
        if self._status != 200:
            said = msgspec.structs.replace(said, status=self._status)
        elif not (said.message or said.kind):
            kind = self._headers.get(b"content-type", b"").decode("latin-1")[:64] or "nothing"
            self._owner.noted(Anomaly.NO_STREAM, why := f"answered with {kind} instead of a stream of events")
            self.fail(WorkerUnavailable(f"the worker {why}"))
            return
        self.fail(error_of(said, headers=self._headers, has_output=False))

    def _end(self, finish: Finish, *, close: bool) -> None:
        self._done = True
        if self._exchange is not None:
            (self._exchange.abort if close else self._exchange.discard_rest)()
        self._owner.leave(self, finish)
        self._sink.on_finish(finish)

    def _counted(self) -> Counted:
        exact = self._count if self._has_ids else self._num_logprobs or None
        request = self._request
        return Counted(
            len(request.prompt_token_ids), len(request.resumed), self._count, exact, self._has_ids,
            self._trusts_prompt, request.sampling.max_tokens,
        )  # fmt: skip

    def _usage(self, counted: Counted | None = None) -> Usage:
        now_ns, exchange = self._clock.now_ns(), self._exchange
        first_ns, held_ns = self._first_ns or now_ns, 0 if exchange is None else exchange.held_ns
        return believed(
            self._reported or NOT_REPORTED, counted or self._counted(),
            prefill_ns=first_ns - self._started_ns, decode_ns=max(0, now_ns - first_ns - held_ns),
        )  # fmt: skip

    def _shown(self, found: Sequence[TokenLogprob]) -> tuple[TextLogprob, ...]:
        return tuple([to_text_logprob(each, self._tokenizer) for each in found]) if found else ()

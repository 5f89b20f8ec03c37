"""The results of a call, in vLLM's words: `RequestOutput` for each prompt, with its `CompletionOutput`s.

`Answer` collects one request's streams into it, as its `Choice`s hear them.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.backends.base import Delta, Finish, TextLogprob
from penstock.clock import NS_PER_S, Clock
from penstock.errors import PenstockError
from penstock.offline.params import LoRARequest, RequestOutputKind, SamplingParams
from penstock.offline.prompts import PromptInput
from penstock.types import FinishReason, Usage


@dataclass(slots=True, frozen=True)
class Logprob:
    """The log-probability of one token in its place."""

    logprob: float
    rank: int | None = None
    """1 for the likeliest of the vocabulary."""
    decoded_token: str | None = None


TokenLogprobs = Mapping[int, Logprob]
"""By token id: the token that stands there, and the likeliest alternatives."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestMetrics:
    """Where a request's time went, in seconds; of several answers to it the longest counts."""

    queue_s: float
    """Until the engine began with it."""
    prefill_s: float
    decode_s: float
    first_token_s: float
    """From the call to the first token; with many prompts in a call most of it is waiting."""
    total_s: float
    num_preemptions: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    """The sum over its tokens; None unless `logprobs` were asked for."""
    logprobs: Sequence[TokenLogprobs] | None
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while it grows."""
    stop_reason: int | str | None = None
    """The stop string or token that matched; None: the model's own end."""
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Whether it is whole."""
        return self.finish_reason is not None


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestOutput:
    """The result of one prompt."""

    request_id: str
    prompt: str | None
    """None: it was given as token ids."""
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    """None for the first token, which nothing precedes."""
    outputs: Sequence[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    """Once it is finished."""
    lora_request: LoRARequest | None = None
    num_cached_tokens: int = 0
    """Of the prompt, what the prefix cache had."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float
    """A cosine, a cross-encoder's score, or the geometric mean of the second text's token probabilities."""
    logprob: float | None = None
    """Of a model that generates text: the sum of the second text's log-probabilities."""
    num_tokens: int | None = None
    """Those that were summed."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ScoringRequestOutput:
    """One pair's."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: Sequence[int]
    finished: bool = True


class OutputChoice:
    """Hears one stream (`backends.base.Sink`)."""

    __slots__ = ("_answer", "_at_end", "_texts", "finish", "logprobs", "prompt_logprobs", "token_ids")

    def __init__(self, answer: "GeneratedAnswer") -> None:
        self._answer = answer
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TextLogprob] = []
        self.prompt_logprobs: list[TextLogprob] = []
        self.finish: Finish | None = None
        """Its end, once no other attempt follows."""
        self._at_end: asyncio.Future[Finish] | None = None

    def attempt(self) -> "asyncio.Future[Finish]":
        """Done when the stream that begins now ends."""
        self._at_end = asyncio.get_running_loop().create_future()
        if not self.token_ids:
            self.prompt_logprobs.clear()  # They are sent again.
        return self._at_end

    def on_delta(self, delta: Delta) -> None:
        """See `Sink`."""
        if delta.prompt_logprobs:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
            return
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.text:
            self._texts.append(delta.text)
        self._answer.has_changes()

    def on_finish(self, finish: Finish) -> None:
        """See `Sink`."""
        assert self._at_end is not None, "a stream has begun"
        if not self._at_end.done():  # Its waiter may have been cancelled.
            self._at_end.set_result(finish)

    def end(self, finish: Finish) -> None:
        """It was its last stream."""
        self.finish = finish
        self._answer.has_changes()

    def text(self, since: int = 0) -> str:
        """The answer so far, from this piece on."""
        return "".join(self._texts[since:])

    @property
    def num_pieces(self) -> int:
        """Pieces of text so far."""
        return len(self._texts)


def _nothing() -> None:
    """There are no streams."""


class GeneratedAnswer:
    """One request while it runs."""

    def __init__(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        lora: LoRARequest | None,
        clock: Clock,
    ) -> None:
        self.request_id, self.prompt, self.params, self.lora = request_id, prompt, params, lora
        self.choices = [OutputChoice(self) for _ in range(params.n)]
        self.on_change: Callable[[], None] = _nothing
        """Called when there is more to show."""
        self._clock = clock
        self._began_ns, self._first_ns = clock.now_ns(), 0
        self._shown = [(0, 0, 0) for _ in self.choices]
        """Of each choice, the tokens, log-probabilities and pieces of text that were shown in a `DELTA`."""

    def has_changes(self) -> None:
        """A choice has heard something."""
        self._first_ns = self._first_ns or self._clock.now_ns()
        self.on_change()

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def error(self) -> PenstockError | None:
        """Why it failed, if it did."""
        found = (choice.finish.error for choice in self.choices if choice.finish is not None)
        return next((error for error in found if error is not None), None)

    def output(self) -> RequestOutput:
        """As it is now; with the kind `DELTA` what is new since the last call."""
        is_finished, is_delta = self.is_finished, self.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[self._completion(i, is_delta) for i in range(len(self.choices))],
            finished=is_finished,
            metrics=self._metrics() if is_finished else None,
            lora_request=self.lora,
            num_cached_tokens=max((usage.cached_tokens for usage in self._usages()), default=0),
        )

    def aborted(self) -> RequestOutput:
        """As it is, ended before its time."""
        for choice in self.choices:
            choice.finish = choice.finish or Finish(reason=FinishReason.ABORT, usage=Usage())
        return self.output()

    def _completion(self, index: int, is_delta: bool) -> CompletionOutput:
        choice = self.choices[index]
        tokens, logprobs, pieces = self._shown[index] if is_delta else (0, 0, 0)
        self._shown[index] = (len(choice.token_ids), len(choice.logprobs), choice.num_pieces)
        with_logprobs = self.params.logprobs is not None
        finish = choice.finish
        return CompletionOutput(
            index=index,
            text=choice.text(pieces) if self.params.detokenize else "",
            token_ids=choice.token_ids[tokens:],
            cumulative_logprob=sum(each.logprob or 0.0 for each in choice.logprobs)
            if with_logprobs
            else None,
            logprobs=(
                [_by_id(each, self.params.logprobs or 0) for each in choice.logprobs[logprobs:]]
                if with_logprobs
                else None
            ),
            finish_reason=None if finish is None else _reason(finish),
            stop_reason=None if finish is None else finish.stop,
            lora_request=self.lora,
        )

    def _prompt_logprobs(self) -> Sequence[TokenLogprobs | None] | None:
        asked = self.params.prompt_logprobs
        if asked is None:
            return None
        return [None, *(_by_id(each, asked) for each in self.choices[0].prompt_logprobs)]

    def _usages(self) -> list[Usage]:
        return [choice.finish.usage for choice in self.choices if choice.finish is not None]

    def _metrics(self) -> RequestMetrics:
        usages, now_ns = self._usages(), self._clock.now_ns()
        return RequestMetrics(
            queue_s=max(usage.queue_ns for usage in usages) / NS_PER_S,
            prefill_s=max(usage.prefill_ns for usage in usages) / NS_PER_S,
            decode_s=max(usage.decode_ns for usage in usages) / NS_PER_S,
            first_token_s=((self._first_ns or now_ns) - self._began_ns) / NS_PER_S,
            total_s=(now_ns - self._began_ns) / NS_PER_S,
            num_preemptions=sum(usage.preemptions for usage in usages),
        )


def _reason(finish: Finish) -> str:
    """In vLLM's words."""
    return finish.reason.value if finish.reason is not FinishReason.ERROR else FinishReason.ABORT.value


def _by_id(item: TextLogprob, count: int) -> dict[int, Logprob]:
    assert item.logprob is not None, "only a prompt's first token has none"
    found = {item.token_id: Logprob(item.logprob, item.rank or None, item.token)}
    ranked = zip(item.top_ids[:count], item.top, strict=False)
    for rank, (token_id, (text, _, logprob)) in enumerate(ranked, start=1):
        found[token_id] = Logprob(logprob, rank, text)
    return found


def scored(output: RequestOutput, start: int) -> ScoringRequestOutput:
    """The score of a prompt's tokens from `start` on, whose log-probabilities were asked for."""
    assert output.prompt_logprobs is not None, "they were asked for"
    assert start > 0, "the first token has none"
    total = 0.0
    behind = range(start, len(output.prompt_token_ids))
    for i in behind:
        found = output.prompt_logprobs[i]
        assert found is not None, "only the first has none"
        total += found[output.prompt_token_ids[i]].logprob
    score = ScoringOutput(score=math.exp(total / len(behind)), logprob=total, num_tokens=len(behind))
    return ScoringRequestOutput(
        request_id=output.request_id, outputs=score, prompt_token_ids=output.prompt_token_ids
    )

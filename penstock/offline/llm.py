"""`LLM`: many prompts at once, and their answers in order.

    your thread    makes prompts, hands over at most `IN_FLIGHT_MAX` requests, takes what is done
    llm            an event loop with the engine's connection (`OfflineEngine`)

An early end of a call (Ctrl-C, an error, a generator that is dropped) ends its requests first.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count, repeat
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from penstock.clock import Clock, SystemClock
from penstock.errors import ClientError, InvalidRequest, PenstockError, WorkerUnavailable
from penstock.offline.calls import Call, LoopThread
from penstock.offline.engine import IN_FLIGHT_MAX, OfflineEngine
from penstock.offline.outputs import (
    GeneratedAnswer,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    scored,
)
from penstock.offline.params import LoRARequest, SamplingParams, as_params, default_params
from penstock.offline.prompts import (
    ChatOptions,
    MessageLike,
    PromptInput,
    PromptLike,
    PromptMaker,
    check_prompt,
    is_one_chat,
    is_one_prompt,
)
from penstock.offline.settings import OfflineSettings, read_settings
from penstock.offline.tokens import ModelTokenizer
from penstock.offline.vectors import (
    REQUESTS_MAX,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    batches,
    compute,
    makes_vectors,
    pairs_of,
    scores_of,
    texts_of,
)
from penstock.protocol.vectors import numbers
from penstock.text.texts import TextTokens

T = TypeVar("T")


class PendingCall(NamedTuple):
    """One prompt with all that goes with it."""

    prompt: PromptInput
    params: SamplingParams
    lora: LoRARequest | None = None


class LLM:
    """A model in this program, for many prompts at once. The arguments are vLLM's (docs/library.md).

    The engine is a child process (or with `in_process=True` a thread) and ends with this object: `close` it,
    or use it as a context manager.

    Raises:
        ConfigError: an argument is unknown, or asks for what this engine has not.
        CheckpointError: there is no such model, or it cannot be loaded.
        WorkerUnavailable: the engine did not come up.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:  # noqa: ANN401
        clock: Clock = SystemClock()
        self._engine = OfflineEngine(read_settings(model, kwargs), clock)
        self._thread = LoopThread()
        try:
            self._thread.run(self._engine.start())
        except BaseException:
            self._thread.close()
            raise
        self._batch_numbers = count(1)
        # At the end of the program too, before its threads are gone.
        self._close = weakref.finalize(self, _close, self._engine, self._thread)

    @property
    def settings(self) -> OfflineSettings:
        """The settings in effect, as the arguments were understood."""
        return self._engine.settings

    @property
    def prompts(self) -> PromptMaker:
        """Makes prompts of text and of conversations."""
        return self._engine.prompts

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self._engine.info.max_model_len

    @property
    def capabilities(self) -> frozenset[str]:
        """The engine's capabilities beyond plain text."""
        return self._engine.info.capabilities

    @property
    def identity(self) -> str:
        """Of what computes: equal ones give equal answers to the same seed."""
        return self._engine.info.identity

    def close(self) -> None:
        """End the engine. Once is enough; the object is of no use afterwards."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def get_tokenizer(self) -> ModelTokenizer:
        """The checkpoint's."""
        return ModelTokenizer(self._engine.prompts)

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's recommended parameters, which count where a call says nothing."""
        return default_params(self._engine.prompts.tokenizer.defaults)

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The answer to each prompt, in the prompts' order.

        `use_tqdm`: show a progress bar, if standard error is a terminal.

        Raises:
            InvalidRequest: of a prompt or parameter; all that was begun is ended first.
            WorkerError: the engine failed.
        """
        many = cast(Iterable[PromptLike], [prompts] if is_one_prompt(prompts) else prompts)
        if isinstance(many, Sequence):  # Before any time is spent on those in front of a wrong one.
            for index, prompt in enumerate(many):
                with _placing(index, len(many)):
                    check_prompt(prompt)
        return self._all(self._engine.prompts.plain, many, sampling_params, lora_request, use_tqdm)

    def chat(
        self,
        messages: Sequence[MessageLike] | Iterable[Sequence[MessageLike]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answer to one conversation, or to each of several, through the checkpoint's template or a given
        one.

        Tools are shown to the model; its calls are part of the text, as it writes them.

        Raises:
            InvalidRequest: as `generate`, or the template refuses the messages.
            WorkerError: the engine failed.
        """
        many = [messages] if is_one_chat(messages) or isinstance(messages, str) else messages
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        maker = self._engine.prompts
        return self._all(
            lambda chat: maker.chat(chat, options), many, sampling_params, lora_request, use_tqdm
        )

    def embed(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each text, of a model that makes them, in the texts' order.

        `truncate_prompt_tokens`: at most so many tokens of each; -1: as many as the model takes.

        Raises:
            InvalidRequest: one is no text, or too long.
            Unsupported: the model makes no vectors.
            WorkerError: the engine failed.
        """
        many = cast(Iterable[PromptLike], [prompts] if is_one_prompt(prompts) else prompts)
        total = len(many) if isinstance(many, Sequence) else None
        outputs: list[EmbeddingRequestOutput] = []
        with _bar(use_tqdm) as bar:
            task = bar.add_task("texts", total=total)
            for tokens, vector in self._vectors(texts_of(self._engine, many, truncate_prompt_tokens)):
                found = EmbeddingOutput(embedding=numbers(vector))
                outputs.append(
                    EmbeddingRequestOutput(
                        request_id=str(len(outputs)), outputs=found, prompt_token_ids=tokens.ids
                    )
                )
                bar.update(task, completed=len(outputs))
        return outputs

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well two texts go together; a single first text goes with all.

        Of a model that makes vectors their cosine, of a cross-encoder its score; of one that generates how
        well the second text follows the first.

        Raises:
            InvalidRequest: the numbers of texts do not fit, or one is empty.
            WorkerError: the engine failed.
        """
        firsts, seconds = _texts(text_1, "text_1"), _texts(text_2, "text_2")
        if len(firsts) == 1:
            firsts *= len(seconds)
        if len(firsts) != len(seconds):
            raise InvalidRequest(
                f"Invalid 'text_2': {len(seconds)} texts for {len(firsts)} first ones.", param="text_2"
            )
        if makes_vectors(self._engine.info):
            return self._scores(list(zip(firsts, seconds, strict=True)), truncate_prompt_tokens)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        maker, starts = self._engine.prompts, list[int]()

        def asks() -> Iterator[PendingCall]:
            for first, second in zip(firsts, seconds, strict=True):
                prompt, start = maker.pair(first, second)
                starts.append(start)
                yield PendingCall(prompt, params, lora_request)

        outputs = self._ordered(asks(), len(seconds), use_tqdm)
        return [scored(output, start) for output, start in zip(outputs, starts, strict=True)]

    def _scores(
        self, pairs: Sequence[tuple[str, str]], truncate_prompt_tokens: int | None
    ) -> list[ScoringRequestOutput]:
        tokens, places = pairs_of(self._engine, pairs, truncate_prompt_tokens)
        scores = scores_of(self._engine, [vector for _, vector in self._vectors(tokens)], places)
        ids = [tokens[one].ids + (tokens[other].ids if one != other else ()) for one, other in places]
        return [
            ScoringRequestOutput(
                request_id=str(i), outputs=ScoringOutput(score=score), prompt_token_ids=ids[i]
            )
            for i, score in enumerate(scores)
        ]

    def _vectors(self, tokens: Iterable[TextTokens]) -> Iterator[tuple[TextTokens, bytes]]:
        """Each text with its vector, in order."""
        self._check_open()
        running = deque[tuple[list[TextTokens], Future[list[bytes]]]]()
        try:
            for batch in batches(tokens):
                computing = compute(self._engine, str(next(self._batch_numbers)), batch)
                running.append((batch, asyncio.run_coroutine_threadsafe(computing, self._thread.loop)))
                if len(running) == REQUESTS_MAX:
                    yield from _first(running)
            while running:
                yield from _first(running)
        finally:  # Also of the one that was waited for.
            for _, future in running:
                future.cancel()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise WorkerUnavailable("the engine does not run: it was closed")

    def outcomes(
        self, asks: Iterable[PendingCall | PenstockError]
    ) -> Generator[tuple[int, RequestOutput | PenstockError]]:
        """Each request's number and what became of it, as they end; trouble with one is its outcome.

        `asks` is read as fast as there is room for more. Something that went wrong before goes by.
        """
        self._check_open()
        call = Call(self._engine, self._thread)
        try:
            for index, ask in enumerate(asks):
                if isinstance(ask, PenstockError):
                    yield index, ask
                    continue
                try:
                    answer, requests = self._engine.new_answer(*ask)
                except PenstockError as error:
                    yield index, error
                    continue
                while call.num_running >= IN_FLIGHT_MAX:
                    yield _outcome(call.take(wait=True))
                call.begin(index, answer, requests)
                while (ended := call.take(wait=False)) is not None:
                    yield _outcome(ended)
            while call.num_running:
                yield _outcome(call.take(wait=True))
        finally:
            call.abort()

    def _all(
        self,
        make: Callable[[Any], PromptInput],
        given: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None,
        shows_progress: bool,
    ) -> list[RequestOutput]:
        """`make` makes a prompt of each of the given."""
        total = len(given) if isinstance(given, Sequence) else None
        params = self.get_default_sampling_params() if params is None else params
        each_params, each_lora = _each(params, total, "sampling_params"), _each(lora, total, "lora_request")

        def asks() -> Iterator[PendingCall | PenstockError]:
            for one in given:
                try:
                    yield PendingCall(make(one), as_params(next(each_params)), next(each_lora))
                except PenstockError as error:
                    yield error

        return self._ordered(asks(), total, shows_progress)

    def _ordered(
        self, asks: Iterator[PendingCall | PenstockError], total: int | None, shows_progress: bool
    ) -> list[RequestOutput]:
        """All outputs in order.

        Raises:
            PenstockError: of the first request that fails.
        """
        found: dict[int, RequestOutput] = {}
        outcomes = self.outcomes(asks)
        try:
            with _bar(shows_progress) as bar:
                task = bar.add_task("prompts", total=total)
                for index, outcome in outcomes:
                    if isinstance(outcome, PenstockError):
                        with _placing(index, total):
                            raise outcome
                    found[index] = outcome
                    bar.update(task, completed=len(found))
        finally:
            outcomes.close()
        return [found[index] for index in sorted(found)]


def _first(
    running: deque[tuple[list[TextTokens], Future[list[bytes]]]],
) -> Iterator[tuple[TextTokens, bytes]]:
    """The vectors of the texts that were begun first, which run no more then."""
    batch, future = running[0]
    found = future.result()
    running.popleft()
    return zip(batch, found, strict=True)


def _close(engine: OfflineEngine, thread: LoopThread) -> None:
    try:
        if thread.is_alive:
            thread.run(engine.close())
    finally:
        thread.close()


def _outcome(
    ended: tuple[int, GeneratedAnswer, PenstockError | None] | None,
) -> tuple[int, RequestOutput | PenstockError]:
    assert ended is not None, "it was waited for"
    index, answer, error = ended
    return index, answer.output() if error is None else error


@contextmanager
def _placing(index: int, total: int | None) -> Generator[None]:
    """Say of an error which prompt it is about, where there are several."""
    try:
        yield
    except ClientError as error:
        if total != 1:
            error.args = (f"prompt {index}: {error}",)
        raise


def _each(value: T | Sequence[T], total: int | None, param: str) -> Iterator[T]:
    """One for each prompt: the same for all, or those of a list.

    Raises:
        InvalidRequest: the list has another length.
    """
    if not isinstance(value, Sequence):
        return repeat(value)
    each = cast(Sequence[T], value)
    if total is not None and len(each) != total:
        raise InvalidRequest(f"Invalid '{param}': {len(each)} for {total} prompts.", param=param)
    return iter(each)


def _texts(given: str | Sequence[str], param: str) -> list[str]:
    several = isinstance(given, Sequence) and not isinstance(given, str)  # pyright: ignore[reportUnnecessaryIsInstance] - users may not check.
    found = list(given) if several else [cast(str, given)]
    # Users may not check types.
    if not all(isinstance(text, str) for text in found):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"Invalid '{param}': expected texts.", param=param)
    return found


def _bar(shows: bool) -> Progress:
    screen = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=screen, transient=True, disable=not (shows and screen.is_terminal))

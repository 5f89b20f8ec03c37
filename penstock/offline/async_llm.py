"""`AsyncLLM`: the same engine on the caller's event loop, with answers as they grow."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, cast

from penstock.clock import Clock, SystemClock
from penstock.errors import InvalidRequest, WorkerUnavailable
from penstock.offline.engine import OfflineEngine
from penstock.offline.outputs import RequestOutput
from penstock.offline.params import (
    LoRARequest,
    RequestOutputKind,
    SamplingParams,
    as_params,
    default_params,
)
from penstock.offline.prompts import ChatOptions, MessageLike, PromptInput, PromptLike
from penstock.offline.settings import read_settings
from penstock.offline.tokens import ModelTokenizer

INLINE_CHARS = 8 * 1024
"""Prompts up to this size are tokenized on the event loop (about 2 ms); longer ones in a thread."""


class AsyncEngineArgs:
    """The arguments of an `AsyncLLM`, as vLLM's scripts hand them over."""

    def __init__(self, model: str, **kwargs: Any) -> None:  # noqa: ANN401
        self.model, self.kwargs = model, kwargs


class AsyncLLM:
    """A model in this program, for requests that come and go one by one. The arguments are `LLM`'s.

    It lives on the event loop that asks it first, and starts its engine then (`async with` waits for that).

    Raises:
        ConfigError, CheckpointError: as `LLM`.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:  # noqa: ANN401
        clock: Clock = SystemClock()
        self._engine = OfflineEngine(read_settings(model, kwargs), clock)
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLM":
        """As vLLM has it."""
        return cls(engine_args.model, **engine_args.kwargs)

    async def start(self) -> None:
        """Load the model, if that has not been done.

        Raises:
            OperatorError: it cannot be loaded as it is asked for.
            WorkerUnavailable: the engine did not come up, or was closed.
        """
        if self._closing is not None:
            raise WorkerUnavailable("the engine was closed")
        if self._starting is None:
            self._starting = asyncio.create_task(self._engine.start(), name="start the engine")
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        """End the engine, and with it whatever runs."""
        self.shutdown()
        if self._closing is not None:
            await self._closing

    def shutdown(self) -> None:
        """Begin to end the engine; `close` waits for that."""
        if self._closing is None and self._starting is not None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="close the engine")
            self._closing.add_done_callback(self._closed)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    def get_tokenizer(self) -> ModelTokenizer:
        """The checkpoint's."""
        return ModelTokenizer(self._engine.prompts)

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's recommended parameters."""
        return default_params(self._engine.prompts.tokenizer.defaults)

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The answer to a prompt, as it grows: `sampling_params.output_kind` says what each output has.

        Leaving the loop over it ends the request.

        Raises:
            InvalidRequest: of the prompt or a parameter, or the id is taken.
            WorkerError: the engine failed.
        """
        await self.start()
        maker = self._engine.prompts
        if isinstance(prompt, str) and len(prompt) > INLINE_CHARS:
            made = await asyncio.to_thread(maker.plain, prompt)
        else:
            made = maker.plain(prompt)
        async for output in self._stream(made, sampling_params, request_id, lora_request):
            yield output

    async def chat(
        self,
        messages: Sequence[MessageLike],
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        lora_request: LoRARequest | None = None,
        options: ChatOptions = ChatOptions(),  # noqa: B008 - it is frozen.
    ) -> AsyncGenerator[RequestOutput]:
        """The answer to a conversation, as it grows.

        Raises:
            InvalidRequest: as `generate`, or the template refuses the messages.
            WorkerError: the engine failed.
        """
        await self.start()
        made = await asyncio.to_thread(self._engine.prompts.chat, messages, options)
        async for output in self._stream(made, sampling_params, request_id, lora_request):
            yield output

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests; their last output has the finish reason "abort". Unknown ids have just ended."""
        for each in (request_id,) if isinstance(request_id, str) else request_id:
            if (running := self._running.get(each)) is not None:
                running.cancel()

    async def _stream(
        self, prompt: PromptInput, params: SamplingParams | None, request_id: str, lora: LoRARequest | None
    ) -> AsyncGenerator[RequestOutput]:
        params = self.get_default_sampling_params() if params is None else as_params(params)
        answer, requests = self._engine.new_answer(prompt, params, lora, request_id)
        if answer.request_id in self._running:
            raise InvalidRequest(f"the request id '{answer.request_id}' is taken", param="request_id")
        changed = asyncio.Event()  # Not a queue: a slow reader gets more at once.
        answer.on_change = changed.set
        running = asyncio.create_task(self._engine.run(answer, requests), name=f"request {answer.request_id}")
        running.add_done_callback(lambda _: changed.set())
        self._running[answer.request_id] = running
        try:
            while not running.done():
                await changed.wait()
                changed.clear()
                is_last = running.done() or answer.is_finished  # It is given behind the loop.
                if not is_last and params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    yield answer.output()
            if not running.cancelled():
                running.result()
            yield answer.aborted() if running.cancelled() else answer.output()
        finally:
            del self._running[answer.request_id]
            if running.cancel():
                await asyncio.wait([running])

    def _closed(self, closing: "asyncio.Task[None]") -> None:
        """The loop may have ended first (`asyncio.run` cancels what is left), and with it the worker."""
        if closing.cancelled():
            self._engine.discard()

    async def _close(self) -> None:
        starting = cast("asyncio.Task[None]", self._starting)
        if not starting.done():
            starting.cancel()
        await asyncio.wait([starting])
        for running in list(self._running.values()):
            running.cancel()
        await self._engine.close()

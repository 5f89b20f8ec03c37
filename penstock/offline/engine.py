"""One model and its engine, for programs: requests in, answers out, on one event loop.

    LLM (its own thread) ─┐                     ┌─ a child process, kept running by a supervisor
                          ├─> OfflineEngine ────┤
    AsyncLLM (your loop) ─┘   EngineBackend     └─ or a thread of this process

It is the gateway's own way to the engine (backends/engine/) without the gateway: no tenants, limits, queues
or ledger. A worker that crashes is started again, and unfinished answers continue behind the tokens that they
have.
"""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable
from itertools import count
from typing import Protocol

from msgspec.structs import replace

from penstock import rng
from penstock.backends.base import BackendStatus, Finish, GenerateRequest, Phase, Sink
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.engine.stream import EngineStream
from penstock.clock import Clock
from penstock.errors import ContextTooLong, InvalidRequest, StreamBroken, Unsupported, WorkerUnavailable
from penstock.fleet.adapters import AdapterSource
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.process import WorkerLogs
from penstock.fleet.launchers.supervised import LocalLauncher, SupervisedWorker
from penstock.offline.outputs import GeneratedAnswer, OutputChoice
from penstock.offline.params import LoRARequest, SamplingParams
from penstock.offline.prompts import PromptInput, PromptMaker
from penstock.offline.settings import OfflineSettings
from penstock.protocol.address import WorkerLaunch
from penstock.protocol.worker import ModelInfo
from penstock.rng import SEED_BITS, fresh_key
from penstock.types import Capability, FinishReason, RequestId, Usage, WorkerId

IN_FLIGHT_MAX = 512
"""Answers that the engine has at once; more wait here. Half of what it takes (`max_waiting`), and enough for
its batch to be full."""
ATTEMPTS_MAX = 3
"""For one answer: the worker may crash under it so often, less one."""
ADAPTER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 1.0

_log = logging.getLogger("penstock.worker")


class EngineProgress(Protocol):
    """Told how far the model is while it loads."""

    def __call__(self, status: BackendStatus, /) -> None:
        """Called with every change."""
        ...


class OfflineEngine:
    """`start` it on the loop that it is to live on, and `close` it there."""

    def __init__(self, settings: OfflineSettings, clock: Clock) -> None:
        """Read tokenizer and template; nothing runs yet.

        Raises:
            CheckpointError: one of them cannot be read.
        """
        self.settings = settings
        self.prompts = PromptMaker(settings.directory, clock)
        self._clock = clock
        self._backend: EngineBackend | None = None
        self._worker: SupervisedWorker | None = None
        self._closing = contextlib.AsyncExitStack()
        self._discard: Callable[[], None] = _nothing
        self._slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._changed = asyncio.Event()
        self._adapters: dict[str, AdapterSource] = {}
        self._was_ready = False
        self._numbers = count()

    @property
    def info(self) -> ModelInfo:
        """The loaded model.

        Raises:
            WorkerUnavailable: it was not started, or is closed.
        """
        info = self._backend.status.info if self._backend is not None else None
        if info is None:
            raise WorkerUnavailable("the engine does not run: it was closed, or not started")
        return info

    async def start(self, on_progress: EngineProgress | None = None) -> None:
        """Start the worker and return when the model is loaded.

        Raises:
            OperatorError: the model cannot be loaded as it is asked for.
            WorkerUnavailable: the worker did not come up.
        """
        assert self._worker is None, "started once"
        settings = self.settings
        backend = self._backend = EngineBackend(self.prompts.tokenizer, self._clock)
        spec = WorkerSpec(
            worker_id=WorkerId(settings.name),
            model_path=str(settings.directory),
            model_name=settings.name,
            engine=settings.engine,
        )
        try:
            if settings.in_process:
                self._worker = self._start_thread(spec, backend)
            else:
                launcher = LocalLauncher(self._clock, fresh_key(), logs=WorkerLogs(_log.info))
                self._closing.push_async_callback(launcher.close, timeout_s=STOP_TIMEOUT_S)
                self._discard = launcher.discard
                self._worker = await launcher.start(spec, backend)
            await self._worker.wait_ready(on_progress)
        except BaseException:
            await self.close()
            raise
        backend.on_change = self._on_change
        self._on_change()

    def _start_thread(self, spec: WorkerSpec, backend: EngineBackend) -> SupervisedWorker:
        from penstock.offline.thread_worker import ThreadWorker  # It loads torch.

        directory = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
        launch = WorkerLaunch(
            model_path=spec.model_path,
            model_name=spec.model_name,
            address=f"unix:{directory}/engine.sock",
            hash_key=fresh_key(),
            engine=replace(spec.engine, restarts_max=0),
        )
        worker = SupervisedWorker(spec, backend, ThreadWorker(launch, self._clock), self._clock)
        worker.start()
        self._closing.push_async_callback(worker.stop, STOP_TIMEOUT_S)
        return worker

    async def close(self) -> None:
        """End the worker; what still runs is broken off. Once is enough."""
        try:
            await self._closing.aclose()
        finally:
            self.prompts.close()

    def discard(self) -> None:
        """Leave no files behind, where the event loop ends before `close` could."""
        self._discard()
        self.prompts.close()

    def new_answer(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        lora: LoRARequest | None,
        request_id: str = "",
    ) -> tuple[GeneratedAnswer, list[GenerateRequest]]:
        """A request that `run` carries out. Requests are numbered in the order of these calls.

        Raises:
            InvalidRequest: this model makes it impossible; the message says why.
        """
        if self.info.pooling:
            raise Unsupported(
                f"the model '{self.info.model}' generates no text: see `LLM.embed`.", param="model"
            )
        number = next(self._numbers)  # Several threads may ask.
        prompt = self._cut(prompt, params)
        max_tokens, info = self._room(prompt, params), self.info
        constraint = params.constraint()
        if constraint.structured and Capability.STRUCTURED_OUTPUTS not in info.capabilities:
            raise Unsupported(
                f"'{constraint.param}' is not supported for this model here.", param=constraint.param
            )
        source = None if lora is None else self._source(lora)
        seed = params.seed
        if seed is None:
            seed = rng.stream(self.settings.seed, f"request/{number}").getrandbits(SEED_BITS)
        samplings = params.for_engine(
            self.prompts.tokenizer, vocab_size=info.vocab_size, max_tokens=max_tokens, seed=seed
        )
        answer = GeneratedAnswer(request_id or str(number), prompt, params, lora, self._clock)
        return answer, [
            GenerateRequest(
                request_id=RequestId(f"offline-{number}-{choice}"),
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                stop=params.stops,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                adapter="" if lora is None else lora.lora_name,
                adapter_digest="" if source is None else source.digest,
                constraint=constraint,
            )
            for choice, sampling in enumerate(samplings)
        ]

    async def run(self, answer: GeneratedAnswer, requests: list[GenerateRequest]) -> None:
        """Return when every choice has ended; `answer` hears what comes. Cancelled, it ends them.

        Raises:
            PenstockError: why the request failed.
        """
        if answer.lora is not None:
            await self._have_adapter(answer.lora)
        async with asyncio.TaskGroup() as tasks:
            for request, choice in zip(requests, answer.choices, strict=True):
                tasks.create_task(self._run_choice(request, choice))
        if (error := answer.error) is not None:
            raise error

    async def _run_choice(self, request: GenerateRequest, choice: OutputChoice) -> None:
        async with self._slots:
            finish = await self.stream(request, choice, choice.attempt())
            for _ in range(ATTEMPTS_MAX - 1):
                is_lost = isinstance(finish.error, (WorkerUnavailable, StreamBroken))
                if not is_lost or finish.resume is None:
                    break
                again = replace(request, resumed=finish.resume)
                finish = await self.stream(again, choice, choice.attempt())
        choice.end(finish)

    async def stream(self, request: GenerateRequest, sink: Sink, ended: "asyncio.Future[Finish]") -> Finish:
        """One stream, when there is a worker for it; `ended` is done at its end. Cancelled, it is aborted."""
        generation: EngineStream | None = None
        try:
            await self._until_ready(request.adapter)
            assert self._backend is not None, "it is ready"
            generation = self._backend.generate(request, sink)
            return await ended
        except WorkerUnavailable as error:
            return Finish(reason=FinishReason.ERROR, usage=Usage(), error=error)
        except asyncio.CancelledError:
            if generation is not None:
                generation.abort()
            raise

    async def _until_ready(self, adapter: str) -> None:
        """Wait for a worker that is being started again.

        Raises:
            WorkerUnavailable: it is not, or no more.
        """
        while True:
            backend = self._backend
            if backend is None or backend.status.phase in (Phase.DOWN, Phase.DRAINING):
                raise WorkerUnavailable(
                    f"the engine does not run: {backend.status.stage if backend else 'not started'}"
                )
            reported = backend.status.adapters
            if backend.status.ready and (not adapter or adapter in reported.served):
                return
            if adapter in reported.failed:
                raise WorkerUnavailable(f"the adapter '{adapter}' cannot be had: {reported.failed[adapter]}")
            self._changed.clear()
            await self._changed.wait()

    def _on_change(self) -> None:
        """The worker's status is another one; a new process gets the list of adapters."""
        assert self._backend is not None, "it speaks"
        is_ready = self._backend.status.ready
        if is_ready and not self._was_ready:
            for name, source in self._adapters.items():
                self._backend.load_adapter(name, source.path, source.digest)
        self._was_ready = is_ready
        self._changed.set()

    def _source(self, lora: LoRARequest) -> AdapterSource:
        if not lora.lora_name or not lora.lora_path:
            raise _wrong("lora_request", "it needs a name and a path")
        if not self.info.adapter_slots:
            raise Unsupported("this engine takes no adapters.", param="lora_request")
        source = AdapterSource.of(lora.lora_path)
        known = self._adapters.get(lora.lora_name)
        if known is not None and known != source:
            raise _wrong("lora_request", f"the name '{lora.lora_name}' is taken by {known.path}")
        return source

    async def _have_adapter(self, lora: LoRARequest) -> None:
        """Return when the worker has it.

        Raises:
            InvalidRequest: it cannot be loaded; the message says why.
            WorkerUnavailable: it takes too long.
        """
        name, source, backend = lora.lora_name, self._source(lora), self._backend
        assert backend is not None, "the source was checked against it"
        if name not in self._adapters:
            self._adapters[name] = source
            backend.load_adapter(name, source.path, source.digest)
        try:
            async with asyncio.timeout(ADAPTER_TIMEOUT_S):
                while name not in (reported := backend.status.adapters).served:
                    if name in reported.failed:
                        self._adapters.pop(name, None)
                        backend.unload_adapter(name)
                        raise _wrong(
                            "lora_request", f"the adapter '{name}' cannot be loaded: {reported.failed[name]}"
                        )
                    if backend.status.phase in (Phase.DOWN, Phase.DRAINING):
                        raise WorkerUnavailable(f"the engine does not run: {backend.status.stage}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise WorkerUnavailable(
                f"the adapter '{name}' was not loaded in {ADAPTER_TIMEOUT_S:g} s"
            ) from None

    def _cut(self, prompt: PromptInput, params: SamplingParams) -> PromptInput:
        """The prompt's end, where only so much of it is to be used."""
        count = params.truncate_prompt_tokens
        if count is None:
            return prompt
        if count == -1:
            count = max(1, self.info.max_model_len - (params.max_tokens or 1))
        if count == 0 or count > self.info.max_model_len:
            raise _wrong("truncate_prompt_tokens", f"expected -1, or 1 to {self.info.max_model_len}")
        return PromptInput(prompt.text, prompt.token_ids[-count:])

    def _room(self, prompt: PromptInput, params: SamplingParams) -> int:
        """Tokens that an answer may have."""
        info, num_prompt = self.info, len(prompt.token_ids)
        wrong = next((i for i in prompt.token_ids if not 0 <= i < info.vocab_size), None)
        if wrong is not None:
            raise _wrong("prompt_token_ids", f"{wrong} is not in the vocabulary of {info.vocab_size} tokens")
        left, asked = info.max_model_len - num_prompt, params.max_tokens
        if left < (asked or 1):
            raise ContextTooLong(
                f"the context has {info.max_model_len} tokens; the prompt has {num_prompt}, and "
                f"{asked or 1} were asked for behind it.",
                param="prompt" if left < 1 else "max_tokens",
            )
        return asked or left


def _nothing() -> None:
    """There are no files."""


def _wrong(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{name}': {why}.", param=name, code="invalid_value")

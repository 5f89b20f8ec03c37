"""What every backend must do, as a test class: subclass it and say how to open one.

The tests want an endless deterministic answer: a longer `max_tokens` continues the same text.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from msgspec.structs import replace

from penstock.backends.base import Backend, Delta, Finish, GenerateRequest, Generation
from penstock.errors import StreamBroken, WorkerUnavailable
from penstock.types import FinishReason, RequestId, SamplingParams

TIMEOUT_S = 20.0


class Recorder:
    """A sink that checks the contract while it listens."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.finish: Finish | None = None
        self.finished = asyncio.Event()
        self.started = asyncio.Event()
        self.then: Callable[[], None] | None = None
        """Called once, from within the first delta."""
        self.at_end: Callable[[], None] | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    def on_delta(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the finish"
        self.deltas.append(delta)
        self.started.set()
        if self.then is not None:
            then, self.then = self.then, None
            then()

    def on_finish(self, finish: Finish) -> None:
        assert self.finish is None, "a second finish"
        assert (finish.error is not None) == (finish.reason is FinishReason.ERROR)
        self.finish = finish
        self.finished.set()
        if self.at_end is not None:
            self.at_end()

    async def end(self) -> Finish:
        async with asyncio.timeout(TIMEOUT_S):
            await self.finished.wait()
        assert self.finish is not None
        return self.finish


class Requests:
    """Makes requests with ids of their own."""

    def __init__(self) -> None:
        self._count = 0

    def make(
        self,
        *,
        seed: int = 0,
        max_tokens: int = 12,
        stop: tuple[str, ...] = (),
        temperature: float = 1.0,
        **more: object,
    ) -> GenerateRequest:
        self._count += 1
        logprobs, prompt_logprobs = more.pop("logprobs", None), more.pop("prompt_logprobs", None)
        return GenerateRequest(
            request_id=RequestId(f"r-{self._count}"),
            prompt_token_ids=(10, 11, 12),
            sampling=SamplingParams(
                seed=seed,
                max_tokens=max_tokens,
                temperature=temperature,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
            stop=stop,
            **more,
        )


class BackendConformance:
    """Subclass this, with a name that pytest collects, and define `open` and `lose_worker`."""

    ENDLESS = 30_000
    """Tokens that are not generated within a test."""
    MOVED_TEMPERATURE = 1.0
    """Up to which a stream that moves gets the same tokens."""
    LOGPROB_ERROR = 0.0
    """By which a log-probability may differ when its token is computed in another batch or chunk."""
    loop_factory = staticmethod(asyncio.new_event_loop)

    def open(self) -> AbstractAsyncContextManager[Backend]:
        """A ready backend, closed afterwards."""
        raise NotImplementedError

    async def lose_worker(self, backend: Backend) -> None:
        """Take the worker away at once."""
        raise NotImplementedError

    def run(self, check: Callable[[Backend, Requests], Awaitable[None]]) -> None:
        async def with_backend() -> None:
            async with self.open() as backend:
                await check(backend, Requests())

        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            runner.run(with_backend())

    @staticmethod
    def start(backend: Backend, request: GenerateRequest) -> tuple[Recorder, Generation]:
        recorder = Recorder()
        return recorder, backend.generate(request, recorder)

    async def text(self, backend: Backend, request: GenerateRequest) -> str:
        recorder, _ = self.start(backend, request)
        assert (await recorder.end()).reason is FinishReason.LENGTH
        return recorder.text

    def test_one_finish_and_usage_adds_up(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            assert backend.status.ready
            assert backend.status.info is not None
            recorder, _ = self.start(backend, requests.make(max_tokens=12))
            finish = await recorder.end()
            assert finish.reason is FinishReason.LENGTH
            assert finish.stop is None
            assert finish.usage.completion_tokens == recorder.num_tokens == 12
            assert finish.usage.prompt_tokens == 3
            assert finish.usage.decode_ns >= 0
            assert recorder.text

        self.run(check)

    def test_streams_do_not_mix(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            alone = [await self.text(backend, requests.make(seed=seed)) for seed in range(4)]
            assert len(set(alone)) > 1
            many = [self.start(backend, requests.make(seed=i % 4))[0] for i in range(40)]
            for i, recorder in enumerate(many):
                await recorder.end()
                assert recorder.text == alone[i % 4]

        self.run(check)

    def test_abort_is_at_once_and_idempotent(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, generation = self.start(backend, requests.make(max_tokens=self.ENDLESS))
            await recorder.started.wait()
            generation.abort()
            assert recorder.finish is not None
            assert recorder.finish.reason is FinishReason.ABORT
            assert recorder.finish.usage.completion_tokens == recorder.num_tokens
            generation.abort()
            await self.text(backend, requests.make())  # Whatever was late has arrived by now.

        self.run(check)

    def test_abort_before_any_output(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, generation = self.start(backend, requests.make(max_tokens=self.ENDLESS))
            generation.abort()
            assert (await recorder.end()).reason is FinishReason.ABORT
            assert not recorder.deltas
            await self.text(backend, requests.make())

        self.run(check)

    def test_abort_from_within_a_delta(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, generation = self.start(backend, requests.make(max_tokens=self.ENDLESS))
            recorder.then = generation.abort
            assert (await recorder.end()).reason is FinishReason.ABORT
            assert len(recorder.deltas) == 1
            await self.text(backend, requests.make())

        self.run(check)

    def test_abort_of_everybody_from_within_a_delta(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            streams = [self.start(backend, requests.make(max_tokens=self.ENDLESS)) for _ in range(8)]

            def abort_all() -> None:
                for _, generation in streams:
                    generation.abort()

            streams[3][0].then = abort_all
            for recorder, _ in streams:
                assert (await recorder.end()).reason is FinishReason.ABORT
            await self.text(backend, requests.make())

        self.run(check)

    def test_abort_after_the_end_is_nothing(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, generation = self.start(backend, requests.make())
            await recorder.end()
            generation.abort()

        self.run(check)

    def test_a_finish_may_start_the_next(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, second = Recorder(), Recorder()
            recorder.at_end = lambda: backend.generate(requests.make(), second) and None
            backend.generate(requests.make(), recorder)
            assert (await second.end()).reason is FinishReason.LENGTH

        self.run(check)

    @pytest.mark.parametrize("include_stop", [False, True])
    def test_stop_string(self, include_stop: bool) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            text = await self.text(backend, requests.make(max_tokens=12))
            stop = text[5:8]
            end = text.index(stop) + (len(stop) if include_stop else 0)
            request = requests.make(max_tokens=self.ENDLESS, stop=(stop, "\0"), include_stop=include_stop)
            recorder, _ = self.start(backend, request)
            finish = await recorder.end()
            assert (finish.reason, finish.stop) == (FinishReason.STOP, stop)
            assert recorder.text == text[:end]
            assert finish.usage.completion_tokens == recorder.num_tokens
            assert finish.usage.prompt_tokens == 3

        self.run(check)

    def test_text_held_back_for_a_stop_string_comes_at_the_end(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            text = await self.text(backend, requests.make(max_tokens=12))
            recorder, _ = self.start(backend, requests.make(max_tokens=12, stop=(text[-2:] + "\0",)))
            assert (await recorder.end()).reason is FinishReason.LENGTH
            assert recorder.text == text

        self.run(check)

    def test_logprobs(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, _ = self.start(backend, requests.make(logprobs=2))
            await recorder.end()
            found = [each for delta in recorder.deltas for each in delta.logprobs]
            assert len(found) == recorder.num_tokens
            assert all(len(each.top) == 2 and each.logprob <= 0 for each in found)
            assert "".join(each.token for each in found) == recorder.text

        self.run(check)

    def test_prompt_logprobs_come_before_the_answer(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, _ = self.start(backend, requests.make(prompt_logprobs=1, max_tokens=3))
            await recorder.end()
            found = [each for delta in recorder.deltas for each in delta.prompt_logprobs]
            assert len(found) == 2  # Of three prompt tokens the first has none.
            assert all(len(each.top) == 1 and each.logprob is not None for each in found)
            kinds = [bool(delta.prompt_logprobs) for delta in recorder.deltas]
            assert kinds == sorted(kinds, reverse=True)
            assert all(
                not (delta.text or delta.token_ids) for delta in recorder.deltas if delta.prompt_logprobs
            )
            assert recorder.num_tokens == 3

        self.run(check)

    def test_a_lost_worker_ends_every_stream_with_its_kind(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            running, _ = self.start(backend, requests.make(max_tokens=self.ENDLESS))
            await running.started.wait()
            fresh, _ = self.start(backend, requests.make(max_tokens=self.ENDLESS))
            await self.lose_worker(backend)
            assert isinstance((await running.end()).error, StreamBroken)
            assert running.finish is not None
            assert running.finish.usage.completion_tokens == running.num_tokens
            # It may have had output in the meantime.
            kind = StreamBroken if fresh.deltas else WorkerUnavailable
            assert type((await fresh.end()).error) is kind
            assert not backend.status.ready
            silent = Recorder()
            with pytest.raises(WorkerUnavailable):
                backend.generate(requests.make(), silent)
            assert silent.finish is None

        self.run(check)

    def test_what_was_broken_off_goes_on_with_the_same_tokens(self) -> None:
        """Cut anywhere, also inside what may become a stop string: nothing is said twice, and usage counts
        once.
        """

        async def check(backend: Backend, requests: Requests) -> None:
            how = {"max_tokens": 24, "temperature": self.MOVED_TEMPERATURE}
            text = await self.text(backend, requests.make(**how))
            stop, never = text[-3:], text[6:9] + "\0"
            whole, _ = self.start(backend, requests.make(**how, stop=(stop, never), logprobs=1))
            expected = await whole.end()
            for num_tokens in (1, 7, 8, 12, whole.num_tokens - 1):
                request = requests.make(**how, stop=(stop, never), logprobs=1)
                first, generation = self.start(backend, request)
                while first.num_tokens < num_tokens and first.finish is None:
                    await asyncio.sleep(0.001)
                generation.abort()
                broken = await first.end()
                if broken.reason is not FinishReason.ABORT:
                    continue  # It was quicker.
                if broken.resume is None:
                    pytest.skip("this kind of worker cannot continue a stream of another one")
                again = replace(
                    request, request_id=RequestId(f"{request.request_id}-2"), resumed=broken.resume
                )
                second, _ = self.start(backend, again)
                finish = await second.end()
                assert first.text + second.text == whole.text
                assert first.num_tokens + second.num_tokens == whole.num_tokens
                moved = [each for part in (first, second) for delta in part.deltas for each in delta.logprobs]
                unmoved = [each for delta in whole.deltas for each in delta.logprobs]
                if self.LOGPROB_ERROR:
                    assert [each.token for each in moved] == [each.token for each in unmoved]
                    values = [each.logprob for each in unmoved]
                    assert [each.logprob for each in moved] == pytest.approx(values, abs=self.LOGPROB_ERROR)
                else:
                    assert moved == unmoved
                assert (finish.reason, finish.stop) == (expected.reason, expected.stop)
                assert finish.usage.prompt_tokens == expected.usage.prompt_tokens
                assert finish.usage.completion_tokens == expected.usage.completion_tokens

        self.run(check)

    def test_drain_lets_streams_end_and_takes_nothing_new(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, _ = self.start(backend, requests.make(max_tokens=40))
            draining = asyncio.create_task(backend.drain(TIMEOUT_S))
            await asyncio.sleep(0)
            with pytest.raises(WorkerUnavailable):
                backend.generate(requests.make(), Recorder())
            await draining
            assert recorder.finish is not None
            assert recorder.finish.reason is FinishReason.LENGTH
            assert recorder.num_tokens == 40

        self.run(check)

    def test_drain_aborts_what_takes_too_long(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            recorder, _ = self.start(backend, requests.make(max_tokens=self.ENDLESS))
            await recorder.started.wait()
            await backend.drain(0.05)
            assert recorder.finish is not None
            assert recorder.finish.reason is FinishReason.ABORT

        self.run(check)

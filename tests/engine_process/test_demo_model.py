"""The demo model from the gateway's side: a real process, a real model, real text."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from conformance import Recorder

from penstock.backends.base import GenerateRequest
from penstock.backends.engine.backend import EngineBackend
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.process import WorkerLogs
from penstock.fleet.launchers.supervised import LocalLauncher, SupervisedWorker
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, ModelName, RequestId, SamplingParams, WorkerId

MODEL = Path(__file__).parents[2] / "models" / "penstock-demo"
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@asynccontextmanager
async def demo_worker() -> AsyncIterator[tuple[SupervisedWorker, Tokenizer, list[str]]]:
    lines: list[str] = []
    launcher, tokenizer = (
        LocalLauncher(SystemClock(), b"k" * 32, logs=WorkerLogs(lines.append)),
        Tokenizer.load(MODEL),
    )
    spec = WorkerSpec(
        worker_id=WorkerId("demo"),
        model_path=str(MODEL),
        model_name=ModelName("penstock-demo"),
        engine=EngineSettings(threads=1, dtype="float32", kv_memory_bytes=64 * 1024 * 1024),
    )
    try:
        yield await launcher.start(spec, EngineBackend(tokenizer, SystemClock())), tokenizer, lines
    finally:
        await launcher.close(timeout_s=1)


def ask(tokenizer: Tokenizer, request_id: str, *, temperature: float = 0.0, seed: int = 0) -> GenerateRequest:
    sampling = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=24, stop_token_ids=tokenizer.eos_ids, logprobs=1
    )
    return GenerateRequest(
        request_id=RequestId(request_id), prompt_token_ids=tokenizer.encode(QUESTION), sampling=sampling
    )


def test_the_demo_model_answers_in_a_process_of_its_own() -> None:
    async def check() -> None:
        async with demo_worker() as (worker, tokenizer, lines):
            stages: list[str] = []
            await worker.wait_ready(lambda status: stages.append(status.stage))
            assert "importing" in stages
            info = worker.backend.status.info
            assert info is not None
            assert info.model == "penstock-demo"
            assert info.vocab_size >= tokenizer.vocab_size

            alone = Recorder()
            worker.backend.generate(ask(tokenizer, "alone"), alone)
            finish = await alone.end()
            assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert alone.text
            assert finish.usage.prompt_tokens == len(tokenizer.encode(QUESTION))

            sampled = [Recorder() for _ in range(4)]
            for i, recorder in enumerate(sampled):
                worker.backend.generate(ask(tokenizer, f"s{i}", temperature=1.0, seed=i % 2), recorder)
            again = Recorder()
            worker.backend.generate(ask(tokenizer, "again"), again)
            for recorder in (*sampled, again):
                assert (await recorder.end()).error is None
            assert again.text == alone.text, "the same alone, in a batch and from the prefix cache"
            assert sampled[0].text == sampled[2].text, "the same seed"
            assert all(each.logprob <= 0 for delta in alone.deltas for each in delta.logprobs)
            assert [line for line in lines if "] ready after " not in line] == [], "nothing on standard error"

    asyncio.run(check())

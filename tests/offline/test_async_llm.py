"""`AsyncLLM`: requests that come and go one by one, on the caller's event loop."""

import asyncio
import itertools
from pathlib import Path

import pytest
from small_llm import SMALL

from penstock import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from penstock.errors import CheckpointError, ConfigError, ContextTooLong, InvalidRequest, WorkerUnavailable

ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True, seed=1)

pytestmark = pytest.mark.timeout(180)


async def last(llm: AsyncLLM, prompt: str, params: SamplingParams, request_id: str = "") -> RequestOutput:
    output = None
    async for output in llm.generate(prompt, params, request_id):  # noqa: B007
        pass
    assert output is not None
    return output


@pytest.mark.parametrize("in_process", [False, True])
def test_answers_grow_and_are_those_of_a_batch(in_process: bool, mini: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=60, n=2, logprobs=1, ignore_eos=True)
    (expected,) = llm.generate("Once upon", params)

    async def check() -> None:
        async with AsyncLLM(str(mini), in_process=in_process, **SMALL) as engine:
            by_kind: dict[RequestOutputKind, list[RequestOutput]] = {}
            for kind in RequestOutputKind:
                asked = params.clone()
                asked.output_kind = kind
                by_kind[kind] = [output async for output in engine.generate("Once upon", asked, kind.name)]
            whole = by_kind[RequestOutputKind.CUMULATIVE]
            assert len(whole) > 1  # On a busy machine many tokens come at once.
            for before, behind in itertools.pairwise(whole):
                for old, new in zip(before.outputs, behind.outputs, strict=True):
                    assert new.text.startswith(old.text)
                    assert list(new.token_ids[: len(old.token_ids)]) == list(old.token_ids)
            assert [output.finished for output in whole] == [False] * (len(whole) - 1) + [True]
            assert len(by_kind[RequestOutputKind.FINAL_ONLY]) == 1
            for i, answer in enumerate(expected.outputs):
                parts = [output.outputs[i] for output in by_kind[RequestOutputKind.DELTA]]
                assert "".join(part.text for part in parts) == answer.text
                assert [token for part in parts for token in part.token_ids] == list(answer.token_ids)
                assert sum(len(part.logprobs or ()) for part in parts) == len(answer.token_ids)
                for found in (whole[-1], by_kind[RequestOutputKind.FINAL_ONLY][0]):
                    assert found.outputs[i].text == answer.text
                    assert found.outputs[i].logprobs == answer.logprobs

    asyncio.run(check())


def test_requests_end_when_they_are_aborted_or_left(mini: Path) -> None:
    async def check() -> None:
        async with AsyncLLM(str(mini), **SMALL) as engine:
            backend = engine._engine._backend
            assert backend is not None
            waiting = asyncio.create_task(last(engine, "Once", ENDLESS, "mine"))
            async for output in engine.generate("Twice", ENDLESS, "left"):
                if len(output.outputs[0].token_ids) > 3:
                    break
            with pytest.raises(InvalidRequest, match="is taken"):
                await last(engine, "Once", ENDLESS, "mine")
            assert not waiting.done()
            await engine.abort(["mine", "nobody's"])
            output = await waiting
            assert output.finished
            assert output.outputs[0].finish_reason == "abort"
            cancelled = asyncio.create_task(last(engine, "Thrice", ENDLESS))
            while not backend.num_streams:
                await asyncio.sleep(0.01)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            assert (backend.num_streams, engine._running) == (0, {})
            with pytest.raises(ContextTooLong):
                await last(engine, "Once", SamplingParams(max_tokens=10**6))
            chat = [output async for output in engine.chat([{"role": "user", "content": "Hello"}])]
            assert chat[-1].finished
            broken = asyncio.create_task(last(engine, "Four", ENDLESS))
            while not backend.num_streams:
                await asyncio.sleep(0.01)
        (ended,), _ = await asyncio.wait([broken])
        assert ended.cancelled() or ended.exception() or ended.result().outputs[0].finish_reason == "abort"
        with pytest.raises(WorkerUnavailable, match="closed"):
            await last(engine, "Once", ENDLESS)

    asyncio.run(check())


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, mini: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        AsyncLLM(str(tmp_path))

    async def check() -> None:
        with pytest.raises(ConfigError, match="kv_memory"):
            async with AsyncLLM(str(mini), kv_cache_memory_bytes=4096):
                pass

    asyncio.run(check())

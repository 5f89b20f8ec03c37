import asyncio

from vllm import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    sampling_params = SamplingParams(
        max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    found = ""
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            found += completion.text
        if output.finished:
            break
    return found


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, enforce_eager=True))
    try:
        for i, prompt in enumerate(["The future of water is", "In a small town by the sea"]):
            print(repr(await stream(engine, prompt, f"stream-{i}")))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(MODEL))  # noqa: F821 - whoever runs it sets it.

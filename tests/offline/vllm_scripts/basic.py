from vllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "A penstock is",
]


def main(model: str) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, seed=7, logprobs=1)
    llm = LLM(model=model, max_model_len=512, tensor_parallel_size=1, enforce_eager=True)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output in outputs:
        prompt = output.prompt
        completion = output.outputs[0]
        print(f"{prompt!r} -> {completion.text!r} {completion.finish_reason}")
        assert completion.logprobs is not None
        for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
            assert found[token_id].logprob <= 0
            assert found[token_id].decoded_token is not None


if __name__ == "__main__":
    main(MODEL)  # noqa: F821 - whoever runs it sets it.

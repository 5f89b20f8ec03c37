from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, seed=1, trust_remote_code=True, dtype="bfloat16")
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 16
    sampling_params.temperature = 0.0
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    outputs += llm.chat([conversation, conversation[1:]], SamplingParams(max_tokens=4, n=2), use_tqdm=True)
    for output in outputs:
        for completion in output.outputs:
            print(f"{completion.index}: {completion.text!r}")
    print(outputs[0].outputs[0].text)


if __name__ == "__main__":
    main(MODEL)  # noqa: F821 - whoever runs it sets it.

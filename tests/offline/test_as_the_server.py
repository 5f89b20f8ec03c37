"""What `LLM` answers is what the server answers to the same request, to the last token."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from served import Server
from small_llm import MINI

from penstock import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

PROMPTS = ["The capital of France is", "Once upon a time", "12 + 30 ="]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 16},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "max_tokens": 16, "seed": 5, "n": 2},
    "penalties": {
        "temperature": 0.7, "seed": 8, "max_tokens": 24, "presence_penalty": 0.5, "frequency_penalty": 0.3,
        "repetition_penalty": 1.2, "min_p": 0.02,
    },
    "rules": {
        "temperature": 1, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logit_bias": {20: 3.0},
        "bad_words": ["the"], "min_tokens": 4,
    },
    "stopped": {"temperature": 1, "seed": 2, "max_tokens": 40, "stop": ["e", "."], "ignore_eos": True},
    "kept": {
        "temperature": 0, "max_tokens": 40, "stop": ".", "include_stop_str_in_output": True,
        "stop_token_ids": [7],
    },
    "shown": {"temperature": 0.8, "seed": 4, "max_tokens": 8, "logprobs": 3},
}  # fmt: skip
OPENAI = {
    "temperature",
    "top_p",
    "max_tokens",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "logprobs",
}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    place = tmp_path_factory.mktemp("server")
    engine = "dtype: float32, threads: 1, kv_memory_bytes: 16777216, max_running: 8"
    (place / "config.yaml").write_text(
        f"models: [{{path: {MINI}, name: small, engine: {{{engine}}}}}]\n"
        f"server: {{port: 0}}\nledger: {{directory: {place / 'ledger'}}}\n"
    )
    server = Server(place, "-c", str(place / "config.yaml"))
    try:
        server.wait_ready()
        with openai.OpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
            yield client
    finally:
        server.close()


def reason(output: RequestOutput) -> list[str | None]:
    return [each.finish_reason for each in output.outputs]


@pytest.mark.parametrize("case", CASES)
def test_plain_prompts(case: str, llm: LLM, client: openai.OpenAI) -> None:
    asked = CASES[case]
    extra = {name: value for name, value in asked.items() if name not in OPENAI} | {"return_token_ids": True}
    if "logit_bias" in extra:
        extra["logit_bias"] = {str(key): value for key, value in extra["logit_bias"].items()}
    here = llm.generate(PROMPTS, SamplingParams(**({"top_k": 0} | asked)))
    for prompt, output in zip(PROMPTS, here, strict=True):
        known = {name: value for name, value in asked.items() if name in OPENAI}
        there = client.completions.create(model="small", prompt=prompt, **known, extra_body=extra)
        assert [each.text for each in output.outputs] == [each.text for each in there.choices]
        # A field of vLLM's, which the client lacks.
        ids = [getattr(each, "token_ids") for each in there.choices]  # noqa: B009
        assert [list(each.token_ids) for each in output.outputs] == ids
        assert reason(output) == [each.finish_reason for each in there.choices]
        if "logprobs" in asked:
            (mine,), (theirs,) = output.outputs, [each.logprobs for each in there.choices]
            assert mine.logprobs is not None
            assert theirs is not None
            shown = [found[i].logprob for i, found in zip(mine.token_ids, mine.logprobs, strict=True)]
            assert shown == theirs.token_logprobs


def test_conversations_and_schemas(llm: LLM, client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a river. <|im_end|>"},
    ]
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    free = SamplingParams(temperature=0.6, seed=9, max_tokens=20)
    shaped = SamplingParams(
        temperature=0.6, seed=9, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema)
    )
    here = llm.chat([messages, messages], [free, shaped])
    form = {"type": "json_schema", "json_schema": {"name": "river", "schema": schema}}
    there = [
        client.chat.completions.create(
            model="small", messages=messages, temperature=0.6, seed=9, max_tokens=20,  # type: ignore
        ),
        client.chat.completions.create(
            model="small", messages=messages, temperature=0.6, seed=9, max_tokens=40, response_format=form,  # type: ignore
        ),
    ]  # fmt: skip
    assert [output.outputs[0].text for output in here] == [each.choices[0].message.content for each in there]
    assert [len(output.prompt_token_ids) for output in here] == [each.usage.prompt_tokens for each in there]


def test_what_the_checkpoint_recommends_counts_where_a_call_says_nothing(
    llm: LLM, client: openai.OpenAI
) -> None:
    params = llm.get_default_sampling_params()
    params.seed, params.max_tokens = 6, 12
    (here,) = llm.generate(PROMPTS[1], params)
    there = client.completions.create(model="small", prompt=PROMPTS[1], seed=6, max_tokens=12)
    assert here.outputs[0].text == there.choices[0].text

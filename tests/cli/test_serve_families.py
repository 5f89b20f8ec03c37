"""`penstock serve` with a model of every family: what comes over HTTP is what transformers generates."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch
from gguf_files import convert
from served import Server
from tiny_models import FAMILIES, PHI3, WHOLES, save, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from penstock.bench.client import ApiAddress, Client
from penstock.config.checkpoints import resolve
from penstock.rng import stream
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)

CHANGES = {
    "mistral": {"sliding_window": 21},
    "phi3": PHI3,
    "qwen2": {"head_dim": None},
    "gemma2": {"sliding_window": 21, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0},
    "gemma3": {"sliding_window": 33, "sliding_window_pattern": 2},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
}
DEMO = resolve("penstock-demo")
"""Whose tokenizer and chat template they all get."""
MINI = resolve("penstock-demo-mini")
ENGINE = "dtype: float32, threads: 1, kv_memory_bytes: 16777216, max_running: 8"
NUM_PROMPT, NUM_ANSWER = 75, 24


@dataclass(frozen=True, slots=True)
class Served:
    server: Server
    tokenizer: Tokenizer
    models: dict[str, PreTrainedModel]

    def post(self, path: str, body: object) -> dict:
        async def main() -> dict:
            client = Client(ApiAddress.parse(self.server.url), key=self.server.key)
            try:
                response = await client.post(path, msgspec.json.encode(body))
            finally:
                await client.close()
            assert response.status == 200, response.body
            return msgspec.json.decode(response.body)

        return asyncio.run(main())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server with a worker for each family."""
    place = tmp_path_factory.mktemp("families")
    models = {}
    for family in FAMILIES | WHOLES:
        model = tiny_model(family, vocab_size=4096, **CHANGES.get(family, {}))
        save(model, place / family)
        for file in DEMO.glob("tokenizer*"):
            shutil.copy(file, place / family)
        models[family] = model
    convert(MINI, place / "mini.gguf")
    paths = [*(place / family for family in models), place / "mini.gguf"]
    lines = [f"  - {{path: {path}, engine: {{{ENGINE}}}}}" for path in paths]
    (place / "penstock.yaml").write_text("\n".join(["models:", *lines]) + "\n")
    server = Server(place, "-c", str(place / "penstock.yaml"), "--port", "0")
    try:
        server.wait_ready()
        yield Served(server, Tokenizer.load(DEMO), models)
    finally:
        server.close()


@pytest.mark.parametrize("family", FAMILIES | WHOLES)
def test_greedy_answers_and_their_logprobs_are_those_of_transformers(family: str, served: Served) -> None:
    rng, model = stream(5, family), served.models[family]
    prompt = [rng.randrange(3, 4096) for _ in range(NUM_PROMPT)]
    body = {"model": family, "prompt": prompt, "max_tokens": NUM_ANSWER, "temperature": 0, "logprobs": 1}
    answer = served.post("/completions", body | {"ignore_eos": True})["choices"][0]

    expected, tokens = [], list(prompt)
    with torch.no_grad():
        for _ in range(NUM_ANSWER):
            logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(logprobs.argmax()))
            expected.append(float(logprobs[tokens[-1]]))
    assert answer["text"] == served.tokenizer.decode(tokens[NUM_PROMPT:])
    assert answer["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES | WHOLES)
def test_chats_are_answered_and_counted(family: str, served: Served) -> None:
    messages = [{"role": "user", "content": "What is a penstock?"}]
    body = {"model": family, "messages": messages, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = served.post("/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_gguf_file_chats_with_its_own_tokenizer_and_template(served: Served) -> None:
    """As transformers does with the directory that it was made from; tools are in the prompt."""
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    model = AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32)
    for question, tools in (("What is 3 + 4?", []), ("What is the weather in Oslo?", [tool])):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        right = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=32)[0, len(prompt) :]
        body = {"model": "mini", "messages": messages, "max_tokens": 32, "temperature": 0}
        answer = served.post("/chat/completions", body | ({"tools": tools} if tools else {}))
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        choice = answer["choices"][0]
        if choice["message"].get("tool_calls"):
            assert choice["message"]["tool_calls"][0]["function"]["name"] in tokenizer.decode(right)
        else:
            assert choice["message"]["content"] == tokenizer.decode(right, skip_special_tokens=True)

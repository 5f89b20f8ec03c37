"""What `openai_checks` asks: a value of every parameter, and what there is to see of it in an answer."""

import collections
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Anna", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FUNCTION = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
PATTERN = "(yes|no)[0-9]{2}"
PROMPT = "Water is what every river is made of, and"
TOKENS = 12
"""Of an answer, if nothing else is said."""


@dataclass
class Answer:
    """What there is to see of an answer, whole or streamed."""

    texts: dict[int, str] = field(default_factory=lambda: collections.defaultdict(str))
    reasons: set[str] = field(default_factory=set)
    calls: list[tuple[str, str]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    num_usages: int = 0
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def length(self) -> int:
        return int(self.usage.get("completion_tokens") or self.usage.get("output_tokens") or 0)

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or self.usage.get("input_tokens") or 0)

    def has(self, name: str) -> bool:
        """Whether something in it is called so, and is there."""
        return any(
            f'"{name}"' in json.dumps(each) and f'"{name}": null' not in json.dumps(each) for each in self.raw
        )


Effect = Callable[[Answer, Answer], object]
"""Whether a parameter did what it says: of the answer with it, and of the one without it."""


@dataclass(frozen=True)
class Asked:
    """A parameter with a value, what must stand beside it, and what it does."""

    value: Any
    """Or a function of the answer to a plain request."""
    beside: dict[str, Any] = field(default_factory=dict)
    effect: Effect = lambda with_it, _: with_it.raw
    whole_only: bool = False
    streamed_only: bool = False


def matches(pattern: str) -> Effect:
    return lambda answer, _: re.fullmatch(pattern, answer.text)


def is_json(answer: Answer, _: Answer) -> bool:
    return isinstance(json.loads(answer.text), dict)


def obeys(answer: Answer, _: Answer) -> bool:
    found = json.loads(answer.text)
    return found["name"] in ("Anna", "Bob") and found["age"] <= 99


def calls(answer: Answer, _: Answer) -> bool:
    return all(
        name == "get_weather" and json.loads(said)["city"] in ("Paris", "Rome")
        for name, said in answer.calls[:1]
    )


def called(answer: Answer, _: Answer) -> bool:
    return bool(answer.calls) and calls(answer, answer)


LONG = {"max_tokens": 60}
CHOSEN = {"tools": TOOLS, "max_tokens": 60}
ASKED: dict[str, Asked] = {
    "stream": Asked(True, streamed_only=True, effect=lambda a, _: len(a.raw) > 2),
    "stream_options": Asked(
        {"include_usage": True}, streamed_only=True, effect=lambda a, _: a.num_usages == 1
    ),
    "n": Asked(2, effect=lambda a, plain: set(a.texts) == {0, 1} and a.length == 2 * plain.length),
    "stop": Asked(["e"], LONG, effect=lambda a, _: "e" not in a.text and a.reasons <= {"stop", "completed"}),
    "seed": Asked(7, {"temperature": 1}),
    "max_tokens": Asked(3, effect=lambda a, _: a.length == 3),
    "max_completion_tokens": Asked(3, effect=lambda a, _: a.length == 3),
    "max_output_tokens": Asked(3, effect=lambda a, _: a.length == 3),
    "temperature": Asked(0.0),
    "ignore_eos": Asked(True, {"max_tokens": 200}, effect=lambda a, _: a.length == 200),
    "min_tokens": Asked(60, {"max_tokens": 60}, effect=lambda a, _: a.length == 60),
    "top_k": Asked(1, {"temperature": 2}, effect=lambda a, plain: a.text == plain.text),
    "top_p": Asked(0.0001, {"temperature": 2}, effect=lambda a, plain: a.text == plain.text),
    "min_p": Asked(1.0, {"temperature": 2}, effect=lambda a, plain: a.text == plain.text),
    "frequency_penalty": Asked(2.0),
    "presence_penalty": Asked(2.0),
    "repetition_penalty": Asked(1.5),
    "logit_bias": Asked({"100": 100}, effect=lambda a, plain: a.text != plain.text),
    "include_stop_str_in_output": Asked(
        True, {"stop": ["e", "i"], "max_tokens": 60}, effect=lambda a, _: re.fullmatch("[^ei]*[ei]", a.text)
    ),
    "skip_special_tokens": Asked(False),
    "user": Asked("u"),
    "stop_token_ids": Asked(
        lambda plain: plain.token_ids[2:3],
        effect=lambda a, _: a.length <= 3 and a.reasons <= {"stop", "completed"},
    ),
    "truncate_prompt_tokens": Asked(3, effect=lambda a, _: a.prompt_tokens == 3),
    "priority": Asked(1),
    "parallel_tool_calls": Asked(
        False, CHOSEN | {"tool_choice": "required"}, effect=lambda a, b: len(a.calls) == 1 and called(a, b)
    ),
    "tools": Asked(TOOLS, effect=calls),
    "tool_choice": Asked("required", CHOSEN, effect=called),
    "chat_template_kwargs": Asked({"x": 1}),
    "include_reasoning": Asked(False),
    "continue_final_message": Asked(
        True,
        {
            "messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "Rivers are"}],
            "add_generation_prompt": False,
        },
    ),
    "add_generation_prompt": Asked(False, effect=lambda a, plain: a.prompt_tokens < plain.prompt_tokens),
    "logprobs": Asked(True, effect=lambda a, _: len(a.logprobs) in (a.length, a.length - 1)),
    "top_logprobs": Asked(
        2,
        {"logprobs": True},
        effect=lambda a, _: a.logprobs and all(len(e["top_logprobs"]) == 2 for e in a.logprobs),
    ),
    "metadata": Asked({"a": "b"}),
    "store": Asked(True),
    "service_tier": Asked("flex"),
    "safety_identifier": Asked("s"),
    "prompt_cache_key": Asked("k"),
    "response_format": Asked(
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}, LONG, effect=obeys
    ),
    "structured_outputs": Asked({"regex": PATTERN}, effect=matches(PATTERN)),
    "guided_json": Asked(SCHEMA, LONG, effect=obeys),
    "guided_regex": Asked(PATTERN, effect=matches(PATTERN)),
    "guided_choice": Asked(["red", "blue"], effect=matches("red|blue")),
    "guided_grammar": Asked('root ::= "ab" | "cd"', effect=matches("ab|cd")),
    "bad_words": Asked([" is", " the", " its"], effect=lambda a, _: not re.search(" (is|the|its) ", a.text)),
    "allowed_token_ids": Asked(
        [300, 301, 302],
        {"return_token_ids": True},
        effect=lambda a, _: a.token_ids and set(a.token_ids) <= {300, 301, 302},
    ),
    "prompt_logprobs": Asked(1, whole_only=True, effect=lambda a, _: a.has("prompt_logprobs")),
    "return_token_ids": Asked(
        True, effect=lambda a, _: len(a.token_ids) in (a.length, a.length - 1) and a.has("prompt_token_ids")
    ),
    "reasoning_effort": Asked("none"),
    "thinking_token_budget": Asked(5),
    "verbosity": Asked("low"),
    "add_special_tokens": Asked(False),
    "best_of": Asked(1),
    "echo": Asked(True, effect=lambda a, plain: a.text == PROMPT + plain.text),
    "suffix": Asked("x"),
    "modalities": Asked(["audio"]),
    "length_penalty": Asked(2),
    "spaces_between_special_tokens": Asked(False),
    "vllm_xargs": Asked({"a": 1}),
    "logits_processors": Asked(["x"]),
    "documents": Asked([{"text": "x"}]),
    "functions": Asked([FUNCTION]),
    "function_call": Asked("auto"),
    "prediction": Asked({"type": "content", "content": "x"}),
    "prompt_cache_retention": Asked("24h"),
    "cache_salt": Asked("x"),
    "request_id": Asked("x"),
    "guided_decoding_backend": Asked("x"),
    "guided_whitespace_pattern": Asked("x"),
    "chat_template": Asked("x"),
    "kv_transfer_params": Asked({"a": 1}),
    "audio": Asked({"voice": "alloy", "format": "wav"}),
    "web_search_options": Asked({}),
    "reasoning": Asked({"effort": "low"}),
    "thinking": Asked({"type": "enabled"}),
    "prompt_embeds": Asked("x"),
    "mm_processor_kwargs": Asked({"a": 1}),
    "moderation": Asked({"a": 1}),
    "prompt_cache_options": Asked({"a": 1}),
}
"""For all others `true` asks for something."""
BY_MODEL = frozenset({"thinking_token_budget"})
"""What a model that does not reason refuses."""
OF_CHAT = {"add_special_tokens": Asked(True), "best_of": Asked(2), "echo": Asked(True)}
OF_COMPLETIONS = {
    "logprobs": Asked(2, effect=lambda a, _: len(a.logprobs) in (a.length, a.length - 1)),
    "prompt": Asked([PROMPT, PROMPT], effect=lambda a, _: set(a.texts) == {0, 1}),
}
RESPONSE_TOOL = {"type": "function", "strict": False, **FUNCTION}
OF_RESPONSES = {
    "instructions": Asked("Be brief.", effect=lambda a, plain: a.prompt_tokens > plain.prompt_tokens),
    "store": Asked(False),
    "reasoning": Asked({"effort": "none"}),
    "text": Asked(
        {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
        {"max_output_tokens": 60},
        effect=obeys,
    ),
    "include": Asked(["message.output_text.logprobs"], effect=lambda a, _: a.has("logprobs")),
    "top_logprobs": Asked(
        2, {"include": ["message.output_text.logprobs"]}, effect=lambda a, _: a.has("top_logprobs")
    ),
    "stream_options": Asked({"include_obfuscation": False}, streamed_only=True),
    "tools": Asked([RESPONSE_TOOL], effect=calls),
    "tool_choice": Asked("required", {"tools": [RESPONSE_TOOL], "max_output_tokens": 60}, effect=called),
    "parallel_tool_calls": Asked(
        False, {"tools": [RESPONSE_TOOL], "tool_choice": "required", "max_output_tokens": 60}, effect=called
    ),
    "prompt": Asked({"id": "pmpt_1"}),
    "conversation": Asked("conv_1"),
    "max_tool_calls": Asked(1),
    "truncation": Asked("auto"),
    "context_management": Asked([{"type": "compaction"}]),
    "continue_final_message": Asked(
        True,
        {
            "input": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "Rivers are"}],
            "add_generation_prompt": False,
        },
    ),
    "previous_response_id": Asked(
        lambda plain: plain.raw[0]["id"], effect=lambda a, plain: a.prompt_tokens > plain.prompt_tokens
    ),
    "stop_token_ids": Asked([10], effect=lambda a, _: a.raw),
    "allowed_token_ids": Asked([300, 301], effect=lambda a, plain: a.text != plain.text),
    "add_special_tokens": Asked(True),
    "return_token_ids": Asked(True),
    "n": Asked(1),
    "thinking_token_budget": Asked(5),
}


def asked_of(endpoint: str, name: str) -> Asked:
    own = {"chat": OF_CHAT, "completions": OF_COMPLETIONS, "responses": OF_RESPONSES}[endpoint]
    return own.get(name) or ASKED.get(name) or Asked(True)


def body_of(endpoint: str, model: str) -> dict[str, Any]:
    """A request that asks for nothing special."""
    if endpoint == "responses":
        return {"model": model, "input": PROMPT, "temperature": 0, "max_output_tokens": TOKENS, "seed": 1}
    prompt = (
        {"prompt": PROMPT}
        if endpoint == "completions"
        else {"messages": [{"role": "user", "content": PROMPT}]}
    )
    return {
        "model": model,
        **prompt,
        "temperature": 0,
        "max_tokens": TOKENS,
        "seed": 1,
        "return_token_ids": True,
    }


def request_of(endpoint: str, model: str, name: str, asked: Asked, plain: Answer) -> dict[str, Any]:
    body = body_of(endpoint, model) | asked.beside
    if endpoint == "responses" and "max_tokens" in asked.beside:
        body["max_output_tokens"] = body.pop("max_tokens")
    if name == "max_completion_tokens":
        del body["max_tokens"]
    value = asked.value(plain) if callable(asked.value) else asked.value
    return body if name in ("model", "messages", "input") else body | {name: value}

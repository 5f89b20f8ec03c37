"""Writes the tables of docs/api.md from the code: the endpoints, what each engine can do, and what becomes
of each parameter. `python scripts/api_page.py` after one has changed; tests/gateway/test_api_page.py
compares.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from penstock.backends.http.dialects.openai import OpenAIDialect
from penstock.backends.http.dialects.sglang import SglangDialect
from penstock.backends.http.dialects.tgi import TgiDialect
from penstock.backends.http.dialects.triton import TritonDialect, TrtllmDialect
from penstock.backends.http.dialects.vllm import VllmDialect
from penstock.gateway.api.admin import Admin
from penstock.gateway.api.console import Console
from penstock.gateway.api.costs import CostsAdmin
from penstock.gateway.api.generate import Generate
from penstock.gateway.api.inspect import Inspect
from penstock.gateway.api.orders import AdaptersAdmin, RolloutsAdmin, ScaleAdmin, SleepAdmin
from penstock.gateway.api.responses import Responses
from penstock.gateway.api.routes import Answers, Handler, Orders, Routes
from penstock.gateway.api.tenants import TenantsAdmin
from penstock.gateway.api.vectors import VectorEndpoints
from penstock.gateway.identity.tenancy import Access
from penstock.protocol.parameters import CHAT, COMPLETION, Fate, Parameter
from penstock.protocol.responses import CHAT_WORDS, RESPONSES, SHARED
from penstock.types import ENGINE_CAPABILITIES, Capability

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
ENGINES = {
    "our engine": ENGINE_CAPABILITIES,
    "vLLM": VllmDialect.capabilities,
    "SGLang": SglangDialect.capabilities,
    "TGI": TgiDialect.capabilities,
    "TensorRT-LLM": TrtllmDialect.capabilities,
    "Triton": TritonDialect.capabilities,
    "a provider": OpenAIDialect.capabilities,
}
_TABLE = re.compile(r"^\|.*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
OF_VALUES = {"response_format": Capability.JSON_SCHEMA, "tool_choice": Capability.FORCED_TOOLS}
"""Parameters of which one value needs a capability and another none."""
ALWAYS_HERE = {
    "model",
    "stream",
    "stream_options",
    "n",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "priority",
}
"""Honoured by this server itself, whoever computes."""
HERE = {
    "chat": ALWAYS_HERE,
    "completion": ALWAYS_HERE | {"stop", "include_stop_str_in_output", "prompt", "echo", "best_of"},
}
NOTES = {
    "model": "a model, an adapter of one, or `auto`",
    "stream_options": "`include_usage`; `continuous_usage_stats` (vLLM's) beside it; "
    "`include_obfuscation: true` is refused",
    "n": "each choice is a request of its own",
    "completion max_tokens": "0 with `echo` or `prompt_logprobs`: the prompt is scored, and nothing answered",
    "max_completion_tokens": "goes before `max_tokens`",
    "stop": "checked by this server for every kind of worker",
    "chat stop": "checked by this server for every kind of worker; a provider gets it too",
    "user": "names the session and stands in the usage records",
    "messages": "unknown fields within are dropped (a provider gets them); see above",
    "tools": "`strict: true` needs our engine (see Tools) or a provider; types other than "
    "`function` need a provider",
    "parallel_tool_calls": "`false`: calls behind the first are not shown, and the answer ends where that "
    "can be seen",
    "chat_template_kwargs": "variables of the chat template",
    "prompt_cache_key": "names the session: such requests go to one worker among equals",
    "store": "a promise to keep the answer",
    "service_tier": "here tiers belong to tenants",
    "response_format": "`text` asks for nothing; each engine gets it in its own words (see above)",
    "structured_outputs": "vLLM's `json`, `json_object`, `regex`, `choice`, `grammar`; "
    "see [structured output](structured.md)",
    "guided_json": "the older spelling of `structured_outputs`",
    "guided_regex": "the same",
    "guided_choice": "the same",
    "guided_grammar": "the same",
    "tool_choice": "`required` and a named function give calls that obey their schemas; "
    "any worker takes `auto` and `none`",
    "completion logprobs": "the alternatives have the token itself too; of those with one text the likeliest",
    "reasoning_effort": "`minimal` 0.1, `low` 0.2, `medium` 0.5, `high` 0.8, `xhigh` 0.95 "
    "of the answer's tokens; any worker takes `none`, which leaves the reasoning out where the chat template "
    "or our engine can; also a variable of the chat template",
    "thinking_token_budget": "vLLM's: after so many tokens the reasoning is closed",
    "include_reasoning": "`false`: the reasoning is not shown, and counts",
    "bad_words": "at most 256, of at most 256 characters each and 8,192 together; looked for in the answer; "
    "what a grammar forces is written all the same",
    "allowed_token_ids": "at most as many as the vocabulary has; no other token is drawn; "
    "what a grammar forces is written all the same",
    "return_token_ids": "`token_ids` of each choice, without the token that ended it, and `prompt_token_ids`",
    "truncate_prompt_tokens": "the last so many tokens of the prompt; "
    "-1: as many as leave room for the answer",
    "continue_final_message": "the answer continues the last message",
    "add_generation_prompt": "`false`: the template does not begin the answer",
    "prompt_logprobs": "vLLM's, up to 20 alternatives; not in streams",
    "priority": "vLLM's: orders the requests of one tenant while they wait here, smaller first; "
    "never before another tenant's",
    "cache_salt": "made from the tenant",
    "request_id": "the answer's `x-request-id` has ours",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "chat best_of": "a parameter of plain completions",
    "completion best_of": "only what `n` is",
    "chat echo": "a parameter of plain completions",
    "prompt": "a text, texts, token ids, or lists of them",
}
"""Notes on a parameter, or on that of one endpoint."""
SAID_IN_NOTES = ("tool_choice", "reasoning_effort")
"""Parameters whose note has the values that any worker takes."""
CALLERS = {
    Access.OPEN: "anyone",
    Access.LOOK: "operators",
    Access.KEY: "callers with a key",
    Access.ADMIN: "admins",
}
OF_RESPONSES = {
    "input": "a text, or items: messages, reasoning, calls and their outputs, items of earlier responses by "
    "their ids; of built-in tools: refused",
    "instructions": "the system message; not taken over from an earlier response",
    "previous_response_id": "a stored response of the same tenant; see below",
    "store": "kept for a day, if it is not `false`",
    "reasoning": "`effort`; a `summary` other than `auto` is refused",
    "text": "`format` `json_schema` and `json_object`; `verbosity`",
    "include": "`message.output_text.logprobs`; `reasoning.encrypted_content` asks for nothing",
    "tools": "functions; built-in tools are refused",
    "tool_choice": "also `allowed_tools`",
    "top_logprobs": "with `include`",
    "stream": "typed events",
    "stream_options": "`include_obfuscation: true` is refused",
}
"""Notes on a parameter of a response."""


def tables() -> dict[str, str]:
    """The tables of the page by the heading that they stand under."""
    return {
        "Endpoints": _table(["endpoint", "for", ""], endpoints()),
        "Parameters of responses": _of_responses(),
        "Capabilities": _capabilities(),
        "Parameters of chat completions": _parameters("chat", CHAT),
        "Parameters of plain completions": _parameters("completion", COMPLETION),
    }


def endpoints() -> Iterator[list[str]]:
    """Every endpoint, whom it is for and what its handler says that it does."""
    # The handlers are only looked at, so the classes do as well as what is made of them.
    answers: Any = Answers(
        *(cast(Any, each) for each in (Generate, Responses, VectorEndpoints)), lambda handler: handler
    )
    kinds = (AdaptersAdmin, SleepAdmin, CostsAdmin, RolloutsAdmin, ScaleAdmin)
    orders: Any = Orders(*(cast(Any, each) for each in kinds))
    others = (Inspect, Admin, TenantsAdmin, Console)
    parts: list[Any] = [answers, *others, orders]
    routes = Routes(*parts)
    for path, route in routes.all().items():
        for verb, handler in route.handlers.items():
            said, does = _said(handler)
            # The same handler may serve a second path, which it does not name.
            name = said if said.startswith(f"{verb} {path}") else f"{verb} {path}"
            assert not name.endswith("/") or path == "/", f"{handler} does not say that it is {name}"
            yield [f"`{name}`", CALLERS[route.access], does]


def _said(handler: Handler) -> tuple[str, str]:
    """The endpoint that a handler's first paragraph begins with, and what it does."""
    first = (inspect.getdoc(handler) or "").partition("\n\n")[0].replace("\n", " ")
    name, _, does = first.removeprefix("`").partition("`")
    return name, does.removeprefix(": ").removesuffix(".")


def written(page: str) -> str:
    """The page with its tables as the code has them."""
    for heading, table in tables().items():
        before, found, rest = page.partition(f"## {heading}\n")
        assert found, f"the page has no section '{heading}'"
        section, next_heading, after = rest.partition("\n## ")
        section = _TABLE.sub(lambda _match, table=table: table, section, count=1)
        page = before + found + section.rstrip("\n") + "\n" + next_heading + after
    return page


def _capabilities() -> str:
    rows = [
        [f"`{each}`", *("yes" if each in known else "" for known in ENGINES.values())] for each in Capability
    ]
    return _table(["capability", *ENGINES], rows)


def _parameters(endpoint: str, parameters: Iterable[Parameter]) -> str:
    order = list(Fate)
    ranked = sorted(parameters, key=lambda each: order.index(each.fate))
    rows = [[f"`{each.name}`", *_fates(endpoint, each), _note(endpoint, each)] for each in ranked]
    return _table(["parameter", "our engine", "vLLM", "a provider", ""], rows)


def _of_responses() -> str:
    order = list(Fate)
    ranked = sorted(RESPONSES, key=lambda each: (each in SHARED, order.index(each.fate)))
    rows = [[f"`{each.name}`", _becomes(each), _note("responses", each, OF_RESPONSES)] for each in ranked]
    return _table(["parameter", "", ""], rows)


def _becomes(parameter: Parameter) -> str:
    """The fate of a parameter of a response, in words."""
    if parameter.fate is Fate.REFUSED:
        return "refused"
    words = [word for name, word in CHAT_WORDS.items() if name.partition(".")[0] == parameter.name]
    if words:
        return "as " + ", ".join(f"`{word}`" for word in words) + " of a chat"
    return "as in a chat" if parameter in SHARED else "honoured"


def _fates(endpoint: str, parameter: Parameter) -> list[str]:
    name, fate = parameter.name, parameter.fate
    if fate is Fate.REFUSED:
        return ["refused"] * 3
    passed = "honoured" if name in HERE[endpoint] else "forwarded"
    if fate is not Fate.NEEDS:
        return [fate.value, fate.value, passed]
    needed = parameter.capability or OF_VALUES[name]
    fates = ["honoured" if needed in ENGINES[engine] else "refused" for engine in ("our engine", "vLLM")]
    return [*fates, passed if needed in ENGINES["a provider"] else "refused"]


def _note(endpoint: str, parameter: Parameter, notes: Mapping[str, str] = NOTES) -> str:
    neutral = [each for each in parameter.neutral if each not in ({}, [], 0)]
    if parameter.name in SAID_IN_NOTES:
        neutral = []
    verb = "asks" if len(neutral) == 1 else "ask"
    asks_nothing = ", ".join(f"`{json.dumps(each)}`" for each in neutral)
    said = notes.get(f"{endpoint} {parameter.name}") or notes.get(parameter.name, "")
    return "; ".join(filter(None, (said, f"{asks_nothing} {verb} for nothing" if neutral else "")))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("  |", " |") for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

"""Every parameter of the two endpoints that generate, and what becomes of it. docs/api.md is this table in
words.

Parameters that mean what OpenAI or vLLM say they mean are `HONOURED`. A `LABEL` changes no answer, here or at
OpenAI. One that `NEEDS` a capability is taken where a worker has it; what is `REFUSED` no worker of any kind
can be asked for through this server. A value that asks for nothing (`neutral`, null) is always taken. Nothing
is dropped in silence: a name that is none of these is refused with the one that it resembles.
"""

import difflib
import enum
import functools
import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import msgspec

from penstock.errors import InvalidRequest, Unsupported
from penstock.protocol.openai import ChatRequest, CompletionRequest, NumTop, Priority, TokenId
from penstock.types import Capability


class Fate(enum.StrEnum):
    """The fate of a parameter."""

    HONOURED = "honoured"
    LABEL = "label"
    NEEDS = "needs"
    REFUSED = "refused"


class Parameter(NamedTuple):
    """One parameter."""

    name: str
    fate: Fate
    neutral: tuple[object, ...] = ()
    """Values, beside null, that ask for nothing."""
    capability: Capability | None = None
    instead: str = ""
    """Of a refused one: what to do."""
    type: Any = Any
    """The type that it must have, where that matters here and no request shape of `openai` says so."""


class Need(NamedTuple):
    """A capability that a request asks for, and by which parameter."""

    capability: Capability
    param: str
    what: str
    """The parameter, in words."""


def _passed(name: str, *neutral: object) -> Parameter:
    return Parameter(name, Fate.NEEDS, neutral, Capability.PASS_THROUGH)


def _guided(kind: str, of: Any) -> Parameter:  # noqa: ANN401
    """The older spelling of `structured_outputs`."""
    return Parameter(f"guided_{kind}", Fate.NEEDS, (), Capability.STRUCTURED_OUTPUTS, type=of)


def refused(name: str, *neutral: object, instead: str = "") -> Parameter:
    """A parameter that is refused by name, unless its value is one of `neutral`."""
    return Parameter(name, Fate.REFUSED, neutral, instead=instead)


_OWN_WORDS = "this server chooses it by the caller's tenant"
_SHARED = (
    *(Parameter(name, Fate.HONOURED) for name in (
        "model", "stream", "stream_options", "n", "stop", "seed", "max_tokens", "temperature", "top_p",
        "frequency_penalty", "top_k", "repetition_penalty", "ignore_eos", "stop_token_ids",
        "include_stop_str_in_output", "skip_special_tokens", "user",
    )),
    Parameter("presence_penalty", Fate.NEEDS, (0,), Capability.PRESENCE_PENALTY),
    Parameter("logit_bias", Fate.NEEDS, ({},), Capability.LOGIT_BIAS),
    Parameter("min_p", Fate.NEEDS, (0,), Capability.MIN_P),
    Parameter("min_tokens", Fate.NEEDS, (0,), Capability.MIN_TOKENS),
    Parameter("metadata", Fate.LABEL),
    _passed("store", False),
    _passed("service_tier", "auto", "default"),
    Parameter("response_format", Fate.NEEDS),
    Parameter("structured_outputs", Fate.NEEDS, (), Capability.STRUCTURED_OUTPUTS, type=dict[str, Any]),
    _guided("json", Any),
    _guided("regex", str),
    _guided("choice", list[str]),
    _guided("grammar", str),
    Parameter("bad_words", Fate.NEEDS, ([],), Capability.BAD_WORDS, type=list[str]),
    Parameter("allowed_token_ids", Fate.NEEDS, (), Capability.ALLOWED_TOKEN_IDS, type=list[TokenId]),
    Parameter("prompt_logprobs", Fate.NEEDS, (), Capability.ECHO_LOGPROBS, type=NumTop),
    refused("use_beam_search", False),
    refused("length_penalty", 1),
    refused("early_stopping", False),
    Parameter("truncate_prompt_tokens", Fate.HONOURED, type=Annotated[int, msgspec.Meta(ge=-1)]),
    refused("spaces_between_special_tokens", True),
    Parameter("return_token_ids", Fate.NEEDS, (False,), Capability.TOKEN_IDS, type=bool),
    refused("return_tokens_as_token_ids", False),
    Parameter("priority", Fate.HONOURED, type=Priority),
    refused("cache_salt", instead=_OWN_WORDS),
    refused("request_id", instead="the answer's header x-request-id has the one that this server gave it"),
    refused("kv_transfer_params"),
    refused("vllm_xargs", {}),
    refused("logits_processors", []),
    refused("guided_decoding_backend", instead="'structured_outputs' without a backend"),
    refused("guided_whitespace_pattern", instead="'structured_outputs' with a 'regex'"),
)  # fmt: skip
CHAT = (
    *_SHARED,
    *(Parameter(name, Fate.HONOURED) for name in (
        "messages", "max_completion_tokens", "tools", "parallel_tool_calls", "chat_template_kwargs",
        "include_reasoning",
    )),
    Parameter("continue_final_message", Fate.HONOURED, type=bool),
    Parameter("add_generation_prompt", Fate.HONOURED, type=bool),
    Parameter("logprobs", Fate.NEEDS, (False,), Capability.LOGPROBS),
    Parameter("top_logprobs", Fate.HONOURED),
    Parameter("tool_choice", Fate.NEEDS, ("auto", "none")),
    Parameter("safety_identifier", Fate.LABEL),
    Parameter("prompt_cache_key", Fate.LABEL),
    Parameter("reasoning_effort", Fate.NEEDS, ("none",), Capability.REASONING_BUDGET, type=str),
    _passed("verbosity", "medium"),
    _passed("prediction"),
    _passed("moderation"),
    _passed("prompt_cache_retention", "in_memory", "in-memory"),
    _passed("prompt_cache_options"),
    _passed("reasoning"),
    _passed("thinking"),
    Parameter("thinking_token_budget", Fate.NEEDS, (), Capability.REASONING_BUDGET, type=NumTop),
    _passed("documents", []),
    _passed("mm_processor_kwargs"),
    refused("modalities", ["text"], instead="this server answers with text only"),
    refused("audio", instead="this server answers with text only"),
    refused("functions", instead="use 'tools', which took its place"),
    refused("function_call", instead="use 'tool_choice', which took its place"),
    refused("web_search_options"),
    refused("add_special_tokens", False, instead="the chat template writes them"),
    refused("chat_template", instead="the model's own is used; 'chat_template_kwargs' sets its variables"),
    refused("echo", False),
    refused("best_of", 1),
)  # fmt: skip
COMPLETION = (
    *_SHARED,
    *(Parameter(name, Fate.HONOURED) for name in ("prompt", "echo", "add_special_tokens", "best_of")),
    Parameter("logprobs", Fate.NEEDS, (), Capability.LOGPROBS),
    refused("suffix", ""),
    refused("prompt_embeds"),
)


def _with_rare(shape: type[msgspec.Struct], parameters: Iterable[Parameter]) -> type[msgspec.Struct]:
    """The shape with all its parameters.

    Few requests have one of these: the others are read, and looked at, without.
    """
    missing = [each for each in parameters if each.name not in shape.__struct_fields__]
    fields = [(each.name, each.type | None, None) for each in missing]
    return msgspec.defstruct(f"Rare{shape.__name__}", fields, bases=(shape,), frozen=True, kw_only=True)


RareChatRequest = _with_rare(ChatRequest, CHAT)
RareCompletionRequest = _with_rare(CompletionRequest, COMPLETION)


class Checker:
    """Looks at those parameters of one endpoint that are not simply honoured."""

    __slots__ = ("_nothing", "_read", "_watched")

    def __init__(
        self, shape: type[msgspec.Struct], names: Iterable[str], parameters: Iterable[Parameter]
    ) -> None:
        """`names`: the parameters that it looks at, of those that are refused or need one certain
        capability.
        """
        found = [
            each
            for each in parameters
            if each.name in names and (each.capability or each.fate is Fate.REFUSED)
        ]
        assert {each.name for each in found} <= set(shape.__struct_fields__), "the shape has them all"
        self._watched: Sequence[Parameter] = found
        self._read = attrgetter(*(each.name for each in found))
        self._nothing = (None,) * len(found)

    def check(self, request: msgspec.Struct) -> list[Need]:
        """The needs of the request.

        Raises:
            Unsupported: a parameter is refused on every worker.
        """
        values: tuple[Any, ...] = self._read(request)
        needs: list[Need] = []
        if values == self._nothing:
            return needs
        for parameter, value in zip(self._watched, values, strict=True):
            if value is None or any(_is_same(value, each) for each in parameter.neutral):
                continue
            if parameter.fate is Fate.REFUSED:
                instead = f": {parameter.instead}" if parameter.instead else ""
                raise Unsupported(
                    f"'{parameter.name}' is not supported by this server{instead}.", param=parameter.name
                )
            assert parameter.capability is not None, parameter.name
            needs.append(Need(parameter.capability, parameter.name, f"'{parameter.name}'"))
        return needs


def _is_same(value: object, neutral: object) -> bool:
    """Equal, where true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


_FINDING = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`")
_EXPECTED = re.compile(r"^Expected `(.+?)`, got `(.+?)`$")
_BOUND = re.compile(r"^Expected `(\w+)` (>=|<=|>|<) (\S+)$")
_LENGTH = re.compile(r"^Expected `(\w+)` of length (>=|<=) (\d+)$")
_RELATIONS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean",
    "array": "an array", "object": "an object", "null": "null",
}  # fmt: skip
_TYPE_DEPTH_MAX = 64
"""Unions and lists around one struct of our own shapes: more than any has."""


def explain(finding: str, decoder: msgspec.json.Decoder[Any]) -> InvalidRequest:
    """The error of a body that a decoder refuses, naming the field; `finding` is what the decoder says."""
    match = _FINDING.match(finding)
    assert match is not None  # The pattern matches any text.
    what, path = match["what"], (match["path"] or "").removeprefix(".")
    if unknown := _UNKNOWN.search(what):
        return _explain_unknown(unknown[1], path, decoder)
    if missing := _MISSING.search(what):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    if not path:
        return InvalidRequest("The body must be a JSON object.", code="invalid_json")
    if expected := _EXPECTED.match(what):
        wanted = " or ".join(_WORDS.get(kind, kind) for kind in expected[1].split(" | "))
        message = (
            f"Invalid type for '{path}': expected {wanted}, but got {_WORDS.get(expected[2], expected[2])}."
        )
        return InvalidRequest(message, param=path, code="invalid_type")
    return InvalidRequest(f"Invalid '{path}': {_explain_range(what)}.", param=path, code="invalid_value")


def _explain_range(what: str) -> str:
    if bound := _BOUND.match(what):
        number = bound[3].removesuffix(".0")
        return f"expected {_WORDS.get(bound[1], bound[1])} of {_RELATIONS[bound[2]]} {number}"
    if length := _LENGTH.match(what):
        unit = "characters" if length[1] == "str" else "entries"
        return f"expected {_RELATIONS[length[2]]} {length[3]} {unit}"
    if "out of range" in what:
        return "the number is out of range"
    return what[:1].lower() + what[1:200]


def _explain_unknown(name: str, path: str, decoder: msgspec.json.Decoder[Any]) -> InvalidRequest:
    shown = name[:64]
    param = f"{path}.{shown}" if path else shown
    near = difflib.get_close_matches(shown, _fields_at(path, decoder), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    message = f"Unrecognized request argument supplied: {param}.{hint}"
    return InvalidRequest(message, param=param, code="unknown_parameter")


def _fields_at(path: str, decoder: msgspec.json.Decoder[Any]) -> list[str]:
    """Field names that are allowed at `path` (such as `messages[0].tool_calls[1]`)."""
    node = _type_info(decoder.type)
    for step in [None, *re.findall(r"\w+(?=[.\[]|$)", re.sub(r"\[[^]]*\]", "[]", path))]:
        if step is not None and isinstance(node, msgspec.inspect.StructType):
            node = next((f.type for f in node.fields if f.encode_name == step), node)
        node = _innermost(node)
    return [f.encode_name for f in node.fields] if isinstance(node, msgspec.inspect.StructType) else []


@functools.cache
def _type_info(shape: type) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(shape)


def _innermost(node: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """Look through unions and lists to the struct in them, if there is one."""
    for _ in range(_TYPE_DEPTH_MAX):
        if isinstance(node, msgspec.inspect.UnionType):
            inner = [
                t for t in node.types if isinstance(t, msgspec.inspect.StructType | msgspec.inspect.ListType)
            ]
            if not inner:
                return node
            node = inner[0]
        elif isinstance(node, msgspec.inspect.ListType):
            node = node.item_type
        else:
            return node
    return node

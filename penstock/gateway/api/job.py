"""A request that has been checked against its model: how it may be treated (`Hints`), what its answer must
look like (`shaped`), and what flow control and its worker are given of it.

Hints are headers; the session may also be named by the body's `prompt_cache_key` or `user`.

x-penstock-degrade: never | allow | prefer      whether a smaller model may answer
x-penstock-max-wait-ms: 2000                    the longest that it waits for its first token
x-penstock-migration: any | exact               whether a stream of a foreign engine that is broken off may be
                                                continued by another worker, whose tokens may differ
x-penstock-session: 7f3a                        the conversation it belongs to, whose worker it goes to among
                                                equals
x-penstock-residency: eu                        labels of cells, with commas: it is computed only in cells
                                                that have all of them (docs/cells.md)

Where a model's reasoning ends, and where a grammar begins, is the shape of an answer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.clock import NS_PER_MS
from penstock.config.cells import LABEL
from penstock.errors import InvalidRequest, Unsupported
from penstock.gateway.http.exchange import Exchange, Served
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.prepare import begins_reasoning, ends_reasoning, sampling, schemas_of
from penstock.gateway.models.served import ServedModel
from penstock.kv.hashing import PromptKeys
from penstock.policy.flow import RequestFacts
from penstock.policy.tenant import Degrade, Tenant
from penstock.protocol.needs import NO_CONSTRAINT, Constraint
from penstock.protocol.openai import ChatRequest, GenerationRequest
from penstock.protocol.worker_parts import Grammar
from penstock.rng import choice_seed, fresh_seed
from penstock.telemetry.ledger import USER_CHARS_MAX
from penstock.text.reasoning import PROSE, AnswerParser, ThoughtCount
from penstock.text.tool_formats import ForcedCalls
from penstock.text.tools import FirstCallOnly, ToolParser
from penstock.types import PLACE, RequestId, SamplingParams, places_of

_DEGRADE: Mapping[bytes, Degrade] = {word.encode(): word for word in get_args(Degrade)}
_MIGRATION: Mapping[bytes, bool] = {b"any": False, b"exact": True}
_DIGITS_MAX, _LABELS_MAX = 12, 16
_HEADERS = (
    b"x-penstock-degrade", b"x-penstock-max-wait-ms", b"x-penstock-session", b"x-penstock-migration",
    b"x-penstock-residency",
)  # fmt: skip
_HINTS = frozenset(_HEADERS)
SESSION_BYTES_MAX = 256
"""Of `x-penstock-session`; of a longer `user`, that many characters name the session."""
MAX_WAIT_MS_MAX = 600_000


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """The client's words; without them the tenant's defaults count."""

    degrade: Degrade | None = None
    max_wait_ns: int = 0
    """0: it does not say."""
    session: str = ""
    """The conversation: the header's, else `user`; empty: neither."""
    exact_migration: bool = False
    """It continues elsewhere with the very same tokens, or not at all."""
    places: frozenset[str] = frozenset()
    """Capabilities that say where it may be computed (`types.PLACE`), beside those of its tenant."""


NO_HINTS = Hints()


def read_hints(headers: Mapping[bytes, bytes], user: object) -> Hints:
    """Read the headers (names in lower case) beside the body's `user`, which may be anything.

    Raises:
        InvalidRequest: one of them says what it cannot say.
    """
    named = user[:SESSION_BYTES_MAX] if isinstance(user, str) else ""
    if not named and _HINTS.isdisjoint(headers):
        return NO_HINTS
    degrade, max_wait, session, migration, residency = [headers.get(name) for name in _HEADERS]
    return Hints(
        degrade=None if degrade is None else _degrade(degrade),
        session=named if session is None else _read_session(session, SESSION_BYTES_MAX),
        max_wait_ns=0 if max_wait is None else _max_wait_ns(max_wait, MAX_WAIT_MS_MAX),
        exact_migration=False if migration is None else _is_exact(migration),
        places=frozenset() if residency is None else _read_places(residency),
    )


def places(tenant: Tenant, hints: Hints) -> frozenset[str]:
    """Where its request may be computed, as capabilities; empty: anywhere."""
    return tenant.places | hints.places if hints.places else tenant.places


def check_places(model: ServedModel, wanted: frozenset[str]) -> None:
    """Refuse a request that is bound to a place where nobody computes the model.

    Raises:
        Unsupported: there is no such cell.
    """
    if wanted and (lacking := model.workers.lacking_places(wanted)):
        labels = ", ".join(f"'{each.removeprefix(PLACE)[:64]}'" for each in sorted(lacking))
        raise Unsupported(
            f"No cell with the label {labels} serves the model '{model.name}', and this request is bound to "
            f"such cells.",
            param="x-penstock-residency",
            code="unsupported_by_model",
        )


def _degrade(value: bytes) -> Degrade:
    found = _DEGRADE.get(value.strip().lower())
    if found is None:
        raise _wrong("x-penstock-degrade", "one of never, allow, prefer", value)
    return found


def _is_exact(value: bytes) -> bool:
    found = _MIGRATION.get(value.strip().lower())
    if found is None:
        raise _wrong("x-penstock-migration", "any or exact", value)
    return found


def _read_session(value: bytes, len_max: int) -> str:
    name = value.strip()
    if not 0 < len(name) <= len_max:
        raise _wrong("x-penstock-session", f"1 to {len_max} characters", value)
    return name.decode("latin-1")


def _read_places(value: bytes) -> frozenset[str]:
    labels = [label.strip() for label in value.decode("latin-1").split(",")]
    if len(labels) > _LABELS_MAX or not all(LABEL.fullmatch(label) for label in labels):
        raise _wrong("x-penstock-residency", "labels of cells with commas between them", value)
    return places_of(labels)


def _max_wait_ns(value: bytes, limit_ms: int) -> int:
    digits = value.strip()
    if not digits.isdigit() or len(digits) > _DIGITS_MAX or not 0 < int(digits) <= limit_ms:
        raise _wrong("x-penstock-max-wait-ms", f"a whole number from 1 to {limit_ms}", value)
    return int(digits) * NS_PER_MS


def _wrong(header: str, expected: str, value: bytes) -> InvalidRequest:
    shown = value[:32].decode("latin-1")
    return InvalidRequest(
        f"Invalid header '{header}': expected {expected}, but got {shown!r}.",
        param=header,
        code="invalid_value",
    )


CHAT_ID, COMPLETION_ID, RESPONSE_ID = "chatcmpl-", "cmpl-", "resp_"
EMBEDDINGS_ID, RERANK_ID, SCORE_ID = "embd-", "rerank-", "score-"
ANSWER_IDS = CHAT_ID, COMPLETION_ID, RESPONSE_ID, EMBEDDINGS_ID, RERANK_ID, SCORE_ID
"""How ids of answers begin. The rest is the same as in the id of the request (`x-request-id`)."""
TOKEN_BYTES = 8
"""The memory of one prompt token of a waiting request: a place in a tuple."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has been checked against its model, and is ready to start."""

    exchange: Exchange
    caller: Caller
    model: ServedModel
    adapter: str
    request: GenerationRequest
    answer_id: str
    prompts: Sequence[tuple[int, ...]]
    max_tokens: Sequence[int]
    """By prompt."""
    logprobs: int | None
    prompt_logprobs: int | None = None
    needs: frozenset[str]
    """Capabilities that its worker must have."""
    constraint: Constraint = NO_CONSTRAINT
    body: bytes
    """The request as it came, or the chat that was made of it."""
    uses_tools: bool = False
    """Whether its answer may call a tool."""

    @property
    def shown_prompt_logprobs(self) -> int | None:
        """VLLM's `prompt_logprobs`: alternatives beside each token of the prompt; None: it is not asked
        for.
        """
        return getattr(self.request, "prompt_logprobs", None)

    @property
    def shown_prompt_ids(self) -> Sequence[Sequence[int]]:
        """By choice, its prompt, if `return_token_ids` asks for ids of tokens; else nothing."""
        if getattr(self.request, "return_token_ids", None) is not True:
            return ()
        return [prompt for prompt in self.prompts for _ in range(self.choices_per_prompt)]

    @property
    def only_scores(self) -> bool:
        """Whether nothing is answered: what is asked for is the log-probabilities of the prompt."""
        return self.request.max_tokens == 0

    @property
    def choices_per_prompt(self) -> int:
        """`n`."""
        return self.request.n or 1

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return len(self.prompts) * self.choices_per_prompt


def body_bytes(exchange: Exchange, body: bytes) -> int:
    """The memory of the body of a waiting request: as it came, and the chat that was made of it, if one was,
    which also has what was stored of an earlier response.
    """
    return len(exchange.body) + (0 if body is exchange.body else len(body))


def facts_of(job: Job, served: Served, hints: Hints, keys: PromptKeys | None) -> RequestFacts:
    """The request as flow control sees it."""
    request, tenant, prompts = job.request, job.caller.tenant, job.prompts
    num_tokens = longest = len(prompts[0])
    if len(prompts) > 1:
        lengths = [len(prompt) for prompt in prompts]
        num_tokens, longest = sum(lengths), max(lengths)
    bound, needs, user, per_prompt = places(tenant, hints), job.needs, request.user, job.choices_per_prompt
    return RequestFacts(  # In the order of its fields: of so many, their names take longer than the struct.
        RequestId(job.answer_id),
        job.model.name,
        num_tokens,
        job.max_tokens[0] if len(prompts) == 1 else max(job.max_tokens),
        tenant,
        served.requested,
        served.downgrade or "",
        len(prompts) * per_prompt,
        per_prompt,
        body_bytes(job.exchange, job.body) + TOKEN_BYTES * num_tokens,
        getattr(request, "priority", None) or 0,
        hints.max_wait_ns,
        hints.degrade,
        job.uses_tools,
        needs | bound if bound else needs,
        longest + _asked_tokens(request),
        not request.stream,
        served.endpoint,
        job.adapter,
        f"{tenant.id}\0{hints.session}" if hints.session else "",  # No other tenant can name it.
        prompts,
        keys,
        job.caller.key_prefix,
        user[:USER_CHARS_MAX] if isinstance(user, str) else "",
    )


def facts_before(
    exchange: Exchange, hints: Hints, request: GenerationRequest, needs: frozenset[str], adapter: str
) -> RequestFacts:
    """The facts that admission asks about, as far as they are known before the prompt is made."""
    served = exchange.served
    assert served is not None, "its model is known"
    return RequestFacts(
        id=RequestId(exchange.id),
        tenant=served.tenant,
        route=served.counted_model,
        requested_model=served.requested,
        diverted=served.downgrade or "",
        prompt_tokens=0,
        max_tokens=0,
        first_token_ns=hints.max_wait_ns,
        degrade=hints.degrade,
        needs_tools=uses_tools(request),
        needs=needs,
        adapter=adapter,
        endpoint=served.endpoint,
    )


def requests_of(job: Job, hints: Hints, piece_tokens: int) -> list[GenerateRequest]:
    """One stream for each choice of each prompt, in the order of their indexes."""
    request, stop = job.request, _stops(job)
    found: list[GenerateRequest] = []
    is_chat, model, caller = isinstance(request, ChatRequest), job.model, job.caller
    tenant, choices = caller.tenant, job.choices_per_prompt
    adapter_digest = model.workers.adapter_digests.get(job.adapter, "") if job.adapter else ""
    # The tags around a tool call are special tokens in some vocabularies.
    shows_special = (
        request.skip_special_tokens is False or job.uses_tools or (is_chat and model.has_special_marks)
    )
    first: SamplingParams | None = None
    for prompt, max_tokens in zip(job.prompts, job.max_tokens, strict=True):
        seed = fresh_seed() if request.seed is None else request.seed
        public_tokens = model.public_prefixes.num_tokens_of(prompt)
        for choice in range(choices):
            own_seed = choice_seed(seed, choice)
            if first is None:  # Most requests have one choice.
                params = first = sampling(
                    model,
                    request,
                    max_tokens=max_tokens,
                    logprobs=job.logprobs,
                    prompt_logprobs=job.prompt_logprobs,
                    seed=own_seed,
                )
            else:
                params = msgspec.structs.replace(first, max_tokens=max_tokens, seed=own_seed)
            found.append(
                GenerateRequest(
                    RequestId(f"{job.answer_id}-{len(found)}"),
                    prompt,
                    params,
                    stop,
                    bool(request.include_stop_str_in_output),
                    not shows_special,
                    job.adapter,
                    adapter_digest,
                    tenant.cache_salt,
                    public_tokens,
                    tenant.fairness_key,
                    tenant.weight,
                    piece_tokens,
                    job.body,
                    is_chat,
                    job.constraint,
                    hints.exact_migration,
                )
            )
    return found


def _asked_tokens(request: GenerationRequest) -> int:
    """How long an answer may get at most, if the client says so; what it leaves open fits any context."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens or 1


def _stops(job: Job) -> tuple[str, ...]:
    request = job.request
    asked = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if job.uses_tools and cast("ChatRequest", request).parallel_tool_calls is False:
        # The answer ends with its first call. The mark that ends a call is no part of it.
        close = job.model.tool_format.parser({}).STOP
        # A model may write about that mark while it thinks.
        if close and job.constraint.forced_tool is None and job.model.reasoning is None:
            return (*asked, close)
    return asked


def uses_tools(request: GenerationRequest) -> bool:
    """Whether its answer may call a tool."""
    return isinstance(request, ChatRequest) and bool(request.tools) and request.tool_choice != "none"


EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""`reasoning_effort`: the share of an answer's tokens that its reasoning may take."""


def template_extra(request: ChatRequest) -> dict[str, Any] | None:
    """The chat template's values beside a request's messages: the effort is a variable of some."""
    effort = getattr(request, "reasoning_effort", None)
    if not isinstance(effort, str):
        return request.chat_template_kwargs
    found: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        found["enable_thinking"] = False
    return found | (request.chat_template_kwargs or {})


def shaped(
    model: ServedModel, request: ChatRequest, prompt: Sequence[int], max_tokens: int, constraint: Constraint
) -> Constraint:
    """The constraint of one model's answer: what it must look like begins behind its reasoning, and a bounded
    reasoning is closed. Calls of tools obey their schemas.

    Raises:
        InvalidRequest: the bound makes no sense.
        Unsupported: this model does not reason.
    """
    if type(request) is ChatRequest and not request.tools and not constraint.structured:
        return constraint  # Most requests shape nothing.
    budget, param = _budget(request, max_tokens)
    marks = model.reasoning
    if marks is None and budget and not forwards(model):
        raise Unsupported(
            f"'{param}' is not supported by the model '{model.name}': it does not reason.",
            param=param,
            code="unsupported_by_model",
        )
    calls = None if constraint.structured or not request.tools else call_grammar(model, request)
    is_bounded = bool(constraint.structured) or budget is not None
    if calls is None and not is_bounded:
        return constraint
    grammar = calls or Grammar(form=constraint.form)
    if marks is not None and not ends_reasoning(model, prompt):
        grammar = msgspec.structs.replace(
            grammar,
            opens_with="" if begins_reasoning(model, prompt) else marks.open,
            begins_after=marks.close,
            begins_within=budget,
        )
    elif calls is None:
        return constraint
    param = constraint.param or ("tools" if calls is not None else param)
    return msgspec.structs.replace(constraint, grammar=grammar, param=param)


def call_grammar(model: ServedModel, request: ChatRequest) -> Grammar | None:
    """The grammar that holds each call of an answer to the schemas of its tools, from the call's mark on;
    None: there is nothing of the kind.

    A promise where a tool is `strict`; else as far as the schemas can be enforced.
    """
    syntax = model.tool_format
    tools = [tool.function for tool in request.tools or () if tool.function is not None]
    if not tools or request.tool_choice not in (None, "auto"):
        return None
    is_strict = holds_calls(request)
    asked = {
        "format": syntax.name,
        "tools": [{"name": tool.name, "parameters": tool.parameters} for tool in tools],
        "several": request.parallel_tool_calls is not False,
    }
    try:
        form = msgspec.json.encode({"calls": asked})
    except RecursionError:
        if not is_strict:
            return None
        raise InvalidRequest("Invalid 'tools': a schema is nested too deeply.", param="tools") from None
    return Grammar(
        form=form,
        call_mark=syntax.call_mark(tool.name for tool in tools),
        ends_with_calls=syntax.ends_answer,
        is_optional=not is_strict,
    )


def holds_calls(request: ChatRequest) -> bool:
    """Whether what is shown as a call must obey its schema: a tool is `strict`."""
    return any(tool.function is not None and tool.function.strict for tool in request.tools or ())


def _budget(request: ChatRequest, max_tokens: int) -> tuple[int | None, str]:
    """Tokens that the reasoning may take and the parameter that says so; None: as many as it likes."""
    tokens: int | None = getattr(request, "thinking_token_budget", None)
    effort: str | None = getattr(request, "reasoning_effort", None)
    if tokens is not None:
        return min(tokens, max_tokens), "thinking_token_budget"
    if effort is None:
        return None, ""
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"Invalid value for 'reasoning_effort': '{effort[:64]}'. Supported values are "
            f"{', '.join(repr(each) for each in EFFORTS)}.",
            param="reasoning_effort",
            code="invalid_value",
        )
    return int(max_tokens * EFFORTS[effort]), "reasoning_effort"


def forwards(model: ServedModel) -> bool:
    """Whether some worker of it is a provider, which makes of the parameter what it likes."""
    return model.workers.forwards


def is_prose(job: Job) -> bool:
    """Whether the answer's text is neither a call nor reasoning, so that nothing has to be parsed."""
    assert isinstance(job.request, ChatRequest)
    return job.model.reasoning is None and job.constraint.forced_tool is None and not job.uses_tools


def answer_parser(job: Job) -> AnswerParser:
    """The parser of one choice's text."""
    model, request = job.model, job.request
    assert isinstance(request, ChatRequest)
    tools: ToolParser | None = None
    if job.constraint.forced_tool is not None:
        tools = ForcedCalls(job.constraint.forced_tool)
    elif job.uses_tools:
        schemas, syntax = schemas_of(request), model.tool_format
        held = re.compile(syntax.call_mark(schemas)) if holds_calls(request) else None
        tools = syntax.parser(schemas, held)
        if request.parallel_tool_calls is False:
            tools = FirstCallOnly(tools)
    if (marks := model.reasoning) is None:
        return PROSE if tools is None else AnswerParser(tools)
    has_begun = begins_reasoning(model, job.prompts[0])
    return AnswerParser(
        tools,
        marks,
        has_begun=has_begun,
        shows=getattr(request, "include_reasoning", None) is not False,
        counts=ThoughtCount(marks, model.tokenizer.token_bytes, has_begun=has_begun),
    )

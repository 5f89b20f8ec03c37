"""From a checked request to streams for a worker: prompt tokens, sampling parameters, and whether they fit.

A value that a request leaves open comes from the model's generation_config.json, then from OpenAI's defaults:
temperature 1, top_p 1, every token allowed. `max_tokens` defaults to the rest of the context for chats and to
16 for plain completions, as at OpenAI.

Tokenizing without stalling the event loop.

A short prompt takes less time than handing it to a thread, so it is done in place. A long one (a megabyte
is a quarter of a second) goes to one of two threads; the tokenizer releases the GIL meanwhile. A chat
template that runs in a process of its own is waited for in a thread of its own, so that its model's requests
wait only for each other; the metrics and the log say which model that is, and why.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from penstock.errors import ContextTooLong, InvalidRequest, Overloaded
from penstock.gateway.models.served import ServedModel
from penstock.policy.tenant import ANONYMOUS, Tenant, check_tokens, output_room
from penstock.protocol.needs import text_only
from penstock.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest, Message, ToolSpec
from penstock.protocol.worker import ModelInfo
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.chat import USED_UP, ChatTemplate
from penstock.text.reasoning import has_begun
from penstock.text.sandbox import RanAway
from penstock.text.tokenizer import bad_word_tokens, stop_token_ids
from penstock.types import ModelName, SamplingParams

NUM_THREADS = 2
APART_WAITING_MAX = 256
"""Requests of one model that wait for its template's process."""

INLINE_BYTES = 8 * 1024
"""Bodies up to this size are tokenized on the event loop (about 2 ms); longer ones in a thread."""
WAITING_MAX = 256
"""Long bodies that wait for a tokenizing thread; one more is refused as overloaded."""

T = TypeVar("T")


class TokenizePool:
    """Runs work on prompts, in place or in a thread, by the size of the body that it comes from."""

    def __init__(self, metrics: Metrics, log: Log) -> None:
        self._metrics, self._log = metrics, log
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self.num_waiting = 0
        self._apart: dict[ChatTemplate, _Apart] = {}
        self._logged: set[tuple[ModelName, str]] = set()
        """Models and reasons whose line is in the log."""

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, which raises what `work` raises.

        Raises:
            Overloaded: too much is waiting already.
        """
        if num_bytes <= INLINE_BYTES:
            return work()
        if self.num_waiting >= WAITING_MAX:
            raise Overloaded("Too many long prompts are waiting to be tokenized. Try again shortly.")
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.num_waiting -= 1

    async def render(
        self, num_bytes: int, model: ServedModel, with_tools: bool, work: Callable[[bool], T]
    ) -> T:
        """The result of `work(may_block)`, which renders with this model's template and raises `RanAway`
        rather than block.

        Raises:
            Overloaded: too much is waiting already.
        """
        template = model.template
        if template.runs_here(with_tools):
            try:
                if num_bytes <= INLINE_BYTES:
                    return work(False)
                return await self.run(num_bytes, lambda: work(False))
            except RanAway:
                pass
        self._count_apart(model.name, template.why_apart(with_tools))
        apart = self._apart.get(template)
        if apart is None:
            apart = self._apart[template] = _Apart()
        return await apart.run(lambda: work(True))

    def _count_apart(self, model: ModelName, why: str | None) -> None:
        """`why` None: only this request is too large to be rendered here, so the log has no line about it."""
        reason = "request_size" if why is None else "allowance" if why == USED_UP else "unpriced"
        self._metrics.template_child(model, reason)
        if why is not None and (model, why) not in self._logged:
            self._logged.add((model, why))
            self._log.warning("a chat template runs in a child process", model=model, why=why)

    def close(self) -> None:
        """Let the threads end; what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for template, apart in self._apart.items():
            apart.close()
            template.close()


class _Apart:
    """The thread that waits for one template's process."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="template")
        self._num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._num_waiting >= APART_WAITING_MAX:
            raise Overloaded(
                "Too many requests are waiting for this model's chat template. Try again shortly."
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


_COMMON = (ChatRequest, CompletionRequest)
"""Shapes of requests without the parameters that few have."""
COMPLETION_MAX_TOKENS = 16
BAD_WORDS_MAX, BAD_WORD_CHARS_MAX, BAD_WORDS_CHARS_MAX = 256, 256, 8192
"""Words, characters of one, and characters of all: they are tokenized on the event loop."""
PROMPT_END_TOKENS = 16
"""The end of a prompt in which the mark that opens the reasoning is looked for."""
TEMPLATE_RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
})  # fmt: skip


async def chat_prompt(
    pool: TokenizePool,
    model: ServedModel,
    request: ChatRequest,
    tenant: Tenant,
    num_bytes: int,
    extra: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of the conversation, which came in a body of `num_bytes`; `extra` are variables of the
    template.

    Raises:
        InvalidRequest: the template refuses it.
        Overloaded: too much is waiting to be rendered.
    """
    tools = request.tools if request.tool_choice != "none" else None
    continues = getattr(request, "continue_final_message", None) is True
    begins = getattr(request, "add_generation_prompt", None)
    if continues and begins:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="add_generation_prompt",
            code="invalid_value",
        )
    if not (tools or extra or continues) and num_bytes <= INLINE_BYTES:
        plain = _plain_prompt(model, request.messages, tenant, add_generation_prompt=begins is not False)
        if plain is not None:
            return plain
    return await render(
        pool,
        model,
        request.messages,
        tenant,
        num_bytes,
        tools=tools,
        add_generation_prompt=not continues and begins is not False,
        continues=continues,
        extra=extra,
    )


_NOTHING_ELSE = [None] * (len(Message.__struct_fields__) - 2)


def _plain_prompt(
    model: ServedModel, messages: Sequence[Message], tenant: Tenant, *, add_generation_prompt: bool
) -> tuple[int, ...] | None:
    """Token ids of messages that have nothing but a role and a text, if their outline is known."""
    roles: list[str] = []
    texts: list[str] = []
    for message in messages:
        role, content, *others = msgspec.structs.astuple(message)
        if type(content) is not str or others != _NOTHING_ELSE:
            return None
        roles.append(role)
        texts.append(content)
    return model.prompts.of_texts(
        roles, texts, add_generation_prompt=add_generation_prompt, trusted=tenant.trusted_special_tokens
    )


async def render(
    pool: TokenizePool,
    model: ServedModel,
    messages: Sequence[Message],
    tenant: Tenant,
    num_bytes: int,
    *,
    tools: Sequence[ToolSpec] | None = None,
    add_generation_prompt: bool = True,
    continues: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of messages put through the model's template; special tokens in their text are those tokens
    if the tenant is trusted with them, else text.

    Raises:
        InvalidRequest: the template refuses them.
        Overloaded: too much is waiting to be rendered.
    """
    if extra and (taken := sorted(TEMPLATE_RESERVED & extra.keys())):
        raise InvalidRequest(
            f"'chat_template_kwargs' may not set '{taken[0]}'.", param="chat_template_kwargs"
        )

    # A message of one text, as most are, costs no call.
    shown = [text_only(each) if isinstance(each.content, list) else each for each in messages]

    def work(may_block: bool) -> tuple[int, ...]:
        return model.prompts.token_ids(
            msgspec.to_builtins(shown),
            tools=[msgspec.to_builtins(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            extra=extra,
            continues=continues,
            trusted=tenant.trusted_special_tokens,
            may_block=may_block,
        )

    return await pool.render(num_bytes, model, bool(tools), work)


def begins_reasoning(model: ServedModel, prompt: Sequence[int]) -> bool:
    """Whether an answer to this prompt begins within the reasoning: its template has opened it."""
    if model.reasoning is None:
        return False
    end = model.tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return has_begun(model.reasoning, end)


def ends_reasoning(model: ServedModel, prompt: Sequence[int]) -> bool:
    """Whether the prompt has closed the reasoning already: the template was told to leave it out."""
    if model.reasoning is None:
        return True
    end = model.tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(model.reasoning.close)


def schemas_of(request: ChatRequest) -> dict[str, Mapping[str, Any]]:
    """The schemas of its functions' parameters, by their names."""
    functions = [tool.function for tool in request.tools or () if tool.function is not None]
    return {each.name: each.parameters or {} for each in functions}


def completion_prompt(
    model: ServedModel, prompt: str | list[int], info: ModelInfo, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of one plain prompt. May take long for a long text; safe in a thread.

    Raises:
        InvalidRequest: a token id is not in the vocabulary, or there is nothing to start from.
    """
    if isinstance(prompt, str):
        token_ids = model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        check_token_ids(prompt, info.vocab_size, "prompt")
        token_ids = tuple(prompt)
    if not token_ids:
        raise InvalidRequest("'prompt' must not be empty for this model.", param="prompt")
    return token_ids


def truncated(prompt: tuple[int, ...], request: GenerationRequest, info: ModelInfo) -> tuple[int, ...]:
    """The last `truncate_prompt_tokens` of a prompt; -1: as many as leave room for what is asked for.

    Raises:
        InvalidRequest: the number makes no sense for this model.
    """
    if type(request) in _COMMON:
        return prompt
    asked: int | None = getattr(request, "truncate_prompt_tokens", None)
    if asked is None:
        return prompt
    count = asked
    if asked == -1:
        answer: int = getattr(request, "max_completion_tokens", None) or request.max_tokens or 1
        count = max(1, info.max_model_len - answer)
    if not 0 < count <= info.max_model_len:
        raise InvalidRequest(
            f"Invalid 'truncate_prompt_tokens': expected -1, or 1 to {info.max_model_len}, but got {count}.",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    return prompt[-count:]


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequest: naming the first one.
    """
    wrong = next((i for i in token_ids if i >= vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"Invalid '{param}': token id {wrong} is not in the vocabulary of {vocab_size} tokens.",
            param=param,
        )


def chat_max_tokens(
    request: ChatRequest, num_prompt: int, info: ModelInfo, tenant: Tenant = ANONYMOUS
) -> int:
    """How much a chat may answer: what was asked for, else what the context and the tenant's limits leave.

    Raises:
        ContextTooLong: it does not fit.
        InvalidRequest: the tenant may not have answers that long.
    """
    asked = request.max_completion_tokens or request.max_tokens
    if tenant.has_lengths:
        check_tokens(tenant, num_prompt, asked, param="messages")
    return _room(asked, num_prompt, info, tenant, "messages")


def completion_max_tokens(
    request: CompletionRequest, num_prompt: int, info: ModelInfo, tenant: Tenant = ANONYMOUS
) -> int:
    """How much a plain completion may answer: what was asked for, else 16 tokens or what is left.

    Raises:
        ContextTooLong: it does not fit.
        InvalidRequest: the tenant may not have answers that long.
    """
    # A prompt is scored with its answer's first token, which is dropped: `ScoringSink`.
    asked = None if request.max_tokens is None else max(1, request.max_tokens)
    if tenant.has_lengths:
        check_tokens(tenant, num_prompt, asked, param="prompt")
    room = _room(asked, num_prompt, info, tenant, "prompt")
    return room if asked is not None else min(COMPLETION_MAX_TOKENS, room)


def check_sampling(request: GenerationRequest, max_tokens: int, info: ModelInfo) -> None:
    """Refuse what only this model, or this prompt, makes impossible.

    Raises:
        InvalidRequest: naming the field.
    """
    if (request.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"Invalid 'min_tokens': expected at most max_tokens, which is {max_tokens} here, "
            f"but got {request.min_tokens}.",
            param="min_tokens",
            code="invalid_value",
        )
    if request.logit_bias:
        check_token_ids([int(key) for key in request.logit_bias], info.vocab_size, "logit_bias")
    if type(request) in _COMMON:
        return
    if bad_words := getattr(request, "bad_words", None):
        _check_bad_words(bad_words)
    allowed: list[int] | None = getattr(request, "allowed_token_ids", None)
    if allowed is not None:
        if not 0 < len(allowed) <= info.vocab_size:
            raise InvalidRequest(
                f"Invalid 'allowed_token_ids': expected 1 to {info.vocab_size} token ids, as many as the "
                f"vocabulary has, but got {len(allowed)}.",
                param="allowed_token_ids",
                code="invalid_value",
            )
        check_token_ids(allowed, info.vocab_size, "allowed_token_ids")


def _check_bad_words(words: Sequence[str]) -> None:
    wrong = ""
    if len(words) > BAD_WORDS_MAX or not all(word.strip() for word in words):
        wrong = f"expected at most {BAD_WORDS_MAX} words, none of them empty"
    elif any(len(word) > BAD_WORD_CHARS_MAX for word in words):
        wrong = f"a word may have at most {BAD_WORD_CHARS_MAX} characters"
    elif sum(map(len, words)) > BAD_WORDS_CHARS_MAX:
        wrong = f"the words may have at most {BAD_WORDS_CHARS_MAX} characters together"
    if wrong:
        raise InvalidRequest(f"Invalid 'bad_words': {wrong}.", param="bad_words", code="invalid_value")


def sampling(
    model: ServedModel,
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    seed: int,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Sampling parameters of one choice, open ones filled in. Tokenizes `bad_words`: other choices get copies
    with their own seeds.
    """
    open_: Any = model.defaults
    rare = type(request) not in _COMMON
    top_p = open_.top_p if request.top_p is None else request.top_p
    top_k = max(0, open_.top_k if request.top_k is None else request.top_k)
    repetition = request.repetition_penalty
    return SamplingParams(  # In the order of its fields: of so many, their names take longer than the struct.
        open_.temperature if request.temperature is None else request.temperature,
        # A nucleus of no mass still holds the likeliest token.
        top_k if top_p > 0 else 1,
        top_p if top_p > 0 else 1.0,
        open_.min_p if request.min_p is None else request.min_p,
        request.presence_penalty or 0.0,
        request.frequency_penalty or 0.0,
        open_.repetition_penalty if repetition is None else repetition,
        _logit_bias(request.logit_bias) if request.logit_bias else (),
        bad_word_tokens(model.tokenizer, getattr(request, "bad_words", None) or ()) if rare else (),
        tuple(dict.fromkeys(getattr(request, "allowed_token_ids", None) or ())) if rare else (),
        request.min_tokens or 0,
        seed,
        max_tokens,
        stop_token_ids(model.tokenizer, request.stop_token_ids or (), ignores_eos=bool(request.ignore_eos)),
        logprobs,
        prompt_logprobs,
    )


def _logit_bias(asked: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple((int(key), bias) for key, bias in asked.items() if bias)


def _room(asked: int | None, num_prompt: int, info: ModelInfo, tenant: Tenant, param: str) -> int:
    len_max = info.max_model_len
    if num_prompt >= len_max:
        raise ContextTooLong(
            f"This model's maximum context length is {len_max} tokens. However, your {param} resulted in "
            f"{num_prompt} tokens. Please reduce the length of the {param}.",
            param=param,
        )
    if asked is not None and num_prompt + asked > len_max:
        raise ContextTooLong(
            f"This model's maximum context length is {len_max} tokens. However, you requested "
            f"{num_prompt + asked} tokens ({num_prompt} in the {param}, {asked} in the completion). Please "
            f"reduce the length of the {param} or completion.",
            param=param,
        )
    if asked is not None:
        return asked
    room = len_max - num_prompt
    return output_room(tenant, num_prompt, room) if tenant.has_lengths else room

"""The endpoints that generate: `/v1/chat/completions` and `/v1/completions`. `/v1/responses` goes the way of
chats.

Each reads its request, finds the model, makes prompt tokens, checks that they fit, and submits a reply with
one sink per choice to the dispatcher. After that everything is pushed (gateway/dispatch/dispatcher.py, and in
gateway/relay/: reply.py, relay.py, collect.py).
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from penstock.backends.base import GenerateRequest, Sink, TextLogprob
from penstock.clock import NS_PER_S
from penstock.errors import ContextTooLong, Unsupported
from penstock.gateway.api.job import (
    CHAT_ID,
    COMPLETION_ID,
    Hints,
    Job,
    answer_parser,
    body_bytes,
    check_places,
    facts_before,
    facts_of,
    forwards,
    is_prose,
    places,
    read_hints,
    requests_of,
    shaped,
    template_extra,
    uses_tools,
)
from penstock.gateway.api.services import Services
from penstock.gateway.api.shadow import copy_of
from penstock.gateway.http.begun import in_task
from penstock.gateway.http.exchange import Exchange, Served
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.prepare import (
    chat_max_tokens,
    chat_prompt,
    check_sampling,
    completion_max_tokens,
    completion_prompt,
    truncated,
)
from penstock.gateway.models.served import ServedModel
from penstock.gateway.relay.collect import ChatSink, PassedSink, ScoringSink, WholeChat, WholeCompletion
from penstock.gateway.relay.relay import CompletionLogprobsSink, Echo, StreamReply, TextSink, annotated
from penstock.gateway.relay.reply import Context, Reply
from penstock.kv.hashing import PromptKeys
from penstock.policy.flow import SLICE_TOKENS, DowngradeReason
from penstock.policy.request import Request
from penstock.policy.tenant import Tenant
from penstock.protocol.needs import (
    NO_CONSTRAINT,
    check_media,
    common_needs,
    constraint_of,
    rare_needs,
    unsupported,
)
from penstock.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest
from penstock.protocol.openai_validate import is_plain, parse_chat, parse_completion, prompts_of
from penstock.protocol.parameters import Need, RareCompletionRequest
from penstock.protocol.stream import ChatChunks, CompletionChunks, StreamHead
from penstock.rng import IdSource
from penstock.telemetry.catalog import Endpoint

_Begin = Callable[[Context, Job], tuple[Reply, Sequence[Sink]]]
"""Makes the reply of a job, and with it takes its exchange."""
_Prepared = tuple[Job, _Begin]
Prepare = Callable[[ServedModel, str], Awaitable[_Prepared]]
"""Makes a request's prompt for one model, or an adapter of it, and says how its reply is made. Raises what
the client has to change."""
PIECE_TOKENS = math.gcd(32, SLICE_TOKENS)
"""Tokens of a whole answer that are handed on together: detokenizing and counting each costs more than the
rest of a step. Limits and budgets are looked at between slices, so pieces end where those do."""


class Wording(NamedTuple):
    """How the answer to a chat is written: one of the APIs that ask for one."""

    endpoint: Endpoint
    id_prefix: str
    """Of the answer; what follows is as in the request's id."""
    begin: _Begin


class Generate:
    """The endpoints, over the services they share."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/chat/completions`: answers to a conversation, whole or streamed."""
        await self.answer_chat(exchange, caller, exchange.body, CHAT_WORDING)

    async def answer_chat(self, exchange: Exchange, caller: Caller, body: bytes, wording: Wording) -> None:
        """Answer a chat, whose request is `body`, in this wording."""
        request = parse_chat(body, self._services.config.limits)
        needs: list[Need] = []
        constraint, num_bytes = NO_CONSTRAINT, len(body)
        if not is_plain(request):
            needs = rare_needs(request)
            constraint = constraint_of(request) if needs else NO_CONSTRAINT
            # Also where no part needs a capability: a part of text may also hold an address.
            check_media(request.messages, self._services.config.limits.media_hosts)

        has_tools = uses_tools(request)

        async def prepare(model: ServedModel, adapter: str) -> _Prepared:
            info, capabilities = model.info(), _checked(model, request, needs)
            prompt = await chat_prompt(
                self._services.tokenize, model, request, caller.tenant, num_bytes, template_extra(request)
            )
            prompt = truncated(prompt, request, info)
            max_tokens = chat_max_tokens(request, len(prompt), info, caller.tenant)
            check_sampling(request, max_tokens, info)
            job = Job(
                exchange=exchange,
                caller=caller,
                model=model,
                adapter=adapter,
                request=request,
                answer_id=IdSource.renamed(exchange.id, wording.id_prefix),
                prompts=[prompt],
                max_tokens=[max_tokens],
                logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                prompt_logprobs=getattr(request, "prompt_logprobs", None),
                needs=capabilities,
                constraint=shaped(model, request, prompt, max_tokens, constraint),
                body=body,
                uses_tools=has_tools,
            )
            return job, wording.begin

        await self._serve(exchange, body, caller, request, wording.endpoint, prepare, _names(needs))

    async def completions(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/completions`: text that follows prompts, whole or streamed; also their scores."""
        request = parse_completion(exchange.body, self._services.config.limits)
        body, needs = exchange.body, rare_needs(request)
        num_bytes = len(body)
        constraint = constraint_of(request) if needs else NO_CONSTRAINT
        texts, special = prompts_of(request), request.add_special_tokens is not False

        async def prepare(model: ServedModel, adapter: str) -> _Prepared:
            info, capabilities = model.info(), _checked(model, request, needs)
            prompts = whole = await self._services.tokenize.run(
                num_bytes,
                lambda: [completion_prompt(model, text, info, add_special_tokens=special) for text in texts],
            )
            shown = texts
            if isinstance(request, RareCompletionRequest):
                prompts = [truncated(prompt, request, info) for prompt in whole]
                pairs = zip(texts, whole, prompts, strict=True)
                shown = [text if kept == all_ids else list(kept) for text, all_ids, kept in pairs]
            max_tokens = [
                completion_max_tokens(request, len(prompt), info, caller.tenant) for prompt in prompts
            ]
            check_sampling(request, min(max_tokens), info)
            job = Job(
                exchange=exchange,
                caller=caller,
                model=model,
                adapter=adapter,
                request=request,
                answer_id=IdSource.renamed(exchange.id, COMPLETION_ID),
                prompts=prompts,
                max_tokens=max_tokens,
                logprobs=request.logprobs,
                prompt_logprobs=_scored(request),
                needs=capabilities,
                constraint=constraint,
                body=body,
            )
            kind = _completion_stream if request.stream else _completion_whole
            echoes = _echoes(model, request, shown, prompts)
            return job, partial(kind, echoes=echoes)

        await self._serve(exchange, body, caller, request, Endpoint.COMPLETIONS, prepare, _names(needs))

    async def _serve(
        self, exchange: Exchange, body: bytes, caller: Caller, request: GenerationRequest, endpoint: Endpoint,
        prepare: Prepare, needs: frozenset[str],
    ) -> None:  # fmt: skip
        """Submit the request to its model, and to whichever other one it is diverted to: each makes its own
        prompt.
        """
        services, tenant = self._services, caller.tenant
        services.check_draining()
        hints = read_hints(exchange.head.headers, _session_word(request))
        if bound := places(tenant, hints):
            needs |= bound
        model, adapter, choice, assigned = services.models.resolve(request, tenant, needs, hints.session)
        check_places(model, bound)
        name = adapter or model.name
        served = Served(
            model=name,
            requested=exchange.asked or request.model or name,
            counted_model=model.name,
            endpoint=endpoint,
            tenant=tenant,
            assigned=assigned,
        )
        if choice is not None:
            served = msgspec.structs.replace(served, downgrade="complexity", route=choice.explain())
            services.tell_choice(exchange.id, tenant, choice)
        if model.workers.info is None:
            fallback = next(self._ready_fallbacks(model, tenant, hints, request, adapter, needs), None)
            if fallback is not None:
                services.metrics.diverted(model.name, "unavailable")
                model, served = fallback, _instead(served, fallback, adapter, "unavailable")
            await in_task()
            await services.cold.wait(model, exchange, body_bytes(exchange, body), tenant.id)
        too_long: Iterator[ServedModel] | None = None
        first_error: ContextTooLong | None = None
        while exchange.is_open:
            exchange.serve(served)
            if services.dispatcher.is_crowded(model.name):
                known = facts_before(exchange, hints, request, needs, adapter)
                services.dispatcher.check_crowd(exchange, known)
            try:
                job, begin = await prepare(model, adapter)
            except ContextTooLong as error:
                too_long = too_long or self._ready_fallbacks(model, tenant, hints, request, adapter, needs)
                first_error = first_error or error
                if (longer := next(too_long, None)) is None:
                    raise first_error from None
                services.metrics.diverted(model.name, "context")
                model, served = longer, _instead(served, longer, adapter, "context")
                continue
            facts = facts_of(job, served, hints, self._keys(job))
            exchange.limits_ns = services.clock.now_ns()
            if services.ask_store is not None:
                await in_task()
                await services.ask_store(facts)
            services.check_draining()  # It may have begun while the prompt was tokenized.
            reply, sinks = begin(self._context(job), job)
            streams = self._streams(job, hints, sinks)
            fall_back = partial(self._retarget, served, hints, prepare) if services.falls_back else None
            if model.workers.sleeps:
                services.wakes.wanted(model.name)
            diverted = services.dispatcher.submit(facts, reply, streams, fall_back)
            if diverted is None:
                if served.assigned is not None:
                    copy_of(services, job, facts, served, (hints, prepare))
                break
            model = services.models.get(diverted.route)  # One that has the adapter, if one is asked for.
            served = _instead(served, model, adapter, diverted.why)

    def _ready_fallbacks(
        self,
        model: ServedModel,
        tenant: Tenant,
        hints: Hints,
        request: GenerationRequest,
        adapter: str,
        needs: frozenset[str],
    ) -> Iterator[ServedModel]:
        """Models that may answer what does not fit this one, or what it has had no worker for yet, if they
        have workers.
        """
        services = self._services
        for name in services.admission.longer(
            model.name,
            tenant,
            hints.degrade,
            needs_tools=uses_tools(request),
            adapter=adapter,
            needs=needs,
        ):
            if (found := services.models.get(name)).workers.is_ready:
                yield found

    def _streams(self, job: Job, hints: Hints, sinks: Sequence[Sink]) -> list[tuple[GenerateRequest, Sink]]:
        """Every choice's request, and who hears its answer."""
        is_whole = not job.request.stream and len(sinks) == 1 and job.model.reasoning is None
        piece_tokens = PIECE_TOKENS if is_whole else 1
        if job.only_scores:
            sinks = [ScoringSink(sink) for sink in sinks]
        return list(zip(requests_of(job, hints, piece_tokens), sinks, strict=True))

    async def _retarget(
        self,
        served: Served,
        hints: Hints,
        prepare: Prepare,
        request: Request,
        route: str,
        why: DowngradeReason,
    ) -> None:
        """Make the prompt of a request that waits for another model, and let it wait there."""
        services, old = self._services, request.facts
        model = services.models.get(route)
        job, begin = await prepare(model, old.adapter)
        assert job.answer_id == old.id, "it is the same request"
        exchange = job.exchange
        now_served = _instead(served, model, old.adapter, why)
        facts = facts_of(job, now_served, hints, self._keys(job))
        facts = msgspec.structs.replace(facts, num_bytes=old.num_bytes)

        def start() -> tuple[Reply, Sequence[tuple[GenerateRequest, Sink]]]:
            exchange.serve(now_served)
            reply, sinks = begin(self._context(job), job)
            return reply, self._streams(job, hints, sinks)

        services.dispatcher.move(request, facts, start)

    def _keys(self, job: Job) -> PromptKeys | None:
        """The names of the prompt's KV blocks; several prompts have no one place, and one worker no rival."""
        if len(job.prompts) != 1 or not job.model.workers.has_choice:
            return None
        prompt = job.prompts[0]
        return self._services.locality.maker(job.model.name).keys(
            prompt,
            salt=job.caller.cache_salt,
            public_tokens=job.model.public_prefixes.num_tokens_of(prompt),
            adapter=job.adapter,
        )

    def _context(self, job: Job) -> Context:
        """The reply's context."""
        services, options = self._services, job.request.stream_options
        reasons = isinstance(job.request, ChatRequest) and job.model.reasoning is not None
        job.exchange.reasoning_tokens = 0 if reasons else -1
        head = StreamHead(
            id=job.answer_id,
            created=services.clock.wall_ns() // NS_PER_S,
            model=job.exchange.asked or job.adapter or job.model.name,
            fingerprint=job.model.fingerprint(),
            include_usage=bool(options and options.include_usage),
        )
        return Context(
            exchange=job.exchange,
            clock=services.clock,
            listener=services.dispatcher,
            head=head,
            ids=services.ids,
        )


def _instead(served: Served, model: ServedModel, adapter: str, why: DowngradeReason) -> Served:
    """Another model answers than was to."""
    return msgspec.structs.replace(
        served, model=adapter or model.name, counted_model=model.name, downgrade=why
    )


def _names(needs: Sequence[Need]) -> frozenset[str]:
    return frozenset(need.capability for need in needs) if needs else _NOTHING


_NOTHING = frozenset[str]()


def _checked(model: ServedModel, request: GenerationRequest, needs: Sequence[Need]) -> frozenset[str]:
    """The capabilities that a request needs of its worker.

    Raises:
        Unsupported: no worker of the model has them all, or it generates no text.
    """
    if (info := model.workers.info) is not None and info.pooling:
        raise Unsupported(
            f"The model '{model.name}' generates no text: it makes vectors of texts, or scores, for "
            f"/v1/embeddings, /v1/rerank and /v1/score.",
            param="model",
            code="unsupported_by_model",
        )
    if model.workers.lacks_common:
        needs = [*needs, *common_needs(request)]
    wanted = _names(needs)
    if wanted and (lacking := model.workers.lacking(wanted)):
        raise unsupported(needs, lacking, model.name)
    return wanted


def _scored(request: CompletionRequest) -> int | None:
    """Alternatives to ask for beside each token of the prompt; None: it is not scored."""
    shown: int | None = getattr(request, "prompt_logprobs", None)
    echoed = request.logprobs if request.echo else None
    return shown if echoed is None else max(echoed, shown or 0)


def _session_word(request: GenerationRequest) -> object:
    """The part of the body that names the conversation: OpenAI's `prompt_cache_key` is for requests that
    share a beginning.
    """
    key = request.prompt_cache_key if isinstance(request, ChatRequest) else None
    return key or request.user


def _annotated(reply: StreamReply, job: Job, sinks: Sequence[TextSink]) -> Sequence[Sink]:
    options = job.request.stream_options
    counts = options is not None and bool(options.continuous_usage_stats)
    num_prompt = sum(map(len, job.prompts)) if counts else None
    is_chat = isinstance(job.request, ChatRequest)
    return annotated(reply, sinks, num_prompt=num_prompt, prompt_ids=job.shown_prompt_ids, is_chat=is_chat)


def _begin_chat(context: Context, job: Job) -> tuple[Reply, Sequence[Sink]]:
    kind = _chat_stream if job.request.stream else _chat_whole
    return kind(context, job)


CHAT_WORDING = Wording(Endpoint.CHAT, CHAT_ID, _begin_chat)


def _chat_stream(context: Context, job: Job) -> tuple[Reply, Sequence[Sink]]:
    reply = StreamReply(context, ChatChunks.KIND)
    logprobs = job.logprobs is not None
    sinks: list[TextSink] = []
    for i in range(job.num_choices):
        chunks = ChatChunks(context.head, i)
        if logprobs or not is_prose(job):
            sinks.append(ChatSink(reply, chunks, i, logprobs=logprobs, parser=answer_parser(job)))
        elif forwards(job.model):
            sinks.append(PassedSink(reply, chunks, i))
        else:
            sinks.append(TextSink(reply, chunks, i, chunks.role()))
    return reply, _annotated(reply, job, sinks)


def _chat_whole(context: Context, job: Job) -> tuple[Reply, Sequence[Sink]]:
    parsers = [answer_parser(job) for _ in range(job.choices_per_prompt)]  # Of its one prompt.
    reply = WholeChat(
        context,
        parsers=parsers,
        with_logprobs=job.logprobs is not None,
        num_prompt_top=job.prompt_logprobs,
        prompt_ids=job.shown_prompt_ids,
    )
    return reply, reply.sinks


def _completion_stream(context: Context, job: Job, echoes: Sequence[Echo]) -> tuple[Reply, Sequence[Sink]]:
    reply = StreamReply(context, CompletionChunks.KIND)
    sinks: list[TextSink] = []
    for i in range(job.num_choices):
        chunks, echo = CompletionChunks(context.head, i), echoes[i // job.choices_per_prompt]
        if job.logprobs is not None:
            sinks.append(CompletionLogprobsSink(reply, chunks, i, echo))
        else:
            sinks.append(TextSink(reply, chunks, i, chunks.text(echo.text) if echo.text else b""))
    return reply, _annotated(reply, job, sinks)


def _completion_whole(context: Context, job: Job, echoes: Sequence[Echo]) -> tuple[Reply, Sequence[Sink]]:
    by_choice = [echoes[i // job.choices_per_prompt] for i in range(job.num_choices)]
    reply = WholeCompletion(
        context,
        echoes=by_choice,
        with_logprobs=job.logprobs is not None,
        num_prompt_top=job.shown_prompt_logprobs,
        prompt_ids=job.shown_prompt_ids,
    )
    return reply, reply.sinks


def _echoes(
    model: ServedModel,
    request: CompletionRequest,
    texts: Sequence[str | list[int]],
    prompts: Sequence[Sequence[int]],
) -> list[Echo]:
    """The text in front of each prompt's answers; `prompts` are the tokens of `texts`."""
    if not request.echo:
        return [Echo()] * len(texts)
    tokenizer = model.tokenizer
    return [
        Echo(
            text if isinstance(text, str) else tokenizer.decode(text, skip_special_tokens=False),
            TextLogprob(tokenizer.token_text(prompt[0]), tokenizer.token_bytes(prompt[0]), None)
            if request.logprobs is not None
            else None,
            request.logprobs or 0,
        )
        for text, prompt in zip(texts, prompts, strict=True)
    ]

"""The two endpoints that generate: `/v1/chat/completions` and `/v1/completions`.

Each reads its request, finds the model, makes prompt tokens, checks that they fit, and submits a reply with one sink
per choice to the dispatcher. After that everything is pushed (dispatch.py, reply.py, relay.py, collect.py).
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from penstock.backends.base import GenerateRequest, Sink, TextLogprob
from penstock.clock import NS_PER_S
from penstock.errors import ContextTooLong
from penstock.gateway.auth import Caller
from penstock.gateway.collect import WholeChat, WholeCompletion
from penstock.gateway.dispatch import Ticket
from penstock.gateway.exchange import Exchange
from penstock.gateway.hints import Hints, read_hints
from penstock.gateway.logprobs import Echo
from penstock.gateway.models import ServedModel
from penstock.gateway.prepare import (
    chat_max_tokens,
    chat_prompt,
    check_sampling,
    choice_seed,
    completion_max_tokens,
    completion_prompt,
    sampling,
)
from penstock.gateway.relay import ChatSink, CompletionLogprobsSink, StreamReply, TextSink
from penstock.gateway.reply import Context, Reply
from penstock.gateway.served_headers import Served
from penstock.gateway.services import Services
from penstock.gateway.tally import Tally
from penstock.kv.prompt_keys import PromptKeys
from penstock.policy.admit_facts import DowngradeReason
from penstock.policy.flow import Arrival
from penstock.policy.tenant import Tenant
from penstock.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest
from penstock.protocol.openai_validate import parse_chat, parse_completion, prompts_of
from penstock.protocol.stream import ChatChunks, CompletionChunks, StreamHead
from penstock.rng import fresh_seed
from penstock.telemetry.catalog import Endpoint
from penstock.types import RequestId


class _Job(msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def choices_per_prompt(self) -> int:
        return self.request.n or 1

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.choices_per_prompt


_Begin = Callable[[_Job], tuple[Reply, Sequence[Sink]]]
"""Makes the reply of a job, and with it takes its exchange."""
_Prepared = tuple[_Job, _Begin]
Prepare = Callable[[ServedModel, str], Awaitable[_Prepared]]
"""Makes a request's prompt for one model, or an adapter of it, and says how its reply is made. Raises what the client has to change."""
PIECE_TOKENS = 32
"""Tokens of a whole answer that go on together: detokenizing and counting each costs more than the rest of a step."""
TOKEN_BYTES = 8
"""What one prompt token of a waiting request takes: a place in a tuple."""


class Generate:
    """The endpoints, over the services they share."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/chat/completions`."""
        request = parse_chat(exchange.body, self._services.config.limits)
        num_bytes = len(exchange.body)

        async def prepare(model: ServedModel, adapter: str) -> _Prepared:
            info = model.info()
            prompt = await chat_prompt(self._services.tokenize, model, request, caller.tenant, num_bytes)
            max_tokens = chat_max_tokens(request, len(prompt), info, caller.tenant)
            check_sampling(request, max_tokens, info)
            job = _Job(
                exchange=exchange,
                caller=caller,
                model=model,
                adapter=adapter,
                request=request,
                answer_id=self._services.ids.take("chatcmpl"),
                prompts=[prompt],
                max_tokens=[max_tokens],
                logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            )
            kind = _chat_stream if request.stream else _chat_whole
            return job, lambda job: kind(self._context(job), job)

        await self._serve(exchange, caller, request, Endpoint.CHAT, prepare)

    async def completions(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/completions`."""
        limits = self._services.config.limits
        request = parse_completion(exchange.body, limits)
        num_bytes = len(exchange.body)
        texts, special = prompts_of(request, limits), request.add_special_tokens is not False

        async def prepare(model: ServedModel, adapter: str) -> _Prepared:
            info = model.info()
            prompts = await self._services.tokenize.run(
                num_bytes,
                lambda: [completion_prompt(model, text, info, add_special_tokens=special) for text in texts],
            )
            max_tokens = [
                completion_max_tokens(request, len(prompt), info, caller.tenant) for prompt in prompts
            ]
            check_sampling(request, min(max_tokens), info)
            job = _Job(
                exchange=exchange,
                caller=caller,
                model=model,
                adapter=adapter,
                request=request,
                answer_id=self._services.ids.take("cmpl"),
                prompts=prompts,
                max_tokens=max_tokens,
                logprobs=request.logprobs,
                prompt_logprobs=request.logprobs if request.echo else None,
            )
            kind = _completion_stream if request.stream else _completion_whole
            echoes = _echoes(model, request, texts, prompts)
            return job, lambda job: kind(self._context(job), job, echoes)

        await self._serve(exchange, caller, request, Endpoint.COMPLETIONS, prepare)

    async def _serve(
        self,
        exchange: Exchange,
        caller: Caller,
        request: GenerationRequest,
        endpoint: Endpoint,
        prepare: Prepare,
    ) -> None:
        """Submit the request to its model, and to whichever other one it is diverted to: each makes its own prompt."""
        services, tenant = self._services, caller.tenant
        services.check_draining()
        hints = read_hints(
            exchange.head.headers, request.user, services.config.admission, services.config.limits
        )
        model, adapter, choice = services.models.resolve(request, tenant)
        name = adapter or model.name
        served = Served(model=name, requested=request.model or name)
        if choice is not None:
            served.downgrade, served.route = "complexity", choice.explain()
            services.tell_choice(exchange.id, tenant, choice)
        too_long: Iterator[ServedModel] | None = None
        while True:
            exchange.served = served
            exchange.tally = Tally(model=model.name, endpoint=endpoint, started_ns=exchange.started_ns)
            try:
                job, begin = await prepare(model, adapter)
            except ContextTooLong as error:
                too_long = too_long or self._longer(error, model, tenant, hints, request, adapter)
                longer = next(too_long)
                services.metrics.diverted(model.name, "context")
                model, served = longer, replace(served, model=adapter or longer.name, downgrade="context")
                continue
            services.check_draining()  # It may have begun while the prompt was tokenized.
            arrival = _arrival(job, served, hints, endpoint, self._keys(job))
            if choice is not None:
                services.explained.chose(arrival.id, choice)
            reply, sinks = begin(job)
            streams = self._streams(job, sinks)
            ticket = Ticket(arrival=arrival, model=model, reply=reply, streams=streams)
            if services.falls_back:
                ticket.again = partial(self._again, ticket, served, hints, prepare)
            diverted = services.dispatcher.submit(ticket)
            if diverted is None:
                return
            model = services.models.get(diverted.route)  # One that has the adapter, if one is asked for.
            served = replace(served, model=adapter or model.name, downgrade=diverted.why)

    def _longer(
        self,
        error: ContextTooLong,
        model: ServedModel,
        tenant: Tenant,
        hints: Hints,
        request: GenerationRequest,
        adapter: str,
    ) -> Iterator[ServedModel]:
        """Models that may answer what does not fit this one, if they have workers. After the last of them it is an error after all: the first."""
        services = self._services
        for name in services.gate.longer(
            model.name, tenant, hints.degrade, needs_tools=_uses_tools(request), adapter=adapter
        ):
            if (longer := services.models.get(name)).workers.is_ready:
                yield longer
        raise error

    def _streams(self, job: _Job, sinks: Sequence[Sink]) -> list[tuple[GenerateRequest, Sink]]:
        """Every choice's request, and who hears its answer."""
        piece_tokens, config = 1, self._services.config
        if not job.request.stream and job.num_choices == 1:
            # Limits and budgets are looked at between slices, so pieces end where those do.
            piece_tokens = math.gcd(
                PIECE_TOKENS, config.rate_limits.slice_tokens, config.budgets.slice_tokens
            )
        return list(zip(_requests(job, piece_tokens), sinks, strict=True))

    async def _again(
        self, ticket: Ticket, served: Served, hints: Hints, prepare: Prepare, route: str, why: DowngradeReason
    ) -> None:
        """Make the prompt of a request that waits anew for another model, and let it wait there."""
        services, old = self._services, ticket.arrival
        model = services.models.get(route)
        job, begin = await prepare(model, old.adapter)
        job = msgspec.structs.replace(job, answer_id=str(old.id))
        exchange = job.exchange
        now_served = replace(served, model=old.adapter or model.name, downgrade=why)
        arrival = _arrival(job, now_served, hints, Endpoint(old.endpoint), self._keys(job))
        arrival = msgspec.structs.replace(arrival, num_bytes=old.num_bytes)

        def start() -> tuple[Reply, Sequence[tuple[GenerateRequest, Sink]]]:
            exchange.served = now_served
            exchange.tally = Tally(
                model=model.name, endpoint=Endpoint(old.endpoint), started_ns=exchange.started_ns
            )
            reply, sinks = begin(job)
            return reply, self._streams(job, sinks)

        services.dispatcher.move(ticket, arrival, model, start)

    def _keys(self, job: _Job) -> PromptKeys | None:
        """What the prompt's KV blocks are called; several prompts have no one place."""
        if len(job.prompts) != 1:
            return None
        prompt = job.prompts[0]
        return self._services.locality.maker(job.model.name).keys(
            prompt,
            salt=job.caller.cache_salt,
            public_tokens=job.model.public_prefixes.num_tokens_of(prompt),
            adapter=job.adapter,
        )

    def _context(self, job: _Job) -> Context:
        """What the reply is given."""
        services, tally, options = self._services, job.exchange.tally, job.request.stream_options
        assert tally is not None
        tally.num_choices, tally.choices_per_prompt = job.num_choices, job.choices_per_prompt
        head = StreamHead(
            id=job.answer_id,
            created=services.clock.wall_ns() // NS_PER_S,
            model=job.adapter or job.model.name,
            fingerprint=job.model.fingerprint(),
            include_usage=bool(options and options.include_usage),
        )
        return Context(
            exchange=job.exchange,
            tally=tally,
            clock=services.clock,
            owner=services.dispatcher,
            head=head,
            ids=services.ids,
        )


def _arrival(job: _Job, served: Served, hints: Hints, endpoint: Endpoint, keys: PromptKeys | None) -> Arrival:
    """The request as flow control sees it."""
    lengths, user = [len(prompt) for prompt in job.prompts], job.request.user
    return Arrival(
        id=RequestId(job.answer_id),
        tenant=job.caller.tenant,
        route=job.model.name,
        requested_model=served.requested,
        diverted=served.downgrade or "",
        prompt_tokens=sum(lengths),
        prompts=job.prompts,
        context_tokens=max(lengths) + _asked_tokens(job.request),
        max_tokens=max(job.max_tokens),
        choices=job.num_choices,
        num_bytes=len(job.exchange.body) + TOKEN_BYTES * sum(lengths),
        first_token_ns=hints.max_wait_ns,
        degrade=hints.degrade,
        needs_tools=_uses_tools(job.request),
        endpoint=endpoint.value,
        key_prefix=job.caller.key_prefix,
        user=user if isinstance(user, str) else "",
        keys=keys,
        adapter=job.adapter,
        session=_session(job.caller.tenant, hints),
    )


def _session(tenant: Tenant, hints: Hints) -> str:
    """The conversation that a request says it belongs to, as no other tenant can name it; empty if it says nothing."""
    return f"{tenant.id}\0{hints.session}" if hints.session else ""


def _requests(job: _Job, piece_tokens: int) -> list[GenerateRequest]:
    """One stream for each choice of each prompt, in the order of their indexes."""
    request, stop, found = job.request, _stops(job.request), list[GenerateRequest]()
    for prompt, max_tokens in zip(job.prompts, job.max_tokens, strict=True):
        seed = fresh_seed() if request.seed is None else request.seed
        public_tokens = job.model.public_prefixes.num_tokens_of(prompt)
        for choice in range(job.choices_per_prompt):
            found.append(
                GenerateRequest(
                    request_id=RequestId(f"{job.answer_id}-{len(found)}"),
                    prompt_token_ids=prompt,
                    sampling=sampling(
                        job.model,
                        request,
                        max_tokens=max_tokens,
                        logprobs=job.logprobs,
                        prompt_logprobs=job.prompt_logprobs,
                        seed=choice_seed(seed, choice),
                    ),
                    stop=stop,
                    include_stop=bool(request.include_stop_str_in_output),
                    # The tags around a tool call are special tokens in some vocabularies.
                    skip_special_tokens=request.skip_special_tokens is not False and not _uses_tools(request),
                    adapter=job.adapter,
                    cache_salt=job.caller.cache_salt,
                    public_tokens=public_tokens,
                    fairness_key=job.caller.fairness_key,
                    fairness_weight=job.caller.tenant.weight,
                    piece_tokens=piece_tokens,
                    chat=request if isinstance(request, ChatRequest) else None,
                )
            )
    return found


def _asked_tokens(request: GenerationRequest) -> int:
    """How long an answer may get at most, if the client says so; what it leaves open fits any context."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens or 1


def _stops(request: GenerationRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _uses_tools(request: GenerationRequest) -> bool:
    return isinstance(request, ChatRequest) and bool(request.tools) and request.tool_choice != "none"


def _chat_stream(context: Context, job: _Job) -> tuple[Reply, Sequence[Sink]]:
    reply = StreamReply(context, ChatChunks.KIND)
    tools, logprobs = _uses_tools(job.request), job.logprobs is not None
    sinks: list[Sink] = []
    for i in range(job.num_choices):
        chunks = ChatChunks(context.head, i)
        if tools or logprobs:
            parser = job.model.tool_parser() if tools else None
            sinks.append(ChatSink(reply, chunks, i, logprobs=logprobs, parser=parser))
        else:
            sinks.append(TextSink(reply, chunks, i, chunks.role()))
    return reply, sinks


def _chat_whole(context: Context, job: _Job) -> tuple[Reply, Sequence[Sink]]:
    tools = _uses_tools(job.request)
    parsers = [job.model.tool_parser() if tools else None for _ in range(job.num_choices)]
    reply = WholeChat(context, parsers=parsers, with_logprobs=job.logprobs is not None)
    return reply, reply.sinks


def _completion_stream(context: Context, job: _Job, echoes: Sequence[Echo]) -> tuple[Reply, Sequence[Sink]]:
    reply = StreamReply(context, CompletionChunks.KIND)
    sinks: list[Sink] = []
    for i in range(job.num_choices):
        chunks, echo = CompletionChunks(context.head, i), echoes[i // job.choices_per_prompt]
        if job.logprobs is not None:
            sinks.append(CompletionLogprobsSink(reply, chunks, i, echo))
        else:
            sinks.append(TextSink(reply, chunks, i, chunks.text(echo.text) if echo.text else b""))
    return reply, sinks


def _completion_whole(context: Context, job: _Job, echoes: Sequence[Echo]) -> tuple[Reply, Sequence[Sink]]:
    by_choice = [echoes[i // job.choices_per_prompt] for i in range(job.num_choices)]
    reply = WholeCompletion(context, echoes=by_choice, with_logprobs=job.logprobs is not None)
    return reply, reply.sinks


def _echoes(
    model: ServedModel,
    request: CompletionRequest,
    texts: Sequence[str | list[int]],
    prompts: Sequence[Sequence[int]],
) -> list[Echo]:
    """What goes in front of each prompt's answers; `prompts` are the tokens of `texts`."""
    if not request.echo:
        return [Echo()] * len(texts)
    tokenizer = model.tokenizer
    return [
        Echo(
            text if isinstance(text, str) else tokenizer.decode(text, skip_special_tokens=False),
            TextLogprob(tokenizer.token_text(prompt[0]), tokenizer.token_bytes(prompt[0]), None)
            if request.logprobs is not None
            else None,
        )
        for text, prompt in zip(texts, prompts, strict=True)
    ]

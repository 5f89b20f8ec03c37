"""A request that has been checked against its model: what flow control and its worker are given of it."""

from collections.abc import Sequence

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.gateway.api.hints import Hints
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.served_headers import Served
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.prepare import choice_seed, sampling
from penstock.gateway.models.served import ServedModel
from penstock.kv.index.prompt_keys import PromptKeys
from penstock.policy.flow import RequestFacts
from penstock.policy.tenant import Tenant
from penstock.protocol.needs import NO_CONSTRAINT, Constraint
from penstock.protocol.openai import ChatRequest, GenerationRequest
from penstock.rng import fresh_seed
from penstock.telemetry.catalog import Endpoint
from penstock.types import RequestId

TOKEN_BYTES = 8
"""What one prompt token of a waiting request takes: a place in a tuple."""


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
    """The request as it came."""

    @property
    def choices_per_prompt(self) -> int:
        """`n`."""
        return self.request.n or 1

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return len(self.prompts) * self.choices_per_prompt


def facts_of(
    job: Job, served: Served, hints: Hints, endpoint: Endpoint, keys: PromptKeys | None
) -> RequestFacts:
    """The request as flow control sees it."""
    lengths, user = [len(prompt) for prompt in job.prompts], job.request.user
    return RequestFacts(
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
        needs_tools=uses_tools(job.request),
        needs=job.needs,
        endpoint=endpoint.value,
        key_prefix=job.caller.key_prefix,
        user=user if isinstance(user, str) else "",
        keys=keys,
        adapter=job.adapter,
        session=_session(job.caller.tenant, hints),
    )


def _session(tenant: Tenant, hints: Hints) -> str:
    """The conversation that a request says it belongs to, as no other tenant can name it; empty if it says
    nothing.
    """
    return f"{tenant.id}\0{hints.session}" if hints.session else ""


def requests_of(job: Job, piece_tokens: int) -> list[GenerateRequest]:
    """One stream for each choice of each prompt, in the order of their indexes."""
    request, stop, found = job.request, _stops(job), list[GenerateRequest]()
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
                    skip_special_tokens=request.skip_special_tokens is not False and not uses_tools(request),
                    adapter=job.adapter,
                    cache_salt=job.caller.cache_salt,
                    public_tokens=public_tokens,
                    fairness_key=job.caller.fairness_key,
                    fairness_weight=job.caller.tenant.weight,
                    piece_tokens=piece_tokens,
                    body=job.body,
                    is_chat=isinstance(request, ChatRequest),
                    constraint=job.constraint,
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
    if isinstance(request, ChatRequest) and request.parallel_tool_calls is False and uses_tools(request):
        # The answer ends with its first call. What ends a call is no part of it.
        close = job.model.tool_parser().CLOSE
        return (*asked, close) if close and job.constraint.forced_tool is None else asked
    return asked


def uses_tools(request: GenerationRequest) -> bool:
    """Whether its answer may call a tool."""
    return isinstance(request, ChatRequest) and bool(request.tools) and request.tool_choice != "none"

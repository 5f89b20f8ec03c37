"""Structs that are made for every request are made in the order of their fields: each value is found under
its own name.
"""

from collections.abc import Mapping
from types import SimpleNamespace

import msgspec
import pytest
from byte_tokenizer import byte_tokenizer

from penstock.gateway.api.job import Hints, Job, facts_of, requests_of
from penstock.gateway.http.exchange import Exchange, Served
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.prepare import sampling
from penstock.gateway.models.served import filled
from penstock.policy.tenant import Tenant
from penstock.protocol.needs import Constraint
from penstock.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest
from penstock.protocol.parameters import RareCompletionRequest
from penstock.rng import choice_seed
from penstock.telemetry.catalog import OutcomeLabel
from penstock.text.tokenizer import GenerationDefaults
from penstock.types import TenantId, Usage, places_of

PLACES = places_of(["eu"])
TENANT = Tenant(
    id=TenantId("acme"), tier="gold", weight=2.5, band="high", places=PLACES, cache_salt=b"salt",
    fairness_key="f-1",
)  # fmt: skip
SERVED = Served(
    model="large", requested="asked", counted_model="large", endpoint="completions", tenant=TENANT,
    downgrade="slo",
)  # fmt: skip
MODEL = SimpleNamespace(
    name="large",
    tokenizer=byte_tokenizer(),
    defaults=filled(GenerationDefaults()),
    has_special_marks=False,
    public_prefixes=SimpleNamespace(num_tokens_of=lambda prompt: 2),
    workers=SimpleNamespace(adapter_digests={"tone": "d-1"}),
)
BODY = b"x" * 100


def job(request: GenerationRequest, **more: object) -> Job:
    fields = {
        "exchange": SimpleNamespace(body=BODY), "caller": Caller(tenant=TENANT, key_prefix="sk-1"),
        "model": MODEL, "adapter": "tone", "request": request, "answer_id": "cmpl-1",
        "prompts": [(1, 2, 3), (4, 5, 6, 7)], "max_tokens": [40, 41], "logprobs": 23, "prompt_logprobs": 24,
        "needs": frozenset({"logprobs"}),
        "constraint": Constraint(param="tools"), "body": BODY,
    }  # fmt: skip
    return Job(**fields | more)


def check(made: msgspec.Struct, expected: Mapping[str, object]) -> None:
    """All that was given by position, named."""
    assert tuple(expected) == made.__struct_fields__[: len(expected)]
    assert {name: getattr(made, name) for name in expected} == expected


def all_differ(expected: Mapping[str, object]) -> bool:
    return len(set(map(repr, expected.values()))) == len(expected)


def test_the_facts_of_a_request() -> None:
    request = RareCompletionRequest(
        model="m", prompt="x", n=3, stream=True, user="ann", max_tokens=50, priority=11
    )
    made, keys = job(request, uses_tools=True), object()
    hints = Hints(degrade="prefer", max_wait_ns=13, session="chat-1")
    expected = {
        "id": "cmpl-1",
        "route": "large",
        "prompt_tokens": 7,
        "max_tokens": 41,
        "tenant": TENANT,
        "requested_model": "asked",
        "diverted": "slo",
        "choices": 6,
        "choices_per_prompt": 3,
        "num_bytes": 100 + 7 * 8,
        "priority": 11,
        "first_token_ns": 13,
        "degrade": "prefer",
        "needs_tools": True,
        "needs": PLACES | {"logprobs"},
        "context_tokens": 4 + 50,
        "is_whole": False,
        "endpoint": "completions",
        "adapter": "tone",
        "session": "acme\0chat-1",
        "prompts": made.prompts,
        "keys": keys,
        "key_prefix": "sk-1",
        "user": "ann",
    }
    check(facts_of(made, SERVED, hints, keys), expected)
    assert all_differ(expected)


def test_the_measurement_of_a_request() -> None:
    first = Usage(completion_tokens=8, queue_ns=20)
    request = SimpleNamespace(used_by_choice={0: first}, longest_answer=8, queue_ns=10, worker="w-1")
    exchange = SimpleNamespace(
        request=request,
        used=lambda: Usage(prompt_tokens=12, cached_tokens=5, completion_tokens=9),
        outcome=OutcomeLabel.STOP,
        started_ns=100,
        first_ns=250,
        ended_ns=950,
    )
    expected = {
        "endpoint": "completions",
        "outcome": OutcomeLabel.STOP,
        "duration_ns": 900,
        "queue_ns": 30,
        "ttft_ns": 150,
        "tpot_ns": 100,
        "prompt_tokens": 12,
        "cached_tokens": 5,
        "generated_tokens": 9,
        "tenant": "acme",
        "tier": "gold",
        "band": "high",
        "worker": "w-1",
    }
    check(Exchange.measured(exchange, SERVED, 1000), expected)
    assert all_differ(expected)


def test_the_sampling_of_a_request() -> None:
    expected = {
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.6,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.4,
        "logit_bias": ((7, 1.5),),
        "bad_words": ((97, 98),),
        "allowed_token_ids": (8, 9),
        "min_tokens": 2,
        "seed": 21,
        "max_tokens": 22,
        "stop_token_ids": (256, 10),
        "logprobs": 23,
        "prompt_logprobs": 24,
    }
    same = (
        "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "allowed_token_ids", "min_tokens",
    )  # fmt: skip
    asked = {name: expected[name] for name in same}
    request = RareCompletionRequest(
        model="m", prompt="x", logit_bias={"7": 1.5}, bad_words=["ab"], stop_token_ids=[10], **asked
    )
    check(sampling(MODEL, request, max_tokens=22, logprobs=23, prompt_logprobs=24, seed=21), expected)
    assert all_differ(expected)


@pytest.mark.parametrize("said", ["include_stop", "skip_special_tokens", "is_chat", "exact_migration"])
def test_a_workers_request(said: str) -> None:
    """Of what is said or not, each by itself."""
    asked = {
        "model": "m",
        "seed": 5,
        "stop": "END",
        "include_stop_str_in_output": said == "include_stop",
        "skip_special_tokens": said == "skip_special_tokens",
    }
    if said == "is_chat":
        request = ChatRequest(messages=[], **asked)
    else:
        request = CompletionRequest(prompt="x", **asked)
    made = job(request, prompts=[(1, 2, 3)], max_tokens=[40])
    expected = {
        "request_id": "cmpl-1-0",
        "prompt_token_ids": (1, 2, 3),
        "sampling": sampling(
            MODEL, request, max_tokens=40, logprobs=23, prompt_logprobs=24, seed=choice_seed(5, 0)
        ),
        "stop": ("END",),
        "include_stop": said == "include_stop",
        "skip_special_tokens": said == "skip_special_tokens",
        "adapter": "tone",
        "adapter_digest": "d-1",
        "cache_salt": b"salt",
        "public_tokens": 2,
        "fairness_key": "f-1",
        "fairness_weight": 2.5,
        "piece_tokens": 32,
        "body": BODY,
        "is_chat": said == "is_chat",
        "constraint": made.constraint,
        "exact_migration": said == "exact_migration",
    }
    [found] = requests_of(made, Hints(exact_migration=said == "exact_migration"), 32)
    check(found, expected)
    assert all_differ({name: value for name, value in expected.items() if not isinstance(value, bool)})

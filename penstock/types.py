"""Words that every floor shares: ids, sampling parameters, usage and why a request ended."""

import enum
import re
from collections.abc import Iterable
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
WorkerId = NewType("WorkerId", str)
ModelName = NewType("ModelName", str)

BLOCK_TOKENS = 16
"""Tokens in one KV block: the unit of hashing, caching, routing and cost."""
TOKEN_WEIGHT = 4096
"""One computed token weighs as much as attending to so many, where time is shared by work. A layer's 12 d^2
weights take as many operations as attention to 6 d tokens (24 d^2 and 4 d each), so this is right for d =
683."""


class FinishReason(enum.StrEnum):
    """Why generation ended. The first four are ordinary endings."""

    STOP = "stop"  # EOS, a stop token or a stop string.
    LENGTH = "length"  # max_tokens or the model's context is used up.
    TOOL_CALLS = "tool_calls"  # The answer is a tool call (set by the gateway's parser).
    CONTENT_FILTER = "content_filter"  # A provider withheld the rest of its answer.
    BUDGET = "budget"  # The tenant's budget is used up: the gateway stopped a running answer.
    ABORT = "abort"  # The client left, or an operator cancelled it.
    ERROR = "error"  # Something broke; the finish carries the error.


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn, and when to stop. Ranges are checked where requests are parsed.

    Stop *strings* are not here: the code that turns tokens into text watches for those. Not by keyword alone:
    one is made for every request, in this order.
    """

    temperature: float = 1.0
    """0 is greedy. Otherwise logits are divided by it."""
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was generated already."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as it was generated already."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or the answer are divided by it, negative ones multiplied.
    Above 0."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit); every id at most once."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the answer does not have: the last token of one is not drawn behind the others."""
    allowed_token_ids: tuple[int, ...] = ()
    """No other token is drawn; empty: any may be."""
    min_tokens: int = 0
    """No token of `stop_token_ids` is drawn before this many others."""
    seed: int = 0
    """Key of the counter-based randomness: (seed, position, token) fixes every draw."""
    max_tokens: int = 16
    """Tokens to generate at most; at least 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer (the model's EOS ids included, unless the client ignores them)."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many alternatives; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first, which nothing precedes."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log, of the unscaled distribution) of one token, given those before it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest alternatives as (token id, logprob), best first."""
    rank: int = 0
    """1 for the likeliest token of the vocabulary; 0: the worker does not tell."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A request's usage, counted by the worker that generated the tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    host_cached_tokens: int = 0
    """Of those, what had to be brought back from host memory."""
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    steps: int = 0
    """Engine steps that computed something of the request."""
    computed_tokens: int = 0
    """Tokens run through the model: cached ones are not, and after a preemption some are twice."""
    preemptions: int = 0
    """How often it was taken out of the batch, for memory, for another tenant or for a client that did not
    read."""
    kv_block_ns: int = 0
    """KV blocks held, integrated over time; / 1e9 makes block-seconds."""
    device_ns: int = 0
    """Its share of the time in which the engine had work: these shares of all requests come to no more than
    that time. 0 of engines that do not tell."""
    accepted_drafts: int = 0
    """Of the answer's tokens, those that speculation had guessed."""
    rejected_drafts: int = 0
    """Guesses that were computed and dropped: no part of any other count of tokens."""


class Capability(enum.StrEnum):
    """A capability of a worker beyond plain text.

    The values are wire format and words of the configuration.

    Our own worker announces what it can (`ModelInfo`); of a worker of another engine its dialect knows, less
    what the configuration says that it lacks (`models[].workers[].lacks`). A request goes only to workers
    that have all that it needs.
    """

    LOGPROBS = "logprobs"
    ECHO_LOGPROBS = "echo_logprobs"
    """Log-probabilities of a plain prompt's own tokens."""
    LOGIT_BIAS = "logit_bias"
    MIN_P = "min_p"
    PRESENCE_PENALTY = "presence_penalty"
    MIN_TOKENS = "min_tokens"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    STRUCTURED_OUTPUTS = "structured_outputs"
    """vLLM's: a regular expression or a choice as well as a JSON schema."""
    GRAMMARS = "grammars"
    """A grammar as well."""
    FORCED_TOOLS = "forced_tools"
    STRICT_TOOLS = "strict_tools"
    """Arguments of tools that the model chooses by itself obey their schema."""
    IMAGES = "images"
    AUDIO = "audio"
    """As input."""
    VIDEOS = "videos"
    FILES = "files"
    BAD_WORDS = "bad_words"
    ALLOWED_TOKEN_IDS = "allowed_token_ids"
    TOKEN_IDS = "token_ids"
    """It tells the ids of the tokens that it answers with."""
    REASONING_BUDGET = "reasoning_budget"
    """A reasoning that takes too long is closed."""
    EMBEDDINGS = "embeddings"
    """Vectors of texts; text it has none."""
    SCORES = "scores"
    """How well two texts go together."""
    PASS_THROUGH = "pass_through"
    """It gets the body as the client sent it, and makes of each parameter what it likes."""


COMMON_CAPABILITIES = frozenset({
    Capability.LOGPROBS, Capability.ECHO_LOGPROBS, Capability.LOGIT_BIAS, Capability.MIN_P,
    Capability.PRESENCE_PENALTY, Capability.MIN_TOKENS,
})  # fmt: skip
"""The capabilities of a usual engine. Whether a request needs one of these is looked at only where a worker
lacks one."""
OWN_CAPABILITIES = COMMON_CAPABILITIES | {Capability.TOKEN_IDS}
"""Our engine's capabilities everywhere."""
CPU_CAPABILITIES = OWN_CAPABILITIES | {Capability.BAD_WORDS, Capability.ALLOWED_TOKEN_IDS}
"""Our engine's capabilities on a CPU without grammars."""
GRAMMAR_CAPABILITIES = frozenset({
    Capability.JSON_OBJECT, Capability.JSON_SCHEMA, Capability.STRUCTURED_OUTPUTS, Capability.GRAMMARS,
    Capability.FORCED_TOOLS, Capability.STRICT_TOOLS, Capability.REASONING_BUDGET,
})  # fmt: skip
"""The capabilities of an engine whose answers can follow a grammar."""
ENGINE_CAPABILITIES = CPU_CAPABILITIES | GRAMMAR_CAPABILITIES
"""Our engine's capabilities on a CPU."""
VECTOR_CAPABILITIES = frozenset({Capability.EMBEDDINGS, Capability.SCORES})
"""Our engine's capabilities with a model that makes vectors."""
ALL_CAPABILITIES = frozenset(Capability)

PLACE = "in:"
"""How the capability begins that says where a worker is: "in:eu" has who runs in a cell with the label eu
(docs/cells.md). A request that is bound to a place needs it, like any other capability."""


def places_of(labels: Iterable[str]) -> frozenset[str]:
    """Labels of cells, as capabilities."""
    return frozenset(f"{PLACE}{label}" for label in labels)


PLATFORM = "platform"
"""The tenant of requests that no tenant has sent: probes. As a tenant of theirs is called
(`Submit.fairness_key`)."""
VERSIONED = re.compile(r"(?P<name>.+)@(?P<version>[1-9][0-9]{0,9})")
"""A model's name with its version."""


def without_version(model: str) -> str:
    """The name that all versions of a model have; of one without versions its own."""
    found = VERSIONED.fullmatch(model)
    return found["name"] if found is not None else model

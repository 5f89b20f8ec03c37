"""The endpoints that answer with numbers: `/v1/embeddings`, `/v1/rerank` and `/v1/score`.

Each reads its request, finds the model, makes tokens of all texts, and submits them to the dispatcher as
one stream, whose worker computes them in its own batches. A cross-encoder reads two texts together and has a
score for them; of every other model the score is the cosine between the two vectors.
"""

from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.clock import NS_PER_S
from penstock.errors import ContextTooLong, InvalidRequest, Unsupported, WorkerUnavailable
from penstock.gateway.api.job import (
    EMBEDDINGS_ID,
    RERANK_ID,
    SCORE_ID,
    TOKEN_BYTES,
    check_places,
    places,
    read_hints,
)
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Exchange, Served
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.prepare import check_token_ids
from penstock.gateway.models.served import ServedModel
from penstock.gateway.relay.reply import Context
from penstock.gateway.relay.vectors import VectorReply, Vectors, Wording, embeddings, reranked, scored
from penstock.policy.flow import RequestFacts
from penstock.policy.tenant import check_model, check_tokens
from penstock.protocol.stream import StreamHead
from penstock.protocol.vectors import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    VectorUsage,
    cosine,
    numbers,
    parse_embeddings,
    parse_rerank,
    parse_score,
    text_tokens_max,
)
from penstock.protocol.worker import ModelInfo
from penstock.protocol.worker_parts import BATCH_TEXTS_MAX, INPUTS_TOKENS_MAX
from penstock.rng import IdSource
from penstock.telemetry.catalog import Endpoint
from penstock.telemetry.ledger import USER_CHARS_MAX
from penstock.text.texts import TextTokens, pair_tokens, text_tokens
from penstock.types import Capability, RequestId, SamplingParams

Request = EmbeddingRequest | RerankRequest | ScoreRequest
_SCORES = "scores"
"""`ModelInfo.pooling` of a cross-encoder."""
_NOTHING_DRAWN = SamplingParams(max_tokens=1)


class _Kind(NamedTuple):
    """One of the endpoints."""

    endpoint: Endpoint
    id_prefix: str
    capability: Capability


_EMBEDDINGS = _Kind(Endpoint.EMBEDDINGS, EMBEDDINGS_ID, Capability.EMBEDDINGS)
_RERANK = _Kind(Endpoint.RERANK, RERANK_ID, Capability.SCORES)
_SCORE = _Kind(Endpoint.SCORE, SCORE_ID, Capability.SCORES)


class _Texts(NamedTuple):
    """The texts to compute, and how the answer is made of them."""

    tokens: Sequence[TextTokens]
    wording: Wording


_ScoreWording = Callable[[Context, Sequence[float], VectorUsage], msgspec.Struct]
_Prepare = Callable[[ServedModel, ModelInfo], _Texts]


class VectorEndpoints:
    """The endpoints, over the services they share."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def embeddings(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/embeddings`: a vector of each text."""
        request, inputs = parse_embeddings(exchange.body)

        def prepare(model: ServedModel, info: ModelInfo) -> _Texts:
            size = _size(request, model, info)
            wording = partial(embeddings, size=size, base64=request.encoding_format == "base64")
            return _Texts(_input_tokens(model, info, request, inputs), wording)

        await self._serve(exchange, caller, request, _EMBEDDINGS, prepare)

    async def rerank(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/rerank`: documents in the order of how well they answer a query, as at Jina."""
        request, documents = parse_rerank(exchange.body)
        shown = None if request.return_documents is False else documents

        def wording(context: Context, scores: Sequence[float], usage: VectorUsage) -> msgspec.Struct:
            return reranked(context, scores, usage, documents=shown, top_n=request.top_n or 0)

        pairs = [(request.query, document) for document in documents]
        prepare = _scores_of(request, pairs, wording)
        await self._serve(exchange, caller, request, _RERANK, prepare, num_chars=_num_chars(pairs))

    async def score(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/score`: how well texts go together, pair by pair, as in vLLM."""
        request, pairs = parse_score(exchange.body)
        prepare = _scores_of(request, pairs, scored)
        await self._serve(exchange, caller, request, _SCORE, prepare, num_chars=_num_chars(pairs))

    async def _serve(
        self,
        exchange: Exchange,
        caller: Caller,
        request: Request,
        kind: _Kind,
        prepare: _Prepare,
        *,
        num_chars: int = 0,
    ) -> None:
        """Submit the request to its model. No other one can answer for it: its vectors would mean nothing.
        `num_chars`: of all pairs, which may be far more than the body has.
        """
        services, tenant = self._services, caller.tenant
        services.check_draining()
        hints = read_hints(exchange.head.headers, request.user)
        model = services.models.get(request.model, tenant)
        check_model(tenant, model.name)
        exchange.serve(
            Served(
                model=model.name,
                requested=request.model,
                counted_model=model.name,
                endpoint=kind.endpoint,
                tenant=tenant,
            )
        )
        num_bytes = len(exchange.body)
        await services.cold.wait(model, exchange, num_bytes, tenant.id)
        info = model.info()
        _check_able(model, kind)
        check_places(model, bound := places(tenant, hints))
        answer_id = IdSource.renamed(exchange.id, kind.id_prefix)
        known = RequestFacts(
            id=RequestId(answer_id),
            tenant=tenant,
            route=model.name,
            requested_model=request.model,
            prompt_tokens=0,
            max_tokens=1,
            priority=request.priority or 0,
            first_token_ns=hints.max_wait_ns,
            degrade="never",
            needs=frozenset({kind.capability}) | bound,
            endpoint=kind.endpoint.value,
            key_prefix=caller.key_prefix,
            user=request.user[:USER_CHARS_MAX] if isinstance(request.user, str) else "",
        )
        services.dispatcher.check_crowd(exchange, known)
        texts = await services.tokenize.run(max(num_bytes, num_chars), lambda: prepare(model, info))
        check_tokens(tenant, max(len(each.ids) for each in texts.tokens), None, param="input")
        reply = VectorReply(self._context(exchange, model, answer_id), len(texts.tokens), texts.wording)
        lengths = [len(each.ids) for each in texts.tokens]
        facts = msgspec.structs.replace(
            known,
            prompt_tokens=sum(lengths),
            held_tokens=sum(sorted(lengths)[-BATCH_TEXTS_MAX:]),
            prompts=[each.ids for each in texts.tokens],
            context_tokens=max(lengths),
            num_bytes=num_bytes + TOKEN_BYTES * sum(lengths),
        )
        exchange.limits_ns = services.clock.now_ns()
        if services.ask_store is not None:
            await services.ask_store(facts)
        services.check_draining()  # It may have begun while the texts were tokenized.
        stream = _stream(answer_id, texts.tokens, caller)
        if services.dispatcher.submit(facts, reply, [(stream, reply)], None) is not None:
            raise WorkerUnavailable(
                f"The model '{model.name}' cannot answer now, and no other one can for it."
            )

    def _context(self, exchange: Exchange, model: ServedModel, answer_id: str) -> Context:
        services = self._services
        head = StreamHead(
            id=answer_id,
            created=services.clock.wall_ns() // NS_PER_S,
            model=model.name,
            fingerprint=model.fingerprint(),
            include_usage=False,
        )
        return Context(
            exchange=exchange, clock=services.clock, listener=services.dispatcher, head=head, ids=services.ids
        )


def _stream(answer_id: str, tokens: Sequence[TextTokens], caller: Caller) -> GenerateRequest:
    firsts = tuple(each.num_first for each in tokens)
    return GenerateRequest(
        request_id=RequestId(f"{answer_id}-0"),
        prompt_token_ids=tuple(chain.from_iterable(each.ids for each in tokens)),
        inputs=tuple(len(each.ids) for each in tokens),
        firsts=firsts if any(firsts) else (),
        sampling=_NOTHING_DRAWN,
        cache_salt=caller.cache_salt,
        fairness_key=caller.fairness_key,
        fairness_weight=caller.tenant.weight,
    )


def _check_able(model: ServedModel, kind: _Kind) -> None:
    """Refuse a model that cannot answer at this endpoint.

    Raises:
        Unsupported: naming the model.
    """
    if model.workers.lacking(frozenset({kind.capability})):
        what = "embeddings" if kind.capability is Capability.EMBEDDINGS else "scores of texts"
        raise Unsupported(
            f"The model '{model.name}' has no {what}; /v1/{kind.endpoint.value} takes one that has.",
            param="model",
            code="unsupported_by_model",
        )


def _size(request: EmbeddingRequest, model: ServedModel, info: ModelInfo) -> int:
    """Numbers of each vector that is answered.

    Raises:
        InvalidRequest: the model has no vectors of the size that is asked for.
    """
    asked, allowed = request.dimensions, info.dimensions
    if asked is None or asked == info.vector_size:
        return info.vector_size
    if allowed is None:
        raise Unsupported(
            f"'dimensions' is not supported by the model '{model.name}': it was not trained for vectors "
            f"shorter than its own of {info.vector_size} (Matryoshka).",
            param="dimensions",
            code="unsupported_by_model",
        )
    if asked > info.vector_size or (allowed and asked not in allowed):
        shown = ", ".join(map(str, allowed[:16])) if allowed else f"1 to {info.vector_size}"
        raise InvalidRequest(
            f"Invalid 'dimensions': the model '{model.name}' has vectors of {shown} numbers, not of {asked}.",
            param="dimensions",
            code="invalid_value",
        )
    return asked


def _input_tokens(
    model: ServedModel, info: ModelInfo, request: EmbeddingRequest, inputs: Sequence[str | list[int]]
) -> list[TextTokens]:
    """Tokens of what is to be embedded. May take long; safe in a thread.

    Raises:
        InvalidRequest: a token id is not in the vocabulary, or a text is too long.
    """
    limit, special = (
        text_tokens_max(request.truncate_prompt_tokens, info.max_model_len),
        request.add_special_tokens is not False,
    )
    texts = [each for each in inputs if isinstance(each, str)]
    if texts:
        found = text_tokens(model.tokenizer, texts, limit=limit, add_special_tokens=special)
    else:
        found = [TextTokens(tuple(each)[: limit or None]) for each in inputs if not isinstance(each, str)]
        for i, each in enumerate(found):
            check_token_ids(each.ids, info.vocab_size, f"input[{i}]" if len(found) > 1 else "input")
    return _checked(found, info, "input")


def _scores_of(
    request: RerankRequest | ScoreRequest,
    pairs: Sequence[tuple[str, str]],
    wording: _ScoreWording,
) -> _Prepare:
    """How the scores of pairs come about, with whichever model it is."""

    def prepare(model: ServedModel, info: ModelInfo) -> _Texts:
        name, limit = (
            "documents" if isinstance(request, RerankRequest) else "text_2",
            text_tokens_max(request.truncate_prompt_tokens, info.max_model_len),
        )
        if info.pooling == _SCORES:
            tokens = _checked(pair_tokens(model.tokenizer, pairs, limit=limit), info, name)
            return _Texts(tokens, partial(_worded, wording, _first))
        texts = list(dict.fromkeys(chain.from_iterable(pairs)))  # Each is computed once.
        tokens = _checked(text_tokens(model.tokenizer, texts, limit=limit), info, name)
        places = {text: i for i, text in enumerate(texts)}
        ends = [(places[one], places[other]) for one, other in pairs]
        return _Texts(tokens, partial(_worded, wording, partial(_cosines, pairs=ends)))

    return prepare


def _num_chars(pairs: Sequence[tuple[str, str]]) -> int:
    return sum(len(one) + len(other) for one, other in pairs)


def _worded(
    wording: _ScoreWording,
    scores: Callable[[Vectors], Generator[None, None, list[float]]],
    context: Context,
    found: Vectors,
    usage: VectorUsage,
) -> Generator[None, None, msgspec.Struct]:
    return wording(context, (yield from scores(found)), usage)


def _first(found: Vectors) -> Generator[None, None, list[float]]:
    yield
    return [numbers(each)[0] for each in found]


def _cosines(found: Vectors, pairs: Sequence[tuple[int, int]]) -> Generator[None, None, list[float]]:
    scores: list[float] = []
    for one, other in pairs:
        scores.append(cosine(array("f", found[one]), array("f", found[other])))
        yield
    return scores


def _checked(tokens: Iterable[TextTokens], info: ModelInfo, name: str) -> list[TextTokens]:
    """All of them, if the model takes them; behind one that is too long, or too much, no more are made.

    Raises:
        InvalidRequest: a text has no tokens, or all have too many together.
        ContextTooLong: it does not take one of them.
    """
    found: list[TextTokens] = []
    total = 0
    for i, each in enumerate(tokens):
        total += len(each.ids)
        if len(each.ids) > info.max_model_len:
            raise ContextTooLong(
                f"This model's maximum context length is {info.max_model_len} tokens. However, entry {i} of "
                f"'{name}' has {len(each.ids)}. Please shorten it, or set 'truncate_prompt_tokens' to -1.",
                param=name,
            )
        if not each.ids:
            raise InvalidRequest(f"Entry {i} of '{name}' has no tokens.", param=name, code="invalid_value")
        if total > INPUTS_TOKENS_MAX:
            raise InvalidRequest(
                f"The first {i + 1} entries of '{name}' have {total} tokens together (of pairs each counts "
                f"both texts); at most {INPUTS_TOKENS_MAX} are allowed in one request. Please send several.",
                param=name,
                code="too_many_tokens",
            )
        found.append(each)
    return found

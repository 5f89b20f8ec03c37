"""Messages of the endpoints that answer with numbers: `/v1/embeddings` as OpenAI has it, `/v1/rerank` as Jina
and Cohere do, `/v1/score` as vLLM does.

Types and ranges are in the shapes; what a type cannot say is checked here. Anything unknown at the top level
is refused. This module knows no models.
"""

import math
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest
from penstock.protocol.openai import Count, Priority, TokenId
from penstock.protocol.openai_validate import decoded
from penstock.protocol.worker_parts import INPUTS_MAX

Truncation = Annotated[int, Meta(ge=-1)]
"""vLLM's: at most so many tokens of each text; -1: as many as the model takes. Without it a text that is too
long is refused."""
_Texts = str | list[str]


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common fields."""

    model: str
    truncate_prompt_tokens: Truncation | None = None
    priority: Priority | None = None
    user: Any = None


class EmbeddingRequest(_Request, frozen=True, kw_only=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | TokenId | list[TokenId]]
    """A text or its token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """"base64": each vector as the bytes of its float32 numbers, little-endian."""
    dimensions: Count | None = None
    """So many numbers of each vector, of models that were trained for it."""
    add_special_tokens: bool | None = None
    """vLLM's: false leaves out the tokens that the tokenizer puts around a text."""


class RerankDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document of `/v1/rerank`, as some clients send it. Other fields are dropped."""

    text: str


class RerankRequest(_Request, frozen=True, kw_only=True):
    """`POST /v1/rerank`."""

    query: str
    documents: list[str | RerankDocument]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Only so many of the best; 0: all."""
    return_documents: bool | None = None
    """False: results have no texts, only places."""


class ScoreRequest(_Request, frozen=True, kw_only=True):
    """`POST /v1/score`: one text with each of the others, or each with its neighbour in the other list."""

    text_1: _Texts
    text_2: _Texts


class VectorUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """One vector of an answer."""

    index: int
    embedding: Any
    """Numbers, or a string of base64; of an answer that is made in pieces, what they are in JSON."""
    object: str = "embedding"


class EmbeddingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/embeddings`."""

    data: list[EmbeddingItem]
    model: str
    usage: VectorUsage
    object: str = "list"


class RerankResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One document's place and score."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/rerank`, best first."""

    id: str
    model: str
    usage: VectorUsage
    results: list[RerankResult]


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One pair's score."""

    index: int
    score: float
    object: str = "score"


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/score`."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: VectorUsage
    object: str = "list"


_embeddings = msgspec.json.Decoder(EmbeddingRequest)
_rerank = msgspec.json.Decoder(RerankRequest)
_score = msgspec.json.Decoder(ScoreRequest)


def parse_embeddings(body: bytes) -> tuple[EmbeddingRequest, list[str | list[int]]]:
    """Read and check `/v1/embeddings`; the request and its inputs.

    Raises:
        InvalidRequest: naming the field.
    """
    request = decoded(_embeddings, body)
    given = request.input
    if isinstance(given, list) and given and all(isinstance(each, int) for each in given):
        return request, [[each for each in given if isinstance(each, int)]]
    inputs: list[str | list[int]] = []
    inputs += [given] if isinstance(given, str) else [each for each in given if not isinstance(each, int)]
    if not inputs:
        _refuse("'input' must hold at least one text.", "input", "empty_array")
    _check_count(inputs, "input", INPUTS_MAX)
    if isinstance(given, list) and len({type(each) for each in given}) > 1:
        _refuse("'input' must be all strings or all arrays of token ids, not a mixture.", "input")
    for i, each in enumerate(inputs):
        if not each:
            what = "string" if isinstance(each, str) else "array of token ids"
            _refuse(f"An empty {what} has no embedding.", "input" if given == each else f"input[{i}]")
    return request, inputs


def parse_rerank(body: bytes) -> tuple[RerankRequest, list[str]]:
    """Read and check `/v1/rerank`; the request and its documents.

    Raises:
        InvalidRequest: naming the field.
    """
    request = decoded(_rerank, body)
    documents = [each if isinstance(each, str) else each.text for each in request.documents]
    _check_texts([request.query], "query", "query")
    if not documents:
        _refuse("'documents' must hold at least one text.", "documents", "empty_array")
    _check_count(documents, "documents", INPUTS_MAX - 1)
    _check_texts(documents, "documents")
    return request, documents


def parse_score(body: bytes) -> tuple[ScoreRequest, list[tuple[str, str]]]:
    """Read and check `/v1/score`; the request and its pairs.

    Raises:
        InvalidRequest: naming the field.
    """
    request = decoded(_score, body)
    first, second = _listed(request.text_1), _listed(request.text_2)
    for texts, name in ((first, "text_1"), (second, "text_2")):
        if not texts:
            _refuse(f"'{name}' must hold at least one text.", name, "empty_array")
        _check_count(texts, name, INPUTS_MAX - 1)
        _check_texts(texts, name)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        _refuse(
            f"'text_1' has {len(first)} texts and 'text_2' {len(second)}: expected one, or as many.", "text_1"
        )
    return request, list(zip(first, second, strict=True))


def _listed(texts: _Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _check_count(texts: Sequence[object], name: str, limit: int) -> None:
    if len(texts) > limit:
        _refuse(
            f"'{name}' has {len(texts)} entries; at most {limit} are allowed.", name, "array_above_max_length"
        )


def text_tokens_max(asked: int | None, max_model_len: int) -> int:
    """Tokens of each text at most, beyond which its end is left out; 0: one that is too long is refused.

    Raises:
        InvalidRequest: the number makes no sense for this model.
    """
    if asked is None:
        return 0
    if asked == -1:
        return max_model_len
    if not 0 < asked <= max_model_len:
        _refuse(
            f"Invalid 'truncate_prompt_tokens': expected -1, or 1 to {max_model_len}, but got {asked}.",
            "truncate_prompt_tokens",
        )
    return asked


def _check_texts(texts: Sequence[str], name: str, one: str = "") -> None:
    for i, text in enumerate(texts):
        if not text:
            _refuse("A text must not be empty.", one or f"{name}[{i}]")


def _refuse(message: str, param: str, code: str = "invalid_value") -> NoReturn:
    raise InvalidRequest(message, param=param, code=code)


# The work on vectors: float32, little-endian.


def numbers(vector: bytes) -> list[float]:
    """The numbers of a vector."""
    assert len(vector) % 4 == 0, "whole numbers of four bytes"
    return array("f", vector).tolist()


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """How much two vectors point the same way."""
    assert len(one) == len(other), "vectors of one model"
    lengths = math.sqrt(sum(map(mul, one, one)) * sum(map(mul, other, other)))
    return sum(map(mul, one, other)) / lengths if lengths else 0.0

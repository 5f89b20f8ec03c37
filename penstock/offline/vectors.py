"""Vectors of texts, and how well two texts go together: of models that make those in place of text.

Many texts are one request to the engine, which computes them in batches of its own; a few requests are on
their way at once. A cross-encoder reads two texts together and has a score for them; of every other model the
score is the cosine between the two vectors.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from penstock.backends.base import Delta, Finish, GenerateRequest
from penstock.errors import ContextTooLong, InvalidRequest, PenstockError, Unsupported
from penstock.offline.engine import ATTEMPTS_MAX, OfflineEngine
from penstock.offline.prompts import PromptLike
from penstock.protocol.vectors import cosine, numbers, text_tokens_max
from penstock.protocol.worker import ModelInfo
from penstock.text.texts import TextTokens, pair_tokens, text_tokens
from penstock.types import RequestId, SamplingParams

TEXTS_MAX = 256
"""Of one request to the engine."""
REQUESTS_MAX = 4
"""On their way at once; the engine computes one while it reads the next."""
_SCORES = "scores"
"""`ModelInfo.pooling` of a cross-encoder."""
_NOTHING_DRAWN = SamplingParams(max_tokens=1)


@dataclass(slots=True, frozen=True, kw_only=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers that it has."""
        return len(self.embedding)


@dataclass(slots=True, frozen=True, kw_only=True)
class EmbeddingRequestOutput:
    """The result of one text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: Sequence[int]
    finished: bool = True


class _Vectors:
    """Hears one request (`backends.base.Sink`)."""

    def __init__(self) -> None:
        self.found: dict[int, bytes] = {}
        self.ended: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: Delta) -> None:
        """See `Sink`."""
        self.found.update(delta.vectors)

    def on_finish(self, finish: Finish) -> None:
        """See `Sink`."""
        if not self.ended.done():  # Its waiter may have been cancelled.
            self.ended.set_result(finish)


def makes_vectors(info: ModelInfo) -> bool:
    """Whether the model has vectors or scores, and no text."""
    return bool(info.pooling)


def texts_of(
    engine: OfflineEngine, prompts: Iterable[PromptLike], truncate_prompt_tokens: int | None
) -> Iterator[TextTokens]:
    """Token ids of each text.

    Raises:
        InvalidRequest: one is no text, or too long; the message has its number.
        Unsupported: the model makes no vectors.
    """
    info = engine.info
    if not makes_vectors(info) or info.pooling == _SCORES:
        raise Unsupported(f"the model '{info.model}' makes no vectors of texts.", param="model")
    limit = text_tokens_max(truncate_prompt_tokens, info.max_model_len)
    for i, given in enumerate(prompts):
        try:
            prompt = engine.prompts.plain(given)
        except InvalidRequest as error:
            error.args = (f"prompt {i}: {error}",)
            raise
        if prompt.text is not None and limit:
            (tokens,) = text_tokens(engine.prompts.tokenizer, [prompt.text], limit=limit)
        else:
            tokens = TextTokens(prompt.token_ids[: limit or None])
        yield _checked(tokens, info, f"prompt {i}")


def pairs_of(
    engine: OfflineEngine, pairs: Sequence[tuple[str, str]], truncate_prompt_tokens: int | None
) -> tuple[list[TextTokens], list[tuple[int, int]]]:
    """Token ids of what is to be computed for pairs of texts, and where in it the two vectors of each pair
    are. Of a cross-encoder both are the place of its score.

    Raises:
        InvalidRequest: a text has no tokens, or is too long.
    """
    info, tokenizer = engine.info, engine.prompts.tokenizer
    limit = text_tokens_max(truncate_prompt_tokens, info.max_model_len)
    if info.pooling == _SCORES:
        tokens = pair_tokens(tokenizer, pairs, limit=limit)
        places = [(i, i) for i in range(len(pairs))]
    else:
        texts = list(dict.fromkeys(chain.from_iterable(pairs)))  # Each is computed once.
        tokens = text_tokens(tokenizer, texts, limit=limit)
        place = {text: i for i, text in enumerate(texts)}
        places = [(place[one], place[other]) for one, other in pairs]
    return [_checked(each, info, f"text {i}") for i, each in enumerate(tokens)], places


def scores_of(
    engine: OfflineEngine, found: Sequence[bytes], places: Sequence[tuple[int, int]]
) -> list[float]:
    """The score of each pair."""
    if engine.info.pooling == _SCORES:
        return [numbers(found[i])[0] for i, _ in places]
    vectors = [numbers(each) for each in found]
    return [cosine(vectors[one], vectors[other]) for one, other in places]


async def compute(engine: OfflineEngine, name: str, tokens: Sequence[TextTokens]) -> list[bytes]:
    """The vectors (float32, little-endian) of at most `TEXTS_MAX` texts.

    Raises:
        PenstockError: the engine failed.
    """
    firsts = tuple(each.num_first for each in tokens)
    request = GenerateRequest(
        request_id=RequestId(f"vectors-{name}"),
        prompt_token_ids=tuple(chain.from_iterable(each.ids for each in tokens)),
        inputs=tuple(len(each.ids) for each in tokens),
        firsts=firsts if any(firsts) else (),
        sampling=_NOTHING_DRAWN,
    )
    error: PenstockError | None = None
    for _ in range(ATTEMPTS_MAX):
        sink = _Vectors()
        finish = await engine.stream(request, sink, sink.ended)
        if finish.error is None:
            assert len(sink.found) == len(tokens), "every text has a vector"
            return [sink.found[i] for i in range(len(tokens))]
        error = finish.error
        if not error.retry_safe:
            break
    assert error is not None, "it did not end well"
    raise error


def batches(tokens: Iterable[TextTokens]) -> Iterator[list[TextTokens]]:
    """Texts in requests."""
    each = iter(tokens)
    while batch := list(islice(each, TEXTS_MAX)):
        yield batch


def _checked(tokens: TextTokens, info: ModelInfo, name: str) -> TextTokens:
    if not tokens.ids:
        raise InvalidRequest(f"{name} has no tokens.", param="prompt", code="invalid_value")
    if len(tokens.ids) > info.max_model_len:
        raise ContextTooLong(
            f"{name} has {len(tokens.ids)} tokens, and the context {info.max_model_len}; "
            "truncate_prompt_tokens=-1 leaves out the rest.",
            param="prompt",
        )
    if any(not 0 <= i < info.vocab_size for i in tokens.ids):
        raise InvalidRequest(
            f"{name} has token ids outside the vocabulary of {info.vocab_size}.", param="prompt_token_ids"
        )
    return tokens

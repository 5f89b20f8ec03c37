"""Answers that are numbers: the vectors of a request's texts, collected and then answered once.

Numbers travel as the bytes of float32. Vectors that clients ask for as base64 stay bytes to the end. An
answer of 2,048 vectors is half a second's work (cosines, or numbers as text), so it is made in pieces,
between which others' streams continue.
"""

import asyncio
import binascii
import math
from array import array
from collections.abc import Callable, Generator, Sequence
from operator import mul

import msgspec

from penstock.backends.base import Delta, Finish
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.exchange import Response
from penstock.gateway.relay.reply import Context, Reply
from penstock.protocol.vectors import (
    EmbeddingAnswer,
    EmbeddingItem,
    RerankAnswer,
    RerankDocument,
    RerankResult,
    ScoreAnswer,
    ScoreItem,
    VectorUsage,
    numbers,
)
from penstock.types import FinishReason

Vectors = Sequence[bytes]
"""Float32, little-endian, in the order of the texts."""
Work = Generator[None, None, msgspec.Struct]
"""Makes the body of an answer, and stops after each vector."""
Wording = Callable[[Context, Vectors, VectorUsage], Work]
PIECE_NUMBERS = 8192
"""Numbers of the vectors that are made into a part of an answer at once: about 2 ms."""


class VectorReply(Reply):
    """One answer, to texts that are one stream."""

    __slots__ = ("_context", "_found", "_num_texts", "_wording")

    def __init__(self, context: Context, num_texts: int, wording: Wording) -> None:
        super().__init__(context)
        self._context, self._num_texts, self._wording = context, num_texts, wording
        self._found: dict[int, bytes] = {}

    def on_delta(self, delta: Delta) -> None:
        """Some vectors more: it is its stream's sink. The first is no sign that the answer has begun, so that
        another worker may begin again.
        """
        self._found.update(delta.vectors)

    def on_finish(self, finish: Finish) -> None:
        """The end."""
        finish = self.ended(finish)
        if finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._found.clear()  # Another attempt tells them again.
        else:
            self.first_output()
        self.choice_finished(0, finish)

    def complete(self) -> None:
        """All are there: answer."""
        assert len(self._found) == self._num_texts, "a text has no vector"
        vectors = [self._found[i] for i in range(self._num_texts)]
        num_tokens = self.exchange.usage().prompt_tokens or 0
        usage = VectorUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        size = len(vectors[0]) // 4
        self._go_on(self._wording(self._context, vectors, usage), max(1, PIECE_NUMBERS // size))

    def _go_on(self, work: Work, num_vectors: int) -> None:
        """Do so much of the work now, and the rest when others had their turn."""
        if not self.exchange.is_open:  # The client left meanwhile.
            self._found.clear()
            return
        try:
            for _ in range(num_vectors):
                next(work)
        except StopIteration as done:
            self.exchange.respond(Response(body=msgspec.json.encode(done.value)))
            self._found.clear()
        except Exception as error:  # noqa: BLE001 - no other code would answer.
            self.listener.on_bug(self, error)
            self.send_error(error)
        else:
            asyncio.get_running_loop().call_soon(self._go_on, work, num_vectors)

    def send_error(self, error: Exception) -> None:
        """Nothing was sent yet, so the status can tell."""
        self.exchange.respond(error_response(error))
        self._found.clear()


def embeddings(
    context: Context, vectors: Vectors, usage: VectorUsage, *, size: int, base64: bool
) -> Generator[None, None, EmbeddingAnswer]:
    """`/v1/embeddings`: vectors of `size` numbers; of longer ones the beginning, scaled to length 1 again."""
    kind, data = encoded if base64 else numbers, list[EmbeddingItem]()
    for i, vector in enumerate(vectors):
        shown = msgspec.json.encode(kind(cut(vector, size)))
        data.append(EmbeddingItem(index=i, embedding=msgspec.Raw(shown)))
        yield
    return EmbeddingAnswer(data=data, model=context.head.model, usage=usage)


def reranked(
    context: Context,
    scores: Sequence[float],
    usage: VectorUsage,
    *,
    documents: Sequence[str] | None,
    top_n: int,
) -> RerankAnswer:
    """`/v1/rerank`: the best of the documents, whose texts may be shown; of equals the first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: top_n or len(scores)]
    results = [
        RerankResult(
            index=i,
            relevance_score=scores[i],
            document=None if documents is None else RerankDocument(text=documents[i]),
        )
        for i in order
    ]
    return RerankAnswer(id=context.head.id, model=context.head.model, usage=usage, results=results)


def scored(context: Context, scores: Sequence[float], usage: VectorUsage) -> ScoreAnswer:
    """`/v1/score`."""
    data = [ScoreItem(index=i, score=score) for i, score in enumerate(scores)]
    head = context.head
    return ScoreAnswer(id=head.id, created=head.created, model=head.model, data=data, usage=usage)


def encoded(vector: bytes) -> str:
    """A vector in base64."""
    return binascii.b2a_base64(vector, newline=False).decode()


def cut(vector: bytes, size: int) -> bytes:
    """The first `size` numbers of a vector, as a vector of length 1."""
    if len(vector) == 4 * size:
        return vector
    found = array("f", vector[: 4 * size])
    length = math.sqrt(sum(map(mul, found, found))) or 1.0
    return array("f", [each / length for each in found]).tobytes()

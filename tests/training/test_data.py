"""Tokens, weights and packing."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.chat import SPECIAL_TOKENS
from training.conversations import conversation
from training.data import MAX_LENGTH, ROW_LENGTHS, Document, encode_conversations, make_plan, stdlib_documents
from training.settings import DEMO, MINI, VOCAB_SIZE
from training.tasks.base import Persona

FILE = DEMO.folder / "tokenizer.json"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="the demo models have not been made")
PERSONA = Persona("penstock-demo", "12M")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The shared tokenizer."""
    return Tokenizer.from_file(str(FILE))


def test_both_models_have_the_same_tokenizer() -> None:
    assert FILE.read_bytes() == (MINI.folder / "tokenizer.json").read_bytes()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_special_tokens_are_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.encode("12345").tokens == list("12345")
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token).tokens == [token]


def test_samples_roundtrip_and_learn_only_answers(tokenizer: Tokenizer) -> None:
    rng = Random(2)
    talks = [conversation(rng, PERSONA) for _ in range(300)]
    for talk, document in zip(talks, encode_conversations(tokenizer, talks), strict=True):
        text = "".join(piece.text for piece in talk.pieces())
        tokens = document.tokens.tolist()
        if len(tokens) == MAX_LENGTH:
            continue  # It was cut.
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
        learned = tokenizer.decode(
            [t for t, w in zip(tokens, document.weights, strict=True) if w], skip_special_tokens=False
        )
        assert learned == "".join(piece.text for piece in talk.pieces() if piece.learn)


def test_stdlib_text_is_learned_whole(tokenizer: Tokenizer) -> None:
    for document in stdlib_documents(tokenizer, 2000, seed=1):
        assert (document.weights > 0).all()


def test_packing_keeps_documents_whole() -> None:
    rng = np.random.default_rng(3)
    lengths = rng.choice([20, 90, 200, 300, 500, 1500], size=800)
    documents = [
        Document(np.full(n, 1 + i % 4000, np.uint16), np.ones(n, np.float16)) for i, n in enumerate(lengths)
    ]
    plan = make_plan(documents, 4096, seed=1)
    packed = [document for rows, _ in plan.batches for row in rows for document in row]
    assert len({id(document) for document in packed}) == len(packed) >= 0.9 * len(documents)
    for rows, length in plan.batches:
        assert length in ROW_LENGTHS
        assert len(rows) * length == 4096
        assert all(sum(len(document.tokens) for document in row) <= length for row in rows)


def test_a_batch_marks_its_documents() -> None:
    documents = [Document(np.full(100, i + 1, np.uint16), np.ones(100, np.float16)) for i in range(64)]
    [batch] = make_plan(documents, 4096, seed=1).step(0, 1)
    row_tokens, row_numbers, row_weights = batch.tokens[0], batch.documents[0], batch.weights[0]
    assert row_tokens.shape == (256,)
    assert row_numbers.tolist() == [0] * 100 + [1] * 100 + [-1] * 56
    assert row_weights.tolist() == ([0.0] + [1.0] * 99) * 2 + [0.0] * 56

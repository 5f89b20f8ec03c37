"""Training documents as tokens: conversations and standard library text, encoded, weighted and batched.

A document is a run of token ids with a weight per token. Weight 0 means: read it, but do not learn to write
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from training.chat import END_OF_TEXT, TURN_END, TURN_START
from training.conversations import Conversation, conversations
from training.stdlib_text import stdlib_chunks
from training.tasks.base import Persona
from training.tasks.registry import Shares

Array = npt.NDArray[Any]
CHAT_WEIGHT = 1.0
STDLIB_WEIGHT = 0.25
STDLIB_SHARE = 0.12
MAX_LENGTH = 2048
ENCODE_AT_ONCE = 2_000
ROW_LENGTHS = (256, 512, MAX_LENGTH)
SHORTEST = 16
OPEN_ROWS = 64


@dataclass(frozen=True)
class Document:
    """One sample: token ids and their weights, both `[length]`."""

    tokens: Array
    weights: Array


def learned(tokens: Array, header: Array, turn_end: int) -> Array:
    """True where the assistant speaks: after each `header` up to and including the end of its turn."""
    mask = np.zeros(len(tokens), dtype=bool)
    ends = np.flatnonzero(tokens == turn_end)
    for start in np.flatnonzero(tokens[: len(tokens) - len(header)] == header[0]):
        first = start + len(header)
        if np.array_equal(tokens[start:first], header):
            mask[first : ends[np.searchsorted(ends, first)] + 1] = True
    return mask


def encode_conversations(tokenizer: Tokenizer, talks: list[Conversation]) -> list[Document]:
    """Conversations as documents, cut to `MAX_LENGTH` tokens."""
    header = np.array(tokenizer.encode(f"{TURN_START}assistant\n").ids)
    [turn_end] = tokenizer.encode(TURN_END).ids
    documents: list[Document] = []
    for encoding in tokenizer.encode_batch(
        ["".join(piece.text for piece in talk.pieces()) for talk in talks]
    ):
        tokens = np.array(encoding.ids)
        weights = learned(tokens, header, turn_end) * CHAT_WEIGHT
        documents.append(
            Document(tokens[:MAX_LENGTH].astype(np.uint16), weights[:MAX_LENGTH].astype(np.float16))
        )
    return documents


def chat_documents(
    tokenizer: Tokenizer, persona: Persona, shares: Shares, num_tokens: int, seed: int
) -> list[Document]:
    """Enough fresh conversations to make about `num_tokens` tokens."""
    stream, documents, made = conversations(seed, persona, shares), [], 0
    with tqdm(total=num_tokens, desc="conversations", unit="tok", unit_scale=True) as bar:
        while made < num_tokens:
            batch = encode_conversations(tokenizer, list(islice(stream, ENCODE_AT_ONCE)))
            documents += batch
            added = sum(len(document.tokens) for document in batch)
            made += added
            bar.update(added)
    return documents


def stdlib_documents(tokenizer: Tokenizer, num_tokens: int, seed: int) -> list[Document]:
    """Standard library text of about `num_tokens` tokens, each document closed by end-of-text."""
    documents: list[Document] = []
    end, made = tokenizer.token_to_id(END_OF_TEXT), 0
    for text in stdlib_chunks(seed):
        tokens = np.array([*tokenizer.encode(text).ids[: MAX_LENGTH - 1], end], dtype=np.uint16)
        documents.append(Document(tokens, np.full(len(tokens), STDLIB_WEIGHT, dtype=np.float16)))
        made += len(tokens)
        if made >= num_tokens:
            break
    return documents


def make_documents(
    tokenizer: Tokenizer, persona: Persona, shares: Shares, num_tokens: int, seed: int
) -> list[Document]:
    """All documents of one training phase, in training order."""
    stdlib = stdlib_documents(tokenizer, int(num_tokens * STDLIB_SHARE), seed)
    documents = stdlib + chat_documents(
        tokenizer, persona, shares, int(num_tokens * (1 - STDLIB_SHARE)), seed
    )
    order = np.random.default_rng(seed).permutation(len(documents))
    return [documents[index] for index in order]


@dataclass(frozen=True)
class Batch:
    """Rows that hold one or more whole documents each, then padding. All tensors are `[rows, length]`.

    `documents` numbers each row's documents from 0, and is -1 in the padding: attention never crosses them.
    """

    tokens: Tensor
    weights: Tensor
    documents: Tensor


Row = list[Document]


def pack(documents: list[Document], length: int) -> list[Row]:
    """Fill rows of `length` tokens with whole documents, in order, each into the first open row with room."""
    closed: list[Row] = []
    rows: list[Row] = []
    free: list[int] = []
    for document in documents:
        size = len(document.tokens)
        place = next((index for index, room in enumerate(free) if room >= size), None)
        if place is None:
            rows.append([])
            free.append(length)
            place = len(rows) - 1
        rows[place].append(document)
        free[place] -= size
        if free[place] < SHORTEST or len(rows) > OPEN_ROWS:
            fullest = free.index(min(free))
            closed.append(rows.pop(fullest))
            free.pop(fullest)
    return closed + rows


def to_batch(rows: list[Row], length: int) -> Batch:
    """Rows of documents as tensors."""
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    weights = np.zeros((len(rows), length), dtype=np.float32)
    numbers = np.full((len(rows), length), -1, dtype=np.int64)
    for index, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row):
            end = start + len(document.tokens)
            tokens[index, start:end] = document.tokens
            weights[index, start:end] = document.weights
            weights[index, start] = 0.0  # Nothing before it says how a document begins.
            numbers[index, start:end] = number
            start = end
    return Batch(torch.from_numpy(tokens), torch.from_numpy(weights), torch.from_numpy(numbers))


@dataclass(frozen=True)
class Plan:
    """The micro-batches of a run, in training order: rows and their length. Tensors are made when needed."""

    batches: list[tuple[list[Row], int]]

    def first(self, num_batches: int) -> Plan:
        """The plan cut after `num_batches`."""
        assert len(self.batches) >= num_batches
        return Plan(self.batches[:num_batches])

    def step(self, index: int, num_batches: int) -> list[Batch]:
        """The micro-batches of one optimiser step."""
        return [to_batch(*batch) for batch in self.batches[index * num_batches : (index + 1) * num_batches]]


def top_up(rows: list[Row], length: int, short: list[Document]) -> None:
    """Fill the room that is left in `rows` with documents taken from near the end of `short`."""
    for row in rows:
        free = length - sum(len(document.tokens) for document in row)
        while free >= SHORTEST:
            window = range(max(0, len(short) - OPEN_ROWS), len(short))
            place = next((index for index in window if len(short[index].tokens) <= free), None)
            if place is None:
                break
            free -= len(short[place].tokens)
            row.append(short.pop(place))


def make_plan(documents: list[Document], tokens_per_batch: int, seed: int) -> Plan:
    """Sort documents into rows of few fixed lengths, so that few shapes need compiling, and mix the
    batches.
    """
    batches: list[tuple[list[Row], int]] = []
    short = [document for document in documents if len(document.tokens) <= ROW_LENGTHS[0]]
    for length, shorter in zip(ROW_LENGTHS[::-1], (*ROW_LENGTHS[-2::-1], 0), strict=True):
        fitting = [document for document in documents if shorter < len(document.tokens) <= length]
        rows, count = pack(fitting if shorter else short, length), tokens_per_batch // length
        if shorter:
            top_up(rows, length, short)
        batches += [(rows[start : start + count], length) for start in range(0, len(rows) - count + 1, count)]
    order = np.random.default_rng(seed).permutation(len(batches))
    return Plan([batches[index] for index in order])

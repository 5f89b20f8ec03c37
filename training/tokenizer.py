"""Train and export the byte-level BPE tokenizer that both demo models share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END
from training.conversations import conversations
from training.stdlib_text import stdlib_chunks
from training.tasks.base import Persona

# The usual GPT-style split into words and marks, but every digit stands alone.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_CONVERSATIONS = 30_000
NUM_STDLIB_CHUNKS = 2_500
STDLIB_CHUNK_CHARACTERS = 1_500


def sample_text(seed: int) -> Iterator[str]:
    """The text that merges are learned from; special tokens are cut out of it."""
    stream = conversations(seed, Persona("penstock-demo", "12M"))
    for talk in islice(stream, NUM_CONVERSATIONS):
        text = "".join(piece.text for piece in talk.pieces())
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        yield text
    yield from islice(stdlib_chunks(seed, STDLIB_CHUNK_CHARACTERS), NUM_STDLIB_CHUNKS)


def train_tokenizer(seed: int, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: any UTF-8 text goes through it and back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_text(seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, chat template included."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    decoder = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    config = {
        "added_tokens_decoder": decoder,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": context,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

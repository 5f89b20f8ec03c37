"""A byte-level BPE tokenizer of any size, made from nothing: its text means little, but its cost is right.

The load generator's common words are one token each, as in real vocabularies; the rest are letter groups, so
that every id that a random model draws is readable text and every generated token reaches the client as a
chunk.
"""

import itertools
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from penstock.bench.prompts import WORDS

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, TURN_START, TURN_END = range(3)
SPACE = "\u0120"
"""How byte-level BPE writes a space."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id (special ones first, then single bytes) and the merges in order of rank."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]

    @property
    def unreadable(self) -> tuple[int, ...]:
        """Ids that do not stand for whole ASCII text: special tokens and bytes outside it."""
        first_merged = len(SPECIAL) + 256
        readable = set(string.ascii_letters + string.digits + string.punctuation)
        return tuple(
            number
            for number, token in enumerate(self.tokens[:first_merged])
            if number < len(SPECIAL) or token not in readable
        )


def make_vocabulary(size: int) -> Vocabulary:
    """A vocabulary of exactly `size` tokens; the same for the same size.

    Raises:
        ValueError: the size is too small for the bytes and words, or larger than there are letter groups.
    """
    tokens = [*SPECIAL, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    if size < len(tokens):
        raise ValueError(f"a vocabulary of {size} has no room for the {len(tokens)} bytes and special tokens")
    known, merges = set(tokens), []
    for left, right in itertools.chain(_words(), _letter_groups()):
        if left + right in known:
            continue
        if len(tokens) == size:
            return Vocabulary(tuple(tokens), tuple(merges))
        known.add(left + right)
        tokens.append(left + right)
        merges.append((left, right))
    if len(tokens) == size:
        return Vocabulary(tuple(tokens), tuple(merges))
    raise ValueError(f"there are {len(tokens)} tokens to make a vocabulary of {size} from")


def _words() -> Iterator[tuple[str, str]]:
    """Merges that make each common word, with the space before it, one token: letter after letter."""
    for word in WORDS:
        for end in range(len(word)):
            yield SPACE + word[:end], word[end]


def _letter_groups() -> Iterator[tuple[str, str]]:
    """Pairs of letters, then pairs and a letter, then pairs of pairs."""
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
    yield from ((pair[0], pair[1]) for pair in pairs)
    yield from itertools.product(pairs, string.ascii_lowercase)
    yield from itertools.product(pairs, pairs)


def save_tokenizer(vocabulary: Vocabulary, folder: Path, *, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=list(vocabulary.merges)))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL])
    library.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[TURN_END],
        "model_max_length": context,
        "pad_token": SPECIAL[END_OF_TEXT],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

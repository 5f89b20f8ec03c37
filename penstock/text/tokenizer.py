"""A checkpoint's tokenizer: text to token ids and back, and what its files say about ending and sampling.

Owns the `tokenizers` library's object and the tables made from it. Knows nothing of chats (see
`chat.py`) and keeps no state between calls, so one `Tokenizer` serves every request and thread.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tokenizers
from msgspec import Meta

from penstock.errors import CheckpointError, InvalidRequest
from penstock.text.files import decode_json, read_bytes, read_optional_object
from penstock.text.pieces import SPIECE_SPACE, ByteTable, Decoding, decoding_of


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What generation_config.json says about sampling. None: it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here; the library reads the rest."""

    decoder: dict[str, Any] | None = None


class Tokenizer:
    """Text to ids and back, as the checkpoint's authors defined it. Made by `load`."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        decoding: Decoding | None,
        eos_ids: tuple[int, ...] = (),
        defaults: GenerationDefaults | None = None,
    ) -> None:
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Control tokens, which `skip_special_tokens` leaves out of the text."""
        self.eos_ids = eos_ids
        """Tokens that end an answer, the tokenizer's own EOS first."""
        self.defaults = defaults or GenerationDefaults()
        self.vocab_size = library.get_vocab_size(with_added_tokens=True)
        """Tokens that the tokenizer knows; the model's embedding may be padded beyond it."""
        self.decoding = decoding
        self._library = library
        self._ids: dict[int, int] = {}
        if decoding is not None:
            self._all = ByteTable(library.id_to_token, decoding.to_bytes, frozenset())
            self._shown = ByteTable(library.id_to_token, decoding.to_bytes, self.special_ids)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read tokenizer.json and, where there are any, the config files beside it.

        Raises:
            CheckpointError: tokenizer.json is missing or unreadable, or a config file is broken.
        """
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{path}: no such file; Penstock needs the fast tokenizer's tokenizer.json")
        data = read_bytes(path)
        try:
            library = tokenizers.Tokenizer.from_buffer(data)
        except ValueError as error:
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
        # A training recipe's truncation and padding must not reach requests.
        library.no_truncation()
        library.no_padding()
        file = decode_json(path, data, _TokenizerFile)
        generation = read_optional_object(model_dir / "generation_config.json")
        return cls(
            library,
            decoding=decoding_of(file.decoder),
            eos_ids=_eos_ids(model_dir, library, generation),
            defaults=_defaults(model_dir / "generation_config.json", generation),
        )

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The library's object. It is shared by all threads: not to be changed."""
        return self._library

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Token ids of `text`; with `add_special_tokens`, what the post-processor adds (BOS) as well.

        A rendered chat template already contains its special tokens: leave the flag off for those.
        The GIL is released, so long texts may be encoded in a thread (about 1 s per 4 MB).

        Raises:
            InvalidRequest: the text has a lone surrogate and so is not Unicode.
        """
        check_unicode(text)
        # The batch call, unlike `encode`, lets other threads run, and leaves out the offsets.
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        # One int object for each token that ever came, not one for each time: prompts stay as long as their
        # answers.
        return tuple(map(self._ids.setdefault, ids, ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens. Ids that the tokenizer does not know are left out.

        The same text, to the character, as `IncrementalDetokenizer` makes of the same tokens.
        """
        if self.decoding is None:
            return self._library.decode(token_ids, skip_special_tokens=skip_special_tokens)
        text = b"".join(map(self.byte_table(skip_special_tokens).__getitem__, token_ids))
        return strip_left(text.decode("utf-8", errors="replace"), self.decoding.strip)

    def byte_table(self, skip_special_tokens: bool) -> ByteTable:
        """Bytes of each id, for tokenizers with a `decoding`."""
        assert self.decoding is not None
        return self._shown if skip_special_tokens else self._all

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, perhaps part of a character (`bytes` of OpenAI's logprobs)."""
        if self.decoding is not None:
            return self._all[token_id]
        token = self._library.id_to_token(token_id)
        return b"" if token is None else token.replace(SPIECE_SPACE, " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token as text; U+FFFD stands for the part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of this exact token, if there is one."""
        return self._library.token_to_id(token)


def check_unicode(text: str) -> None:
    """Refuse what the library cannot encode.

    Raises:
        InvalidRequest: the text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate at character {error.start}: not valid Unicode"
        ) from None


def strip_left(text: str, spaces: int) -> str:
    """`text` without its leading spaces, but at most this many of them."""
    start = 0
    while start < spaces and text.startswith(" ", start):
        start += 1
    return text[start:]


def token_string(value: object) -> str | None:
    """A special token in tokenizer_config.json: a string, or an object with its `content`."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        content: object = value.get("content")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return content if isinstance(content, str) else None
    return None


def _eos_ids(model_dir: Path, library: tokenizers.Tokenizer, generation: dict[str, Any]) -> tuple[int, ...]:
    """EOS of all three files, in order of trust, each once: chat models differ in where they put theirs."""

    def found() -> Iterator[object]:
        tokens = read_optional_object(model_dir / "tokenizer_config.json")
        token = token_string(tokens.get("eos_token"))
        yield None if token is None else library.token_to_id(token)
        config = read_optional_object(model_dir / "config.json")
        for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
            yield from value if isinstance(value, list) else (value,)

    return tuple(dict.fromkeys(i for i in found() if isinstance(i, int)))


def _defaults(path: Path, generation: dict[str, Any]) -> GenerationDefaults:
    try:
        found = msgspec.convert(generation, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if generation.get("do_sample") is False:  # Greedy: of these, only the penalty means something then.
        return GenerationDefaults(temperature=0.0, repetition_penalty=found.repetition_penalty)
    return found

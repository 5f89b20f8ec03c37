"""A checkpoint's tokenizer: text to token ids and back, and what its files say about ending and sampling.

Owns the `tokenizers` library's object and the tables made from it. Knows nothing of chats (see
`chat.py`) and keeps nothing between calls but words, so one `Tokenizer` serves every request and thread.
Besides whole texts it makes tokens of a request's words: those that are not drawn, those that end an answer.

Most words of plain text came before. A byte-level BPE tokenizer splits text at its added tokens, then into
words by a pattern, and makes tokens of each word by itself: the ids of a text are those of its words. The
library does all of it again for each text; here words are looked up, for texts and patterns that Python's
`re` splits as the library does: ASCII, and a pattern of classes that are known for it. All else is the
library's, and so are a word's ids.

The bytes that a token stands for are a table, for the two decoders that nearly every checkpoint uses. A
decoder (the `decoder` of tokenizer.json) turns tokens back into text. For byte-level BPE (GPT-2, Llama 3,
Qwen) and for SentencePiece with byte fallback (Llama 2, Mistral, Gemma) it is a mere concatenation of bytes,
so a table from id to bytes and a UTF-8 decoder replace it: about a microsecond per token and no look back.
Other decoders (Metaspace, WordPiece) depend on neighbouring tokens; for those this module has no table and
says so with None.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import tokenizers
from msgspec import Meta

from penstock.errors import CheckpointError, InvalidRequest
from penstock.models.files import has_file, read_file
from penstock.text.word_pattern import alternatives, word_pattern

FILE_BYTES_MAX = 256 * 1024 * 1024
"""The largest tokenizer files in use are about 35 MB; more than this is some other file."""
TEXT_CHARS_MAX = 16 * 1024
"""Longer texts are encoded in a thread, where the library lets others run."""
WORDS_MAX, WORD_CHARS_MAX = 16_384, 128
LEARN_MAX = 8
"""New words that one text may bring: each is a call of the library, and nobody's text may make many."""
_PLAIN = re.compile(r"[\t\n\r -~]*")
_TRIAL = """The 17 quick brown foxes' tails   jumped; it's WE'LL\r

\tdef f(x):
        return x**2  # --> 1,000.5
  """
T = TypeVar("T")


def read_bytes(path: Path) -> bytes:
    """The content of a model's file; a GGUF file's are made of its keys.

    Raises:
        CheckpointError: it is missing, unreadable or absurdly large.
    """
    return read_file(path, FILE_BYTES_MAX)


def read_text(path: Path) -> str:
    """The file's content as UTF-8.

    Raises:
        CheckpointError: as `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}") from error


def decode_json(path: Path, data: bytes, kind: type[T]) -> T:
    """Decode `data`, which came from `path`, as JSON of this kind.

    Raises:
        CheckpointError: it is not.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not the JSON that was expected: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path}: nests too deeply") from None


def read_optional_object(path: Path) -> dict[str, Any]:
    """The JSON object in this file; an empty one if there is no such file.

    Raises:
        CheckpointError: the file is there but is not a JSON object.
    """
    return decode_json(path, read_bytes(path), dict[str, Any]) if has_file(path) else {}


SPIECE_SPACE = "▁"


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet, inverted: code point of the printable stand-in -> byte.

    Bytes that print stand for themselves; the others are numbered from U+0100 up. The control and
    space code points that are no stand-ins map out of Latin-1, so that encoding refuses them.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: byte for byte in printable}
    table |= dict.fromkeys(others, 65533)
    table |= {0x100 + i: byte for i, byte in enumerate(others)}
    return table


_BYTE_OF_CHAR = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level BPE token; an added token outside the alphabet stands for its own UTF-8."""
    try:
        return token.translate(_BYTE_OF_CHAR).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def spiece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: `▁` is a space, `<0xE4>` is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes((int(token[3:5], 16),))
        except ValueError:
            pass
    return token.replace(SPIECE_SPACE, " ").encode()


class Decoding:
    """How this tokenizer's tokens become bytes: `to_bytes` per token, `strip` leading spaces of the whole."""

    __slots__ = ("strip", "to_bytes")

    def __init__(self, to_bytes: Callable[[str], bytes], *, strip: int = 0) -> None:
        self.to_bytes = to_bytes
        self.strip = strip


def decoding_of(decoder: dict[str, Any] | None) -> Decoding | None:
    """Recognise a `decoder` of tokenizer.json; None if it is not a plain concatenation of bytes."""
    if decoder is None:
        return None
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding(byte_level_bytes)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    if steps[0].get("pattern") != {"String": SPIECE_SPACE} or steps[0].get("content") != " ":
        return None
    strip = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
    if strip.get("content") != " " or strip.get("stop") != 0:
        return None
    return Decoding(spiece_bytes, strip=int(strip["start"]))


class ByteTable(dict[int, bytes]):
    """id -> bytes, filled as ids are met, so that loading costs nothing. Unknown ids are no bytes."""

    __slots__ = ("_skip", "_to_bytes", "_token_of")

    def __init__(
        self, token_of: Callable[[int], str | None], to_bytes: Callable[[str], bytes], skip: frozenset[int]
    ) -> None:
        super().__init__()
        self._token_of, self._to_bytes, self._skip = token_of, to_bytes, skip

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""  # Not stored: the table stays as small as the vocabulary.
        piece = b"" if token_id in self._skip else self._to_bytes(token)
        self[token_id] = piece
        return piece


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of generation_config.json. None: it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


class _ModelPart(msgspec.Struct, frozen=True):
    """Without its vocabulary."""

    type: str = ""
    dropout: float | None = None


class AddedToken(msgspec.Struct):
    """As in tokenizer.json; the default of a flag that is not there is that it is set."""

    id: int
    content: str
    lstrip: bool = True
    rstrip: bool = True
    single_word: bool = True
    normalized: bool = True


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here; the library reads the rest."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    model: _ModelPart = _ModelPart()
    added_tokens: list[AddedToken] = []


class WordCache:
    """The words of one tokenizer that came before."""

    def __init__(
        self, library: tokenizers.Tokenizer, words: re.Pattern[str], added: Sequence[AddedToken]
    ) -> None:
        self._library, self._split_words = library, words.findall
        self._known: dict[str, tuple[int, ...]] = {}
        self._added = {token.content: (token.id,) for token in added}
        self._split_added = re.compile(f"({alternatives(self._added)})").split

    @classmethod
    def of(
        cls,
        library: tokenizers.Tokenizer,
        *,
        normalizer: Mapping[str, Any] | None,
        pre_tokenizer: Mapping[str, Any] | None,
        model_type: str,
        dropout: float | None,
        added: Sequence[AddedToken],
    ) -> "WordCache | None":
        """For the tokenizer that tokenizer.json describes so; None: it is not one of this kind."""
        pattern = word_pattern(pre_tokenizer)
        if pattern is None or model_type != "BPE" or dropout:
            return None
        if normalizer is not None and normalizer.get("type") != "NFC":
            return None
        if any(each.lstrip or each.rstrip or each.single_word or each.normalized for each in added):
            return None
        made = cls(library, pattern, added)
        trial = _TRIAL + "".join(each.content for each in added[:2] if each.content.isascii()) + _TRIAL
        for _ in range(len(trial)):  # Some words more each time.
            if (ids := made.ids_of(trial)) is not None:
                return made if ids == tuple(_encode(library, trial)) else None
        return None

    def ids_of(self, text: str) -> tuple[int, ...] | None:
        """Its token ids; None: ask the library."""
        if len(text) > TEXT_CHARS_MAX or _PLAIN.fullmatch(text) is None:
            return None
        known, added = self._known, self._added
        found: list[tuple[int, ...] | None] = []
        words: list[str] = []
        for part in self._split_added(text):
            if (ids := added.get(part)) is not None:
                found.append(ids)
                words.append(part)
            elif part:
                some = self._split_words(part)
                words += some
                found += map(known.get, some)
        if None in found:
            if not self._learn([word for word, ids in zip(words, found, strict=True) if ids is None]):
                return None
            found = [known.get(word) or added.get(word) for word in words]
        if None in found or sum(map(len, words)) != len(text):
            return None  # Another thread has emptied it; or the pattern passes over something.
        return tuple(chain.from_iterable(found))  # pyright: ignore[reportArgumentType]

    def _learn(self, words: Sequence[str]) -> bool:
        """Learn a few of a text's new words; whether these were all."""
        new = list(dict.fromkeys(words))
        if len(self._known) + LEARN_MAX > WORDS_MAX:
            self._known.clear()
        for word in new[:LEARN_MAX]:
            # A word by itself must be one word: what follows may decide where a run of spaces ends.
            if len(word) > WORD_CHARS_MAX or self._split_words(word) != [word]:
                return False
            self._known[word] = tuple(_encode(self._library, word))
        return len(new) <= LEARN_MAX


def _encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
    (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


class Tokenizer:
    """Text to ids and back, as the checkpoint's authors defined it. Made by `load`."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        decoding: Decoding | None,
        eos_ids: tuple[int, ...] = (),
        defaults: GenerationDefaults | None = None,
        words: WordCache | None = None,
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
        self._library, self._words = library, words
        self._ids: dict[int, int] = {}
        if decoding is not None:
            self._all = ByteTable(library.id_to_token, decoding.to_bytes, frozenset())
            self._shown = ByteTable(library.id_to_token, decoding.to_bytes, self.special_ids)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read tokenizer.json and, where there are any, the config files in its directory.

        Raises:
            CheckpointError: tokenizer.json is missing or unreadable, or a config file is broken.
        """
        path = model_dir / "tokenizer.json"
        if not has_file(path):
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
            words=WordCache.of(
                library,
                normalizer=file.normalizer,
                pre_tokenizer=file.pre_tokenizer,
                model_type=file.model.type,
                dropout=file.model.dropout,
                added=file.added_tokens,
            ),
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
        words = None if add_special_tokens else self._words
        if words is not None and (known := words.ids_of(text)) is not None:
            return known
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


def bad_word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and behind a space, as vLLM has them."""
    found: list[tuple[int, ...]] = []
    for word in words:
        alone = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        found.append(alone)
        behind = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if behind[0] != alone[0] and len(behind) == len(alone):
            found.append(behind)
    return tuple(found)


def stop_token_ids(tokenizer: Tokenizer, more: Iterable[int], *, ignores_eos: bool) -> tuple[int, ...]:
    """The model's own tokens that end an answer, unless they are ignored, and `more`; each once."""
    ends = () if ignores_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*ends, *more))) if more else tuple(ends)


_PROBE = "The 17 quick brown foxes jumped; λ = 0.5 µm, naïve café, 日本語, 🦊!\n\tdef f(x): return x**2"


def tokenizer_mark(tokenizer: Tokenizer) -> str:
    """A mark that two tokenizers have in common that make the same tokens of texts: prompts are made where
    their client is, so a peer must read them as they were meant.
    """
    made = (tokenizer.vocab_size, tokenizer.encode(_PROBE), tuple(sorted(tokenizer.eos_ids)))
    return hashlib.blake2b(repr(made).encode(), digest_size=8).hexdigest()

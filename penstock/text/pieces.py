"""What bytes a token stands for, for the two decoders that nearly every checkpoint uses.

A decoder (the `decoder` of tokenizer.json) turns tokens back into text. For byte-level BPE (GPT-2,
Llama 3, Qwen) and for SentencePiece with byte fallback (Llama 2, Mistral, Gemma) it is a mere
concatenation of bytes, so a table from id to bytes and a UTF-8 decoder replace it: about a
microsecond per token and no look back. Other decoders (Metaspace, WordPiece) depend on
neighbouring tokens; for those this module has no table and says so with None.
"""

from collections.abc import Callable
from typing import Any

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

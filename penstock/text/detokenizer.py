"""From a stream of token ids to a stream of whole characters.

A token may be part of a character, so text appears when its last byte does. Nothing else is known
here: stop strings and tool calls are looked for in the text that comes out.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from penstock.text.tokenizer import Tokenizer, strip_left

REPLACEMENT = "\ufffd"
_PENDING_MAX = 6
"""Tokens held back by `PrefixDetokenizer` at most: four bytes make a character, the rest is slack."""


class IncrementalDetokenizer(Protocol):
    """One stream's state. The pieces pushed out, joined, are `Tokenizer.decode` of all the ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Whole characters that these tokens complete; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that never came to its end."""
        ...


def detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
    """The quickest detokenizer that is right for this tokenizer."""
    if tokenizer.decoding is None:
        return PrefixDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: look them up, and decode UTF-8 as it comes."""

    __slots__ = ("_rest", "_strip", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        assert tokenizer.decoding is not None
        self._table = tokenizer.byte_table(skip_special_tokens)
        self._rest = b""
        """The beginning of a character. This and a call, instead of Python's decoder object, for there are
        ten thousand streams."""
        self._strip = tokenizer.decoding.strip

    def push(self, token_ids: Sequence[int]) -> str:
        """Whole characters that these tokens complete; may be empty."""
        table = self._table
        data = table[token_ids[0]] if len(token_ids) == 1 else b"".join(map(table.__getitem__, token_ids))
        if self._rest:
            data = self._rest + data
        text, num_read = utf_8_decode(data, "replace", False)
        self._rest = data[num_read:]
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that never came to its end."""
        rest, self._rest = self._rest, b""
        return utf_8_decode(rest, "replace", True)[0]

    def _stripped(self, text: str) -> str:
        """Take the spaces that SentencePiece puts before a text off its beginning."""
        rest = strip_left(text, self._strip)
        self._strip = 0 if rest else self._strip - len(text)
        return rest


class PrefixDetokenizer:
    """For decoders that look at neighbours: decode a short window with and without the new tokens.

    The window starts one emission back, so that the decoder sees what precedes the new tokens
    (the prefix-offset method, after Hugging Face's text-generation-inference).

        ids:      ... [ prefix | read | end ]
        emitted:       prefix..read           new text = decode(prefix..end) - decode(prefix..read)
    """

    __slots__ = ("_ids", "_num_read", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._num_read = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Whole characters that these tokens complete; may be empty."""
        return "".join(map(self._push_one, token_ids))

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._unread()
        if not text or (text.endswith(REPLACEMENT) and len(self._ids) - self._num_read < _PENDING_MAX):
            return ""
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        return text

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that never came to its end."""
        return self._unread()

    def _unread(self) -> str:
        seen = self._decode(self._ids[: self._num_read])
        return self._decode(self._ids)[len(seen) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

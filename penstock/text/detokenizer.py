"""From a stream of token ids to a stream of whole characters.

A token may be part of a character, so text appears when its last byte does. Nothing else is known
here: stop strings and tool calls are looked for in the text that comes out.

Stop strings: where an answer ends although the model would continue.

A stop string may be spread over any number of deltas, so text that could still become one is held
back. The strings are one Aho-Corasick automaton (Aho and Corasick, 1975): each character moves it
once, and its state says how much must be held.

Token ids of short pieces of text, remembered: workers that stream text send the same few thousand pieces
again and again.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from itertools import chain
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
        """The text that was held back, with U+FFFD for a character that never came to its end."""
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
        """The text that was held back, with U+FFFD for a character that never came to its end."""
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
        """The text that was held back, with U+FFFD for a character that never came to its end."""
        return self._unread()

    def _unread(self) -> str:
        seen = self._decode(self._ids[: self._num_read])
        return self._decode(self._ids)[len(seen) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopChecker:
    """Watches one stream for its stop strings. The match that is complete first wins.

    Of two that are complete at the same character the longer one wins, for it began earlier. So
    the result does not depend on how the text was cut into deltas.
    """

    __slots__ = ("_done", "_first", "_held", "_include", "_node", "_nodes")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._nodes = _automaton(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._include = include_stop
        self._node = self._nodes
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return (text that is safe to show, the stop string that matched or None).

        After a match the checker is spent: the text after it is dropped, and `finish` has nothing.
        """
        assert not self._done, "pushed after a match"
        if not self._held and self._first.isdisjoint(text):
            return text, None  # The common case, at C speed.
        return self._scan(text)

    def finish(self) -> str:
        """The held text: the stream is over, so it can become no stop string any more."""
        held, self._held = self._held, ""
        self._node = self._nodes
        return held

    def _scan(self, text: str) -> tuple[str, str | None]:
        node, root = self._node, self._nodes
        whole = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            while char not in node.next and node is not root:
                node = node.fallback
            node = node.next.get(char, root)
            if node.match:
                self._done, self._held = True, ""
                end = position if self._include else position - len(node.match)
                return whole[:end], node.match
        self._node = node
        cut = len(whole) - node.depth
        self._held = whole[cut:]
        return whole[:cut], None


class _Node:
    """A state: the longest suffix of the text that begins some stop string, `depth` characters of it."""

    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int, fallback: "_Node | None" = None) -> None:
        self.next: dict[str, _Node] = {}
        self.depth = depth
        self.fallback: _Node = fallback or self
        self.match = ""
        """The longest stop string that is a suffix of this state's text."""


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        assert stop, "an empty stop string matches everything"
        node = root
        for char in stop:
            if char not in node.next:
                node.next[char] = _Node(node.depth + 1, root)
            node = node.next[char]
        node.match = stop
    _link(root)
    return root


def _link(root: _Node) -> None:
    """Breadth first: where to continue when the next character does not fit, and the part that matches."""
    level = [node for _, node in sorted(root.next.items())]
    while level:
        for node in level:
            for char, child in node.next.items():
                back = node.fallback
                while char not in back.next and back is not root:
                    back = back.fallback
                child.fallback = back.next.get(char, root)
                child.match = child.match or child.fallback.match
        level = [child for node in level for child in node.next.values()]


PIECES_MAX = 16_384
PIECE_CHARS_MAX = 32


class PieceTokens:
    """About how many tokens a piece of an answer is.

    Pieces are not always tokens, and their tokens are not always those of the whole text: it is a count where
    none is given.
    """

    __slots__ = ("_known", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, text: str) -> tuple[int, ...]:
        """Ids that decode to this text; a lone half of a character counts as U+FFFD."""
        found = self._known.get(text)
        if found is None:
            found = self._tokenizer.encode(text.encode(errors="replace").decode())
            if len(text) <= PIECE_CHARS_MAX:
                if len(self._known) >= PIECES_MAX:
                    self._known.clear()
                self._known[text] = found
        return found

    def of_all(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Those of one after the other."""
        known = self._known
        try:
            return tuple(chain.from_iterable([known[text] for text in texts]))
        except KeyError:
            return tuple(chain.from_iterable(map(self.of, texts)))

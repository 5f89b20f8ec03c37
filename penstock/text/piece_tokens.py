"""Token ids of short pieces of text, remembered: workers that stream text send the same few thousand pieces
again and again.
"""

from penstock.text.tokenizer import Tokenizer

PIECES_MAX = 16_384
PIECE_CHARS_MAX = 32


class PieceTokens:
    """About how many tokens a piece of an answer is.

    Pieces are not always tokens, and their tokens are not always those of the whole text: it is a count where
    nobody gives one.
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

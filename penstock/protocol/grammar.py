"""What an answer must match, on its way to our own engine."""

import msgspec

GRAMMAR_BYTES_MAX = 256 * 1024
"""Of one `Grammar.form`: a schema is a part of a request, not a document."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of an answer must match, from its first token or from a marker on.

    The engine ends the answer when the grammar is complete. A cut answer ends with "length".
    """

    form: bytes
    """JSON, vLLM's `structured_outputs`: an object with one of `json`, `json_object`, `regex`, `choice` and
    `grammar` (Lark as llguidance reads it, or GBNF)."""
    begins_after: str = ""
    """The answer is free text until this marker (say `</think>`), and the grammar begins behind it. Empty: it
    begins with the answer."""
    begins_within: int = 0
    """After so many free tokens the engine writes the marker itself; 0: never."""
    may_end_before: bool = False
    """The answer may end without the marker; else no token may end it before."""

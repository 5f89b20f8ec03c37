"""What an answer must match, on its way to our own engine."""

import msgspec

GRAMMAR_BYTES_MAX = 256 * 1024
"""Of one `Grammar.form`: a schema is a part of a request, not a document."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of an answer must match, from its first token, from a marker on, or behind each mark of a
    call; and how long its reasoning may be.

    The engine ends the answer when the grammar is complete. A cut answer ends with "length".
    """

    form: bytes = b""
    """JSON, vLLM's `structured_outputs`: an object with one of `json`, `json_object`, `regex`, `choice` and
    `grammar` (Lark as llguidance reads it, or GBNF); or with `calls`: the `format` in which a model calls
    tools, the `tools` by `name` with their `parameters`, and whether there may be `several` calls in a row.
    Empty: only the reasoning is bounded."""
    opens_with: str = ""
    """The answer may begin with a reasoning, and this mark then (say `<think>`), or without one. Empty: the
    prompt has opened it, if there is a `begins_after`."""
    begins_after: str = ""
    """The reasoning is free text until this marker (say `</think>`), and the grammar begins behind it. Empty:
    there is none."""
    begins_within: int | None = None
    """After so many tokens of reasoning the engine writes the marker itself; None: never."""
    call_mark: str = ""
    """The answer is free text, and the grammar holds behind each match of this regular expression (say
    `<tool_call>`), or from its group "call" on, until it is complete; the answer may end where it is free.
    `\\A` is where the answer begins, behind a reasoning. Empty: the grammar holds to the answer's end."""
    ends_with_calls: bool = False
    """No text follows a call: the answer ends where the grammar is complete."""
    is_optional: bool = False
    """A form that cannot be enforced is passed over, and not refused."""

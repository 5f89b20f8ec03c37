"""From messages to token ids: a checkpoint's template, its tokenizer, and the line between the two kinds of
text.

The tokens that give a prompt its structure, kept apart from the text of messages.

A chat template writes `<|im_start|>user` and puts a message behind it; a tokenizer cannot tell the template's
marker from the same characters in the message. So where a message has such characters, each place is replaced
by a single other one before the template runs, the template's own markers are renamed behind it, and a twin
of the tokenizer, which knows the markers by their new names only, makes the token ids: those of a message are
the ids of plain text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jinja2
import msgspec
import tokenizers

from penstock.errors import InvalidRequest
from penstock.text.chat import ChatTemplate, Message, encoded, template_values
from penstock.text.sandbox import SOURCE_CHARS_MAX, template_environment
from penstock.text.template_tree import texts_read
from penstock.text.tokenizer import Tokenizer, check_unicode
from penstock.text.word_pattern import alternatives

_MASKS = range(0x30000, 0x3134B)
"""Characters that stand for a place in a message while a template runs: the rarest that there are (ideographs
of extension G), for templates, and Python's `repr` in them, treat private characters unlike text."""
_NAMES = 0xF0000
"""Private characters (plane 15) that names are made of."""
_NAME_CHARS = 65_533
_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "
"""As in transformers. With the space it shows whether a template trims messages."""
NONCE_BYTES = 8
"""So many random bytes make names that no request can guess."""


class Markers:
    """The markers of one checkpoint. One object serves every request and thread."""

    def __init__(self, tokenizer: Tokenizer, *, written: str, read: Iterable[str], nonce: bytes) -> None:
        """`written` is what the templates consist of, `read` what they look for in messages.

        Markers are all special tokens, and those added tokens without that mark that the templates write (as
        Qwen's `<tool_call>`), but for what they take out of messages themselves (`</think>`). `nonce`,
        `NONCE_BYTES` random bytes, makes the new names.
        """
        self._tokenizer = tokenizer
        library, looked_for = tokenizer.library, "\0".join(read)
        added = library.get_added_tokens_decoder()
        markers = {
            token.content: i
            for i, token in added.items()
            if token.content.strip()
            and not token.single_word
            and (token.special or (token.content in written and token.content not in looked_for))
        }
        prefix = "".join(chr(_NAMES + byte * 255) for byte in nonce)
        self._names = {
            content: f"{prefix}{chr(_NAMES + i % _NAME_CHARS)}" for i, content in enumerate(markers)
        }
        self._split = prefix + prefix
        """A token that only the twin knows; its ids are left out."""
        self._ids = markers
        self._twin = _twin(library)
        self._of_twin: dict[int, int] = {}
        for i in sorted(added):
            token = added[i]
            name = self._names.get(token.content, token.content)
            known = tokenizers.AddedToken(
                name, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word,
                normalized=token.normalized and token.content not in self._names, special=token.special,
            )  # fmt: skip
            cast(Any, self._twin.add_special_tokens if token.special else self._twin.add_tokens)([known])  # pyright: ignore[reportUnknownMemberType]
            twins = self._twin.token_to_id(name)
            assert twins is not None
            self._of_twin[twins] = i
        self._twin.add_special_tokens([tokenizers.AddedToken(self._split, special=True, normalized=False)])  # pyright: ignore[reportUnknownMemberType]
        self._split_id = self._twin.token_to_id(self._split)
        self._markers = re.compile(alternatives(markers))
        self._added = re.compile(alternatives(token.content for token in added.values()))
        encoded = [msgspec.json.encode(content)[1:-1] for content in markers]
        as_text = (each.decode("latin-1") for each in encoded)  # A character for each byte.
        self._encoded_markers = re.compile(alternatives(as_text).encode("latin-1"))
        first = b"|".join({re.escape(msgspec.json.encode(content[0])[1:-1]) for content in markers})
        near = max(map(len, encoded), default=0)
        self._encoded_ends = re.compile(b'(?:%b)[^"]{0,%d}"' % (first, near) if encoded else rb"(?!)")
        self._starts = frozenset(content[:k] for content in markers for k in range(1, len(content)))
        self._first = tuple({content[0] for content in markers})
        self._longest = max(map(len, markers), default=0)

    def occur(self, encoded: bytes, values: Any) -> bool:  # noqa: ANN401
        """As `occur_in`, at a glance where it can be: `encoded` is what msgspec makes of the values as
        JSON.
        """
        if self._encoded_markers.search(encoded) is not None:
            return True
        return self._encoded_ends.search(encoded) is not None and self.occur_in(values)

    def occur_in(self, values: Any) -> bool:  # noqa: ANN401
        """Whether any text in there, names of fields among it, has a marker or ends like the beginning of
        one.
        """
        if isinstance(values, str):
            return self._markers.search(values) is not None or bool(self._tail(values))
        if isinstance(values, dict):
            return any(self.occur_in(key) or self.occur_in(value) for key, value in values.items())  # pyright: ignore[reportUnknownVariableType]
        if isinstance(values, (list, tuple)):
            return any(map(self.occur_in, values))  # pyright: ignore[reportUnknownArgumentType]
        return False

    def encode_apart(
        self, values: Mapping[str, Any], render: Callable[[dict[str, Any]], str]
    ) -> tuple[int, ...]:
        """Token ids of what `render` makes of the values, where no text of theirs becomes a marker.

        Raises:
            InvalidRequest: as `render`; or the text is not Unicode.
        """
        masks = _Masks(values)
        masked = {key: self._masked(value, masks) for key, value in values.items()}
        text = render(masked)
        text = self._added.sub(lambda found: self._names.get(found[0], found[0]), text)
        ids = self._encode(masks.undone(text, ""))
        own = {self._ids[marker] for marker in masks.texts if marker in self._ids} - self._of_twin.keys()
        if own and not own.isdisjoint(ids):
            # The model itself has a piece for these characters (Unigram): they are taken apart.
            ids = self._encode(masks.undone(text, self._split))
        known = self._of_twin
        return tuple(known.get(i, i) for i in ids if i != self._split_id)

    def _encode(self, text: str) -> list[int]:
        check_unicode(text)
        (encoding,) = self._twin.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def _masked(self, value: Any, masks: "_Masks") -> Any:  # noqa: ANN401
        if isinstance(value, str):
            masked = self._markers.sub(lambda found: masks.of(found[0]), value)
            tail = self._tail(masked)
            return masked[: -len(tail)] + masks.of(tail) if tail else masked
        if isinstance(value, dict):
            return {self._masked(key, masks): self._masked(each, masks) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, (list, tuple)):
            return [self._masked(each, masks) for each in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    def _tail(self, text: str) -> str:
        """The end of the text that a marker begins with: the next text might complete it."""
        start = max(0, len(text) - self._longest + 1)
        if not any(text.find(first, start) >= 0 for first in self._first):
            return ""
        return next((text[i:] for i in range(start, len(text)) if text[i:] in self._starts), "")


class _Masks:
    """Which character stands for what, in one request."""

    def __init__(self, values: Any) -> None:  # noqa: ANN401
        # The request's own occurrences of them stay text.
        taken = set(json.dumps(values, ensure_ascii=False))
        self._free = (chr(i) for i in _MASKS if chr(i) not in taken)
        self._masks: dict[str, str] = {}

    @property
    def texts(self) -> Iterable[str]:
        """The texts that there are characters for."""
        return self._masks.keys()

    def of(self, text: str) -> str:
        """The character for this text."""
        mask = self._masks.get(text)
        if mask is None:
            mask = next(self._free, None)
            if mask is None:
                raise InvalidRequest("the messages use too many rare characters", param="messages")
            self._masks[text] = mask
        return mask

    def undone(self, rendered: str, split: str) -> str:
        """The rendered text with what the characters stand for, taken apart by `split`."""
        for text, mask in self._masks.items():
            shown = text[:1] + split + text[1:] if len(text) > 1 else text
            for written in (
                mask,
                json.dumps(mask)[1:-1],
                ascii(mask)[1:-1],
            ):  # A template may write ASCII only.
                rendered = rendered.replace(written, shown)
        return rendered


def _twin(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Another tokenizer around the same model (its vocabulary is shared, not copied), without added
    tokens.
    """
    twin = tokenizers.Tokenizer(library.model)
    if library.normalizer is not None:
        twin.normalizer = library.normalizer
    if library.pre_tokenizer is not None:
        twin.pre_tokenizer = library.pre_tokenizer
    return twin


class ChatPrompts:
    """Makes the prompts of one model's chats. One object serves every request and thread."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, nonce: bytes) -> None:
        """`nonce` as in `Markers`."""
        self.template = template
        self._tokenizer = tokenizer
        sources = template.sources.values()
        self._markers = (
            Markers(tokenizer, written="\0".join(sources), read=_read(sources), nonce=nonce)
            if template.exists
            else None
        )
        self._outlines = template.outlines(nonce=nonce.hex())

    def of_texts(
        self,
        roles: Sequence[str],
        texts: Sequence[str],
        *,
        add_generation_prompt: bool = True,
        trusted: bool = False,
    ) -> tuple[int, ...] | None:
        """Token ids of messages that have these roles and texts and nothing else, where the template does not
        have to run for them; None: it does. They are the same as `token_ids` makes.
        """
        if (outlines := self._outlines) is None:
            return None
        text = outlines.prompt(roles, texts, add_generation_prompt=add_generation_prompt)
        if text is None:
            return None
        markers = None if trusted else self._markers
        if markers is not None and markers.occur(encoded(texts), texts):
            return None
        return self._tokenizer.encode(text)

    def token_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continues: bool = False,
        trusted: bool = False,
        may_block: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of messages of OpenAI's shape. `continues`: the prompt ends within the last message.

        Markers in their text are text, unless the sender is `trusted`.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, or takes too much for them.
            RanAway: the template has to run in a process of its own, and `may_block` is false.
        """
        values = _values(
            messages, tools, extra, add_generation_prompt=add_generation_prompt, continues=continues
        )
        markers, as_json = None if trusted else self._markers, encoded(values)

        def render(values: Mapping[str, Any]) -> str:
            text = self.template.render_values(values, num_bytes=len(as_json), may_block=may_block)
            return _up_to_mark(text) if continues else text

        try:
            if markers is None or not markers.occur(as_json, values):
                return self._tokenizer.encode(render(values))
            return markers.encode_apart(values, render)
        except RecursionError:
            raise InvalidRequest("the messages nest too deeply", param="messages") from None

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> str:
        """The text that the template makes of them; may block.

        Raises:
            InvalidRequest: as `token_ids`.
        """
        values = _values(
            messages, tools, extra, add_generation_prompt=add_generation_prompt, continues=continues
        )
        text = self.template.render_values(values)
        return _up_to_mark(text) if continues else text


def _values(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool,
    continues: bool,
) -> dict[str, Any]:
    """`template_values`; where the prompt ends within the last message, its end is marked."""
    values = template_values(messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra)
    if continues:
        _mark_end(values["messages"][-1])
    return values


def _mark_end(message: dict[str, Any]) -> None:
    """Mark where the text of a template's message ends."""
    if not message["content"]:
        raise InvalidRequest("the last message has no text to continue", param="continue_final_message")
    message["content"] += _END_OF_MESSAGE


def _up_to_mark(text: str) -> str:
    """The rendered text up to the end of the last message, as `continue_final_message` of transformers."""
    mark = _END_OF_MESSAGE.strip()
    before, found, behind = text.rpartition(mark)
    if not found:
        raise InvalidRequest(
            "the chat template does not show the last message as it is", param="continue_final_message"
        )
    return before if behind.startswith(" ") else before.rstrip()  # Such a template trims what it shows.


def _read(sources: Iterable[str]) -> set[str]:
    """The words that the templates look for in messages; of one that cannot be read here, nothing."""
    environment, found = template_environment(lambda: 0, chars_max=0), set[str]()
    for source in sources:
        if len(source) <= SOURCE_CHARS_MAX:
            try:
                found |= texts_read(environment.parse(source))
            except (jinja2.TemplateSyntaxError, RecursionError):
                continue
    return found

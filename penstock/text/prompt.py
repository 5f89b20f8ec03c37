"""From messages to token ids: a checkpoint's template, its tokenizer, and the line between the two kinds of
text.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jinja2

from penstock.errors import InvalidRequest
from penstock.text.chat import ChatTemplate, Message, encoded, template_values
from penstock.text.markers import Markers
from penstock.text.metered import SOURCE_CHARS_MAX
from penstock.text.sandbox import template_environment
from penstock.text.template_tree import texts_read
from penstock.text.tokenizer import Tokenizer


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

    def token_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        trusted: bool = False,
        may_block: bool = True,
    ) -> tuple[int, ...]:
        """Token ids of messages of OpenAI's shape.

        Markers in their text are text, unless the sender is `trusted`.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, or takes too much for them.
            RanAway: the template has to run in a process of its own, and `may_block` is false.
        """
        values = template_values(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
        )
        markers, as_json = None if trusted else self._markers, encoded(values)
        render = partial(self.template.render_values, num_bytes=len(as_json), may_block=may_block)
        try:
            if markers is None or not markers.occur(as_json, values):
                return self._tokenizer.encode(render(values))
            return markers.encode_apart(values, render)
        except RecursionError:
            raise InvalidRequest("the messages nest too deeply", param="messages") from None


def _read(sources: Iterable[str]) -> set[str]:
    """What the templates look for in messages; of one that cannot be read here, nothing."""
    environment, found = template_environment(lambda: 0, chars_max=0), set[str]()
    for source in sources:
        if len(source) <= SOURCE_CHARS_MAX:
            try:
                found |= texts_read(environment.parse(source))
            except (jinja2.TemplateSyntaxError, RecursionError):
                continue
    return found

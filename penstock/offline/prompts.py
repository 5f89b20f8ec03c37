"""Prompts in all the forms that a call takes them, and what a checkpoint makes of them: token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeGuard, TypeVar, cast

import jinja2
import msgspec

from penstock.clock import Clock
from penstock.errors import CheckpointError, InvalidRequest, Unsupported
from penstock.protocol.needs import MEDIA_TYPES
from penstock.protocol.openai import Message, ToolSpec
from penstock.protocol.openai_validate import check_messages, check_tools
from penstock.rng import fresh_key
from penstock.text.chat import ChatTemplate
from penstock.text.prompt import NONCE_BYTES, ChatPrompts
from penstock.text.tokenizer import Tokenizer

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
MessageLike = Mapping[str, Any]
"""OpenAI's: {"role": ..., "content": ...}."""
T = TypeVar("T")
_TEXT, _IDS = "prompt", "prompt_token_ids"
_TEMPLATE_OWN = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
})  # fmt: skip


class TextPrompt(TypedDict):
    """A prompt that is text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt that was tokenized, and perhaps its text."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


@dataclass(slots=True, frozen=True)
class PromptInput:
    """One that the engine can be given."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatOptions:
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    """In the place of the checkpoint's."""
    chat_template_kwargs: Mapping[str, Any] | None = None


class PromptMaker:
    """Makes the prompts of one checkpoint. One object serves every thread."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        """Read the checkpoint's tokenizer and chat template.

        Raises:
            CheckpointError: one of them cannot be read.
        """
        self.tokenizer = Tokenizer.load(directory)
        self.template = ChatTemplate.load(directory, wall_ns=clock.wall_ns)
        self._chats = self._chats_of(self.template)
        self._given: tuple[str, ChatPrompts] | None = None
        """The template that a call brought last."""

    def close(self) -> None:
        """End the processes of templates that do not run in ours, if there are any."""
        self.template.close()
        if self._given is not None:
            self._given[1].template.close()

    def _chats_of(self, template: ChatTemplate) -> ChatPrompts:
        return ChatPrompts(template, self.tokenizer, nonce=fresh_key(NONCE_BYTES))

    def _chats_by(self, source: str | None) -> ChatPrompts:
        """With the checkpoint's template, or with a call's own."""
        if source is None:
            return self._chats
        given = self._given
        if given is None or given[0] != source:
            try:
                made = self._chats_of(self.template.replaced(source))
            except (jinja2.TemplateSyntaxError, CheckpointError) as error:
                raise _wrong(str(error), "chat_template") from error
            # Another thread may still wait for the one before, whose process ends with its last reference.
            self._given = given = (source, made)
        return given[1]

    def plain(self, given: object) -> PromptInput:
        """One prompt.

        Raises:
            InvalidRequest: it is no prompt, or is empty.
        """
        text, token_ids = _read(given)
        if token_ids is None:
            assert text is not None, "it is one of the two"
            token_ids = self.tokenizer.encode(text, add_special_tokens=True)
        if not token_ids:
            raise _wrong("a prompt is empty", _TEXT if text is not None else _IDS)
        return PromptInput(text, token_ids)

    def pair(self, first: str, second: str) -> tuple[PromptInput, int]:
        """Two texts as one prompt, each tokenized by itself, and how many tokens the first has.

        Raises:
            InvalidRequest: one of them has no tokens.
        """
        before = self.tokenizer.encode(first, add_special_tokens=True)
        behind = self.tokenizer.encode(second, add_special_tokens=False)
        for text, token_ids, param in ((first, before, "text_1"), (second, behind, "text_2")):
            if not token_ids:
                raise _wrong(f"{text!r} has no tokens", param)
        return PromptInput(first + second, before + behind), len(before)

    def chat(self, messages: Sequence[MessageLike], options: ChatOptions) -> PromptInput:
        """A conversation, put through the checkpoint's template. May block: a template may have a process of
        its own.

        Raises:
            InvalidRequest: they are no messages, or the template refuses them.
            Unsupported: they hold what is no text.
        """
        token_ids = self._chats_by(options.chat_template).token_ids(**_arguments(messages, options))
        return PromptInput(self.tokenizer.decode(token_ids, skip_special_tokens=False), token_ids)

    def chat_text(self, messages: Sequence[MessageLike], options: ChatOptions) -> str:
        """The text that the template makes of a conversation. May block.

        Raises:
            InvalidRequest, Unsupported: as `chat`.
        """
        return self._chats_by(options.chat_template).text(**_arguments(messages, options))


def _arguments(messages: Sequence[MessageLike], options: ChatOptions) -> dict[str, Any]:
    """Those of `ChatPrompts`, checked."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance] - users may not check.
        raise _wrong(f"expected a list of messages, got {type(messages).__name__}", "messages")
    found: list[Message] = _converted(list(messages), list[Message], "messages")
    check_messages(found)
    for i, message in enumerate(found):
        if isinstance(message.content, list) and any(part.type in MEDIA_TYPES for part in message.content):
            raise Unsupported(f"messages[{i}] holds media: the engine reads text.", param="messages")
    tools = _converted(list(options.tools), list[ToolSpec], "tools") if options.tools else None
    check_tools(tools)
    extra = dict(options.chat_template_kwargs or {})
    if taken := sorted(_TEMPLATE_OWN & extra.keys()):
        raise _wrong(f"may not set '{taken[0]}'", "chat_template_kwargs")
    return {
        "messages": msgspec.to_builtins(found),
        "tools": [msgspec.to_builtins(tool) for tool in tools] if tools else None,
        "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
        "extra": extra or None,
        "continues": options.continue_final_message,
    }


def check_prompt(given: object) -> None:
    """Refuse what is no prompt, without making one of it.

    Raises:
        InvalidRequest: saying what was expected.
    """
    _read(given)


def is_one_prompt(given: object) -> bool:
    """Whether it is a single prompt, and not several."""
    return isinstance(given, (str, Mapping)) or _are_ids(given)


def is_one_chat(given: object) -> bool:
    """Whether it is a single conversation, and not several."""
    return isinstance(given, Sequence) and isinstance(
        next(iter(cast(Sequence[object], given)), None), Mapping
    )


def _are_ids(given: object) -> TypeGuard[Sequence[int]]:
    """An empty list is no prompt: it is no prompts."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        return False
    return isinstance(next(iter(cast(Sequence[object], given)), None), int)


def _read(given: object) -> tuple[str | None, tuple[int, ...] | None]:
    if isinstance(given, str):
        return given, None
    if isinstance(given, Mapping):
        return _read_mapping(cast(Mapping[str, Any], given))
    if _are_ids(given):
        return None, _ids(given)
    raise _wrong(
        f"expected text, token ids or a mapping with '{_TEXT}' or '{_IDS}', got {type(given).__name__}", _TEXT
    )


def _read_mapping(given: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    known = {_TEXT, _IDS}
    for name, value in given.items():
        if name not in known and value is not None:
            raise Unsupported(
                f"'{name}' of a prompt is not supported: the engine reads text.", param=str(name)
            )
    text, token_ids = given.get(_TEXT), given.get(_IDS)
    if text is not None and not isinstance(text, str):
        raise _wrong(f"expected text, got {type(text).__name__}", _TEXT)
    if token_ids is None and text is None:
        raise _wrong(f"the mapping has neither '{_TEXT}' nor '{_IDS}'", _TEXT)
    return text, None if token_ids is None else _ids(token_ids)


def _ids(given: Any) -> tuple[int, ...]:  # noqa: ANN401
    return tuple(_converted(given, list[int], _IDS))


def _converted(given: Any, kind: type[T], param: str) -> T:  # noqa: ANN401
    try:
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong(str(error).replace("`", "").replace("$", param), param) from None


def _wrong(why: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{param}': {why}.", param=param, code="invalid_value")

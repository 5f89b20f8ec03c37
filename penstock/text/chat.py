"""Chat templates: from messages and tools to the prompt text that the model was trained on.

Templates are Jinja2 programs in the checkpoint, so they run in Jinja's sandbox with the few extras that
Hugging Face's `apply_chat_template` gives them, and give the same text to the character. Those that are made
of steps with a price run here (sandbox.py), all others in a process of their own (`TemplateChild`;
template_worker.py is the other side). Token ids are not made here (prompt.py), and requests are assumed to be
of OpenAI's shape already.

That process has bounds on its time, its memory and its output. There is one for each checkpoint and gateway
process, started when it is first needed and again after it had to be ended. It renders one prompt at a time,
so a template that runs away keeps only requests for the same model waiting. Every call blocks: the gateway
makes them in a thread (gateway/models/prepare.py).
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from penstock.errors import CheckpointError, InvalidRequest
from penstock.models.files import has_file
from penstock.text.outline import Outlines, Unreadable, watch
from penstock.text.sandbox import REQUEST_BYTES_MAX, MeteredTemplate, RanAway, compile_metered
from penstock.text.template_tree import Unbounded
from penstock.text.template_worker import (
    BROKEN,
    FAILED,
    LENGTH,
    MESSAGE_CHARS_MAX,
    NO_MEMORY,
    OK,
    REFUSED,
    TOO_LONG,
)
from penstock.text.tokenizer import read_optional_object, read_text, token_string


@dataclass(slots=True, frozen=True)
class ChildLimits:
    """The bounds of one prompt."""

    cpu_s: float = 1.0
    """Processor time: a thousand times what a published template takes for a long chat."""
    wall_s: float = 30.0
    """Should the process be kept from its processor time."""
    memory_bytes: int = 256 * 1024 * 1024
    """Beyond what Python and Jinja take."""
    chars_max: int = 8 * 1024 * 1024
    """Of the prompt."""


class _Ended(Exception):
    """The process ended, or had to be."""


class TemplateChild:
    """The process, as its parent sees it."""

    def __init__(self, sources: Mapping[str, str], limits: ChildLimits, wall_ns: Callable[[], int]) -> None:
        self._start_frame: dict[str, Any] = {
            "sources": dict(sources), "cpu_s": limits.cpu_s, "memory_bytes": limits.memory_bytes,
            "chars_max": limits.chars_max,
        }  # fmt: skip
        self._limits, self._wall_ns = limits, wall_ns
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def check(self) -> None:
        """Start the process and compile the templates there.

        Raises:
            CheckpointError: they do not compile, or not within the limits.
        """
        with self._lock:
            self._running()

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """The prompt that the template of this name makes.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, or takes too much for them.
        """
        try:
            data = _encode({"name": name, "variables": variables, "now_ns": self._wall_ns()})
        except RecursionError:
            raise InvalidRequest("the messages nest too deeply", param="messages") from None
        with self._lock:
            try:
                self._send(self._running(), data)
                kind, text = self._answer()
            except (_Ended, CheckpointError) as error:
                raise InvalidRequest(f"the chat template {error}", param="messages") from error
            if kind in (TOO_LONG, NO_MEMORY):
                self._stop()  # Its state is not worth keeping.
        if kind == OK:
            return text
        if kind in (REFUSED, FAILED):
            fails = " fails on these messages" if kind == FAILED else ""
            raise InvalidRequest(f"the chat template{fails}: {text}", param="messages")
        raise InvalidRequest(f"the chat template {self._limit_of(kind)}", param="messages")

    def close(self) -> None:
        """End the process, whatever it does. A caller that waits for its answer gets none."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _limit_of(self, kind: bytes) -> str:
        limits = self._limits
        if kind == TOO_LONG:
            return f"makes a prompt over the bound of {limits.chars_max} characters"
        return f"takes more than {limits.memory_bytes // 2**20} MiB of memory for these messages"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        # It gets no secrets of ours, should a template find a way out of the sandbox.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.text.template_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)
        try:
            self._send(self._process, _encode(self._start_frame))
            kind, text = self._answer()
        except _Ended as error:
            raise CheckpointError(f"{error} while it was compiled") from error
        if kind == BROKEN:
            self._stop()
            raise CheckpointError(text)
        return self._process

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(LENGTH.pack(len(data)) + data)
            process.stdin.flush()
        except OSError as error:
            raise _Ended(self._why()) from error

    def _answer(self) -> tuple[bytes, str]:
        head = self._read(1 + LENGTH.size)
        (length,) = LENGTH.unpack(head[1:])
        if length > 4 * self._limits.chars_max:  # It is not believed, for who knows what runs there.
            self._stop()
            raise _Ended("writes too much")
        return head[:1], self._read(length).decode("utf-8", "surrogatepass")

    def _read(self, num_bytes: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, pieces, poll = self._process.stdout.fileno(), list[bytes](), select.poll()
        poll.register(descriptor, select.POLLIN)
        while num_bytes:
            if not poll.poll(self._limits.wall_s * 1000):
                self._stop()
                raise _Ended(f"took more than {self._limits.wall_s:g} s")
            piece = os.read(descriptor, min(num_bytes, 1 << 20))
            if not piece:
                raise _Ended(self._why())
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)

    def _why(self) -> str:
        """Why the process ended, which it did."""
        process = self._process
        self._stop()
        code = None if process is None else process.returncode
        if code == -signal.SIGPROF:
            return f"took more than {self._limits.cpu_s:g} s of processor time"
        return f"was ended (exit code {code})"

    def _stop(self) -> None:
        self._end()
        self._process = None


def _encode(frame: Mapping[str, Any]) -> bytes:
    return json.dumps(frame, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave neither a process nor a zombie behind."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # There is something left that it did not read.
                pipe.close()
    try:
        process.wait(0.2)  # It may be ending by itself: then its exit code says why.
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


PROMPT_CHARS_MAX = 32 * 1024 * 1024
"""Four times the default bound on a request's body: more is a template that runs away."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

USED_UP = "used up its allowance"

Message = Mapping[str, Any]


class ChatTemplate:
    """A checkpoint's template or templates. One object serves every request. Made by `load`."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        wall_ns: Callable[[], int],
        prompt_chars_max: int = PROMPT_CHARS_MAX,
        child_limits: ChildLimits = ChildLimits(),
    ) -> None:
        """Compile the named templates: "default", and perhaps "tool_use" for requests with tools.

        Raises:
            jinja2.TemplateSyntaxError: a template is no Jinja.
            CheckpointError: a template nests too deeply, or takes too much to be compiled.
        """
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._chars_max = prompt_chars_max
        self._here: dict[str, MeteredTemplate] = {}
        """Those that run in this process."""
        self.apart: dict[str, str] = {}
        """Why the others do not: a step without a price, or `USED_UP`."""
        for name, source in sources.items():
            try:
                self._here[name] = compile_metered(source, wall_ns, chars_max=prompt_chars_max)
            except Unbounded as reason:
                self.apart[name] = str(reason)
        self._wall_ns = wall_ns
        self._child = TemplateChild(sources, child_limits, wall_ns)
        if self.apart:
            self._child.check()

    @classmethod
    def load(
        cls, model_dir: Path, *, wall_ns: Callable[[], int], prompt_chars_max: int = PROMPT_CHARS_MAX
    ) -> "ChatTemplate":
        """Read the template from wherever this checkpoint has it; a base model has none.

        Raises:
            CheckpointError: a file is broken, or the template does not compile.
        """
        config = read_optional_object(model_dir / "tokenizer_config.json")
        named = read_optional_object(model_dir / "special_tokens_map.json") | config
        tokens = {key: token_string(named.get(key)) for key in SPECIAL_TOKENS}
        try:
            return cls(
                _sources(model_dir, config),
                special_tokens={key: token for key, token in tokens.items() if token is not None},
                wall_ns=wall_ns,
                prompt_chars_max=prompt_chars_max,
            )
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{model_dir}: the chat template, line {error.lineno}: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{model_dir}: the chat template {error}") from error

    def replaced(self, source: str) -> "ChatTemplate":
        """This template in the place of the checkpoint's, with its special tokens.

        Raises:
            jinja2.TemplateSyntaxError, CheckpointError: as the constructor.
        """
        tokens, wall_ns = self._special_tokens, self._wall_ns
        return ChatTemplate({"default": source}, special_tokens=tokens, wall_ns=wall_ns)

    @property
    def exists(self) -> bool:
        """Whether this checkpoint is a chat model at all."""
        return bool(self.sources)

    def runs_here(self, with_tools: bool) -> bool:
        """Whether rendering takes no more than the request's size allows, and so may be done on an event
        loop.
        """
        return not self.exists or self._name(with_tools) in self._here

    def why_apart(self, with_tools: bool) -> str | None:
        """Why the template never runs here; None: it does, unless the request is too large."""
        return self.apart.get(self._name(with_tools))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for these messages of OpenAI's shape. `extra` reaches the template as variables.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, or writes or takes too much.
        """
        values = template_values(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
        )
        return self.render_values(values)

    def render_values(
        self, values: Mapping[str, Any], *, num_bytes: int | None = None, may_block: bool = True
    ) -> str:
        """The prompt for what `template_values` made of a request, which takes about `num_bytes` as JSON.

        Raises:
            InvalidRequest: as `render`.
            RanAway: the template has to run in a process of its own, and `may_block` is false.
        """
        name, variables = self._name(bool(values.get("tools"))), {**self._special_tokens, **values}
        if num_bytes is None:
            num_bytes = len(encoded(variables))
        try:
            if (template := self._here.get(name)) is None:
                raise RanAway
            return template.render(variables, num_bytes=num_bytes, chars_max=self._chars_max)
        except RanAway:
            if num_bytes <= REQUEST_BYTES_MAX and self._here.pop(name, None):
                # It would run away again, so the time that it took here is spent once.
                self.apart[name] = USED_UP
            if not may_block:
                raise
        except jinja2.TemplateError as error:
            message = str(error.message)[:MESSAGE_CHARS_MAX]
            raise InvalidRequest(f"the chat template: {message}", param="messages") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Errors that a template's own expressions raise on messages that its author did not think of.
            raise InvalidRequest(
                f"the chat template fails on these messages: {str(error)[:MESSAGE_CHARS_MAX]}",
                param="messages",
            ) from error
        return self._child.render(name, variables)

    def outlines(self, *, nonce: str) -> Outlines | None:
        """The outlines of chats without tools; None: it does not run here, or cannot be followed."""
        if not self.exists or (name := self._name(with_tools=False)) not in self._here:
            return None
        words, tokens, chars_max = set[str](), self._special_tokens, self._chars_max
        try:
            watched = compile_metered(
                self.sources[name],
                self._wall_ns,
                chars_max=chars_max,
                change=lambda tree: words.update(watch(tree)),
            )
        except (Unbounded, Unreadable):
            return None

        def render(values: Mapping[str, Any]) -> str:
            return watched.render({**tokens, **values}, num_bytes=0, chars_max=chars_max)

        return Outlines(render, words, nonce=nonce, chars_max=chars_max)

    def close(self) -> None:
        """End the process of templates that do not run here, if there is one."""
        self._child.close()

    def _name(self, with_tools: bool) -> str:
        if not self.sources:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        if with_tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))


def template_values(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A request's values for a template, in the shapes that templates expect.

    Raises:
        InvalidRequest: a part of a message is not text.
    """
    return {
        "messages": [_plain(message) for message in messages],
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **(extra or {}),
    }


def encoded(values: Mapping[str, Any] | Sequence[str]) -> bytes:
    """The request's values, or texts, as JSON.

    Raises:
        InvalidRequest: they nest too deeply.
    """
    try:
        return msgspec.json.encode(values)
    except (UnicodeEncodeError, OverflowError):  # A lone surrogate, or an integer of more than 64 bits.
        return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise InvalidRequest("the messages nest too deeply", param="messages") from None


def _sources(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. The newer files win over tokenizer_config.json, as in Hugging Face's loaders."""
    found: dict[str, str] = {}
    inline: Any = config.get("chat_template")
    if isinstance(inline, str):
        found["default"] = inline
    elif inline is not None:
        try:
            found = {str(entry["name"]): str(entry["template"]) for entry in inline}
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{model_dir / 'tokenizer_config.json'}: chat_template is neither a string nor a list of "
                "objects with name and template"
            ) from error
    legacy = read_optional_object(model_dir / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    if has_file(path := model_dir / "chat_template.jinja"):
        found["default"] = read_text(path)
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path)
    return found


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it, which is not quite what OpenAI's API sends.

    Text parts become one string and the arguments of a tool call an object; templates write
    them out again in the model's own way. Earlier reasoning has one name.
    """
    plain = dict(message)
    if (reasoning := plain.pop("reasoning", None)) is not None:
        plain.setdefault("reasoning_content", reasoning)
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif isinstance(content, list):
        plain["content"] = "\n".join(_part_text(part) for part in content)  # pyright: ignore[reportUnknownVariableType]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _part_text(part: Any) -> str:  # noqa: ANN401
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return text
    raise InvalidRequest(
        "this model reads text only: every content part must be of type text", param="messages"
    )


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model wrote it and the client sends it back: what is no JSON is shown to the model as it was.
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
    return {**call, "function": function}

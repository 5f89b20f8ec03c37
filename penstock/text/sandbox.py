"""Jinja's sandbox with what chat templates expect of it, and nothing through which they could get out.

Templates come with a checkpoint and are not trusted. What is offered, and what is closed, follows
`transformers`' `chat_template_utils`, so that every template that works there works here.
"""

import json
from collections.abc import Callable, MutableMapping
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training and does nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


_DICT_NAMES = frozenset(dir(dict))


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which besides refuses to multiply text beyond the bound on a prompt."""

    intercepted_binops = frozenset(("*", "**"))
    chars_max = 0

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        """One flat dict instead of a chain of them, since all there are is known before a template is."""
        return {**self.globals, **(d or {})}  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401
        """As Jinja's, without the search for an attribute that a message or a tool cannot have."""
        if type(obj) is dict and attribute not in _DICT_NAMES:  # pyright: ignore[reportUnknownArgumentType]
            try:
                return obj[attribute]  # pyright: ignore[reportUnknownVariableType]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)  # pyright: ignore[reportUnknownArgumentType]
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """As Jinja's. A macro is made of the template's own code, so there is nothing to ask about it."""
        if type(obj) is not Macro:
            return super().call(context, obj, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        return obj(context.eval_ctx, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Refuse what could fill the memory in one expression."""
        if operator == "**" and not (isinstance(left, (int, float)) and abs(left) <= 64 and abs(right) <= 64):
            raise SecurityError("a chat template may not raise large numbers to a power")
        for sequence, times in ((left, right), (right, left)):
            size = len(sequence) if isinstance(sequence, (str, list, tuple)) else 0  # pyright: ignore[reportUnknownArgumentType]
            if isinstance(times, int) and size * times > self.chars_max:
                raise SecurityError("a chat template may not multiply text beyond the bound on a prompt")
        return super().call_binop(context, operator, left, right)


class _Dict:
    """`dict` for templates: makes dicts, and is no way into Python's types."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` for templates, closed to names with an underscore in front."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        attributes: dict[str, Any] = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store the private name {name!r}")


def template_environment(wall_ns: Callable[[], int], *, chars_max: int) -> SandboxedEnvironment:
    """Everything that `transformers` gives a template, on the given wall clock (nanoseconds since 1970)."""

    def strftime_now(pattern: str) -> str:
        return datetime.fromtimestamp(wall_ns() / 1e9).strftime(pattern)

    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.chars_max = chars_max
    environment.filters.update(tojson=_tojson)  # pyright: ignore[reportUnknownMemberType]
    environment.globals.update(  # pyright: ignore[reportUnknownMemberType]
        raise_exception=_raise_exception, strftime_now=strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

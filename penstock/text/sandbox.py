"""The bounds of chat templates, which are programs that come with a checkpoint and are not trusted.

Jinja's sandbox has what templates expect of it, and nothing through which they could get out: what is
offered, and what is closed, follows `transformers`' `chat_template_utils`, so that every template that works
there works here.

A template that runs in the gateway's own process pays for every step out of an allowance. `compile_metered`
reads its syntax tree (template_tree.py): if it is made of nothing but steps whose cost can be read off
their operands, each loop, copy and call is rewritten to charge that cost before it happens. The allowance
grows with the request alone, so no template and no request can keep the process for long or fill its
memory. Any other template, and one that used its allowance up, runs in a process of its own
(`TemplateChild` in chat.py).
"""

import json
import threading
from collections.abc import Callable, Mapping, MutableMapping
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from penstock.errors import InvalidRequest
from penstock.text.template_tree import Unbounded, rewrite


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


SOURCE_CHARS_MAX = 64 * 1024
"""The longest published templates have about 20,000 characters. Longer ones are not even parsed here."""
ALLOWANCE = 200_000
"""Units for any request: one is about a node of the syntax tree evaluated, or 64 characters copied; 0.1
us."""
ALLOWANCE_PER_BYTE = 8
REQUEST_BYTES_MAX = 256 * 1024
"""Larger requests are rendered in the child, so that what one step may allocate is bounded as well."""
_CHARS_SHIFT = 6
_INT_BITS_MAX = 4096


class RanAway(Exception):
    """The template wants more than its allowance, or something that cannot be priced."""


class _Meter(threading.local):
    """The budget left to the template that runs in this thread."""

    left = -1
    """Less than nothing while none runs: Jinja folds constants while it compiles, and what is metered is left
    for later."""

    def begin(self, num_bytes: int) -> None:
        self.left = ALLOWANCE + ALLOWANCE_PER_BYTE * num_bytes

    def charge(self, units: int) -> None:
        left = self.left - units
        if left < 0:
            raise RanAway
        self.left = left


class MeteredTemplate:
    """A compiled template whose every step is charged. One object serves every request and thread."""

    def __init__(self, template: Template, meter: _Meter) -> None:
        self._template, self._meter = template, meter

    def render(self, variables: Mapping[str, Any], *, num_bytes: int, chars_max: int) -> str:
        """The prompt; `num_bytes` is the request's size.

        Raises:
            RanAway: the allowance does not suffice.
            InvalidRequest: the prompt would be longer than `chars_max`.
        """
        if num_bytes > REQUEST_BYTES_MAX:
            raise RanAway
        meter, pieces, room = self._meter, list[str](), chars_max
        meter.begin(num_bytes)
        try:
            for piece in self._template.generate(variables):
                room -= len(piece)
                if room < 0:
                    raise too_long(chars_max)
                meter.charge(len(piece) >> _CHARS_SHIFT)
                pieces.append(piece)
        finally:
            meter.left = -1
        return "".join(pieces)


def too_long(chars_max: int) -> InvalidRequest:
    """A prompt over its bound."""
    return InvalidRequest(f"the prompt is over the bound of {chars_max} characters", param="messages")


def compile_metered(
    source: str,
    wall_ns: Callable[[], int],
    *,
    chars_max: int,
    change: Callable[[nodes.Template], object] | None = None,
) -> MeteredTemplate:
    """Compile a template to be run here, after that `change` of its syntax tree.

    Raises:
        Unbounded: it has to run in a process of its own; the message says why.
        jinja2.TemplateSyntaxError: it is no Jinja.
    """
    if len(source) > SOURCE_CHARS_MAX:
        raise Unbounded(f"has {len(source)} characters")
    meter = _Meter()
    environment = template_environment(wall_ns, chars_max=chars_max)
    environment.intercepted_binops = frozenset()  # The charges below take their place, and are cheaper.
    environment.optimized = False
    environment.filters.update(_charges(meter))  # pyright: ignore[reportUnknownMemberType]
    try:
        tree = environment.parse(source)
        if change is not None:
            change(tree)
        rewrite(tree)
        tree.set_environment(environment)
        return MeteredTemplate(environment.from_string(tree), meter)
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise Unbounded("nests too deeply") from error


def _charges(meter: _Meter) -> dict[str, Callable[..., Any]]:
    """The filters that template_tree.py puts around operands. Their names cannot be written in a template."""
    charge = meter.charge

    def deep(value: Any) -> Any:  # noqa: ANN401
        """About to be written out or compared, or just put together by the template, down to its leaves."""
        if type(value) is str:
            charge(len(value) >> _CHARS_SHIFT)
        else:
            charge(measure(value, meter.left))
        return value

    def indented(value: Any, indent: int | None) -> Any:  # noqa: ANN401
        """About to be written out as JSON, `indent` spaces for each level."""
        charge(measure(value, meter.left, indent or 0))
        return value

    def flat(value: Any) -> Any:  # noqa: ANN401
        """About to be copied or searched: characters or items, not what is in the items."""
        if type(value) is str:
            charge(len(value) >> _CHARS_SHIFT)
        elif isinstance(value, (list, dict, tuple, range)):
            charge(len(value))  # pyright: ignore[reportUnknownArgumentType]
        return value  # pyright: ignore[reportUnknownVariableType]

    def grow(value: Any, factor: int) -> Any:  # noqa: ANN401
        """About to become a text up to `factor` times as long."""
        if isinstance(value, str):
            charge((len(value) * factor) >> _CHARS_SHIFT)
            return value
        return flat(value)

    def scan(value: Any) -> Any:  # noqa: ANN401
        """About to be asked whether something is in it."""
        return value if isinstance(value, dict) else deep(value)  # pyright: ignore[reportUnknownVariableType]

    def loop(value: Any, weight: int) -> Any:  # noqa: ANN401
        """About to be walked over by a loop whose body has `weight` nodes."""
        if not isinstance(value, (str, list, dict, tuple, range, Undefined)):
            # Another filter's iterator. Its items are in memory, and were paid for, already.
            value = list(value)
        charge(len(value) * weight)  # pyright: ignore[reportUnknownArgumentType]
        return value  # pyright: ignore[reportUnknownVariableType]

    def step(weight: int) -> None:
        """A macro of this many nodes begins."""
        charge(weight)

    def kept(value: Any) -> Any:  # noqa: ANN401
        """About to become a namespace's attribute.

        A value that could be called by another name, or hold itself, may not.
        """
        if isinstance(value, Namespace) or (callable(value) and not isinstance(value, Undefined)):
            raise RanAway
        return value

    def join(value: Any, separator: str = "") -> str:  # noqa: ANN401
        """Jinja's filter without `attribute`."""
        parts: list[str] = []
        for item in value:
            parts.append(item if type(item) is str else str(deep(item)))
            charge(1 + ((len(parts[-1]) + len(separator)) >> _CHARS_SHIFT))
        return separator.join(parts)

    return {
        "charge:deep": deep, "charge:indented": indented, "charge:flat": flat, "charge:grow": grow,
        "charge:scan": scan, "charge:loop": loop, "charge:step": step,
        "charge:kept": kept, "charge:join": join, **_operators(meter, deep),
    }  # fmt: skip


def _operators(meter: _Meter, deep: Callable[[Any], Any]) -> dict[str, Callable[..., Any]]:
    """`+`, `~`, `*` and `%`."""
    charge = meter.charge

    def add(*operands: Any) -> Any:  # noqa: ANN401
        if all(type(each) is str for each in operands):
            charge(sum(map(len, operands)) >> _CHARS_SHIFT)
            return "".join(operands)
        result = operands[0]
        for each in operands[1:]:
            result = pair(result, each)
        return result

    def pair(left: Any, right: Any) -> Any:  # noqa: ANN401
        if isinstance(left, str) and isinstance(right, str):
            charge(len(left) + 5 * len(right))  # Text that was marked as safe escapes the other.
            return left + right
        if not isinstance(left, (list, tuple)):
            return left + right
        if isinstance(right, (list, tuple)):
            charge(len(left) + len(right))  # pyright: ignore[reportUnknownArgumentType]
        return deep(left + right)  # pyright: ignore[reportUnknownVariableType, reportOperatorIssue, reportUnknownArgumentType]

    def concat(*operands: Any) -> str:  # noqa: ANN401
        return "".join([str(deep(each)) for each in operands])

    def multiply(left: Any, right: Any) -> Any:  # noqa: ANN401
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                size = len(value) if isinstance(value, str) else measure(value, meter.left)  # pyright: ignore[reportUnknownArgumentType]
                charge(size * max(times, 0))
            elif isinstance(value, int) and value.bit_length() > _INT_BITS_MAX:
                raise RanAway
        return left * right

    def modulo(left: Any, right: Any) -> Any:  # noqa: ANN401
        if not isinstance(left, (int, float)):
            raise RanAway  # It formats text, to any width.
        return left % right

    return {
        "charge:add": add, "charge:concat": concat, "charge:multiply": multiply, "charge:modulo": modulo,
    }  # fmt: skip


def measure(value: Any, units_max: int, indent: int = 0) -> int:  # noqa: ANN401
    """Units of a value with all that it holds, counting what it holds twice twice; `indent` columns for each
    level.

    Raises:
        RanAway: more than `units_max`, or something that is not data.
    """
    units, level = 0, [value]
    depth = 0
    while level:
        below: list[Any] = []
        units += len(level) * (1 + (depth * indent >> _CHARS_SHIFT))
        for each in level:
            if isinstance(each, str):
                units += len(each) >> _CHARS_SHIFT
            elif isinstance(each, dict):
                below += each.keys()  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
                below += each.values()  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
            elif isinstance(each, (list, tuple)):
                below += each  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(each, range):
                units += len(each)
            elif isinstance(each, Namespace) or (callable(each) and not isinstance(each, Undefined)):
                raise RanAway
            if units + len(below) > units_max:
                raise RanAway
        level, depth = below, depth + 1
    return units

"""What has a price in a chat template: functions, filters, tests and methods, and what they may be given.

"Free" takes a step, "flat" a walk over the operand's characters or items, "deep" one over all that it holds.
"""

from collections.abc import Sequence

from jinja2 import nodes

CONST_CHARS_MAX = 64
"""Of the constants that a call may put in place of others."""
INDENT_MAX = 4
FUNCTIONS = frozenset({"namespace", "range", "raise_exception", "strftime_now"})
NEVER = frozenset({"cycler", "dict", "joiner", "lipsum", "self", "super", "caller", "varargs", "kwargs"})
"""Names of what Jinja offers and no chat template needs."""
TESTS = frozenset({
    "boolean", "defined", "divisibleby", "eq", "equalto", "even", "false", "float", "ge", "gt", "integer",
    "iterable", "le", "lt", "mapping", "ne", "none", "number", "odd", "sameas", "sequence", "string", "true",
    "undefined", "==", "!=", "<", "<=", ">", ">=",
})  # fmt: skip
FREE_FILTERS = frozenset({"abs", "count", "d", "default", "first", "float", "int", "last", "length"})
FLAT_FILTERS = frozenset({
    "capitalize", "e", "escape", "indent", "items", "list", "lower", "replace", "reverse", "round", "safe",
    "title", "trim", "upper",
})  # fmt: skip
DEEP_FILTERS = frozenset({
    "dictsort", "map", "reject", "rejectattr", "select", "selectattr", "string", "tojson",
})  # fmt: skip
_MAPPED = frozenset({"capitalize", "int", "length", "lower", "string", "title", "tojson", "trim", "upper"})
FREE_METHODS = frozenset({"endswith", "get", "items", "keys", "startswith", "values"})
FLAT_METHODS = frozenset({
    "capitalize", "count", "find", "index", "isalnum", "isalpha", "isdigit", "isspace", "lower", "lstrip",
    "removeprefix", "removesuffix", "replace", "rfind", "rsplit", "rstrip", "split", "splitlines", "strip",
    "title", "upper",
})  # fmt: skip
READING_METHODS = frozenset({"find", "index", "removeprefix", "removesuffix", "replace", "rsplit", "split"})
"""What takes something out of a text, or looks for it there."""
CONST_ARGS = frozenset({"indent", "lstrip", "replace", "rstrip", "strip", "trim"})
"""Take constants only: with others their cost, or their result, is a product of two sizes."""


def growth(name: str, args: Sequence[nodes.Expr]) -> int:
    """How many times its operand's size the filter or method `name` takes, or gives, at most."""
    if name == "replace":
        old, new = (str(_value(each)) for each in args[:2])
        return -(-len(new) // len(old)) if old else len(new) + 1
    # What becomes a list takes an object for each of its items.
    return {"indent": INDENT_MAX + 1, "e": 5, "escape": 5, "list": 64, "rsplit": 16, "split": 16}.get(name, 1)


def is_short(node: nodes.Expr) -> bool:
    """A constant of at most `CONST_CHARS_MAX`."""
    if not isinstance(node, nodes.Const):
        return False
    return not isinstance(node.value, str) or len(node.value) <= CONST_CHARS_MAX


def has_price(name: str, args: Sequence[nodes.Expr], kwargs: dict[str, nodes.Expr]) -> bool:
    """Whether a filter's cost, with these arguments, is that of walking over its operand."""
    given = (*args, *kwargs.values())
    if name == "tojson":
        indents = _is_indent(kwargs.get("indent", nodes.Const(None)))
        return indents and not args and all(map(_is_separator, given))
    if name in ("indent", "round"):
        return all(map(_is_indent, given))
    if name == "replace":
        return len(args) >= 2 and not kwargs
    if name == "map":
        by_attribute = not args and set(kwargs) <= {"attribute", "default"}
        return by_attribute or (len(args) == 1 and not kwargs and _value(args[0]) in _MAPPED)
    if name in ("select", "reject"):
        return not kwargs and (not args or _value(args[0]) in TESTS) and all(map(is_short, args))
    if name in ("selectattr", "rejectattr"):
        asked = not args[1:] or _value(args[1]) in TESTS
        return bool(args) and not kwargs and asked and all(map(is_short, args[2:]))
    return name in FREE_FILTERS | FLAT_FILTERS | DEEP_FILTERS


def _is_indent(node: nodes.Expr) -> bool:
    """A small width, a switch or nothing."""
    value = _value(node)
    small = isinstance(value, int) and value <= INDENT_MAX
    return isinstance(node, nodes.Const) and (small or value is None)


def _is_separator(node: nodes.Expr) -> bool:
    return all(map(is_short, node.items)) if isinstance(node, nodes.Tuple) else is_short(node)


def _value(node: nodes.Expr) -> object:
    return node.value if isinstance(node, nodes.Const) else None

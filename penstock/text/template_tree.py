"""Whether each step of a template has a price, and where it is paid: a walk over Jinja's syntax tree.

An operation that is not listed here has no price: the template then runs in a process of its own, whatever
else it does. So a filter that pads (`center`), a format with widths (`%`), or whatever a later Jinja may
bring, is not overlooked.

The operations that have a price in a chat template: functions, filters, tests and methods, and what they may
be given.

"Free" takes a step, "flat" a walk over the operand's characters or items, "deep" one over all that it holds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

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
"""Methods that take something out of a text, or look for it there."""
CONST_ARGS = frozenset({"indent", "lstrip", "replace", "rstrip", "strip", "trim"})
"""Take constants only: with others their cost, or their result, is a product of two sizes."""


def growth(name: str, args: Sequence[nodes.Expr]) -> int:
    """How many times its operand's size the filter or method `name` takes, or gives, at most."""
    if name == "replace":
        old, new = (str(_value(each)) for each in args[:2])
        return -(-len(new) // len(old)) if old else len(new) + 1
    # A text that becomes a list takes an object for each of its items.
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


DEPTH_MAX = 60
"""Published templates nest about 20 deep."""


class Unbounded(Exception):
    """The template has a step without a price; the message names it."""


def rewrite(tree: nodes.Template) -> None:
    """Put the charges of sandbox.py into the tree.

    Raises:
        Unbounded: it has a step without a price.
    """
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    _Walk(macros).template(tree)


def texts_read(tree: nodes.Template) -> set[str]:
    """Constants that the template looks for in texts, or takes out of them."""
    readers: list[nodes.Node] = list(tree.find_all(nodes.Compare))
    readers += [each for filtered in tree.find_all(nodes.Filter) for each in filtered.args]
    readers += [
        call
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Getattr) and call.node.attr in READING_METHODS
    ]
    found = (const.value for reader in readers for const in reader.find_all(nodes.Const))
    return {value for value in found if isinstance(value, str)}


class _Walk:
    """One template's walk. `self._count` counts the nodes of the innermost loop or macro."""

    def __init__(self, macros: set[str]) -> None:
        self._macros, self._callable = macros, macros | FUNCTIONS
        self._count = self._depth = self._captures = 0
        self._statements: dict[type[nodes.Node], Callable[[Any], None]] = {
            nodes.Output: self._output,
            nodes.If: self._if,
            nodes.For: self._for,
            nodes.Assign: self._assign,
            nodes.AssignBlock: self._assign_block,
            nodes.Macro: self._macro,
            nodes.With: self._with,
            nodes.Scope: lambda node: self.body(node.body),
            nodes.Break: lambda node: None,
            nodes.Continue: lambda node: None,
        }
        self._expressions: dict[type[nodes.Node], Callable[[Any], nodes.Expr]] = {
            nodes.Name: self._name,
            nodes.Const: lambda node: node,
            nodes.TemplateData: self._data,
            nodes.Getattr: self._getattr,
            nodes.Getitem: self._getitem,
            nodes.Slice: self._slice,
            nodes.Call: self._call,
            nodes.Filter: self._filter,
            nodes.Test: self._test,
            nodes.Compare: self._compare,
            nodes.CondExpr: self._cond,
            nodes.Concat: lambda node: _charge("concat", *self._all(node.nodes)),
            nodes.Add: self._add,
            nodes.Mul: lambda node: _charge("multiply", self.expr(node.left), self.expr(node.right)),
            nodes.Mod: self._mod,
            nodes.List: self._literal,
            nodes.Tuple: self._literal,
            nodes.Dict: self._dict,
            **dict.fromkeys((nodes.And, nodes.Or, nodes.Sub, nodes.Div, nodes.FloorDiv), self._two),
            **dict.fromkeys((nodes.Not, nodes.Neg, nodes.Pos), self._one),
        }

    def template(self, tree: nodes.Template) -> None:
        """Walk over all of it."""
        self.body(tree.body)

    def body(self, statements: Iterable[nodes.Node]) -> None:
        """Statements one after the other."""
        for node in statements:
            self._down(self._statements, node)

    def expr(self, node: nodes.Node) -> nodes.Expr:
        """The node in the place of an expression."""
        return self._down(self._expressions, node)

    def _down(self, kinds: dict[type[nodes.Node], Callable[[Any], Any]], node: nodes.Node) -> Any:  # noqa: ANN401
        known = kinds.get(type(node))
        if known is None:
            raise Unbounded(f"line {node.lineno}: {type(node).__name__}")
        if self._depth >= DEPTH_MAX:
            raise Unbounded(f"line {node.lineno}: nests more than {DEPTH_MAX} deep")
        self._count += 1
        self._depth += 1
        try:
            return known(node)
        finally:
            self._depth -= 1

    def _all(self, given: Sequence[nodes.Expr]) -> list[nodes.Expr]:
        return [self.expr(each) for each in given]

    def _maybe(self, node: nodes.Node | None) -> nodes.Expr | None:
        return None if node is None else self.expr(node)

    # --- statements ------------------------------------------------------------------------------

    def _output(self, node: nodes.Output) -> None:
        written = self._all(node.nodes)
        if self._captures:  # Text at the top is charged where it arrives.
            written = [_charge("deep", each) if _varies(each) else each for each in written]
        node.nodes = written

    def _if(self, node: nodes.If) -> None:
        node.test = self.expr(node.test)
        self.body(node.body)
        self.body(node.elif_)
        self.body(node.else_)

    def _for(self, node: nodes.For) -> None:
        if node.recursive:
            raise Unbounded(f"line {node.lineno}: a recursive loop")
        self._target(node.target)
        iterated = self.expr(node.iter)
        before, self._count = self._count, 1
        node.test = self._maybe(node.test)
        self.body(node.body)
        weight, self._count = self._count, before
        node.iter = _charge("loop", iterated, nodes.Const(weight))
        self.body(node.else_)

    def _assign(self, node: nodes.Assign) -> None:
        self._target(node.target)
        node.node = self.expr(node.node)
        if isinstance(node.target, nodes.NSRef):
            node.node = _charge("kept", node.node)

    def _assign_block(self, node: nodes.AssignBlock) -> None:
        self._target(node.target)
        if node.filter is not None:
            raise Unbounded(f"line {node.lineno}: a filter over a block")
        self._captured(node.body)

    def _macro(self, node: nodes.Macro) -> None:
        for name in node.args:
            self._target(name)
        node.defaults = self._all(node.defaults)
        before, self._count = self._count, 1
        self._captured(node.body)
        weight, self._count = self._count, before
        pay = nodes.ExprStmt(_charge("step", nodes.Const(weight)), lineno=node.lineno)
        node.body.insert(0, pay)

    def _captured(self, statements: Iterable[nodes.Node]) -> None:
        self._captures += 1
        self.body(statements)
        self._captures -= 1

    def _with(self, node: nodes.With) -> None:
        for target in node.targets:
            self._target(target)
        node.values = self._all(node.values)
        self.body(node.body)

    def _target(self, node: nodes.Node) -> None:
        """The target of an assignment. A name that is called somewhere must stay what it is."""
        if isinstance(node, nodes.Tuple):
            for each in node.items:
                self._target(each)
        elif isinstance(node, nodes.Name):
            if node.name in self._callable or node.name in NEVER:
                raise Unbounded(f"line {node.lineno}: {node.name} is assigned to")
        elif not isinstance(node, nodes.NSRef):
            raise Unbounded(f"line {node.lineno}: {type(node).__name__} is assigned to")

    # --- expressions -----------------------------------------------------------------------------

    def _name(self, node: nodes.Name) -> nodes.Expr:
        if node.name in FUNCTIONS or node.name in NEVER:
            raise Unbounded(f"line {node.lineno}: {node.name}")
        return node

    def _data(self, node: nodes.TemplateData) -> nodes.Expr:
        self._count += len(node.data) // CONST_CHARS_MAX
        return node

    def _getattr(self, node: nodes.Getattr) -> nodes.Expr:
        node.node = self.expr(node.node)
        return node

    def _getitem(self, node: nodes.Getitem) -> nodes.Expr:
        node.node, node.arg = self.expr(node.node), self.expr(node.arg)
        if isinstance(node.arg, nodes.Slice):
            node.node = _charge("flat", node.node)
        return node

    def _slice(self, node: nodes.Slice) -> nodes.Expr:
        node.start, node.stop, node.step = map(self._maybe, (node.start, node.stop, node.step))
        return node

    def _call(self, node: nodes.Call) -> nodes.Expr:
        self._arguments(node)
        callee = node.node
        if isinstance(callee, nodes.Name) and callee.name in self._callable:
            if callee.name == "namespace":
                if node.args:
                    raise Unbounded(f"line {node.lineno}: a namespace of another object")
                for given in node.kwargs:
                    given.value = _charge("kept", given.value)
            if callee.name == "strftime_now" and not all(map(is_short, node.args)):
                raise Unbounded(f"line {node.lineno}: a date format that varies")
            return node
        if not isinstance(callee, nodes.Getattr) or callee.attr not in FREE_METHODS | FLAT_METHODS:
            raise Unbounded(f"line {node.lineno}: a call of {getattr(callee, 'attr', 'a value')}")
        if callee.attr in CONST_ARGS and not all(map(is_short, node.args)):
            raise Unbounded(f"line {node.lineno}: {callee.attr} with what varies")
        if callee.attr == "replace" and (len(node.args) < 2 or node.kwargs):
            raise Unbounded(f"line {node.lineno}: replace with names")
        callee.node = self.expr(callee.node)
        if callee.attr in FLAT_METHODS:
            callee.node = _grown(callee.attr, callee.node, node.args)
        return node

    def _arguments(self, node: nodes.Call | nodes.Filter | nodes.Test) -> None:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Unbounded(f"line {node.lineno}: a call with * or **")
        node.args = self._all(node.args)
        for given in cast(Sequence[nodes.Keyword], node.kwargs):
            given.value = self.expr(given.value)

    def _filter(self, node: nodes.Filter) -> nodes.Expr:
        self._arguments(node)
        if node.node is None:
            raise Unbounded(f"line {node.lineno}: a filter over a block")
        node.node = self.expr(node.node)
        name, kwargs = (
            node.name,
            {each.key: each.value for each in cast(Sequence[nodes.Keyword], node.kwargs)},
        )
        if name == "join" and not kwargs and len(node.args) <= 1 and all(map(is_short, node.args)):
            return _charge("join", node.node, *node.args)
        if name in CONST_ARGS and not all(map(is_short, (*node.args, *kwargs.values()))):
            raise Unbounded(f"line {node.lineno}: {name} with what varies")
        if not has_price(name, node.args, kwargs):
            raise Unbounded(f"line {node.lineno}: the filter {name}")
        if "indent" in kwargs:
            node.node = _charge("indented", node.node, kwargs["indent"])
        elif name in DEEP_FILTERS:
            node.node = _charge("deep", node.node)
        elif name in FLAT_FILTERS:
            node.node = _grown(name, node.node, node.args)
        return node

    def _test(self, node: nodes.Test) -> nodes.Expr:
        self._arguments(node)
        if node.name not in ("defined", "undefined") or not isinstance(node.node, nodes.Name):
            node.node = self.expr(node.node)  # Any name may be asked for.
        if node.name == "in":
            node.args = [_charge("scan", each) if _varies(each) else each for each in node.args]
        elif node.name not in TESTS:
            raise Unbounded(f"line {node.lineno}: the test {node.name}")
        elif any(map(_varies, node.args)):
            node.node = _charge("deep", node.node)
        return node

    def _compare(self, node: nodes.Compare) -> nodes.Expr:
        node.expr = self.expr(node.expr)
        for operand in node.ops:
            operand.expr = self.expr(operand.expr)
            if operand.op in ("in", "notin"):
                if _varies(operand.expr):
                    operand.expr = _charge("scan", operand.expr)
            elif _varies(operand.expr) and _varies(node.expr):
                operand.expr = _charge("deep", operand.expr)
        return node

    def _cond(self, node: nodes.CondExpr) -> nodes.Expr:
        node.test, node.expr1 = self.expr(node.test), self.expr(node.expr1)
        node.expr2 = self._maybe(node.expr2)
        return node

    def _add(self, node: nodes.Add) -> nodes.Expr:
        """A chain of them is one step, however long."""
        chain: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            chain.append(left.right)
            left = left.left
        return _charge("add", *self._all([left, *reversed(chain)]))

    def _mod(self, node: nodes.Mod) -> nodes.Expr:
        if isinstance(node.left, nodes.Const) and isinstance(node.left.value, str):
            raise Unbounded(f"line {node.lineno}: a format with %")
        return _charge("modulo", self.expr(node.left), self.expr(node.right))

    def _literal(self, node: nodes.List | nodes.Tuple) -> nodes.Expr:
        node.items = self._all(node.items)
        return _charge("deep", node) if any(map(_varies, node.items)) else node

    def _dict(self, node: nodes.Dict) -> nodes.Expr:
        for pair in node.items:
            pair.key, pair.value = self.expr(pair.key), self.expr(pair.value)
        varies = any(_varies(each) for pair in node.items for each in (pair.key, pair.value))
        return _charge("deep", node) if varies else node

    def _two(self, node: nodes.BinExpr) -> nodes.Expr:
        node.left, node.right = self.expr(node.left), self.expr(node.right)
        return node

    def _one(self, node: nodes.UnaryExpr) -> nodes.Expr:
        node.node = self.expr(node.node)
        return node


def _charge(name: str, first: nodes.Expr, *rest: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(first, f"charge:{name}", list(rest), [], None, None, lineno=first.lineno)


def _grown(name: str, operand: nodes.Expr, args: Sequence[nodes.Expr]) -> nodes.Expr:
    factor = growth(name, args)
    return _charge("grow", operand, nodes.Const(factor)) if factor > 1 else _charge("flat", operand)


def _varies(node: nodes.Expr) -> bool:
    """Whether its size is not the template's own."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return any(map(_varies, node.items))
    return not isinstance(node, (nodes.Const, nodes.TemplateData))

"""Outlines: prompts of which all but the texts of messages is known.

Most templates put the text of a message somewhere and do not look at it. So the prompts of two chats with the
same roles differ in those texts only, and the second needs no template: its texts are put into the `Outline`
that the first one had.

That a template does not look is not guessed. `watch` reads its syntax tree for where texts may flow to, and
puts an error in the place of every operation that reads one: compares it, counts its characters, changes it.
If the template, changed in that way, renders a chat whose texts are names made here, then it came to its end
by a way that does not depend on texts, so it goes the same way with any others, and the result says where
they go. Three ways of reading are let pass, because they give the same for every text that `Outlines.prompt`
takes: whether there is a text, taking white space off its ends, and looking for a word that it does not have.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.visitor import NodeTransformer

from penstock.errors import InvalidRequest
from penstock.text.sandbox import RanAway
from penstock.text.word_pattern import alternatives

OUTLINES_MAX = 256
"""Forms of chats whose outlines one template keeps. When there are as many, it begins again."""
_FAILURES = (
    TemplateError, InvalidRequest, RanAway, ArithmeticError, AttributeError, LookupError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip


class Unreadable(Exception):
    """The template has statements that are not followed here."""


class Outlines:
    """The outlines of one template, for chats without tools and whatever else a template may be given."""

    def __init__(
        self, render: Callable[[Mapping[str, Any]], str], words: Iterable[str], *, nonce: str, chars_max: int
    ) -> None:
        """`render` is the template as `watch` has changed it, and `words` are those that `watch` returned.
        Texts of the trial contain `nonce`, which no user can guess; `chars_max` bounds a prompt.
        """
        self._render, self._nonce, self._chars_max = render, nonce, chars_max
        self._has_word = re.compile(alternatives(words)).search
        self._known: dict[tuple[object, ...], Outline | None] = {}

    def prompt(
        self, roles: Sequence[str], texts: Sequence[str], *, add_generation_prompt: bool
    ) -> str | None:
        """The prompt of messages that have these roles and texts, and nothing else; None: the template has to
        say.
        """
        form = (add_generation_prompt, *roles)
        try:
            outline = self._known[form]
        except KeyError:
            outline = self._make(form)
        if outline is None:
            return None
        for text in texts:
            if not text or text.strip() != text or self._has_word(text) is not None:
                return None
        prompt = outline.filled(texts)
        return prompt if len(prompt) <= self._chars_max else None

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._known)

    def _make(self, form: tuple[Any, ...]) -> "Outline | None":
        add_generation_prompt, *roles = form
        names = [f"qz{self._nonce}x{number}zq" for number in range(len(roles))]
        outline: Outline | None = None
        if self._has_word("\0".join(names)) is None:  # Else the names go where no text goes.
            try:
                rendered = self._render({
                    "messages": [
                        {"role": role, "content": name} for role, name in zip(roles, names, strict=True)
                    ],
                    "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt,
                })  # fmt: skip
                outline = Outline(rendered, names)
            except _FAILURES:
                pass  # It reads texts on its way, refuses these messages, or takes too much for them.
        if len(self._known) >= OUTLINES_MAX:
            self._known.clear()
        self._known[form] = outline
        return outline


class Outline:
    """The prompt of chats of one form: pieces of text, and where the messages' own texts go."""

    __slots__ = ("_holes", "_parts")

    def __init__(self, rendered: str, names: Sequence[str]) -> None:
        """`rendered` is the prompt of a chat whose messages' texts are `names`."""
        parts = re.split(f"({'|'.join(names)})", rendered)
        number_of = {name: i for i, name in enumerate(names)}
        self._holes = [(at, number_of[part]) for at, part in enumerate(parts) if part in number_of]
        self._parts = parts

    def filled(self, texts: Sequence[str]) -> str:
        """The prompt with these texts."""
        parts = self._parts.copy()
        for at, number in self._holes:
            parts[at] = texts[number]
        return "".join(parts)


class _Kind(IntEnum):
    """The part that messages' texts may have in a value. The larger of two holds for both."""

    FIXED = 0
    """Nothing: it is the same for all chats of one form."""
    WHOLE = 1
    """It may be one message's text, as that is."""
    PART = 2
    """It may be made of texts and of what is fixed, one behind the other."""
    SPLIT = 3
    """The list of one message's text, which is what splitting it at a word that it does not have makes."""
    HOLDER = 4
    """A message, a list of them, a namespace: what texts may be taken out of, and never a text."""
    MIXED = 5
    """One or the other of these."""


_TEXTS = {_Kind.FIXED, _Kind.WHOLE, _Kind.PART}
_ENDS = frozenset({"strip", "lstrip", "rstrip"})
_TYPE_TESTS = frozenset({
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean",
})  # fmt: skip
_FUNCTIONS = frozenset({"namespace", "range", "raise_exception"})
"""Others may give something else each time."""
_UNKNOWN = frozenset({
    "caller", "varargs", "kwargs", "self", "super", "strftime_now", "lipsum", "cycler", "joiner", "dict",
})  # fmt: skip
_MARKING = frozenset({"safe", "escape", "e", "forceescape"})
"""Filters whose result escapes the texts that are put behind it."""
_REASON = "reads a text"


def watch(tree: nodes.Template) -> frozenset[str]:
    """Change a template so that it fails where it reads the text of a message; the words that it may look
    for, which the texts must not have.

    Raises:
        Unreadable: it cannot be followed.
    """
    macros = list(tree.find_all(nodes.Macro))
    flow = _Flow({macro.name: macro for macro in macros})
    if len(macros) != len(flow.macros):
        raise Unreadable("two macros of one name")
    if taken := flow.macros.keys() & (_FUNCTIONS | _UNKNOWN):
        raise Unreadable(min(taken))  # `_Fail` calls one of them, and elsewhere the name is not the macro.
    while flow.grew:
        flow.again()
        flow.body(tree.body)
    _Fail(flow.reading).visit(tree)
    return frozenset(flow.words)


class _Fail(NodeTransformer):
    """Puts an error in the place of expressions."""

    def __init__(self, expressions: set[int]) -> None:
        self._expressions = expressions

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if id(node) in self._expressions:
            lineno = node.lineno
            return nodes.Call(
                nodes.Name("raise_exception", "load", lineno=lineno),
                [nodes.Const(_REASON, lineno=lineno)], [], None, None, lineno=lineno,
            )  # fmt: skip
        return super().visit(node, *args, **kwargs)


class _Flow:
    """Which names may hold what, whatever way the template goes. Kinds only grow until nothing changes."""

    def __init__(self, macros: dict[str, nodes.Macro]) -> None:
        self.macros = macros
        self._names: dict[str, _Kind] = {"messages": _Kind.HOLDER, "loop": _Kind.HOLDER}
        self._attributes: dict[str, _Kind] = {"content": _Kind.WHOLE}
        """By name, of whatever object."""
        self.grew = True
        self.reading = set[int]()
        self.words = set[str]()

    def again(self) -> None:
        """Another walk begins."""
        self.grew = False
        self.reading.clear()

    # --- statements -------------------------------------------------------------------------------

    def body(self, statements: Sequence[nodes.Node]) -> None:
        """Statements one after the other."""
        for node in statements:
            self._statement(node)

    def _statement(self, node: Any) -> None:  # noqa: ANN401
        match node:
            case nodes.Output():
                for each in node.nodes:
                    self._want(each, _TEXTS)
            case nodes.If():
                self._of(node.test)
                self.body([*node.body, *node.elif_, *node.else_])
            case nodes.For() if not node.recursive:
                kind = self._want(node.iter, {_Kind.FIXED, _Kind.HOLDER})
                self._assign(node.target, kind)
                if node.test is not None:
                    self._of(node.test)
                self.body([*node.body, *node.else_])
            case nodes.Assign():
                self._assign(node.target, self._of(node.node))
            case nodes.AssignBlock() if node.filter is None:
                self.body(node.body)
                self._assign(node.target, _Kind.PART)
            case nodes.Macro():
                for name in node.args:
                    self._assign(name, _Kind.FIXED)
                for name, default in zip(reversed(node.args), reversed(node.defaults), strict=False):
                    self._assign(name, self._of(default))
                self.body(node.body)
            case nodes.With():
                for target, value in zip(node.targets, node.values, strict=True):
                    self._assign(target, self._of(value))
                self.body(node.body)
            case nodes.Scope():
                self.body(node.body)
            case nodes.Break() | nodes.Continue():
                pass
            case _:
                raise Unreadable(type(node).__name__)

    def _assign(self, target: nodes.Node, kind: _Kind) -> None:
        if isinstance(target, nodes.Name):
            if target.name in self.macros or target.name in _FUNCTIONS or target.name in _UNKNOWN:
                raise Unreadable(target.name)
            self._grow(self._names, target.name, kind)
        elif isinstance(target, nodes.NSRef):
            self._grow(self._attributes, target.attr, kind)
        elif isinstance(target, nodes.Tuple) and kind is _Kind.FIXED:
            for each in target.items:
                self._assign(each, kind)
        else:
            raise Unreadable(type(target).__name__)

    def _grow(self, kinds: dict[str, _Kind], name: str, kind: _Kind) -> None:
        before = kinds.get(name, _Kind.FIXED)
        kinds[name] = self._joined(before, kind)
        self.grew |= kinds[name] is not before

    @staticmethod
    def _joined(one: _Kind, other: _Kind) -> _Kind:
        smaller, larger = sorted((one, other))
        return larger if larger <= _Kind.PART or smaller in (_Kind.FIXED, larger) else _Kind.MIXED

    # --- expressions ------------------------------------------------------------------------------

    def _want(self, node: nodes.Node, kinds: set[_Kind]) -> _Kind:
        """The kind of an expression that may be of these only, or else must not be reached."""
        if (kind := self._of(node)) in kinds:
            return kind
        return self._read(node)

    def _read(self, node: nodes.Node) -> _Kind:
        self.reading.add(id(node))
        return _Kind.FIXED

    def _of(self, node: Any) -> _Kind:  # noqa: ANN401
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _Kind.FIXED
            case nodes.Name():
                if node.name in _UNKNOWN or node.name in self.macros:
                    raise Unreadable(node.name)
                return self._names.get(node.name, _Kind.FIXED)
            case nodes.Getattr():
                return self._taken(node, node.attr)
            case nodes.Getitem():
                return self._item(node)
            case nodes.Call():
                return self._call(node)
            case nodes.Filter():
                return self._filter(node)
            case nodes.Test():
                return self._test(node)
            case nodes.Compare():
                return self._compare(node)
            case nodes.CondExpr():
                self._of(node.test)
                other = _Kind.FIXED if node.expr2 is None else self._of(node.expr2)
                return self._joined(self._of(node.expr1), other)
            case nodes.And() | nodes.Or():
                return self._joined(self._of(node.left), self._of(node.right))
            case nodes.Not():
                self._of(node.node)
                return _Kind.FIXED
            case nodes.Concat():
                return self._chained(node.nodes)
            case nodes.Add():
                return self._chained([node.left, node.right])
            case _:
                return self._fixed(node)

    def _fixed(self, node: nodes.Node) -> _Kind:
        """An expression that is the same if all in it is."""
        if not isinstance(
            node,
            nodes.BinExpr | nodes.UnaryExpr | nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair
            | nodes.Slice | nodes.Keyword | nodes.Operand,
        ):  # fmt: skip
            raise Unreadable(type(node).__name__)
        kinds = [self._of(each) for each in node.iter_child_nodes()]
        if not any(kinds):
            return _Kind.FIXED
        return self._read(node) if isinstance(node, nodes.Expr) else _Kind.MIXED

    def _chained(self, operands: Sequence[nodes.Node]) -> _Kind:
        kinds = [self._want(each, _TEXTS) for each in operands]
        return _Kind.PART if any(kinds) else _Kind.FIXED

    def _taken(self, node: nodes.Getattr | nodes.Getitem, name: str) -> _Kind:
        """An attribute, or what is by that name in a message."""
        self._want(node.node, {_Kind.FIXED, _Kind.HOLDER})
        if name in ("previtem", "nextitem"):
            return _Kind.HOLDER
        return self._attributes.get(name, _Kind.FIXED)

    def _item(self, node: nodes.Getitem) -> _Kind:
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            return self._taken(node, node.arg.value)
        self._want(node.arg, {_Kind.FIXED})
        kind = self._of(node.node)
        if kind is _Kind.SPLIT and isinstance(node.arg, nodes.Const | nodes.Neg):
            return _Kind.WHOLE
        if kind is _Kind.HOLDER and _is_place(node.arg):
            return kind
        return kind if kind is _Kind.FIXED else self._read(node)

    def _call(self, node: nodes.Call) -> _Kind:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Unreadable("a call of unknown arguments")
        called, kinds = node.node, [self._of(each) for each in node.args]
        named = [(each.key, self._of(each.value)) for each in node.kwargs]
        if isinstance(called, nodes.Name):
            if (macro := self.macros.get(called.name)) is not None:
                for parameter, kind in zip(macro.args, kinds, strict=False):
                    self._grow(self._names, parameter.name, kind)
                for name, kind in named:
                    self._grow(self._names, name, kind)
                return _Kind.PART
            if called.name not in _FUNCTIONS or called.name in self._names:
                raise Unreadable(called.name)
            if called.name == "namespace":
                for name, kind in named:
                    self._grow(self._attributes, name, kind)
                return _Kind.HOLDER if not any(kinds) else self._read(node)
            return _Kind.FIXED if not any(kinds) or called.name == "raise_exception" else self._read(node)
        if not isinstance(called, nodes.Getattr):
            raise Unreadable("a call of what is not named")
        if any(kinds) or any(kind for _, kind in named):
            return self._read(node)
        return self._method(node, called)

    def _method(self, node: nodes.Call, called: nodes.Getattr) -> _Kind:
        kind, name, words = self._of(called.node), called.attr, _constants(node.args)
        if kind is _Kind.FIXED and self._attributes.get(name, kind) is kind:
            return kind
        if kind is _Kind.HOLDER and name == "get" and (field := _constants(node.args[:1])):
            return self._attributes.get(field[0], _Kind.FIXED)
        if kind is _Kind.WHOLE and not node.kwargs and words is not None:
            if name in _ENDS and not "".join(words).strip():
                return kind
            if name in ("startswith", "endswith", "split") and words and all(map(str.strip, words)):
                self.words.update(words[:1] if name == "split" else words)
                return _Kind.SPLIT if name == "split" else _Kind.FIXED
        return self._read(node)

    def _filter(self, node: nodes.Filter) -> _Kind:
        if node.node is None or node.name == "random" or node.dyn_args is not None:
            raise Unreadable(node.name)
        kind = self._of(node.node)
        others = [self._of(each) for each in (*node.args, *(each.value for each in node.kwargs))]
        if any(others) or node.name in _MARKING:
            return self._read(node)
        if kind is _Kind.FIXED or (kind is _Kind.WHOLE and node.name == "trim" and not node.args):
            return kind
        if kind is _Kind.HOLDER and node.name in ("length", "count"):
            return _Kind.FIXED
        if kind is _Kind.HOLDER and node.name in ("first", "last", "list"):
            return kind
        if kind is _Kind.SPLIT and node.name in ("first", "last"):
            return _Kind.WHOLE
        return self._read(node)

    def _test(self, node: nodes.Test) -> _Kind:
        kind, others = self._of(node.node), [self._of(each) for each in node.args]
        if (kind is _Kind.FIXED or node.name in _TYPE_TESTS) and not any(others):
            return _Kind.FIXED
        return self._read(node)

    def _compare(self, node: nodes.Compare) -> _Kind:
        """Of texts, whether they are, or have, a word that they have not."""
        kinds = [self._of(each) for each in (node.expr, *(operand.expr for operand in node.ops))]
        if not any(kinds):
            return _Kind.FIXED
        if len(node.ops) == 1:
            left, (operator, right) = node.expr, (node.ops[0].op, node.ops[0].expr)
            if operator in ("in", "notin") and kinds[1] is _Kind.HOLDER and _constants([left]):
                return _Kind.FIXED  # The names of a message's fields.
            if operator in ("eq", "ne") and kinds == [_Kind.WHOLE, _Kind.FIXED]:
                left, right = right, left
            elif operator not in ("in", "notin") or kinds != [_Kind.FIXED, _Kind.WHOLE]:
                return self._read(node)
            word = left.value if isinstance(left, nodes.Const) else None
            if isinstance(word, str) and (word.strip() or (not word and operator in ("eq", "ne"))):
                self.words.update({word} - {""})
                return _Kind.FIXED
        return self._read(node)


def _is_place(node: nodes.Node) -> bool:
    """Whether it says where in a list, and so cannot be the name of a message's field."""
    if isinstance(node, nodes.Const):
        return isinstance(node.value, int)
    if isinstance(node, nodes.Add):
        return _is_place(node.left) or _is_place(node.right)
    return isinstance(node, nodes.Slice | nodes.Sub | nodes.Neg)


def _constants(args: Sequence[nodes.Node]) -> list[str] | None:
    """The arguments of a call, if all are texts."""
    found = [each.value for each in args if isinstance(each, nodes.Const) and isinstance(each.value, str)]
    return found if len(found) == len(args) else None

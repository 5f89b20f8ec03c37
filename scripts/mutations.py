"""The mutations of one module: small changes of its syntax tree, each of which some test should notice.

compare     `<` becomes `<=`, `==` becomes `!=`, `in` becomes `not in`, ...
boolean     `and` becomes `or`, and the other way round
condition   the condition of an `if`, a `while` or a conditional expression is negated; `not x` becomes `x`
arithmetic  `+` becomes `-`, `*` becomes `//`, `&` becomes `|`, `<<` becomes `>>`, ...
constant    a number grows by one, True becomes False
return      a value that is returned becomes None
delete      a call, an assignment to an attribute or item, `+=`, `del`, `raise`, `continue` or `break` is left
            out

Left alone: assertions and `check_invariants` (they are checks themselves), annotations, contracts
(`Protocol`), `__repr__`, all text, that of errors included, and constants: those of a module, and the values
of a class that has nothing else (bounds and tables: a test would only repeat them).
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
BOOLEAN: dict[type[ast.boolop], type[ast.boolop]] = {ast.And: ast.Or, ast.Or: ast.And}
UNTESTED_FUNCTIONS = {"check_invariants", "__repr__", "__str__"}
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "bases"}


@dataclass(frozen=True)
class Mutation:
    """One change of one module."""

    key: str
    """Names the change within its module; changes elsewhere in the module leave it as it is."""
    kind: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class _Site:
    """A node of a tree, what stands there instead, and where that is."""

    kind: str
    function: str
    line: int
    old: ast.AST
    new: ast.AST
    parent: ast.AST
    field: str
    index: int | None

    def change(self) -> None:
        """Put the new node into the tree."""
        if self.index is None:
            setattr(self.parent, self.field, self.new)
        else:
            getattr(self.parent, self.field)[self.index] = self.new


def mutations(source: str) -> list[Mutation]:
    """Every mutation of a module, in the order of its syntax tree."""
    return [mutation for mutation, _ in _named(ast.parse(source))]


def mutated(source: str, key: str) -> ast.Module:
    """The module's tree with one mutation in it.

    Raises:
        LookupError: the module has no such mutation (any more).
    """
    tree = ast.parse(source)
    for mutation, site in _named(tree):
        if mutation.key == key:
            site.change()
            return ast.fix_missing_locations(tree)
    raise LookupError(f"no such mutation: {key}")


def probed(source: str, numbers: Mapping[str, int]) -> ast.Module:
    """The module's tree, which calls `__probe__(number)` in front of each statement that one of the mutations
    changes.

    Raises:
        LookupError: the module has no such mutation (any more).
    """
    tree = ast.parse(source)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    sites = {mutation.key: site for mutation, site in _named(tree)}
    for key, number in numbers.items():
        if key not in sites:
            raise LookupError(f"no such mutation: {key}")
        node = sites[key].old if isinstance(sites[key].old, ast.stmt) else sites[key].parent
        while not isinstance(node, ast.stmt):
            node = above[node]
        block = next(value for _, value in ast.iter_fields(above[node])
                     if isinstance(value, list) and any(each is node for each in value))  # fmt: skip
        call = ast.Expr(ast.Call(ast.Name("__probe__", ast.Load()), [ast.Constant(number)], []))
        at = next(i for i, each in enumerate(block) if each is node)
        block.insert(at, ast.fix_missing_locations(ast.copy_location(call, node)))
    return tree


def _named(tree: ast.Module) -> Iterator[tuple[Mutation, _Site]]:
    seen = Counter[str]()
    for site in list(_sites(tree, "")):
        before, after = ast.unparse(site.old), ast.unparse(site.new)
        key = f"{site.function}: {site.kind}: {before} -> {after}"
        seen[key] += 1
        key += f" #{seen[key]}" if seen[key] > 1 else ""
        yield Mutation(key, site.kind, site.line, before, after), site


def _sites(parent: ast.AST, function: str) -> Iterator[_Site]:
    """The changes that are possible below a node."""
    for field, value in ast.iter_fields(parent):
        if field in SKIPPED_FIELDS or (isinstance(parent, ast.ClassDef) and field == "keywords"):
            continue
        nodes: list[Any] = value if isinstance(value, list) else [value]
        for i, node in enumerate(nodes):
            if not isinstance(node, ast.AST) or _is_skipped(node) or _is_bound(parent, node):
                continue
            inside = function
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inside = f"{function}.{node.name}".removeprefix(".")
            index = i if isinstance(value, list) else None
            line = getattr(node, "lineno", 0)
            for kind, new in (*_of_place(parent, field, node), *_of_node(node)):
                yield _Site(kind, inside, line, node, new, parent, field, index)
            if not isinstance(node, ast.Raise):  # The expression inside makes the error's text.
                yield from _sites(node, inside)


def _is_skipped(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr():
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name in UNTESTED_FUNCTIONS
        case ast.ClassDef():
            return any("Protocol" in ast.unparse(base) for base in node.bases)
        case _:
            return False


def _is_bound(parent: ast.AST, node: ast.AST) -> bool:
    """Whether a node gives a constant its value: which one is right is no question for a test."""
    if isinstance(parent, ast.ClassDef) and all(map(_is_value_or_text, parent.body)):
        return True
    return isinstance(parent, ast.Module) and isinstance(node, (ast.Assign, ast.AnnAssign))


def _is_value_or_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) or (isinstance(node, ast.AnnAssign) and node.value is not None)


def _of_place(parent: ast.AST, field: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Changes that come from where a node stands."""
    if field == "test" and isinstance(parent, (ast.If, ast.While, ast.IfExp)):
        is_compared = isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED
        if not is_compared and not isinstance(node, ast.UnaryOp):  # Those two are negated by themselves.
            assert isinstance(node, ast.expr)
            yield "condition", ast.UnaryOp(ast.Not(), node)


_NEGATED = {ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn}


def _of_node(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Changes of a node itself."""
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                new = copy.deepcopy(node)
                new.ops[i] = COMPARE[type(op)]()
                yield "compare", new
        case ast.BoolOp():
            yield "boolean", ast.BoolOp(BOOLEAN[type(node.op)](), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "condition", node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as value) if not _is_nothing(value):
            yield "return", ast.Return(ast.Constant(None))
        case (
            ast.Expr(value=ast.Call())
            | ast.AugAssign()
            | ast.Delete()
            | ast.Raise()
            | ast.Continue()
            | ast.Break()
        ):
            yield "delete", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "delete", ast.Pass()
        case _:
            return
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)


def _is_nothing(value: ast.expr) -> bool:
    """None, or what a condition takes for None."""
    return isinstance(value, ast.Constant) and not value.value

"""The notes beside the settings, read from the source of the tree: Python keeps no docstrings of fields."""

import ast
import functools
import inspect
from collections.abc import Mapping

from penstock.config import (
    backends,
    fleet,
    flow,
    health,
    ledger,
    placement,
    routing,
    tenancy,
    tree,
)

NOTED = (
    backends,
    fleet,
    flow,
    health,
    ledger,
    placement,
    routing,
    tenancy,
    tree,
)
"""The files whose classes are sections of the configuration."""
Notes = Mapping[tuple[str, str], str]
"""(class, field) -> note; (class, "") is the note of the class."""


@functools.cache
def read_notes() -> Notes:
    """All notes; none if the source is not installed."""
    try:
        sources = [inspect.getsource(module) for module in NOTED]
    except OSError:
        return {}
    notes: dict[tuple[str, str], str] = {}
    for node in (node for source in sources for node in ast.parse(source).body):
        if isinstance(node, ast.ClassDef):
            notes[node.name, ""] = ast.get_docstring(node) or ""
            notes |= {(node.name, field): note for field, note in _field_notes(node).items()}
    return notes


def _field_notes(node: ast.ClassDef) -> dict[str, str]:
    """A field's note is the string that stands below it."""
    notes: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            notes[field.target.id] = inspect.cleandoc(str(below.value.value))
    return notes

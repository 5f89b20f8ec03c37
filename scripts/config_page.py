"""Writes docs/configuration.md, the table of every configuration key, from the declarations in
penstock/config/. `make format` runs it; tests/config/test_every_key.py compares.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from msgspec import NODEFAULT, inspect

from penstock.config.load import read_notes
from penstock.config.tree import Config

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Every key, written by `scripts/config_page.py` from the declarations in `penstock/config/`. `penstock serve
--print-config` prints them as a file to begin with. `[]` stands for an entry of a list. A key that is not
given has its default; an unknown one is refused, and the error names the nearest known one.
"""


@dataclass(frozen=True)
class Key:
    """One key, and where the tree has it first."""

    path: str
    owner: str
    """The class that declares it."""
    kind: inspect.Type
    default: object
    """`NODEFAULT`: it must be given."""
    section: inspect.StructType | None
    """The section that it opens, if it is a heading."""
    note: str


def declared_keys() -> list[Key]:
    """Every key once: one that several sections share is listed at the first of them."""
    top = inspect.type_info(Config)
    assert isinstance(top, inspect.StructType)
    return list({(key.owner, key.path.rpartition(".")[2]): key for key in [*_below(top, "")][::-1]}.values())[
        ::-1
    ]


def _below(kind: inspect.StructType, path: str) -> Iterator[Key]:
    notes = read_notes()
    for field in kind.fields:
        owner = next(base for base in kind.cls.__mro__ if field.name in base.__annotations__)
        section, many = _section(field.type)
        here = f"{path}{field.encode_name}"
        note = notes.get((owner.__name__, field.name)) or (
            notes.get((section.cls.__name__, ""), "") if section else ""
        )
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        yield Key(here, owner.__name__, field.type, default, section, note)
        if section:
            yield from _below(section, f"{here}[]." if many else f"{here}.")


def _section(kind: inspect.Type) -> tuple[inspect.StructType | None, bool]:
    """The section that a value of this type is, or has as entries."""
    if isinstance(kind, inspect.StructType):
        return kind, False
    if isinstance(kind, inspect.Metadata):
        return _section(kind.type)
    if isinstance(kind, inspect.VarTupleType):
        return _section(kind.item_type)[0], True
    found = [_section(each) for each in kind.types] if isinstance(kind, inspect.UnionType) else []
    return next((each for each in found if each[0]), (None, False))


def page() -> str:
    """A table for each section."""
    tables: dict[str, list[str]] = {}
    notes = {key.path: key.note for key in declared_keys() if key.section}
    for key in declared_keys():
        if key.section is None:
            heading, _, name = key.path.rpartition(".")
            cells = (f"`{name}`", _kind(key.kind), _shown(key.default), key.note.replace("<", "&lt;"))
            row = " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells)
            tables.setdefault(heading, []).append(f"| {row} |")
    text = [HEAD]
    for heading, rows in tables.items():
        text.append(f"\n## `{heading}`\n\n{' '.join(notes.get(heading.removesuffix('[]'), '').split())}\n")
        text.append(
            "\n| key | value | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
        )
    return "".join(text)


def _kind(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _kind(kind.type)
        case inspect.UnionType():
            return " or ".join(map(_kind, kind.types))
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case inspect.EnumType():
            return ", ".join(f"`{each.value}`" for each in kind.cls)
        case inspect.VarTupleType():
            return f"list of {_kind(kind.item_type)}"
        case inspect.DictType():
            return f"mapping from {_kind(kind.key_type)} to {_kind(kind.value_type)}"
        case inspect.IntType() | inspect.FloatType():
            return _number(kind)
        case _:
            return {"StrType": "text", "BoolType": "`true`, `false`", "NoneType": "`null`"}.get(
                type(kind).__name__, type(kind).__name__.removesuffix("Type").lower()
            )


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = [(kind.ge, ">= "), (kind.gt, "> "), (kind.le, "<= "), (kind.lt, "< ")]
    said = ", ".join(f"{sign}{bound}" for bound, sign in bounds if bound is not None)
    name = "integer" if isinstance(kind, inspect.IntType) else "number"
    return f"{name} {said}".strip()


def _shown(default: object) -> str:
    if default is NODEFAULT:
        return "required"
    plain: Any = list(default) if isinstance(default, tuple) else default
    text = (
        yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
    )
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page())

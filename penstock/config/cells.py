"""Peer cells: other installations of the same models, in other zones or regions, that may answer in place of
this one (docs/cells.md). The section is the same in every cell, but for `here`.
"""

import re
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch
from penstock.types import places_of

Labels = Annotated[tuple[str, ...], Meta(max_length=16)]
CELLS_MAX = 32


class CellConfig(Branch, frozen=True, kw_only=True):
    """One cell."""

    name: str
    """Names it in this list, in worker ids and in the ledger; also a label of it."""
    url: str
    """"tcp:HOST:PORT": where it listens for its peers. The port belongs on a private network or into a
    tunnel."""
    labels: Labels = ()
    """Properties of its place ("eu", "hipaa"): tenants and requests may be bound to cells with a label."""
    egress_price: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """The price of sending it a million tokens, in the currency of the price list. Of cells that would answer
    about as soon the cheapest is taken."""

    @property
    def places(self) -> frozenset[str]:
        """Where whoever runs there is, as capabilities."""
        return places_of((self.name, *self.labels))


class CellsConfig(Branch, frozen=True, kw_only=True):
    """The cells that help each other; none: this server stands alone."""

    here: str = ""
    """The name of the cell that this server is; or PENSTOCK_CELL, so that one file does for all cells."""
    key_env: str = "PENSTOCK_CELL_KEY"
    """The environment variable with the key that all cells share, 16 characters or more."""
    all: Annotated[tuple[CellConfig, ...], Meta(max_length=CELLS_MAX)] = ()
    """Every cell, this one too."""

    @property
    def own(self) -> CellConfig | None:
        """This cell; None: there are no cells."""
        return next((cell for cell in self.all if cell.name == self.here), None)

    @property
    def places(self) -> frozenset[str]:
        """Where workers of this cell are; empty: there are no cells."""
        return self.own.places if self.own is not None else frozenset()

    @property
    def peers(self) -> tuple[CellConfig, ...]:
        """The others."""
        return tuple(cell for cell in self.all if cell.name != self.here)


LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_URL = re.compile(r"tcp:(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def cell_problems(cells: CellsConfig) -> Iterator[str]:
    """One line for each thing that is wrong."""
    if not _VARIABLE.fullmatch(cells.key_env):
        yield f"cells.key_env: expected the name of an environment variable, got {cells.key_env[:80]!r}"
    if cells.all and cells.own is None:
        known = ", ".join(cell.name for cell in cells.all)
        yield f"cells.here (PENSTOCK_CELL): there is no cell {cells.here[:80]!r}; cells.all has {known}"
    if cells.here and not cells.all:
        yield "cells.all: empty, so there is no cell that cells.here could name"
    names: dict[str, int] = {}
    urls: dict[str, int] = {}
    for i, cell in enumerate(cells.all):
        where = f"cells.all[{i}]"
        if not LABEL.fullmatch(cell.name):
            yield f"{where}.name: expected 1 to 63 letters, digits and _.-, got {cell.name[:80]!r}"
        for taken, field in ((names, "name"), (urls, "url")):
            value: str = getattr(cell, field)
            if value in taken:
                yield f"{where}.{field}: {value[:80]!r} is that of cells.all[{taken[value]}] already"
            taken.setdefault(value, i)
        match = _URL.fullmatch(cell.url)
        if match is None or not 0 < int(match[2]) <= 65_535:
            yield f"{where}.url: expected tcp:HOST:PORT, got {cell.url[:80]!r}"
        yield from label_problems(cell.labels, f"{where}.labels")


def label_problems(labels: tuple[str, ...], where: str) -> Iterator[str]:
    """Problems of labels that stand at `where`."""
    for i, label in enumerate(labels):
        if not LABEL.fullmatch(label):
            yield f"{where}[{i}]: expected 1 to 63 letters, digits and _.-, got {label[:80]!r}"


def residency_problems(residency: tuple[str, ...], cells: CellsConfig, where: str) -> Iterator[str]:
    """Problems of labels that a tenant is bound to."""
    yield from label_problems(residency, where)
    if residency and not cells.all:
        yield f"{where}: there are no cells (cells.all), so no place has a label"
    elif residency and not any(set(residency) <= {cell.name, *cell.labels} for cell in cells.all):
        yield f"{where}: no cell has {' and '.join(residency)[:80]}, so nobody could answer this tenant"


RETIRED: dict[str, str] = {}

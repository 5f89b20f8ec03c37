"""The console: where output is printed: answers and tables on standard output, everything else on standard
error.

Colours only on a terminal, and none with NO_COLOR (rich sees to both).

Tables that fit the terminal without cutting anything: columns leave by rank, and where even that does not
do, each row stacks.

rich's own tables shorten cells instead, and a date or a number of which the end is missing is a wrong one.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from penstock.errors import ConfigError

PIPE_COLUMNS = 120
"""Width of tables where no terminal says otherwise."""


def out() -> Console:
    """Standard output."""
    return _console(sys.stdout)


def err() -> Console:
    """Standard error."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(file=stream, highlight=False, width=width, soft_wrap=False, emoji=False)


_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` without control characters: a model's words must not steer the reader's terminal."""
    return text.translate(_CONTROL)


# Where a command's result goes as a file: nowhere, a path, or `-`, which is standard output.


def check_place(path: Path | None) -> None:
    """Before the work begins: whether its result can be put there.

    Raises:
        ConfigError: there is no such directory.
    """
    if path is not None and str(path) != "-" and not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}")


def screen_beside(path: Path | None) -> Console:
    """For tables and words: standard error if standard output is for the file."""
    return err() if str(path) == "-" else out()


def write_to(path: Path | None, content: bytes) -> None:
    """Write a result.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    if str(path) == "-":
        sys.stdout.write(content.decode())
        return
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


GAP = 2
INDENT = 4


@dataclass(slots=True, frozen=True, kw_only=True)
class Column:
    """One column."""

    head: str
    right: bool = True
    """Numbers line up at their right end."""
    rank: int = 0
    """Of the columns that do not fit, the highest leaves first; 0 stays."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    cells: tuple[Text, ...]
    """One for each column."""
    below: Text | None = None
    """Said about the row, on a line of its own that may wrap."""


def row(*cells: str | Text, below: str | Text = "") -> Row:
    """A row of words; those of others can neither steer the terminal nor break the line."""
    said = below if isinstance(below, Text) else Text(_plain(below), style="dim")
    return Row(
        cells=tuple(cell if isinstance(cell, Text) else Text(_plain(cell)) for cell in cells),
        below=said if said.plain else None,
    )


def _plain(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\t", " ")


class Fitted:
    """A table for rich: laid out for whatever width it is printed in."""

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Row], *, total: Row | None = None, title: str = ""
    ) -> None:
        """`total` is the last line; cells of it may be empty."""
        assert all(len(each.cells) == len(columns) for each in (*rows, *([total] if total else [])))
        self._columns, self._rows, self._total, self._title = columns, rows, total, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich's protocol."""
        width = options.max_width
        lines: list[RenderableType] = [Text(self._title, style="bold")] if self._title else []
        lines += self._as_table(width) or self._stacked(width)
        yield Group(*lines)

    def _as_table(self, width: int) -> list[Text]:
        """All rows under one head, without the columns that do not fit; nothing if those that stay do not."""
        all_rows = [*self._rows, *([self._total] if self._total else [])]
        widths = [
            max(cell_len(column.head), *(each.cells[i].cell_len for each in all_rows), 0)
            for i, column in enumerate(self._columns)
        ]
        kept = list(range(len(self._columns)))
        while sum(widths[i] + GAP for i in kept) - GAP > width:
            last = max(kept, key=lambda i: (self._columns[i].rank, i))
            if not self._columns[last].rank:
                return []
            kept.remove(last)
        heads = [Text(column.head, style="bold") for column in self._columns]
        lines = [self._line(heads, kept, widths)]
        for each in self._rows:
            lines.append(self._line(each.cells, kept, widths))
            if each.below is not None:
                lines.append(_indented(each.below, width))
        if self._total:
            lines.append(self._line(self._total.cells, kept, widths, style="bold"))
        left = [column.head for i, column in enumerate(self._columns) if i not in kept]
        if left:
            lines.append(Text(f"(no room for: {', '.join(left)})", style="dim"))
        return lines

    def _line(
        self, cells: Sequence[Text], kept: Sequence[int], widths: Sequence[int], style: str = ""
    ) -> Text:
        line = Text(style=style, no_wrap=True, overflow="ignore")
        for place, i in enumerate(kept):
            spaces = " " * (widths[i] - cells[i].cell_len)
            line.append(" " * GAP if place else "")
            line.append_text(Text.assemble(spaces, cells[i]) if self._columns[i].right else cells[i])
            if not self._columns[i].right and place + 1 < len(kept):
                line.append(spaces)
        return line

    def _stacked(self, width: int) -> list[Text]:
        """Every row by itself: what it is about first, its numbers with their names below."""
        lines: list[Text] = []
        for each in [*self._rows, *([self._total] if self._total else [])]:
            names = [cell for column, cell in zip(self._columns, each.cells, strict=True) if not column.right]
            lines += _flowing((cell for cell in names if cell.plain), width)
            numbers = (
                Text.assemble((f"{column.head} ", "dim"), cell)
                for column, cell in zip(self._columns, each.cells, strict=True)
                if column.right and cell.plain
            )
            lines += [_indented(line, width) for line in _flowing(numbers, width - INDENT)]
            if each.below is not None:
                lines.append(_indented(each.below, width))
        return lines


def _indented(text: Text, width: int) -> Text:
    wrapped = Text(" " * INDENT)
    return wrapped.append_text(text) if text.cell_len <= width - INDENT else text


def _flowing(pieces: Iterable[Text], width: int) -> Iterator[Text]:
    """Lines of whole pieces.

    One that is wider than a line is folded by the terminal's own rule, never cut.
    """
    line = Text(overflow="fold")
    for piece in pieces:
        if line.plain and line.cell_len + GAP + piece.cell_len > width:
            yield line
            line = Text(overflow="fold")
        line.append(" " * GAP if line.plain else "")
        line.append_text(piece)
    if line.plain:
        yield line

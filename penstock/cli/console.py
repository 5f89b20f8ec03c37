"""What is printed and where: answers and tables on standard output, everything else on standard error.

Colours only on a terminal, and none with NO_COLOR (rich sees to both).
"""

import io
import os
import sys
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from penstock.errors import ConfigError

PIPE_COLUMNS = 120
"""Width of tables when nobody's terminal says otherwise."""


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


class _CurrentStderr(io.TextIOBase):
    """Writes to whatever `sys.stderr` is at that moment.

    While a progress bar is shown, rich puts a stand-in there that prints lines above the bar.
    """

    def write(self, text: str, /) -> int:
        """See `TextIOBase.write`."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """See `TextIOBase.flush`."""
        sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether a person reads along."""
        return sys.stderr.isatty() and "NO_COLOR" not in os.environ


def current_stderr() -> TextIO:
    """A stream that follows `sys.stderr`."""
    return cast(TextIO, _CurrentStderr())


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

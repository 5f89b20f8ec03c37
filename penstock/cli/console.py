"""What is printed and where: answers and tables on standard output, everything else on standard error.

Colours only on a terminal, and none with NO_COLOR (rich sees to both).
"""

import io
import os
import sys
from typing import TextIO, cast

from rich.console import Console

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

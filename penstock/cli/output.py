"""Where a command's result goes as a file: nowhere, a path, or `-`, which is standard output."""

import sys
from pathlib import Path

from rich.console import Console

from penstock.cli import console
from penstock.errors import ConfigError


def check_place(path: Path | None) -> None:
    """Before the work begins: whether its result can be put there.

    Raises:
        ConfigError: there is no such directory.
    """
    if path is not None and str(path) != "-" and not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}")


def screen_beside(path: Path | None) -> Console:
    """For tables and words: standard error if standard output is for the file."""
    return console.err() if str(path) == "-" else console.out()


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

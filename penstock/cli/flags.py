"""How `--help` looks, and the types that several commands' flags share."""

import argparse
import difflib
import os
import re
from collections.abc import Callable
from typing import NoReturn

from penstock.errors import ConfigError

DEFAULT_PORT = 8000
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

# `argparse` has no public name for it.
Commands = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage]


class Help(argparse.RawDescriptionHelpFormatter):
    """argparse's own layout with a wider first column and no line for the word COMMAND itself."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if action.nargs == argparse.PARSER else text


class Parser(argparse.ArgumentParser):
    """argparse's own, which names the nearest choice to one that there is not."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with 2."""
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message, re.DOTALL):
            choices = [choice.strip(" '") for choice in found[2].split(",")]
            if near := difflib.get_close_matches(found[1], choices, n=1):
                message = f"{message[: found.start()]}invalid choice: {found[1]!r}; did you mean {near[0]!r}?"
        super().error(message)


def number(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """A flag's type: an int or float from `low` to `high`, both included."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            bounds = f"{low:.0f} to {high:.0f}" if kind is int else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {bounds}")
        return value

    return read


def size(text: str) -> int:
    """A flag's type: bytes, with an optional binary unit (512M, 2GiB)."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def duration(text: str) -> int:
    """A flag's type: a time such as 90s, 30m, 12h, 30d or 2w, in seconds; at least one second."""
    match = re.fullmatch(r"([1-9]\d{0,8})([smhdw])", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 30m, 12h, 30d or 2w")
    return int(match[1]) * _SECONDS[match[2]]


def default_port() -> int:
    """PENSTOCK_PORT, or 8000.

    Raises:
        ConfigError: the variable is not a port.
    """
    text = os.environ.get("PENSTOCK_PORT", "").strip()
    if not text:
        return DEFAULT_PORT
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise ConfigError(f"PENSTOCK_PORT={text!r} is not a port (0 to 65535)")
    return int(text)


def default_url() -> str:
    """PENSTOCK_URL, or the port that `penstock serve` would take here."""
    return os.environ.get("PENSTOCK_URL") or f"http://127.0.0.1:{default_port()}/v1"

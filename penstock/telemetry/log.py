"""The log: one line per event on standard error, for people or as JSON, with fields instead of prose.

A `Log` is handed to the parts that write to it. It formats through the standard `logging` module, so
libraries' own warnings take the same way. Stamps come from the `Clock`; API keys never come out.
"""

import contextlib
import functools
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TextIO, cast

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S, Clock
from penstock.config.tree import LogConfig

Field = str | int | float | bool | BaseException | None
HIDDEN = "[hidden]"
SECRET_CHARS_MIN = 16
"""Known secrets that are shorter are not looked for: they would be found inside of ordinary words. No key may
be as short."""
ACCESS_LINES_MAX = 256
"""Lines that wait for `Log.flush`."""
SHOWN_MAX = 256
"""Methods and paths whose harmless form is remembered."""
_SECRET_NAMES = frozenset(("authorization", "cookie", "key", "keys", "password", "secret", "token"))
_SECRET_ENDINGS = ("_key", "_keys", "_password", "_secret", "_token")
_LOOKS_SECRET = r"(?i:\bbearer )[^\s\"']+|\bsk-[\w-]{8,}"
_COLOURS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}
_ACCESS_FIELDS = (
    "request_id", "trace_id", "model", "outcome", "prompt_tokens", "cached_tokens", "generated_tokens",
)  # fmt: skip
_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class AccessLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One HTTP request, for the access line. `path` is without the query, which may hold secrets."""

    method: str
    path: str
    status: int
    duration_ns: int
    is_poll: bool = False
    """A caller that looks regularly: a probe, a scrape, the page, `penstock top`. Such lines are for
    debugging."""
    request_id: str | None = None
    trace_id: str | None = None
    model: str | None = None
    """Of a request that generates; then outcome and counts are there too."""
    outcome: str | None = None
    ttft_ns: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None


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
        """Whether a person reads along, and wants colours."""
        return sys.stderr.isatty() and "NO_COLOR" not in os.environ


class Log:
    """Where events are written. Fields with secret names and known keys are hidden."""

    def __init__(
        self, config: LogConfig, clock: Clock, *, stream: TextIO | None = None, secrets: Iterable[str] = ()
    ) -> None:
        out = cast(TextIO, _CurrentStderr()) if stream is None else stream
        hidden = _Hidden(secrets)
        self._handler = logging.StreamHandler(out)
        self._lines = (
            _JsonLines(clock, hidden)
            if config.format == "json"
            else _TextLines(clock, hidden, colour=out.isatty())
        )
        self._handler.setFormatter(self._lines)
        self._level = logging.getLevelNamesMapping()[config.level.upper()]
        self.tells_requests = config.access and self._level <= logging.INFO
        """Whether single requests have lines."""
        self._access_lines: list[str] = []

    def debug(self, message: str, **fields: Field) -> None:
        """Details for hunting a bug."""
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Field) -> None:
        """An event, as it should be."""
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Field) -> None:
        """Trouble that was dealt with."""
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Field) -> None:
        """Trouble that someone should look at."""
        self._write(logging.ERROR, message, fields)

    def bug(self, message: str, error: BaseException, **fields: Field) -> None:
        """Something that should not be possible: the error with its traceback."""
        lines = "".join(traceback.format_exception(error))
        self._write(logging.ERROR, message, {"error": error, **fields, "traceback": lines})

    def access(self, access: AccessLine) -> None:
        """One line for one HTTP request, if the config wants them.

        It is written by `flush`, or with the next line of another kind.
        """
        if not self.tells_requests or (access.is_poll and self._level > logging.DEBUG):
            return
        self._access_lines.append(self._lines.access(access))
        if len(self._access_lines) >= ACCESS_LINES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write the access lines that came since the last call: one write for all of a turn of the event
        loop.
        """
        if not self._access_lines:
            return
        text = "\n".join(self._access_lines) + "\n"
        self._access_lines.clear()
        # Straight to the stream: a record and what `logging` does with it cost more than all the rest of a
        # line.
        with contextlib.suppress(OSError, ValueError), self._handler.lock or contextlib.nullcontext():
            self._handler.stream.write(text)
            self._handler.flush()

    def adopt(self, name: str) -> None:
        """Let a library's logger (such as "asyncio") write here as well."""
        logger = logging.getLogger(name)
        logger.handlers = [self._handler]
        logger.propagate = False

    def _write(self, level: int, message: str, fields: dict[str, Field]) -> None:
        if level >= self._level:
            self.flush()
            self._handler.handle(_record(level, message, fields))


def _record(level: int, message: str, fields: dict[str, Field]) -> logging.LogRecord:
    # Without args nothing is %-formatted; the fields travel as an attribute.
    record = logging.LogRecord("penstock", level, "", 0, message, None, None)
    record.fields = fields
    return record


def _ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 3)


class _Hidden:
    """The texts that must not be shown: fields by their name, and text by its look or because it is a known
    key.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        known = [
            re.escape(secret)
            for secret in sorted(secrets, key=len, reverse=True)
            if len(secret) >= SECRET_CHARS_MIN
        ]
        self._pattern = re.compile("|".join([*known, _LOOKS_SECRET]))

    def text(self, text: str) -> str:
        return self._pattern.sub(HIDDEN, text)

    def value(self, name: str, value: Field) -> str | int | float | bool | None:
        lower = name.lower()
        if value is not None and (lower in _SECRET_NAMES or lower.endswith(_SECRET_ENDINGS)):
            return HIDDEN
        if isinstance(value, BaseException):
            value = f"{type(value).__name__}: {value}"
        return self.text(value) if isinstance(value, str) else value


class _Lines(logging.Formatter):
    """The common parts of both formats: the stamp, the message and the fields of a record, nothing secret in
    them.
    """

    def __init__(self, clock: Clock, hidden: _Hidden) -> None:
        super().__init__()
        self._clock, self._hidden = clock, hidden

    def access(self, access: AccessLine) -> str:
        """The line of one request. Its method and path come from a client, nothing else does."""
        raise NotImplementedError

    def _now(self) -> datetime:
        seconds, ns = divmod(self._clock.wall_ns(), NS_PER_S)
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=ns // 1000)

    def _parts(self, record: logging.LogRecord) -> tuple[str, dict[str, str | int | float | bool | None]]:
        fields: dict[str, Field] = dict(getattr(record, "fields", {}))
        if record.name != "penstock":
            fields["logger"] = record.name
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = record.exc_info[1]
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        shown = {name: self._hidden.value(name, value) for name, value in fields.items()}
        return self._hidden.text(record.getMessage()), shown


class _TextLines(_Lines):
    """For people: `12:34:56.789 info  message name=value`, a traceback in lines of its own."""

    def __init__(self, clock: Clock, hidden: _Hidden, *, colour: bool) -> None:
        super().__init__(clock, hidden)
        self._colour = colour
        self._second, self._stamp = -1, ""
        self._shown = functools.lru_cache(SHOWN_MAX)(self._plain)
        self._word = functools.lru_cache(SHOWN_MAX)(_quoted)
        self._info, self._debug = self._level_of("INFO"), self._level_of("DEBUG")

    def format(self, record: logging.LogRecord) -> str:
        message, fields = self._parts(record)
        trace = fields.pop("traceback", None)
        stamp, level = self._clock_time(), self._level_of(record.levelname)
        pairs = [f"{name}={_quoted(value)}" for name, value in fields.items()]
        line = " ".join([stamp, level, _CONTROL.sub(_escape, message), *pairs])
        lines = [] if trace is None else str(trace).splitlines()
        return "\n".join([line, *(_CONTROL.sub(_escape, text) for text in lines)])

    def access(self, access: AccessLine) -> str:
        """See `_Lines.access`."""
        what = self._shown(f"{access.method} {access.path}")
        line = (
            f"{self._clock_time()} {self._debug if access.is_poll else self._info} {what} "
            f"{access.status} duration_ms={round(access.duration_ns / NS_PER_MS, 3)}"
        )
        if access.request_id is not None:
            line += f" request_id={access.request_id}"
        if access.trace_id is not None:
            line += f" trace_id={access.trace_id}"
        if access.model is not None:
            line += (
                f" model={self._word(access.model)} outcome={access.outcome} "
                f"prompt_tokens={access.prompt_tokens} cached_tokens={access.cached_tokens} "
                f"generated_tokens={access.generated_tokens}"
            )
        return line if access.ttft_ns is None else f"{line} ttft_ms={round(access.ttft_ns / NS_PER_MS, 3)}"

    def _clock_time(self) -> str:
        """The time of day, which changes its first eight characters once a second."""
        second, ns = divmod(self._clock.wall_ns(), NS_PER_S)
        if second != self._second:
            self._second = second
            self._stamp = datetime.fromtimestamp(second, UTC).astimezone().strftime("%H:%M:%S")
        return f"{self._stamp}.{ns // NS_PER_MS:03}"

    def _level_of(self, name: str) -> str:
        level = f"{name.lower():7}"
        return f"{_COLOURS.get(name, '')}{level}\x1b[0m" if self._colour else level

    def _plain(self, text: str) -> str:
        return _CONTROL.sub(_escape, self._hidden.text(text))


class _JsonLines(_Lines):
    """For machines: one object per line with `ts`, `level`, `message` and the fields beside them."""

    def access(self, access: AccessLine) -> str:
        """See `_Lines.access`."""
        stamp = self._now().isoformat(timespec="microseconds").replace("+00:00", "Z")
        message = f"{self._hidden.text(f'{access.method} {access.path}')} {access.status}"
        level = "debug" if access.is_poll else "info"
        fields: dict[str, str | int | float] = {"duration_ms": _ms(access.duration_ns)}
        for name in _ACCESS_FIELDS:
            if (value := getattr(access, name)) is not None:
                fields[name] = value
        if access.ttft_ns is not None:
            fields["ttft_ms"] = _ms(access.ttft_ns)
        return msgspec.json.encode({"ts": stamp, "level": level, "message": message, **fields}).decode()

    def format(self, record: logging.LogRecord) -> str:
        message, fields = self._parts(record)
        stamp = self._now().isoformat(timespec="microseconds").replace("+00:00", "Z")
        head: dict[str, object] = {"ts": stamp, "level": record.levelname.lower(), "message": message}
        # A field of the same name must not pass for ours.
        line = head | {"fields": fields} if fields.keys() & head.keys() else head | fields
        return msgspec.json.encode(line).decode()


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if _PLAIN.fullmatch(text) else _CONTROL.sub(_escape, msgspec.json.encode(text).decode())


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()

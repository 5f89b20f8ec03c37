"""Server-sent events as bytes (WHATWG HTML, section 9.2), the little of them that OpenAI streams use:
written, and read.
"""

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that went well."""
HEARTBEAT = b": still here\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""


def event(data: bytes) -> bytes:
    r"""One event. `data` must hold no newline; JSON as msgspec writes it never does."""
    return b"data: %b\n\n" % data


class EventTooLong(ValueError):
    """An event is over the reader's bound."""


class EventReader:
    r"""Cuts a stream of bytes, as it comes, into the data of its events.

    Comments, event names and ids are dropped; several `data:` lines of one event are joined by newlines.
    Lines may end in LF, CR LF or CR. What was looked through once is not looked through again, however small
    the pieces are.
    """

    __slots__ = ("_after_cr", "_events_max_bytes", "_rest", "_seen")

    def __init__(self, event_bytes_max: int = 4 * 1024 * 1024) -> None:
        self._events_max_bytes = event_bytes_max
        self._rest = bytearray()
        self._seen = 0
        """Bytes of `_rest` that hold no end of an event."""
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is complete now.

        Raises:
            EventTooLong: one is over `event_bytes_max`; there is no going on after that.
        """
        if self._after_cr or b"\r" in data:
            data = self._with_plain_line_ends(data)
        rest = self._rest
        rest += data
        found: list[bytes] = []
        start = 0
        while (end := rest.find(b"\n\n", max(start, self._seen - 1))) >= 0:
            self._check(end - start)
            if (value := _data_of(bytes(rest[start:end]))) is not None:
                found.append(value)
            start = self._seen = end + 2
        if start:
            del rest[:start]
        self._check(len(rest))
        self._seen = len(rest)
        return found

    def _check(self, size: int) -> None:
        if size > self._events_max_bytes:
            raise EventTooLong(f"a server-sent event is over {self._events_max_bytes} bytes")

    def _with_plain_line_ends(self, data: bytes) -> bytes:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # The other half of a CR LF.
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(block: bytes) -> bytes | None:
    """The data of one event; None if it has none."""
    if block.startswith(b"data:") and b"\n" not in block:
        return block[6:] if block.startswith(b"data: ") else block[5:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None

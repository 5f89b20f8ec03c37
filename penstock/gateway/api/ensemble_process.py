"""The process in which the steps of one ensemble run: `python -m penstock.gateway.api.ensemble_process`.

Started by ensembles.py, which writes frames to standard input and reads one answer to each:

    frame   4 bytes of length, then JSON: first {path, entries, timeout_s, memory_bytes}, then
            {entry, arguments} for each call
    answer  one byte, 4 bytes of length, then JSON or UTF-8: see `OK` and what follows it

Output that steps print goes to standard error. Their memory is bounded beyond what importing them took. A
call that its parent did not end (it may have been killed itself) is ended by an alarm.
"""

import importlib
import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

OK, REFUSED, FAILED, NO_MEMORY, BROKEN = b"=", b"!", b"?", b"#", b"x"
"""The result, as JSON; the words of a ValueError; another error's type; it took too much memory; it
cannot be imported."""
LENGTH = struct.Struct(">I")
FRAME_BYTES_MAX = 64 << 20
MESSAGE_CHARS_MAX = 2000
ALARM_AFTER = 2.0
"""Times the bound: by then the parent has ended it."""
Entry = Callable[..., Any]


def main() -> None:
    """Answer frames until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    start = read_frame(source)
    if start is None:
        return
    try:
        entries = {name: _entry(name, start["path"]) for name in start["entries"]}
    except Exception as error:  # noqa: BLE001 - whatever an operator's module does.
        answer(sink, BROKEN, f"{type(error).__name__}: {error}"[:MESSAGE_CHARS_MAX].encode())
        return
    _bound_memory(start["memory_bytes"])
    answer(sink, OK, b"")
    while (frame := read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_REAL, ALARM_AFTER * start["timeout_s"])
        kind, data = _carried_out(entries[frame["entry"]], frame["arguments"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer(sink, kind, data)


def read_frame(source: IO[bytes]) -> dict[str, Any] | None:
    """The next frame; None at the end."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return json.loads(source.read(LENGTH.unpack(head)[0]))


def answer(sink: IO[bytes], kind: bytes, data: bytes) -> None:
    """Tell the parent."""
    sink.write(kind + LENGTH.pack(len(data)) + data)
    sink.flush()


def _entry(name: str, path: str) -> Entry:
    """The function that `module:function` names."""
    if path and path not in sys.path:
        sys.path.insert(0, path)
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    return found


def _carried_out(entry: Entry, arguments: list[Any]) -> tuple[bytes, bytes]:
    try:
        try:
            found = entry(*arguments)
        except ValueError as error:  # Its own words; that its result is no JSON is no word to the client.
            return REFUSED, str(error)[:MESSAGE_CHARS_MAX].encode("utf-8", "replace")
        # A step that changes what it was given may return nothing.
        data = json.dumps(arguments[0] if found is None else found, ensure_ascii=False, allow_nan=False)
        return OK, data.encode("utf-8", "surrogatepass")
    except MemoryError:
        return NO_MEMORY, b""
    except Exception as error:  # noqa: BLE001 - whatever an operator's function does.
        traceback.print_exc()
        return FAILED, type(error).__name__.encode()


def _bound_memory(num_bytes: int) -> None:
    """No more than this beyond what is there now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()

"""The process in which a chat template runs that cannot be trusted to stop:
`python -m penstock.text.template_worker`.

Started by chat.py, which writes frames to standard input and reads one answer to each:

    frame   4 bytes of length, then JSON: first {sources, limits}, then {name, variables, now_ns} for each
            prompt
    answer  one byte, 4 bytes of length, then UTF-8: see `OK` and what follows it

Its memory is bounded from the start, its processor time for each frame. When that is over, the kernel ends
the process.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jinja2

from penstock.text.sandbox import template_environment

OK, REFUSED, FAILED, TOO_LONG, NO_MEMORY, BROKEN = b"=", b"!", b"?", b"+", b"#", b"x"
"""The prompt; the template's own refusal; it failed on these messages; it writes too much; it takes too much
memory; it does not compile."""
LENGTH = struct.Struct(">I")
MESSAGE_CHARS_MAX = 2000
"""Of an error's message."""
FRAME_BYTES_MAX = 512 * 1024 * 1024
_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Clock:
    """The gateway's clock, as of the frame."""

    now_ns = 0

    def wall_ns(self) -> int:
        return self.now_ns


class Templates:
    """The compiled templates of one checkpoint."""

    def __init__(self, sources: Mapping[str, str], chars_max: int) -> None:
        self.clock = _Clock()
        self._chars_max = chars_max
        environment = template_environment(self.clock.wall_ns, chars_max=chars_max)
        # Constants wait until they are asked for: a large one in a branch that is never taken does no harm.
        environment.optimized = False
        environment.finalize = jinja2.pass_context(_as_it_is)
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}

    def render(self, name: str, variables: Mapping[str, Any]) -> tuple[bytes, str]:
        """The answer for one prompt."""
        pieces, room = list[str](), self._chars_max
        try:
            for piece in self._templates[name].generate(variables):
                room -= len(piece)
                if room < 0:
                    return TOO_LONG, ""
                pieces.append(piece)
        except jinja2.TemplateError as error:
            return REFUSED, str(error.message)[:MESSAGE_CHARS_MAX]
        except _FAILURES as error:
            return FAILED, str(error)[:MESSAGE_CHARS_MAX]
        except MemoryError:
            return NO_MEMORY, ""
        return OK, "".join(pieces)


def _as_it_is(_context: object, value: object) -> object:
    return value


def main() -> None:
    """Answer frames until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business.
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    start = read_frame(source)
    if start is None:
        return None
    cpu_s = start["cpu_s"]
    _bound_memory(start["memory_bytes"])
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        templates = Templates(start["sources"], start["chars_max"])
    except jinja2.TemplateSyntaxError as error:
        return _answer(sink, BROKEN, f"line {error.lineno}: {error}"[:MESSAGE_CHARS_MAX])
    except (RecursionError, SyntaxError):
        return _answer(sink, BROKEN, "nests too deeply")
    except MemoryError:  # Also what Python's compiler says of what nests too deeply.
        return _answer(sink, BROKEN, "nests too deeply, or takes too much memory to compile")
    _answer(sink, OK, "")
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        frame = read_frame(source)
        if frame is None:
            return None
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        templates.clock.now_ns = frame["now_ns"]
        _answer(sink, *templates.render(frame["name"], frame["variables"]))


def read_frame(source: IO[bytes]) -> dict[str, Any] | None:
    """The next frame; None at the end."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    assert length <= FRAME_BYTES_MAX
    return json.loads(source.read(length))


def _answer(sink: IO[bytes], kind: bytes, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    sink.write(kind + LENGTH.pack(len(data)) + data)
    sink.flush()


def _bound_memory(num_bytes: int) -> None:
    """No more than this beyond what Python and Jinja take."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()

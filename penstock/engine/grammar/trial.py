"""A process that tries to compile a grammar first: one that takes too long, or too much memory, ends there.

    engine process                        trial process                    one trial
      SchemaTrials.check  -- form -->  reads, forks   -------------------->  compiles, within limits
                    <-- refusal or none --      <-- refusal, or it was killed --

Compiling cannot be interrupted in a thread, and some schemas of a few bytes would take hours or overflow the
stack. The process has imported the library and nothing else, so that a fork takes a millisecond.
"""

import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading

import msgspec

from penstock.engine.grammar.source import check_form
from penstock.errors import InvalidRequest, WorkerUnavailable

TRIAL_CPU_S = 0.1
"""CPU time of one trial. A backstop, more than twice what the largest schema within the bounds of bounds.py
takes here: it must not be a matter of chance whether an ordinary schema is refused."""
TRIAL_MEMORY_BYTES = 1 << 30
"""Address space of one trial."""
TRIAL_WALL_S = 10.0
"""A trial that has no end after so long takes the process with it."""
_LENGTH = struct.Struct("<I")


class _Refusal(msgspec.Struct):
    message: str
    param: str = ""
    is_ours: bool = False
    """There was no trial: this machine lacks something."""


class SchemaTrials:
    """The engine's end of the process. Thread-safe: one trial at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = self._start()

    def check(self, form: bytes) -> None:
        """Try to compile it.

        Raises:
            InvalidRequest: that cannot be done, or takes too much.
            WorkerUnavailable: this machine has no process or no memory for a trial now.
        """
        with self._lock:
            if self._process.poll() is not None:
                self.close()
                try:
                    self._process = self._start()
                except OSError as error:
                    raise WorkerUnavailable(f"no grammar can be compiled now: {error}") from error
            reply = self._ask(form)
            if reply is None:
                self.close()
        if reply is None:
            raise WorkerUnavailable("no grammar can be compiled now: the trial has no end")
        if reply:
            refusal = msgspec.msgpack.decode(reply, type=_Refusal)
            if refusal.is_ours:
                raise WorkerUnavailable(f"no grammar can be compiled now: {refusal.message}")
            raise InvalidRequest(refusal.message, param=refusal.param)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with self._process:  # It closes the pipes.
            pass

    def _ask(self, form: bytes) -> bytes | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(_LENGTH.pack(len(form)) + form)
            stdin.flush()
            if not select.select([stdout], [], [], TRIAL_WALL_S)[0]:
                return None
            return _read(stdout.fileno())
        except OSError:
            return None

    @staticmethod
    def _start() -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "penstock.engine.grammar.trial"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main() -> None:
    """The process: one trial after the other, until nothing more can be asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (form := _read(0)) is not None:
        reply = _try(form)
        _write(1, reply)


def _try(form: bytes) -> bytes:
    """The refusal of one grammar; empty: it can be compiled."""
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return msgspec.msgpack.encode(_Refusal(str(error), is_ours=True))
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)  # SIGPROF ends the process.
        resource.setrlimit(resource.RLIMIT_AS, (TRIAL_MEMORY_BYTES, TRIAL_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # The last words of a stack that overflows.
        try:
            check_form(form)
            _write(writer, b"")
        except InvalidRequest as error:
            _write(writer, msgspec.msgpack.encode(_Refusal(str(error), error.param or "")))
        finally:
            os._exit(0)  # In no case may a second process continue to read.
    os.close(writer)
    reply = _read(reader)
    os.close(reader)
    os.waitpid(child, 0)
    if reply is not None:
        return reply
    return msgspec.msgpack.encode(_Refusal("it takes too much time or memory to compile"))


def _write(file: int, body: bytes) -> None:
    left = memoryview(_LENGTH.pack(len(body)) + body)
    while left:
        left = left[os.write(file, left) :]


def _read(file: int) -> bytes | None:
    """One message; None: there are no more."""
    body, size = b"", _LENGTH.size
    for part in range(2):
        body = b""
        while len(body) < size:
            more = os.read(file, min(size - len(body), 1 << 20))
            if not more:
                return None
            body += more
        if part == 0:
            (size,) = _LENGTH.unpack(body)
    return body


if __name__ == "__main__":
    main()

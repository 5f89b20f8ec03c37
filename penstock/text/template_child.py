"""A checkpoint's templates in a process of their own, with bounds on its time, its memory and what it writes.

One process per checkpoint and gateway process, started when it is first needed and again after it had to be
ended. It renders one prompt at a time, so a template that runs away keeps only requests for the same model
waiting. Every call blocks: the gateway makes them in a thread (gateway/models/prepare.py).
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.errors import CheckpointError, InvalidRequest
from penstock.text.template_worker import BROKEN, FAILED, LENGTH, NO_MEMORY, OK, REFUSED, TOO_LONG


@dataclass(slots=True, frozen=True)
class ChildLimits:
    """The bounds of one prompt."""

    cpu_s: float = 1.0
    """Processor time: a thousand times what a published template takes for a long chat."""
    wall_s: float = 30.0
    """Should the process be kept from its processor time."""
    memory_bytes: int = 256 * 1024 * 1024
    """Beyond what Python and Jinja take."""
    chars_max: int = 8 * 1024 * 1024
    """Of the prompt."""


class _Ended(Exception):
    """The process ended, or had to be."""


class TemplateChild:
    """The process, as its parent sees it."""

    def __init__(self, sources: Mapping[str, str], limits: ChildLimits, wall_ns: Callable[[], int]) -> None:
        self._start_frame: dict[str, Any] = {
            "sources": dict(sources), "cpu_s": limits.cpu_s, "memory_bytes": limits.memory_bytes,
            "chars_max": limits.chars_max,
        }  # fmt: skip
        self._limits, self._wall_ns = limits, wall_ns
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def check(self) -> None:
        """Start the process and compile the templates there.

        Raises:
            CheckpointError: they do not compile, or not within the limits.
        """
        with self._lock:
            self._running()

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """The prompt that the template of this name makes.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, or takes too much for them.
        """
        try:
            data = _encode({"name": name, "variables": variables, "now_ns": self._wall_ns()})
        except RecursionError:
            raise InvalidRequest("the messages nest too deeply", param="messages") from None
        with self._lock:
            try:
                self._send(self._running(), data)
                kind, text = self._answer()
            except (_Ended, CheckpointError) as error:
                raise InvalidRequest(f"the chat template {error}", param="messages") from error
            if kind in (TOO_LONG, NO_MEMORY):
                self._stop()  # Its state is not worth keeping.
        if kind == OK:
            return text
        if kind in (REFUSED, FAILED):
            fails = " fails on these messages" if kind == FAILED else ""
            raise InvalidRequest(f"the chat template{fails}: {text}", param="messages")
        raise InvalidRequest(f"the chat template {self._limit_of(kind)}", param="messages")

    def close(self) -> None:
        """End the process, whatever it does. A caller that waits for its answer gets none."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _limit_of(self, kind: bytes) -> str:
        limits = self._limits
        if kind == TOO_LONG:
            return f"makes a prompt over the bound of {limits.chars_max} characters"
        return f"takes more than {limits.memory_bytes // 2**20} MiB of memory for these messages"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        # It gets no secrets of ours, should a template find a way out of the sandbox.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.text.template_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)
        try:
            self._send(self._process, _encode(self._start_frame))
            kind, text = self._answer()
        except _Ended as error:
            raise CheckpointError(f"{error} while it was compiled") from error
        if kind == BROKEN:
            self._stop()
            raise CheckpointError(text)
        return self._process

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(LENGTH.pack(len(data)) + data)
            process.stdin.flush()
        except OSError as error:
            raise _Ended(self._why()) from error

    def _answer(self) -> tuple[bytes, str]:
        head = self._read(1 + LENGTH.size)
        (length,) = LENGTH.unpack(head[1:])
        if length > 4 * self._limits.chars_max:  # It is not believed, for who knows what runs there.
            self._stop()
            raise _Ended("writes too much")
        return head[:1], self._read(length).decode("utf-8", "surrogatepass")

    def _read(self, num_bytes: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, pieces, poll = self._process.stdout.fileno(), list[bytes](), select.poll()
        poll.register(descriptor, select.POLLIN)
        while num_bytes:
            if not poll.poll(self._limits.wall_s * 1000):
                self._stop()
                raise _Ended(f"took more than {self._limits.wall_s:g} s")
            piece = os.read(descriptor, min(num_bytes, 1 << 20))
            if not piece:
                raise _Ended(self._why())
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)

    def _why(self) -> str:
        """Why the process ended, which it did."""
        process = self._process
        self._stop()
        code = None if process is None else process.returncode
        if code == -signal.SIGPROF:
            return f"took more than {self._limits.cpu_s:g} s of processor time"
        return f"was ended (exit code {code})"

    def _stop(self) -> None:
        self._end()
        self._process = None


def _encode(frame: Mapping[str, Any]) -> bytes:
    return json.dumps(frame, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave neither a process nor a zombie behind."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # There is something left that it did not read.
                pipe.close()
    try:
        process.wait(0.2)  # It may be ending by itself: then its exit code says why.
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""Starting a server, waiting until it answers, weighing it and stopping it with all its processes."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.peers.engines import Launch

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.02
LOG_TAIL_CHARS = 2000


class DidNotStart(Exception):
    """The server ended or did not answer in time; the message has the end of its log."""


class Server:
    """A running server. `ready_s` is from its start to its first answered request."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, ready_s: float) -> None:
        self._process, self.port, self.ready_s = process, port, ready_s

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def resident_bytes(self) -> int:
        """Resident memory of the server's processes together."""
        top = psutil.Process(self._process.pid)
        total = 0
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


def _environment() -> dict[str, str]:
    """Ours, but everybody keeps compiled modules, as an installed server does."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@contextlib.contextmanager
def serving(launch: Launch, model: str, port: int, log: Path) -> Iterator[Server]:
    """The server inside the block.

    Raises:
        DidNotStart: it ended before its first answer, or had none in `START_TIMEOUT_S`.
    """
    for path, text in launch.files.items():
        path.write_text(text, encoding="utf-8")
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment() | launch.environment,
            start_new_session=True,
        )
    try:
        while not _answers(port, model):
            waited = time.monotonic() - started
            if process.poll() is not None or waited > START_TIMEOUT_S:
                tail = log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
                raise DidNotStart(f"no answer after {waited:.0f} s; {log} ends:\n{tail}")
            time.sleep(POLL_S)
        yield Server(process, port, time.monotonic() - started)
    finally:
        _stop(process)


def _answers(port: int, model: str) -> bool:
    """Whether the server generates: a health page alone may come before the first token is possible."""
    body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to stop; after that, end what is left of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

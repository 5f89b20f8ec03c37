"""A real Redis of a test's own, on a free port of the loopback, that can be stopped, killed and started
again.
"""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from free_port import free_port


class RedisProcess:
    """`redis-server` without persistence: a restart has lost its memory."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("redis-server") is not None

    def start(self) -> None:
        options = (
            f"--port {self.port} --bind 127.0.0.1 --appendonly no --dir {self._directory} --loglevel warning"
        )
        command = ["redis-server", *options.split(), "--save", ""]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1) as connection,
            ):
                connection.sendall(b"PING\r\n")
                if connection.recv(16).startswith(b"+PONG"):
                    return
            assert self._process.poll() is None, "redis-server ended at its start"
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

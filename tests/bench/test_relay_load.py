"""The load client in C, where peers end connections that nobody uses."""

import json
import selectors
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from bench.process import build

CONNECTIONS, CLOSED, REQUESTS = 12, 4, 6
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class ClosingServer:
    """Ends the first connections as soon as all are made, which makes them the last that a load of so few
    requests would use; then it answers. A thread of its own.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def end(self) -> int:
        """How many connections were made after the first."""
        self._wake.send(b".")
        self._thread.join()
        self._listener.setblocking(False)
        more = len(self._open) - (CONNECTIONS - CLOSED)
        while True:
            try:
                self._open.append(self._listener.accept()[0])
            except BlockingIOError:
                break
            more += 1
        for each in (*self._open, self._listener, self._wake, self._woken):
            each.close()
        return more

    def _serve(self) -> None:
        made = [self._listener.accept()[0] for _ in range(CONNECTIONS)]
        for each in made[:CLOSED]:
            each.close()
        self._open = made[CLOSED:]
        with selectors.DefaultSelector() as selector:
            for each in (*self._open, self._listener, self._woken):
                selector.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is self._woken:
                        return
                    if ready is self._listener:
                        self._open.append(ready.accept()[0])
                        selector.register(self._open[-1], selectors.EVENT_READ)
                    elif ready.recv(1 << 16):
                        ready.sendall(ANSWER)
                    else:
                        selector.unregister(ready)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("load")
    build(into)
    return into / "load"


def test_an_idle_connection_that_ends_is_no_request_of_an_open_load(load: Path, tmp_path: Path) -> None:
    request, server = tmp_path / "request", ClosingServer()
    request.write_bytes(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    command = [load, server.port, CONNECTIONS, REQUESTS, request, 2000]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    more = server.end()
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["requests"], seen["errors"], more) == (REQUESTS, 0, CLOSED), done.stderr

"""`penstock serve` stops without a loss: a lame duck serves, a drain refuses in words, a second signal
settles what clients got, and another server takes the port over without a gap.
"""

import contextlib
import http.client
import json
import signal
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from free_port import free_port
from http_answers import Answer, begin, talk
from served import PATIENCE_S, Server
from stand_in_thread import MODEL, Serve, stand_in_engine

pytestmark = pytest.mark.timeout(240)

KEY, OTHER_KEY = "sk-of-this-test-0123", "sk-of-another-tenant-4567"
LONG = 2400
"""Tokens of answers of which several take our engine some seconds."""


def completion(**fields: object) -> dict:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 2, **fields}


class Storm:
    """Clients that come one after the other, each on a connection of its own, until the port is closed."""

    def __init__(self, port: int, key: str, calm: threading.Event) -> None:
        """They take their time until `calm` is set."""
        body = json.dumps(completion()).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n"
        self._request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._port, self._calm = port, calm
        self.answers: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._come, daemon=True) for _ in range(8)]
        for thread in self._threads:
            thread.start()

    def _come(self) -> None:
        answer = ""
        while answer != "refused":
            answer = self._ask()
            self.answers[answer] += 1
            self._calm.wait(0.05)

    def _ask(self) -> str:
        try:
            connection = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S)
        except ConnectionRefusedError:
            return "refused"
        with connection:
            try:
                connection.sendall(self._request)
                found = b""
                while data := connection.recv(65536):
                    found += data
            except OSError as error:
                return repr(error)
        words = found.split(b" ", 2)
        return words[1].decode() if found.endswith(b"}") else f"cut off: {found!r}"

    def end(self) -> set[str]:
        """Wait until the port is closed to all of them; what they met."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return set(self.answers)


# --- the first signal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_serves_then_refuses_while_streams_end(tmp_path: Path, processes: int) -> None:
    gateway = Serve(
        tmp_path / "gateway",
        None,
        {"acme": "weight: 1", "umbrella": "weight: 1"},
        processes=processes,
        port=(port := free_port()),
        lameduck_s=1.0,
        drain_timeout_s=90,
    )
    server, key = gateway.server, gateway.keys["acme"]
    try:
        server.wait_ready()
        assert talk(port, "/ready").status == 200
        body = completion(stream=True, max_tokens=LONG, ignore_eos=True)
        streams = [begin(port, "/v1/completions", body, each) for each in [*gateway.keys.values()] * 3]
        server.process.send_signal(signal.SIGTERM)
        server.wait_said("requests are served for 1 s more")
        server.until(lambda: talk(port, "/ready").status == 503, "still ready")
        assert b'"draining"' in talk(port, "/ready").body
        served = talk(port, "/v1/completions", completion(), key)
        assert (served.status, served.headers["connection"]) == (200, "close")
        statuses, deadline = [served.status], time.monotonic() + PATIENCE_S
        while statuses[-1] == 200:
            assert time.monotonic() < deadline
            refused = talk(port, "/v1/completions", completion(), key)
            statuses.append(refused.status)
        assert not streams[-1].ended.is_set(), "streams go on while new requests are refused"
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) >= 1
        assert json.loads(refused.body)["error"]["code"] == "draining"
        storm = Storm(port, key, streams[-1].ended)
        for stream in streams:
            assert stream.ended.wait(PATIENCE_S)
            assert stream.last == "[DONE]"
        assert server.wait_ended() == 0
        # One process may serve until the end of its own lame-duck time while the other refuses already.
        assert storm.end() - ({"200"} if processes > 1 else set()) == {"503", "refused"}, storm.answers
        assert "Traceback" not in server.err.read_text()
    finally:
        server.close()


# --- the second signal --------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_sigterm_settles_what_clients_got(tmp_path: Path, processes: int) -> None:
    port, ledger = free_port(), tmp_path / "ledger"
    file = tmp_path / "penstock.yaml"
    file.write_text(
        f"models: [{{path: penstock-demo-mini, name: {MODEL}, engine: {{threads: 1}}}}]\n"
        f"server: {{port: {port}, processes: {processes}}}\n"
        f"ledger: {{directory: {ledger}}}\n"
        f"auth: {{keys: [{KEY}, {OTHER_KEY}]}}\n"
    )
    server = Server(tmp_path, "-c", str(file))
    try:
        server.wait_ready()
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Count."}],
            "stream": True,
            "max_tokens": 3000,
            "ignore_eos": True,
            "logprobs": True,
        }
        keys, wholes = [KEY, OTHER_KEY] * 3, [Answer(), Answer()]
        for key, answer in zip(keys, wholes, strict=False):
            asked = (port, "/v1/chat/completions", body | {"stream": False, "logprobs": False}, key, answer)
            threading.Thread(target=talk, args=asked, daemon=True).start()
        streams = [begin(port, "/v1/chat/completions", body, key) for key in keys]
        server.until(lambda: all(stream.tokens > 40 for stream in streams), "no tokens")
        server.process.send_signal(signal.SIGTERM)
        server.wait_said("requests are served for 10 s more (Ctrl-C again to stop now)")
        time.sleep(0.4)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_ended() == 130
        for stream in streams:
            assert stream.ended.wait(PATIENCE_S)
            assert json.loads(stream.last)["error"]["code"] == "draining"
        for answer in wholes:
            assert answer.ended.wait(PATIENCE_S)
            assert answer.status == 503
            assert json.loads(answer.body)["error"]["code"] == "draining"
    finally:
        server.close()
    with closing(sqlite3.connect(ledger / "usage.sqlite")) as database:
        rows = database.execute("SELECT outcome, error, recovered, completion_tokens FROM usage").fetchall()
    assert {row[:3] for row in rows} == {("failed", "Draining", 0)}
    # Those that are not streamed got nothing.
    assert sorted(row[3] for row in rows) == sorted(answer.tokens for answer in [*streams, *wholes])


# --- a signal before it serves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "processes", "when"),
    [
        (signal.SIGTERM, 1, "it imports"),
        (signal.SIGTERM, 2, "its worker begins"),
        (signal.SIGINT, 1, "its worker loads"),
    ],
)
def test_a_signal_while_it_starts_ends_it_at_once_and_all_that_it_began(
    tmp_path: Path, number: signal.Signals, processes: int, when: str
) -> None:
    mark = f"PENSTOCK_TEST_MARK={tmp_path}"
    port = free_port()
    server = Server(
        tmp_path, "penstock-demo-mini", "--port", str(port), "--threads", "1", "--no-auth",
        "--processes", str(processes), PENSTOCK_TEST_MARK=str(tmp_path),
    )  # fmt: skip
    reached: dict[str, Callable[[], object]] = {
        "it imports": lambda: catches(server.process.pid, signal.SIGTERM),
        "its worker begins": lambda: server.workers,
        "its worker loads": lambda: listens(port),
    }
    try:
        server.until(reached[when], "it does not start")
        server.process.send_signal(number)
        assert server.wait_ended() == 0, server.err.read_text()
        server.until(lambda: not those_with(mark), "something is left of it")
        assert "Traceback" not in server.err.read_text()
        assert "Penstock is ready" not in server.out.read_text()
    finally:
        server.close()


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)


def those_with(variable: str) -> list[str]:
    """The processes that run in an environment."""
    found: list[str] = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(place.name)
    return found


# --- a worker that is drained while it starts -----------------------------------------------------------


def test_draining_a_worker_while_it_starts_does_not_end_serve(tmp_path: Path) -> None:
    port = free_port()
    server = Server(
        tmp_path, "penstock-demo-mini", "--name", MODEL, "--port", str(port), "--threads", "1", "--no-auth"
    )
    try:
        server.until(lambda: listens(port), "nobody listens")
        drained = talk(port, f"/admin/workers/{MODEL}-0/drain", {"timeout_s": 5})
        assert drained.status == 200, drained.body
        server.wait_ready()
        assert talk(port, "/ready").status == 503
        assert talk(port, f"/admin/workers/{MODEL}-0/undrain", {}).status == 200
        server.until(lambda: talk(port, "/ready").status == 200, "it does not come back")
        assert talk(port, "/v1/completions", completion()).status == 200
    finally:
        server.close()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# --- a takeover ---------------------------------------------------------------------------------------


@pytest.fixture
def asking() -> Iterator[Callable[..., "Askers"]]:
    made: list[Askers] = []

    def start(port: int, keys: Sequence[str]) -> Askers:
        made.append(Askers(port, keys))
        return made[-1]

    yield start
    for each in made:
        each.stop()


class Askers:
    """Clients that ask one request after the other: on a new connection each, on one that is kept, and on one
    that is kept for long streams.
    """

    def __init__(self, port: int, keys: Sequence[str]) -> None:
        self.port = port
        self.statuses: list[int] = []
        self.errors: list[str] = []
        self.num_streams = 0
        """Those that came to their end."""
        self._is_over = threading.Event()
        short, long = completion(), completion(stream=True, max_tokens=400, ignore_eos=True)
        asked = [(False, short), (False, short), (True, short), (True, long)]
        self._threads = [
            threading.Thread(target=self._ask, args=(keys[number % len(keys)], kept, body))
            for number, (kept, body) in enumerate(asked)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, key: str, kept: bool, body: dict) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"authorization": f"Bearer {key}"}
        while not self._is_over.is_set():
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                response = connection.getresponse()
                self._take(response, body)
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                connection.close()
            if not kept:
                connection.close()  # `http.client` connects anew, as after an answer that says close.
        connection.close()

    def _take(self, response: http.client.HTTPResponse, body: dict) -> None:
        data = response.read()
        self.statuses.append(response.status)
        if "stream" in body:
            self.num_streams += 1
            if not data.endswith(b"data: [DONE]\n\n"):
                self.errors.append(f"a stream ends with {data[-200:]!r}")

    def more(self, count: int) -> None:
        """Wait for so many more answers, one of them a long stream."""
        goal, streams = len(self.statuses) + count, self.num_streams
        deadline = time.monotonic() + PATIENCE_S
        while (len(self.statuses) < goal or self.num_streams == streams) and not self.errors:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.mark.parametrize("processes", [1, 2])
def test_another_server_takes_over_without_a_gap(
    tmp_path: Path, processes: int, asking: Callable[[int, Sequence[str]], Askers]
) -> None:
    """Each with workers of its own."""
    gateway = Serve(
        tmp_path / "gateway",
        None,
        {"acme": "weight: 1", "umbrella": "weight: 1"},
        "admission: {ttft_target_ms: 0, tpot_target_ms: 0, targets: []}",  # However busy the machine is.
        processes=processes,
        port=(port := free_port()),
        lameduck_s=20,  # It ends with the last connection.
        drain_timeout_s=30,
    )
    old = gateway.server
    try:
        old.wait_ready()
        askers = asking(port, [*gateway.keys.values()])
        askers.more(20)
        (tmp_path / "gateway" / "out").rename(tmp_path / "out")
        (tmp_path / "gateway" / "err").rename(tmp_path / "err")
        old.out, old.err = tmp_path / "out", tmp_path / "err"
        gateway.start("--take-over")
        gateway.server.wait_ready()
        old.wait_said("another server has taken over")
        askers.more(50)
        assert old.wait_ended() == 0
        askers.more(50)
        askers.stop()
        assert askers.errors == []
        assert set(askers.statuses) == {200}, Counter(askers.statuses)
        assert gateway.server.process.poll() is None
        gateway.server.process.send_signal(signal.SIGINT)
        assert gateway.server.wait_ended() == 0
    finally:
        old.close()
        gateway.server.close()


def test_nothing_to_take_over_is_a_plain_start(tmp_path: Path) -> None:
    with stand_in_engine() as engine:
        gateway = Serve(tmp_path / "gateway", engine, {"acme": "weight: 1"}, port=(port := free_port()))
        gateway.kill()  # Its Unix socket is left behind, and nobody answers there.
        gateway.start("--take-over")
        try:
            gateway.server.wait_ready()
            assert talk(port, "/v1/completions", completion(), gateway.keys["acme"]).status == 200
        finally:
            gateway.kill()


def test_a_server_that_cannot_serve_takes_nothing_over(tmp_path: Path) -> None:
    with stand_in_engine() as engine:
        gateway = Serve(tmp_path / "gateway", engine, {"acme": "weight: 1"}, port=(port := free_port()))
        key = gateway.keys["acme"]
        try:
            gateway.server.wait_ready()
            place = tmp_path / "broken"
            place.mkdir()
            broken = Server(
                place,
                "penstock-demo-mini",
                "--port",
                str(port),
                "--no-auth",
                "--take-over",
                "--kv-memory",
                "1",
            )
            assert broken.wait_ended() != 0
            gateway.server.wait_said("the server that was to take over is gone; this one stays")
            assert talk(port, "/v1/completions", completion(), key).status == 200
        finally:
            gateway.kill()

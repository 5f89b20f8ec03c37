"""`penstock top` and `penstock drain`, against a server that answers /admin by a script."""

import http.server
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading

import msgspec
import pytest
from rich.console import Console

from penstock.cli.commands.top import tables, view_of
from penstock.cli.main import main
from penstock.cli.wiring.state import save_key
from penstock.protocol.fleet import FleetReport, ModelReport, WorkerReport

KEY = "sk-admin"
PATIENCE_S = 30.0


def report(tokens: int = 0, *, ttft=(0, 0.0), **worker: object) -> FleetReport:
    first = {
        "id": "m-0", "model": "m", "engine": "penstock", "state": "ready", "running": 3, "waiting": 1,
        "kv_blocks_used": 25, "kv_blocks_total": 100, "generated_tokens": tokens, "age_s": 0.4, **worker,
    }  # fmt: skip
    second = WorkerReport(
        id="m@h:1",
        model="m",
        engine="vllm",
        state="starting",
        stage="connection refused",
        notes=["it was killed"],
    )
    model = ModelReport(name="m", waiting=7, ready=1, workers=2, ttft_count=ttft[0], ttft_sum_s=ttft[1])
    return FleetReport(version="1.2", workers=[WorkerReport(**first), second], models=[model])


def shown(view) -> str:
    console = Console(width=100, file=None, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(tables(view, "here"))
    return capture.get()


def test_rates_are_of_the_time_between_two_reports() -> None:
    view = view_of(report(500, ttft=(12, 3.0)), report(100, ttft=(10, 2.0)), 2.0)
    assert [worker.tokens_per_s for worker in view.workers] == [200.0, None]
    (model,) = view.models
    assert (model.tokens_per_s, model.running, model.ttft_s) == (200.0, 3, 0.5)


def test_a_worker_that_started_anew_has_no_rate_and_none_is_negative() -> None:
    assert view_of(report(5, epoch=2), report(100, epoch=1), 1.0).workers[0].tokens_per_s is None
    assert view_of(report(5), report(100), 1.0).workers[0].tokens_per_s == 0
    assert view_of(report(5), None, 0.0).models[0].ttft_s is None


def test_the_table_says_how_every_worker_is() -> None:
    text = shown(view_of(report(500, ttft=(12, 3.0)), report(100, ttft=(10, 2.0)), 2.0))
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert ["m", "1/2", "7", "3", "200", "500", "ms"] in lines
    assert ["m-0", "penstock", "ready", "3", "1", "25%", "200", "0", "s", "0"] in lines
    assert "    connection refused\n" in text
    assert "m@h:1: it was killed" in text


def test_what_workers_say_cannot_steer_the_terminal() -> None:
    said = report(state="loading", stage="\x1b[2J[red]x[/red]", notes=["\x1b]0;x\x07"], id="m\x1b-0")
    text = shown(view_of(said, None, 1.0))
    assert "\x1b" not in text
    assert "[red]x[/red]" in text


class Scripted(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.count += 1
        self._answer(msgspec.json.encode(report(100 * self.server.count)))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.orders.append((self.path, body))
        if "nobody" in self.path:
            self._answer(b'{"error": {"message": "There is no such worker: nobody."}}', 404)
        else:
            self._answer(b'{"id": "x", "state": "draining", "streams": 2}')

    def _answer(self, body: bytes, status: int = 200) -> None:
        if self.headers.get("authorization") != f"Bearer {KEY}":
            body, status = b'{"error": {"message": "This key may not use /admin."}}', 403
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as made:
        made.count, made.orders, made.daemon_threads = 0, [], True
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        made.url = f"http://127.0.0.1:{made.server_port}"
        yield made
        made.shutdown()
        thread.join()


def test_once_as_json_and_the_key_of_ones_own_server(server, capsys) -> None:
    save_key("127.0.0.1", server.server_port, KEY)
    assert main(["top", "--once", "--json", "--url", f"{server.url}/v1", "--interval", "0.1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    view = json.loads(line)
    assert view["workers"][0]["state"] == "ready"
    assert view["workers"][0]["tokens_per_s"] > 0
    assert view["models"][0]["waiting"] == 7


def test_without_a_terminal_it_looks_once(server, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", KEY)
    assert main(["top", "--url", server.url, "--interval", "0.1"]) == 0
    assert "1 of 2 workers ready" in capsys.readouterr().out


def test_errors_say_what_to_do(server, capsys) -> None:
    assert main(["top", "--url", server.url, "--key", "wrong"]) == 1
    text = capsys.readouterr().err
    assert "This key may not use /admin." in text
    assert "PENSTOCK_ADMIN_KEY" in text
    assert main(["top", "--url", "http://127.0.0.1:1"]) == 1
    assert "penstock serve" in capsys.readouterr().err
    assert main(["top", "--url", "gopher://x"]) == 2


def test_ctrl_c_leaves_the_screen_as_it_was(server) -> None:
    parent, child = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "penstock",
        "top",
        "--url",
        server.url,
        "--key",
        KEY,
        "--interval",
        "0.1",
    ]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    seen = b""
    while b"m-0" not in seen:
        assert select.select([parent], [], [], PATIENCE_S)[0], seen
        seen += os.read(parent, 65_536)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    while select.select([parent], [], [], 0.2)[0]:
        try:
            seen += os.read(parent, 65_536)
        except OSError:
            break
    os.close(parent)
    assert b"\x1b[?25h" in seen[-40:], "the cursor is back"
    assert b"\x1b[?1049l" in seen, "and so is what was there before"
    assert b"Traceback" not in seen


def test_drain_names_the_worker_and_undo_brings_it_back(server, capsys) -> None:
    flags = ["--url", server.url, "--key", KEY]
    assert main(["drain", "m/x@h:1", "--timeout", "2m", "--no-wait", *flags]) == 0
    assert "drains 2 streams" in capsys.readouterr().err
    assert main(["drain", "elsewhere", *flags]) == 0, "who is not listed any more is gone"
    assert main(["drain", "m-0", "--undo", *flags]) == 0
    assert server.orders == [
        ("/admin/workers/m%2Fx%40h%3A1/drain", b'{"timeout_s":120}'),
        ("/admin/workers/elsewhere/drain", b""),
        ("/admin/workers/m-0/undrain", b""),
    ]
    assert main(["drain", "nobody", *flags]) == 1
    assert "no such worker" in capsys.readouterr().err

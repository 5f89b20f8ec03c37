"""A real Prometheus and Alertmanager: every query of the dashboard, and an alert on its way to a webhook.
Only `make test-prometheus` runs it.
"""

import http.server
import json
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port
from prometheus_programs import ROOT, SHIPPED, program

from penstock.policy.resilience.worker_state import WorkerState
from penstock.protocol.worker import Stats
from penstock.telemetry.alerting import Alert, webhook_body
from penstock.telemetry.catalog import Endpoint, OutcomeLabel
from penstock.telemetry.counts import EndedTogether, RequestMeasurement
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.worker_meters import WorkerLabels

HERE = ROOT / "examples" / "observability"
PATIENCE_S = 90.0
pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(300)]


class Server:
    """`/metrics` of a model under load, whose worker ends while it runs; everything else is a webhook."""

    def __init__(self) -> None:
        self.metrics, self.reported = Metrics(["m"], version="1"), list[dict[str, Any]]()
        self.steps = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(outer.page())

            def do_POST(self) -> None:
                outer.reported.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer(b"")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def page(self) -> bytes:
        self.steps += 1
        record = RequestMeasurement(
            endpoint=Endpoint.CHAT, outcome=OutcomeLabel.STOP, duration_ns=10**9, queue_ns=10**7,
            ttft_ns=10**8, tpot_ns=10**7, prompt_tokens=100, cached_tokens=50, generated_tokens=10,
            tenant="acme", worker="m-0",
        )  # fmt: skip
        model = self.metrics.model("m")
        model.worker_facts({"m-0": WorkerLabels("penstock", "f00", "a device")})
        model.requests_ended(EndedTogether(record))
        self.metrics.tenant(EndedTogether(record))
        for objective in ("availability", "ttft"):
            self.metrics.judged("m", "default", objective, due=1, missed=0)
        model.engine_stats({"m-0": Stats(step=self.steps, running=2, waiting=0, blocks_total=9, blocks_used=3,
                                         blocks_cached=3, step_ns=self.steps * 10**8)})  # fmt: skip
        model.workers([WorkerState.READY])
        self.metrics.queue_waiting("m", 1)
        if self.steps == 8:
            model.engine_restarted()
        return self.metrics.render()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    server, ports = Server(), (free_port(), free_port())
    manager, prometheus = (f"127.0.0.1:{port}" for port in ports)
    key = tmp_path / "key"
    key.write_text("sk-scrape")
    text = (HERE / "prometheus.yml").read_text().replace("interval: 5s", "interval: 1s")
    text = text.replace("interval: 15s", "interval: 1s")
    for name, value in (
        ("RULES", SHIPPED),
        ("ALERTMANAGER", manager),
        ("KEY_FILE", key),
        ("SERVER", server.address),
    ):
        text = text.replace(name, str(value))
    (tmp_path / "prometheus.yml").write_text(text)
    routes = (HERE / "alertmanager.yml").read_text().replace("127.0.0.1:9099", server.address)
    (tmp_path / "alertmanager.yml").write_text(routes)
    commands = (
        (program("alertmanager"), f"--config.file={tmp_path}/alertmanager.yml", "--cluster.listen-address=",
         f"--storage.path={tmp_path}/a", f"--web.listen-address={manager}"),
        (program("prometheus"), f"--config.file={tmp_path}/prometheus.yml",
         f"--storage.tsdb.path={tmp_path}/p", f"--web.listen-address={prometheus}"),
    )  # fmt: skip
    processes = [subprocess.Popen(each, stderr=subprocess.DEVNULL) for each in commands]
    try:
        yield server, f"http://{prometheus}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.http.shutdown()
        server.http.server_close()


def ask(url: str, query: str) -> list[Any]:
    try:
        with urllib.request.urlopen(
            f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        ) as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        with error:
            pytest.fail(f"{query}: {error.read().decode()}")
    except OSError:
        return []  # It starts.


def until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_every_panel_shows_something_and_a_page_reaches_the_webhook(running: tuple[Server, str]) -> None:
    server, url = running
    until(lambda: server.steps > 5, "Prometheus does not scrape")
    panels = json.loads((HERE / "dashboards" / "penstock.json").read_text())["panels"]
    queries = [target["expr"].replace("$model", ".*") for panel in panels for target in panel["targets"]]
    assert len(queries) > 12
    for query in queries:
        until(lambda query=query: bool(ask(url, query)), f"nothing to see: {query}")

    def paged() -> bool:
        alerts = [alert for each in server.reported for alert in each["alerts"]]
        return any(
            alert["labels"] == {"alertname": "WorkerCrashed", "model": "m", "severity": "page"}
            for alert in alerts
        )

    until(paged, "no page")
    ours = json.loads(webhook_body([Alert(name="A", severity="page", labels={}, since=1, why="", summary="",
                                          runbook="")]))  # fmt: skip
    theirs = server.reported[0]
    assert set(ours) == set(theirs), "slo.webhook speaks as Alertmanager does"
    assert set(ours["alerts"][0]) == set(theirs["alerts"][0])

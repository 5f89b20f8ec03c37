"""Alerts on their way to a receiver without an Alertmanager, over real sockets."""

import asyncio
import http.server
import io
import json
import threading

import pytest
import uvloop

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.checks import check
from penstock.config.ledger import LedgerConfig
from penstock.config.load import parse_config
from penstock.config.tree import Config, LogConfig, SloConfig
from penstock.errors import ConfigError
from penstock.telemetry import alerting
from penstock.telemetry.alerting import Alert, Webhook
from penstock.telemetry.log import Log
from penstock.telemetry.watch import Watch

SECRET = "T0KEN-of-a-chat"


class Receiver:
    """Answers with these statuses in turn, the last one for ever; `got` are the bodies."""

    def __init__(self, *statuses: int) -> None:
        self.got, left = list[dict](), list(statuses)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(left.pop(0) if len(left) > 1 else left[0])
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{SECRET}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receivers():
    made = []

    def make(*statuses: int) -> Receiver:
        made.append(Receiver(*statuses))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def log():
    return io.StringIO()


def alert(number: int, *, ended: int = 0) -> Alert:
    return Alert(
        name="NoWorkerReady", severity="page", labels={"model": f"m{number}"}, since=1_700_000_000,
        ended=ended, why="no worker of it is ready", summary="A model has no worker.",
        runbook="docs/runbook.md#noworkerready",
    )  # fmt: skip


def reported(url, log, *rounds, until, clock=None):
    """A webhook is told these alerts, one list after the other; runs until `until()`."""
    clock = clock or ManualClock()

    async def main():
        hook = Webhook(url, clock, Log(LogConfig(), clock, stream=log))
        hook.start()
        for alerts in rounds:
            hook.tell(alerts)
        for _ in range(10_000):
            if until():
                break
            await asyncio.sleep(0.001)
        await hook.stop()
        return hook

    return uvloop.run(main())


def test_what_begins_and_ends_is_told_as_alertmanager_does(receivers, log):
    there = receivers(200)
    reported(there.url, log, [alert(1), alert(2, ended=1_700_000_060)], until=lambda: there.got)
    (body,) = there.got
    assert (body["version"], body["status"], body["receiver"]) == ("4", "firing", "penstock")
    fires, over = body["alerts"]
    assert fires["labels"] == {"alertname": "NoWorkerReady", "severity": "page", "model": "m1"}
    assert fires["annotations"]["runbook"] == "docs/runbook.md#noworkerready"
    assert (fires["status"], fires["startsAt"]) == ("firing", "2023-11-14T22:13:20Z")
    assert fires["endsAt"] == "0001-01-01T00:00:00Z"
    assert (over["status"], over["endsAt"]) == ("resolved", "2023-11-14T22:14:20Z")
    assert fires["fingerprint"] != over["fingerprint"]
    assert log.getvalue() == ""


def test_who_cannot_take_them_now_gets_them_again_and_who_refuses_does_not(receivers, log, monkeypatch):
    monkeypatch.setattr(alerting, "PAUSE_S", 0.0)
    away = receivers(503, 500, 429, 204)
    hook = reported(away.url, log, [alert(1)], until=lambda: len(away.got) == 4)
    assert (len(away.got), len(hook._waiting)) == (4, 0)
    assert log.getvalue().count("alerts could not be delivered yet") == 3
    never = receivers(302)
    reported(never.url, log, [alert(1)], until=lambda: never.got)
    assert len(never.got) == 1, "it is not followed, and not asked again"
    assert "slo.webhook refuses alerts" in log.getvalue()
    assert SECRET not in log.getvalue()


def test_what_waits_is_bounded_in_number_and_age(log, monkeypatch):
    clock = ManualClock()
    hook = Webhook("http://127.0.0.1:1/x", clock, Log(LogConfig(), clock, stream=log))
    hook.tell([alert(i) for i in range(alerting.WAITING_MAX + 3)])
    assert next(each.labels["model"] for _, each in hook._waiting) == "m3"
    clock.advance((alerting.OLD_S + 1) * NS_PER_S)
    assert asyncio.run(hook._deliver()) is True
    assert log.getvalue().count("alerts were not delivered to slo.webhook") == 2
    assert 'why="it was away for an hour" alerts=256' in log.getvalue()


@pytest.mark.parametrize("end", [":99999/", "/ü", "..x/", ":x/", f"/{SECRET} b"])
def test_an_address_that_no_check_has_seen_ends_nothing_and_is_not_told(end, log, monkeypatch):
    monkeypatch.setattr(alerting, "PAUSE_S", 0.0)
    said = "alerts could not be delivered yet"
    hook = reported(f"http://{SECRET}{end}", log, [alert(1)], until=lambda: log.getvalue().count(said) > 1)
    assert log.getvalue().count(said) > 1, "it goes on"
    assert len(hook._waiting) == 1
    assert SECRET not in log.getvalue()


def test_a_server_tells_it_what_its_watch_finds(receivers, log, tmp_path):
    there, clock = receivers(200), ManualClock(wall_ns=1_700_000_000 * NS_PER_S)
    config = Config(ledger=LedgerConfig(directory=str(tmp_path)), slo=SloConfig(webhook=there.url))
    page = [b"penstock_ledger_lost_records_total 0\n"]

    async def main():
        watch = Watch(config, clock, Log(LogConfig(), clock, stream=log), lambda: page[0])
        await watch.start()
        watch._evaluate()
        page[0] = b"penstock_ledger_lost_records_total 5\n"
        for _ in range(8):
            clock.advance(60 * NS_PER_S)
            watch._evaluate()
        await watch.stop()

    uvloop.run(main())
    names = [each["labels"]["alertname"] for body in there.got for each in body["alerts"]]
    assert "LedgerLoss" in names


@pytest.mark.parametrize(
    "address",
    [
        *(
            "chat.example",
            "ftp://chat.example/x",
            "http://",
            "http://a b/",
            "http://user:word@chat.example/x",
        ),
        *("http://chat.example:99999/x", "http://chat.example:0/", "http://[zz]/x", "http://chat..example/x"),
        *("http://häuser.example/x", "http://chat.example/ü", "http://chat.example/x#y"),
    ],
)
def test_an_address_that_cannot_be_posted_to_is_refused_by_name(address):
    with pytest.raises(ConfigError, match=r"slo\.webhook"):
        check(parse_config(f"slo: {{webhook: '{address}'}}"))

"""The console over HTTP: its page, its feed, and who may see what. A browser looks at it in tests/console."""

import contextlib
import gzip
import hashlib
import http.client
import json
import re
from pathlib import Path

import pytest

from penstock.config.tree import SloConfig
from penstock.gateway.api import feed as feeds
from penstock.gateway.api.console import STATIC
from penstock.gateway.api.services import KEPT_MAX
from penstock.gateway.identity import api_keys
from penstock.telemetry.alerts import rules

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "console"
ADMIN_KEY = "sk-admin-0123456789"
SCRAPE_KEY = "sk-scrape-0123456789"
PAGE_BYTES_MAX = 300 * 1024


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(feeds, "EVERY_S", 0.02)


@pytest.fixture
def running(start, kit):
    return start(
        kit.replace(kit.make_config(), auth={"admin_keys": (ADMIN_KEY,), "scrape_keys": (SCRAPE_KEY,)})
    )


def fetch(running, path, key="", **headers):
    """The response, its body read."""
    link = http.client.HTTPConnection(running.host, running.port, timeout=20)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    link.request("GET", path, headers=sent | ({"Authorization": f"Bearer {key}"} if key else {}))
    response = link.getresponse()
    response.body = response.read()
    link.close()
    return response


@contextlib.contextmanager
def feed(running, key="", **headers):
    """The feed's events as they come: names and what they say."""
    link = http.client.HTTPConnection(running.host, running.port, timeout=20)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    link.request("GET", "/console/feed", headers=sent | ({"Authorization": f"Bearer {key}"} if key else {}))
    response = link.getresponse()

    def events():
        name = ""
        for line in response:
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield name, json.loads(line[6:])

    try:
        yield response, events()
    finally:
        link.close()


def next_of(events, wanted):
    return next(reported for name, reported in events if name == wanted)


def test_the_start_page_leads_to_the_console(running):
    answer = fetch(running, "/")
    assert (answer.status, answer.headers["location"]) == (302, "/console")


def test_the_page_stands_alone_and_is_small(running):
    answer = fetch(running, "/console")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    page = answer.body.decode()
    assert not re.findall(r"<(?:script|style)[^>]*>[^<]", page), "nothing is inline"
    assert not re.search(r"\son\w+=|style=", page)
    files = re.findall(r'(?:src|href)="(/console/[^"]+)"', page)
    assert [file.partition("?")[0].rpartition("/")[2] for file in files] == ["icon.svg", "app.css", "app.js"]
    total = len(answer.body)
    for file in files:
        found = fetch(running, file, Accept_Encoding="gzip")
        assert found.headers["content-encoding"] == "gzip"
        assert "immutable" in found.headers["cache-control"]
        assert gzip.decompress(found.body) == fetch(running, file).body
        total += len(fetch(running, file).body)
    assert total < PAGE_BYTES_MAX, "even to a browser that takes no gzip"


def test_the_page_keeps_its_key_nowhere_and_takes_nothing_from_elsewhere():
    script = (STATIC / "app.js").read_text() + (STATIC / "app.css").read_text()
    for word in ("localStorage", "sessionStorage", "indexedDB", "document.cookie", "@import", "eval("):
        assert word not in script
    hosts = set(re.findall(r"https?://[\w.-]+", script))
    assert hosts <= {"http://www.w3.org"}, "names of XML, which nobody asks for"


@pytest.mark.parametrize("path", ["/console/app.ts", "/console/../app.py", "/console/manifest.json"])
def test_other_files_are_not_served(running, path):
    assert fetch(running, path).status == 404


def test_the_runbook_is_the_one_of_the_docs_and_has_every_alert(running):
    answer = fetch(running, "/console/runbook.md")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/markdown; charset=utf-8")
    assert answer.headers["cache-control"] == "no-cache"
    text = answer.body.decode()
    assert text == (SOURCES.parent / "docs" / "runbook.md").read_text()
    assert {rule.name for rule in rules(SloConfig())} <= set(re.findall(r"^## (\w+)$", text, re.MULTILINE))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_built_page_belongs_to_these_sources():
    manifest = json.loads((STATIC / "manifest.json").read_text())
    sources = {
        str(path.relative_to(SOURCES)): digest(path)
        for path in sorted(SOURCES.rglob("*"))
        if path.is_file() and "node_modules" not in path.parts
    }
    assert manifest["sources"] == sources, "run `make console` (it takes Node)"
    others = ("manifest.json", "runbook.md")
    built = {path.name: digest(path) for path in STATIC.iterdir() if path.name not in others}
    assert manifest["built"] == built


def test_the_lock_file_names_no_registry():
    text = (SOURCES / "package-lock.json").read_text()
    assert '"resolved"' not in text
    assert "http" not in re.sub(r'"url": "https://[^"]+"', "", text), "only links to those who take donations"


def test_an_admin_sees_the_fleet_and_the_requests(running, kit):
    with feed(running, ADMIN_KEY) as (response, events):
        assert response.headers["content-type"].startswith("text/event-stream")
        hello = next_of(events, "hello")
        assert (hello["role"], hello["ttft_target_ms"]) == ("admin", 500)
        first = next_of(events, "fleet")
        assert first["whole"] is True
        assert first["workers"]["tiny-0"]["state"] == "ready"
        assert first["models"][0]["name"] == "tiny"
        assert first["server"]["processes"] == 1
        raw = kit.Raw(running)
        raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=3), "Connection: close"))
        head = raw.read_all()
        raw.close()
        (ended,) = next_of(events, "requests")
        assert ended["id"] in head.decode()
        assert (ended["model"], ended["worker"], ended["status"]) == ("tiny", "tiny-0", 200)
        assert (ended["generated_tokens"], ended["outcome"], ended["attempts"]) == (3, "length", 1)
        assert 0 <= ended["admitted_ms"] <= ended["dispatched_ms"] <= ended["ttft_ms"] <= ended["total_ms"]
        later = next_of(events, "fleet")
        assert later["whole"] is False


def test_a_later_event_has_what_changed_and_who_left(running):
    with feed(running, ADMIN_KEY) as (_, events):
        assert "tiny-0" in next_of(events, "fleet")["workers"]
        assert next_of(events, "fleet")["workers"] == {}
        running.call(lambda: running.registry.remove("tiny-0"))
        assert any(reported["gone"] == ["tiny-0"] for name, reported in events if name == "fleet")


def test_a_scraper_sees_numbers_and_no_requests(running, kit):
    for key in ("", SCRAPE_KEY):
        with feed(running, key) as (_, events):
            assert next_of(events, "hello")["role"] == "viewer"
            raw = kit.Raw(running)
            raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=2), "Connection: close"))
            raw.read_all()
            raw.close()
            seen = [next(events)[0] for _ in range(2)]
            assert seen == ["fleet", "fleet"]


def test_a_tenant_sees_its_own_part(start, kit, tmp_path):
    acme, globex = (api_keys.issue(0, tenant=name) for name in ("acme", "globex"))
    path = tmp_path / "keys.jsonl"
    api_keys.edit_keys(path, lambda _: ([acme.record, globex.record], None))
    running = start(kit.replace(kit.make_config(), auth={"keys_file": str(path)}))
    with feed(running, acme.key) as (_, events):
        assert next_of(events, "hello")["tenant"] == "acme"
        name, reported = next(events)
        assert (name, reported["tenant"]) == ("own", "acme")
        assert [model["name"] for model in reported["models"]] == ["tiny"]
        for key in (globex.key, acme.key):
            raw = kit.Raw(running)
            raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=2), "Connection: close", key=key))
            assert b" 200 " in raw.read_all()
            raw.close()
        seen = [next(events) for _ in range(1)]
        while seen[-1][0] != "requests":
            seen.append(next(events))
        assert {name for name, _ in seen} == {"own", "requests"}
        assert [ended["tenant"] for ended in seen[-1][1]] == ["acme"]


def test_from_another_machine_and_from_another_site_it_takes_a_key(running):
    with feed(running, X_Forwarded_For="10.0.0.1") as (response, _):
        assert response.status == 401
    with feed(running, Origin="https://evil.example.com") as (response, _):
        assert response.status == 403
    with feed(running, "sk-wrong") as (response, _):
        assert response.status == 401


def test_without_authentication_whoever_is_on_this_machine_is_an_admin(start, kit):
    running = start(kit.replace(kit.make_config(), auth={"keys": (), "disabled": True}))
    with feed(running) as (_, events):
        assert next_of(events, "hello")["role"] == "admin"


def test_watchers_are_bounded_and_go_when_they_leave(running, monkeypatch):
    monkeypatch.setattr(feeds, "WATCHERS_MAX", 1)
    watchers = running.gateway._console.watchers
    with feed(running, ADMIN_KEY) as (response, _):
        assert response.status == 200
        with feed(running, ADMIN_KEY) as (second, _):
            assert second.status == 429
            assert int(second.headers["retry-after"]) >= 1
        assert len(watchers) == 1
    running.wait_until(lambda: not len(watchers))


def test_a_stream_ends_so_that_its_key_is_looked_at_again(running, monkeypatch):
    monkeypatch.setattr(feeds, "WATCH_S_MAX", 0.0)
    with feed(running, ADMIN_KEY) as (_, events):
        assert [name for name, _ in events] == ["hello"]


def test_stopping_ends_the_streams(running):
    with feed(running, ADMIN_KEY) as (_, events):
        next_of(events, "fleet")
        running.begin_stop()
        assert [name for name, _ in events if name not in ("fleet", "requests")] == []


def test_recent_requests_are_for_admins_and_found_by_either_name(running, kit):
    raw = kit.Raw(running)
    raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=2), "Connection: close"))
    answer = json.loads(raw.read_all().partition(b"\r\n\r\n")[2])
    raw.close()
    assert fetch(running, "/admin/requests", kit.KEY).status == 403
    (ended,) = json.loads(fetch(running, "/admin/requests", ADMIN_KEY).body)["requests"]
    assert ended["request_id"] == answer["id"]
    for name in (ended["id"], answer["id"]):
        reported = json.loads(fetch(running, f"/admin/requests/{name}", ADMIN_KEY).body)
        assert reported["request"] == ended
        assert [decision["worker"] for decision in reported["decisions"]] == ["tiny-0"]
        assert reported["decisions"][0]["at_ns"] >= ended["came_ns"]
    moments = [ended[name] for name in ("limits_ms", "admitted_ms", "dispatched_ms", "ttft_ms", "total_ms")]
    assert moments[0] > 0
    assert moments == sorted(moments)
    missing = fetch(running, "/admin/requests/req-unknown", ADMIN_KEY)
    assert (missing.status, json.loads(missing.body)["error"]["code"]) == (404, "unknown_request")


def test_refused_requests_are_listed_without_a_prompt_and_the_ring_is_bounded(running, kit):
    assert running.gateway._services.recent._kept.maxlen == KEPT_MAX
    raw = kit.Raw(running)
    body = kit.chat(max_tokens=10**9, messages=[{"role": "user", "content": "a secret canary"}])
    raw.send(kit.post("/v1/chat/completions", body, "Connection: close"))
    assert b" 400 " in raw.read_all()
    raw.close()
    listed = fetch(running, "/admin/requests", ADMIN_KEY).body
    (ended,) = json.loads(listed)["requests"]
    assert (ended["status"], ended["outcome"]) == (400, "rejected")
    assert "request_id" not in ended
    assert b"canary" not in listed


def test_time_in_queue_counts_the_gateways_own_queue(start, kit):
    """So that queue and prefill are a budget of the time to first token."""
    config = kit.replace(kit.make_config(), admission=kit.NO_PROMISES, auth={"admin_keys": (ADMIN_KEY,)})
    running = start(config, max_running=1, step_s=0.02)
    raws = [kit.Raw(running) for _ in range(8)]
    for raw in raws:
        raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=4), "Connection: close"))
    for raw in raws:
        raw.read_all()
        raw.close()
    ended = running.gateway._services.recent.latest()
    assert len(ended) == 8
    waited = max(ended, key=lambda each: each.queue_ms)
    assert waited.queue_ms > 20, "it waited for another's end, some steps of 20 ms"
    for each in ended:
        assert each.dispatched_ms - each.admitted_ms - 1 <= each.queue_ms <= each.ttft_ms

"""What prompts and answers say is in none of the things that are kept or shown about them. A canary is sent
in many ways, and looked for in logs, metrics, traces, the ledger, decisions, the history, the audit trail,
and in whatever an admin may ask for.
"""

import contextlib
import http.client
import json
import zlib
from itertools import repeat
from pathlib import Path

import msgspec
import pytest

from penstock.config.tree import TracesConfig
from penstock.telemetry import decision_files
from tests.gateway.test_console import feed, next_of
from tests.gateway.test_traces import TRACE, CollectorProcess

ADMIN_KEY = "sk-admin-0123456789"
CANARY = "swordfish-of-the-prompt"
SAID = "marlin-of-the-answer"
KEPT = {".dec", ".hist", ".jsonl", ".sqlite"}
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SHOWN = (
    "/metrics", "/status.json", "/health", "/ready", "/admin/workers", "/admin/history", "/admin/alerts",
    "/admin/audit", "/admin/requests", "/admin/tenants", "/admin/keys", "/admin/workers/tiny-0/history",
    "/admin/workers/tiny-0/log",
)  # fmt: skip


def unpacked(data: bytes) -> bytes:
    """What a file holds, also what is compressed in it, wherever that begins."""
    found = [data]
    for level in (b"\x78\x01", b"\x78\x9c"):
        at = data.find(level)
        while at >= 0:
            with contextlib.suppress(zlib.error):
                found.append(zlib.decompressobj().decompress(data[at:]))
            at = data.find(level, at + 1)
    return b"\n".join(found)


def ask(running, path, body=None, key=ADMIN_KEY) -> tuple[int, dict[str, str], str]:
    link = http.client.HTTPConnection(running.host, running.port, timeout=20)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "traceparent": PARENT}
    link.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
    response = link.getresponse()
    found = response.status, dict(response.headers), response.read().decode()
    link.close()
    return found


def said_in(kit) -> list[tuple[str, dict]]:
    """Requests that say it: answered, streamed, with tools, refused for what they are, for no model."""
    message = {"role": "user", "content": CANARY}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": CANARY, "parameters": {"type": "object"}},
    }
    chat = kit.chat(max_tokens=3, messages=[{"role": "system", "content": CANARY}, message])
    return [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", chat | {"tools": [tool], "stop": [CANARY], "user": "u-1"}),
        ("/v1/completions", {"model": "tiny", "prompt": CANARY, "max_tokens": 3, "suffix": None}),
        ("/v1/responses", {"model": "tiny", "input": CANARY, "max_output_tokens": 3, "store": False}),
        ("/v1/tokenize", {"model": "tiny", "prompt": CANARY}),
        ("/v1/chat/completions", chat | {"max_tokens": 10**9}),
        ("/v1/chat/completions", chat | {"temperature": CANARY}),
        ("/v1/chat/completions", chat | {"messages": [message | {"role": CANARY}]}),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_schema", "json_schema": CANARY}}),
        ("/v1/chat/completions", chat | {"model": "none"}),
        ("/v1/completions", {"model": "tiny", "prompt": [CANARY, 7]}),
    ]


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_text_of_a_prompt_or_an_answer_is_kept_or_shown(start, kit, tmp_path, monkeypatch, form):
    monkeypatch.setattr(decision_files, "FLUSH_S", 0.02)
    collector = CollectorProcess(tmp_path)
    try:
        look_everywhere(start, kit, tmp_path, form, collector)
    finally:
        collector.close()


def look_everywhere(start, kit, tmp_path: Path, form: str, collector: CollectorProcess) -> None:
    config = kit.replace(
        kit.make_config(),
        auth={"admin_keys": (ADMIN_KEY,)},
        log={"format": form, "level": "debug"},
        ledger={"directory": str(tmp_path / "kept")},
    )
    config = msgspec.structs.replace(config, traces=TracesConfig(endpoint=collector.endpoint))
    running = start(config, lambda _: repeat(SAID), max_running=4)
    statuses, ids, answers = set(), [], ""
    for path, body in said_in(kit):
        status, headers, answer = ask(running, path, body, kit.KEY)
        statuses.add(status)
        ids.append(headers["x-request-id"])
        answers += answer
    running.call(lambda: running.backend.lose_worker())
    assert statuses == {200, 400, 404}
    assert SAID in answers, "the answers had it"
    seen = {path: ask(running, path)[2] for path in SHOWN}
    for name in ids:
        seen[f"/admin/requests/{name}"] = ask(running, f"/admin/requests/{name}")[2]
    with feed(running, ADMIN_KEY) as (_, events):
        seen["feed"] = json.dumps([next_of(events, "fleet"), next_of(events, "requests")])
    seen["spans"] = json.dumps(collector.tree(TRACE, "chat tiny", "text_completion tiny", "decode"))
    tokens = running.tokenizer.encode(CANARY)
    running.stop()
    seen["log"] = running.log_text.getvalue()
    for path in (tmp_path / "kept").rglob("*"):
        if path.is_file():
            seen[path.name] = unpacked(path.read_bytes()).decode("latin-1")
    kept = {name: text for name, text in seen.items() if Path(name).suffix in KEPT}
    assert {Path(name).suffix for name in kept} == KEPT
    assert all("tiny" in text for name, text in kept.items() if not name.endswith(".jsonl")), "they were read"
    as_tokens = (json.dumps(tokens)[1:-1], bytes(tokens).decode("latin-1"))
    for name, text in seen.items():
        for secret in (CANARY, SAID, *as_tokens):
            assert secret not in text, f"{secret!r} is in {name}"
    check_log(seen["log"], form, ids)


def check_log(text: str, form: str, ids: list[str]) -> None:
    """Every request has a line with its id and its trace's."""
    if form == "text":
        assert all(f"request_id={name} trace_id={TRACE}" in text for name in ids)
        return
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["trace_id"] for line in lines if line.get("request_id") in ids} == {TRACE}
    assert {line.get("request_id") for line in lines} >= set(ids)

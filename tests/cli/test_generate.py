"""`penstock generate`: every line of a file is answered, without a server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.config.checkpoints import resolve

MODEL = str(resolve("penstock-demo-mini"))
QUICK = ("--model", MODEL, "--name", "gpt-4o-mini", "--threads", "1", "--kv-memory", "16M")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}

pytestmark = pytest.mark.timeout(180)


def batch_line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    if "prompt" not in body:
        body = {"messages": QUESTION} | body
    return {
        "custom_id": custom_id, "method": "POST", "url": url,
        "body": {"model": "gpt-4o-mini", "temperature": 0} | body,
    }  # fmt: skip


FORM = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}}
GOOD = [
    batch_line("chat", max_completion_tokens=12, logprobs=True, top_logprobs=2),
    batch_line("shaped", max_tokens=40, response_format=FORM),
    batch_line("plain", "/v1/completions", prompt="Once", n=2, seed=3, temperature=1, logprobs=1),
    {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 2},
    {"custom_id": "talk", "messages": QUESTION, "temperature": 0, "max_tokens": 12},
    {"custom_id": "drawn", "prompt_token_ids": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "logprobs": 0},
]  # fmt: skip
BAD = [
    (batch_line("other model", model="gpt-5"), 404, "model"),
    (batch_line("tools", tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (batch_line("streams", stream=True), 400, "stream"),
    (batch_line("unknown", tempratur=1), 400, "tempratur"),
    (batch_line("elsewhere", "/v1/audio/speech"), 400, "url"),
    (batch_line("forwarded", service_tier="flex"), 400, "service_tier"),
    (batch_line("long", "/v1/completions", prompt="word " * 5000), 400, "prompt"),
    (batch_line("chat"), 400, "custom_id"),
    ({"custom_id": "hot", "prompt": "a", "temperature": -1}, 400, "temperature"),
    ({"custom_id": "what", "prompt": "a", "no_such": 1}, 400, "no_such"),
    ({"custom_id": "nothing"}, 400, "prompt"),
]


def written(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        each = json.loads(line)
        found.setdefault(each["custom_id"], each)
    return found


def test_a_file_of_all_kinds_of_lines_and_its_continuation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(line) for line in [*GOOD, *(bad for bad, _, _ in BAD)]]
    lines[3:3] = ["", "{not JSON", '["a list"]']
    file, out = tmp_path / "ask.jsonl", tmp_path / "ask.out.jsonl"
    file.write_text("\n".join(lines) + "\n")
    assert main(["generate", str(file), *QUICK]) == 1
    assert f"6 answered, {len(BAD) + 2} failed, 0 done before: {out}" in capsys.readouterr().err
    found = written(out)

    chat = found["chat"]["response"]
    assert chat["status_code"] == 200
    assert "Paris" in chat["body"]["choices"][0]["message"]["content"]
    assert (chat["body"]["object"], chat["body"]["model"]) == ("chat.completion", "gpt-4o-mini")
    (shown, *_) = chat["body"]["choices"][0]["logprobs"]["content"]
    assert shown["top_logprobs"][0]["token"] == shown["token"]
    assert len(shown["top_logprobs"]) == 2
    assert isinstance(
        json.loads(found["shaped"]["response"]["body"]["choices"][0]["message"]["content"])["ok"], bool
    )
    plain = found["plain"]["response"]["body"]
    assert [choice["index"] for choice in plain["choices"]] == [0, 1]
    usage = plain["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found["line-7"]["text"] == " Paris."
    assert found["talk"]["text"] == chat["body"]["choices"][0]["message"]["content"]
    assert len(found["drawn"]["token_ids"]) == len(found["drawn"]["token_logprobs"]) == 5

    errors = [json.loads(line) for line in out.read_text().splitlines()]
    for i, (line, status, param) in enumerate(BAD, start=len(GOOD) + 4):
        taken = line.get("custom_id") == "chat"
        called = f"line-{i}" if taken else line.get("custom_id")
        (each,) = (each for each in errors if each["custom_id"] == called)
        error = each["error"] or each["response"]["body"]["error"]
        assert (each.get("status_code") or each["response"]["status_code"], error["param"]) == (status, param)
    assert {"line-5", "line-6"} <= found.keys()

    # Cut in the middle of a line, as by a crash: the next run answers that line and those behind it again.
    whole = out.read_bytes()
    kept = [line for line in whole.splitlines(keepends=True) if b'"drawn"' not in line]
    (drawn,) = (line for line in whole.splitlines(keepends=True) if b'"drawn"' in line)
    out.write_bytes(b"".join(kept) + drawn[:20])
    assert main(["generate", str(file), *QUICK]) == 0
    assert f"1 answered, 0 failed, {len(lines) - 2} done before" in capsys.readouterr().err
    assert out.read_bytes() == b"".join(kept) + drawn, "to the last byte"


def test_from_standard_input_to_standard_output_and_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "generate", "-", *QUICK]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    for i in range(40):
        line = {"prompt": f"Number {i}", "max_tokens": 1 if i == 0 else 3000, "ignore_eos": True}
        process.stdin.write(json.dumps(line) + "\n")
    process.stdin.close()
    first = json.loads(process.stdout.readline())
    assert (first["custom_id"], first["finish_reason"]) == ("line-1", "length")
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.returncode == 130
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["no-such.jsonl"], "no-such.jsonl: No such file"),
        (["{file}", "-o", "/no/such/place.jsonl"], "there is no directory"),
        (["{file}", "-o", "{file}"], "is there, and no answers of this command"),
        (["{file}", "--lora", "fr"], "--lora: expected NAME=PATH"),
        (["{file}", "--model", "no/such"], "no/such: no such directory"),
    ],
)
def test_wrong_usage(
    argv: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ask.jsonl"
    file.write_text(json.dumps(GOOD[3]) + "\n")
    assert main(["generate", *(word.format(file=file) for word in argv)]) == 2
    assert complaint in capsys.readouterr().err
